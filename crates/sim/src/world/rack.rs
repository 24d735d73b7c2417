//! Changes of rack.toml by the operator while the rack runs. Hosts and EMCs are added, removed,
//! resized and attached to each other. The manager accepts or rejects a change as a whole. If the
//! reply is lost, the outcome is unknown until the operator submits the change again.

use pool::{
    ledger::{EmcSpec, HostSpec, RackSpec},
    manager::{Request, RequestReply},
    protocol::SeenDevice,
    rejection::Rejection,
};
use rand::Rng as _;
use units::{Bytes, EmcId, Name};

use super::{
    Ns, ScheduledEvent, World,
    check::ByName,
    clients::PendingRequest,
    device::{Device, DeviceKind},
    fault_model::{emc_spec, host_spec, numbered_name},
    machine::Machine,
};

/// Maximum number of hosts and, separately, of EMCs that a world creates.
const RACK_NODES_MAX: usize = 4;

/// Current rack.toml, and the previous rack.toml while the outcome of a change is unknown.
#[derive(Debug)]
pub(super) struct RackFile {
    spec: RackSpec,
    /// Previous rack.toml, while it is unknown whether the change is durable.
    previous: Option<RackSpec>,
    /// Shared pool devices, which are visible on every machine.
    pub(super) visible_devices: Vec<SeenDevice>,
    /// Hosts and EMCs after the latest durable change.
    latest: ByName,
}

impl RackFile {
    /// Creates the rack.toml of a new rack.
    pub(super) fn new(spec: RackSpec) -> Self {
        let visible_devices = spec.emcs.iter().filter_map(shared_device).collect();
        Self { spec, previous: Some(RackSpec::default()), visible_devices, latest: ByName::default() }
    }

    pub(super) fn spec(&self) -> &RackSpec {
        &self.spec
    }

    /// Returns the versions of rack.toml that may be durable.
    pub(super) fn possible_rack_specs(&self) -> impl Iterator<Item = &RackSpec> {
        std::iter::once(&self.spec).chain(&self.previous)
    }
}

fn shared_device(emc: &EmcSpec) -> Option<SeenDevice> {
    Some(SeenDevice { serial: emc.serial.clone()?, slices: emc.slices, problem: None })
}

impl World {
    /// Submits a changed rack.toml. If the outcome of the last change is unknown, submits the same
    /// rack.toml again.
    pub(super) fn change_rack(&mut self) {
        let is_pending =
            self.clients.pending.values().any(|request| matches!(request, PendingRequest::Configure));
        if is_pending || !self.manager_process.is_open() {
            return;
        }
        if self.rack.previous.is_none() {
            let new = self.random_changed_rack();
            self.rack.previous = Some(std::mem::replace(&mut self.rack.spec, new));
        }
        self.send_request(Request::Configure(self.rack.spec.clone()), PendingRequest::Configure);
    }

    /// Processes the reply to a submitted rack.toml.
    pub(super) fn handle_rack_reply(&mut self, answer: &Result<RequestReply, Rejection>) {
        match answer {
            Ok(_) => {
                self.run_log.counts.rack_changes +=
                    u64::from(self.rack.previous.is_some() && self.manager_process.is_open());
                self.rack.previous = None;
                if self.faults_stopped {
                    // An agent reports the devices of its machine when it connects.
                    self.hosts().into_iter().for_each(|host| self.break_session(host));
                }
            }
            Err(Rejection::StoreFailed | Rejection::Starting(_)) => return,
            Err(_) => {
                self.run_log.counts.rack_refusals += 1;
                if let Some(previous) = self.rack.previous.take() {
                    self.rack.spec = previous;
                }
            }
        }
        self.check_rack();
    }

    /// Attaches every host to every EMC, so that each slice can be scrubbed.
    pub(super) fn attach_all_emcs(&mut self) {
        let mut rack = self.rack.spec.clone();
        let emcs: Vec<Name> = rack.emcs.iter().map(|emc| emc.name.clone()).collect();
        for host in &mut rack.hosts {
            let missing = emcs.iter().filter(|emc| !host.emcs.contains(emc)).cloned();
            host.emcs.extend(missing.collect::<Vec<_>>());
        }
        if self.rack.previous.is_none() && rack != self.rack.spec {
            self.rack.previous = Some(std::mem::replace(&mut self.rack.spec, rack));
        }
        if self.rack.previous.is_some() {
            self.change_rack();
        }
    }

    fn random_changed_rack(&mut self) -> RackSpec {
        let mut rack = self.rack.spec.clone();
        match self.rng.random_range(0..12) {
            0 => self.add_host(&mut rack),
            1 => self.add_emc(&mut rack),
            2 if rack.hosts.len() > 1 => drop(rack.hosts.remove(self.rng.random_range(0..rack.hosts.len()))),
            3 if rack.emcs.len() > 1 => {
                let removed = rack.emcs.remove(self.rng.random_range(0..rack.emcs.len())).name;
                rack.hosts.iter_mut().for_each(|host| host.emcs.retain(|emc| *emc != removed));
            }
            4 => self.resize_host(&mut rack),
            5 => self.make_rack_invalid(&mut rack),
            _ => self.reattach_host(&mut rack),
        }
        rack
    }

