//! Check for memory encryption. Each host encrypts with a different key. Zeros that one host writes
//! to a shared device therefore read as noise on another host, which rejects the slice as not zero.

use std::{fs::File, os::unix::fs::FileExt as _};

use super::{Finding, Machine};

/// Address of the model-specific register (MSR) in which firmware enables Intel TME (Intel SDM,
/// volume 4: IA32_TME_ACTIVATE).
const IA32_TME_ACTIVATE: u64 = 0x982;
/// Bit of IA32_TME_ACTIVATE that is set if TME is enabled.
const TME_ENABLED: u64 = 1 << 1;
/// Bits of IA32_TME_ACTIVATE with the number of key identifier bits; nonzero if TME-MK is enabled.
const TME_KEYID_BITS: u64 = 0xf << 32;
/// Directory of AMD's secure processors in sysfs; their file `tsme_status` shows whether AMD TSME
/// is active.
const SECURE_PROCESSORS: &str = "bus/pci/drivers/ccp";

/// State of one encryption feature of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EncryptionState {
    None,
    /// Encryption may be active. Contains the reason why the state is unknown, and advice on how to
    /// determine it.
    Possible(&'static str, &'static str),
    /// Encryption is active. Contains the name of the feature, and advice on how to disable it.
    Active(&'static str, &'static str),
}

/// Reports whether memory encryption is active, possible or off. Only active encryption is a
/// problem.
pub(super) fn check_memory(machine: &Machine) -> Finding {
    let cpuinfo = machine.proc.text("cpuinfo").unwrap_or_default();
    let states = [check_tsme(machine, &cpuinfo), check_sme(machine, &cpuinfo), check_tme(machine, &cpuinfo)];
    let active = states.iter().find(|state| matches!(state, EncryptionState::Active(..)));
    let worst = active.or_else(|| states.iter().find(|state| matches!(state, EncryptionState::Possible(..))));
    match worst {
        Some(EncryptionState::Active(message, remedy)) => Finding::problem(
            "encryption",
            format!(
                "{message} is active: zeros that another host writes to shared CXL memory read as noise on this host"
            ),
            *remedy,
        ),
        Some(EncryptionState::Possible(message, remedy)) => {
            Finding { fix: Some((*remedy).to_owned()), ..Finding::passed("encryption", *message) }
        }
        _ => Finding::passed("encryption", "none: this host does not encrypt its memory"),
    }
}

/// Checks AMD TSME (transparent SME). Firmware enables it, and /proc/cpuinfo does not show it.
fn check_tsme(machine: &Machine, cpuinfo: &str) -> EncryptionState {
    let devices = machine.sys.numbered_names(SECURE_PROCESSORS, "").unwrap_or_default();
    let status = |device: &String| machine.sys.text(format!("{SECURE_PROCESSORS}/{device}/tsme_status")).ok();
    let statuses: Vec<String> = devices.iter().filter_map(status).collect();
    let is_amd = cpuinfo.contains("AuthenticAMD") && !has_flag(cpuinfo, "hypervisor");
    if statuses.iter().any(|status| status == "1") {
        EncryptionState::Active("AMD TSME", "disable TSME in the firmware of all hosts that share the device")
    } else if statuses.is_empty() && is_amd {
        EncryptionState::Possible(
            "possible: AMD TSME may be active, but the driver ccp, which reports it, is not loaded or too old",
            "run `modprobe ccp` and repeat this command, or check in the firmware that TSME is off",
        )
    } else {
        EncryptionState::None
    }
}

/// Checks AMD SME, by which the kernel encrypts its memory. Linux shows the flag `sme` only if
/// firmware has enabled SME.
fn check_sme(machine: &Machine, cpuinfo: &str) -> EncryptionState {
    let remedy = "add `mem_encrypt=off` to the kernel command line of all hosts that share the device";
    let line = machine.proc.text("cmdline").unwrap_or_default();
    let setting = line.split_whitespace().rev().find_map(|word| word.strip_prefix("mem_encrypt="));
    match (has_flag(cpuinfo, "sme"), setting) {
        (false, _) | (true, Some("off")) => EncryptionState::None,
        (true, Some("on")) => EncryptionState::Active("AMD SME", remedy),
        (true, _) => EncryptionState::Possible(
            "possible: firmware enables AMD SME, and some kernels use it by default",
            remedy,
        ),
    }
}

