//! What a processor's own registers point to while a kernel starts: segments, and page tables that map memory as it is.

use kvm_bindings::{kvm_segment, kvm_sregs};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryError};

use super::Protocol;
use crate::memory::GuestMemory;

const PAGE_MAPS: u64 = 0x9000;
const PAGE_DIRECTORY_POINTERS: u64 = 0xa000;
const PAGE_DIRECTORIES: u64 = 0xb000;
/// Everything a kernel touches before it has tables of its own lies below 4 GiB.
const GIBIBYTES_MAPPED: u64 = 4;
const ENTRIES: u64 = 512;
const ENTRY_BYTES: u64 = 8;
const TABLE_BYTES: u64 = 4096;
const LARGE_PAGE_SHIFT: u64 = 21;

const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;

const CR0_PROTECTED: u64 = 1;
const CR0_NUMERIC_ERROR: u64 = 1 << 5;
const CR0_EXTENSION_TYPE: u64 = 1 << 4;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;

/// Linux's boot protocol wants code at 0x10 and data at 0x18.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
const GLOBAL_TABLE: u64 = 0x500;

/// Maps the first 4 GiB as they are, in large pages.
///
/// # Errors
/// No guest memory there.
pub fn write_page_tables(memory: &GuestMemory) -> Result<(), GuestMemoryError> {
    memory.write_obj(PAGE_DIRECTORY_POINTERS | PRESENT_WRITABLE, GuestAddress(PAGE_MAPS))?;
    for gib in 0..GIBIBYTES_MAPPED {
        let directory = PAGE_DIRECTORIES + gib * TABLE_BYTES;
        memory.write_obj(
            directory | PRESENT_WRITABLE,
            GuestAddress(PAGE_DIRECTORY_POINTERS + gib * ENTRY_BYTES),
        )?;
        for entry in 0..ENTRIES {
            let page = (gib * ENTRIES + entry) << LARGE_PAGE_SHIFT;
            memory
                .write_obj(page | PRESENT_WRITABLE | LARGE, GuestAddress(directory + entry * ENTRY_BYTES))?;
        }
    }
    Ok(())
}

/// A processor's segments, as the boot protocols want them.
#[derive(Clone, Copy, Debug)]
pub struct Segments(Protocol);

impl Segments {
    /// For a protocol.
    pub fn of(protocol: Protocol) -> Self {
        Self(protocol)
    }

    /// Writes the table that says what the selectors mean.
    ///
    /// # Errors
    /// No guest memory there.
    pub fn write_table(self, memory: &GuestMemory) -> Result<(), GuestMemoryError> {
        let table = [(CODE, self.code()), (DATA, self.data()), (TASK, self.task())];
        for (selector, segment) in table {
            memory.write_obj(descriptor(&segment), GuestAddress(GLOBAL_TABLE + u64::from(selector)))?;
        }
        Ok(())
    }

    /// Sets the registers.
    pub fn apply(self, registers: &mut kvm_sregs) {
        let data = self.data();
        registers.cs = self.code();
        (registers.ds, registers.es, registers.fs, registers.gs, registers.ss) =
            (data, data, data, data, data);
        registers.tr = self.task();
        registers.gdt.base = GLOBAL_TABLE;
        registers.gdt.limit = TASK + 7;
        registers.idt.base = 0;
        registers.idt.limit = 0;
        registers.cr0 = CR0_PROTECTED | CR0_EXTENSION_TYPE | CR0_NUMERIC_ERROR;
        registers.cr4 = 0;
        if self.0 == Protocol::Linux64 {
            registers.cr0 |= CR0_PAGING;
            registers.cr3 = PAGE_MAPS;
            registers.cr4 = CR4_PHYSICAL_ADDRESS_EXTENSION;
            registers.efer = EFER_LONG_MODE;
        }
    }

    fn code(self) -> kvm_segment {
        let long = u8::from(self.0 == Protocol::Linux64);
        kvm_segment { selector: CODE, type_: 0b1011, l: long, db: 1 - long, ..FLAT }
    }

    fn data(self) -> kvm_segment {
        kvm_segment { selector: DATA, type_: 0b0011, db: 1, ..FLAT }
    }

    fn task(self) -> kvm_segment {
        kvm_segment { selector: TASK, type_: 0b1011, limit: 0x67, s: 0, g: 0, ..FLAT }
    }
}

const FLAT: kvm_segment = kvm_segment {
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

/// A segment as its descriptor in a table (Intel's manual, volume 3, figure 3-8). Ours begin at 0.
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let access = u64::from(segment.type_) | u64::from(segment.s) << 4 | u64::from(segment.present) << 7;
    let flags = u64::from(segment.l) << 1 | u64::from(segment.db) << 2 | u64::from(segment.g) << 3;
    limit & 0xffff | access << 40 | (limit >> 16 & 0xf) << 48 | flags << 52
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_ones_every_kernel_knows() {
        let linux = Segments::of(Protocol::Linux64);
        assert_eq!(descriptor(&linux.code()), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&linux.data()), 0x00cf_9300_0000_ffff);
        assert_eq!(descriptor(&Segments::of(Protocol::Pvh).code()), 0x00cf_9b00_0000_ffff);
        assert_eq!(descriptor(&linux.task()), 0x0000_8b00_0000_0067);
    }
}
