//! Devices as a driver sees them.

mod attacks;

use std::{
    io::Write as _,
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    sync::Arc,
};

use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    block::Block,
    net::{MacAddress, Net},
    rng::Rng,
    *,
};

const MEMORY: usize = 1 << 20;
/// More memory, with nothing before and behind it.
const ISLAND: u64 = 2 << 20;
const ISLAND_BYTES: usize = 64 << 10;
const DESCRIPTORS: u64 = 0x1000;
const OFFERED: u64 = 0x2000;
const USED: u64 = 0x3000;
const BUFFERS: u64 = 0x10000;
const NEXT: u16 = 1;
const WRITABLE: u16 = 2;

/// A driver and the device it drives.
struct Driver {
    registers: Arc<Registers>,
    memory: GuestMemory,
    line: EventFd,
    offered: u16,
}

impl Driver {
    fn of(device: Box<dyn Device>) -> Self {
        let ranges = [(GuestAddress(0), MEMORY), (GuestAddress(ISLAND), ISLAND_BYTES)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let registers = Registers::new(device, line.try_clone().unwrap(), memory.clone());
        Self { registers, memory, line, offered: 0 }
    }

    fn read(&self, at: u64) -> u32 {
        let mut value = [0; 4];
        self.registers.read(at, &mut value);
        u32::from_le_bytes(value)
    }

    fn write(&self, at: u64, value: u32) {
        self.registers.write(at, &value.to_le_bytes());
    }

    /// Does what Linux's driver does before it uses a device.
    fn up(self, features: u64) -> Self {
        self.up_on(0, features)
    }

    fn up_on(self, queue: u32, features: u64) -> Self {
        self.write(0x70, 0);
        self.write(0x70, 1 | 2);
        for page in 0..2 {
            self.write(0x24, page);
            self.write(
                0x20,
                u32::try_from((features | VERSION_1) >> (32 * page) & u64::from(u32::MAX)).unwrap(),
            );
        }
        self.write(0x70, 1 | 2 | 8);
        assert_eq!(self.read(0x70), 1 | 2 | 8, "the device takes the features");
        self.write(0x30, queue);
        self.write(0x38, 16);
        for (low, address) in [(0x80, DESCRIPTORS), (0x90, OFFERED), (0xa0, USED)] {
            self.write(low, u32::try_from(address).unwrap());
            self.write(low + 4, 0);
        }
        self.write(0x44, 1);
        self.write(0x70, 1 | 2 | 8 | 4);
        self
    }

    /// Takes everything back, and begins anew.
    fn up_again(mut self, features: u64) -> Self {
        self.memory.write_slice(&[0; 0x3000], GuestAddress(DESCRIPTORS)).unwrap();
        self.offered = 0;
        self.up(features)
    }

    /// Offers one chain of buffers, `(length, writable)` each, one after the other from [`BUFFERS`] on.
    fn offer(&mut self, buffers: &[(u32, bool)]) {
        self.offer_on(0, buffers);
    }

    fn offer_on(&mut self, queue: u32, buffers: &[(u32, bool)]) {
        let mut at = BUFFERS;
        for (n, (length, writable)) in (0_u16..).zip(buffers) {
            let more = usize::from(n) + 1 < buffers.len();
            let flags = if more { NEXT } else { 0 } | if *writable { WRITABLE } else { 0 };
            let descriptor = DESCRIPTORS + 16 * u64::from(n);
            self.memory.write_obj(at, GuestAddress(descriptor)).unwrap();
            self.memory.write_obj(*length, GuestAddress(descriptor + 8)).unwrap();
            self.memory.write_obj(flags, GuestAddress(descriptor + 12)).unwrap();
            self.memory.write_obj(n + 1, GuestAddress(descriptor + 14)).unwrap();
            at += u64::from(*length);
        }
        let entry = OFFERED + 4 + 2 * u64::from(self.offered % 16);
        self.memory.write_obj(0_u16, GuestAddress(entry)).unwrap();
        self.offered += 1;
        self.memory.write_obj(self.offered, GuestAddress(OFFERED + 2)).unwrap();
        let _ = self.registers.serve(queue as usize);
    }

    /// A request to a disk, and what became of it: the status, and the data.
    fn disk(&mut self, kind: u32, sector: u64, data: &[u8], wanted: u32) -> (u8, Vec<u8>) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        header.extend(data);
        self.memory.write_slice(&header, GuestAddress(BUFFERS)).unwrap();
        let readable = u32::try_from(header.len()).unwrap();
        self.offer(&[(readable, false), (wanted + 1, true)]);
        let mut answer = vec![0; wanted as usize + 1];
        self.memory.read_slice(&mut answer, GuestAddress(BUFFERS + u64::from(readable))).unwrap();
        (answer.pop().unwrap(), answer)
    }
}

/// A network card's second queue.
const TRANSMIT: u32 = 1;
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const OK: u8 = 0;
const FAILED: u8 = 1;

fn disk(sectors: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..sectors * 512).map(|n| u8::try_from(n / 512 % 251).unwrap()).collect();
    file.write_all(&content).unwrap();
    (file, content)
}

/// A network card, and the host's end of its wire.
fn card() -> (Driver, UnixDatagram) {
    let (tap, host) = UnixDatagram::pair().unwrap();
    tap.set_nonblocking(true).unwrap();
    host.set_nonblocking(true).unwrap();
    let card = Net::of(OwnedFd::from(tap).into(), MacAddress([0x52, 0x54, 0, 0, 0, 1]));
    (Driver::of(Box::new(card)), host)
}

