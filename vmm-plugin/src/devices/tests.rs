//! Ports and the serial line as a guest uses and misuses them.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{serial::Serial, *};

/// What came out of a serial line.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn ports() -> (Ports, Paper, EventFd) {
    let (paper, line) = (Paper::default(), EventFd::new(EFD_NONBLOCK).unwrap());
    let serial = Serial::new(line.try_clone().unwrap(), Box::new(paper.clone()));
    (Ports::new(serial), paper, line)
}

#[derive(Clone, Debug)]
enum Attack {
    Write(u16, Vec<u8>),
    Read(u16, usize),
    Typed(Vec<u8>),
}

fn attacks() -> impl Strategy<Value = Vec<Attack>> {
    let port = || prop_oneof![8 => 0x3f8..=0x3ff_u16, 1 => 0x5ff..0x604_u16, 1 => any::<u16>()];
    let data = prop_oneof![6 => prop::collection::vec(any::<u8>(), 1), 1 => prop::collection::vec(any::<u8>(), 0..9)];
    let attack = prop_oneof![
        6 => (port(), data).prop_map(|(port, data)| Attack::Write(port, data)),
        2 => (port(), prop_oneof![4 => Just(1), 1 => 0..9_usize]).prop_map(|(port, bytes)| Attack::Read(port, bytes)),
        1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(Attack::Typed),
    ];
    prop::collection::vec(attack, 0..400)
}

#[test]
fn a_line_whose_other_end_is_gone_loses_what_is_written_and_goes_on() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    drop(read);
    let line = EventFd::new(EFD_NONBLOCK).unwrap();
    let mut serial = Serial::new(line, Box::new(std::fs::File::from(write)));
    serial.write(0, b'x');
    assert_eq!(serial.read(5) & 0x20, 0x20, "there is room for the next");
}

#[test]
fn more_interrupts_than_anybody_takes_are_one() {
    let (ports, paper, line) = ports();
    line.write(u64::MAX - 1).unwrap();
    ports.write(SERIAL_PORT + 1, &[2]);
    ports.write(SERIAL_PORT, b"x");
    assert_eq!(*paper.0.lock().unwrap(), b"x");
}

proptest! {
    #[test]
    fn no_guest_brings_the_ports_down_or_says_more_than_it_wrote(attacks in attacks()) {
        let (ports, paper, _line) = ports();
        let mut written = 0;
        for attack in &attacks {
            match attack {
                Attack::Write(port, data) => {
                    written += usize::from(*port == SERIAL_PORT);
                    ports.write(*port, data);
                }
                Attack::Read(port, bytes) => ports.read(*port, &mut vec![0; *bytes]),
                Attack::Typed(bytes) => prop_assert!(ports.serial().typed(bytes) <= bytes.len()),
            }
        }
        prop_assert!(paper.0.lock().unwrap().len() <= written);
    }
}
