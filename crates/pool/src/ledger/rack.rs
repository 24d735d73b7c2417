//! Changes of the rack: configuration of hosts and EMCs, scheduling, and fencing.

use std::collections::{BTreeMap, BTreeSet};

use units::limits::{
    EMC_IDS_MAX, EMCS_MAX, HOST_IDS_MAX, HOSTS_ADDED_SINCE_BACKUP_MAX, HOSTS_MAX, SLICE_IDS_MAX, SLICES_MAX,
};
use units::{Bytes, EmcId, HostId, Name, SliceId, UnixMs};

use super::{Change, HostEntry, Ledger, When, decision};
use crate::{
    audit::{Actor, DecisionKind, Subject},
    record::{Emc, EndReason, Fence, Host, Key, Meta, Record, Reservation, Scheduling},
    rejection::Rejection,
    slice::Event,
};

/// Validated rack description from rack.toml.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RackSpec {
    /// All EMCs of the rack.
    pub emcs: Vec<EmcSpec>,
    /// All hosts of the rack.
    pub hosts: Vec<HostSpec>,
}

/// Description of an EMC in rack.toml.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmcSpec {
    /// Name of the EMC.
    pub name: Name,
    /// Number of slices that the EMC provides.
    pub slices: u32,
    /// Name of the driver that accesses the device.
    pub driver: String,
    /// Path of the device, in the form that the driver expects.
    pub path: String,
    /// Serial number of a shared device, which is attached to the buses of its hosts; `None` for
    /// other devices. A shared device cannot revoke access.
    pub serial: Option<String>,
}

/// Description of a host in rack.toml.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// Name of the host.
    pub name: Name,
    /// Cores available for reservations.
    pub cores: u32,
    /// Local memory available for reservations.
    pub local: Bytes,
    /// Names of the attached EMCs.
    pub emcs: Vec<Name>,
}

/// Target of a cordon, uncordon or drain request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchedulingTarget {
    /// A host, by name.
    Host(Name),
    /// An EMC, by name.
    Emc(Name),
    /// A slice, by ID. The only valid request is to uncordon a quarantined slice.
    Slice(SliceId),
}

/// Reason why a host or its attachments cannot be removed after a restore: the host may run VMs
/// that the backup does not contain.
const NOT_REPORTED_SINCE_RESTORE: &str = "it has not reported since the ledger was restored";

impl Ledger {
    /// Applies a new rack.toml. It may add hosts and EMCs, change a host's cores and local memory,
    /// and attach a host to more EMCs. It may remove hosts, EMCs and attachments that are not in
    /// use.
    ///
    /// # Errors
    /// Returns an error if rack.toml removes an object in use, changes an immutable field, or
    /// exceeds a limit. After a restore, also returns an error for additions until every host has
    /// reported.
    pub fn decide_configuration(&self, when: When, spec: &RackSpec) -> Result<Change, Rejection> {
        self.check_rack_additions(spec)?;
        let mut changes = Vec::new();
        let mut records = Vec::new();
        let emcs = self.configure_emcs(when, spec, &mut records, &mut changes)?;
        self.configure_hosts(when, spec, &emcs, &mut records, &mut changes)?;
        if !changes.is_empty() {
            records.push(decision(when, Actor::Manager, Subject::Rack, DecisionKind::Configured { changes }));
        }
        Ok(Change(records))
    }

    /// Checks that the new hosts and EMCs may be added. After a restore, every host must report
    /// before an addition: a new object may have been part of the rack after the backup, and
    /// devices and hosts may still use its old ID.
    fn check_rack_additions(&self, spec: &RackSpec) -> Result<(), Rejection> {
        let unreported = self.hosts.values().find(|entry| entry.host.must_report && !entry.has_reported);
        let Some(unreported) = unreported else { return Ok(()) };
        let emc = spec.emcs.iter().find(|emc| self.find_emc_by_name(&emc.name).is_none());
        let host = spec.hosts.iter().find(|host| self.find_host_by_name(&host.name).is_none());
        let new = emc.map(|emc| format!("emc {}", emc.name));
        match new.or_else(|| host.map(|host| format!("host {}", host.name))) {
            Some(what) => Err(Rejection::RestorePending { what, unreported: unreported.host.name.clone() }),
            None => Ok(()),
        }
    }

