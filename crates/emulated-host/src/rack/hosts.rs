//! Starts and stops all hosts of a rack, and stores the content of their devices and drives. A
//! [`Plan`] defines the programs that the hosts run.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd as _, unix::fs::symlink},
    path::{Path, PathBuf},
};

use rustix::fs::statvfs;

use super::{
    host::RackHost,
    initrd,
    nbd::NbdServer,
    plan::{Device, Plan, RACK_KERNEL, nbd_socket_name},
    power::Power,
};
use crate::{Artifacts, HostError};

/// Mount point of the tmpfs that stores the content of devices and drives.
const SHM_DIR: &str = "/dev/shm";
/// Name of the directory with a link to the content of each device and drive.
const MEMORY_LINKS_DIR: &str = "memory";
/// Extensions of the files of a host that are removed with the rack.
const HOST_FILE_EXTENSIONS: &[&str] = &["qmp", "shell", "control", "pid"];
/// Extensions of the log files of a host, which are not removed with the rack.
const HOST_LOG_EXTENSIONS: &[&str] = &["console", "agent", "qemu"];
/// Maximum length of a socket path in Linux, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Running hosts of a rack. Dropping the value powers the hosts off and removes their files except
/// the logs.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<RackHost>,
    folder: PathBuf,
    /// Files with the content of devices and drives. The files have no names, so that they do not
    /// outlive this process.
    memory: Vec<File>,
    nbd_servers: Vec<NbdServer>,
}

impl Hosts {
    /// Prepares the hosts in a directory, powers all hosts on, and waits until all hosts are up.
    /// The hosts are killed when the calling thread ends.
    ///
    /// # Errors
    /// [`HostError`] if a file is missing or a host does not come up.
    pub fn start(artifacts: &Artifacts, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let mut hosts = Self::prepare(artifacts, plan, folder)?;
        hosts.power_on()?;
        hosts.wait_until_up(|| true)?;
        Ok(hosts)
    }

    pub(super) fn power_on(&mut self) -> Result<(), HostError> {
        self.hosts.iter_mut().try_for_each(RackHost::power_on)
    }

    pub(super) fn wait_until_up(&self, should_continue: impl Fn() -> bool) -> Result<(), HostError> {
        self.hosts.iter().try_for_each(|host| host.wait_until_up_while(&should_continue))
    }

    pub(super) fn prepare(artifacts: &Artifacts, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).map_err(HostError::file_error("create", &logs))?;
        let folder = folder.canonicalize().map_err(HostError::file_error("resolve", folder))?;
        check_socket_path(&folder)?;
        check_not_running(&folder, plan)?;
        check_free_memory(plan)?;
        let links = folder.join(MEMORY_LINKS_DIR);
        let _ = fs::remove_dir_all(&links); // may exist if an earlier rack was killed
        fs::create_dir(&links).map_err(HostError::file_error("create", &links))?;
        // If a later step fails, dropping `hosts` removes the files created so far.
        let mut hosts = Self { hosts: Vec::new(), folder, memory: Vec::new(), nbd_servers: Vec::new() };
        initrd::build(artifacts, plan)?.pack(&hosts.folder.join("initrd"))?;
        for device in &plan.devices {
            hosts.add_memory(&hosts.device_link(device), u64::from(device.gib) << 30)?;
        }
        for name in plan.names() {
            for (n, drive) in plan.drives.iter().enumerate() {
                hosts.add_memory(&hosts.drive_link(&name, n), u64::from(drive.mib) << 20)?;
                if drive.is_remote {
                    hosts.start_nbd_server(artifacts, &name, n)?;
                }
            }
            for kind in HOST_LOG_EXTENSIONS {
                let _ = fs::remove_file(logs.join(format!("{name}.{kind}"))); // may exist from an earlier rack
            }
            let start = hosts.qemu_command_line(artifacts, plan, &name)?;
            hosts.hosts.push(RackHost::prepare(&hosts.folder, &name, &start)?);
        }
        Ok(hosts)
    }

    fn qemu_command_line(
        &self,
        artifacts: &Artifacts,
        plan: &Plan,
        name: &str,
    ) -> Result<Vec<String>, HostError> {
        let resolve = |path: PathBuf| path.canonicalize().map_err(HostError::file_error("resolve", &path));
        let mut start = vec![resolve(artifacts.qemu_path())?.display().to_string()];
        let (memory, drive) = (|device: &Device| self.device_link(device), |n| self.drive_link(name, n));
        start.extend(plan.qemu_arguments(name, &resolve(artifacts.kernel_path(RACK_KERNEL))?, memory, drive));
        Ok(start)
    }

    /// Creates a sparse file of this size, filled with zeros, and a link to the file.
    fn add_memory(&mut self, link: &Path, bytes: u64) -> Result<(), HostError> {
        let file = tempfile::tempfile_in(SHM_DIR).and_then(|file| file.set_len(bytes).map(|()| file));
        let file = file.map_err(HostError::file_error("create a file in", Path::new(SHM_DIR)))?;
        let target = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        symlink(target, link).map_err(HostError::file_error("create", link))?;
        self.memory.push(file);
        Ok(())
    }

    fn start_nbd_server(&mut self, artifacts: &Artifacts, host: &str, n: usize) -> Result<(), HostError> {
        let content = self.drive_link(host, n);
        let socket = self.folder.join(nbd_socket_name(host, n));
        let log = self.folder.join("logs").join(format!("{host}.nbd{n}"));
        let _ = fs::remove_file(&log); // may exist from an earlier rack
        let config = content.with_extension(format!("nbd{n}"));
        self.nbd_servers.push(NbdServer::start(artifacts, &socket, &content, &config, &log)?);
        Ok(())
    }

    /// Returns the path of the link to the content of a host's drive.
    fn drive_link(&self, host: &str, n: usize) -> PathBuf {
        self.folder.join(MEMORY_LINKS_DIR).join(format!("{host}.drive{n}"))
    }

    /// Returns the path of the link to the content of a device.
    pub fn device_link(&self, device: &Device) -> PathBuf {
        self.folder.join(MEMORY_LINKS_DIR).join(format!("{:#x}", device.serial))
    }

    /// Returns the directory of the hosts' sockets. Its subdirectory `logs` contains the logs.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the servers of remote drives, by host and drive.
    pub fn nbd_servers(&self) -> &[NbdServer] {
        &self.nbd_servers
    }

    /// Returns the servers of remote drives, by host and drive, so that the caller can kill them.
    pub fn nbd_servers_mut(&mut self) -> &mut [NbdServer] {
        &mut self.nbd_servers
    }

    /// Returns the hosts, in ascending order of their numbers.
    pub fn as_slice(&self) -> &[RackHost] {
        &self.hosts
    }

    /// Returns the hosts, in ascending order of their numbers, so that the caller can switch their
    /// power.
    pub fn as_mut_slice(&mut self) -> &mut [RackHost] {
        &mut self.hosts
    }
}

