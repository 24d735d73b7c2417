//! The operator's rack.toml: hosts and EMCs are added, removed, resized and attached differently while
//! the rack runs. A change is accepted or refused as a whole. Without a reply either is possible, until
//! the change is repeated.

use pool::{
    denied::Denied,
    ledger::{EmcSpec, HostSpec, RackSpec},
    manager::{Answer, Ask},
    protocol::SeenDevice,
};
use rand::Rng as _;
use units::{Bytes, EmcId, Name};

use super::{
    Happening, Ns, World,
    check::ByName,
    device::{Device, Physics},
    machine::Machine,
    people::Asked,
    weather::{emc, host, name},
};

/// Maximum of hosts and EMCs over the life of a world.
const PLACES_MAX: usize = 4;

/// The file, and its predecessor while either may be durable.
#[derive(Debug)]
pub(super) struct RackFile {
    spec: RackSpec,
    /// The predecessor, while it is unknown which of the two is durable.
    before: Option<RackSpec>,
    /// Shared pool devices, which every machine sees.
    pub(super) seen: Vec<SeenDevice>,
    /// Hosts and EMCs of the latest change.
    latest: ByName,
}

impl RackFile {
    /// Creates the file of a new rack.
    pub(super) fn new(spec: RackSpec) -> Self {
        let seen = spec.emcs.iter().filter_map(seen).collect();
        Self { spec, before: Some(RackSpec::default()), seen, latest: ByName::default() }
    }

    pub(super) fn spec(&self) -> &RackSpec {
        &self.spec
    }

    /// Returns the files of which one is durable.
    pub(super) fn possible(&self) -> impl Iterator<Item = &RackSpec> {
        std::iter::once(&self.spec).chain(&self.before)
    }
}

fn seen(emc: &EmcSpec) -> Option<SeenDevice> {
    Some(SeenDevice { serial: emc.serial.clone()?, slices: emc.slices, problem: None })
}

impl World {
    /// Submits a new rack.toml, or the current one again if its outcome is unknown.
    pub(super) fn change_rack(&mut self) {
        let waits = self.people.asked.values().any(|asked| matches!(asked, Asked::Configure));
        if waits || !self.program.is_open() {
            return;
        }
        if self.rack.before.is_none() {
            let new = self.changed_rack();
            self.rack.before = Some(std::mem::replace(&mut self.rack.spec, new));
        }
        self.ask(Ask::Configure(self.rack.spec.clone()), Asked::Configure);
    }

    /// Processes the reply to a rack.toml.
    pub(super) fn rack_answered(&mut self, answer: &Result<Answer, Denied>) {
        match answer {
            Ok(_) => {
                self.story.counts.rack_changes +=
                    u64::from(self.rack.before.is_some() && self.program.is_open());
                self.rack.before = None;
                if self.calm {
                    // An agent reports the devices of its machine when it connects.
                    self.hosts().into_iter().for_each(|host| self.break_session(host));
                }
            }
            Err(Denied::StoreFailed | Denied::Starting(_)) => return,
            Err(_) => {
                self.story.counts.rack_refusals += 1;
                if let Some(before) = self.rack.before.take() {
                    self.rack.spec = before;
                }
            }
        }
        self.check_rack();
    }

    /// Attaches every host to every EMC, so that each slice can be scrubbed.
    pub(super) fn wire_everything(&mut self) {
        let mut rack = self.rack.spec.clone();
        let emcs: Vec<Name> = rack.emcs.iter().map(|emc| emc.name.clone()).collect();
        for host in &mut rack.hosts {
            let missing = emcs.iter().filter(|emc| !host.emcs.contains(emc)).cloned();
            host.emcs.extend(missing.collect::<Vec<_>>());
        }
        if self.rack.before.is_none() && rack != self.rack.spec {
            self.rack.before = Some(std::mem::replace(&mut self.rack.spec, rack));
        }
        if self.rack.before.is_some() {
            self.change_rack();
        }
    }

    fn changed_rack(&mut self) -> RackSpec {
        let mut rack = self.rack.spec.clone();
        match self.rng.random_range(0..12) {
            0 => self.add_host(&mut rack),
            1 => self.add_emc(&mut rack),
            2 if rack.hosts.len() > 1 => drop(rack.hosts.remove(self.rng.random_range(0..rack.hosts.len()))),
            3 if rack.emcs.len() > 1 => {
                let gone = rack.emcs.remove(self.rng.random_range(0..rack.emcs.len())).name;
                rack.hosts.iter_mut().for_each(|host| host.emcs.retain(|wire| *wire != gone));
            }
            4 => self.resize_host(&mut rack),
            5 => self.ask_for_the_impossible(&mut rack),
            _ => self.rewire_host(&mut rack),
        }
        rack
    }

