//! Plans of emulated racks, and the resulting QEMU command lines. [`Plan`] describes the hosts;
//! [`RackPlan`] adds agents and a manager. This module starts no programs and writes no files.

use std::path::{Path, PathBuf};

use super::nbd::EXPORT_NAME;
use crate::{CPU_COUNT, CPU_MODEL};

/// Kernel version of the hosts in a rack. This is Debian's first kernel whose device-dax can divide
/// CXL memory.
pub(super) const RACK_KERNEL: &str = "6.12";
/// Default memory size of a host, in GiB.
const MEMORY_GIB_DEFAULT: u32 = 2;
/// Offset of QEMU's first CXL window from the preceding multiple of 1 GiB, in MiB. RAM ends at a
/// multiple of 1 GiB. The registers of the host bridges follow, and then the windows, which are
/// aligned to 256 MiB.
const FIRST_WINDOW_OFFSET_MIB: u32 = 256;
const MIB_PER_GIB: u32 = 1024;
/// Bus number of the first CXL device.
const FIRST_BUS_NUMBER: usize = 32;
/// Distance between the bus numbers of two neighbouring CXL devices.
const BUSES_PER_DEVICE: usize = 16;

/// A CXL Type 3 device that all hosts of a rack share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Serial number, as in `/sys/bus/cxl/devices/memN/serial`.
    pub serial: u64,
    /// Memory size of the device, in GiB.
    pub gib: u32,
    /// Whether the memory of the device starts at a multiple of 1 GiB. If it does not, kernels
    /// accept 1 GiB mappings but map the wrong memory.
    pub is_aligned: bool,
}

/// A private drive of each host. The first drive is `/dev/vda`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Size of the drive, in MiB.
    pub mib: u32,
    /// Maximum read bandwidth, and maximum write bandwidth, in MB/s.
    pub mb_s: u32,
    /// Whether a server outside of the host serves the content over the network (NBD).
    pub is_remote: bool,
}

/// Shell script for [`Plan::script`] that prepares a host for tenants. Uses the first drive as
/// swap, creates `/sys/fs/cgroup/tenants` with the memory, io and cpu controllers, and creates the
/// user root.
pub const TENANT_SETUP_SCRIPT: &str = "
echo root:x:0:0::/:/bin/sh > /etc/passwd
mkswap /dev/vda > /dev/null
swapon /dev/vda
echo '+memory +io +cpu' > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/tenants
echo '+memory +io +cpu' > /sys/fs/cgroup/tenants/cgroup.subtree_control
";

/// Shell script for [`Plan::script`] that prepares a host for fair tiering of tenants: creates
/// `/sys/fs/cgroup/tenants` with the memory, io and cpu controllers, and the user root, and disables the
/// multi-generational LRU. Demotion remains disabled.
pub const TIERED_TENANTS_SETUP_SCRIPT: &str = "
echo root:x:0:0::/:/bin/sh > /etc/passwd
echo n > /sys/kernel/mm/lru_gen/enabled
echo '+memory +io +cpu' > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/tenants
echo '+memory +io +cpu' > /sys/fs/cgroup/tenants/cgroup.subtree_control
";

/// Plan of the hosts of a rack.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of hosts. Their names are `h0`, `h1` and so on.
    pub hosts: usize,
    /// CXL devices that all hosts share.
    pub devices: Vec<Device>,
    /// Memory size of each host, in GiB.
    pub memory_gib: u32,
    /// Number of CPUs of each host. With more than one CPU_MODEL, nested guests crash occasionally.
    pub cpus: u32,
    /// Private drives of each host.
    pub drives: Vec<Drive>,
    /// Programs that are copied to `/bin` of each host, with their libraries.
    pub programs: Vec<PathBuf>,
    /// Whether each host has QEMU, to run guests under the host's KVM.
    pub has_qemu: bool,
    /// Files that are copied to all hosts, with their paths in the hosts, such as "guest/6.12".
    pub files: Vec<(PathBuf, String)>,
    /// Text that is appended to the kernel command line.
    pub cmdline_extra: String,
    /// Shell script that runs on each host after the setup. `$HOST` is the name of the host. The
    /// host continues to run when the script ends.
    pub script: String,
}

