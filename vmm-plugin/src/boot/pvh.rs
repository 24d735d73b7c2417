//! Prepares guest memory for the PVH boot protocol, with the start info, module list and memory
//! map.

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{BOOT_PARAMS_ADDRESS, BootError, BootInfo, BootProtocol, EntryPoint};
use crate::{acpi, memory::GuestMemory};

/// Guest-physical address of the module list, whose only module is the initrd.
const MODULE_LIST_ADDRESS: u64 = BOOT_PARAMS_ADDRESS + 0x100;
/// Guest-physical address of the memory map.
const MEMORY_MAP_ADDRESS: u64 = BOOT_PARAMS_ADDRESS + 0x200;
/// Version of the start info: 1 is the first version that has a memory map.
const START_INFO_VERSION: u32 = 1;

/// Writes the start info, the module list and the memory map. Returns the PVH entry point.
pub(super) fn prepare_boot(
    entry: GuestAddress,
    info: &BootInfo,
    memory: &GuestMemory,
) -> Result<EntryPoint, BootError> {
    let mut start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: START_INFO_VERSION,
        cmdline_paddr: info.command_line.0,
        rsdp_paddr: acpi::ACPI_TABLES_START,
        memmap_paddr: MEMORY_MAP_ADDRESS,
        memmap_entries: u32::try_from(info.map.len()).expect("the map has a few entries"),
        ..Default::default()
    };
    if let Some((paddr, size)) = info.initrd {
        start_info.nr_modules = 1;
        start_info.modlist_paddr = MODULE_LIST_ADDRESS;
        memory.write_obj(
            hvm_modlist_entry { paddr, size, ..Default::default() },
            GuestAddress(MODULE_LIST_ADDRESS),
        )?;
    }
    let mut at = MEMORY_MAP_ADDRESS;
    for entry in &info.map {
        let entry =
            hvm_memmap_table_entry { addr: entry.address, size: entry.bytes, type_: entry.kind, reserved: 0 };
        memory.write_obj(entry, GuestAddress(at))?;
        at += size_of::<hvm_memmap_table_entry>() as u64;
    }
    memory.write_obj(start_info, GuestAddress(BOOT_PARAMS_ADDRESS))?;
    Ok(EntryPoint { address: entry.0, parameters: BOOT_PARAMS_ADDRESS, protocol: BootProtocol::Pvh })
}
