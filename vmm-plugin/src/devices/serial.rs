//! The guest's serial console: vm-superio's 16550A, its interrupt and where its output goes.

use std::{fmt, io};

use vm_superio::{Serial as Uart, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

/// Where a console's output goes.
pub type Output = Box<dyn io::Write + Send>;

/// One serial line.
pub struct Serial(Uart<Line, NoEvents, Output>);

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Serial")
    }
}

/// An interrupt line that KVM listens to.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

impl Serial {
    /// A line whose interrupt is told through `line`.
    pub fn new(line: EventFd, output: Output) -> Self {
        Self(Uart::new(Line(line), output))
    }

    /// The guest reads a register, 0 to 7.
    pub fn read(&mut self, register: u16) -> u8 {
        u8::try_from(register).map_or(0, |register| self.0.read(register))
    }

    /// The guest writes a register, 0 to 7. Output that cannot be written is lost, as on a line with nobody at its end.
    pub fn write(&mut self, register: u16, value: u8) {
        if let Ok(register) = u8::try_from(register) {
            let _ = self.0.write(register, value);
        }
    }

    /// Somebody types. Returns how much of it there was room for.
    pub fn enqueue_input(&mut self, input: &[u8]) -> usize {
        self.0.enqueue_raw_bytes(input).unwrap_or(0)
    }
}
