//! Temporary folder on a disk for durable writes, with its file system and the measured cost of a
//! durable write.

use std::{
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tempfile::TempDir;

use crate::failure::Failure;

/// Number of timed durable writes.
const SYNC_COUNT: usize = 200;
/// Data that is appended to a file before each fdatasync(2).
const SYNC_DATA: [u8; 4096] = [0xA5; 4096];
/// Types of file systems that store files in memory, where fsync has no cost.
const MEMORY_FILE_SYSTEMS: [&str; 3] = ["tmpfs", "ramfs", "hugetlbfs"];

/// Temporary folder on a disk, which is removed on drop.
#[derive(Debug)]
pub struct Disk {
    folder: TempDir,
    /// File system and device, such as `ext4 on /dev/vda`.
    pub kind: String,
    /// Durations of a 4 KiB append and fdatasync, in microseconds.
    pub sync_us: Histogram<u64>,
}

impl Disk {
    /// Creates a folder in `parent` and measures durable writes.
    ///
    /// # Errors
    /// [`Failure`] if the folder cannot be created or written, or is not on a disk.
    pub fn new(parent: &Path) -> Result<Self, Failure> {
        fs::create_dir_all(parent).map_err(Failure::file_error("create", parent))?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")
            .map_err(Failure::file_error("read", "/proc/self/mountinfo"))?;
        let parent = parent.canonicalize().map_err(Failure::file_error("resolve", parent))?;
        let (kind, device) = find_file_system(&mounts, &parent);
        if MEMORY_FILE_SYSTEMS.contains(&kind) {
            return Err(Failure::NotADisk { kind: kind.to_owned(), path: parent });
        }
        let folder = tempfile::Builder::new()
            .prefix("tarn-bench-")
            .tempdir_in(&parent)
            .map_err(Failure::file_error("create a folder in", &parent))?;
        let sync_us = measure_syncs(&folder.path().join("sync"))
            .map_err(Failure::file_error("write and sync in", folder.path()))?;
        Ok(Self { folder, kind: format!("{kind} on {device}"), sync_us })
    }

    /// Returns the folder, which is removed when this value is dropped.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Creates a folder with this name in the temporary folder, and returns its path.
    ///
    /// # Errors
    /// [`Failure`] if the folder cannot be created.
    pub fn create_folder(&self, name: &str) -> Result<PathBuf, Failure> {
        let path = self.folder.path().join(name);
        fs::create_dir(&path).map_err(Failure::file_error("create", &path))?;
        Ok(path)
    }
}

fn measure_syncs(path: &Path) -> std::io::Result<Histogram<u64>> {
    let mut file = File::create_new(path)?;
    let mut times = new_histogram_us();
    for _ in 0..SYNC_COUNT {
        let start = Instant::now();
        file.write_all(&SYNC_DATA)?;
        file.sync_data()?;
        record_duration(&mut times, start.elapsed());
    }
    fs::remove_file(path)?;
    Ok(times)
}

/// Returns a histogram of microseconds up to a minute, with three significant digits.
pub fn new_histogram_us() -> Histogram<u64> {
    Histogram::new_with_max(60_000_000, 3).expect("three digits up to a minute are allowed")
}

/// Records a duration in a histogram. Durations above a minute count as a minute.
pub fn record_duration(times: &mut Histogram<u64>, time: Duration) {
    times.saturating_record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
}

/// Returns the type and the device of the file system that contains a path. This is the file system
/// with the longest matching mount point. If several file systems have this mount point, the
/// function returns the last one in `mountinfo`.
fn find_file_system<'a>(mountinfo: &'a str, path: &Path) -> (&'a str, &'a str) {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount_fields, source_fields) = line.split_once(" - ")?;
        let mount_point = mount_fields.split(' ').nth(4)?;
        let mut source_fields = source_fields.split(' ');
        Some((mount_point, source_fields.next()?, source_fields.next()?))
    });
    mounts
        .filter(|(mount_point, ..)| path.starts_with(mount_point))
        .max_by_key(|(mount_point, ..)| mount_point.len())
        .map_or(("an unknown file system", "an unknown device"), |(_, kind, device)| (kind, device))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTINFO_TEXT: &str = "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                          25 21 0:22 / /dev/shm rw shared:3 - tmpfs tmpfs rw\n\
                          26 21 0:23 / /dev rw - devtmpfs udev rw\n";

    #[test]
    fn file_system_is_that_of_innermost_mount() {
        assert_eq!(find_file_system(MOUNTINFO_TEXT, Path::new("/work/target")), ("ext4", "/dev/vda"));
        assert_eq!(find_file_system(MOUNTINFO_TEXT, Path::new("/dev/shm/rack")), ("tmpfs", "tmpfs"));
        assert_eq!(find_file_system(MOUNTINFO_TEXT, Path::new("/dev/shmem")), ("devtmpfs", "udev"));
    }

    #[test]
    fn memory_file_system_is_rejected() {
        let refused = Disk::new(Path::new("/dev/shm"));
        assert!(matches!(refused, Err(Failure::NotADisk { .. })), "{refused:?}");
    }
}
