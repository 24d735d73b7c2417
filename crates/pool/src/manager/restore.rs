//! Adoption of running VMs, and the end of a restore. The ledger of a backup is older than the
//! rack: every slice is quarantined until each host that can reach it has reported. Running VMs are
//! adopted with their slices, and then unclaimed slices return to circulation.
//!
//! A host has reported once its agent has applied a desired state of the restored ledger (from then
//! on it starts no VM of the lost history), every EMC of the host was compared with the ledger, and
//! every VM in the report was adopted. A failed adoption leaves the host unreported: its slices are
//! kept and an alarm names the VM.

use std::collections::BTreeMap;

use units::limits::{
    EPOCHS_LOST_MAX, RESERVATIONS_LOST_MAX, RESERVATIONS_PER_HOST_MAX, UNADOPTED_ALARMS_MAX,
};
use units::{EmcId, HostId, Name, ReservationId, SliceId};

use super::{
    Alarm, Manager,
    link::Link,
    report_log::{PartialReport, UnadoptedVm},
};
use crate::{
    audit::Subject,
    ledger::{HostEntry, When},
    protocol::{Holding, ObservedState, ObservedVm},
    record::{Fence, Reservation, Stage},
    rejection::Rejection,
    slice::{Event, Quarantine, State},
};

impl Manager {
    /// Adopts the VMs of one part of a report. A fenced host, also during the fence, adopts
    /// nothing: its desired state ends its VMs.
    pub(super) fn adopt_reported_vms(
        &mut self,
        when: When,
        host: HostId,
        report: &ObservedState,
        partial: &mut PartialReport,
    ) {
        self.claim_slices(when, host, report);
        if self.is_fenced_host(host) {
            return self.forget_unadopted(host);
        }
        partial.unadopted.extend(self.adopt_vms(when, host, report));
        if self.head.host(host).is_some_and(|entry| entry.host.must_report) {
            partial.is_uncompared |= report.holdings().any(|holding| self.is_uncompared(holding.slice));
        }
    }

    fn is_fenced_host(&self, host: HostId) -> bool {
        self.head.host(host).is_none_or(|entry| entry.host.fence != Fence::None)
    }

    pub(super) fn has_unadopted(&self, host: HostId) -> bool {
        self.unadopted.contains_key(&host)
    }

    /// Records at the end of a complete report whether the host has reported everything since a
    /// restore. Returns whether the report counts; the report of a fenced host does not.
    pub(super) fn finish_complete_report(
        &mut self,
        when: When,
        host: HostId,
        report: &ObservedState,
        partial: PartialReport,
    ) -> bool {
        if self.is_fenced_host(host) {
            return false;
        }
        let PartialReport { unadopted, is_uncompared, .. } = partial;
        if !self.head.host(host).is_some_and(|entry| entry.host.must_report) {
            self.set_unadopted(host, unadopted);
            return true;
        }
        let uncompared = is_uncompared || self.has_uncompared_emc(host);
        let reported = !uncompared && report.number.generation == self.head.meta().generation;
        let all_adopted = unadopted.is_empty();
        self.set_unadopted(host, unadopted);
        if reported {
            self.head.set_reported(host);
        }
        if reported && all_adopted {
            let change = self.head.decide_host_reported(when, host);
            self.change(when, change);
        }
        true
    }

    /// Reserves the numbers of slices known only to a host since a restore. The host may have been
    /// fenced since.
    pub(super) fn reserve_lost_slices(&mut self, when: When, host: HostId, report: &ObservedState) {
        if self.head.host(host).is_some_and(|entry| entry.host.may_exceed_ledger()) {
            let used = report.holdings().map(|holding| holding.slice);
            let change = self.head.decide_reserve_slice_ids(used, self.lost_slices_end);
            self.change(when, change);
        }
    }

