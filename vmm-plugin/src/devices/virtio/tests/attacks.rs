//! Devices as an attacker sees them: any register, any value, any bytes where the queues are, and chains of buffers that no
//! driver would make.

use proptest::prelude::*;

use super::*;

/// The last descriptor that the attackers' queues have.
const LAST: u16 = 15;
const INDIRECT: u16 = 4;

#[derive(Clone, Debug)]
enum Attack {
    Write(u64, u32),
    WriteOddly(u64, Vec<u8>),
    Read(u64, usize),
    Scribble(u64, Vec<u8>),
    /// Descriptors from the first on, and what is said to be on offer.
    Chain(Vec<Descriptor>, u16),
    /// The driver's side of the queue is where somebody else's is.
    Overlap(u32),
    Kick(usize),
    /// The host's network has something for it.
    Frame(usize),
}

/// One descriptor: address, length, flags, next.
type Descriptor = (u64, u32, u16, u16);

/// What one offers who knows where it hurts: the borders of memory, the queue itself, and numbers that overflow.
fn descriptors() -> impl Strategy<Value = Vec<Descriptor>> {
    let address = prop_oneof![
        4 => Just(BUFFERS),
        2 => prop::sample::select(vec![DESCRIPTORS, OFFERED, USED, USED + 4]),
        2 => prop::sample::select(vec![MEMORY as u64 - 1, MEMORY as u64, ISLAND - 1, ISLAND + ISLAND_BYTES as u64 - 3]),
        1 => prop::sample::select(vec![u64::MAX, u64::MAX - 15, 1 << 63]),
        1 => any::<u64>(),
    ];
    let length =
        prop_oneof![0..40_u32, Just(512), Just(1 << 20), any::<u32>(), Just(16 * 65_536), Just(u32::MAX)];
    let flags =
        prop_oneof![6 => 0..4_u16, 1 => Just(INDIRECT), 1 => Just(INDIRECT | NEXT), 1 => any::<u16>()];
    prop::collection::vec((address, length, flags, 0..=LAST + 1), 1..6)
}

fn attacks() -> impl Strategy<Value = Vec<Attack>> {
    let registers = prop_oneof![0..0x110_u64, Just(0x70), Just(0x44), Just(0x38), Just(0x20), Just(u64::MAX)];
    let value = prop_oneof![any::<u32>(), 0..20_u32, Just(0x1000), Just(0x2000), Just(0x3000), Just(0xf)];
    let queues = prop_oneof![0x1000..0x1100_u64, 0x2000..0x2040_u64, 0x3000..0x3040_u64];
    let bytes = |most| prop::collection::vec(any::<u8>(), 0..most);
    let places = vec![0x1000, 0x2000, 0x3000, 0x3004, 0x000f_fff0, 0xffff_fff0];
    let attack = prop_oneof![
        4 => (registers.clone(), value).prop_map(|(at, value)| Attack::Write(at, value)),
        1 => (registers.clone(), bytes(9)).prop_map(|(at, bytes)| Attack::WriteOddly(at, bytes)),
        1 => (registers, 0..9_usize).prop_map(|(at, bytes)| Attack::Read(at, bytes)),
        2 => (queues, bytes(33)).prop_map(|(at, bytes)| Attack::Scribble(at, bytes)),
        4 => (descriptors(), 0..20_u16).prop_map(|(chain, offered)| Attack::Chain(chain, offered)),
        1 => prop::sample::select(places).prop_map(Attack::Overlap),
        3 => (0..4_usize).prop_map(Attack::Kick),
        1 => (0..70_000_usize).prop_map(Attack::Frame),
    ];
    prop::collection::vec(attack, 0..80)
}

