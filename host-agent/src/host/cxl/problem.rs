//! What keeps CXL memory from being used, in words that name what mends it.

use units::Bytes;

use super::{super::slices::SliceError, SysfsError};

/// Why there is no device, or not this one.
#[derive(Debug, thiserror::Error)]
pub enum CxlError {
    /// The kernel does not say.
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
    /// A slice's device is not here.
    #[error("this machine has no CXL memory device with serial {serial}")]
    NoSuchDevice {
        /// Which one.
        serial: String,
    },
    /// A slice's device is here and cannot be used.
    #[error("CXL memory device {serial}: {problem}")]
    Problem {
        /// Which one.
        serial: String,
        /// Why not.
        problem: String,
    },
    /// Not the name of a slice.
    #[error("{name:?} is not cxl:SERIAL:INDEX")]
    Name {
        /// What it is instead.
        name: String,
    },
}

/// What keeps one device from being used.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The kernel does not say, or refused.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// Its dax devices.
    #[error(transparent)]
    Slices(#[from] SliceError),
    /// A slice's name would mean two.
    #[error("another device has the same serial")]
    Twins,
    /// No slice fits.
    #[error("it has {bytes} of volatile memory, less than a slice of {}", units::SLICE)]
    Small {
        /// How much it has.
        bytes: Bytes,
    },
    /// The kernel has not brought it up.
    #[error(
        "the kernel has no endpoint for it: `modprobe -a cxl_port cxl_mem`, and see what the kernel's log says of {name}"
    )]
    NoEndpoint {
        /// The kernel's name for it.
        name: String,
    },
    /// It has several, so a slice's place is not clear.
    #[error("it has several regions ({}): destroy them (`cxl destroy-region`), so that there can be one over all of it", .0.join(" "))]
    Regions(Vec<String>),
    /// Its slices would be other bytes than those of the same name on other hosts.
    #[error("{region} begins at byte {at:#x} of it, not at 0: destroy it (`cxl destroy-region {region}`)")]
    NotFromStart {
        /// Which region.
        region: String,
        /// Where in the device's memory it begins.
        at: u64,
    },
    /// Its memory is spread over several devices.
    #[error(
        "{region} interleaves {ways} devices, which cannot be pooled one by one: destroy it (`cxl destroy-region {region}`)"
    )]
    Interleaved {
        /// Which region.
        region: String,
        /// Over how many.
        ways: u64,
    },
    /// The region is no memory.
    #[error("{region} is of mode {mode}, not ram")]
    NotRam {
        /// Which region.
        region: String,
        /// What it is instead.
        mode: String,
    },
    /// The kernel took the region for itself, or lacks a module.
    #[error(
        "{region} has no dax region: `modprobe dax_cxl`; if its memory is already the kernel's, as the firmware said, boot with efi=softreserve"
    )]
    NoDax {
        /// Which region.
        region: String,
    },
    /// There is no place for a region.
    #[error("no window of the machine's physical memory is for a region of {bytes} over it{}", list(tried))]
    NoWindow {
        /// How large it would be.
        bytes: Bytes,
        /// Each window and why not that one.
        tried: Vec<String>,
    },
}

fn list(tried: &[String]) -> String {
    if tried.is_empty() { ": there is none".to_owned() } else { format!(": {}", tried.join("; ")) }
}
