//! Generates rack.toml for the manager, and the configuration files of the agents.

use std::path::Path;

use super::plan::{Device, RackPlan};

/// Name in the certificate of the manager.
pub(super) const MANAGER_NAME: &str = "pool-manager";
/// Name in the certificate of the operator, which has the scheduler and admin roles.
pub(super) const OPERATOR_NAME: &str = "operator";
/// Address of this machine in the network of the hosts.
const MACHINE_ADDRESS: &str = "10.0.2.2";
/// Number of cores declared for a host. Larger than the real number, because tests start more VMs
/// than the host could run.
const DECLARED_CORES: u32 = 64;
/// Local memory declared for a host, in MiB. Larger than the real memory, like [`DECLARED_CORES`].
const DECLARED_LOCAL_MEMORY_MIB: u32 = 64 << 10;
/// Timeout of the fence command, in seconds.
const FENCE_TIMEOUT_S: u32 = 60;

/// Returns the content of rack.toml, which must be placed beside the directory `certificates`.
/// `rack` is the directory of the hosts' sockets.
pub(super) fn rack_toml(plan: &RackPlan, port: u16, rack: &Path) -> String {
    let never = || "\"never\"".to_owned();
    let fence_after = plan.fence_after_s.map_or_else(never, |seconds| seconds.to_string());
    let mut text = format!(
        "[manager]\nlisten = \"127.0.0.1:{port}\"\nstore = \"store\"\n\
         [lease]\nttl_s = {}\nfence_after_s = {fence_after}\n\
         [fence]\ncommand = [{:?}, {rack:?}, \"{{host}}\"]\nwithin_s = {FENCE_TIMEOUT_S}\n\
         [tls]\ncertificate = \"certificates/{MANAGER_NAME}.pem\"\nkey = \"certificates/{MANAGER_NAME}.key\"\n\
         client_ca = \"certificates/ca.pem\"\nschedulers = [\"{OPERATOR_NAME}\"]\nadmins = [\"{OPERATOR_NAME}\"]\n{}",
        plan.lease_ttl_s, plan.programs.power_off, plan.rack_toml_extra,
    );
    let names: Vec<String> = (0..plan.hosts.devices.len()).map(|n| format!("emc{n}")).collect();
    let devices = names.iter().zip(&plan.hosts.devices).map(|(name, device)| emc_section(name, device));
    text.extend(devices);
    let host = |host| {
        format!(
            "[[host]]\nname = {host:?}\ncores = {DECLARED_CORES}\nlocal_mib = {DECLARED_LOCAL_MEMORY_MIB}\nemcs = {names:?}\n"
        )
    };
    text.extend(plan.hosts.names().into_iter().map(host));
    text
}

fn emc_section(name: &str, device: &Device) -> String {
    format!(
        "[[emc]]\nname = {name:?}\ndriver = \"shared-dax\"\nslices = {}\nserial = \"{:#x}\"\npath = {name:?}\n",
        device.gib, device.serial
    )
}

/// Returns the configuration of an agent, which must be placed beside the host's certificate.
pub(super) fn host_toml(plan: &RackPlan, port: u16, host: &str) -> String {
    format!(
        "[agent]\nhost = {host:?}\nmanager = \"https://{MACHINE_ADDRESS}:{port}\"\nruntime_dir = \"/run/tarn-agent\"\n{}\
         [tls]\nca = \"ca.pem\"\ncertificate = \"{host}.pem\"\nkey = \"{host}.key\"\nserver_name = \"{MANAGER_NAME}\"\n\
         [backend]\nkind = \"{}\"\n{}",
        plan.agent_toml_extra, plan.backend, plan.backend_toml_extra
    )
}

#[cfg(test)]
mod tests {
    use toml::Table;

    use super::*;
    use crate::rack::{Plan, Programs};

    fn plan() -> RackPlan {
        let device = |serial| Device { serial, gib: 4, is_aligned: true };
        let program = |name: &str| Path::new("/bin").join(name);
        let programs = Programs {
            manager: program("manager"),
            agent: program("agent"),
            tarn: program("tarn"),
            power_off: program("off"),
        };
        RackPlan::new(Plan::new(2, vec![device(1), device(0x2f)]), programs, "memory_block")
    }

    #[test]
    fn rack_toml_lists_emcs_hosts_and_fence_command() {
        let parsed: Table = rack_toml(&plan(), 9750, Path::new("/the rack")).parse().unwrap();
        let fence: Vec<_> = parsed["fence"]["command"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap())
            .collect();
        assert_eq!(fence, ["/bin/off", "/the rack", "{host}"]);
        assert_eq!(parsed["lease"]["fence_after_s"].as_str(), Some("never"));
        let emcs = parsed["emc"].as_array().unwrap();
        assert_eq!((emcs[1]["serial"].as_str(), emcs[1]["slices"].as_integer()), (Some("0x2f"), Some(4)));
        assert_eq!(parsed["host"].as_array().unwrap()[1]["emcs"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn host_toml_names_host_and_manager_address() {
        let parsed: Table = host_toml(&plan(), 9750, "h1").parse().unwrap();
        assert_eq!(
            (parsed["agent"]["host"].as_str(), parsed["tls"]["key"].as_str()),
            (Some("h1"), Some("h1.key"))
        );
        assert_eq!(parsed["agent"]["manager"].as_str(), Some("https://10.0.2.2:9750"));
        assert_eq!(parsed["backend"]["kind"].as_str(), Some("memory_block"));
    }
}