impl Driver {
    fn attack(&mut self, attack: &Attack, host: Option<&UnixDatagram>) {
        match attack {
            Attack::Write(at, value) => self.write(*at, *value),
            Attack::WriteOddly(at, bytes) => self.registers.write(*at, bytes),
            Attack::Read(at, bytes) => self.registers.read(*at, &mut vec![0; *bytes]),
            Attack::Scribble(at, bytes) => self.memory.write_slice(bytes, GuestAddress(*at)).unwrap(),
            Attack::Chain(chain, offered) => self.chain(chain, *offered),
            Attack::Overlap(at) => {
                for (register, value) in [(0x70, 0), (0x30, 0), (0xa0, *at), (0xa4, 0), (0x70, 0xf)] {
                    self.write(register, value);
                }
            }
            Attack::Kick(queue) => drop(self.registers.serve(*queue)),
            Attack::Frame(bytes) => drop(host.map(|host| host.send(&vec![1; *bytes]))),
        }
    }

    fn chain(&mut self, chain: &[Descriptor], offered: u16) {
        for (at, (address, length, flags, next)) in (DESCRIPTORS..).step_by(16).zip(chain) {
            self.memory.write_obj(*address, GuestAddress(at)).unwrap();
            self.memory.write_obj(*length, GuestAddress(at + 8)).unwrap();
            self.memory.write_obj(*flags, GuestAddress(at + 12)).unwrap();
            self.memory.write_obj(*next, GuestAddress(at + 14)).unwrap();
        }
        self.offered = self.offered.wrapping_add(offered);
        self.memory.write_obj(self.offered, GuestAddress(OFFERED + 2)).unwrap();
        (0..2).for_each(|queue| drop(self.registers.serve(queue)));
    }
}

/// The device answers, ignores or stops, and works again for whoever resets it.
fn endure(driver: Driver, host: Option<&UnixDatagram>, attacks: &[Attack]) -> Driver {
    let mut driver = driver.up(EVENT_IDX);
    attacks.iter().for_each(|attack| driver.attack(attack, host));
    driver.up_again(0)
}

proptest! {
    #[test]
    fn no_driver_brings_a_disk_down_or_writes_past_its_end(attacks in attacks()) {
        let (file, _) = disk(4);
        let mut driver = endure(Driver::of(Box::new(Block::open(file.path(), false).unwrap())), None, &attacks);
        prop_assert_eq!(driver.disk(OUT, 3, &[9; 512], 0).0, OK);
        prop_assert_eq!(driver.disk(IN, 3, &[], 512), (OK, vec![9; 512]));
        prop_assert_eq!(file.as_file().metadata().unwrap().len(), 4 * 512);
    }

    #[test]
    fn no_driver_writes_a_disk_that_may_only_be_read(attacks in attacks()) {
        let (file, content) = disk(4);
        let mut driver = endure(Driver::of(Box::new(Block::open(file.path(), true).unwrap())), None, &attacks);
        prop_assert_eq!(driver.disk(IN, 0, &[], 512).0, OK);
        prop_assert_eq!(std::fs::read(file.path()).unwrap(), content);
    }

    #[test]
    fn no_driver_brings_a_source_of_random_numbers_down(attacks in attacks()) {
        let mut driver = endure(Driver::of(Box::new(Rng)), None, &attacks);
        driver.offer(&[(64, true)]);
        prop_assert_eq!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap(), 1);
    }

    #[test]
    fn no_driver_and_no_network_bring_a_card_down_or_ask_the_host_for_offloads(attacks in attacks()) {
        let (driver, host) = card();
        let mut driver = endure(driver, Some(&host), &attacks);
        let mut frame = vec![1; 1 << 17];
        while let Ok(bytes) = host.recv(&mut frame) {
            prop_assert!(frame[..bytes.min(12)].iter().all(|byte| *byte == 0));
        }
        while host.send(&[5; 60]).is_err() {
            driver.offer(&[(2000, true)]); // what was sent before makes room
        }
        for _ in 0..3 {
            driver.offer(&[(2000, true)]);
        }
        prop_assert!(driver.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap() > 0);
    }
}
