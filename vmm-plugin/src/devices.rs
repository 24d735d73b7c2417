//! The machine around the processors: a serial port, and the ports by which a guest switches itself off or starts anew.
//! What a guest says to a device is hostile input: a device answers, or ignores it, and never ends the VMM.

pub mod serial;
pub mod virtio;

use std::sync::{Arc, Mutex, PoisonError};

use self::{serial::Serial, virtio::Registers};
use crate::platform::{RESET_PORT, RESET_VALUE, SERIAL_PORT, SLEEP_PORT, SLEEP_TYPE, Window};

/// The bits of the sleep control register (ACPI 6.5, table 4.20).
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u8 = 2;
const SLEEP_TYPE_MASK: u8 = 0b111;
/// What a port without a device reads.
const NOBODY: u8 = 0xff;

/// What a guest wants done with its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Switch it off.
    PowerOff,
    /// Start it anew.
    Reset,
}

/// The devices whose registers are in memory.
#[derive(Debug, Default)]
pub struct Windows(pub Vec<(Window, Arc<Registers>)>);

impl Windows {
    /// The device at an address, and which of its registers.
    fn find(&self, at: u64) -> Option<(&Registers, u64)> {
        self.0.iter().find_map(|(window, registers)| {
            let offset = at.checked_sub(u64::from(window.at))?;
            (offset < u64::from(window.bytes)).then_some((&**registers, offset))
        })
    }

    /// A guest reads a register.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        data.fill(NOBODY);
        if let Some((registers, offset)) = self.find(at) {
            registers.read(offset, data);
        }
    }

    /// A guest writes a register.
    pub fn write(&self, at: u64, data: &[u8]) {
        if let Some((registers, offset)) = self.find(at) {
            registers.write(offset, data);
        }
    }
}

/// What is behind the I/O ports.
#[derive(Debug)]
pub struct Ports {
    serial: Mutex<Serial>,
}

impl Ports {
    /// With a serial line.
    pub fn new(serial: Serial) -> Self {
        Self { serial: Mutex::new(serial) }
    }

    /// The serial line. Poisoned only where tests panic: in a VMM a panic is the end of the process.
    pub fn serial(&self) -> std::sync::MutexGuard<'_, Serial> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The serial line, unless a processor is at it.
    pub fn serial_if_free(&self) -> Option<std::sync::MutexGuard<'_, Serial>> {
        self.serial.try_lock().ok()
    }

    /// A guest reads a port.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(NOBODY);
        match (port, &mut *data) {
            (SERIAL_PORT..=0x3ff, [byte]) => *byte = self.serial().read(port - SERIAL_PORT),
            (SLEEP_PORT..=RESET_PORT, _) => data.fill(0),
            _ => {}
        }
    }

    /// A guest writes a port.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<Wish> {
        match (port, data) {
            (SERIAL_PORT..=0x3ff, [byte]) => {
                self.serial().write(port - SERIAL_PORT, *byte);
                None
            }
            (SLEEP_PORT, [byte]) => {
                let off =
                    byte & SLEEP_ENABLE != 0 && byte >> SLEEP_TYPE_SHIFT & SLEEP_TYPE_MASK == SLEEP_TYPE;
                off.then_some(Wish::PowerOff)
            }
            (RESET_PORT, [RESET_VALUE]) => Some(Wish::Reset),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
