//! Errors of CXL memory devices. Most messages contain the command that fixes the error.

use units::Bytes;

use super::{super::slices::SliceError, SysfsError};

/// Reason why CXL memory devices, or the device of a slice, cannot be found or used.
#[derive(Debug, thiserror::Error)]
pub enum CxlError {
    /// A file in sysfs could not be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The kernel has no CXL bus.
    #[error(
        "this machine has no CXL bus (/sys/bus/cxl): boot a kernel with CONFIG_CXL_BUS, and run `modprobe cxl_acpi`"
    )]
    NoBus,
    /// The CXL bus has no memory device.
    #[error(
        "the CXL bus has no memory device: run `modprobe -a cxl_acpi cxl_pci cxl_mem`, and check `lspci`"
    )]
    NoDevice,
    /// The device of a slice is missing.
    #[error("this machine has no CXL memory device with serial {serial}")]
    NoSuchDevice {
        /// Serial number of the device.
        serial: String,
    },
    /// The device of a slice is present, but cannot be used.
    #[error("CXL memory device {serial}: {problem}")]
    Problem {
        /// Serial number of the device.
        serial: String,
        /// Message of the [`Problem`].
        problem: String,
    },
    /// The name of a slice is invalid.
    #[error("invalid slice name {name:?}: must be cxl:SERIAL:INDEX")]
    Name {
        /// Invalid name.
        name: String,
    },
}

/// Reason why a CXL memory device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A file in sysfs could not be read or written.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The dax devices of the region cannot be used.
    #[error(transparent)]
    Slices(#[from] SliceError),
    /// Another device has the same serial number.
    #[error("another CXL memory device has the same serial number")]
    DuplicateSerial,
    /// The volatile capacity of the device is smaller than a slice.
    #[error("volatile capacity {bytes} is too small: must be at least {}, the size of a slice", units::SLICE)]
    TooSmall {
        /// Volatile capacity of the device.
        bytes: Bytes,
    },
    /// The kernel has no endpoint port for the device.
    #[error(
        "the kernel has no endpoint port for {name}: run `modprobe -a cxl_port cxl_mem`, and check the kernel log for {name}"
    )]
    NoEndpoint {
        /// Name of the device in the kernel, such as `mem0`.
        name: String,
    },
    /// The device has several regions, so the location of a slice is ambiguous.
    #[error("the device has several regions ({}): destroy them (`cxl destroy-region`), so that one region can cover the device", .0.join(" "))]
    Regions(Vec<String>),
    /// The region does not begin at the start of the device. Its slices would not match slices of
    /// the same name on other hosts.
    #[error(
        "{region} begins at byte {at:#x} of the device, must begin at 0: destroy it (`cxl destroy-region {region}`)"
    )]
    NotFromStart {
        /// Name of the region.
        region: String,
        /// Offset in the device's memory at which the region begins, in bytes.
        at: u64,
    },
    /// The region is interleaved over several devices.
    #[error(
        "{region} interleaves {ways} devices, must contain one device: destroy it (`cxl destroy-region {region}`)"
    )]
    Interleaved {
        /// Name of the region.
        region: String,
        /// Number of interleaved devices.
        ways: u64,
    },
    /// The region is not in volatile mode (`ram`).
    #[error("{region} has mode {mode}, must have mode ram: destroy it (`cxl destroy-region {region}`)")]
    NotRam {
        /// Name of the region.
        region: String,
        /// Mode of the region in sysfs, such as `pmem`.
        mode: String,
    },
    /// The region has no dax region: the kernel uses its memory itself, or a module is missing.
    #[error(
        "{region} has no dax region: run `modprobe dax_cxl`; if the kernel already uses the memory as system RAM, boot with efi=softreserve"
    )]
    NoDax {
        /// Name of the region.
        region: String,
    },
    /// No CXL window can contain a region for the device.
    #[error("no CXL memory window can contain a region of {bytes}{}", format_rejections(tried))]
    NoWindow {
        /// Size of the region.
        bytes: Bytes,
        /// Windows, each with the reason why it cannot contain the region.
        tried: Vec<String>,
    },
}

/// Formats the windows and the reasons as the end of an error message.
fn format_rejections(tried: &[String]) -> String {
    if tried.is_empty() { ": no window exists".to_owned() } else { format!(": {}", tried.join("; ")) }
}