    /// Reserves host IDs that a device reports and the ledger does not contain, so that a new host
    /// does not get such an ID. The ID may belong to a host that was added after an earlier restore
    /// of the same backup. Ignores IDs at or above the next ID plus [`HOSTS_ADDED_SINCE_BACKUP_MAX`].
    pub fn decide_reserve_host_ids(&self, hosts: impl IntoIterator<Item = HostId>) -> Change {
        let next = self.meta.next_host.0;
        let lost = next..next.saturating_add(HOSTS_ADDED_SINCE_BACKUP_MAX);
        let highest = hosts.into_iter().map(|host| host.0).filter(|host| lost.contains(host)).max();
        let Some(highest) = highest else { return Change::default() };
        Change(vec![Record::Meta(Meta { next_host: HostId(highest + 1), ..self.meta.clone() })])
    }

    fn configure_emcs(
        &self,
        when: When,
        spec: &RackSpec,
        records: &mut Vec<Record>,
        changes: &mut Vec<String>,
    ) -> Result<BTreeMap<Name, EmcId>, Rejection> {
        check_limit("EMCs", spec.emcs.len() as u64, EMCS_MAX as u64)?;
        check_limit(
            "slices",
            spec.emcs.iter().map(|emc| u64::from(emc.slices)).sum(),
            u64::from(SLICES_MAX),
        )?;
        let mut ids = BTreeMap::new();
        let (mut next, mut first) = (self.meta.next_emc, self.meta.next_slice);
        for emc_spec in &spec.emcs {
            let id = match self.find_emc_by_name(&emc_spec.name) {
                Some(id) => {
                    check_emc_unchanged(&self.emcs[&id].emc, emc_spec)?;
                    id
                }
                None => {
                    let id = next;
                    next = EmcId(next_free_id(next.0, 1, "EMCs ever added", EMC_IDS_MAX)?);
                    changes.push(format!(
                        "emc {} added with {} slices from {first}",
                        emc_spec.name, emc_spec.slices
                    ));
                    records.push(Record::Emc(id, new_emc(emc_spec, first)));
                    first =
                        SliceId(next_free_id(first.0, emc_spec.slices, "slices ever added", SLICE_IDS_MAX)?);
                    id
                }
            };
            ids.insert(emc_spec.name.clone(), id);
        }
        let mut removed = Vec::new();
        for (id, entry) in self.emcs.iter().filter(|(_, entry)| !ids.contains_key(&entry.emc.name)) {
            if entry.free() != entry.emc.slices {
                let why = format!("{} of its slices are not free", entry.emc.slices - entry.free());
                return Err(Rejection::NotDrained { what: format!("emc {}", entry.emc.name), why });
            }
            changes.push(format!("emc {} removed", entry.emc.name));
            records.extend(entry.emc.range().map(|s| Record::Deleted(Key::Slice(s))));
            records.push(Record::Deleted(Key::Emc(*id)));
            removed.push(SchedulingTarget::Emc(entry.emc.name.clone()));
        }
        records.extend(self.withdraw_migrations(when, &removed));
        Ok(ids)
    }