    /// Records slices of a report whose epochs are above those of the restored ledger and of the
    /// EMC, which may have lost its record. Their epochs are never used again. If the EMC cannot
    /// revoke access, the host is recorded as the holder.
    fn claim_slices(&mut self, when: When, host: HostId, report: &ObservedState) {
        if !self.head.host(host).is_some_and(|entry| entry.host.may_exceed_ledger()) {
            return;
        }
        for Holding { slice, epoch } in report.holdings().copied() {
            let Some(slot) = self.head.slot(slice) else { continue };
            let State::Quarantined(Quarantine::Restored { host: holder }) = slot.state else { continue };
            let is_newer = epoch > slot.epoch || (epoch == slot.epoch && holder.is_none());
            if !is_newer || epoch.0 - slot.epoch.0 > EPOCHS_LOST_MAX {
                continue;
            }
            self.slice_event(when, slice, Event::Raise(epoch));
            if !self.head.can_revoke(slice) && holder != Some(host) {
                let why = Event::Quarantine(Quarantine::Restored { host: Some(host) });
                self.quarantine(when, slice, why, "a host reports it, and its EMC has no record of that");
            }
        }
    }

    /// Adopts reported VMs that the ledger does not have on their slices; returns the VMs that it
    /// could not adopt.
    fn adopt_vms(&mut self, when: When, host: HostId, report: &ObservedState) -> Vec<UnadoptedVm> {
        let unknown: Vec<_> = report.vms.iter().filter(|(id, vm)| self.is_unknown(host, **id, vm)).collect();
        let failed = unknown.into_iter().filter(|(id, vm)| !self.adopt_vm(when, host, **id, vm));
        let unadopted = failed.map(|(_, vm)| UnadoptedVm {
            vm: vm.vm.clone(),
            slices: vm.slices.iter().map(|holding| holding.slice).collect(),
            since: when.wall,
        });
        unadopted.collect()
    }

    /// Returns whether a reported VM has a slice that is quarantined because ledger and device
    /// differ on its owner, or is missing in a restored ledger, or was uncommitted there without
    /// slices in doubt.
    fn is_unknown(&self, host: HostId, id: ReservationId, vm: &ObservedVm) -> bool {
        let restored = self.head.host(host).is_some_and(|entry| entry.host.must_report);
        let in_doubt = |slice: SliceId| {
            let state = self.head.slot(slice).map(|slot| slot.state);
            matches!(state, Some(State::Quarantined(why)) if why.is_about_owner())
        };
        vm.slices.iter().any(|holding| in_doubt(holding.slice))
            || (restored && self.head.reservation(id).is_none_or(is_uncommitted_without_slices))
    }

    fn adopt_vm(&mut self, when: When, host: HostId, id: ReservationId, vm: &ObservedVm) -> bool {
        let granted = vm.slices.iter().all(|holding| self.is_granted(*holding));
        if !granted || !self.can_adopt_as(host, id, &vm.vm) {
            return false;
        }
        let Some(change) = self.head.decide_adopt(when, host, id, vm) else { return false };
        self.change(when, change);
        true
    }

    /// Returns whether the record of the EMC has a grant of exactly this epoch.
    fn is_granted(&self, holding: Holding) -> bool {
        let records = [self.handles.get(&holding.slice), self.pending_handles.get(&holding.slice)];
        records.into_iter().flatten().any(|(epoch, _)| *epoch == holding.epoch)
    }

    /// Returns whether a VM can be adopted under its host's reservation number: the number is this
    /// VM's, or of the lost history.
    fn can_adopt_as(&self, host: HostId, id: ReservationId, vm: &Name) -> bool {
        let last = self.head.meta().next_reservation.0.saturating_add(RESERVATIONS_LOST_MAX);
        let active = self.head.host(host).map_or(0, |entry| entry.reservations().len());
        match self.head.reservation(id) {
            Some(known) => known.vm == *vm && known.host == host,
            None => id.0 < last && active < RESERVATIONS_PER_HOST_MAX,
        }
    }

    /// Drops the VMs of a fenced host.
    pub(super) fn forget_unadopted(&mut self, host: HostId) {
        self.set_unadopted(host, Vec::new());
    }

    fn set_unadopted(&mut self, host: HostId, mut unadopted: Vec<UnadoptedVm>) {
        let before = self.unadopted.remove(&host).unwrap_or_default();
        let since: BTreeMap<_, _> = before.iter().map(|vm| ((&vm.vm, &vm.slices), vm.since)).collect();
        for vm in &mut unadopted {
            vm.since = since.get(&(&vm.vm, &vm.slices)).copied().unwrap_or(vm.since);
        }
        self.changed |= before != unadopted;
        if !unadopted.is_empty() {
            self.unadopted.insert(host, unadopted);
        }
    }

