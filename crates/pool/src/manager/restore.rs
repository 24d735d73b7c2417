//! Adoption of running VMs, and the end of a restore. The ledger of a backup is older than the
//! state of the rack. Every slice is therefore quarantined until each host that can reach it has
//! reported. Running VMs are adopted with their slices. Then the unclaimed slices can be used
//! again.
//!
//! A host has reported when three conditions hold. First, its agent has applied a desired state of
//! the restored ledger; from then on, it passes no memory to VMs that only the lost part of the
//! ledger contained. Second, every EMC of the host was compared with the ledger. Third, every VM in
//! the report was adopted. If an adoption fails, the host counts as unreported: its slices remain
//! quarantined, and an alarm names the VM.

use std::collections::BTreeMap;

use units::limits::{
    EPOCHS_SINCE_BACKUP_MAX, RESERVATIONS_PER_HOST_MAX, RESERVATIONS_SINCE_BACKUP_MAX,
    UNADOPTED_VM_ALARMS_MAX,
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
    /// Adopts the VMs in one part of a report. VMs of a fenced host are not adopted, because its
    /// desired state ends them.
    pub(super) fn adopt_reported_vms(
        &mut self,
        when: When,
        host: HostId,
        report: &ObservedState,
        partial: &mut PartialReport,
    ) {
        self.claim_slices(when, host, report);
        if self.is_fenced_host(host) {
            return self.clear_unadopted_vms(host);
        }
        partial.unadopted.extend(self.adopt_vms(when, host, report));
        if self.head.host(host).is_some_and(|entry| entry.host.must_report) {
            partial.has_uncompared_slice |=
                report.holdings().any(|holding| self.is_uncompared(holding.slice));
        }
    }

    fn is_fenced_host(&self, host: HostId) -> bool {
        self.head.host(host).is_none_or(|entry| entry.host.fence != Fence::None)
    }

    pub(super) fn has_unadopted_vms(&self, host: HostId) -> bool {
        self.unadopted.contains_key(&host)
    }

    /// Finishes a complete report: records the VMs that could not be adopted and, after a restore,
    /// whether the host has reported. Returns `false` without any effect if the host is fenced.
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
        let PartialReport { unadopted, has_uncompared_slice, .. } = partial;
        if !self.head.host(host).is_some_and(|entry| entry.host.must_report) {
            self.set_unadopted_vms(host, unadopted);
            return true;
        }
        let uncompared = has_uncompared_slice || self.has_uncompared_emc(host);
        let reported = !uncompared && report.number.generation == self.head.meta().generation;
        let all_adopted = unadopted.is_empty();
        self.set_unadopted_vms(host, unadopted);
        if reported {
            self.head.set_host_reported(host);
        }
        if reported && all_adopted {
            let change = self.head.decide_host_report(when, host);
            self.change(when, change);
        }
        true
    }

    /// Reserves the slice IDs that a host reports and the restored ledger does not contain. Also
    /// applies to hosts fenced after the restore.
    pub(super) fn reserve_lost_slices(&mut self, when: When, host: HostId, report: &ObservedState) {
        if self.head.host(host).is_some_and(|entry| entry.host.may_have_unrecorded_slices()) {
            let used = report.holdings().map(|holding| holding.slice);
            let change = self.head.decide_reserve_slice_ids(used, self.lost_slices_end);
            self.change(when, change);
        }
    }

    /// Raises the epochs of reported slices whose epochs are higher than in the restored ledger and
    /// in the EMC's record, so that the ledger never uses these epochs again. If the EMC cannot
    /// revoke access, the host becomes the holder of such a slice.
    fn claim_slices(&mut self, when: When, host: HostId, report: &ObservedState) {
        if !self.head.host(host).is_some_and(|entry| entry.host.may_have_unrecorded_slices()) {
            return;
        }
        for Holding { slice, epoch } in report.holdings().copied() {
            let Some(slot) = self.head.slot(slice) else { continue };
            let State::Quarantined(Quarantine::Restored { host: holder }) = slot.state else { continue };
            let is_newer = epoch > slot.epoch || (epoch == slot.epoch && holder.is_none());
            if !is_newer || epoch.0 - slot.epoch.0 > EPOCHS_SINCE_BACKUP_MAX {
                continue;
            }
            self.apply_slice_event(when, slice, Event::Raise(epoch));
            if !self.head.can_revoke(slice) && holder != Some(host) {
                let why = Event::Quarantine(Quarantine::Restored { host: Some(host) });
                self.quarantine_slice(
                    when,
                    slice,
                    why,
                    "a host reports the slice, but its EMC has no record of the grant",
                );
            }
        }
    }

    /// Adopts reported VMs that the ledger does not assign to their slices. Returns the VMs that
    /// could not be adopted.
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

    /// Returns whether a reported VM needs adoption: one of its slices is quarantined because
    /// ledger and device may disagree on the owner. After a restore, a VM also needs adoption if
    /// the ledger has no reservation of it, or only an uncommitted reservation without slices.
    fn is_unknown(&self, host: HostId, id: ReservationId, vm: &ObservedVm) -> bool {
        let restored = self.head.host(host).is_some_and(|entry| entry.host.must_report);
        let in_doubt = |slice: SliceId| {
            let state = self.head.slot(slice).map(|slot| slot.state);
            matches!(state, Some(State::Quarantined(why)) if why.has_uncertain_owner())
        };
        vm.slices.iter().any(|holding| in_doubt(holding.slice))
            || (restored && self.head.reservation(id).is_none_or(is_uncommitted_without_slices))
    }

    fn adopt_vm(&mut self, when: When, host: HostId, id: ReservationId, vm: &ObservedVm) -> bool {
        let granted = vm.slices.iter().all(|holding| self.is_granted(*holding));
        if !granted || !self.can_adopt_as(host, id, &vm.vm) {
            return false;
        }
        let Some(change) = self.head.decide_adoption(when, host, id, vm) else { return false };
        self.change(when, change);
        true
    }

    /// Returns whether the EMC's record contains a grant of exactly this epoch.
    fn is_granted(&self, holding: Holding) -> bool {
        let records = [self.handles.get(&holding.slice), self.pending_handles.get(&holding.slice)];
        records.into_iter().flatten().any(|(epoch, _)| *epoch == holding.epoch)
    }

    /// Returns whether a VM can be adopted under the reservation ID that its host reports. This
    /// holds if the reservation belongs to this VM and host, or its ID may have been assigned after
    /// the backup.
    fn can_adopt_as(&self, host: HostId, id: ReservationId, vm: &Name) -> bool {
        let last = self.head.meta().next_reservation.0.saturating_add(RESERVATIONS_SINCE_BACKUP_MAX);
        let active = self.head.host(host).map_or(0, |entry| entry.reservations().len());
        match self.head.reservation(id) {
            Some(known) => known.vm == *vm && known.host == host,
            None => id.0 < last && active < RESERVATIONS_PER_HOST_MAX,
        }
    }

    /// Drops the record of a fenced host's VMs that were not adopted.
    pub(super) fn clear_unadopted_vms(&mut self, host: HostId) {
        self.set_unadopted_vms(host, Vec::new());
    }

    fn set_unadopted_vms(&mut self, host: HostId, mut unadopted: Vec<UnadoptedVm>) {
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

    /// Checks whether an operator may requalify a quarantined slice.
    ///
    /// # Errors
    /// Returns [`Rejection::SliceInDoubt`] if, according to a report, a running VM uses the slice.
    /// Also returns it if a host that may run a VM with the slice has not reported since a restore
    /// or since the manager started.
    pub(super) fn check_requalification(&self, slice: SliceId) -> Result<(), Rejection> {
        let in_doubt = |why| Err(Rejection::SliceInDoubt { slice, why });
        let running = self.unadopted.values().flatten().find(|vm| vm.slices.contains(&slice));
        if let Some(UnadoptedVm { vm, .. }) = running {
            return in_doubt(format!("VM {vm} uses the slice; retry after the VM has ended"));
        }
        let Some(emc) = self.head.emc_of(slice) else { return Ok(()) };
        if let Some(host) = self.head.unreported_hosts_on(emc).next() {
            return in_doubt(format!("host {} has not reported since the restore", host.name));
        }
        match self.unreported_users(emc, slice).next() {
            // If the EMC cannot revoke access, the host must release the slice first.
            Some(host) if self.head.can_revoke(slice) => {
                in_doubt(format!("host {host} has not reported since the manager started"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the hosts that may run a VM with a quarantined slice and have not sent a complete
    /// report in their session. The candidates are the holder of the slice or, if the EMC has lost
    /// the grant, all hosts attached to the EMC. Hosts that the EMC has fenced are excluded.
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

    /// Returns an alarm for each host that has not reported since a restore, and for running VMs
    /// that could not be adopted.
    pub(super) fn restore_alarms(&self) -> impl Iterator<Item = Alarm> {
        let pending = self.durable.hosts().filter(|(_, entry)| entry.host.must_report);
        let pending = pending.map(|(id, entry)| Alarm {
            reason: "RESTORE_PENDING",
            subject: Subject::Host(entry.host.name.clone()),
            message: format!(
                "host {} has not reported since the ledger was restored: {}; the slices that it can reach remain quarantined",
                entry.host.name,
                self.unreported_reason(id)
            ),
            since: self.loaded_at,
        });
        let count = self.unadopted.values().map(Vec::len).sum();
        let rest = self.summary_alarm(
            "VM_NOT_ADOPTED",
            count,
            UNADOPTED_VM_ALARMS_MAX,
            "running VMs are not adopted",
        );
        let unadopted = self.unadopted.iter().flat_map(|(host, vms)| vms.iter().map(|vm| (*host, vm)));
        let listed = unadopted.take(UNADOPTED_VM_ALARMS_MAX).filter_map(|(host, vm)| {
            let host = &self.durable.host(host)?.host.name;
            Some(Alarm {
                reason: "VM_NOT_ADOPTED",
                subject: Subject::Vm(vm.vm.clone()),
                message: format!(
                    "VM {} runs on host {host}, but device and ledger do not confirm its {} slices; the slices remain quarantined",
                    vm.vm,
                    vm.slices.len()
                ),
                since: vm.since,
            })
        });
        pending.chain(listed).chain(rest)
    }

    fn unreported_reason(&self, host: HostId) -> String {
        let uncompared = self.first_uncompared_emc(host).and_then(|emc| self.durable.emc(emc));
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
