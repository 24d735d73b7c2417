//! Prepares guest memory for the 64-bit Linux boot protocol, with the zero page (`boot_params`).

use linux_loader::loader::{
    KernelLoaderResult,
    bootparam::{boot_e820_entry, boot_params, setup_header},
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{BOOT_PARAMS_ADDRESS, BootError, BootInfo, BootProtocol, EntryPoint, write_page_tables};
use crate::{acpi, memory::GuestMemory};

/// Offset of the 64-bit entry point from the load address of the kernel, in bytes.
const ENTRY64_OFFSET: u64 = 0x200;
/// Value of `type_of_loader` for a boot loader without an assigned ID.
const LOADER_UNKNOWN: u8 = 0xff;

/// Writes the zero page and the page tables into guest memory. Returns the 64-bit entry point.
pub(super) fn prepare_boot(
    mut header: setup_header,
    kernel: &KernelLoaderResult,
    info: &BootInfo,
    memory: &GuestMemory,
) -> Result<EntryPoint, BootError> {
    let to_u32 = |n: u64| u32::try_from(n).expect("boot data is below 3 GiB");
    header.type_of_loader = LOADER_UNKNOWN;
    header.cmd_line_ptr = to_u32(info.command_line.0);
    header.cmdline_size = to_u32(info.command_line.1);
    if let Some((at, bytes)) = info.initrd {
        header.ramdisk_image = to_u32(at);
        header.ramdisk_size = to_u32(bytes);
    }
    let mut page = boot_params { hdr: header, acpi_rsdp_addr: acpi::ACPI_TABLES_START, ..Default::default() };
    for (slot, entry) in page.e820_table.iter_mut().zip(&info.map) {
        *slot = boot_e820_entry { addr: entry.address, size: entry.bytes, r#type: entry.kind };
        page.e820_entries += 1;
    }
    memory.write_obj(page, GuestAddress(BOOT_PARAMS_ADDRESS))?;
    write_page_tables(memory)?;
    let address = kernel.kernel_load.0 + ENTRY64_OFFSET;
    Ok(EntryPoint { address, parameters: BOOT_PARAMS_ADDRESS, protocol: BootProtocol::Linux64 })
}
