//! Memory encryption of this host. Each host uses its own key: zeros written by one host to a
//! shared device read as noise on another, which treats the slice as not scrubbed.

use std::{fs::File, os::unix::fs::FileExt as _};

use super::{Finding, Machine};

/// Register by which firmware activates TME (Intel SDM, volume 4: IA32_TME_ACTIVATE).
const IA32_TME_ACTIVATE: u64 = 0x982;
/// Bit: TME is enabled.
const TME_ENABLED: u64 = 1 << 1;
/// Bits with the number of key identifier bits of TME-MK.
const TME_KEYID_BITS: u64 = 0xf << 32;
/// Attributes of AMD's secure processor that show whether TSME is active.
const SECURE_PROCESSORS: &str = "bus/pci/drivers/ccp";

/// State of one kind of encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    None,
    /// Possibly active, with the reason why it is unknown and how to determine it.
    Possible(&'static str, &'static str),
    /// Active, with the setting that disables it.
    Active(&'static str, &'static str),
}

/// Reports memory encryption as active, possible or none.
pub(super) fn of_memory(machine: &Machine) -> Finding {
    let cpuinfo = machine.proc.text("cpuinfo").unwrap_or_default();
    let states = [tsme(machine, &cpuinfo), sme(machine, &cpuinfo), tme(machine, &cpuinfo)];
    let active = states.iter().find(|state| matches!(state, State::Active(..)));
    let worst = active.or_else(|| states.iter().find(|state| matches!(state, State::Possible(..))));
    match worst {
        Some(State::Active(message, remedy)) => Finding::problem(
            "encryption",
            format!(
                "{message} is active: zeros that another host wrote to shared CXL memory read as noise here"
            ),
            *remedy,
        ),
        Some(State::Possible(message, remedy)) => {
            Finding { fix: Some((*remedy).to_owned()), ..Finding::passed("encryption", *message) }
        }
        _ => Finding::passed("encryption", "none: this host does not encrypt its memory"),
    }
}

/// Checks AMD's transparent encryption, which is enabled by firmware and not listed by processors.
fn tsme(machine: &Machine, cpuinfo: &str) -> State {
    let devices = machine.sys.numbered(SECURE_PROCESSORS, "").unwrap_or_default();
    let status = |device: &String| machine.sys.text(format!("{SECURE_PROCESSORS}/{device}/tsme_status")).ok();
    let statuses: Vec<String> = devices.iter().filter_map(status).collect();
    let is_amd = cpuinfo.contains("AuthenticAMD") && !has_flag(cpuinfo, "hypervisor");
    if statuses.iter().any(|status| status == "1") {
        State::Active("AMD TSME", "switch TSME off in the firmware of all hosts that share the device")
    } else if statuses.is_empty() && is_amd {
        State::Possible(
            "possible: AMD TSME may be active; the driver ccp, which shows it, is not loaded or too old",
            "`modprobe ccp`, and repeat; or check in the firmware that TSME is off",
        )
    } else {
        State::None
    }
}

/// Checks AMD's encryption by the kernel. Linux lists the flag only where firmware has enabled it.
fn sme(machine: &Machine, cpuinfo: &str) -> State {
    let remedy = "`mem_encrypt=off` on the kernel's command line of all hosts that share the device";
    let line = machine.proc.text("cmdline").unwrap_or_default();
    let chosen = line.split_whitespace().rev().find_map(|word| word.strip_prefix("mem_encrypt="));
    match (has_flag(cpuinfo, "sme"), chosen) {
        (false, _) | (true, Some("off")) => State::None,
        (true, Some("on")) => State::Active("AMD SME", remedy),
        (true, _) => {
            State::Possible("possible: AMD SME is enabled, and some kernels use it by default", remedy)
        }
    }
}

/// Checks Intel's encryption. Processors list the flag whether firmware has activated it or not.
fn tme(machine: &Machine, cpuinfo: &str) -> State {
    let remedy =
        "switch TME off in the firmware of all hosts that share the device, or exclude CXL memory from it";
    if !has_flag(cpuinfo, "tme") {
        return State::None;
    }
    match read_register(machine, IA32_TME_ACTIVATE) {
        Some(value) if value & TME_ENABLED == 0 => State::None,
        Some(value) if value & TME_KEYID_BITS == 0 => State::Active("Intel TME", remedy),
        Some(_) => State::Active("Intel TME-MK", remedy),
        None => State::Possible(
            "possible: the processor has Intel TME, and whether firmware activated it cannot be read",
            "`modprobe msr`, and repeat as root; or check in the firmware that TME is off",
        ),
    }
}

