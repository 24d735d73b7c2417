//! What an operator may see beside the ledger: the state of hosts and EMCs, and alarms. Nothing here is durable; all of
//! it follows from what is known now.

use units::limits::{SLICE_ALARMS_MAX, SLICE_ATTEMPTS_MAX};
use units::{EmcId, HostId, Name, Ns, SliceId, UnixMs};

use super::{Manager, devices::Condition, hosts::Link};
use crate::{
    audit::Subject,
    protocol::Hello,
    record::{Fence, Host},
};

/// What a host looks like from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostState {
    /// Its agent is connected and its lease is fresh.
    Up,
    /// Silent, lease not over.
    Silent,
    /// Its lease is over: nothing new, its slices kept.
    Unknown,
    /// To be cut off its slices, which it keeps until that is certain.
    Fencing,
    /// Cut off its slices.
    Fenced,
    /// Not heard since the manager started.
    Expected,
}

/// What an EMC looks like from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmcState {
    /// Its contents are being compared with the ledger.
    Starting,
    /// It works.
    Up,
    /// It does not; in the driver's words.
    Failed(String),
}

/// Something an operator should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    /// In UPPER_SNAKE_CASE.
    pub reason: &'static str,
    /// What it is about.
    pub subject: Subject,
    /// One sentence.
    pub message: String,
    /// Since when, if that is known.
    pub since: UnixMs,
}

impl Manager {
    /// What a host looks like from here.
    pub fn host_state(&self, host: HostId) -> HostState {
        let fence = self.durable.host(host).map(|entry| entry.host.fence).unwrap_or_default();
        match (fence, self.links.get(&host)) {
            (Fence::Fencing { .. }, _) if self.fence_waits_for(host).next().is_some() => HostState::Fencing,
            (Fence::Fencing { .. } | Fence::Fenced, _) => HostState::Fenced,
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

    /// Why a host that is to be cut off is not yet, if somebody must know.
    pub fn not_fenced(&self, host: HostId) -> Option<&str> {
        self.why_unfenced(host).map(|(why, _)| why)
    }

    /// What a host's agent said of itself, and when it was last heard.
    pub fn host_said(&self, host: HostId) -> (Option<&Hello>, Option<UnixMs>) {
        let link = self.links.get(&host);
        (link.and_then(|link| link.hello()), link.and_then(|link| link.heard_wall))
    }

    /// What an EMC looks like from here.
    pub fn emc_state(&self, emc: EmcId) -> EmcState {
        match self.devices.get(&emc).map(|link| &link.condition) {
            None | Some(Condition::Starting) => EmcState::Starting,
            Some(Condition::Up) => EmcState::Up,
            Some(Condition::Failed { error, .. }) => EmcState::Failed(error.clone()),
        }
    }

    /// Whether a host takes new reservations now.
    pub fn is_schedulable(&self, host: HostId) -> bool {
        let fit = self.durable.host(host).is_some_and(|entry| entry.not_schedulable().is_none());
        fit && matches!(self.host_state(host), HostState::Up | HostState::Silent)
    }

    /// How many leases have ended in silence since the manager started.
    pub fn leases_expired(&self) -> u64 {
        self.leases_expired
    }

    /// How many free slices should be ready.
    pub fn buffer_target(&self) -> u32 {
        self.buffer.target(self.durable.emcs().map(|(_, e)| e.emc.slices).sum())
    }

    /// How long the slowest slice took lately from its last owner back to free.
    pub fn drain_time(&self) -> Ns {
        self.buffer.drain_time()
    }

    /// Everything an operator should know now.
    pub fn alarms(&self) -> Vec<Alarm> {
        let mut alarms: Vec<Alarm> = self
            .host_alarms()
            .chain(self.contested_alarms())
            .chain(self.restore_alarms())
            .chain(self.sight_alarms())
            .chain(self.emc_alarms())
            .chain(self.slice_fault_alarms())
            .chain(self.slice_alarms())
            .collect();
        let usable = |e: &crate::ledger::EmcEntry| if e.up { e.emc.slices - e.quarantined() } else { 0 };
        if self.durable.emcs().map(|(_, e)| usable(e)).sum::<u32>() == 0 {
            let message = "no slice of the pool is usable: a capacity of 0 is a fault, not a fact".to_owned();
            alarms.push(Alarm { reason: "CAPACITY_ZERO", subject: Subject::Rack, message, since: UnixMs(0) });
        }
        if self.store_low {
            let message =
                "the store's disk is nearly full: releases work, new reservations do not".to_owned();
            alarms.push(Alarm {
                reason: "STORE_LOW_SPACE",
                subject: Subject::Rack,
                message,
                since: UnixMs(0),
            });
        }
        alarms
    }

    fn host_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.durable.hosts().filter_map(|(id, entry)| {
            let name = &entry.host.name;
            let slices = entry.held().len();
            let since = self.links.get(&id).and_then(|link| link.unknown_since()).unwrap_or_default();
            let (reason, message) = match self.host_state(id) {
                HostState::Unknown => (
                    "HOST_UNKNOWN",
                    format!("host {name} is silent past its lease; its {slices} slices are kept"),
                ),
                HostState::Fencing => return Some(self.fencing_alarm(id, name, slices)),
                HostState::Fenced => (
                    "HOST_FENCED",
                    format!(
                        "host {name} is cut off until it restarts or proves itself clean{}",
                        self.unconfirmed_emcs_note(&entry.host)
                    ),
                ),
                HostState::Up | HostState::Silent | HostState::Expected => return None,
            };
            Some(Alarm { reason, subject: Subject::Host(name.clone()), message, since })
        })
    }

    /// Hosts for which two agents speak.
    fn contested_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.durable.hosts().filter_map(|(id, entry)| {
            let link = self.links.get(&id)?;
            let (rejected, name) = (link.rejected()?, &entry.host.name);
            let instance = link.hello()?.instance;
            Some(Alarm {
                reason: "HOST_CONTESTED",
                subject: Subject::Host(name.clone()),
                message: format!(
                    "two agents speak for host {name}: instance {} is rejected while instance {} is the host's; \
                     stop one of them",
                    rejected.instance.0, instance.0
                ),
                since: rejected.since,
            })
        })
    }

