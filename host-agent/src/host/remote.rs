//! Swap device that holds the tenants' remote memory: its device number, whether it is in use as
//! swap, and its read latency. This module only reads sysfs.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use super::sysfs::{Sysfs, SysfsError};

/// Minimum number of reads for a mean latency. A mean of fewer reads is too noisy.
const READS_MIN: u64 = 16;
/// Assumed read latency before the first measurement, in seconds: that of a fast SSD.
const READ_LATENCY_DEFAULT_S: f64 = 100e-6;
/// Maximum factor by which the recorded lowest latency rises per update, so that it follows a
/// device that becomes slower.
const LATENCY_RISE_FACTOR: f64 = 1.05;

/// Reason why the device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The file cannot be inspected.
    #[error("cannot read {}", path.display())]
    Io {
        /// Path of the device.
        path: PathBuf,
        /// Cause.
        #[source]
        errno: io::Error,
    },
    /// The file is not a block device.
    #[error("{} is not a block device: limits apply to devices, so a swap file is not supported", .0.display())]
    NotABlockDevice(PathBuf),
}

/// Swap device for remote memory.
#[derive(Clone, Debug)]
pub struct RemoteDevice {
    path: PathBuf,
    /// Device number of the disk, such as `253:0`.
    number: String,
    /// Directory of the disk in sysfs.
    files: Sysfs,
    /// Counters at the last update.
    last: Reads,
    /// Lowest recent mean latency, in seconds; `None` before the first measurement.
    lowest_latency_s: Option<f64>,
}

/// Counters of a device: completed reads, and their total duration in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
struct Reads {
    count: u64,
    ms: u64,
}

impl RemoteDevice {
    /// Opens the block device at `path`. `sys` is the root of sysfs, `/sys`.
    ///
    /// # Errors
    /// [`RemoteError::Io`], or [`RemoteError::NotABlockDevice`].
    pub fn open(path: &Path, sys: &Path) -> Result<Self, RemoteError> {
        let metadata =
            fs::metadata(path).map_err(|errno| RemoteError::Io { path: path.to_owned(), errno })?;
        if !metadata.file_type().is_block_device() {
            return Err(RemoteError::NotABlockDevice(path.to_owned()));
        }
        let number = metadata.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        Ok(Self::with_number(path, disk_number(&number, sys), sys))
    }

    fn with_number(path: &Path, number: String, sys: &Path) -> Self {
        let files = Sysfs::at(sys.join("dev/block").join(&number));
        let last = read_counters(&files).unwrap_or_default();
        Self { path: path.to_owned(), number, files, last, lowest_latency_s: None }
    }

    /// Creates a device with the number 7:7 in a simulated sysfs.
    #[cfg(test)]
    pub(crate) fn fake(sys: &Path) -> Self {
        Self::with_number(Path::new("/dev/fake"), "7:7".to_owned(), sys)
    }

    /// Returns the path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the device number of the disk, such as `253:0`.
    pub fn number(&self) -> &str {
        &self.number
    }

    /// Returns whether the device is in use as swap, according to the text of `/proc/swaps`.
    pub fn is_swap(&self, swaps: &str) -> bool {
        swap_names(swaps).any(|name| self.has_name(name))
    }

    /// Returns the other devices and files that are in use as swap.
    pub fn other_swaps<'a>(&self, swaps: &'a str) -> Vec<&'a str> {
        swap_names(swaps).filter(|name| !self.has_name(name)).collect()
    }

    /// Returns whether the device has this name. It may have several, so device numbers are also compared.
    fn has_name(&self, name: &str) -> bool {
        let name = Path::new(name);
        name == self.path || is_same_device(name, &self.path)
    }

    /// Returns an estimate of the device's read latency without queueing, in seconds: the lowest
    /// recent mean. Updates the estimate if there were at least [`READS_MIN`] reads since the last
    /// call.
    pub fn read_latency_s(&mut self) -> f64 {
        if let Ok(now) = read_counters(&self.files) {
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

/// Returns the device number of a partition's disk, because I/O limits apply to disks. Other
/// devices are returned unchanged.
fn disk_number(number: &str, sys: &Path) -> String {
    let files = Sysfs::at(sys.join("dev/block"));
    match files.has(Path::new(number).join("partition")) {
        true => files.target(number).ok().and_then(|place| files.text(place.join("../dev")).ok()),
        false => None,
    }
    .unwrap_or_else(|| number.to_owned())
}

/// Reads the counters in a device's `stat`, which begins with reads, merged reads, sectors, and
/// milliseconds.
fn read_counters(files: &Sysfs) -> Result<Reads, SysfsError> {
    let text = files.text("stat")?;
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [count, _, _, ms, ..] => Ok(Reads { count, ms }),
        _ => Err(files.unreadable_error("stat", text, "the counters of a block device")),
    }
}

/// Returns the names of devices and files in the text of `/proc/swaps`.
fn swap_names(swaps: &str) -> impl Iterator<Item = &str> {
    swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    #[test]
    fn read_latency_ignores_queueing_and_few_reads() {
        let stat = |count: u64, ms: u64| format!("   {count} 0 800 {ms}  5 0 40 3 0 1 2");
        let fake = FakeSysfs::new(&[("dev/block/253:0/stat", &stat(0, 0))]);
        let mut remote = RemoteDevice::with_number(Path::new("/dev/vda"), "253:0".to_owned(), &fake.path(""));
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
        let remote =
            RemoteDevice::with_number(Path::new("/dev/vdb"), "253:16".to_owned(), Path::new("/nowhere"));
        let header = "Filename\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!remote.is_swap(header));
        let swaps = format!("{header}/dev/vda partition 1 0 -2\n/dev/vdb partition 1048572 0 -3\n");
        assert!(remote.is_swap(&swaps));
        assert_eq!(remote.other_swaps(&swaps), ["/dev/vda"]);
    }

    #[test]
    fn partition_uses_device_number_of_its_disk() {
        let fake = FakeSysfs::new(&[("devices/sda/dev", "8:0"), ("devices/sda/sda3/partition", "3")]);
        fake.link("dev/block/8:3", "devices/sda/sda3");
        fake.link("dev/block/8:0", "devices/sda");
        assert_eq!(disk_number("8:3", &fake.path("")), "8:0");
        assert_eq!(disk_number("8:0", &fake.path("")), "8:0");
    }

    #[test]
    fn non_block_device_is_rejected_by_name() {
        let error = RemoteDevice::open(Path::new("/dev/null"), Path::new("/sys")).unwrap_err();
        assert!(error.to_string().starts_with("/dev/null is not a block device"), "{error}");
        let error = RemoteDevice::open(Path::new("/dev/nothing"), Path::new("/sys")).unwrap_err();
        assert!(units::chain(&error).contains("/dev/nothing"), "{error}");
    }
}