    fn configure_hosts(
        &self,
        when: When,
        spec: &RackSpec,
        emcs: &BTreeMap<Name, EmcId>,
        records: &mut Vec<Record>,
        changes: &mut Vec<String>,
    ) -> Result<(), Rejection> {
        check_limit("hosts", spec.hosts.len() as u64, HOSTS_MAX as u64)?;
        let mut next = self.meta.next_host;
        for host_spec in &spec.hosts {
            let attachments = host_spec
                .emcs
                .iter()
                .map(|name| emcs.get(name).copied().ok_or(Rejection::NoSuchEmc(name.clone())));
            let attachments: Vec<EmcId> = attachments.collect::<Result<_, _>>()?;
            match self.find_host_by_name(&host_spec.name) {
                Some(id) => {
                    let old = &self.hosts[&id].host;
                    let unconfirmed_fences = unconfirmed_emcs_after_change(old, &attachments, emcs);
                    let mut host = Host {
                        cores: host_spec.cores,
                        local: host_spec.local,
                        emcs: attachments,
                        unconfirmed_fences,
                        ..old.clone()
                    };
                    if host != self.hosts[&id].host {
                        self.check_attachments_in_use(&self.hosts[&id], &host)?;
                        changes.push(format!("host {} changed", host_spec.name));
                        // The fence is complete if the last EMC that had not confirmed it was
                        // removed.
                        records.extend(complete_fence(when, &mut host));
                        records.push(Record::Host(id, host));
                    }
                }
                None => {
                    changes.push(format!("host {} added", host_spec.name));
                    records.push(Record::Host(next, new_host(host_spec, attachments)));
                    next = HostId(next_free_id(next.0, 1, "hosts ever added", HOST_IDS_MAX)?);
                }
            }
        }
        let remaining: BTreeSet<&Name> = spec.hosts.iter().map(|host| &host.name).collect();
        for (id, entry) in self.hosts.iter().filter(|(_, entry)| !remaining.contains(&entry.host.name)) {
            let what = || format!("host {}", entry.host.name);
            if entry.host.must_report {
                return Err(Rejection::NotDrained {
                    what: what(),
                    why: NOT_REPORTED_SINCE_RESTORE.to_owned(),
                });
            }
            let vms = entry.reservations.len() + entry.ended_reservations_with_process.len();
            if !entry.held.is_empty() || vms > 0 {
                let why = format!("{vms} reservations and {} slices", entry.held.len());
                return Err(Rejection::NotDrained { what: what(), why });
            }
            changes.push(format!("host {} removed", entry.host.name));
            records.push(Record::Deleted(Key::Host(*id)));
        }
        Ok(())
    }

    fn check_attachments_in_use(&self, old: &HostEntry, new: &Host) -> Result<(), Rejection> {
        let what = || format!("an attachment of host {}", new.name);
        if old.host.must_report && old.host.emcs.iter().any(|emc| !new.emcs.contains(emc)) {
            return Err(Rejection::NotDrained { what: what(), why: NOT_REPORTED_SINCE_RESTORE.to_owned() });
        }
        let in_use = old.held().find(|s| self.emc_of(*s).is_some_and(|emc| !new.emcs.contains(&emc)));
        match in_use {
            None => Ok(()),
            Some(slice) => Err(Rejection::NotDrained {
                what: what(),
                why: format!("the host holds slice {slice} of that EMC"),
            }),
        }
    }

    /// Cordons, uncordons or drains a host or an EMC, or requalifies a quarantined slice.
    ///
    /// # Errors
    /// Returns an error if the target does not exist or the slice is not quarantined.
    pub fn decide_scheduling(
        &self,
        when: When,
        target: &SchedulingTarget,
        to: Scheduling,
        actor: Actor,
        reason: &str,
    ) -> Result<Change, Rejection> {
        let affected = self.reservations_of_target(target)?;
        let (subject, now, record) = match target {
            SchedulingTarget::Slice(slice) if to == Scheduling::Enabled => {
                return self.decide_requalification(when, *slice, actor, reason);
            }
            SchedulingTarget::Slice(slice) => {
                let (slice, what) =
                    (*slice, "cordon or drain it; slices can only be uncordoned, while they are quarantined");
                let state = self.slot(slice).map_or("unknown", super::Slot::state_name);
                return Err(Rejection::SliceWrongState { slice, state, what });
            }
            SchedulingTarget::Host(name) => {
                let id = self.find_host_by_name(name).ok_or_else(|| Rejection::NoSuchHost(name.clone()))?;
                let host = self.hosts[&id].host.clone();
                let now = host.scheduling;
                (Subject::Host(name.clone()), now, Record::Host(id, Host { scheduling: to, ..host }))
            }
            SchedulingTarget::Emc(name) => {
                let id = self.find_emc_by_name(name).ok_or_else(|| Rejection::NoSuchEmc(name.clone()))?;
                let emc = self.emcs[&id].emc.clone();
                let now = emc.scheduling;
                (Subject::Emc(name.clone()), now, Record::Emc(id, Emc { scheduling: to, ..emc }))
            }
        };
        if now == to {
            return Ok(Change::default());
        }
        let (reason, vms) = (reason.to_owned(), u32::try_from(affected.len()).unwrap_or(u32::MAX));
        let mut records = vec![record];
        let what = match to {
            Scheduling::Enabled => DecisionKind::Uncordoned { reason },
            Scheduling::Cordoned => DecisionKind::Cordoned { reason },
            Scheduling::Draining => DecisionKind::Draining { reason, vms },
        };
        records.extend(self.migration_changes(when, target, to, &affected));
        records.push(decision(when, actor, subject, what));
        Ok(Change(records))
    }

