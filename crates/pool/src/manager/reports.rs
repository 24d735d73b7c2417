//! Applies reports of hosts. Each entry of a report becomes an event of its slice or VM. Late and
//! repeated entries have no effect. A report is applied in parts of bounded size, and counts as
//! applied after its last part.
//!
//! An agent sends a complete report at the start of its session and on request; its other reports
//! contain only changes. The manager requests a complete report when sequence numbers show that a
//! report is missing. It also requests one while VMs of the host are not adopted, while the host
//! has not reported since a restore, and after an event that may allow an adoption.

use std::collections::BTreeSet;

use units::limits::DESIRED_STATE_RESEND_AFTER;
use units::{Epoch, HostId, ReservationId, SliceId};

use super::{CloseReason, Effect, Manager, SessionId, link::Link, report_log::PartialReport};
use crate::{
    audit::Actor,
    ledger::{HostEntry, When},
    protocol::{FailureReason, Holding, ObservedRehome, ObservedState, ScrubReport},
    record::{EndReason, Fence},
    slice::{DrainStage, Event, Scrub, State},
};

impl Manager {
    /// Applies a report or one part of a report. Checks for slices that the host cannot have,
    /// unless the report is outdated: its slices may have been removed since.
    pub(super) fn on_report(&mut self, when: When, session: SessionId, report: &ObservedState) {
        let Some(host) = self.sessions.get(&session).copied() else { return };
        let (loads, adoption_events) = (self.loads, self.adoption_events);
        let Some(mut link) = self.links.get_mut(&host) else { return };
        let is_outdated = link.record_message(when, report.number);
        let mut partial = link.reports.begin_report(report, loads, adoption_events);
        if !self.loaded {
            link.reports.partial = report.is_continued.then_some(partial);
            return;
        }
        drop(link);
        self.reserve_lost_slices(when, host, report);
        if let Some(claim) = self.find_false_claim(host, report).filter(|_| !is_outdated) {
            return self.close_agent_session(session, CloseReason::FalseClaim(claim.slice, claim.epoch));
        }
        self.apply_reported_slices(when, host, report);
        self.end_vms_without_process(when, host, report);
        self.adopt_reported_vms(when, host, report, &mut partial);
        self.apply_reported_processes(when, host, report, &mut partial);
        self.apply_reported_rehomes(when, host, report);
        if report.is_continued {
            return self.store_partial_report(host, partial);
        }
        self.apply_clean_report(when, host, report);
        if partial.received_parts.is_some() && partial.loads == self.loads {
            // If a part was lost, the report is incomplete and does not count.
            self.complete_report(when, host, report, partial);
        }
        if !report.whole {
            self.request_report(when, host, session);
        }
    }

    fn store_partial_report(&mut self, host: HostId, partial: PartialReport) {
        if let Some(mut link) = self.links.get_mut(&host) {
            link.reports.partial = Some(partial);
        }
    }

    /// Finishes a report after its last part was applied.
    fn complete_report(&mut self, when: When, host: HostId, report: &ObservedState, partial: PartialReport) {
        let adoption_events = partial.adoption_events;
        if let Some(mut link) = self.links.get_mut(&host) {
            link.reports.record_completion(report);
        }
        if report.whole {
            self.end_missing_processes(when, host, &partial.vms);
        }
        if report.whole
            && self.finish_complete_report(when, host, report, partial)
            && let Some(mut link) = self.links.get_mut(&host)
        {
            link.reports.complete_since = Some(adoption_events);
        }
    }

    /// Requests a complete report from a host if one is needed, at most once per
    /// [`DESIRED_STATE_RESEND_AFTER`].
    fn request_report(&mut self, when: When, host: HostId, session: SessionId) {
        if !self.needs_report(host) {
            return;
        }
        let Some(mut link) = self.links.get_mut(&host) else { return };
        if link.reports.requested_at.is_some_and(|at| when.now < at.after(DESIRED_STATE_RESEND_AFTER)) {
            return;
        }
        link.reports.requested_at = Some(when.now);
        self.effects.push_back(Effect::RequestReport(session));
    }

