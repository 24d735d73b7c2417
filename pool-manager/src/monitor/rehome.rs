//! Automatic moves of slowed-down VMs to local memory of their hosts (`[qos] rehome = "auto"`).

use std::{
    collections::BTreeMap,
    sync::{MutexGuard, PoisonError},
};

use pool::{
    audit::Actor,
    ledger::Target,
    manager::Request,
    record::{MigrationAnswer, MigrationKind},
};
use prediction::qos::{Verdict, select_most_harmed};
use units::{
    Ns, ReservationId,
    limits::{QOS_SAMPLE_GAP_MAX, REHOMES_PER_OWNER_PER_DAY_MAX},
};

use super::{LOOKUP_CHUNK, Monitor, MonitoredVm};
use crate::driver::DriverError;

/// Interval between two attempts to move the pool memory of a VM.
const REHOME_TRY_INTERVAL: Ns = Ns::secs(30);

/// VMs with automatic moves in the last 24 hours, by owner. Bounds the local memory that an owner obtains
/// by feigning a slowdown. The VMs are forgotten in a restart.
#[derive(Debug, Default)]
pub(super) struct OwnerLimit(BTreeMap<String, BTreeMap<ReservationId, Ns>>);

impl OwnerLimit {
    const WINDOW: Ns = Ns::secs(24 * 3600);

    /// Returns whether the manager may try to move this VM. A VM that was tried before counts once.
    fn is_allowed(&mut self, owner: &str, id: ReservationId, now: Ns) -> bool {
        self.0.retain(|_, vms| {
            vms.retain(|_, at| now.since(*at) < Self::WINDOW);
            !vms.is_empty()
        });
        self.0.get(owner).is_none_or(|vms| vms.contains_key(&id) || vms.len() < REHOMES_PER_OWNER_PER_DAY_MAX)
    }

    fn record(&mut self, owner: String, id: ReservationId, now: Ns) {
        self.0.entry(owner).or_default().insert(id, now);
    }
}

