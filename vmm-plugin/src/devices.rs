//! Devices of a guest: the serial port, the sleep and reset registers, and virtio devices. Every
//! access may be hostile: a device handles or ignores an invalid access and never panics.

pub mod serial;
pub mod virtio;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use self::{
    serial::Serial,
    virtio::{MmioTransport, QuiescedDevice},
};
use crate::platform::{MmioWindow, RESET_PORT, RESET_VALUE, SERIAL_PORT, SLEEP_PORT, SLEEP_TYPE};

/// Bits of the sleep control register (ACPI 6.5, table 4.20).
const SLP_EN: u8 = 1 << 5;
const SLP_TYP_SHIFT: u8 = 2;
const SLP_TYP_MASK: u8 = 0b111;
/// Value of each byte that a guest reads from a port or address without a device.
const UNMAPPED_BYTE: u8 = 0xff;

/// Change of the power state that a guest requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitRequest {
    /// Power the machine off.
    PowerOff,
    /// Reset the machine.
    Reset,
}

/// MMIO bus: the virtio devices, each with the window of its registers.
#[derive(Debug, Default)]
pub struct MmioBus(pub Vec<(MmioWindow, Arc<MmioTransport>)>);

impl MmioBus {
    /// Returns the device whose window contains a guest-physical address, and the offset in the
    /// window.
    fn find(&self, at: u64) -> Option<(&MmioTransport, u64)> {
        self.0.iter().find_map(|(window, transport)| {
            let offset = at.checked_sub(u64::from(window.address))?;
            (offset < u64::from(window.bytes)).then_some((&**transport, offset))
        })
    }

    /// Waits until no device processes requests. Devices then access no guest memory until the
    /// returned guards are dropped. Returns `None` if a device is busy at the deadline. No vCPU may
    /// run, because it could wait for a device.
    pub fn quiesce(&self, deadline: Instant) -> Option<Vec<QuiescedDevice<'_>>> {
        self.0.iter().map(|(_, transport)| transport.quiesce(deadline)).collect()
    }

    /// Handles a guest read at an MMIO address. If no device has this address, all bits read as 1.
    pub fn read(&self, at: u64, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        if let Some((transport, offset)) = self.find(at) {
            transport.read(offset, data);
        }
    }

    /// Handles a guest write at an MMIO address. If no device has this address, the write is
    /// ignored.
    pub fn write(&self, at: u64, data: &[u8]) {
        if let Some((transport, offset)) = self.find(at) {
            transport.write(offset, data);
        }
    }
}

/// Devices that a guest accesses through I/O ports.
#[derive(Debug)]
pub struct PortIo {
    serial: Mutex<Serial>,
}

impl PortIo {
    /// Creates the devices, with `serial` as the serial port COM1.
    pub fn new(serial: Serial) -> Self {
        Self { serial: Mutex::new(serial) }
    }

    /// Locks the serial port. A lock is poisoned only in tests, because outside tests a panic ends
    /// the process.
    pub fn serial(&self) -> std::sync::MutexGuard<'_, Serial> {
        self.serial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the serial port, or returns `None` if a vCPU holds the lock.
    pub fn try_lock_serial(&self) -> Option<std::sync::MutexGuard<'_, Serial>> {
        self.serial.try_lock().ok()
    }

    /// Handles a guest read from an I/O port. If no device has this port, all bits read as 1.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(UNMAPPED_BYTE);
        match (port, &mut *data) {
            (SERIAL_PORT..=0x3ff, [byte]) => *byte = self.serial().read(port - SERIAL_PORT),
            (SLEEP_PORT..=RESET_PORT, _) => data.fill(0),
            _ => {}
        }
    }

    /// Handles a guest write to an I/O port. Returns the requested power state change if the
    /// port is the sleep register or the reset register.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<ExitRequest> {
        match (port, data) {
            (SERIAL_PORT..=0x3ff, [byte]) => {
                self.serial().write(port - SERIAL_PORT, *byte);
                None
            }
            (SLEEP_PORT, [byte]) => {
                let is_soft_off = byte & SLP_EN != 0 && byte >> SLP_TYP_SHIFT & SLP_TYP_MASK == SLEEP_TYPE;
                is_soft_off.then_some(ExitRequest::PowerOff)
            }
            (RESET_PORT, [RESET_VALUE]) => Some(ExitRequest::Reset),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