impl Plan {
    /// Returns a plan of hosts with 2 GiB of memory, no programs and an empty script. The kernel
    /// leaves hot-plugged memory offline.
    pub fn new(hosts: usize, devices: Vec<Device>) -> Self {
        Self {
            hosts,
            devices,
            memory_gib: MEMORY_GIB_DEFAULT,
            cpus: CPU_COUNT,
            drives: Vec::new(),
            programs: Vec::new(),
            has_qemu: false,
            files: Vec::new(),
            cmdline_extra: "memhp_default_state=offline".to_owned(),
            script: String::new(),
        }
    }

    /// Returns the names of all hosts.
    pub fn names(&self) -> Vec<String> {
        (0..self.hosts).map(|n| format!("h{n}")).collect()
    }

    /// Returns the arguments of QEMU for a host. Relative paths refer to the directory of the rack.
    /// `memory` returns the path of the content of a device, and `drive` that of a drive.
    pub(super) fn qemu_arguments(
        &self,
        name: &str,
        kernel: &Path,
        memory: impl Fn(&Device) -> PathBuf,
        drive: impl Fn(usize) -> PathBuf,
    ) -> Vec<String> {
        let mut all = split_words("-machine q35,cxl=on -accel tcg,thread=multi");
        all.extend([
            "-cpu".to_owned(),
            format!("{CPU_MODEL},-hypervisor"),
            "-smp".to_owned(),
            self.cpus.to_string(),
        ]);
        all.extend(split_words(&format!("-m {}G -nodefaults -display none -no-reboot", self.memory_gib)));
        // Linux creates separate NUMA nodes for CXL windows only if local memory is a node.
        all.extend(split_words(&format!("-object memory-backend-ram,id=local,size={}G", self.memory_gib)));
        all.extend(split_words("-numa node,memdev=local"));
        all.extend(["-kernel".to_owned(), kernel.display().to_string()]);
        all.extend(split_words("-initrd initrd -append"));
        all.push(format!("console=ttyS0 quiet panic=-1 HOST={name} {}", self.cmdline_extra));
        all.extend(character_device_arguments(name));
        for (n, device) in self.devices.iter().enumerate() {
            all.extend(device_arguments(n, device, &memory(device)));
        }
        let drives = self.drives.iter().enumerate();
        all.extend(drives.flat_map(|(n, planned)| match planned.is_remote {
            false => drive_arguments(n, planned, &local_drive_options(&drive(n))),
            true => drive_arguments(n, planned, &remote_drive_options(&nbd_socket_name(name, n))),
        }));
        if !self.devices.is_empty() {
            // QEMU requires all windows in one option.
            all.extend(["-M".to_owned(), self.windows().join(",")]);
        }
        all
    }

    /// Returns the settings of the CXL fixed memory windows. QEMU places windows contiguously, so
    /// unused windows provide the alignment of the windows that follow.
    fn windows(&self) -> Vec<String> {
        let mut offset_mib = FIRST_WINDOW_OFFSET_MIB;
        let mut windows = Vec::new();
        for (n, device) in self.devices.iter().enumerate() {
            let begin_mib = if device.is_aligned { 0 } else { FIRST_WINDOW_OFFSET_MIB };
            let unused_mib = (MIB_PER_GIB + begin_mib - offset_mib) % MIB_PER_GIB;
            if unused_mib > 0 {
                windows.push((n, format!("{unused_mib}M")));
            }
            windows.push((n, format!("{}G", device.gib)));
            offset_mib = begin_mib;
        }
        let window = |(n, (device, size)): (usize, (usize, String))| {
            format!("cxl-fmw.{n}.targets.0=cxl{device},cxl-fmw.{n}.size={size}")
        };
        windows.into_iter().enumerate().map(window).collect()
    }
}

