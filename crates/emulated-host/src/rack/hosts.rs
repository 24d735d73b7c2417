//! All hosts of a rack, with the memory that they share. What runs on them is the caller's.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use super::{
    host::RackHost,
    image,
    plan::{Device, KERNEL, Plan},
    power::Power,
};
use crate::{Bed, HostError};

/// Where memory is a file system.
const MEMORY: &str = "/dev/shm";
/// What shows in a rack's folder where the devices' bytes are.
const LINK: &str = "memory";
/// What is removed of a host with its rack.
const OF_A_HOST: &[&str] = &["qmp", "shell", "control", "pid"];
/// What is left of it.
const LOGS: &[&str] = &["console", "agent", "qemu"];
/// How long the name of a socket may be, for Linux.
const SOCKET_BYTES_MAX: usize = 107;

/// Hosts that run. Dropped, they have no power, and nothing but their logs is left.
#[derive(Debug)]
pub struct Hosts {
    all: Vec<RackHost>,
    folder: PathBuf,
    memory: TempDir,
}

impl Hosts {
    /// Prepares them in a folder, switches them on, and waits until all answer. They end with the thread that does so.
    ///
    /// # Errors
    /// Something is not there, or a host does not come up.
    pub fn start(bed: &Bed, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let mut hosts = Self::prepare(bed, plan, folder)?;
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

    pub(super) fn prepare(bed: &Bed, plan: &Plan, folder: &Path) -> Result<Self, HostError> {
        let logs = folder.join("logs");
        fs::create_dir_all(&logs).map_err(HostError::file("make", &logs))?;
        let folder = folder.canonicalize().map_err(HostError::file("find", folder))?;
        fits(&folder)?;
        vacant(&folder, plan)?;
        let memory = memory(&folder)?;
        let mut hosts = Self { all: Vec::new(), folder, memory }; // from here on it clears up behind itself
        image::of(bed, plan)?.pack(&hosts.folder.join("initrd"))?;
        plan.devices.iter().try_for_each(|device| hosts.make(device))?;
        for name in plan.names() {
            let mut drives = plan.drives.iter().enumerate();
            drives
                .try_for_each(|(n, drive)| sparse(&hosts.drive_of(&name, n), u64::from(drive.mib) << 20))?;
            for kind in LOGS {
                let _ = fs::remove_file(logs.join(format!("{name}.{kind}"))); // of an earlier rack
            }
            let start = hosts.start_of(bed, plan, &name)?;
            hosts.all.push(RackHost::prepare(&hosts.folder, &name, &start)?);
        }
        Ok(hosts)
    }

    fn start_of(&self, bed: &Bed, plan: &Plan, name: &str) -> Result<Vec<String>, HostError> {
        let whole = |path: PathBuf| path.canonicalize().map_err(HostError::file("find", &path));
        let mut start = vec![whole(bed.qemu())?.display().to_string()];
        let (memory, drive) = (|device: &Device| self.memory_of(device), |n| self.drive_of(name, n));
        start.extend(plan.arguments(name, &whole(bed.kernel(KERNEL))?, memory, drive));
        Ok(start)
    }

    /// A device's bytes: none are there yet, all read as zeros.
    fn make(&self, device: &Device) -> Result<(), HostError> {
        sparse(&self.memory_of(device), u64::from(device.gib) << 30)
    }

    /// The file with the bytes of a host's own drive.
    fn drive_of(&self, host: &str, n: usize) -> PathBuf {
        self.memory.path().join(format!("{host}.drive{n}"))
    }

    /// The file with a device's bytes: what is written to it every host sees, and the other way round.
    pub fn memory_of(&self, device: &Device) -> PathBuf {
        self.memory.path().join(format!("{:#x}", device.serial))
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

fn sparse(file: &Path, bytes: u64) -> Result<(), HostError> {
    let made = File::create(file).and_then(|made| made.set_len(bytes));
    made.map_err(HostError::file("make", file))
}

/// A folder in memory, where a link in the rack's folder shows it.
fn memory(folder: &Path) -> Result<TempDir, HostError> {
    let link = folder.join(LINK);
    if let Ok(old) = fs::read_link(&link) {
        let _ = fs::remove_dir_all(old); // of a rack that ended badly; it may be gone
        let _ = fs::remove_file(&link);
    }
    let memory = tempfile::Builder::new().prefix("tarn-rack-").tempdir_in(MEMORY);
    let memory = memory.map_err(HostError::file("make a folder in", Path::new(MEMORY)))?;
    symlink(memory.path(), &link).map_err(HostError::file("make", &link))?;
    Ok(memory)
}

/// Nobody else's hosts run in a folder.
///
/// # Errors
/// One of them does.
pub(super) fn vacant(folder: &Path, plan: &Plan) -> Result<(), HostError> {
    let others = plan.names().into_iter().filter(|name| folder.join(format!("{name}.pid")).exists());
    others.map(|name| Power::of(folder, &name)).try_for_each(|power| power?.claim().map(drop))
}

fn fits(folder: &Path) -> Result<(), HostError> {
    let longest = folder.join("h999.control");
    match longest.as_os_str().len() <= SOCKET_BYTES_MAX {
        true => Ok(()),
        false => Err(HostError::Folder { folder: folder.to_owned(), bytes_max: SOCKET_BYTES_MAX }),
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &mut self.all {
            // From now on nobody else can switch it on. What cannot be removed is in nobody's way.
            let _ = fs::remove_file(self.folder.join(format!("{}.start", host.name())));
            let _ = host.power_off();
            for kind in OF_A_HOST {
                let _ = fs::remove_file(self.folder.join(format!("{}.{kind}", host.name())));
            }
        }
        for shared in ["initrd", LINK] {
            let _ = fs::remove_file(self.folder.join(shared));
        }
    }
}
