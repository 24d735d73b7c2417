//! Reasons why CXL memory cannot be used, each with a remedy.

use units::Bytes;

use super::{super::slices::SliceError, SysfsError};

/// Reason why there is no device, or not a certain one.
#[derive(Debug, thiserror::Error)]
pub enum CxlError {
    /// The kernel does not report it.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The kernel has no CXL bus.
    #[error(
        "this machine has no CXL bus (/sys/bus/cxl): its kernel needs CONFIG_CXL_BUS, and `modprobe cxl_acpi`"
    )]
    NoBus,
    /// The bus is empty.
    #[error("no memory device on the CXL bus: run `modprobe -a cxl_acpi cxl_pci cxl_mem`, and check `lspci`")]
    NoDevice,
    /// A slice's device is not present.
    #[error("this machine has no CXL memory device with serial {serial}")]
    NoSuchDevice {
        /// Serial number.
        serial: String,
    },
    /// A slice's device is present and cannot be used.
    #[error("CXL memory device {serial}: {problem}")]
    Problem {
        /// Serial number.
        serial: String,
        /// Reason.
        problem: String,
    },
    /// The text is not the name of a slice.
    #[error("{name:?} is not cxl:SERIAL:INDEX")]
    Name {
        /// Text.
        name: String,
    },
}

/// Reason why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The kernel does not report its state, or rejects an operation.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// Error of its dax devices.
    #[error(transparent)]
    Slices(#[from] SliceError),
    /// Another device has the same serial number.
    #[error("another device has the same serial number")]
    DuplicateSerial,
    /// It is smaller than a slice.
    #[error("it has {bytes} of volatile memory, less than a slice of {}", units::SLICE)]
    TooSmall {
        /// Size.
        bytes: Bytes,
    },
    /// The kernel has not enabled it.
    #[error(
        "the kernel has no endpoint for it: run `modprobe -a cxl_port cxl_mem`, and check the kernel log for {name}"
    )]
    NoEndpoint {
        /// Name in the kernel.
        name: String,
    },
    /// The device has several regions, so the location of a slice is ambiguous.
    #[error("it has several regions ({}): destroy them (`cxl destroy-region`), so that one region can cover the device", .0.join(" "))]
    Regions(Vec<String>),
    /// Its slices would have other contents than slices of the same name on other hosts.
    #[error("{region} begins at byte {at:#x} of it, not at 0: destroy it (`cxl destroy-region {region}`)")]
    NotFromStart {
        /// Region.
        region: String,
        /// Offset in the device's memory at which it begins.
        at: u64,
    },
    /// Its memory is interleaved with other devices.
    #[error(
        "{region} interleaves {ways} devices, which cannot be pooled separately: destroy it (`cxl destroy-region {region}`)"
    )]
    Interleaved {
        /// Region.
        region: String,
        /// Number of devices.
        ways: u64,
    },
    /// The region is not in volatile mode (`ram`).
    #[error("{region} is of mode {mode}, not ram")]
    NotRam {
        /// Region.
        region: String,
        /// Type.
        mode: String,
    },
    /// The kernel uses the region itself, or a module is missing.
    #[error(
        "{region} has no dax region: `modprobe dax_cxl`; if the kernel uses its memory already, as set by the firmware, boot with efi=softreserve"
    )]
    NoDax {
        /// Region.
        region: String,
    },
    /// No window can contain a region.
    #[error("no window of physical memory can contain a region of {bytes} over it{}", list(tried))]
    NoWindow {
        /// Size of the region.
        bytes: Bytes,
        /// Windows with reasons.
        tried: Vec<String>,
    },
}

fn list(tried: &[String]) -> String {
    if tried.is_empty() { ": no windows exist".to_owned() } else { format!(": {}", tried.join("; ")) }
}
