//! A guest's ACPI tables, written from its [`Layout`]: which processor and which memory is of which node (SRAT), how far
//! (SLIT) and how fast (HMAT) they are for each other, and what devices there are (MADT, FADT, DSDT). The platform is a
//! hardware-reduced one (ACPI 6.5, section 4.1), as it has nothing that the reduction leaves out.

mod hardware;
mod numa;

use acpi_tables::{Aml, rsdp::Rsdp, xsdt::XSDT};

use crate::{
    layout::Layout,
    platform::{RESET_VECTOR, Window},
};

/// Where the tables begin: the root pointer, where kernels look for it that nobody told.
pub const TABLES_START: u64 = 0xe_0000;

const OEM: [u8; 6] = *b"TARN  ";
const OEM_TABLE: [u8; 8] = *b"TARNVMM ";
const OEM_REVISION: u32 = 1;
/// Tables begin at addresses that this divides.
const ALIGNMENT: usize = 16;

/// More tables than there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest's tables need {bytes} bytes, and there is available for {available}")]
pub struct TablesTooLarge {
    bytes: usize,
    available: usize,
}

/// All tables, as they lie from [`TABLES_START`] on.
///
/// # Errors
/// [`TablesTooLarge`], with many devices.
pub fn tables(layout: &Layout, windows: &[Window]) -> Result<Vec<u8>, TablesTooLarge> {
    let mut builder = TableBuilder { bytes: vec![0; Rsdp::len()] };
    let dsdt = builder.append(&hardware::dsdt(windows));
    let fadt = builder.append(&aml_bytes(&hardware::fadt(dsdt)));
    let madt = builder.append(&aml_bytes(&hardware::madt(layout)));
    let srat = builder.append(numa::srat(layout).as_slice());
    let slit = builder.append(&numa::slit(layout));
    let hmat = builder.append(numa::hmat(layout).as_slice());
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    [fadt, madt, srat, slit, hmat].into_iter().for_each(|table| xsdt.add_entry(table));
    let xsdt = builder.append(&aml_bytes(&xsdt));
    let rsdp = aml_bytes(&Rsdp::new(OEM, xsdt));
    builder.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    let (bytes, available) = (builder.bytes.len(), usize::try_from(RESET_VECTOR - TABLES_START).unwrap_or(0));
    if bytes > available { Err(TablesTooLarge { bytes, available }) } else { Ok(builder.bytes) }
}

/// Tables side by side.
struct TableBuilder {
    bytes: Vec<u8>,
}

impl TableBuilder {
    /// Puts a table beside the others, and says where.
    fn append(&mut self, table: &[u8]) -> u64 {
        let at = self.bytes.len().next_multiple_of(ALIGNMENT);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(table);
        TABLES_START + at as u64
    }
}

fn aml_bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests;
