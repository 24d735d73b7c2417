//! Plans of a rack: its hosts with the resulting QEMU command line, and a complete rack with agents and a
//! manager. Pure: nothing is started or written.

use std::path::{Path, PathBuf};

use crate::{CPU, CPUS};

/// Kernel version of a rack's hosts: the first of Debian's that can divide CXL memory in
/// device-dax.
pub(super) const KERNEL: &str = "6.12";
/// Default memory size of a host, in GiB.
const MEMORY_GIB_DEFAULT: u32 = 2;
/// Offset of QEMU's first CXL window within a GiB, in MiB: memory ends at a multiple of 1 GiB, the
/// host bridges' registers follow, and windows are aligned to 256 MiB.
const FIRST_WINDOW_AT_MIB: u32 = 256;
const GIB_IN_MIB: u32 = 1024;
/// Bus number of the first device, and its distance to the next.
const FIRST_BUS: usize = 32;
const BUSES_PER_DEVICE: usize = 16;

/// A CXL Type 3 device that all hosts of a rack share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Serial number, as in `/sys/bus/cxl/devices/memN/serial`.
    pub serial: u64,
    /// Size of its memory, in GiB.
    pub gib: u32,
    /// Whether its memory starts at a multiple of 1 GiB. Otherwise kernels accept 1 GiB mappings
    /// but map wrong memory.
    pub is_aligned: bool,
}

/// A private drive of each host: `/dev/vda` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drive {
    /// Size, in MiB.
    pub mib: u32,
    /// Read and write bandwidth, each in MB/s.
    pub mb_s: u32,
}

/// Prepares a host for tenants, as part of [`Plan::script`]: the first drive is swap,
/// `/sys/fs/cgroup/tenants` has the memory, io and cpu controllers, and the user root exists.
pub const TENANT_SETUP_SCRIPT: &str = "
echo root:x:0:0::/:/bin/sh > /etc/passwd
mkswap /dev/vda > /dev/null
swapon /dev/vda
echo '+memory +io +cpu' > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/tenants
echo '+memory +io +cpu' > /sys/fs/cgroup/tenants/cgroup.subtree_control
";

/// Plan of a rack's hosts.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Number of hosts: `h0`, `h1` and so on.
    pub hosts: usize,
    /// Shared CXL devices.
    pub devices: Vec<Device>,
    /// Memory size of each host, in GiB.
    pub memory_gib: u32,
    /// CPUs of each host. With more than one, nested guests crash occasionally.
    pub cpus: u32,
    /// Private drives of each host.
    pub drives: Vec<Drive>,
    /// Programs in `/bin`, copied with their libraries.
    pub programs: Vec<PathBuf>,
    /// Files and their paths in the hosts, such as "guest/6.12". All hosts have the same files;
    /// `$HOST` is the host's name.
    pub files: Vec<(PathBuf, String)>,
    /// Text appended to the kernel command line.
    pub append: String,
    /// Shell script that runs after the setup; it may end.
    pub script: String,
}

impl Plan {
    /// Returns hosts with 2 GiB that run nothing and online no memory.
    pub fn new(hosts: usize, devices: Vec<Device>) -> Self {
        Self {
            hosts,
            devices,
            memory_gib: MEMORY_GIB_DEFAULT,
            cpus: CPUS,
            drives: Vec::new(),
            programs: Vec::new(),
            files: Vec::new(),
            append: "memhp_default_state=offline".to_owned(),
            script: String::new(),
        }
    }

    /// Returns the hosts' names.
    pub fn names(&self) -> Vec<String> {
        (0..self.hosts).map(|n| format!("h{n}")).collect()
    }

