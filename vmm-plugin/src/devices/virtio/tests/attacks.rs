//! Tests of virtio devices with hostile drivers: arbitrary register accesses, arbitrary queue
//! memory, and malformed descriptor chains.

use proptest::prelude::*;

use super::*;

/// Highest valid descriptor index in the queues of hostile drivers.
const LAST_DESCRIPTOR: u16 = 15;
const VIRTQ_DESC_F_INDIRECT: u16 = 4;

#[derive(Clone, Debug)]
enum DriverAttack {
    Write(u64, u32),
    WriteUnaligned(u64, Vec<u8>),
    Read(u64, usize),
    WriteQueueMemory(u64, Vec<u8>),
    /// Writes descriptors from index 0 on, and adds a number to the available index.
    Chain(Vec<Descriptor>, u16),
    /// Sets the address of the used ring, which may overlap other queue memory.
    MoveUsedRing(u32),
    Notify(usize),
    /// Sends a frame of this length from the host to the device.
    ReceiveFrame(usize),
}

/// Fields of a descriptor: address, length, flags and next.
type Descriptor = (u64, u32, u16, u16);

/// Generates descriptors that are near memory boundaries, inside the queue, or have lengths that
/// overflow.
fn arbitrary_descriptors() -> impl Strategy<Value = Vec<Descriptor>> {
    let address = prop_oneof![
        4 => Just(BUFFERS_START),
        2 => prop::sample::select(vec![DESCRIPTOR_TABLE, AVAIL_RING, USED_RING, USED_RING + 4]),
        2 => prop::sample::select(vec![MEMORY_BYTES as u64 - 1, MEMORY_BYTES as u64, SECOND_REGION_START - 1, SECOND_REGION_START + SECOND_REGION_BYTES as u64 - 3]),
        1 => prop::sample::select(vec![u64::MAX, u64::MAX - 15, 1 << 63]),
        1 => any::<u64>(),
    ];
    let length =
        prop_oneof![0..40_u32, Just(512), Just(1 << 20), any::<u32>(), Just(16 * 65_536), Just(u32::MAX)];
    let flags = prop_oneof![6 => 0..4_u16, 1 => Just(VIRTQ_DESC_F_INDIRECT), 1 => Just(VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_NEXT), 1 => any::<u16>()];
    prop::collection::vec((address, length, flags, 0..=LAST_DESCRIPTOR + 1), 1..6)
}

fn arbitrary_attacks() -> impl Strategy<Value = Vec<DriverAttack>> {
    let transport = prop_oneof![
        0..0x110_u64,
        Just(register::STATUS),
        Just(register::QUEUE_READY),
        Just(register::QUEUE_NUM),
        Just(register::DRIVER_FEATURES),
        Just(u64::MAX)
    ];
    let value = prop_oneof![any::<u32>(), 0..20_u32, Just(0x1000), Just(0x2000), Just(0x3000), Just(0xf)];
    let queues = prop_oneof![0x1000..0x1100_u64, 0x2000..0x2040_u64, 0x3000..0x3040_u64];
    let bytes = |most| prop::collection::vec(any::<u8>(), 0..most);
    let ring_addresses = vec![0x1000, 0x2000, 0x3000, 0x3004, 0x000f_fff0, 0xffff_fff0];
    let attack = prop_oneof![
        4 => (transport.clone(), value).prop_map(|(at, value)| DriverAttack::Write(at, value)),
        1 => (transport.clone(), bytes(9)).prop_map(|(at, bytes)| DriverAttack::WriteUnaligned(at, bytes)),
        1 => (transport, 0..9_usize).prop_map(|(at, bytes)| DriverAttack::Read(at, bytes)),
        2 => (queues, bytes(33)).prop_map(|(at, bytes)| DriverAttack::WriteQueueMemory(at, bytes)),
        4 => (arbitrary_descriptors(), 0..20_u16).prop_map(|(chain, avail_index)| DriverAttack::Chain(chain, avail_index)),
        1 => prop::sample::select(ring_addresses).prop_map(DriverAttack::MoveUsedRing),
        3 => (0..4_usize).prop_map(DriverAttack::Notify),
        1 => (0..70_000_usize).prop_map(DriverAttack::ReceiveFrame),
    ];
    prop::collection::vec(attack, 0..80)
}

