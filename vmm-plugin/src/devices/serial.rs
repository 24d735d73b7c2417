//! Serial console: vm-superio's 16550A with its interrupt and its output.

use std::{fmt, io};

use vm_superio::{Serial as Uart, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

/// Destination of a console's output.
pub type Output = Box<dyn io::Write + Send>;

/// A serial port.
pub struct Serial(Uart<Line, NoEvents, Output>);

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Serial")
    }
}

/// An interrupt line, as an irqfd.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

impl Serial {
    /// Creates a serial port that raises interrupts through `line`.
    pub fn new(line: EventFd, output: Output) -> Self {
        Self(Uart::new(Line(line), output))
    }

    /// Handles a read of register 0 to 7.
    pub fn read(&mut self, register: u16) -> u8 {
        u8::try_from(register).map_or(0, |register| self.0.read(register))
    }

    /// Handles a write of register 0 to 7. Output that cannot be written is dropped.
    pub fn write(&mut self, register: u16, value: u8) {
        if let Ok(register) = u8::try_from(register) {
            let _ = self.0.write(register, value);
        }
    }

    /// Adds terminal input to the receive buffer and returns how many bytes it had space for.
    pub fn enqueue_input(&mut self, input: &[u8]) -> usize {
        self.0.enqueue_raw_bytes(input).unwrap_or(0)
    }
}