/// Checks that the tmpfs has enough space for all devices and drives. If the tmpfs filled up,
/// SIGBUS would kill QEMU.
fn check_free_memory(plan: &Plan) -> Result<(), HostError> {
    let devices: u64 = plan.devices.iter().map(|device| u64::from(device.gib) << 10).sum();
    let drives: u64 = plan.drives.iter().map(|drive| u64::from(drive.mib)).sum();
    let needed_mib = devices + drives * u64::try_from(plan.names().len()).unwrap_or(u64::MAX);
    let status = statvfs(SHM_DIR)
        .map_err(|errno| HostError::file_error("get the free space of", Path::new(SHM_DIR))(errno.into()))?;
    let free_mib = status.f_bavail.saturating_mul(status.f_frsize) >> 20;
    match needed_mib <= free_mib {
        true => Ok(()),
        false => Err(HostError::OutOfSpace { folder: SHM_DIR, needed_mib, free_mib }),
    }
}

/// Checks that no host of the plan is running in a directory.
///
/// # Errors
/// [`HostError::Power`] that names a running host.
pub(super) fn check_not_running(folder: &Path, plan: &Plan) -> Result<(), HostError> {
    let running = plan.names().into_iter().filter(|name| folder.join(format!("{name}.pid")).exists());
    running.map(|name| Power::open(folder, &name)).try_for_each(|power| power?.lock_pid_file().map(drop))
}

fn check_socket_path(folder: &Path) -> Result<(), HostError> {
    let longest = folder.join("h999.control");
    match longest.as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
        true => Ok(()),
        false => {
            Err(HostError::SocketPathTooLong { folder: folder.to_owned(), bytes_max: SOCKET_PATH_BYTES_MAX })
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            // Without the `start` file no other process can power the host on. Files that cannot
            // be removed are harmless.
            let _ = fs::remove_file(self.folder.join(format!("{}.start", host.name())));
            let _ = host.power_off();
            for kind in HOST_FILE_EXTENSIONS {
                let _ = fs::remove_file(self.folder.join(format!("{}.{kind}", host.name())));
            }
        }
        let _ = fs::remove_file(self.folder.join("initrd"));
        let _ = fs::remove_dir_all(self.folder.join(MEMORY_LINKS_DIR));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_larger_than_shm_are_rejected_with_both_sizes() {
        let device = |gib| Device { serial: 1, gib, is_aligned: true };
        check_free_memory(&Plan::new(2, vec![device(0)])).unwrap();
        let error = check_free_memory(&Plan::new(2, vec![device(1 << 30)])).unwrap_err().to_string();
        assert!(error.starts_with("/dev/shm has ") && error.contains("need 1099511627776 MiB"), "{error}");
    }
}
