//! State that operators see in addition to the ledger: states of hosts and EMCs, and alarms. None
//! of it is durable.

use units::limits::{RESERVATION_ALARMS_MAX, SLICE_ALARMS_MAX, SLICE_ATTEMPTS_MAX, STORE_FREE_BYTES_MIN};
use units::{Bytes, EmcId, HostId, Ns, SliceId, UnixMs};

use super::{Manager, devices::Condition, link::Link};
use crate::{
    audit::Subject,
    ledger::When,
    protocol::Hello,
    record::{Fence, Host, Stage},
};

/// State of a host, as shown to operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostState {
    /// The agent is connected and the lease is valid.
    Up,
    /// The agent is not connected; the lease is valid.
    Silent,
    /// The lease has expired. The host keeps its slices and gets no new memory.
    Unknown,
    /// A fence is in progress. The host keeps its slices until its access is proven to be revoked.
    Fencing,
    /// All access of the host is revoked.
    Fenced,
    /// The agent has not connected since the manager started.
    Expected,
}

/// State of an EMC, as shown to operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmcState {
    /// The EMC's contents are being compared with the ledger.
    Starting,
    /// The EMC works, and its contents were compared with the ledger.
    Up,
    /// The EMC has failed; the text is the error of its driver.
    Failed(String),
}

/// Condition that needs an operator's attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    /// Machine-readable reason, in UPPER_SNAKE_CASE.
    pub reason: &'static str,
    /// Object that the alarm is about.
    pub subject: Subject,
    /// Description for operators, one sentence.
    pub message: String,
    /// Start of the condition, wall clock; the time at which the ledger was loaded if the start is
    /// unknown.
    pub since: UnixMs,
}

impl Manager {
    /// Returns the state of a host, as shown to operators.
    pub fn host_state(&self, host: HostId) -> HostState {
        let fence = self.durable.host(host).map(|entry| entry.host.fence).unwrap_or_default();
        match (fence, self.links.get(&host)) {
            (Fence::Fencing { .. }, _) if self.emcs_delaying_fence(host).next().is_some() => {
                HostState::Fencing
            }
            (Fence::Fencing { .. } | Fence::Fenced, _) => HostState::Fenced,
            (Fence::None, Some(link)) if link.is_unknown() && self.has_never_reported(host) => {
                HostState::Expected
            }
            (Fence::None, link) => self.link_state(link),
        }
    }

    fn link_state(&self, link: Option<&Link>) -> HostState {
        match link {
            None => HostState::Expected,
            Some(link) if link.is_unknown() => HostState::Unknown,
            Some(link) if link.is_connected() => HostState::Up,
            Some(link) if link.is_expected() => HostState::Expected,
            Some(_) => HostState::Silent,
        }
    }

    /// Returns why the machine of a host could not be stopped, if the host's fence waits for that.
    pub fn fence_obstacle(&self, host: HostId) -> Option<&str> {
        self.fence_obstacle_since(host).map(|(why, _)| why)
    }

    /// Returns the latest identity of a host's agent, and the time of its last message, wall clock.
    pub fn agent_identity(&self, host: HostId) -> (Option<&Hello>, Option<UnixMs>) {
        let link = self.links.get(&host);
        (link.and_then(|link| link.hello()), link.and_then(|link| link.last_message_wall))
    }

    /// Returns the state of an EMC, as shown to operators.
    pub fn emc_state(&self, emc: EmcId) -> EmcState {
        match self.devices.get(&emc).map(|link| &link.condition) {
            None | Some(Condition::Starting) => EmcState::Starting,
            Some(Condition::Up) => EmcState::Up,
            Some(Condition::Failed { error, .. }) => EmcState::Failed(error.clone()),
        }
    }

    /// Returns whether a host accepts new reservations now.
    pub fn is_schedulable(&self, host: HostId) -> bool {
        let fit = self.durable.host(host).is_some_and(|entry| entry.unschedulable_reason().is_none());
        fit && matches!(self.host_state(host), HostState::Up | HostState::Silent)
    }

    /// Returns the number of leases that expired since the manager started.
    pub fn leases_expired(&self) -> u64 {
        self.leases_expired
    }

