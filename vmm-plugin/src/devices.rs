//! Devices of a guest: the serial port, the sleep and reset registers, and virtio. All accesses are
//! hostile input: a device answers or ignores them, and never panics.

pub mod serial;
pub mod virtio;

use std::sync::{Arc, Mutex, PoisonError};

use self::{serial::Serial, virtio::MmioTransport};
use crate::platform::{RESET_PORT, RESET_VALUE, SERIAL_PORT, SLEEP_PORT, SLEEP_TYPE, Window};

/// Bits of the sleep control register (ACPI 6.5, table 4.20).
const SLP_EN: u8 = 1 << 5;
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 0b111;
/// Byte read from a port or an address without a device.
const UNMAPPED_BYTE: u8 = 0xff;

/// Power state change that a guest requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitRequest {
    /// Power the machine off.
    PowerOff,
    /// Reset the machine.
    Reset,
}

/// The devices with MMIO registers, by window.
#[derive(Debug, Default)]
pub struct MmioBus(pub Vec<(Window, Arc<MmioTransport>)>);

impl MmioBus {
    /// Returns the device at an address, and the register's offset.
    fn find(&self, at: u64) -> Option<(&MmioTransport, u64)> {
        self.0.iter().find_map(|(window, transport)| {
            let offset = at.checked_sub(u64::from(window.address))?;
            (offset < u64::from(window.bytes)).then_some((&**transport, offset))
        })
    }

    /// Handles a guest's read of a register.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        if let Some((transport, offset)) = self.find(at) {
            transport.read(offset, data);
        }
    }

    /// Handles a guest's write of a register.
    pub fn write(&self, at: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.find(at) {
            transport.write(offset, data);
        }
    }
}

/// The devices behind I/O ports.
#[derive(Debug)]
pub struct PortIo {
    serial: Mutex<Serial>,
}

impl PortIo {
    /// Creates the port space with a serial port.
    pub fn new(serial: Serial) -> Self {
        Self { serial: Mutex::new(serial) }
    }

    /// Locks the serial port. Only tests can poison the lock: in a VMM, a panic ends the process.
    pub fn serial(&self) -> std::sync::MutexGuard<'_, Serial> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the serial port unless a vCPU holds the lock.
    pub fn try_serial(&self) -> Option<std::sync::MutexGuard<'_, Serial>> {
        self.serial.try_lock().ok()
    }

    /// Handles a guest's read of a port.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        match (port, &mut *data) {
            (SERIAL_PORT..=0x3ff, [byte]) => *byte = self.serial().read(port - SERIAL_PORT),
            (SLEEP_PORT..=RESET_PORT, _) => data.fill(0),
            _ => {}
        }
    }

    /// Handles a guest's write of a port. Returns the request of a write to the sleep or reset
    /// register.
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