fn has_flag(cpuinfo: &str, flag: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|word| word == flag))
}

fn read_register(machine: &Machine, register: u64) -> Option<u64> {
    let mut value = [0; 8];
    File::open(machine.dev.join("cpu/0/msr")).ok()?.read_exact_at(&mut value, register).ok()?;
    Some(u64::from_le_bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::{Sysfs, fake::FakeSysfs};

    fn machine(tree: &FakeSysfs) -> Machine {
        Machine {
            sys: tree.sysfs.clone(),
            proc: Sysfs::at(tree.path("proc")),
            dev: tree.path("dev"),
            modules: Sysfs::at(tree.path("modules")),
        }
    }

    /// Returns the result on a machine with these files, as text.
    fn result(files: &[(&str, &str)]) -> (bool, String) {
        let tree = FakeSysfs::new(files);
        let Finding { ok, message, fix, .. } = of_memory(&machine(&tree));
        assert_eq!(fix.is_some(), !message.starts_with("none"), "{message}");
        (ok, message)
    }

    fn cpuinfo(vendor: &str, flags: &str) -> String {
        format!("processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} sse2\n")
    }

    #[test]
    fn host_without_memory_encryption_passes() {
        let intel = cpuinfo("GenuineIntel", "tme_not");
        let virtual_amd = cpuinfo("AuthenticAMD", "hypervisor");
        for info in [&*intel, &*virtual_amd, ""] {
            assert_eq!(
                result(&[("proc/cpuinfo", info)]),
                (true, "none: this host does not encrypt its memory".into())
            );
        }
    }

    #[test]
    fn amd_transparent_encryption_is_read_from_driver() {
        let info = cpuinfo("AuthenticAMD", "");
        let status = "bus/pci/drivers/ccp/0000:22:00.1/tsme_status";
        let (ok, message) = result(&[("proc/cpuinfo", &info), (status, "1")]);
        assert!(!ok && message.starts_with("AMD TSME is active"), "{message}");
        assert!(result(&[("proc/cpuinfo", &info), (status, "0")]).1.starts_with("none"));
        let (ok, message) = result(&[("proc/cpuinfo", &info)]);
        assert!(ok && message.starts_with("possible: AMD TSME"), "{message}");
    }

    #[test]
    fn kernel_encryption_follows_the_command_line() {
        let info = cpuinfo("AuthenticAMD", "sme");
        let status = ("bus/pci/drivers/ccp/0000:22:00.1/tsme_status", "0");
        for (line, ok, begin) in [
            ("quiet mem_encrypt=on", false, "AMD SME is active"),
            ("mem_encrypt=on mem_encrypt=off", true, "none"),
            ("quiet", true, "possible: AMD SME"),
        ] {
            let register_result = result(&[("proc/cpuinfo", &info), status, ("proc/cmdline", line)]);
            assert!(
                register_result.0 == ok && register_result.1.starts_with(begin),
                "{line}: {register_result:?}"
            );
        }
    }

    #[test]
    fn intel_encryption_is_read_from_its_register() {
        let tree =
            FakeSysfs::new(&[("proc/cpuinfo", &cpuinfo("GenuineIntel", "tme")), ("dev/cpu/0/msr", "")]);
        let register_result = |value: u64| {
            let register = File::options().write(true).open(tree.path("dev/cpu/0/msr")).unwrap();
            register.write_all_at(&value.to_le_bytes(), IA32_TME_ACTIVATE).unwrap();
            let Finding { ok, message, .. } = of_memory(&machine(&tree));
            (ok, message)
        };
        let (ok, message) = result(&[("proc/cpuinfo", &cpuinfo("GenuineIntel", "tme"))]);
        assert!(ok && message.starts_with("possible: the processor has Intel TME"), "{message}");
        assert!(register_result(1).1.starts_with("none"), "locked, and not enabled");
        let (ok, message) = register_result(3);
        assert!(!ok && message.starts_with("Intel TME is active"), "{message}");
        assert!(register_result(3 | 6 << 32).1.starts_with("Intel TME-MK is active"));
    }
}