    /// Returns the target number of free slices.
    pub fn buffer_target(&self) -> u32 {
        self.buffer.target(self.durable.emcs().map(|(_, e)| e.emc.slices).sum())
    }

    /// Returns the longest recent drain time: the time from the start of a slice's release until
    /// the slice was free.
    pub fn drain_time(&self) -> Ns {
        self.buffer.drain_time()
    }

    /// Returns all current alarms.
    pub fn alarms(&self) -> Vec<Alarm> {
        let mut alarms: Vec<Alarm> = self
            .host_alarms()
            .chain(self.overbooked_alarms())
            .chain(self.contested_alarms())
            .chain(self.restore_alarms())
            .chain(self.visibility_alarms())
            .chain(self.emc_alarms())
            .chain(self.slice_fault_alarms())
            .chain(self.slice_alarms())
            .chain(self.reservation_alarms())
            .collect();
        let usable = |e: &crate::ledger::EmcEntry| if e.up { e.emc.slices - e.quarantined() } else { 0 };
        if self.durable.emcs().map(|(_, e)| usable(e)).sum::<u32>() == 0 {
            // The capacity has been 0 since the latest of these failures.
            let takes_capacity = |alarm: &&Alarm| matches!(alarm.reason, "EMC_FAILED" | "SLICE_QUARANTINED");
            let since = alarms.iter().filter(takes_capacity).map(|alarm| alarm.since).max();
            let message = "no slice of the pool is usable".to_owned();
            let since = since.unwrap_or(self.loaded_at);
            alarms.push(Alarm { reason: "CAPACITY_ZERO", subject: Subject::Rack, message, since });
        }
        if let Some(since) = self.store_low_since {
            let message = format!(
                "the store's disk has less than {} free: releases are accepted, new reservations are not",
                Bytes::new(STORE_FREE_BYTES_MIN)
            );
            alarms.push(Alarm { reason: "STORE_LOW_SPACE", subject: Subject::Rack, message, since });
        }
        alarms.extend(self.rack_alarms.iter().map(|(reason, (message, since))| Alarm {
            reason,
            subject: Subject::Rack,
            message: message.clone(),
            since: *since,
        }));
        alarms
    }

    /// Raises the alarm of the rack with this reason, or ends it if `message` is `None`. An alarm that was raised
    /// before keeps its start.
    pub fn set_rack_alarm(&mut self, when: When, reason: &'static str, message: Option<String>) {
        let before = self.rack_alarms.remove(reason);
        self.changed |= before.is_some() != message.is_some();
        if let Some(message) = message {
            let since = before.map_or(when.wall, |(_, since)| since);
            self.rack_alarms.insert(reason, (message, since));
        }
    }

    pub(super) fn on_store_space_change(&mut self, when: When, low: bool) {
        self.store_low_since = low.then(|| self.store_low_since.unwrap_or(when.wall));
        self.changed = true;
    }

    /// Records the times of quarantines, because the ledger does not contain them.
    pub(super) fn record_quarantine_times(
        &mut self,
        when: When,
        transitions: &[(SliceId, &'static str, &'static str)],
    ) {
        for (slice, from, to) in transitions {
            match (*from, *to) {
                (_, "quarantined") => drop(self.quarantined_at.insert(*slice, when.wall)),
                ("quarantined", _) => drop(self.quarantined_at.remove(slice)),
                _ => {}
            }
        }
    }