    fn add_host(&mut self, rack: &mut RackSpec) {
        let n = self.machines.len();
        // Two restores of one backup assign the same numbers, except for hosts that devices name.
        let unused = self.truth.next_host().is_some_and(|id| self.machine_of(id).is_none());
        if n < PLACES_MAX && unused {
            let wires = rack.emcs.iter().map(|emc| emc.name.clone());
            let wires: Vec<Name> = wires.filter(|_| self.rng.random_bool(0.7)).collect();
            rack.hosts.push(host(n, wires));
        }
    }

    fn add_emc(&mut self, rack: &mut RackSpec) {
        let n = self.devices.len();
        if n < PLACES_MAX && self.truth.next_emc() == Some(n) {
            let new = emc(n, self.rng.random_range(1..=3), self.rng.random_bool(0.5));
            let wired = rack.hosts.iter_mut().filter(|_| self.rng.random_bool(0.7));
            wired.for_each(|host| host.emcs.push(new.name.clone()));
            rack.emcs.push(new);
        }
    }

    fn some_host<'a>(&mut self, rack: &'a mut RackSpec) -> &'a mut HostSpec {
        let n = self.rng.random_range(0..rack.hosts.len());
        &mut rack.hosts[n]
    }

    fn resize_host(&mut self, rack: &mut RackSpec) {
        let (cores, gib) = (self.rng.random_range(2..=64), self.rng.random_range(2..=64));
        let host = self.some_host(rack);
        (host.cores, host.local) = (cores, Bytes::gib(gib));
    }

    fn rewire_host(&mut self, rack: &mut RackSpec) {
        let wire = rack.emcs[self.rng.random_range(0..rack.emcs.len())].name.clone();
        let host = self.some_host(rack);
        if host.emcs.contains(&wire) {
            host.emcs.retain(|kept| *kept != wire);
        } else {
            host.emcs.push(wire);
        }
    }

    /// Submits an invalid file: no part of it may be accepted, new hosts and EMCs included.
    fn ask_for_the_impossible(&mut self, rack: &mut RackSpec) {
        self.add_host(rack);
        self.add_emc(rack);
        if self.chance(0.5) {
            rack.emcs[0].slices += 1;
        } else {
            self.some_host(rack).emcs.push(name("nowhere", 0));
        }
    }

    /// Starts a restored manager with the file of its backup, or with the current one, which must not add
    /// anything.
    pub(super) fn restore_rack(&mut self) {
        let (emcs, hosts) = self.truth.rack();
        let spec = &self.rack.spec;
        let adds = spec.emcs.iter().any(|emc| !emcs.contains_key(&emc.name))
            || spec.hosts.iter().any(|host| !hosts.contains_key(&host.name));
        let backup = RackSpec { emcs: emcs.into_values().collect(), hosts: hosts.into_values().collect() };
        if adds || self.chance(0.5) {
            (self.rack.spec, self.rack.before) = (backup, None);
        } else {
            self.rack.before = Some(backup);
        }
    }

    /// Adds devices and machines once they are durable. Some operators back up every rack. Other backups
    /// may lack machines and devices: these keep running, no host is added under their numbers, and no
    /// device is added.
    pub(super) fn follow_rack(&mut self) {
        while let Some(emc) = self.truth.emc(EmcId(u32::try_from(self.devices.len()).expect("few"))).cloned()
        {
            let physics = if emc.serial.is_some() { Physics::SharedDax } else { Physics::Emulated };
            self.devices.push(Device::new(physics, emc.first, emc.slices));
            let slices = emc.slices;
            self.rack.seen.extend(emc.serial.map(|serial| SeenDevice { serial, slices, problem: None }));
        }
        for (id, name) in self.truth.hosts().map(|(id, host)| (id, host.name.clone())).collect::<Vec<_>>() {
            let Some(machine) = self.machine_of(id) else {
                self.machines.push(Machine::new(id, name));
                self.after(Ns::ms(1), Happening::Boots(id));
                continue;
            };
            if machine.name != name && machine.reachable().next().is_some() {
                let what = format!("{id} of {} is given to {name}", machine.name);
                self.blame("no host gets the number of one that has slices", what);
            }
        }
        self.check_rack();
        let rack = self.truth.rack();
        if rack != self.rack.latest {
            let first = self.rack.latest == ByName::default();
            self.rack.latest = rack;
            if first || !self.weather.old_backups {
                self.program.store.backup();
            }
        }
    }
}
