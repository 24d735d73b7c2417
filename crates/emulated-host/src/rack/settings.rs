//! rack.toml for the manager outside, and each host's settings for the agents inside. What the keys mean is the programs'.

use std::path::Path;

use super::{plan::Device, whole::RackPlan};

/// The name in the manager's certificate.
pub(super) const MANAGER: &str = "manager";
/// The name of whoever schedules and administers.
pub(super) const OPERATOR: &str = "operator";
/// This machine, as hosts see it.
const MACHINE: &str = "10.0.2.2";
/// What a host has for VMs; more than there is, as tests start more than fits.
const CORES: u32 = 64;
const LOCAL_MIB: u32 = 64 << 10;
/// How long the command that cuts a host's power may take, in seconds.
const FENCE_WITHIN_S: u32 = 60;

/// rack.toml, in a folder with `certificates`; `rack` is where the hosts' sockets are.
pub(super) fn rack_toml(plan: &RackPlan, port: u16, rack: &Path) -> String {
    let never = || "\"never\"".to_owned();
    let fence_after = plan.fence_after_s.map_or_else(never, |seconds| seconds.to_string());
    let mut text = format!(
        "[manager]\nlisten = \"127.0.0.1:{port}\"\nstore = \"store\"\n\
         [lease]\nttl_s = {}\nfence_after_s = {fence_after}\n\
         [fence]\ncommand = [{:?}, {rack:?}, \"{{host}}\"]\nwithin_s = {FENCE_WITHIN_S}\n\
         [tls]\ncertificate = \"certificates/{MANAGER}.pem\"\nkey = \"certificates/{MANAGER}.key\"\n\
         client_ca = \"certificates/ca.pem\"\nschedulers = [\"{OPERATOR}\"]\nadmins = [\"{OPERATOR}\"]\n{}",
        plan.lease_ttl_s, plan.programs.power_off, plan.more,
    );
    let names: Vec<String> = (0..plan.hosts.devices.len()).map(|n| format!("emc{n}")).collect();
    let devices = names.iter().zip(&plan.hosts.devices).map(|(name, device)| emc(name, device));
    text.extend(devices);
    let host = |host| {
        format!("[[host]]\nname = {host:?}\ncores = {CORES}\nlocal_mib = {LOCAL_MIB}\nemcs = {names:?}\n")
    };
    text.extend(plan.hosts.names().into_iter().map(host));
    text
}

fn emc(name: &str, device: &Device) -> String {
    format!(
        "[[emc]]\nname = {name:?}\ndriver = \"shared-dax\"\nslices = {}\nserial = \"{:#x}\"\npath = {name:?}\n",
        device.gib, device.serial
    )
}

/// A host's settings, beside its certificate.
pub(super) fn host_toml(plan: &RackPlan, port: u16, host: &str) -> String {
    format!(
        "[agent]\nhost = {host:?}\nmanager = \"https://{MACHINE}:{port}\"\nruntime_dir = \"/run/tarn-agent\"\n{}\
         [tls]\nca = \"ca.pem\"\ncertificate = \"{host}.pem\"\nkey = \"{host}.key\"\nserver_name = \"{MANAGER}\"\n\
         [backend]\nkind = \"{}\"\n{}",
        plan.agents_more, plan.backend, plan.backend_more
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
    fn the_manager_is_told_of_each_device_each_host_and_how_to_stop_one() {
        let told: Table = rack_toml(&plan(), 9750, Path::new("/the rack")).parse().unwrap();
        let fence: Vec<_> =
            told["fence"]["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
        assert_eq!(fence, ["/bin/off", "/the rack", "{host}"]);
        assert_eq!(told["lease"]["fence_after_s"].as_str(), Some("never"));
        let emcs = told["emc"].as_array().unwrap();
        assert_eq!((emcs[1]["serial"].as_str(), emcs[1]["slices"].as_integer()), (Some("0x2f"), Some(4)));
        assert_eq!(told["host"].as_array().unwrap()[1]["emcs"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn a_host_is_told_who_it_is_and_where_the_manager_is_as_it_sees_it() {
        let told: Table = host_toml(&plan(), 9750, "h1").parse().unwrap();
        assert_eq!(
            (told["agent"]["host"].as_str(), told["tls"]["key"].as_str()),
            (Some("h1"), Some("h1.key"))
        );
        assert_eq!(told["agent"]["manager"].as_str(), Some("https://10.0.2.2:9750"));
        assert_eq!(told["backend"]["kind"].as_str(), Some("memory_block"));
    }
}
