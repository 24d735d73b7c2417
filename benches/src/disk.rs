//! Disk of durable writes: its file system, and the cost of a durable write.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tempfile::TempDir;

use crate::failure::Failure;

/// Durable writes timed to know the disk.
const SYNCS: usize = 200;
/// Bytes appended before each sync.
const SYNC_BYTES: [u8; 4096] = [0xA5; 4096];
/// File systems that keep nothing.
const NOT_DISKS: [&str; 3] = ["tmpfs", "ramfs", "hugetlbfs"];

/// A temporary folder on a disk.
#[derive(Debug)]
pub struct Disk {
    folder: TempDir,
    /// Its file system and device, such as `ext4 on /dev/vda`.
    pub kind: String,
    /// A 4 KiB append and fdatasync, in microseconds.
    pub sync_us: Histogram<u64>,
}

impl Disk {
    /// Makes a folder in `parent` and gets to know it.
    ///
    /// # Errors
    /// The folder cannot be made or written, or it is not on a disk.
    pub fn new(parent: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(parent).map_err(Failure::file("create", parent))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(Failure::file("read", "/proc/self/mountinfo"))?;
        let parent = parent.canonicalize().map_err(Failure::file("resolve", parent))?;
        let (kind, device) = file_system(&mounts, &parent);
        if NOT_DISKS.contains(&kind) {
            return Err(Failure::NotADisk { kind: kind.to_owned(), path: parent });
        }
        let folder = tempfile::Builder::new()
            .prefix("tarn-bench-")
            .tempdir_in(&parent)
            .map_err(Failure::file("create a folder in", &parent))?;
        let sync_us = time_syncs(&folder.path().join("sync"))
            .map_err(Failure::file("write and sync in", folder.path()))?;
        Ok(Self { folder, kind: format!("{kind} on {device}"), sync_us })
    }

    /// The folder; it goes away with this value.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A new folder in it.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn folder(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.folder.path().join(name);
        fs::create_dir(&path).map_err(Failure::file("create", &path))?;
        Ok(path)
    }
}

fn time_syncs(path: &Path) -> std::io::Result<Histogram<u64>> {
    let mut file = File::create_new(path)?;
    let mut times = microseconds();
    for _ in 0..SYNCS {
        let start = Instant::now();
        file.write_all(&SYNC_BYTES)?;
        file.sync_data()?;
        record(&mut times, start.elapsed());
    }
    fs::remove_file(path)?;
    Ok(times)
}

/// A histogram of microseconds up to a minute, exact to three digits.
pub fn microseconds() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000, 3).expect("three digits up to a minute are allowed")
}

/// Adds one duration; those of more than a minute count as a minute.
pub fn record(times: &mut Histogram<u64>, time: Duration) {
    times.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
}

/// Type and device of the file system a path is on: the mount with the longest matching mount point, the later of equals.
fn file_system<'a>(mountinfo: &'a str, path: &Path) -> (&'a str, &'a str) {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = left.split(' ').nth(4)?;
        let mut right = right.split(' ');
        Some((point, right.next()?, right.next()?))
    });
    mounts
        .filter(|(point, ..)| path.starts_with(point))
        .max_by_key(|(point, ..)| point.len())
        .map_or(("an unknown file system", "an unknown device"), |(_, kind, device)| (kind, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                          25 21 0:22 / /dev/shm rw shared:3 - tmpfs tmpfs rw\n\
                          26 21 0:23 / /dev rw - devtmpfs udev rw\n";

    #[test]
    fn the_innermost_mount_tells_the_file_system() {
        assert_eq!(file_system(MOUNTS, Path::new("/work/target")), ("ext4", "/dev/vda"));
        assert_eq!(file_system(MOUNTS, Path::new("/dev/shm/rack")), ("tmpfs", "tmpfs"));
        assert_eq!(file_system(MOUNTS, Path::new("/dev/shmem")), ("devtmpfs", "udev"));
    }

    #[test]
    fn memory_is_refused_as_a_disk() {
        let refused = Disk::new(Path::new("/dev/shm"));
        assert!(matches!(refused, Err(Failure::NotADisk { .. })), "{refused:?}");
    }
}
