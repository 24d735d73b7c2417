//! What hosts a rack has, and the command line of QEMU that follows from it. Nothing is started or written here.

use std::path::{Path, PathBuf};

use crate::{CPU, CPUS};

/// The kernel that hosts of a rack have: the first of Debian's that divides CXL memory by device-dax.
pub(super) const KERNEL: &str = "6.12";
/// Memory of a host unless it is said otherwise, in GiB.
const MEMORY_GIB_DEFAULT: u32 = 2;
/// Where QEMU's first window begins within a GiB, in MiB: memory ends at a whole GiB, then there are the host bridges' registers, and
/// windows begin at multiples of 256 MiB.
const FIRST_WINDOW_AT_MIB: u32 = 256;
const GIB_IN_MIB: u32 = 1024;
/// The number of the first device's bus, and how far the next one's is from it.
const FIRST_BUS: usize = 32;
const BUSES_PER_DEVICE: usize = 16;

/// A CXL device of type 3 that all hosts of a rack share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What it is called: `/sys/bus/cxl/devices/memN/serial` shows it.
    pub serial: u64,
    /// Its memory, in GiB.
    pub gib: u32,
    /// Whether hosts see it from a whole GiB on. Kernels accept mappings of 1 GiB where it is not, and reach other memory by them.
    pub is_aligned: bool,
}

/// A drive that each host has for itself: `/dev/vda`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drive {
    /// How much fits on it, in MiB.
    pub mib: u32,
    /// How many MB it reads a second, and how many it writes.
    pub mb_s: u32,
}

/// What a host does, in [`Plan::script`], that is to have tenants: its first drive is swap, `/sys/fs/cgroup/tenants` is for cgroups whose memory, bytes and
/// processors are counted and limited, and programs find the user root.
pub const TENANT_SETUP_SCRIPT: &str = "
echo root:x:0:0::/:/bin/sh > /etc/passwd
mkswap /dev/vda > /dev/null
swapon /dev/vda
echo '+memory +io +cpu' > /sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/tenants
echo '+memory +io +cpu' > /sys/fs/cgroup/tenants/cgroup.subtree_control
";

/// What hosts a rack has.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many hosts there are: `h0`, `h1` and so on.
    pub hosts: usize,
    /// What they share.
    pub devices: Vec<Device>,
    /// Memory of each of them, in GiB.
    pub memory_gib: u32,
    /// Processors of each of them; with more than one, guests inside crash now and then.
    pub cpus: u32,
    /// What each of them has for itself.
    pub drives: Vec<Drive>,
    /// Programs they have in `/bin`, with the libraries these want.
    pub programs: Vec<PathBuf>,
    /// Files they have, and where: "guest/6.12". All have the same ones; `$HOST` in a script says which host it is.
    pub files: Vec<(PathBuf, String)>,
    /// What is added to their kernel's command line.
    pub append: String,
    /// What they do once everything is there, a script for a shell; it may end.
    pub script: String,
}

impl Plan {
    /// Hosts with 2 GiB that do nothing by themselves, and bring no memory online.
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

    /// What its hosts are called.
    pub fn names(&self) -> Vec<String> {
        (0..self.hosts).map(|n| format!("h{n}")).collect()
    }

    /// What QEMU is told to be one of the hosts, when it runs in the rack's folder. `memory` says where a device's bytes are.
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
        // Only where local memory is a node are windows nodes of their own.
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
            all.extend(["-M".to_owned(), self.windows().join(",")]); // QEMU wants them in one piece
        }
        all
    }

    /// Where in a host's memory the devices are seen: windows follow each other, so one that nobody uses moves the next.
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

/// Ways into a host: console, shell, commands, its agent's log; QEMU's own; and a network that reaches nothing but this machine's
/// loopback and what that reaches.
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

/// A device on a host bridge of its own, whose one decoder the kernel passes through.
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

/// A drive as fast as it is to be, whatever is behind it.
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
