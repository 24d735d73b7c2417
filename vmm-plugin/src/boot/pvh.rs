//! The PVH boot protocol: the start info, which names a list of modules and a map of memory.

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{BOOT_PARAMETERS, BootError, Entry, Protocol, Told};
use crate::{acpi, memory::GuestMemory};

/// Where the list of modules lies: the initrd is one.
const MODULES: u64 = BOOT_PARAMETERS + 0x100;
/// Where the map of memory lies.
const MAP: u64 = BOOT_PARAMETERS + 0x200;
/// The first version with a map of memory.
const VERSION: u32 = 1;

/// Writes the start info.
pub(super) fn prepare(entry: GuestAddress, told: &Told, memory: &GuestMemory) -> Result<Entry, BootError> {
    let mut info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: VERSION,
        cmdline_paddr: told.command_line.0,
        rsdp_paddr: acpi::TABLES_START,
        memmap_paddr: MAP,
        memmap_entries: u32::try_from(told.map.len()).expect("a few"),
        ..Default::default()
    };
    if let Some((paddr, size)) = told.initrd {
        info.nr_modules = 1;
        info.modlist_paddr = MODULES;
        memory.write_obj(hvm_modlist_entry { paddr, size, ..Default::default() }, GuestAddress(MODULES))?;
    }
    let mut at = MAP;
    for stretch in &told.map {
        let entry = hvm_memmap_table_entry {
            addr: stretch.at,
            size: stretch.bytes,
            type_: stretch.kind,
            reserved: 0,
        };
        memory.write_obj(entry, GuestAddress(at))?;
        at += size_of::<hvm_memmap_table_entry>() as u64;
    }
    memory.write_obj(info, GuestAddress(BOOT_PARAMETERS))?;
    Ok(Entry { address: entry.0, parameters: BOOT_PARAMETERS, protocol: Protocol::Pvh })
}