impl Monitor {
    /// Moves the pool memory of slowed-down VMs with a migration request to local memory of their
    /// hosts, as far as the hosts have free local memory and the limits allow it. The most harmed VMs
    /// come first.
    pub(super) async fn rehome_harmed_vms(&self, now: Ns) -> Result<(), DriverError> {
        let harmed = self.find_rehome_candidates(now)?;
        for id in select_most_harmed(harmed.iter().map(|(id, severity)| (*id, *severity)), harmed.len()) {
            let owner = self.forecasts.owner(id).unwrap_or_else(|| id.to_string());
            if !self.lock_rehomes().is_allowed(&owner, id, now) {
                continue;
            }
            let (target, actor) = (Target::Reservation(id), Actor::Manager);
            match self.driver.request(Request::Rehome { target, actor, is_automatic: true }).await {
                Ok(_) => {
                    self.lock_rehomes().record(owner, id, now);
                    tracing::info!(reservation = %id, "moving the pool memory of a slowed-down VM");
                }
                // The host has no free local memory, the VM has ended, or a limit applies.
                Err(DriverError::Rejection(why)) => {
                    tracing::debug!(reservation = %id, %why, "cannot move the pool memory of a VM");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the VMs whose memory should be moved now, with their severities. Excludes VMs with a move
    /// in progress, and VMs that the scheduler has decided to migrate.
    fn find_rehome_candidates(&self, now: Ns) -> Result<BTreeMap<ReservationId, f64>, DriverError> {
        let mut due = self.take_rehome_candidates(now);
        let ids: Vec<ReservationId> = due.keys().copied().collect();
        for chunk in ids.chunks(LOOKUP_CHUNK) {
            let excluded = self.driver.read(|manager, _| {
                let ledger = manager.durable();
                let is_open = |id: &ReservationId| {
                    let request = ledger.migration(MigrationKind::Slowdown.of(*id));
                    let answer = request.map(|request| request.answer);
                    let is_moving = ledger
                        .reservation(*id)
                        .is_some_and(|reservation| reservation.rehome.attempt_in_progress().is_some());
                    !is_moving && matches!(answer, Some(MigrationAnswer::Open | MigrationAnswer::Declined))
                };
                chunk.iter().filter(|id| !is_open(id)).copied().collect::<Vec<_>>()
            })?;
            due.retain(|id, _| !excluded.contains(id));
        }
        Ok(due)
    }

    /// Returns the slowed-down VMs with a request that are due for an attempt, with their severities.
    fn take_rehome_candidates(&self, now: Ns) -> BTreeMap<ReservationId, f64> {
        let mut vms = self.lock();
        let due = vms.iter_mut().filter(|(_, vm)| vm.is_rehome_due(now)).map(|(id, vm)| {
            vm.rehome_tried_at = Some(now);
            (*id, vm.judge.judgement().severity)
        });
        due.collect()
    }

    fn lock_rehomes(&self) -> MutexGuard<'_, OwnerLimit> {
        self.rehomes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MonitoredVm {
    /// Returns whether the manager may try to move the VM now. A move is final, so the verdict must be
    /// recent. A VM that is recovering need not be moved.
    fn is_rehome_due(&self, now: Ns) -> bool {
        let judgement = self.judge.judgement();
        let is_harmed = judgement.verdict == Verdict::Migrate && judgement.severity > 1.0;
        let may_try = self.rehome_tried_at.is_none_or(|at| now.since(at) >= REHOME_TRY_INTERVAL);
        is_harmed && self.confirmed_at.is_some() && self.is_sampled_within(QOS_SAMPLE_GAP_MAX, now) && may_try
    }
}

#[cfg(test)]
mod tests {
    use prediction::qos::{AccessedShare, Judge, Placement, Sample};
    use units::UnixMs;

    use super::*;
    use crate::{convert::samples::HostPressure, monitor::LatestSample};

    /// Returns a VM with a request that was sampled last at `at` and is slowed down.
    fn harmed_vm(at: Ns) -> MonitoredVm {
        let mut judge = Judge::new(Placement::Split);
        let accessed = AccessedShare::from_pages(190, 200).unwrap();
        for seconds in [90, 60, 30, 0] {
            let at = Ns(at.0 - Ns::secs(seconds).0);
            let (touched, counters, pool_loads) = Default::default();
            let sample = Sample { at, accessed: Some(accessed), touched, counters, pool_loads };
            judge.observe(&sample, None, at).unwrap();
        }
        let latest = LatestSample {
            accessed: Err("not shown".to_owned()),
            counter_problem: None,
            pressure: HostPressure::default(),
            loss_version: None,
            loss_model: None,
            at,
            unix: UnixMs(0),
        };
        let (moving_at, waits_for_budget, rehome_tried_at) = Default::default();
        let (latest, confirmed_at) = (Some(latest), Some(at));
        MonitoredVm { judge, latest, confirmed_at, moving_at, waits_for_budget, rehome_tried_at }
    }

    #[test]
    fn only_recent_verdicts_cause_automatic_moves() {
        let at = Ns::secs(1000);
        let vm = harmed_vm(at);
        assert!(vm.is_rehome_due(at));
        assert!(vm.is_rehome_due(Ns(at.after(QOS_SAMPLE_GAP_MAX).0 - 1)));
        assert!(!vm.is_rehome_due(at.after(QOS_SAMPLE_GAP_MAX)), "the VM is no longer sampled");
        let tried = MonitoredVm { rehome_tried_at: Some(at), ..harmed_vm(at) };
        assert!(!tried.is_rehome_due(at) && tried.is_rehome_due(at.after(REHOME_TRY_INTERVAL)));
        let without_request = MonitoredVm { confirmed_at: None, ..harmed_vm(at) };
        assert!(!without_request.is_rehome_due(at));
    }

    #[test]
    fn owner_has_a_limited_number_of_moved_vms_per_day() {
        let mut limit = OwnerLimit::default();
        let vm = |number: usize| ReservationId(u64::try_from(number).expect("a small number"));
        for number in 0..REHOMES_PER_OWNER_PER_DAY_MAX {
            assert!(limit.is_allowed("a", vm(number), Ns::secs(9)), "{number}");
            limit.record("a".into(), vm(number), Ns::secs(9));
        }
        let next = vm(REHOMES_PER_OWNER_PER_DAY_MAX);
        assert!(!limit.is_allowed("a", next, Ns::secs(10)));
        assert!(limit.is_allowed("a", vm(0), Ns::secs(10)), "another attempt for the same VM");
        assert!(limit.is_allowed("b", next, Ns::secs(10)), "another owner");
        let day = Ns::secs(9).after(OwnerLimit::WINDOW);
        assert!(!limit.is_allowed("a", next, Ns(day.0 - 1)));
        assert!(limit.is_allowed("a", next, day));
    }
}
