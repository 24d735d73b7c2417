//! Addresses of the guest's platform hardware: I/O ports, interrupt lines, the reset vector and
//! MMIO windows. The ACPI tables, the boot code and the devices share these constants.

/// First I/O port of the serial port COM1.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt line of the serial port COM1.
pub const SERIAL_IRQ: u32 = 4;
/// Interrupt line of the power button.
pub const POWER_BUTTON_IRQ: u32 = 5;
/// I/O port of the ACPI sleep control register. A write of [`SLEEP_TYPE`] with the SLP_EN bit
/// powers the machine off. The sleep status register is the next port and always reads 0.
pub const SLEEP_PORT: u16 = 0x600;
/// SLP_TYP value of S5 (soft off), the only sleep state.
pub const SLEEP_TYPE: u8 = 5;
/// I/O port of the ACPI reset register: a write of [`RESET_VALUE`] resets the machine.
pub const RESET_PORT: u16 = 0x602;
/// Value that resets the machine when the guest writes it to [`RESET_PORT`].
pub const RESET_VALUE: u8 = 1;
/// Address of the first instruction after a reset in real mode. To restart a hardware-reduced
/// platform without EFI, Linux jumps to this address.
pub const RESET_VECTOR: u64 = 0xf_fff0;

/// MMIO window and interrupt line of one virtio device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioWindow {
    /// Guest-physical address of the device's registers, below 4 GiB.
    pub address: u32,
    /// Size of the window, in bytes.
    pub bytes: u32,
    /// Interrupt line of the device.
    pub line: u32,
}