    fn fencing_alarm(&self, id: HostId, name: &Name, slices: usize) -> Alarm {
        let subject = Subject::Host(name.clone());
        let Some((why, since)) = self.why_unfenced(id) else {
            let waits: Vec<_> = self.fence_waits_for(id).filter_map(|emc| self.emc_name(emc)).collect();
            let waits = waits.join(", ");
            let message = format!("host {name} is being cut off its {slices} slices: waiting for {waits}");
            return Alarm { reason: "HOST_FENCING", subject, message, since: UnixMs(0) };
        };
        let message = format!(
            "host {name} is not cut off, and keeps {slices} slices: {why}; it ends when the host returns, or by `tarn fence \
             {name} --confirm-powered-off` once the machine is off"
        );
        Alarm { reason: "HOST_NOT_FENCED", subject, message, since }
    }

    /// The EMCs that do not delay a fence and have not answered.
    fn unconfirmed_emcs_note(&self, host: &Host) -> String {
        let names: Vec<_> = host.unconfirmed_fences.iter().filter_map(|emc| self.emc_name(*emc)).collect();
        if names.is_empty() {
            return String::new();
        }
        format!("; not confirmed yet, and not needed, by EMC {}", names.join(", "))
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

    /// Slices that wait for an operator: the first by name, all others as one number.
    fn slice_alarms(&self) -> impl Iterator<Item = Alarm> {
        let alarm =
            |subject, message| Alarm { reason: "SLICE_QUARANTINED", subject, message, since: UnixMs(0) };
        let waiting: usize = self.durable.emcs().map(|(_, entry)| entry.quarantined_for_good_count()).sum();
        let more = waiting.saturating_sub(SLICE_ALARMS_MAX);
        let rest = format!("{more} more slices are quarantined; `tarn get slices` lists them");
        let rest = (more > 0).then(|| alarm(Subject::Rack, rest));
        let listed = self.durable.quarantined().take(SLICE_ALARMS_MAX).map(move |(slice, why)| {
            alarm(Subject::Slice(slice), format!("{} is quarantined: {why}", self.slice_name(slice)))
        });
        listed.chain(rest)
    }

    fn slice_fault_alarms(&self) -> impl Iterator<Item = Alarm> {
        self.faults.iter().map(|(slice, fault)| Alarm {
            reason: "SLICE_FAILING",
            subject: Subject::Slice(slice),
            message: format!(
                "{}: device call failed: {} (attempt {} of {SLICE_ATTEMPTS_MAX})",
                self.slice_name(slice),
                fault.error.message,
                fault.failures
            ),
            since: fault.since,
        })
    }

    fn slice_name(&self, slice: SliceId) -> String {
        let emc = self.durable.emc_of(slice).and_then(|emc| self.emc_name(emc));
        emc.map_or_else(|| format!("slice {slice}"), |emc| format!("slice {slice} of emc {emc}"))
    }
}
