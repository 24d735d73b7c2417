//! Device of the tenants' remote memory: a swap device, with its number, its use as swap, and its
//! read latency. It is only read.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use super::sysfs::{Sysfs, SysfsError};

/// Number of reads below which their mean is unreliable.
const READS_MIN: u64 = 16;
/// Assumed read latency before the first measurement, in seconds: that of a fast drive.
const READ_LATENCY_DEFAULT_S: f64 = 100e-6;
/// Factor by which the smallest recorded latency rises per update when reads take longer.
const LATENCY_RISE_FACTOR: f64 = 1.05;

/// Reason why the device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// It cannot be inspected.
    #[error("read {}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// It is not a block device.
    #[error("{} is not a block device: limits apply to devices, so a swap file is not supported", .0.display())]
    NotABlockDevice(PathBuf),
}

/// A swap device.
#[derive(Clone, Debug)]
pub struct Remote {
    path: PathBuf,
    number: String,
    files: Sysfs,
    last: Reads,
    /// Read latency of the idle device, in seconds; `None` before the first measurement.
    lowest_latency_s: Option<f64>,
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    count: u64,
    ms: u64,
}

impl Remote {
    /// Opens the device of this name; its counters are in a tree such as `/sys`.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn open(path: &Path, sys: &Path) -> Result<Self, RemoteError> {
        let metadata =
            fs::metadata(path).map_err(|errno| RemoteError::Io { path: path.to_owned(), errno })?;
        if !metadata.file_type().is_block_device() {
            return Err(RemoteError::NotABlockDevice(path.to_owned()));
        }
        let number = metadata.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        Ok(Self::numbered(path, disk_of(&number, sys), sys))
    }

    fn numbered(path: &Path, number: String, sys: &Path) -> Self {
        let files = Sysfs::at(sys.join("dev/block").join(&number));
        let last = reads(&files).unwrap_or_default();
        Self { path: path.to_owned(), number, files, last, lowest_latency_s: None }
    }

    /// Creates one in a fake tree.
    #[cfg(test)]
    pub(crate) fn fake(sys: &Path) -> Self {
        Self::numbered(Path::new("/dev/fake"), "7:7".to_owned(), sys)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its number, such as `253:0`.
    pub fn number(&self) -> &str {
        &self.number
    }

    /// Returns whether it is in use as swap, from a text such as `/proc/swaps`.
    pub fn is_swap(&self, swaps: &str) -> bool {
        let names = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
        // A device may have several names.
        names.map(Path::new).any(|name| name == self.path || is_same_device(name, &self.path))
    }

    /// Returns the read latency of the idle device, in seconds, updated from all reads since the
    /// last call.
    pub fn read_latency_s(&mut self) -> f64 {
        if let Ok(now) = reads(&self.files) {
            let (count, ms) =
                (now.count.saturating_sub(self.last.count), now.ms.saturating_sub(self.last.ms));
            if count >= READS_MIN {
                let mean = (ms as f64 / count as f64 / 1000.0).max(1e-7);
                self.lowest_latency_s = Some(
                    self.lowest_latency_s
                        .map_or(mean, |lowest_latency_s| mean.min(lowest_latency_s * LATENCY_RISE_FACTOR)),
                );
                self.last = now;
            }
        }
        self.lowest_latency_s.unwrap_or(READ_LATENCY_DEFAULT_S)
    }
}

fn is_same_device(first: &Path, second: &Path) -> bool {
    fs::metadata(first).is_ok_and(|first| {
        fs::metadata(second).is_ok_and(|second| first.rdev() == second.rdev() && first.rdev() != 0)
    })
}

/// Returns the disk of a partition: counters and limits belong to disks.
fn disk_of(number: &str, sys: &Path) -> String {
    let files = Sysfs::at(sys.join("dev/block"));
    match files.has(Path::new(number).join("partition")) {
        true => files.target(number).ok().and_then(|place| files.text(place.join("../dev")).ok()),
        false => None,
    }
    .unwrap_or_else(|| number.to_owned())
}

/// Parses a device's `stat`: reads, merged reads, sectors, milliseconds.
fn reads(files: &Sysfs) -> Result<Reads, SysfsError> {
    let text = files.text("stat")?;
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [count, _, _, ms, ..] => Ok(Reads { count, ms }),
        _ => Err(files.unreadable("stat", text, "a device's counters")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    #[test]
    fn read_latency_is_of_an_idle_device() {
        let stat = |count: u64, ms: u64| format!("   {count} 0 800 {ms}  5 0 40 3 0 1 2");
        let fake = FakeSysfs::new(&[("dev/block/253:0/stat", &stat(0, 0))]);
        let mut remote = Remote::numbered(Path::new("/dev/vda"), "253:0".to_owned(), &fake.path(""));
        assert_eq!(remote.read_latency_s(), READ_LATENCY_DEFAULT_S, "no reads yet");
        fake.files("dev/block/253:0", &[("stat", &stat(1000, 2000))]);
        assert_eq!(remote.read_latency_s(), 2e-3);
        fake.files("dev/block/253:0", &[("stat", &stat(2000, 22_000))]);
        assert_eq!(remote.read_latency_s(), 2e-3 * LATENCY_RISE_FACTOR, "20 ms includes queueing");
        fake.files("dev/block/253:0", &[("stat", &stat(2010, 22_000))]);
        assert_eq!(remote.read_latency_s(), 2e-3 * LATENCY_RISE_FACTOR, "ten reads are too few");
    }

    #[test]
    fn swap_device_in_use_is_recognized() {
        let remote = Remote::numbered(Path::new("/dev/vdb"), "253:16".to_owned(), Path::new("/nowhere"));
        let header = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!remote.is_swap(header));
        assert!(
            remote.is_swap(&format!("{header}/dev/vda partition 1 0 -2\n/dev/vdb partition 1048572 0 -3\n"))
        );
    }

    #[test]
    fn partition_uses_device_number_of_its_disk() {
        let fake = FakeSysfs::new(&[("devices/sda/dev", "8:0"), ("devices/sda/sda3/partition", "3")]);
        fake.link("dev/block/8:3", "devices/sda/sda3");
        fake.link("dev/block/8:0", "devices/sda");
        assert_eq!(disk_of("8:3", &fake.path("")), "8:0");
        assert_eq!(disk_of("8:0", &fake.path("")), "8:0");
    }

    #[test]
    fn non_block_device_is_rejected_by_name() {
        let error = Remote::open(Path::new("/dev/null"), Path::new("/sys")).unwrap_err();
        assert!(error.to_string().starts_with("/dev/null is not a block device"), "{error}");
        let error = Remote::open(Path::new("/dev/nothing"), Path::new("/sys")).unwrap_err();
        assert!(units::chain(&error).contains("/dev/nothing"), "{error}");
    }
}
