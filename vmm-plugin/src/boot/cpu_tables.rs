//! Segments, GDT and identity-mapped page tables for the first vCPU at kernel entry.

use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError};

use super::BootProtocol;
use crate::memory::GuestMemory;

/// Guest-physical addresses of the page tables.
const PML4_ADDRESS: u64 = 0x9000;
const PDPT_ADDRESS: u64 = 0xa000;
const PD_ADDRESS: u64 = 0xb000;
/// Size of the identity-mapped memory, in GiB. A kernel does not access higher addresses before it
/// has created its own page tables.
const IDENTITY_MAPPED_GIB: u64 = 4;
const ENTRIES_PER_TABLE: u64 = 512;
const ENTRY_BYTES: u64 = 8;
const TABLE_BYTES: u64 = 4096;
const LARGE_PAGE_SHIFT: u64 = 21;

const PRESENT_WRITABLE: u64 = 0b11;
const PAGE_SIZE_BIT: u64 = 1 << 7;

const CR0_PE: u64 = 1;
const CR0_NE: u64 = 1 << 5;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME_LMA: u64 = 1 << 8 | 1 << 10;

/// Segment selectors of the Linux boot protocol: __BOOT_CS and __BOOT_DS.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TSS_SELECTOR: u16 = 0x20;
const GDT_ADDRESS: u64 = 0x500;

/// Writes page tables that identity-map the first 4 GiB in 2 MiB pages.
///
/// # Errors
/// [`GuestMemoryError`] if guest memory does not contain the addresses of the page tables.
pub fn write_page_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    memory.write_obj(PDPT_ADDRESS | PRESENT_WRITABLE, GuestAddress(PML4_ADDRESS))?;
    for gib in 0..IDENTITY_MAPPED_GIB {
        let directory = PD_ADDRESS + gib * TABLE_BYTES;
        memory.write_obj(directory | PRESENT_WRITABLE, GuestAddress(PDPT_ADDRESS + gib * ENTRY_BYTES))?;
        for entry in 0..ENTRIES_PER_TABLE {
            let page = (gib * ENTRIES_PER_TABLE + entry) << LARGE_PAGE_SHIFT;
            memory.write_obj(
                page | PRESENT_WRITABLE | PAGE_SIZE_BIT,
                GuestAddress(directory + entry * ENTRY_BYTES),
            )?;
        }
    }
    Ok(())
}

/// Segments of the first vCPU when the kernel starts.
#[derive(Clone, Copy, Debug)]
pub struct Segments(BootProtocol);

impl Segments {
    /// Returns the segments for a boot protocol.
    pub fn new(protocol: BootProtocol) -> Self {
        Self(protocol)
    }

    /// Writes the global descriptor table (GDT) into guest memory.
    ///
    /// # Errors
    /// [`GuestMemoryError`] if guest memory does not contain the address of the GDT.
    pub fn write_gdt(self, memory: &GuestMemory) -> Result<(), GuestMemoryError> {
        let table = [
            (CODE_SELECTOR, self.code_segment()),
            (DATA_SELECTOR, self.data_segment()),
            (TSS_SELECTOR, self.tss_segment()),
        ];
        for (selector, segment) in table {
            memory.write_obj(gdt_descriptor(&segment), GuestAddress(GDT_ADDRESS + u64::from(selector)))?;
        }
        Ok(())
    }

    /// Sets the segment registers, descriptor table registers and control registers of a vCPU.
    pub fn apply(self, registers: &mut kvm_sregs) {
        let data = self.data_segment();
        registers.cs = self.code_segment();
        (registers.ds, registers.es, registers.fs, registers.gs, registers.ss) =
            (data, data, data, data, data);
        registers.tr = self.tss_segment();
        registers.gdt.base = GDT_ADDRESS;
        registers.gdt.limit = TSS_SELECTOR + 7;
        registers.idt.base = 0;
        registers.idt.limit = 0;
        registers.cr0 = CR0_PE | CR0_ET | CR0_NE;
        registers.cr4 = 0;
        if self.0 == BootProtocol::Linux64 {
            registers.cr0 |= CR0_PG;
            registers.cr3 = PML4_ADDRESS;
            registers.cr4 = CR4_PAE;
            registers.efer = EFER_LME_LMA;
        }
    }

    fn code_segment(self) -> kvm_segment {
        let is_64_bit = u8::from(self.0 == BootProtocol::Linux64);
        kvm_segment {
            selector: CODE_SELECTOR,
            type_: 0b1011,
            l: is_64_bit,
            db: 1 - is_64_bit,
            ..FLAT_SEGMENT
        }
    }

    fn data_segment(self) -> kvm_segment {
        kvm_segment { selector: DATA_SELECTOR, type_: 0b0011, db: 1, ..FLAT_SEGMENT }
    }

    fn tss_segment(self) -> kvm_segment {
        kvm_segment { selector: TSS_SELECTOR, type_: 0b1011, limit: 0x67, s: 0, g: 0, ..FLAT_SEGMENT }
    }
}

/// Segment with base 0 and a limit of 4 GiB.
const FLAT_SEGMENT: kvm_segment = kvm_segment {
    base: 0,
    limit: 0xffff_ffff,
    selector: 0,
    type_: 0,
    present: 1,
    dpl: 0,
    db: 0,
    s: 1,
    l: 0,
    g: 1,
    avl: 0,
    unusable: 0,
    padding: 0,
};

/// Encodes a segment with base 0 as a GDT descriptor (Intel SDM, volume 3, figure 3-8).
fn gdt_descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let access = u64::from(segment.type_) | u64::from(segment.s) << 4 | u64::from(segment.present) << 7;
    let flags = u64::from(segment.l) << 1 | u64::from(segment.db) << 2 | u64::from(segment.g) << 3;
    limit & 0xffff | access << 40 | (limit >> 16 & 0xf) << 48 | flags << 52
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gdt_descriptors_have_the_expected_encoding() {
        let linux = Segments::new(BootProtocol::Linux64);
        assert_eq!(gdt_descriptor(&linux.code_segment()), 0x00af_9b00_0000_ffff);
        assert_eq!(gdt_descriptor(&linux.data_segment()), 0x00cf_9300_0000_ffff);
        assert_eq!(gdt_descriptor(&Segments::new(BootProtocol::Pvh).code_segment()), 0x00cf_9b00_0000_ffff);
        assert_eq!(gdt_descriptor(&linux.tss_segment()), 0x0000_8b00_0000_0067);
    }
}
