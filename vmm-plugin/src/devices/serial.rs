//! Serial port of a guest: the 16550A of vm-superio with an interrupt line and an output.

use std::{fmt, io};

use vm_superio::{Serial as Uart, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

/// Destination of the output of a serial port.
pub type Output = Box<dyn io::Write + Send>;

/// Serial port (16550A).
pub struct Serial(Uart<InterruptLine, NoEvents, Output>);

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Serial")
    }
}

/// Interrupt line, raised by writing an irqfd.
struct InterruptLine(EventFd);

impl Trigger for InterruptLine {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

impl Serial {
    /// Creates a serial port that raises interrupts through `line`.
    pub fn new(line: EventFd, output: Output) -> Self {
        Self(Uart::new(InterruptLine(line), output))
    }

    /// Handles a guest read from a register, 0 to 7. Other registers read as 0.
    pub fn read(&mut self, register: u16) -> u8 {
        u8::try_from(register).map_or(0, |register| self.0.read(register))
    }

    /// Handles a guest write to a register, 0 to 7. Output that cannot be written is dropped.
    pub fn write(&mut self, register: u16, value: u8) {
        if let Ok(register) = u8::try_from(register) {
            let _ = self.0.write(register, value);
        }
    }

    /// Adds terminal input to the receive buffer. Returns the number of bytes that fit into the
    /// buffer.
    pub fn enqueue_input(&mut self, input: &[u8]) -> usize {
        self.0.enqueue_raw_bytes(input).unwrap_or(0)
    }
}
