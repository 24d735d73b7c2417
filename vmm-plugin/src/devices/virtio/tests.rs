//! Tests of the virtio devices, accessed by a driver.

mod attacks;

use std::{
    io::Write as _,
    os::{fd::OwnedFd, unix::net::UnixDatagram},
    sync::Arc,
};

use vm_memory::{Bytes as _, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{
    block::VirtioBlock,
    mmio::{register, status},
    net::{MacAddress, VirtioNet},
    rng::VirtioRng,
    *,
};

const MEMORY_BYTES: usize = 1 << 20;
/// Guest-physical address of a second memory region. The addresses around the region are unmapped.
const SECOND_REGION_START: u64 = 2 << 20;
const SECOND_REGION_BYTES: usize = 64 << 10;
/// Guest-physical addresses of the queue and of the data buffers.
const DESCRIPTOR_TABLE: u64 = 0x1000;
const AVAIL_RING: u64 = 0x2000;
const USED_RING: u64 = 0x3000;
const BUFFERS_START: u64 = 0x10000;
const VIRTQ_DESC_F_NEXT: u16 = 1;
const VIRTQ_DESC_F_WRITE: u16 = 2;

/// Status bits ACKNOWLEDGE and DRIVER, which a driver sets before it negotiates features.
const ACKNOWLEDGE_DRIVER: u32 = 1 | 2;
const FEATURES_AGREED: u32 = ACKNOWLEDGE_DRIVER | status::FEATURES_OK;
const DRIVER_READY: u32 = FEATURES_AGREED | status::DRIVER_OK;

/// Driver of a virtio device, and the device.
struct Driver {
    transport: Arc<MmioTransport>,
    memory: GuestMemory,
    line: EventFd,
    avail_index: u16,
}

impl Driver {
    fn new(device: Box<dyn VirtioDevice>) -> Self {
        let ranges =
            [(GuestAddress(0), MEMORY_BYTES), (GuestAddress(SECOND_REGION_START), SECOND_REGION_BYTES)];
        let memory = GuestMemory::from_ranges(&ranges).unwrap();
        let line = EventFd::new(EFD_NONBLOCK).unwrap();
        let transport = MmioTransport::new(device, line.try_clone().unwrap(), memory.clone());
        Self { transport, memory, line, avail_index: 0 }
    }

    fn read(&self, at: u64) -> u32 {
        let mut value = [0; 4];
        self.transport.read(at, &mut value);
        u32::from_le_bytes(value)
    }

    fn write(&self, at: u64, value: u32) {
        self.transport.write(at, &value.to_le_bytes());
    }

    /// Resets the device and initializes it in the same order as the driver of Linux. Queue 0 is
    /// used.
    fn start(self, features: u64) -> Self {
        self.start_on(0, features)
    }

    fn start_on(self, queue: u32, features: u64) -> Self {
        self.write(register::STATUS, 0);
        self.write(register::STATUS, ACKNOWLEDGE_DRIVER);
        for page in 0..2 {
            self.write(register::DRIVER_FEATURES_SEL, page);
            self.write(
                register::DRIVER_FEATURES,
                u32::try_from((features | VIRTIO_F_VERSION_1) >> (32 * page) & u64::from(u32::MAX)).unwrap(),
            );
        }
        self.write(register::STATUS, FEATURES_AGREED);
        assert_eq!(self.read(register::STATUS), FEATURES_AGREED, "the device must accept the features");
        self.write(register::QUEUE_SEL, queue);
        self.write(register::QUEUE_NUM, 16);
        for (low, address) in [
            (register::QUEUE_DESC_LOW, DESCRIPTOR_TABLE),
            (register::QUEUE_DRIVER_LOW, AVAIL_RING),
            (register::QUEUE_DEVICE_LOW, USED_RING),
        ] {
            self.write(low, u32::try_from(address).unwrap());
            self.write(low + 4, 0);
        }
        self.write(register::QUEUE_READY, 1);
        self.write(register::STATUS, DRIVER_READY);
        self
    }

    /// Clears the queue memory, resets the device and initializes it again.
    fn restart(mut self, features: u64) -> Self {
        self.memory.write_slice(&[0; 0x3000], GuestAddress(DESCRIPTOR_TABLE)).unwrap();
        self.avail_index = 0;
        self.start(features)
    }

    /// Adds one chain of buffers to queue 0 and notifies the device. Each buffer is given as
    /// `(length, writable)`. The buffers are contiguous in memory and start at [`BUFFERS_START`].
    fn add_buffers(&mut self, buffers: &[(u32, bool)]) {
        self.add_buffers_to(0, buffers);
    }

    fn add_buffers_to(&mut self, queue: u32, buffers: &[(u32, bool)]) {
        let mut at = BUFFERS_START;
        for (n, (length, writable)) in (0_u16..).zip(buffers) {
            let has_next = usize::from(n) + 1 < buffers.len();
            let flags =
                if has_next { VIRTQ_DESC_F_NEXT } else { 0 } | if *writable { VIRTQ_DESC_F_WRITE } else { 0 };
            let descriptor = DESCRIPTOR_TABLE + 16 * u64::from(n);
            self.memory.write_obj(at, GuestAddress(descriptor)).unwrap();
            self.memory.write_obj(*length, GuestAddress(descriptor + 8)).unwrap();
            self.memory.write_obj(flags, GuestAddress(descriptor + 12)).unwrap();
            self.memory.write_obj(n + 1, GuestAddress(descriptor + 14)).unwrap();
            at += u64::from(*length);
        }
        let entry = AVAIL_RING + 4 + 2 * u64::from(self.avail_index % 16);
        self.memory.write_obj(0_u16, GuestAddress(entry)).unwrap();
        self.avail_index += 1;
        self.memory.write_obj(self.avail_index, GuestAddress(AVAIL_RING + 2)).unwrap();
        let _ = self.transport.process_queue(queue as usize);
    }

    /// Sends a request to a block device. Returns the status byte and `read_bytes` bytes of data.
    fn disk(&mut self, kind: u32, sector: u64, data: &[u8], read_bytes: u32) -> (u8, Vec<u8>) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        header.extend(data);
        self.memory.write_slice(&header, GuestAddress(BUFFERS_START)).unwrap();
        let readable = u32::try_from(header.len()).unwrap();
        self.add_buffers(&[(readable, false), (read_bytes + 1, true)]);
        let mut answer = vec![0; read_bytes as usize + 1];
        self.memory.read_slice(&mut answer, GuestAddress(BUFFERS_START + u64::from(readable))).unwrap();
        (answer.pop().unwrap(), answer)
    }
}