    /// Returns the active reservations of a host, or the active reservations with slices of an EMC.
    /// Returns none for a slice. For an EMC, this includes reservations with recorded slices of the
    /// EMC whose host has not reported since a restore: the host may still use these slices.
    ///
    /// # Errors
    /// Returns an error if the host, EMC or slice does not exist.
    pub fn reservations_of_target(
        &self,
        target: &SchedulingTarget,
    ) -> Result<Vec<units::ReservationId>, Rejection> {
        match target {
            SchedulingTarget::Host(name) => {
                let id = self.find_host_by_name(name).ok_or_else(|| Rejection::NoSuchHost(name.clone()))?;
                Ok(self.hosts[&id].reservations().collect())
            }
            SchedulingTarget::Emc(name) => {
                let id = self.find_emc_by_name(name).ok_or_else(|| Rejection::NoSuchEmc(name.clone()))?;
                let emc = &self.emcs[&id].emc;
                // Excludes VMs that were moved to local memory and whose slices still drain.
                let owners = emc.range().filter_map(|slice| {
                    self.slot(slice)?.reservation().filter(|id| self.has_slice(*id, slice))
                });
                let unreported = self.hosts.values().filter(|entry| entry.host.must_report_on(id));
                let in_doubt = unreported.flat_map(HostEntry::reservations);
                let uncertain_owners =
                    in_doubt.filter(|id| self.reservations[id].slices.iter().any(|s| emc.contains(*s)));
                let active = owners
                    .chain(uncertain_owners)
                    .filter(|id| self.reservations.get(id).is_some_and(Reservation::is_active));
                Ok(active.collect::<BTreeSet<_>>().into_iter().collect())
            }
            SchedulingTarget::Slice(slice) => {
                self.slot(*slice).map(|_| Vec::new()).ok_or(Rejection::NoSuchSlice(*slice))
            }
        }
    }

    /// Records the intent to fence a host, before the manager calls any device. Ends the host's
    /// reservations. Every EMC to which the host is attached, or of which it may reach slices, must
    /// confirm the fence. The change is empty if the host is already fenced or being fenced, unless
    /// `powered_off` is new.
    pub fn decide_fence(
        &self,
        when: When,
        host: HostId,
        powered_off: bool,
        actor: Actor,
        reason: &str,
    ) -> Change {
        let Some(entry) = self.hosts.get(&host) else { return Change::default() };
        let is_newly_confirmed = powered_off && entry.host.fence == Fence::Fencing { powered_off: false };
        if entry.host.fence != Fence::None && !is_newly_confirmed {
            return Change::default();
        }
        let mut fencing = Host { fence: Fence::Fencing { powered_off }, ..entry.host.clone() };
        if !is_newly_confirmed {
            fencing.fenced_at = when.wall;
            // Includes EMCs whose attachment to the host was removed.
            let has_slices_on = entry.held().filter_map(|slice| self.emc_of(slice));
            // A restored ledger may lack some attachments of the host.
            let uncertain = self.emcs.keys().filter(|_| entry.host.must_report);
            let to_confirm = has_slices_on.chain(entry.host.emcs.iter().copied()).chain(uncertain.copied());
            fencing.unconfirmed_fences.extend(to_confirm);
            fencing.unwired_fences.clear();
        }
        let mut records = vec![Record::Host(host, fencing)];
        records.extend(self.end_all_reservations(when, entry, &EndReason::HostFenced, &Actor::Manager));
        let slices = u32::try_from(entry.held.len()).unwrap_or(u32::MAX);
        let what = DecisionKind::Fencing { reason: reason.to_owned(), slices };
        records.push(decision(when, actor, Subject::Host(entry.host.name.clone()), what));
        Change(records)
    }