    /// Checks whether an operator may uncordon a quarantined slice.
    ///
    /// # Errors
    /// [`Rejection::SliceInDoubt`] while a report contains the slice as memory of a running VM, or
    /// while a host that may run a VM on it has not reported since a restore or since the manager
    /// started.
    pub(super) fn check_requalify(&self, slice: SliceId) -> Result<(), Rejection> {
        let in_doubt = |why| Err(Rejection::SliceInDoubt { slice, why });
        let running = self.unadopted.values().flatten().find(|vm| vm.slices.contains(&slice));
        if let Some(UnadoptedVm { vm, .. }) = running {
            return in_doubt(format!("VM {vm} runs on it; it returns when the VM has ended"));
        }
        let Some(emc) = self.head.emc_of(slice) else { return Ok(()) };
        if let Some(host) = self.head.unreported_on(emc).next() {
            return in_doubt(format!("host {} has not reported since the restore", host.name));
        }
        match self.unreported_users(emc, slice).next() {
            // For an EMC that cannot revoke access, the host has to release the slice first.
            Some(host) if self.head.can_revoke(slice) => {
                in_doubt(format!("host {host} has not reported since the manager started"))
            }
            _ => Ok(()),
        }
    }

    /// Returns hosts that may run a VM on a quarantined slice and have not sent a complete report
    /// in their session: the host that may reach the slice or, if the EMC has lost the owner, every
    /// host of the EMC. A fence by the EMC excludes a host.
    fn unreported_users(&self, emc: EmcId, slice: SliceId) -> impl Iterator<Item = &Name> {
        let slot = self.head.slot(slice).unwrap_or_default();
        let lost = matches!(slot.state, State::Quarantined(Quarantine::LostGrant));
        let may_use = move |id: HostId, entry: &HostEntry| match slot.holder() {
            Some(holder) => holder == id,
            None => lost && entry.host.emcs.contains(&emc),
        };
        let has_reported = |id: &HostId| self.links.get(id).is_some_and(Link::has_reported);
        let users = self.head.hosts().filter(move |(id, entry)| may_use(*id, entry));
        let unreported = users.filter(move |(id, entry)| !entry.host.is_fenced_at(emc) && !has_reported(id));
        unreported.map(|(_, entry)| &entry.host.name)
    }

    /// Alarms of hosts that have not reported since a restore, and of running VMs that could not be
    /// adopted.
    pub(super) fn restore_alarms(&self) -> impl Iterator<Item = Alarm> {
        let pending = self.durable.hosts().filter(|(_, entry)| entry.host.must_report);
        let pending = pending.map(|(id, entry)| Alarm {
            reason: "RESTORE_PENDING",
            subject: Subject::Host(entry.host.name.clone()),
            message: format!(
                "host {} has not reported since the ledger was restored: {}; slices it can reach stay quarantined",
                entry.host.name,
                self.unreported_reason(id)
            ),
            since: self.loaded_at,
        });
        let count = self.unadopted.values().map(Vec::len).sum();
        let rest =
            self.summary_alarm("VM_NOT_ADOPTED", count, UNADOPTED_ALARMS_MAX, "VMs run and are not adopted");
        let unadopted = self.unadopted.iter().flat_map(|(host, vms)| vms.iter().map(|vm| (*host, vm)));
        let listed = unadopted.take(UNADOPTED_ALARMS_MAX).filter_map(|(host, vm)| {
            let host = &self.durable.host(host)?.host.name;
            Some(Alarm {
                reason: "VM_NOT_ADOPTED",
                subject: Subject::Vm(vm.vm.clone()),
                message: format!(
                    "VM {} runs on host {host}, but device and ledger do not confirm its {} slices; they are kept",
                    vm.vm,
                    vm.slices.len()
                ),
                since: vm.since,
            })
        });
        pending.chain(listed).chain(rest)
    }

    fn unreported_reason(&self, host: HostId) -> String {
        let uncompared = self.uncompared_emc(host).and_then(|emc| self.durable.emc(emc));
        match (uncompared, self.unadopted.get(&host)) {
            (Some(entry), _) => format!("EMC {} has not been compared with the ledger", entry.emc.name),
            (None, Some(vms)) => format!("{} of its VMs could not be adopted", vms.len()),
            (None, None) => "its agent has not sent a complete report".to_owned(),
        }
    }
}

fn is_uncommitted_without_slices(reservation: &Reservation) -> bool {
    matches!(reservation.stage, Stage::Reserved { .. }) && reservation.slices.is_empty()
}
