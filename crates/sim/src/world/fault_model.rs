//! Random parameters of a world, drawn from its seed: size of the rack, kinds of devices, and rates
//! of faults.

use pool::ledger::{EmcSpec, HostSpec, RackSpec};
use pool::manager::Settings;
use rand::Rng as _;
use rand_pcg::Pcg64;
use units::{Bytes, HostId, Name, Ns, SliceId};

use super::{
    device::{Device, DeviceKind},
    machine::Machine,
};

/// Mean duration of a durable write in most worlds: 0.4 ms.
const STORE_WRITE_DURATION: Ns = Ns(400_000);

#[derive(Debug)]
pub(super) struct FaultModel {
    pub(super) settings: Settings,
    pub(super) rack: RackSpec,
    /// Fraction of fence commands that succeed, or `None` if the operator has no fence command.
    pub(super) fence_success_rate: Option<f64>,
    /// Whether messages of a connection arrive in order, as on a stream.
    pub(super) in_order: bool,
    /// Fraction of messages that are lost.
    pub(super) message_loss_rate: f64,
    /// Fraction of messages that are duplicated.
    pub(super) message_duplication_rate: f64,
    /// Fraction of commits and loads of the store that fail.
    pub(super) store_failure_rate: f64,
    /// Mean duration of a durable write.
    pub(super) store_write_duration: Ns,
    /// Fraction of calls from an agent to its host that fail.
    pub(super) host_failure_rate: f64,
    /// Mean interval between client requests.
    pub(super) client_interval: Ns,
    /// Mean interval between faults.
    pub(super) fault_interval: Ns,
    /// Whether all machines may be suspended for days.
    pub(super) suspends_for_days: bool,
    /// Whether the operator changes rack.toml.
    pub(super) rack_changes: bool,
    /// Whether a backup may be older than the latest change of rack.toml.
    pub(super) old_backups: bool,
    /// Whether the record of a device may be lost or replaced by an older copy.
    pub(super) devices_lose_records: bool,
    /// Fraction of scrubs that verify only a part of the slice.
    pub(super) partial_scrub_rate: f64,
    /// Whether the store starts with as many ended reservations as one client may have.
    pub(super) long_history: bool,
    /// Whether another manager waits to be elected.
    pub(super) has_standby: bool,
}

impl FaultModel {
    pub(super) fn random(rng: &mut Pcg64) -> Self {
        let lease_ttl = Ns::ms(rng.random_range(200..800));
        let fence_after = rng.random_bool(0.7).then(|| Ns::ms(rng.random_range(300..1500)));
        let in_order = rng.random_bool(0.5);
        let store_failure_rate_max = if rng.random_bool(0.2) { 0.3 } else { 0.03 };
        let random_rate =
            |rng: &mut Pcg64, max: f64| if rng.random_bool(0.5) { rng.random_range(0.0..max) } else { 0.0 };
        Self {
            settings: Settings { lease_ttl, fence_after },
            rack: random_rack(rng),
            fence_success_rate: rng.random_bool(0.6).then(|| rng.random_range(0.3..1.0)),
            in_order,
            message_loss_rate: if in_order { 0.0 } else { random_rate(rng, 0.2) },
            message_duplication_rate: if in_order { 0.0 } else { random_rate(rng, 0.2) },
            store_failure_rate: random_rate(rng, store_failure_rate_max),
            store_write_duration: if rng.random_bool(0.2) {
                Ns::ms(rng.random_range(2..20))
            } else {
                STORE_WRITE_DURATION
            },
            host_failure_rate: random_rate(rng, 0.1),
            client_interval: Ns::ms(rng.random_range(5..60)),
            fault_interval: Ns::ms(rng.random_range(100..1000)),
            suspends_for_days: rng.random_bool(0.2),
            rack_changes: rng.random_bool(0.8),
            long_history: rng.random_bool(0.002),
            old_backups: rng.random_bool(0.3),
            devices_lose_records: rng.random_bool(0.4),
            partial_scrub_rate: random_rate(rng, 0.3),
            has_standby: rng.random_bool(0.5),
        }
    }

    pub(super) fn create_devices(&self) -> Vec<Device> {
        let mut first = SliceId(0);
        let device = |emc: &EmcSpec| {
            let kind = if emc.serial.is_some() { DeviceKind::SharedDax } else { DeviceKind::Emulated };
            let device = Device::new(kind, first, emc.slices);
            first.0 += emc.slices;
            device
        };
        self.rack.emcs.iter().map(device).collect()
    }

    pub(super) fn create_machines(&self) -> Vec<Machine> {
        let hosts = self.rack.hosts.iter().zip(0..);
        hosts.map(|(host, id)| Machine::new(HostId(id), host.name.clone())).collect()
    }
}

/// Returns a random rack of two or three hosts and one or two EMCs. A host is attached to all EMCs
/// or to one of them.
fn random_rack(rng: &mut Pcg64) -> RackSpec {
    let count = rng.random_range(1..=2);
    let emc = |n| emc_spec(n, rng.random_range(2..=5), rng.random_bool(0.5));
    let emcs: Vec<EmcSpec> = (0..count).map(emc).collect();
    let hosts = (0..rng.random_range(2..=3)).map(|n| {
        let single = rng.random_range(0..emcs.len());
        let all = rng.random_bool(0.7);
        let attached = emcs.iter().enumerate().filter(|(i, _)| all || *i == single);
        host_spec(n, attached.map(|(_, emc)| emc.name.clone()).collect())
    });
    let hosts = hosts.collect();
    RackSpec { emcs, hosts }
}

pub(super) fn emc_spec(n: usize, slices: u32, shared: bool) -> EmcSpec {
    let (driver, path, serial) = ("simulated".into(), String::new(), shared.then(|| format!("{n:#x}")));
    EmcSpec { name: numbered_name("e", n), slices, driver, path, serial }
}

pub(super) fn host_spec(n: usize, emcs: Vec<Name>) -> HostSpec {
    HostSpec { name: numbered_name("h", n), cores: 64, local: Bytes::gib(64), emcs }
}

pub(super) fn numbered_name(prefix: &str, n: usize) -> Name {
    Name::new(&format!("{prefix}{n}")).expect("a letter with a number is a valid name")
}