    /// Returns whether a complete report of a host is needed. From a fenced host, the manager only
    /// needs the report that it is clean.
    fn needs_report(&self, host: HostId) -> bool {
        let Some((link, entry)) = self.links.get(&host).zip(self.head.host(host)) else { return false };
        let (log, host_record) = (&link.reports, &entry.host);
        let in_doubt = || host_record.must_report || self.has_unadopted_vms(host);
        let outdated = || log.complete_since.is_none_or(|since| since < self.adoption_events);
        host_record.fence == Fence::None && (log.has_missing_report() || in_doubt() || outdated())
    }

    /// Returns the first reported slice that this host cannot have, if any: the slice never
    /// existed, another host holds it, or its epoch is impossible.
    fn find_false_claim(&self, host: HostId, report: &ObservedState) -> Option<Holding> {
        let entry = self.head.host(host)?;
        report.online.iter().copied().find(|claim| self.is_false_claim(host, entry, *claim))
    }

    fn is_false_claim(&self, host: HostId, entry: &HostEntry, claim: Holding) -> bool {
        if self.head.is_held(host, claim.slice, claim.epoch) {
            return false;
        }
        let removed = claim.epoch > Epoch(0) && claim.slice < self.head.meta().next_slice;
        let Some(slot) = self.head.slot(claim.slice) else { return !removed };
        let is_attached = self.head.emc_of(claim.slice).is_some_and(|emc| entry.host.emcs.contains(&emc))
            || entry.host.may_have_unrecorded_slices();
        let is_impossible = claim.epoch == Epoch(0) || claim.epoch > slot.epoch;
        // After a restore, or if the EMC's record differs from the ledger, the host may hold grants
        // that neither contains.
        let in_doubt = slot.is_quarantined() || self.is_uncompared(claim.slice);
        let is_held_by_other =
            claim.epoch == slot.epoch && slot.holder().is_some_and(|holder| holder != host);
        // A report of a past grant is not false: it may arrive after the host was detached from the
        // EMC, and is ignored.
        (is_impossible || is_held_by_other) && !(is_attached && in_doubt)
    }

    fn apply_reported_slices(&mut self, when: When, host: HostId, report: &ObservedState) {
        let newly_online = report.online.iter().filter(|h| !self.head.is_online(h.slice, h.epoch));
        for holding in newly_online.copied().collect::<Vec<_>>() {
            self.apply_slice_event(when, holding.slice, Event::Onlined(host, holding.epoch));
        }
        for holding in &report.released {
            self.apply_slice_event(when, holding.slice, Event::Released(host, holding.epoch));
        }
        for scrubbed in &report.scrubbed {
            if scrubbed.verified >= units::SLICE && self.is_scrub_result_final(host, report, scrubbed) {
                self.apply_slice_event(when, scrubbed.holding.slice, Event::Scrubbed(host, *scrubbed));
            }
        }
        for failed in &report.failed {
            let Holding { slice, epoch } = failed.holding;
            let Some(slot) = self.head.slot(slice).filter(|slot| slot.epoch == epoch) else { continue };
            let event = match (failed.reason, slot.state) {
                (_, State::Scrubbing(Scrub::Working(_))) => Event::ScrubFailed(host, epoch),
                (FailureReason::NotZero, _) => Event::FoundDirty(host, epoch),
                (FailureReason::Host, State::Draining(owner, DrainStage::Host { .. })) => {
                    if owner.host == host {
                        self.on_release_failed(when, slice, &failed.message);
                    }
                    continue;
                }
                (FailureReason::Host, _) => {
                    self.break_reservation(when, host, slice, &failed.message);
                    continue;
                }
            };
            if let Some(change) = self.head.decide_quarantine(when, slice, event, &failed.message) {
                self.change(when, change);
            }
        }
    }

    /// Returns whether the agent does not start the scrub again after this result. An agent drops the
    /// result when a desired state lacks the scrub, for example because its EMC is being compared. If a
    /// later desired state contains the scrub again, only a result for that state is final.
    fn is_scrub_result_final(&self, host: HostId, report: &ObservedState, scrubbed: &ScrubReport) -> bool {
        let link = self.links.get(&host);
        let sent = link.and_then(|link| link.scrubs_sent.get(&scrubbed.holding).copied());
        sent.is_none_or(|sent| report.number >= sent)
    }