/// Index of the transmit queue of a network device.
const TRANSMIT_QUEUE: u32 = 1;
const VIRTIO_BLK_T_IN: u32 = 0;
const VIRTIO_BLK_T_OUT: u32 = 1;
const VIRTIO_BLK_T_FLUSH: u32 = 4;
const VIRTIO_BLK_S_OK: u8 = 0;
const VIRTIO_BLK_S_IOERR: u8 = 1;

fn disk(sectors: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..sectors * 512).map(|n| u8::try_from(n / 512 % 251).unwrap()).collect();
    file.write_all(&content).unwrap();
    (file, content)
}

/// Returns a network device, and a socket that represents the host's side of the tap device.
fn net_device() -> (Driver, UnixDatagram) {
    let (tap, host) = UnixDatagram::pair().unwrap();
    tap.set_nonblocking(true).unwrap();
    host.set_nonblocking(true).unwrap();
    let net_device = VirtioNet::from_tap(OwnedFd::from(tap).into(), MacAddress([0x52, 0x54, 0, 0, 0, 1]));
    (Driver::new(Box::new(net_device)), host)
}

#[test]
fn disk_reads_back_written_sectors() {
    let (file, content) = disk(8);
    let mut driver = Driver::new(Box::new(VirtioBlock::open(file.path(), false).unwrap())).start(1 << 9);
    assert_eq!(
        (driver.read(register::MAGIC_VALUE), driver.read(register::DEVICE_ID), driver.read(register::CONFIG)),
        (0x7472_6976, 2, 8)
    );
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 2, &[], 1024), (VIRTIO_BLK_S_OK, content[1024..2048].to_vec()));
    assert_eq!(driver.line.read().unwrap(), 1, "the device must raise one interrupt for the used buffer");
    assert_eq!(driver.disk(VIRTIO_BLK_T_OUT, 7, &[7; 512], 0), (VIRTIO_BLK_S_OK, vec![]));
    assert_eq!(driver.disk(VIRTIO_BLK_T_FLUSH, 0, &[], 0), (VIRTIO_BLK_S_OK, vec![]));
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 7, &[], 512), (VIRTIO_BLK_S_OK, vec![7; 512]));
    assert_eq!(std::fs::read(file.path()).unwrap()[7 * 512..], [7; 512]);
}

#[test]
fn access_past_end_or_write_to_read_only_disk_fails() {
    let (file, content) = disk(8);
    let mut driver = Driver::new(Box::new(VirtioBlock::open(file.path(), true).unwrap())).start(1 << 9);
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 7, &[], 1024).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, u64::MAX, &[], 512).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(driver.disk(VIRTIO_BLK_T_OUT, 0, &[1; 512], 0).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(driver.disk(77, 0, &[], 0).0, 2);
    assert_eq!(std::fs::read(file.path()).unwrap(), content);
}

