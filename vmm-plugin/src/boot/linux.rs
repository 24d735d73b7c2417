//! Linux's own boot protocol: the zero page.

use linux_loader::loader::{
    KernelLoaderResult,
    bootparam::{boot_e820_entry, boot_params, setup_header},
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{BOOT_PARAMETERS, BootError, Entry, Protocol, Told, write_page_tables};
use crate::{acpi, memory::GuestMemory};

/// From where a kernel is loaded to its 64-bit entry.
const ENTRY_64: u64 = 0x200;
/// A loader that nobody gave a number.
const LOADER_UNKNOWN: u8 = 0xff;

/// Writes the zero page and the page tables that the 64-bit entry wants.
pub(super) fn prepare(
    mut header: setup_header,
    kernel: &KernelLoaderResult,
    told: &Told,
    memory: &GuestMemory,
) -> Result<Entry, BootError> {
    let short = |n: u64| u32::try_from(n).expect("below 3 GiB");
    header.type_of_loader = LOADER_UNKNOWN;
    header.cmd_line_ptr = short(told.command_line.0);
    header.cmdline_size = short(told.command_line.1);
    if let Some((at, bytes)) = told.initrd {
        header.ramdisk_image = short(at);
        header.ramdisk_size = short(bytes);
    }
    let mut page = boot_params { hdr: header, acpi_rsdp_addr: acpi::TABLES_START, ..Default::default() };
    for (entry, stretch) in page.e820_table.iter_mut().zip(&told.map) {
        *entry = boot_e820_entry { addr: stretch.at, size: stretch.bytes, r#type: stretch.kind };
        page.e820_entries += 1;
    }
    memory.write_obj(page, GuestAddress(BOOT_PARAMETERS))?;
    write_page_tables(memory)?;
    let address = kernel.kernel_load.0 + ENTRY_64;
    Ok(Entry { address, parameters: BOOT_PARAMETERS, protocol: Protocol::Linux64 })
}