impl Driver {
    fn attack(&mut self, attack: &DriverAttack, host: Option<&UnixDatagram>) {
        match attack {
            DriverAttack::Write(at, value) => self.write(*at, *value),
            DriverAttack::WriteUnaligned(at, bytes) => self.transport.write(*at, bytes),
            DriverAttack::Read(at, bytes) => self.transport.read(*at, &mut vec![0; *bytes]),
            DriverAttack::WriteQueueMemory(at, bytes) => {
                self.memory.write_slice(bytes, GuestAddress(*at)).unwrap()
            }
            DriverAttack::Chain(chain, avail_index) => self.chain(chain, *avail_index),
            DriverAttack::MoveUsedRing(at) => {
                for (register, value) in [
                    (register::STATUS, 0),
                    (register::QUEUE_SEL, 0),
                    (register::QUEUE_DEVICE_LOW, *at),
                    (register::QUEUE_DEVICE_HIGH, 0),
                    (register::STATUS, 0xf),
                ] {
                    self.write(register, value);
                }
            }
            DriverAttack::Notify(queue) => drop(self.transport.process_queue(*queue)),
            DriverAttack::ReceiveFrame(bytes) => drop(host.map(|host| host.send(&vec![1; *bytes]))),
        }
    }

    fn chain(&mut self, chain: &[Descriptor], avail_index: u16) {
        for (at, (address, length, flags, next)) in (DESCRIPTOR_TABLE..).step_by(16).zip(chain) {
            self.memory.write_obj(*address, GuestAddress(at)).unwrap();
            self.memory.write_obj(*length, GuestAddress(at + 8)).unwrap();
            self.memory.write_obj(*flags, GuestAddress(at + 12)).unwrap();
            self.memory.write_obj(*next, GuestAddress(at + 14)).unwrap();
        }
        self.avail_index = self.avail_index.wrapping_add(avail_index);
        self.memory.write_obj(self.avail_index, GuestAddress(AVAIL_RING + 2)).unwrap();
        (0..2).for_each(|queue| drop(self.transport.process_queue(queue)));
    }
}

/// Executes the attacks, then resets and initializes the device again.
fn attack_and_restart(driver: Driver, host: Option<&UnixDatagram>, attacks: &[DriverAttack]) -> Driver {
    let mut driver = driver.start(VIRTIO_F_EVENT_IDX);
    attacks.iter().for_each(|attack| driver.attack(attack, host));
    driver.restart(0)
}

proptest! {
    #[test]
    fn arbitrary_disk_driver_does_not_grow_the_file(attacks in arbitrary_attacks()) {
        let (file, _) = disk(4);
        let mut driver = attack_and_restart(Driver::new(Box::new(VirtioBlock::open(file.path(), false).unwrap())), None, &attacks);
        prop_assert_eq!(driver.disk(VIRTIO_BLK_T_OUT, 3, &[9; 512], 0).0, VIRTIO_BLK_S_OK);
        prop_assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 3, &[], 512), (VIRTIO_BLK_S_OK, vec![9; 512]));
        prop_assert_eq!(file.as_file().metadata().unwrap().len(), 4 * 512);
    }

    #[test]
    fn arbitrary_driver_does_not_write_a_read_only_disk(attacks in arbitrary_attacks()) {
        let (file, content) = disk(4);
        let mut driver = attack_and_restart(Driver::new(Box::new(VirtioBlock::open(file.path(), true).unwrap())), None, &attacks);
        prop_assert_eq!(driver.disk(VIRTIO_BLK_T_IN, 0, &[], 512).0, VIRTIO_BLK_S_OK);
        prop_assert_eq!(std::fs::read(file.path()).unwrap(), content);
    }

    #[test]
    fn arbitrary_rng_driver_does_not_break_the_device(attacks in arbitrary_attacks()) {
        let mut driver = attack_and_restart(Driver::new(Box::new(VirtioRng)), None, &attacks);
        driver.add_buffers(&[(64, true)]);
        prop_assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap(), 1);
    }

    #[test]
    fn arbitrary_net_driver_and_frames_request_no_offloads(attacks in arbitrary_attacks()) {
        let (driver, host) = net_device();
        let mut driver = attack_and_restart(driver, Some(&host), &attacks);
        let mut frame = vec![1; 1 << 17];
        while let Ok(bytes) = host.recv(&mut frame) {
            prop_assert!(frame[..bytes.min(12)].iter().all(|byte| *byte == 0));
        }
        while host.send(&[5; 60]).is_err() {
            driver.add_buffers(&[(2000, true)]); // the device must first receive earlier frames
        }
        for _ in 0..3 {
            driver.add_buffers(&[(2000, true)]);
        }
        prop_assert!(driver.memory.read_obj::<u16>(GuestAddress(USED_RING + 2)).unwrap() > 0);
    }
}