fn split_words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// Returns the arguments for the character devices (console, shell, command interface, agent log,
/// QMP) and for a user-mode network.
fn character_device_arguments(name: &str) -> Vec<String> {
    split_words(&format!(
        "-chardev file,id=console,path=logs/{name}.console,append=on -serial chardev:console \
         -chardev socket,id=shell,path={name}.shell,server=on,wait=off -serial chardev:shell \
         -chardev socket,id=control,path={name}.control,server=on,wait=off -serial chardev:control \
         -chardev file,id=agent,path=logs/{name}.agent,append=on -serial chardev:agent \
         -qmp unix:{name}.qmp,server=on,wait=off \
         -netdev user,id=net0 -device virtio-net-pci,netdev=net0,bus=pcie.0,romfile="
    ))
}

/// Returns the arguments for a CXL device on a separate host bridge. The bridge has one root port,
/// so its decoder is in passthrough mode.
fn device_arguments(n: usize, device: &Device, memory: &Path) -> Vec<String> {
    let (bus, gib, serial) = (FIRST_BUS_NUMBER + n * BUSES_PER_DEVICE, device.gib, device.serial);
    let memory = memory.display().to_string().replace(',', ",,");
    let mut all = vec!["-object".to_owned()];
    all.push(format!("memory-backend-file,id=memory{n},mem-path={memory},size={gib}G,share=on"));
    all.extend(split_words(&format!(
        "-device pxb-cxl,bus_nr={bus},bus=pcie.0,id=cxl{n} -device cxl-rp,port=0,bus=cxl{n},id=port{n},chassis={n},slot={n} \
         -device cxl-type3,bus=port{n},volatile-memdev=memory{n},id=device{n},sn={serial:#x}"
    )));
    all
}

/// Returns the arguments for a drive that is throttled to its planned bandwidth.
fn drive_arguments(n: usize, drive: &Drive, content: &str) -> Vec<String> {
    let speed = u64::from(drive.mb_s) * 1_000_000;
    vec![
        "-drive".to_owned(),
        format!(
            "if=none,id=drive{n},{content},format=raw,cache=unsafe,throttling.bps-read={speed},throttling.bps-write={speed}"
        ),
        "-device".to_owned(),
        format!("virtio-blk-pci,drive=drive{n},bus=pcie.0"),
    ]
}

fn local_drive_options(content: &Path) -> String {
    format!("file={}", content.display().to_string().replace(',', ",,"))
}

fn remote_drive_options(socket: &str) -> String {
    format!("file.driver=nbd,file.server.type=unix,file.server.path={socket},file.export={EXPORT_NAME}")
}

/// Returns the name of the socket of a remote drive, in the directory of the rack.
pub(super) fn nbd_socket_name(host: &str, n: usize) -> String {
    format!("{host}.nbd{n}")
}

/// Paths of the programs that a rack runs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Path of `pool-manager`.
    pub manager: PathBuf,
    /// Path of `host-agent`.
    pub agent: PathBuf,
    /// Path of `tarn`.
    pub tarn: PathBuf,
    /// Path of `power-off-host`, the fence command.
    pub power_off: PathBuf,
}

/// Plan of a complete rack, with hosts, agents and a manager.
#[derive(Clone, Debug)]
pub struct RackPlan {
    /// Hosts and devices. A slice is 1 GiB of a device. The script runs after the agent has
    /// started.
    pub hosts: Plan,
    /// Programs of the rack.
    pub programs: Programs,
    /// Backend of the agents: `dax` or `memory_block`.
    pub backend: String,
    /// Lease duration, in seconds.
    pub lease_ttl_s: f64,
    /// Time without contact after which the manager fences a host, in seconds; `None` means never.
    /// Fencing starts when all hosts have connected.
    pub fence_after_s: Option<f64>,
    /// Folder that contains `ca.pem`, and `NAME.pem` and `NAME.key` for `pool-manager`, `operator`
    /// and each host; `None` means that the files are generated.
    pub certificates: Option<PathBuf>,
    /// Text that is inserted into rack.toml before the EMCs and hosts.
    pub rack_toml_extra: String,
    /// Text that is appended to the section `[agent]` of each agent's configuration.
    pub agent_toml_extra: String,
    /// Text that is appended to the section `[backend]` of each agent's configuration.
    pub backend_toml_extra: String,
}

