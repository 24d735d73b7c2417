//! Parameters of a world, drawn from its seed: size of the rack, kinds of devices, rates of faults.

use pool::ledger::{EmcSpec, HostSpec, RackSpec};
use pool::manager::Settings;
use rand::Rng as _;
use rand_pcg::Pcg64;
use units::{Bytes, HostId, Name, Ns, SliceId};

use super::{
    device::{Device, Physics},
    machine::Machine,
};

/// Duration of a durable write on most disks.
const STORE_TAKES: Ns = Ns(400_000);

#[derive(Debug)]
pub(super) struct Weather {
    pub(super) settings: Settings,
    pub(super) rack: RackSpec,
    /// Fraction of fence commands that succeed; `None` without a fence command.
    pub(super) stops: Option<f64>,
    /// Messages of a connection arrive in order or not at all, as on a stream.
    pub(super) in_order: bool,
    /// Fractions of messages lost and duplicated.
    pub(super) lost: f64,
    pub(super) repeated: f64,
    /// Fractions of commits and host calls that fail.
    pub(super) store_fails: f64,
    /// Mean duration of a durable write.
    pub(super) store_takes: Ns,
    pub(super) host_fails: f64,
    /// Mean interval between client requests, and between faults.
    pub(super) act_every: Ns,
    pub(super) trouble_every: Ns,
    /// Days may pass in which nothing runs.
    pub(super) days_pass: bool,
    /// The operator changes rack.toml.
    pub(super) rack_changes: bool,
    /// A backup may be older than the latest change of rack.toml.
    pub(super) old_backups: bool,
    /// The record of a device may be lost or replaced by an older copy.
    pub(super) devices_forget: bool,
    /// Fraction of scrubs that verify only a part of the slice.
    pub(super) partial_scrubs: f64,
    /// The store begins with the maximum of ended reservations of one client.
    pub(super) long_past: bool,
}

impl Weather {
    pub(super) fn of(rng: &mut Pcg64) -> Self {
        let lease_ttl = Ns::ms(rng.random_range(200..800));
        let fence_after = rng.random_bool(0.7).then(|| Ns::ms(rng.random_range(300..1500)));
        let in_order = rng.random_bool(0.5);
        let worst_store = if rng.random_bool(0.2) { 0.3 } else { 0.03 };
        let some =
            |rng: &mut Pcg64, most: f64| if rng.random_bool(0.5) { rng.random_range(0.0..most) } else { 0.0 };
        Self {
            settings: Settings { lease_ttl, fence_after },
            rack: rack(rng),
            stops: rng.random_bool(0.6).then(|| rng.random_range(0.3..1.0)),
            in_order,
            lost: if in_order { 0.0 } else { some(rng, 0.2) },
            repeated: if in_order { 0.0 } else { some(rng, 0.2) },
            store_fails: some(rng, worst_store),
            store_takes: if rng.random_bool(0.2) { Ns::ms(rng.random_range(2..20)) } else { STORE_TAKES },
            host_fails: some(rng, 0.1),
            act_every: Ns::ms(rng.random_range(5..60)),
            trouble_every: Ns::ms(rng.random_range(100..1000)),
            days_pass: rng.random_bool(0.2),
            rack_changes: rng.random_bool(0.8),
            long_past: rng.random_bool(0.002),
            old_backups: rng.random_bool(0.3),
            devices_forget: rng.random_bool(0.4),
            partial_scrubs: some(rng, 0.3),
        }
    }

    pub(super) fn devices(&self) -> Vec<Device> {
        let mut first = SliceId(0);
        let device = |emc: &EmcSpec| {
            let physics = if emc.serial.is_some() { Physics::SharedDax } else { Physics::Emulated };
            let device = Device::new(physics, first, emc.slices);
            first.0 += emc.slices;
            device
        };
        self.rack.emcs.iter().map(device).collect()
    }

    pub(super) fn machines(&self) -> Vec<Machine> {
        let hosts = self.rack.hosts.iter().zip(0..);
        hosts.map(|(host, id)| Machine::new(HostId(id), host.name.clone())).collect()
    }
}

/// Returns a rack of two or three hosts and one or two EMCs, with some pairs not attached.
fn rack(rng: &mut Pcg64) -> RackSpec {
    let count = rng.random_range(1..=2);
    let emc = |n| emc(n, rng.random_range(2..=5), rng.random_bool(0.5));
    let emcs: Vec<EmcSpec> = (0..count).map(emc).collect();
    let hosts = (0..rng.random_range(2..=3)).map(|n| {
        let one = rng.random_range(0..emcs.len());
        let all = rng.random_bool(0.7);
        let wires = emcs.iter().enumerate().filter(|(i, _)| all || *i == one);
        host(n, wires.map(|(_, emc)| emc.name.clone()).collect())
    });
    let hosts = hosts.collect();
    RackSpec { emcs, hosts }
}

pub(super) fn emc(n: usize, slices: u32, shared: bool) -> EmcSpec {
    let (driver, path, serial) = ("simulated".into(), String::new(), shared.then(|| format!("{n:#x}")));
    EmcSpec { name: name("e", n), slices, driver, path, serial }
}

pub(super) fn host(n: usize, emcs: Vec<Name>) -> HostSpec {
    HostSpec { name: name("h", n), cores: 64, local: Bytes::gib(64), emcs }
}

pub(super) fn name(prefix: &str, n: usize) -> Name {
    Name::new(&format!("{prefix}{n}")).expect("a letter and a number are a name")
}
