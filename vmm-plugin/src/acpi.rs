//! ACPI tables of a guest, generated from its [`Layout`]: NUMA affinity (SRAT), distances (SLIT),
//! latencies and bandwidths (HMAT), and the devices (MADT, FADT, DSDT). The platform is
//! hardware-reduced (ACPI 6.5, section 4.1), that is, without the fixed hardware of ACPI.

mod hardware;
mod numa;

use acpi_tables::{Aml, rsdp::Rsdp, xsdt::XSDT};

use crate::{
    layout::Layout,
    platform::{MmioWindow, RESET_VECTOR},
};

/// Guest-physical address of the ACPI tables. The RSDP comes first: kernels search for it between
/// 0xe0000 and 0xfffff.
pub const ACPI_TABLES_START: u64 = 0xe_0000;

/// OEM ID in the header of each table.
const OEM_ID: [u8; 6] = *b"TARN  ";
const OEM_TABLE_ID: [u8; 8] = *b"TARNVMM ";
const OEM_REVISION: u32 = 1;
/// Alignment of each table, in bytes.
const TABLE_ALIGNMENT: usize = 16;

/// Error returned when the ACPI tables do not fit below the reset vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest's ACPI tables need {bytes} bytes, but only {available} are available")]
pub struct TablesTooLarge {
    bytes: usize,
    available: usize,
}

/// Returns the bytes of all ACPI tables, to be loaded at [`ACPI_TABLES_START`].
///
/// # Errors
/// [`TablesTooLarge`] if there are so many devices that the tables reach the reset vector.
pub fn build_tables(layout: &Layout, windows: &[MmioWindow]) -> Result<Vec<u8>, TablesTooLarge> {
    let mut builder = TableBuilder { bytes: vec![0; Rsdp::len()] };
    let dsdt = builder.append(&hardware::dsdt(windows));
    let fadt = builder.append(&aml_bytes(&hardware::fadt(dsdt)));
    let madt = builder.append(&aml_bytes(&hardware::madt(layout)));
    let srat = builder.append(numa::srat(layout).as_slice());
    let slit = builder.append(&numa::slit(layout));
    let hmat = builder.append(numa::hmat(layout).as_slice());
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    [fadt, madt, srat, slit, hmat].into_iter().for_each(|table| xsdt.add_entry(table));
    let xsdt = builder.append(&aml_bytes(&xsdt));
    let rsdp = aml_bytes(&Rsdp::new(OEM_ID, xsdt));
    builder.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    let (bytes, available) =
        (builder.bytes.len(), usize::try_from(RESET_VECTOR - ACPI_TABLES_START).unwrap_or(0));
    if bytes > available { Err(TablesTooLarge { bytes, available }) } else { Ok(builder.bytes) }
}

/// Concatenates ACPI tables and assigns their addresses.
struct TableBuilder {
    bytes: Vec<u8>,
}

impl TableBuilder {
    /// Appends an ACPI table and returns the guest-physical address of the table.
    fn append(&mut self, table: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(TABLE_ALIGNMENT);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(table);
        ACPI_TABLES_START + at as u64
    }
}

fn aml_bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
