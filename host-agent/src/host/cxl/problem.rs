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
    #[error(
        "there is no memory device on the CXL bus: `modprobe -a cxl_acpi cxl_pci cxl_mem`, and look for one with `lspci`"
    )]
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
    /// The text is no slice.
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
        "the kernel has no endpoint for it: `modprobe -a cxl_port cxl_mem`, and see what the kernel's log says of {name}"
    )]
    NoEndpoint {
        /// Name in the kernel.
        name: String,
    },
    /// It has several regions, so the location of a slice is ambiguous.
    #[error("it has several regions ({}): destroy them (`cxl destroy-region`), so that there can be one over all of it", .0.join(" "))]
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
        "{region} interleaves {ways} devices, which cannot be pooled one by one: destroy it (`cxl destroy-region {region}`)"
    )]
    Interleaved {
        /// Region.
        region: String,
        /// Number of devices.
        ways: u64,
    },
    /// The region is no volatile memory.
    #[error("{region} is of mode {mode}, not ram")]
    NotRam {
        /// Region.
        region: String,
        /// Type.
        mode: String,
    },
    /// The kernel uses the region itself, or a module is missing.
    #[error(
        "{region} has no dax region: `modprobe dax_cxl`; if its memory is already the kernel's, as the firmware said, boot with efi=softreserve"
    )]
    NoDax {
        /// Region.
        region: String,
    },
    /// No window can contain a region.
    #[error("no window of the machine's physical memory is for a region of {bytes} over it{}", list(tried))]
    NoWindow {
        /// Size of the region.
        bytes: Bytes,
        /// Windows with reasons.
        tried: Vec<String>,
    },
}

fn list(tried: &[String]) -> String {
    if tried.is_empty() { ": there is none".to_owned() } else { format!(": {}", tried.join("; ")) }
}