    /// Ends all active reservations of a host, and records that the processes of its ended
    /// reservations have exited.
    fn end_all_reservations(
        &self,
        when: When,
        entry: &HostEntry,
        why: &EndReason,
        actor: &Actor,
    ) -> Vec<Record> {
        let ends =
            entry.reservations().map(|id| self.decide_reservation_end(when, id, why.clone(), actor.clone()));
        let ends = ends.filter_map(Result::ok);
        let gone = entry
            .ended_reservations_with_process()
            .map(|id| self.decide_process_change(when, id, false, actor.clone()));
        ends.chain(gone).flat_map(|change| change.0).collect()
    }

    /// Records that an EMC has fenced the host. The host's slices on this EMC then need only a
    /// revocation by the device. The confirmation of the last EMC completes the fence.
    pub fn decide_fence_confirmation(&self, when: When, host: HostId, emc: EmcId) -> Change {
        let Some(entry) = self.hosts.get(&host).filter(|entry| entry.host.unconfirmed_fences.contains(&emc))
        else {
            return Change::default();
        };
        let mut new = entry.host.clone();
        new.unconfirmed_fences.remove(&emc);
        if new.fence != Fence::None && !new.emcs.contains(&emc) {
            new.unwired_fences.insert(emc);
        }
        let mut records = self.slots_after_fence(host, |slice| self.emc_of(slice) == Some(emc));
        records.extend(complete_fence(when, &mut new));
        records.push(Record::Host(host, new));
        Change(records)
    }

    /// Completes the fence of a host if no EMC must still confirm it.
    pub fn decide_fence_completion(&self, when: When, host: HostId) -> Change {
        let Some(entry) = self.hosts.get(&host) else { return Change::default() };
        let mut new = entry.host.clone();
        let Some(decision) = complete_fence(when, &mut new) else { return Change::default() };
        Change(vec![Record::Host(host, new), decision])
    }

    /// Returns records for the slices in `among` that a fenced host can no longer reach.
    fn slots_after_fence(&self, host: HostId, among: impl Fn(SliceId) -> bool) -> Vec<Record> {
        let held = self.hosts.get(&host).into_iter().flat_map(HostEntry::held).filter(|slice| among(*slice));
        let records = held.filter_map(|slice| {
            let slot = self.slot(slice)?;
            let next = slot.step(Event::OwnerFenced(host)).ok().filter(|next| *next != slot)?;
            Some(Record::Slice(slice, next))
        });
        records.collect()
    }

    /// Applies a boot ID, and whether the host is clean, as reported by an agent. A host that
    /// restarted or is clean has released all slices, so its fence ends. EMCs that have not
    /// confirmed the fence must still confirm it. A restart also ends the host's VMs.
    pub fn decide_agent_identity(&self, when: When, host: HostId, boot_id: &str, clean: bool) -> Change {
        let Some(entry) = self.hosts.get(&host) else { return Change::default() };
        let mut new = entry.host.clone();
        let rebooted = !new.boot_id.is_empty() && new.boot_id != boot_id;
        new.boot_id = boot_id.to_owned();
        let actor = Actor::Agent(new.name.clone());
        let mut records = if rebooted {
            self.end_all_reservations(when, entry, &EndReason::HostRestarted, &actor)
        } else {
            Vec::new()
        };
        if new.fence != Fence::None && (rebooted || clean) {
            new.fence = Fence::None;
            new.unwired_fences.clear();
            records.extend(self.slots_after_fence(host, |_| true));
            let proof = if rebooted {
                "the host restarted"
            } else {
                "its agent reports that no process or mapping remains"
            };
            let what = DecisionKind::Returned { proof: proof.to_owned() };
            records.push(decision(when, actor, Subject::Host(new.name.clone()), what));
        }
        if new != entry.host {
            records.push(Record::Host(host, new));
        }
        Change(records)
    }