#[test]
fn a_disk_holds_what_was_written_to_it() {
    let (file, content) = disk(8);
    let mut driver = Driver::of(Box::new(Block::open(file.path(), false).unwrap())).up(1 << 9);
    assert_eq!((driver.read(0x000), driver.read(0x008), driver.read(0x100)), (0x7472_6976, 2, 8));
    assert_eq!(driver.disk(IN, 2, &[], 1024), (OK, content[1024..2048].to_vec()));
    assert_eq!(driver.line.read().unwrap(), 1, "an interrupt for what was used");
    assert_eq!(driver.disk(OUT, 7, &[7; 512], 0), (OK, vec![]));
    assert_eq!(driver.disk(FLUSH, 0, &[], 0), (OK, vec![]));
    assert_eq!(driver.disk(IN, 7, &[], 512), (OK, vec![7; 512]));
    assert_eq!(std::fs::read(file.path()).unwrap()[7 * 512..], [7; 512]);
}

#[test]
fn what_lies_past_the_end_or_may_only_be_read_is_refused() {
    let (file, content) = disk(8);
    let mut driver = Driver::of(Box::new(Block::open(file.path(), true).unwrap())).up(1 << 9);
    assert_eq!(driver.disk(IN, 7, &[], 1024).0, FAILED);
    assert_eq!(driver.disk(IN, u64::MAX, &[], 512).0, FAILED);
    assert_eq!(driver.disk(OUT, 0, &[1; 512], 0).0, FAILED);
    assert_eq!(driver.disk(77, 0, &[], 0).0, 2);
    assert_eq!(std::fs::read(file.path()).unwrap(), content);
}

#[test]
fn a_disk_that_is_in_use_or_no_disk_is_refused_by_name() {
    let (file, _) = disk(2);
    let name = file.path().display().to_string();
    let held = Block::open(file.path(), false).unwrap();
    let refused = |path: &std::path::Path| Block::open(path, false).unwrap_err().to_string();
    assert_eq!(refused(file.path()), format!("disk: {name} is in use by another process"));
    drop(held);
    file.as_file().set_len(700).unwrap();
    let rule = "must be a whole number of sectors of 512 bytes, at least one";
    assert_eq!(refused(file.path()), format!("disk: {name} has 700 bytes: {rule}"));
    assert_eq!(refused("/nowhere/disk".as_ref()), "disk: cannot open /nowhere/disk");
}

#[test]
fn random_numbers_fill_what_is_offered() {
    let mut driver = Driver::of(Box::new(Rng)).up(0);
    driver.offer(&[(64, true)]);
    let mut random = [0; 64];
    driver.memory.read_slice(&mut random, GuestAddress(BUFFERS)).unwrap();
    assert_ne!(random, [0; 64]);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
}

#[test]
fn a_driver_of_an_older_version_is_not_taken() {
    let driver = Driver::of(Box::new(Rng));
    driver.write(0x70, 1 | 2);
    driver.write(0x70, 1 | 2 | 8);
    assert_eq!(driver.read(0x70), 1 | 2, "no VERSION_1, no FEATURES_OK");
}

#[test]
fn a_device_that_is_told_nonsense_stops_and_works_again_after_a_reset() {
    let (file, content) = disk(4);
    let mut driver = Driver::of(Box::new(Block::open(file.path(), false).unwrap())).up(0);
    driver.offer(&[(4, false)]); // neither a whole header nor a status
    assert_eq!(driver.read(0x70) & 64, 64, "NEEDS_RESET");
    assert_eq!(driver.read(0x60), 2, "the interrupt says that the device has changed");
    let mut driver = driver.up_again(0);
    assert_eq!(driver.disk(IN, 0, &[], 512), (OK, content[..512].to_vec()));
}

#[test]
fn what_a_driver_said_is_taken_back_by_a_reset_alone() {
    let mut driver = Driver::of(Box::new(Rng)).up(0);
    driver.write(0x70, 1);
    driver.write(0xa0, 0x4000);
    driver.offer(&[(64, true)]);
    assert_eq!(driver.read(0x70), 1 | 2 | 8 | 4);
    assert_eq!(
        driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(),
        1,
        "its queue is where it was"
    );
}

#[test]
fn a_device_that_stopped_is_not_talked_into_going_on() {
    let (file, _) = disk(4);
    let mut driver = Driver::of(Box::new(Block::open(file.path(), false).unwrap())).up(0);
    driver.offer(&[(4, false)]);
    driver.write(0x70, 1 | 2 | 8 | 4);
    assert_eq!(driver.read(0x70) & 64, 64, "still NEEDS_RESET");
    assert_eq!(driver.disk(IN, 0, &[], 512).0, 0, "nobody wrote a status");
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 0);
}

#[test]
fn a_driver_that_skips_the_features_is_not_served() {
    let mut driver = Driver::of(Box::new(Rng)).up(0);
    driver.write(0x70, 0);
    driver.write(0x70, 1 | 2 | 4);
    driver.offer(&[(64, true)]);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 0);
}

#[test]
fn a_frame_that_asks_for_offloads_reaches_the_host_without_that_wish() {
    let (mut driver, host) = card();
    driver.memory.write_slice(&[0xff; 76], GuestAddress(BUFFERS)).unwrap();
    driver.write(0x70, 0);
    driver = driver.up_on(TRANSMIT, 0);
    driver.offer_on(TRANSMIT, &[(76, false)]);
    let mut frame = [1; 100];
    assert_eq!(host.recv(&mut frame).unwrap(), 76);
    assert_eq!((&frame[..12], &frame[12..76]), (&[0; 12][..], &[0xff; 64][..]));
}