/// Checks Intel TME. The flag `tme` only shows that the processor supports TME; an MSR shows
/// whether firmware has enabled it.
fn check_tme(machine: &Machine, cpuinfo: &str) -> EncryptionState {
    let remedy =
        "disable TME in the firmware of all hosts that share the device, or exclude CXL memory from TME";
    if !has_flag(cpuinfo, "tme") {
        return EncryptionState::None;
    }
    match read_register(machine, IA32_TME_ACTIVATE) {
        Some(value) if value & TME_ENABLED == 0 => EncryptionState::None,
        Some(value) if value & TME_KEYID_BITS == 0 => EncryptionState::Active("Intel TME", remedy),
        Some(_) => EncryptionState::Active("Intel TME-MK", remedy),
        None => EncryptionState::Possible(
            "possible: the processor supports Intel TME, but its MSR IA32_TME_ACTIVATE cannot be read",
            "run `modprobe msr` and repeat this command as root, or check in the firmware that TME is off",
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

    /// Checks a machine with these files. Returns whether the check passed, and its message.
    fn result(files: &[(&str, &str)]) -> (bool, String) {
        let tree = FakeSysfs::new(files);
        let Finding { ok, message, fix, .. } = check_memory(&machine(&tree));
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
    fn tsme_state_is_read_from_the_ccp_driver() {
        let info = cpuinfo("AuthenticAMD", "");
        let status = "bus/pci/drivers/ccp/0000:22:00.1/tsme_status";
        let (ok, message) = result(&[("proc/cpuinfo", &info), (status, "1")]);
        assert!(!ok && message.starts_with("AMD TSME is active"), "{message}");
        assert!(result(&[("proc/cpuinfo", &info), (status, "0")]).1.starts_with("none"));
        let (ok, message) = result(&[("proc/cpuinfo", &info)]);
        assert!(ok && message.starts_with("possible: AMD TSME"), "{message}");
    }

    #[test]
    fn sme_state_is_read_from_the_kernel_command_line() {
        let info = cpuinfo("AuthenticAMD", "sme");
        let status = ("bus/pci/drivers/ccp/0000:22:00.1/tsme_status", "0");
        for (line, ok, begin) in [
            ("quiet mem_encrypt=on", false, "AMD SME is active"),
            ("mem_encrypt=on mem_encrypt=off", true, "none"),
            ("quiet", true, "possible: firmware enables AMD SME"),
        ] {
            let (passed, message) = result(&[("proc/cpuinfo", &info), status, ("proc/cmdline", line)]);
            assert!(passed == ok && message.starts_with(begin), "{line}: {passed}, {message}");
        }
    }

    #[test]
    fn tme_state_is_read_from_its_msr() {
        let tree =
            FakeSysfs::new(&[("proc/cpuinfo", &cpuinfo("GenuineIntel", "tme")), ("dev/cpu/0/msr", "")]);
        let register_result = |value: u64| {
            let register = File::options().write(true).open(tree.path("dev/cpu/0/msr")).unwrap();
            register.write_all_at(&value.to_le_bytes(), IA32_TME_ACTIVATE).unwrap();
            let Finding { ok, message, .. } = check_memory(&machine(&tree));
            (ok, message)
        };
        let (ok, message) = result(&[("proc/cpuinfo", &cpuinfo("GenuineIntel", "tme"))]);
        assert!(ok && message.starts_with("possible: the processor supports Intel TME"), "{message}");
        assert!(register_result(1).1.starts_with("none"), "bit 0 locks the register and does not enable TME");
        let (ok, message) = register_result(3);
        assert!(!ok && message.starts_with("Intel TME is active"), "{message}");
        assert!(register_result(3 | 6 << 32).1.starts_with("Intel TME-MK is active"));
    }
}