    fn host_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.durable.hosts().filter_map(|(id, entry)| {
            let name = &entry.host.name;
            let slices = entry.held().len();
            let (reason, since, message) = match self.host_state(id) {
                HostState::Unknown => (
                    "HOST_UNKNOWN",
                    self.links.get(&id).and_then(|link| link.unknown_since()).unwrap_or(self.loaded_at),
                    format!("host {name} is unknown because its lease expired; it keeps its {slices} slices"),
                ),
                HostState::Fencing => return Some(self.fencing_alarm(id, &entry.host, slices)),
                HostState::Fenced => (
                    "HOST_FENCED",
                    self.fence_start_time(&entry.host),
                    format!(
                        "access of host {name} is revoked until it restarts or reports that it is clean{}",
                        self.unconfirmed_emcs_note(&entry.host)
                    ),
                ),
                HostState::Up | HostState::Silent | HostState::Expected => return None,
            };
            Some(Alarm { reason, subject: Subject::Host(name.clone()), message, since })
        })
    }

    /// Returns an alarm for each host whose VMs use more local memory than the host has.
    fn overbooked_alarms(&self) -> impl Iterator<Item = Alarm> {
        let overbooked = self.durable.hosts().filter(|(_, entry)| entry.local_used() > entry.host.local);
        overbooked.map(|(_, entry)| {
            let (name, used, local) = (&entry.host.name, entry.local_used(), entry.host.local);
            let message =
                format!("VMs of host {name} use or have reserved {used} of local memory, but it has {local}");
            let subject = Subject::Host(name.clone());
            Alarm { reason: "HOST_OVERBOOKED", subject, message, since: self.loaded_at }
        })
    }

    /// Returns an alarm for each host for which a second agent was rejected.
    fn contested_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.durable.hosts().filter_map(|(id, entry)| {
            let link = self.links.get(&id)?;
            let (rejected, name) = (link.rejected_agent()?, &entry.host.name);
            let instance = link.hello()?.instance;
            Some(Alarm {
                reason: "HOST_CONTESTED",
                subject: Subject::Host(name.clone()),
                message: format!(
                    "two agents represent host {name}: instance {} is rejected while instance {} is current; \
                     stop one of them",
                    rejected.instance.0, instance.0
                ),
                since: rejected.since,
            })
        })
    }

    /// Returns the start of a host's fence. Without a recorded start, returns the time at which the
    /// ledger was loaded.
    fn fence_start_time(&self, host: &Host) -> UnixMs {
        if host.fenced_at == UnixMs(0) { self.loaded_at } else { host.fenced_at }
    }

    fn fencing_alarm(&self, id: HostId, host: &Host, slices: usize) -> Alarm {
        let (name, since) = (&host.name, self.fence_start_time(host));
        let subject = Subject::Host(name.clone());
        let Some((why, since)) = self.fence_obstacle_since(id) else {
            let waits: Vec<_> = self.emcs_delaying_fence(id).filter_map(|emc| self.emc_name(emc)).collect();
            let waits = waits.join(", ");
            let message =
                format!("access of host {name} to its {slices} slices is being revoked: waiting for {waits}");
            return Alarm { reason: "HOST_FENCING", subject, message, since };
        };
        let message = format!(
            "access of host {name} is not revoked, and it keeps {slices} slices: {why}; wait until the host returns, or run `tarn fence \
             {name} --confirm-powered-off` after the machine is powered off"
        );
        Alarm { reason: "HOST_NOT_FENCED", subject, message, since }
    }

    /// Returns a note that lists the EMCs that have not confirmed the fence and whose confirmation
    /// is not required; empty if there are none.
    fn unconfirmed_emcs_note(&self, host: &Host) -> String {
        let names: Vec<_> = host.unconfirmed_fences.iter().filter_map(|emc| self.emc_name(*emc)).collect();
        if names.is_empty() {
            return String::new();
        }
        format!("; optional confirmations are missing from EMC {}", names.join(", "))
    }

    fn emc_name(&self, emc: EmcId) -> Option<&str> {
        self.durable.emc(emc).map(|entry| entry.emc.name.as_str())
    }

    fn emc_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.durable.emcs().filter_map(|(id, entry)| {
            let Some(Condition::Failed { error, since, .. }) =
                self.devices.get(&id).map(|link| &link.condition)
            else {
                return None;
            };
            let message = format!("emc {}: {error}", entry.emc.name);
            Some(Alarm {
                reason: "EMC_FAILED",
                subject: Subject::Emc(entry.emc.name.clone()),
                message,
                since: *since,
            })
        })
    }

    /// Returns one alarm per quarantined slice that waits for an operator, for at most
    /// [`SLICE_ALARMS_MAX`] slices, and one alarm with the number of the remaining slices. The alarm of
    /// a slice that was quarantined before the ledger was loaded has the time of the load.
    fn slice_alarms(&self) -> impl Iterator<Item = Alarm> {
        let alarm = |subject, message, since| Alarm { reason: "SLICE_QUARANTINED", subject, message, since };
        let since = |slice| self.quarantined_at.get(&slice).copied().unwrap_or(self.loaded_at);
        let waiting: usize = self.durable.emcs().map(|(_, entry)| entry.operator_quarantine_count()).sum();
        let more = waiting.saturating_sub(SLICE_ALARMS_MAX);
        let rest = (more > 0).then(|| {
            let first =
                self.durable.quarantined().take(SLICE_ALARMS_MAX).map(|(slice, _)| since(slice)).min();
            let message = format!("{more} more slices are quarantined; `tarn get slices` lists them");
            alarm(Subject::Rack, message, first.unwrap_or(self.loaded_at))
        });
        let listed = self.durable.quarantined().take(SLICE_ALARMS_MAX).map(move |(slice, why)| {
            let message = format!("{} is quarantined: {why}", self.slice_name(slice));
            alarm(Subject::Slice(slice), message, since(slice))
        });
        listed.chain(rest)
    }

    /// Returns an alarm for each of the first broken reservations, and one alarm with the number of
    /// the remaining reservations.
    fn reservation_alarms(&self) -> impl Iterator<Item = Alarm> {
        let broken = self.durable.broken_reservations();
        let more = broken.len().saturating_sub(RESERVATION_ALARMS_MAX);
        let rest = (more > 0).then(|| Alarm {
            reason: "RESERVATION_BROKEN",
            subject: Subject::Rack,
            message: format!("{more} more reservations are broken; `tarn get reservations` lists them"),
            since: self.loaded_at,
        });
        let listed = broken.take(RESERVATION_ALARMS_MAX).filter_map(|(id, reservation)| {
            let Stage::Broken { why, at, .. } = &reservation.stage else { return None };
            let vm = &reservation.vm;
            Some(Alarm {
                reason: "RESERVATION_BROKEN",
                subject: Subject::Vm(vm.clone()),
                message: format!("{id} of VM {vm} is broken: {why}; `tarn release {vm}` ends it"),
                since: if *at == UnixMs(0) { self.loaded_at } else { *at },
            })
        });
        listed.chain(rest)
    }

    /// Returns an alarm for each of the first slices whose device calls or releases fail, and one
    /// alarm with the number of the remaining slices.
    fn slice_fault_alarms(&self) -> impl Iterator<Item = Alarm> {
        let rest = self.summary_alarm(
            "SLICE_FAILING",
            self.faults.len() + self.release_failures.len(),
            SLICE_ALARMS_MAX,
            "slices have failing device calls or cannot be released",
        );
        let alarm = |slice, message: String, since| Alarm {
            reason: "SLICE_FAILING",
            subject: Subject::Slice(slice),
            message: format!("{}: {message}", self.slice_name(slice)),
            since,
        };
        let device_calls = self.faults.iter().map(move |(slice, fault)| {
            let (error, failures) = (&fault.error.message, fault.failures);
            let message = format!("device call failed: {error} (attempt {failures} of {SLICE_ATTEMPTS_MAX})");
            alarm(slice, message, fault.since)
        });
        let releases = self.release_failures.iter().map(move |(slice, failure)| {
            alarm(*slice, format!("its host cannot release it: {}", failure.message), failure.since)
        });
        device_calls.chain(releases).take(SLICE_ALARMS_MAX).chain(rest)
    }

    /// Returns one alarm for all conditions beyond the first `listed`, with their number; `None` if
    /// there are no more.
    pub(super) fn summary_alarm(
        &self,
        reason: &'static str,
        count: usize,
        listed: usize,
        what: &str,
    ) -> Option<Alarm> {
        let more = count.checked_sub(listed).filter(|more| *more > 0)?;
        let message = format!("{more} more {what}");
        Some(Alarm { reason, subject: Subject::Rack, message, since: self.loaded_at })
    }

    fn slice_name(&self, slice: SliceId) -> String {
        let emc = self.durable.emc_of(slice).and_then(|emc| self.emc_name(emc));
        emc.map_or_else(|| format!("slice {slice}"), |emc| format!("slice {slice} of emc {emc}"))
    }
}
