//! All hosts of a rack, with the memory that they share. What runs on them is the caller's.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd as _, unix::fs::symlink},
    path::{Path, PathBuf},
};

use rustix::fs::statvfs;

use super::{
    host::RackHost,
    initrd,
    plan::{Device, KERNEL, Plan},
    power::Power,
};
use crate::{Artifacts, HostError};

/// Where memory is a file system.
const SHM_DIR: &str = "/dev/shm";
/// The folder in a rack's folder with a link to the bytes of each device and drive.
const LINKS_DIR: &str = "memory";
/// What is removed of a host with its rack.
const HOST_FILES: &[&str] = &["qmp", "shell", "control", "pid"];
/// What is left of it.
const HOST_LOGS: &[&str] = &["console", "agent", "qemu"];
/// How long the name of a socket may be, for Linux.
const SOCKET_BYTES_MAX: usize = 107;

/// Hosts that run. Dropped, they have no power, and nothing but their logs is left.
#[derive(Debug)]
pub struct Hosts {
    all: Vec<RackHost>,
    folder: PathBuf,
    /// The bytes of devices and drives: files without names, so that none outlives this process, however it ends.
    memory: Vec<File>,
}

impl Hosts {
    /// Prepares them in a folder, switches them on, and waits until all answer. They end with the thread that does so.
    ///
    /// # Errors
    /// Something is not there, or a host does not come up.
    pub fn start(artifacts: &Artifacts, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let mut hosts = Self::prepare(artifacts, plan, folder)?;
        hosts.power_on()?;
        hosts.wait_up(|| true)?;
        Ok(hosts)
    }

    pub(super) fn power_on(&mut self) -> Result<(), HostError> {
        self.all.iter_mut().try_for_each(RackHost::power_on)
    }

    pub(super) fn wait_up(&self, is_wanted: impl Fn() -> bool) -> Result<(), HostError> {
        self.all.iter().try_for_each(|host| host.wait_up_while(&is_wanted))
    }

    pub(super) fn prepare(artifacts: &Artifacts, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).map_err(HostError::file("make", &logs))?;
        let folder = folder.canonicalize().map_err(HostError::file("find", folder))?;
        check_socket_path(&folder)?;
        check_not_running(&folder, plan)?;
        check_free_memory(plan)?;
        let links = folder.join(LINKS_DIR);
        let _ = fs::remove_dir_all(&links); // of a rack that ended badly
        fs::create_dir(&links).map_err(HostError::file("make", &links))?;
        let mut hosts = Self { all: Vec::new(), folder, memory: Vec::new() }; // from here on it clears up behind itself
        initrd::build(artifacts, plan)?.pack(&hosts.folder.join("initrd"))?;
        for device in &plan.devices {
            hosts.add_memory(&hosts.memory_of(device), u64::from(device.gib) << 30)?;
        }
        for name in plan.names() {
            for (n, drive) in plan.drives.iter().enumerate() {
                hosts.add_memory(&hosts.drive_of(&name, n), u64::from(drive.mib) << 20)?;
            }
            for kind in HOST_LOGS {
                let _ = fs::remove_file(logs.join(format!("{name}.{kind}"))); // of an earlier rack
            }
            let start = hosts.start_of(artifacts, plan, &name)?;
            hosts.all.push(RackHost::prepare(&hosts.folder, &name, &start)?);
        }
        Ok(hosts)
    }

    fn start_of(&self, artifacts: &Artifacts, plan: &Plan, name: &str) -> Result<Vec<String>, HostError> {
        let whole = |path: PathBuf| path.canonicalize().map_err(HostError::file("find", &path));
        let mut start = vec![whole(artifacts.qemu())?.display().to_string()];
        let (memory, drive) = (|device: &Device| self.memory_of(device), |n| self.drive_of(name, n));
        start.extend(plan.arguments(name, &whole(artifacts.kernel(KERNEL))?, memory, drive));
        Ok(start)
    }

    /// Makes the bytes that `link` is to show: none are there yet, all read as zeros.
    fn add_memory(&mut self, link: &Path, bytes: u64) -> Result<(), HostError> {
        let made = tempfile::tempfile_in(SHM_DIR).and_then(|file| file.set_len(bytes).map(|()| file));
        let file = made.map_err(HostError::file("make a file in", Path::new(SHM_DIR)))?;
        let shown = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        symlink(shown, link).map_err(HostError::file("make", link))?;
        self.memory.push(file);
        Ok(())
    }

    /// A link to the bytes of a host's own drive.
    fn drive_of(&self, host: &str, n: usize) -> PathBuf {
        self.folder.join(LINKS_DIR).join(format!("{host}.drive{n}"))
    }

    /// A link to a device's bytes, which all hosts share.
    pub fn memory_of(&self, device: &Device) -> PathBuf {
        self.folder.join(LINKS_DIR).join(format!("{:#x}", device.serial))
    }

    /// Where their sockets are, and their logs in `logs`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> &[RackHost] {
        &self.all
    }

    /// All of them, to be switched on and off.
    pub fn all_mut(&mut self) -> &mut [RackHost] {
        &mut self.all
    }
}

