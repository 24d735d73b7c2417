//! The machine around the processors: a serial port, and the ports by which a guest switches itself off or starts anew.
//! What a guest says to a device is hostile input: a device answers, or ignores it, and never ends the VMM.

pub mod serial;
pub mod virtio;

use std::sync::{Arc, Mutex, PoisonError};

use self::{serial::Serial, virtio::MmioTransport};
use crate::platform::{RESET_PORT, RESET_VALUE, SERIAL_PORT, SLEEP_PORT, SLEEP_TYPE, Window};

/// The bits of the sleep control register (ACPI 6.5, table 4.20).
const SLP_EN: u8 = 1 << 5;
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 0b111;
/// What a port without a device reads.
const UNMAPPED_BYTE: u8 = 0xff;

/// What a guest wants done with its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitRequest {
    /// Switch it off.
    PowerOff,
    /// Start it anew.
    Reset,
}

/// The devices whose registers are in memory.
#[derive(Debug, Default)]
pub struct MmioBus(pub Vec<(Window, Arc<MmioTransport>)>);

impl MmioBus {
    /// The device at an address, and which of its registers.
    fn find(&self, at: u64) -> Option<(&MmioTransport, u64)> {
        self.0.iter().find_map(|(window, transport)| {
            let offset = at.checked_sub(u64::from(window.at))?;
            (offset < u64::from(window.bytes)).then_some((&**transport, offset))
        })
    }

    /// A guest reads a register.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        if let Some((transport, offset)) = self.find(at) {
            transport.read(offset, data);
        }
    }

    /// A guest writes a register.
    pub fn write(&self, at: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.find(at) {
            transport.write(offset, data);
        }
    }
}

/// What is behind the I/O ports.
#[derive(Debug)]
pub struct PortIo {
    serial: Mutex<Serial>,
}

impl PortIo {
    /// With a serial line.
    pub fn new(serial: Serial) -> Self {
        Self { serial: Mutex::new(serial) }
    }

    /// The serial line. Poisoned only where tests panic: in a VMM a panic is the end of the process.
    pub fn serial(&self) -> std::sync::MutexGuard<'_, Serial> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The serial line, unless a processor is at it.
    pub fn try_serial(&self) -> Option<std::sync::MutexGuard<'_, Serial>> {
        self.serial.try_lock().ok()
    }

    /// A guest reads a port.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        match (port, &mut *data) {
            (SERIAL_PORT..=0x3ff, [byte]) => *byte = self.serial().read(port - SERIAL_PORT),
            (SLEEP_PORT..=RESET_PORT, _) => data.fill(0),
            _ => {}
        }
    }

    /// A guest writes a port.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<ExitRequest> {
        match (port, data) {
            (SERIAL_PORT..=0x3ff, [byte]) => {
                self.serial().write(port - SERIAL_PORT, *byte);
                None
            }
            (SLEEP_PORT, [byte]) => {
                let off = byte & SLP_EN != 0 && byte >> SLP_TYP_SHIFT & SLP_TYP_MASK == SLEEP_TYPE;
                off.then_some(ExitRequest::PowerOff)
            }
            (RESET_PORT, [RESET_VALUE]) => Some(ExitRequest::Reset),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
