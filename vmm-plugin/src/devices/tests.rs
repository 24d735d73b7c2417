//! Tests of the devices behind I/O ports, with correct and arbitrary accesses.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{serial::Serial, *};

/// Buffer that collects the output of a serial port.
#[derive(Clone, Default)]
struct OutputBuffer(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for OutputBuffer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn port_io_with_output() -> (PortIo, OutputBuffer, EventFd) {
    let (output, line) = (OutputBuffer::default(), EventFd::new(EFD_NONBLOCK).unwrap());
    let serial = Serial::new(line.try_clone().unwrap(), Box::new(output.clone()));
    (PortIo::new(serial), output, line)
}

#[derive(Clone, Debug)]
enum PortAccess {
    Write(u16, Vec<u8>),
    Read(u16, usize),
    Input(Vec<u8>),
}

fn arbitrary_accesses() -> impl Strategy<Value = Vec<PortAccess>> {
    let port = || prop_oneof![8 => 0x3f8..=0x3ff_u16, 1 => 0x5ff..0x604_u16, 1 => any::<u16>()];
    let data = prop_oneof![6 => prop::collection::vec(any::<u8>(), 1), 1 => prop::collection::vec(any::<u8>(), 0..9)];
    let attack = prop_oneof![
        6 => (port(), data).prop_map(|(port, data)| PortAccess::Write(port, data)),
        2 => (port(), prop_oneof![4 => Just(1), 1 => 0..9_usize]).prop_map(|(port, bytes)| PortAccess::Read(port, bytes)),
        1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(PortAccess::Input),
    ];
    prop::collection::vec(attack, 0..400)
}

#[test]
fn serial_output_to_a_closed_pipe_is_dropped() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    drop(read);
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut serial = Serial::new(line, Box::new(std::fs::File::from(write)));
    serial.write(0, b'x');
    assert_eq!(serial.read(5) & 0x20, 0x20, "the transmitter is empty");
}

#[test]
fn serial_works_with_a_full_interrupt_eventfd() {
    let (ports, output, line) = port_io_with_output();
    line.write(u64::MAX - 1).unwrap();
    ports.write(SERIAL_PORT + 1, &[2]);
    ports.write(SERIAL_PORT, b"x");
    assert_eq!(*output.0.lock().unwrap(), b"x");
}

proptest! {
    #[test]
    fn arbitrary_port_accesses_do_not_panic_or_add_output(attacks in arbitrary_accesses()) {
        let (ports, output, _line) = port_io_with_output();
        let mut written = 0;
        for attack in &attacks {
            match attack {
                PortAccess::Write(port, data) => {
                    written += usize::from(*port == SERIAL_PORT);
                    ports.write(*port, data);
                }
                PortAccess::Read(port, bytes) => ports.read(*port, &mut vec![0; *bytes]),
                PortAccess::Input(bytes) => prop_assert!(ports.serial().enqueue_input(bytes) <= bytes.len()),
            }
        }
        prop_assert!(output.0.lock().unwrap().len() <= written);
    }
}