    /// Returns QEMU's arguments for a host, relative to the rack's directory. `memory` returns the
    /// path of a device's bytes, `drive` that of a drive.
    pub(super) fn arguments(
        &self,
        name: &str,
        kernel: &Path,
        memory: impl Fn(&Device) -> PathBuf,
        drive: impl Fn(usize) -> PathBuf,
    ) -> Vec<String> {
        let mut all = words("-machine q35,cxl=on -accel tcg,thread=multi");
        all.extend([
            "-cpu".to_owned(),
            format!("{CPU},-hypervisor"),
            "-smp".to_owned(),
            self.cpus.to_string(),
        ]);
        all.extend(words(&format!("-m {}G -nodefaults -display none -no-reboot", self.memory_gib)));
        // CXL windows are NUMA nodes of their own only if local memory is a node.
        all.extend(words(&format!("-object memory-backend-ram,id=local,size={}G", self.memory_gib)));
        all.extend(words("-numa node,memdev=local"));
        all.extend(["-kernel".to_owned(), kernel.display().to_string()]);
        all.extend(words("-initrd initrd -append"));
        all.push(format!("console=ttyS0 quiet panic=-1 HOST={name} {}", self.append));
        all.extend(character_devices(name));
        for (n, device) in self.devices.iter().enumerate() {
            all.extend(device_arguments(n, device, &memory(device)));
        }
        all.extend(self.drives.iter().enumerate().flat_map(|(n, one)| drive_arguments(n, one, &drive(n))));
        if !self.devices.is_empty() {
            all.extend(["-M".to_owned(), self.windows().join(",")]); // QEMU requires all windows in one option
        }
        all
    }

    /// Returns the CXL fixed memory windows. They are contiguous, so an unused window aligns the
    /// next one.
    fn windows(&self) -> Vec<String> {
        let mut at_mib = FIRST_WINDOW_AT_MIB;
        let mut windows = Vec::new();
        for (n, device) in self.devices.iter().enumerate() {
            let begin_mib = if device.is_aligned { 0 } else { FIRST_WINDOW_AT_MIB };
            let unused_mib = (GIB_IN_MIB + begin_mib - at_mib) % GIB_IN_MIB;
            if unused_mib > 0 {
                windows.push((n, format!("{unused_mib}M")));
            }
            windows.push((n, format!("{}G", device.gib)));
            at_mib = begin_mib;
        }
        let window = |(n, (device, size)): (usize, (usize, String))| {
            format!("cxl-fmw.{n}.targets.0=cxl{device},cxl-fmw.{n}.size={size}")
        };
        windows.into_iter().enumerate().map(window).collect()
    }
}

fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

/// Returns the character devices: console, shell, command interface, agent log and QMP; and a user
/// network that reaches this machine only.
fn character_devices(name: &str) -> Vec<String> {
    words(&format!(
        "-chardev file,id=console,path=logs/{name}.console,append=on -serial chardev:console \
         -chardev socket,id=shell,path={name}.shell,server=on,wait=off -serial chardev:shell \
         -chardev socket,id=control,path={name}.control,server=on,wait=off -serial chardev:control \
         -chardev file,id=agent,path=logs/{name}.agent,append=on -serial chardev:agent \
         -qmp unix:{name}.qmp,server=on,wait=off \
         -netdev user,id=net0 -device virtio-net-pci,netdev=net0,bus=pcie.0,romfile="
    ))
}

/// Returns a device on a host bridge of its own, whose single decoder is in passthrough mode.
fn device_arguments(n: usize, device: &Device, memory: &Path) -> Vec<String> {
    let (bus, gib, serial) = (FIRST_BUS + n * BUSES_PER_DEVICE, device.gib, device.serial);
    let memory = memory.display().to_string().replace(',', ",,");
    let mut all = vec!["-object".to_owned()];
    all.push(format!("memory-backend-file,id=memory{n},mem-path={memory},size={gib}G,share=on"));
    all.extend(words(&format!(
        "-device pxb-cxl,bus_nr={bus},bus=pcie.0,id=cxl{n} -device cxl-rp,port=0,bus=cxl{n},id=port{n},chassis={n},slot={n} \
         -device cxl-type3,bus=port{n},volatile-memdev=memory{n},id=device{n},sn={serial:#x}"
    )));
    all
}

/// Returns a drive throttled to its planned bandwidth.
fn drive_arguments(n: usize, drive: &Drive, bytes: &Path) -> Vec<String> {
    let (bytes, speed) = (bytes.display().to_string().replace(',', ",,"), u64::from(drive.mb_s) * 1_000_000);
    vec![
        "-drive".to_owned(),
        format!(
            "if=none,id=drive{n},file={bytes},format=raw,cache=unsafe,throttling.bps-read={speed},throttling.bps-write={speed}"
        ),
        "-device".to_owned(),
        format!("virtio-blk-pci,drive=drive{n},bus=pcie.0"),
    ]
}