    fn break_reservation(&mut self, when: When, host: HostId, slice: SliceId, message: &str) {
        let slot = self.head.slot(slice).filter(|slot| slot.holder() == Some(host));
        if let Some(id) = slot.and_then(crate::slice::Slot::reservation) {
            let change = self.head.decide_reservation_break(
                when,
                id,
                format!("slice {slice} did not come online: {message}"),
            );
            self.change(when, change);
        }
    }

    /// Ends the reservations whose VM's process has ended.
    fn end_vms_without_process(&mut self, when: When, host: HostId, report: &ObservedState) {
        let name = self.head.host(host).map(|entry| entry.host.name.clone());
        let Some(name) = name else { return };
        for id in &report.ended {
            if self.head.reservation(*id).is_some_and(|r| r.host == host && r.is_active()) {
                let ended = self.head.decide_reservation_end(
                    when,
                    *id,
                    EndReason::ProcessGone,
                    Actor::Agent(name.clone()),
                );
                ended.into_iter().for_each(|change| self.change(when, change));
            }
        }
    }

    /// Records the running and the ended processes in one part of a report. Ignores reports of a
    /// fenced host, because the fence ends its processes.
    fn apply_reported_processes(
        &mut self,
        when: When,
        host: HostId,
        report: &ObservedState,
        partial: &mut PartialReport,
    ) {
        partial.vms.extend(report.vms.keys().filter(|_| report.whole));
        let has_ended: BTreeSet<_> = report.ended.iter().copied().collect();
        let running = report.vms.iter().filter(|(id, _)| !has_ended.contains(id));
        let running = running.filter(|(id, vm)| self.head.reservation(**id).is_some_and(|r| r.vm == vm.vm));
        let running: Vec<_> = running.map(|(id, _)| *id).collect();
        self.record_processes(when, host, running, true);
        self.record_processes(when, host, has_ended, false);
    }

    /// Records the results of moves to local memory.
    fn apply_reported_rehomes(&mut self, when: When, host: HostId, report: &ObservedState) {
        let Some(name) = self.head.host(host).map(|entry| entry.host.name.clone()) else { return };
        for (id, vm) in &report.vms {
            if !self.head.reservation(*id).is_some_and(|r| r.host == host && r.vm == vm.vm) {
                continue;
            }
            let actor = || Actor::Agent(name.clone());
            let change = match &vm.rehome {
                ObservedRehome::None => continue,
                ObservedRehome::Done => self.head.decide_rehome_completion(when, *id, actor()),
                ObservedRehome::Failed { attempt, why } => {
                    self.head.decide_rehome_failure(when, *id, *attempt, why, actor())
                }
            };
            self.change(when, change);
        }
    }

    /// Records the end of all processes that are missing in a complete report.
    fn end_missing_processes(&mut self, when: When, host: HostId, running: &BTreeSet<ReservationId>) {
        let Some(entry) = self.head.host(host) else { return };
        let own = entry.reservations().chain(entry.ended_reservations_with_process());
        let ended: Vec<_> = own.filter(|id| !running.contains(id)).collect();
        self.record_processes(when, host, ended, false);
    }

    fn record_processes(
        &mut self,
        when: When,
        host: HostId,
        ids: impl IntoIterator<Item = ReservationId>,
        has_process: bool,
    ) {
        let Some(entry) = self.head.host(host).filter(|entry| entry.host.fence == Fence::None) else {
            return;
        };
        let actor = Actor::Agent(entry.host.name.clone());
        for id in ids {
            if self.head.reservation(id).is_some_and(|r| r.host == host && r.has_process != has_process) {
                let change = self.head.decide_process_change(when, id, has_process, actor.clone());
                self.change(when, change);
            }
        }
    }

    /// Applies a report that the host is clean. Ends a fence only if the agent has applied a
    /// desired state that contained the fence.
    fn apply_clean_report(&mut self, when: When, host: HostId, report: &ObservedState) {
        let fence_sent = self.links.get(&host).and_then(|link| link.fence_sent);
        if report.clean && fence_sent.is_some_and(|fence_sent| report.number >= fence_sent) {
            let hello = self.links.get(&host).and_then(Link::hello);
            let boot_id = hello.map_or("", |hello| &hello.boot_id).to_owned();
            let change = self.head.decide_agent_identity(when, host, &boot_id, true);
            self.change(when, change);
        }
    }
}