    fn add_host(&mut self, rack: &mut RackSpec) {
        let n = self.machines.len();
        // After a restore, the next id may belong to an existing machine. No host is added then.
        let unused = self.truth.next_host().is_some_and(|id| self.find_machine(id).is_none());
        if n < RACK_NODES_MAX && unused {
            let emcs = rack.emcs.iter().map(|emc| emc.name.clone());
            let emcs: Vec<Name> = emcs.filter(|_| self.rng.random_bool(0.7)).collect();
            rack.hosts.push(host_spec(n, emcs));
        }
    }

    fn add_emc(&mut self, rack: &mut RackSpec) {
        let n = self.devices.len();
        if n < RACK_NODES_MAX && self.truth.next_emc() == Some(n) {
            let new = emc_spec(n, self.rng.random_range(1..=3), self.rng.random_bool(0.5));
            let attached = rack.hosts.iter_mut().filter(|_| self.rng.random_bool(0.7));
            attached.for_each(|host| host.emcs.push(new.name.clone()));
            rack.emcs.push(new);
        }
    }

    fn pick_host_spec<'a>(&mut self, rack: &'a mut RackSpec) -> &'a mut HostSpec {
        let n = self.rng.random_range(0..rack.hosts.len());
        &mut rack.hosts[n]
    }

    fn resize_host(&mut self, rack: &mut RackSpec) {
        let (cores, gib) = (self.rng.random_range(2..=64), self.rng.random_range(2..=64));
        let host = self.pick_host_spec(rack);
        (host.cores, host.local) = (cores, Bytes::gib(gib));
    }

    fn reattach_host(&mut self, rack: &mut RackSpec) {
        let emc = rack.emcs[self.rng.random_range(0..rack.emcs.len())].name.clone();
        let host = self.pick_host_spec(rack);
        if host.emcs.contains(&emc) {
            host.emcs.retain(|attached| *attached != emc);
        } else {
            host.emcs.push(emc);
        }
    }

    /// Makes a rack.toml invalid. The manager must reject the whole file, including the new host
    /// and EMC in it.
    fn make_rack_invalid(&mut self, rack: &mut RackSpec) {
        self.add_host(rack);
        self.add_emc(rack);
        if self.random_bool(0.5) {
            rack.emcs[0].slices += 1;
        } else {
            self.pick_host_spec(rack).emcs.push(numbered_name("missing", 0));
        }
    }

    /// Selects the rack.toml for a manager with a restored store: the rack.toml of the backup, or
    /// the current rack.toml if it adds no host or EMC to the backup.
    pub(super) fn choose_restored_rack(&mut self) {
        let (emcs, hosts) = self.truth.rack();
        let spec = &self.rack.spec;
        let adds = spec.emcs.iter().any(|emc| !emcs.contains_key(&emc.name))
            || spec.hosts.iter().any(|host| !hosts.contains_key(&host.name));
        let backup = RackSpec { emcs: emcs.into_values().collect(), hosts: hosts.into_values().collect() };
        if adds || self.random_bool(0.5) {
            (self.rack.spec, self.rack.previous) = (backup, None);
        } else {
            self.rack.previous = Some(backup);
        }
    }

    /// Creates the devices and machines of durable hosts and EMCs. Unless old backups are allowed,
    /// also backs up the store after each change of the rack. Machines and devices that are missing
    /// from an old backup keep running.
    pub(super) fn apply_rack(&mut self) {
        while let Some(emc) = self
            .truth
            .emc(EmcId(u32::try_from(self.devices.len()).expect("the number of devices fits u32")))
            .cloned()
        {
            let kind = if emc.serial.is_some() { DeviceKind::SharedDax } else { DeviceKind::Emulated };
            self.devices.push(Device::new(kind, emc.first, emc.slices));
            let slices = emc.slices;
            self.rack.visible_devices.extend(emc.serial.map(|serial| SeenDevice {
                serial,
                slices,
                problem: None,
            }));
        }
        for (id, name) in self.truth.hosts().map(|(id, host)| (id, host.name.clone())).collect::<Vec<_>>() {
            let Some(machine) = self.find_machine(id) else {
                self.machines.push(Machine::new(id, name));
                self.schedule_after(Ns::ms(1), ScheduledEvent::HostBoot(id));
                continue;
            };
            if machine.name != name && machine.reachable().next().is_some() {
                let description = format!("host id {id} of {} is reassigned to {name}", machine.name);
                self.report_violation("the id of a host with reachable slices is not reused", description);
            }
        }
        self.check_rack();
        let rack = self.truth.rack();
        if rack != self.rack.latest {
            let first = self.rack.latest == ByName::default();
            self.rack.latest = rack;
            if first || !self.fault_model.old_backups {
                self.manager_process.store.backup();
            }
        }
    }
}