/// Executables of a rack.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `pool-manager`.
    pub manager: PathBuf,
    /// `host-agent`.
    pub agent: PathBuf,
    /// `tarn`.
    pub tarn: PathBuf,
    /// `power-off-host`.
    pub power_off: PathBuf,
}

/// Configuration of a rack.
#[derive(Clone, Debug)]
pub struct RackPlan {
    /// Hosts and devices: 1 GiB is a slice. Their script runs after the agent has started.
    pub hosts: Plan,
    /// Executables.
    pub programs: Programs,
    /// Backend of the agents: `dax` or `memory_block`.
    pub backend: String,
    /// Lease duration, in seconds.
    pub lease_ttl_s: f64,
    /// Silence before a host is fenced, in seconds, once all hosts have connected; `None` means
    /// never.
    pub fence_after_s: Option<f64>,
    /// Folder with `ca.pem`, and `NAME.pem` and `NAME.key` for `pool-manager`, `operator` and each
    /// host; `None` generates them.
    pub certificates: Option<PathBuf>,
    /// Text appended to rack.toml.
    pub rack_toml_extra: String,
    /// Text appended to the section `[agent]` of each agent's configuration.
    pub agent_toml_extra: String,
    /// Text appended to the section `[backend]`.
    pub backend_toml_extra: String,
}

impl RackPlan {
    /// Returns a plan with leases of two seconds and without automatic fencing.
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
    fn aligned_device_window_starts_at_a_whole_gib() {
        let unused = "cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size=768M";
        let (first, second) =
            ("cxl-fmw.1.targets.0=cxl0,cxl-fmw.1.size=4G", "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=2G");
        assert_eq!(windows(&[device(1, 4, true), device(2, 2, true)]), [unused, first, second]);
    }

    #[test]
    fn unaligned_device_window_starts_off_a_whole_gib() {
        let bad = "cxl-fmw.0.targets.0=cxl0,cxl-fmw.0.size=4G";
        assert_eq!(windows(&[device(1, 4, false)]), [bad]);
        let rest =
            ["cxl-fmw.1.targets.0=cxl1,cxl-fmw.1.size=768M", "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=1G"];
        assert_eq!(windows(&[device(1, 4, false), device(2, 1, true)]), [&[bad][..], &rest].concat());
        let moved = "cxl-fmw.2.targets.0=cxl1,cxl-fmw.2.size=256M";
        assert_eq!(windows(&[device(1, 4, true), device(2, 1, false)])[2], moved);
    }

    #[test]
    fn hosts_share_device_memory_and_use_only_unix_sockets() {
        let plan = Plan::new(2, vec![device(0x1f, 4, true)]);
        let memory = |device: &Device| format!("/m,{}", device.serial).into();
        let all = plan.arguments("h1", Path::new("/k"), memory, |_| PathBuf::new());
        let has = |word: &str| all.iter().any(|have| have == word);
        assert!(has("memory-backend-file,id=memory0,mem-path=/m,,31,size=4G,share=on"), "{all:?}");
        assert!(has("cxl-type3,bus=port0,volatile-memdev=memory0,id=device0,sn=0x1f"), "{all:?}");
        assert!(has("unix:h1.qmp,server=on,wait=off"), "{all:?}");
        assert!(has("console=ttyS0 quiet panic=-1 HOST=h1 memhp_default_state=offline"), "{all:?}");
        assert!(!all.iter().any(|word| word.contains("hostfwd") || word.contains("tcp")), "{all:?}");
    }

    #[test]
    fn drive_bandwidth_is_throttled_as_planned() {
        let plan = Plan { drives: vec![Drive { mib: 64, mb_s: 20 }], ..Plan::new(1, Vec::new()) };
        let all = plan.arguments("h0", Path::new("/k"), |_| PathBuf::new(), |n| format!("/d{n}").into());
        let drive = all.iter().find(|word| word.starts_with("if=none")).unwrap();
        assert!(
            drive.contains("file=/d0,") && drive.ends_with("bps-read=20000000,throttling.bps-write=20000000"),
            "{drive}"
        );
    }
}