    /// Records that a host has sent its complete state since the ledger was restored. Breaks each
    /// of the host's reservations that no longer owns all its slices, because another VM may have
    /// been adopted on these slices.
    pub fn decide_host_report(&self, when: When, host: HostId) -> Change {
        let Some(entry) = self.hosts.get(&host).filter(|entry| entry.host.must_report) else {
            return Change::default();
        };
        let mut records = vec![Record::Host(host, Host { must_report: false, ..entry.host.clone() })];
        for id in entry.reservations() {
            let own = |slice: &SliceId| self.slot(*slice).is_some_and(|slot| slot.reservation() == Some(id));
            if let Some(lost) = self.reservations[&id].slices.iter().find(|slice| !own(slice)) {
                let why = format!("slice {lost} was not in use when the hosts reported after a restore");
                records.extend(self.decide_reservation_break(when, id, why).0);
            }
        }
        Change(records)
    }
}

/// Completes a fence if every EMC has confirmed it. Returns the record of the decision.
fn complete_fence(when: When, host: &mut Host) -> Option<Record> {
    if !matches!(host.fence, Fence::Fencing { .. }) || !host.unconfirmed_fences.is_empty() {
        return None;
    }
    (host.fence, host.must_report) = (Fence::Fenced, false);
    Some(decision(when, Actor::Manager, Subject::Host(host.name.clone()), DecisionKind::Fenced))
}

/// Returns the EMCs that must still confirm the host's fence after its attachments changed: the
/// unconfirmed EMCs that remain in the rack and, for a fenced host, the newly attached EMCs. A
/// newly attached EMC may have granted slices to the host before.
fn unconfirmed_emcs_after_change(
    old: &Host,
    attachments: &[EmcId],
    emcs: &BTreeMap<Name, EmcId>,
) -> BTreeSet<EmcId> {
    let added = attachments.iter().filter(|emc| old.fence != Fence::None && !old.emcs.contains(emc));
    let left = old.unconfirmed_fences.iter().filter(|emc| emcs.values().any(|id| id == *emc));
    left.chain(added).copied().collect()
}

fn check_emc_unchanged(old: &Emc, new: &EmcSpec) -> Result<(), Rejection> {
    let fixed = |field: &str, from: String, to: String| {
        let what = format!("{field} of emc {}", old.name);
        if from == to { Ok(()) } else { Err(Rejection::ImmutableField { what, from, to }) }
    };
    fixed("slices", old.slices.to_string(), new.slices.to_string())?;
    fixed("driver", old.driver.clone(), new.driver.clone())?;
    fixed("path", old.path.clone(), new.path.clone())?;
    let text = |serial: &Option<String>| serial.clone().unwrap_or_else(|| "none".to_owned());
    fixed("serial", text(&old.serial), text(&new.serial))
}

fn check_limit(what: &'static str, n: u64, max: u64) -> Result<(), Rejection> {
    if n <= max { Ok(()) } else { Err(Rejection::LimitExceeded { what, max }) }
}

/// Returns the next free ID after `count` IDs from `first` are used. IDs are never reused, because
/// devices, hosts and records of ended reservations may still contain them.
fn next_free_id(first: u32, count: u32, what: &'static str, max: u32) -> Result<u32, Rejection> {
    let next = first.checked_add(count).filter(|next| *next <= max);
    next.ok_or(Rejection::LimitExceeded { what, max: u64::from(max) })
}

fn new_emc(spec: &EmcSpec, first: SliceId) -> Emc {
    Emc {
        name: spec.name.clone(),
        first,
        slices: spec.slices,
        driver: spec.driver.clone(),
        path: spec.path.clone(),
        scheduling: Scheduling::Enabled,
        serial: spec.serial.clone(),
    }
}

fn new_host(spec: &HostSpec, emcs: Vec<EmcId>) -> Host {
    Host {
        name: spec.name.clone(),
        cores: spec.cores,
        local: spec.local,
        emcs,
        scheduling: Scheduling::Enabled,
        fence: Fence::None,
        boot_id: String::new(),
        must_report: false,
        unconfirmed_fences: BTreeSet::new(),
        unwired_fences: BTreeSet::new(),
        fenced_at: UnixMs::default(),
    }
}