/// The memory file system can hold every byte of the devices and drives: a host whose device has no room for a byte ends at once.
fn check_free_memory(plan: &Plan) -> Result<(), HostError> {
    let devices: u64 = plan.devices.iter().map(|device| u64::from(device.gib) << 10).sum();
    let drives: u64 = plan.drives.iter().map(|drive| u64::from(drive.mib)).sum();
    let needed_mib = devices + drives * u64::try_from(plan.names().len()).unwrap_or(u64::MAX);
    let found = statvfs(SHM_DIR)
        .map_err(|errno| HostError::file("ask for the free bytes of", Path::new(SHM_DIR))(errno.into()))?;
    let free_mib = found.f_bavail.saturating_mul(found.f_frsize) >> 20;
    match needed_mib <= free_mib {
        true => Ok(()),
        false => Err(HostError::OutOfSpace { folder: SHM_DIR, needed_mib, free_mib }),
    }
}

/// Nobody else's hosts run in a folder.
///
/// # Errors
/// One of them does.
pub(super) fn check_not_running(folder: &Path, plan: &Plan) -> Result<(), HostError> {
    let others = plan.names().into_iter().filter(|name| folder.join(format!("{name}.pid")).exists());
    others.map(|name| Power::of(folder, &name)).try_for_each(|power| power?.claim().map(drop))
}

fn check_socket_path(folder: &Path) -> Result<(), HostError> {
    let longest = folder.join("h999.control");
    match longest.as_os_str().len() <= SOCKET_BYTES_MAX {
        true => Ok(()),
        false => Err(HostError::SocketPathTooLong { folder: folder.to_owned(), bytes_max: SOCKET_BYTES_MAX }),
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &mut self.all {
            // From now on nobody else can switch it on. What cannot be removed is in nobody's way.
            let _ = fs::remove_file(self.folder.join(format!("{}.start", host.name())));
            let _ = host.power_off();
            for kind in HOST_FILES {
                let _ = fs::remove_file(self.folder.join(format!("{}.{kind}", host.name())));
            }
        }
        let _ = fs::remove_file(self.folder.join("initrd"));
        let _ = fs::remove_dir_all(self.folder.join(LINKS_DIR));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_larger_than_shm_are_refused_with_both_sizes() {
        let device = |gib| Device { serial: 1, gib, is_aligned: true };
        check_free_memory(&Plan::new(2, vec![device(0)])).unwrap();
        let refused = check_free_memory(&Plan::new(2, vec![device(1 << 30)])).unwrap_err().to_string();
        assert!(
            refused.starts_with("/dev/shm has ") && refused.contains("need 1099511627776 MiB"),
            "{refused}"
        );
    }
}