impl RackPlan {
    /// Returns a plan with leases of 2 seconds and without automatic fencing.
    pub fn new(hosts: Plan, programs: Programs, backend: &str) -> Self {
        Self {
            hosts,
            programs,
            backend: backend.to_owned(),
            lease_ttl_s: 2.0,
            fence_after_s: None,
            certificates: None,
            rack_toml_extra: String::new(),
            agent_toml_extra: String::new(),
            backend_toml_extra: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(serial: u64, gib: u32, is_aligned: bool) -> Device {
        Device { serial, gib, is_aligned }
    }

    fn windows(devices: &[Device]) -> Vec<String> {
        Plan::new(1, devices.to_vec()).windows()
    }

    #[test]
    fn aligned_device_window_starts_at_a_gib_boundary() {
        let unused = "cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size=768M";
        let (first, second) =
            ("cxl-fmw.1.targets.0=cxl0,cxl-fmw.1.size=4G", "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=2G");
        assert_eq!(windows(&[device(1, 4, true), device(2, 2, true)]), [unused, first, second]);
    }

    #[test]
    fn unaligned_device_window_does_not_start_at_a_gib_boundary() {
        let unaligned = "cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size=4G";
        assert_eq!(windows(&[device(1, 4, false)]), [unaligned]);
        let rest =
            ["cxl-fmw.1.targets.0=cxl1,cxl-fmw.1.size=768M", "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=1G"];
        assert_eq!(windows(&[device(1, 4, false), device(2, 1, true)]), [&[unaligned][..], &rest].concat());
        let moved = "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=256M";
        assert_eq!(windows(&[device(1, 4, true), device(2, 1, false)])[2], moved);
    }

    #[test]
    fn hosts_share_device_memory_and_use_only_unix_sockets() {
        let plan = Plan::new(2, vec![device(0x1f, 4, true)]);
        let memory = |device: &Device| format!("/m,{}", device.serial).into();
        let all = plan.qemu_arguments("h1", Path::new("/k"), memory, |_| PathBuf::new());
        let has = |expected: &str| all.iter().any(|argument| argument == expected);
        assert!(has("memory-backend-file,id=memory0,mem-path=/m,,31,size=4G,share=on"), "{all:?}");
        assert!(has("cxl-type3,bus=port0,volatile-memdev=memory0,id=device0,sn=0x1f"), "{all:?}");
        assert!(has("unix:h1.qmp,server=on,wait=off"), "{all:?}");
        assert!(has("console=ttyS0 quiet panic=-1 HOST=h1 memhp_default_state=offline"), "{all:?}");
        assert!(!all.iter().any(|word| word.contains("hostfwd") || word.contains("tcp")), "{all:?}");
    }

    #[test]
    fn drive_bandwidth_is_throttled_as_planned() {
        let plan =
            Plan { drives: vec![Drive { mib: 64, mb_s: 20, is_remote: false }], ..Plan::new(1, Vec::new()) };
        let all = plan.qemu_arguments("h0", Path::new("/k"), |_| PathBuf::new(), |n| format!("/d{n}").into());
        let drive = all.iter().find(|word| word.starts_with("if=none")).unwrap();
        assert!(
            drive.contains("file=/d0,") && drive.ends_with("bps-read=20000000,throttling.bps-write=20000000"),
            "{drive}"
        );
    }

    #[test]
    fn remote_drive_is_read_through_a_socket() {
        let plan =
            Plan { drives: vec![Drive { mib: 64, mb_s: 20, is_remote: true }], ..Plan::new(1, Vec::new()) };
        let all = plan.qemu_arguments("h7", Path::new("/k"), |_| PathBuf::new(), |_| PathBuf::new());
        let drive = all.iter().find(|word| word.starts_with("if=none")).unwrap();
        let expected =
            "file.driver=nbd,file.server.type=unix,file.server.path=h7.nbd0,file.export=drive,format=raw,";
        assert!(drive.contains(expected), "{drive}");
    }
}