#[test]
fn locked_or_malformed_disk_is_rejected_with_its_path() {
    let (file, _) = disk(2);
    let name = file.path().display().to_string();
    let lock_holder = VirtioBlock::open(file.path(), false).unwrap();
    let error = |path: &std::path::Path| VirtioBlock::open(path, false).unwrap_err().to_string();
    assert_eq!(error(file.path()), format!("--disk: {name} is in use by another process"));
    drop(lock_holder);
    file.as_file().set_len(700).unwrap();
    let rule = "must be a whole number of sectors of 512 bytes, at least one";
    assert_eq!(error(file.path()), format!("--disk: {name} has 700 bytes: {rule}"));
    assert_eq!(error("/nowhere/disk".as_ref()), "--disk: cannot open /nowhere/disk");
}

#[test]
fn rng_fills_the_offered_buffer() {
    let mut driver = Driver::new(Box::new(VirtioRng)).start(0);
    driver.add_buffers(&[(64, true)]);
    let mut random = [0; 64];
    driver.memory.read_slice(&mut random, GuestAddress(BUFFERS_START)).unwrap();
    assert_ne!(random, [0; 64]);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap(), 1);
}

#[test]
fn features_ok_is_not_set_for_driver_without_version_1() {
    let driver = Driver::new(Box::new(VirtioRng));
    driver.write(register::STATUS, ACKNOWLEDGE_DRIVER);
    driver.write(register::STATUS, FEATURES_AGREED);
    assert_eq!(driver.read(register::STATUS), ACKNOWLEDGE_DRIVER, "FEATURES_OK must not be set");
}

#[test]
fn malformed_chain_stops_device_until_reset() {
    let (file, content) = disk(4);
    let mut driver = Driver::new(Box::new(VirtioBlock::open(file.path(), false).unwrap())).start(0);
    // 4 bytes are too short for a header, and the chain has no status byte.
    driver.add_buffers(&[(4, false)]);
    assert_eq!(
        driver.read(register::STATUS) & status::DEVICE_NEEDS_RESET,
        status::DEVICE_NEEDS_RESET,
        "the device must set DEVICE_NEEDS_RESET"
    );
    assert_eq!(driver.read(register::INTERRUPT_STATUS), 2, "the device must report a configuration change");
    let mut driver = driver.restart(0);
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 0, &[], 512), (VIRTIO_BLK_S_OK, content[..512].to_vec()));
}

#[test]
fn queue_registers_are_read_only_until_reset() {
    let mut driver = Driver::new(Box::new(VirtioRng)).start(0);
    driver.write(register::STATUS, 1);
    driver.write(register::QUEUE_DEVICE_LOW, 0x4000);
    driver.add_buffers(&[(64, true)]);
    assert_eq!(driver.read(register::STATUS), DRIVER_READY);
    assert_eq!(
        driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap(),
        1,
        "the address of the used ring must not change"
    );
}

#[test]
fn stopped_device_ignores_driver_ok() {
    let (file, _) = disk(4);
    let mut driver = Driver::new(Box::new(VirtioBlock::open(file.path(), false).unwrap())).start(0);
    driver.add_buffers(&[(4, false)]);
    driver.write(register::STATUS, DRIVER_READY);
    assert_eq!(
        driver.read(register::STATUS) & status::DEVICE_NEEDS_RESET,
        status::DEVICE_NEEDS_RESET,
        "DEVICE_NEEDS_RESET must remain set until a reset"
    );
    assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 0, &[], 512).0, 0, "the device must not write a status byte");
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap(), 0);
}

#[test]
fn driver_without_features_ok_is_not_served() {
    let mut driver = Driver::new(Box::new(VirtioRng)).start(0);
    driver.write(register::STATUS, 0);
    driver.write(register::STATUS, 1 | 2 | 4);
    driver.add_buffers(&[(64, true)]);
    assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap(), 0);
}

#[test]
fn offload_requests_are_cleared_in_transmitted_frames() {
    let (mut driver, host) = net_device();
    driver.memory.write_slice(&[0xff; 76], GuestAddress(BUFFERS_START)).unwrap();
    driver.write(register::STATUS, 0);
    driver = driver.start_on(TRANSMIT_QUEUE, 0);
    driver.add_buffers_to(TRANSMIT_QUEUE, &[(76, false)]);
    let mut frame = [1; 100];
    assert_eq!(host.recv(&mut frame).unwrap(), 76);
    assert_eq!((&frame[..12], &frame[12..76]), (&[0; 12][..], &[0xff; 64][..]));
}
