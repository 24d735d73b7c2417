//! Monitors running VMs (Pond, sections 4.5 B and 4.6). The agents report samples, and a
//! [`Judge`] per VM derives a verdict. VMs that pool memory slows down get a migration request in
//! the ledger, the most harmed VMs first, within the hourly budget.
//!
//! ```text
//!   agent ──sample──▶ record ──▶ Judge of the VM ──verdict──▶ round, every few seconds
//!                                                               │ request, confirm, withdraw
//!                                             scheduler ◀── migration requests of the ledger
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use pool::{manager::Request, record::SlowdownEstimate, rejection::Rejection};
use prediction::qos::{
    AccessedShare, Judge, Judgement, Placement, Reason, Sample, Verdict, hourly_budget, select_most_harmed,
};
use proto::v1 as wire;
use service_files::log_limit::LogLimit;
use units::{
    Bytes, Fraction, HostId, Name, Ns, ReservationId, UnixMs,
    limits::{QOS_SAMPLE_INTERVAL_MIN, SLOWDOWN_REQUEST_TTL},
};

use crate::{
    convert::{InvalidField, pool_memory, samples::ReportedSample},
    driver::{DriverError, Handle},
    forecasts::Forecasts,
    metrics::Metrics,
};

/// Interval between two rounds, in which the verdicts of all VMs become requests.
const ROUND_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of VMs that are looked up while the ledger is locked.
const LOOKUP_CHUNK: usize = 64;
/// Time after which an existing request is confirmed, while the VM is still slowed down.
const CONFIRM_AFTER: Ns = Ns(SLOWDOWN_REQUEST_TTL.0 / 4);

/// Monitor of all running VMs of a rack.
#[derive(Debug)]
pub struct Monitor {
    vms: Mutex<BTreeMap<ReservationId, MonitoredVm>>,
    forecasts: Arc<Forecasts>,
    driver: Handle,
    metrics: Arc<Metrics>,
    log_limit: LogLimit,
}

/// Running VM with its latest sample. Its size is bounded.
#[derive(Debug)]
struct MonitoredVm {
    judge: Judge,
    accessed: Result<AccessedShare, String>,
    has_counters: bool,
    /// Rack time of the latest sample.
    sampled_at: Ns,
    /// Wall-clock time of the latest sample.
    sampled_unix: UnixMs,
    /// Rack time at which the request of this VM was made or confirmed last; `None` without request.
    confirmed_at: Option<Ns>,
}

/// Facts of the ledger about a sampled VM.
#[derive(Clone, Copy, Debug)]
struct LedgerFacts {
    pool: Bytes,
    now: Ns,
    wall: UnixMs,
}

impl Monitor {
    /// Starts a monitor without VMs. It runs until the manager stops.
    pub fn start(forecasts: Arc<Forecasts>, driver: Handle, metrics: Arc<Metrics>) -> Arc<Self> {
        let log_limit = LogLimit::default();
        let monitor = Arc::new(Self { vms: Mutex::default(), forecasts, driver, metrics, log_limit });
        tokio::spawn(Arc::clone(&monitor).run());
        monitor
    }

    /// Locks the VMs. Ignores that another thread panicked while it held the lock, because a wrong
    /// verdict is less harmful than a failed request.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReservationId, MonitoredVm>> {
        self.vms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Judges the samples of a host. Samples that are invalid, too frequent or about VMs that do not
    /// run with pool memory on this host are dropped and counted.
    ///
    /// # Errors
    /// [`DriverError::Stopping`] if the manager is stopping.
    pub fn record(
        &self,
        host: HostId,
        name: &Name,
        samples: Vec<Result<ReportedSample, InvalidField>>,
    ) -> Result<(), DriverError> {
        let valid = samples.into_iter().filter_map(|sample| {
            sample.map_err(|error| self.drop_sample(name, "invalid", &error.to_string())).ok()
        });
        let valid: Vec<ReportedSample> = valid.collect();
        for chunk in valid.chunks(LOOKUP_CHUNK) {
            let facts = self.driver.read(|manager, when| {
                let facts = |sample: &ReportedSample| {
                    let reservation = manager.durable().reservation(sample.reservation)?;
                    let is_here = reservation.is_active() && reservation.host == host;
                    let pool = pool_memory(reservation);
                    (is_here && pool > Bytes::ZERO).then_some(LedgerFacts {
                        pool,
                        now: when.now,
                        wall: when.wall,
                    })
                };
                chunk.iter().map(facts).collect::<Vec<_>>()
            })?;
            for (sample, facts) in chunk.iter().zip(facts) {
                match facts {
                    None => self.drop_sample(name, "unknown_vm", &sample.reservation.to_string()),
                    Some(facts) => self.judge(name, sample, facts),
                }
            }
        }
        Ok(())
    }

    fn judge(&self, host: &Name, sample: &ReportedSample, facts: LedgerFacts) {
        let is_pool_only = || self.forecasts.is_pool_only(sample.reservation);
        let placement = || if is_pool_only() { Placement::EntirelyOnPool } else { Placement::Split };
        let mut vms = self.lock();
        let vm = vms.entry(sample.reservation).or_insert_with(|| MonitoredVm {
            judge: Judge::new(placement(), sample.latency_ratio),
            accessed: Err(String::new()),
            has_counters: false,
            sampled_at: Ns::ZERO,
            sampled_unix: UnixMs(0),
            confirmed_at: None,
        });
        if vm.sampled_at != Ns::ZERO && facts.now.since(vm.sampled_at) < QOS_SAMPLE_INTERVAL_MIN {
            return self.drop_sample(host, "too_frequent", &sample.reservation.to_string());
        }
        let before = vm.judge.judgement().verdict;
        match vm.judge.observe(&to_sample(sample, facts), None, facts.now) {
            Err(error) => self.drop_sample(host, "invalid", &error.to_string()),
            Ok(judgement) => {
                self.metrics.vm_samples.inc();
                vm.accessed.clone_from(&sample.accessed);
                (vm.has_counters, vm.sampled_at) = (sample.counters.is_ok(), facts.now);
                vm.sampled_unix = facts.wall;
                if judgement.verdict != before {
                    let (verdict, severity) = (verdict_name(judgement.verdict), judgement.severity);
                    let reservation = sample.reservation;
                    tracing::info!(%host, %reservation, verdict, severity, "verdict about a VM changed");
                }
            }
        }
    }

    fn drop_sample(&self, host: &Name, reason: &'static str, what: &str) {
        self.metrics.count_dropped_sample(reason);
        if let Some(suppressed) = self.log_limit.count_line() {
            tracing::warn!(%host, reason, what, suppressed, "dropped a sample of a VM");
        }
    }

    /// Turns verdicts into requests until the manager stops.
    async fn run(self: Arc<Self>) {
        let mut interval = tokio::time::interval(ROUND_INTERVAL);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            match self.run_round().await {
                Ok(()) => {}
                Err(DriverError::Stopping) => return,
                // The next round repeats the requests.
                Err(error) => tracing::warn!(error = units::chain(&error), "cannot request migrations"),
            }
        }
    }

    async fn run_round(&self) -> Result<(), DriverError> {
        self.remove_ended_vms()?;
        self.update_metrics();
        let (vms, requested, now) = self.driver.read(|manager, when| {
            let ledger = manager.durable();
            (ledger.active_vm_count(), ledger.slowdown_requests().collect::<BTreeSet<_>>(), when.now)
        })?;
        let max_per_hour = hourly_budget(self.forecasts.exceed_max(), vms);
        for id in self.recovered_vms() {
            self.driver.request(Request::WithdrawSlowdownMigration(id)).await?;
            self.set_confirmed(id, None);
        }
        let harmed = self.harmed_vms(&requested, now);
        let mut is_budget_exhausted = false;
        for id in select_most_harmed(harmed.iter().map(|(id, e)| (*id, e.severity)), harmed.len()) {
            let estimate = harmed[&id];
            if is_budget_exhausted && !requested.contains(&id) {
                continue;
            }
            let request = Request::RequestSlowdownMigration { reservation: id, estimate, max_per_hour };
            match self.driver.request(request).await {
                Ok(_) => self.set_confirmed(id, Some(now)),
                Err(DriverError::Rejection(Rejection::SlowdownBudgetExhausted { .. })) => {
                    is_budget_exhausted = true;
                }
                // The reservation has just ended.
                Err(DriverError::Rejection(
                    Rejection::NoSuchReservation(_) | Rejection::WrongState { .. },
                )) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn set_confirmed(&self, id: ReservationId, at: Option<Ns>) {
        if let Some(vm) = self.lock().get_mut(&id) {
            vm.confirmed_at = at;
        }
    }

    /// Returns the VMs that had a request of this process and that are no longer slowed down. If the
    /// host can no longer observe a VM, its request expires instead.
    fn recovered_vms(&self) -> Vec<ReservationId> {
        let vms = self.lock();
        let recovered = vms.iter().filter(|(_, vm)| {
            let judgement = vm.judge.judgement();
            let is_fine = judgement.verdict != Verdict::Migrate && judgement.reason != Reason::NoEvidence;
            vm.confirmed_at.is_some() && is_fine
        });
        recovered.map(|(id, _)| *id).collect()
    }

    /// Returns the VMs that need a request or the confirmation of a request. A VM that has not been sampled recently is not confirmed,
    /// so that its request expires. A VM that is recovering gets no new request. `requested` are the
    /// VMs that have a request.
    fn harmed_vms(
        &self,
        requested: &BTreeSet<ReservationId>,
        now: Ns,
    ) -> BTreeMap<ReservationId, SlowdownEstimate> {
        let vms = self.lock();
        let harmed = vms.iter().filter(|(id, vm)| {
            let judgement = vm.judge.judgement();
            let is_due = vm.confirmed_at.is_none_or(|at| now.since(at) >= CONFIRM_AFTER);
            judgement.verdict == Verdict::Migrate
                && (judgement.severity > 1.0 || requested.contains(id))
                && is_due
                && now.since(vm.sampled_at) < CONFIRM_AFTER
        });
        harmed.map(|(id, vm)| (*id, to_estimate(&vm.judge.judgement()))).collect()
    }

    /// Removes the VMs whose reservations have ended.
    fn remove_ended_vms(&self) -> Result<(), DriverError> {
        let ids: Vec<ReservationId> = self.lock().keys().copied().collect();
        for chunk in ids.chunks(LOOKUP_CHUNK) {
            let ended = self.driver.read(|manager, _| {
                let is_active =
                    |id: &ReservationId| manager.durable().reservation(*id).is_some_and(|r| r.is_active());
                chunk.iter().filter(|id| !is_active(id)).copied().collect::<Vec<_>>()
            })?;
            let mut vms = self.lock();
            ended.iter().for_each(|id| drop(vms.remove(id)));
        }
        Ok(())
    }

    fn update_metrics(&self) {
        let verdicts = [Verdict::Fine, Verdict::Watch, Verdict::Migrate];
        let vms = self.lock();
        let count = |verdict| vms.values().filter(|vm| vm.judge.judgement().verdict == verdict).count();
        self.metrics.set_verdicts(verdicts.map(|verdict| (verdict_name(verdict), count(verdict))));
    }

    /// Returns the verdict about a VM for clients; `None` if the VM was not sampled.
    pub fn message(&self, id: ReservationId) -> Option<wire::Monitoring> {
        self.lock().get(&id).map(MonitoredVm::message)
    }
}

impl MonitoredVm {
    fn message(&self) -> wire::Monitoring {
        let judgement = self.judge.judgement();
        let share = self.accessed.as_ref().ok();
        let verdict = match judgement.verdict {
            Verdict::Fine => wire::MonitoringVerdict::Fine,
            Verdict::Watch => wire::MonitoringVerdict::Watch,
            Verdict::Migrate => wire::MonitoringVerdict::Migrate,
        };
        wire::Monitoring {
            verdict: verdict.into(),
            reason: reason_text(judgement.reason).into(),
            loss: judgement.loss,
            accessed_share: share.map(|share| share.estimate.get()),
            accessed_share_low: share.map(|share| share.low.get()),
            accessed_share_high: share.map(|share| share.high.get()),
            access_source: if share.is_some() { "vmm" } else { "none" }.into(),
            access_problem: self.accessed.as_ref().err().cloned().unwrap_or_default(),
            counter_source: if self.has_counters { "perf" } else { "none" }.into(),
            sampled_unix_ms: self.sampled_unix.0,
        }
    }
}

fn to_sample(sample: &ReportedSample, facts: LedgerFacts) -> Sample {
    let touched = sample.touched_pool.map(|touched| touched.get() as f64 / facts.pool.get() as f64);
    Sample {
        at: facts.now,
        accessed: sample.accessed.as_ref().ok().copied(),
        touched: touched.and_then(|share| Fraction::new(share.min(1.0)).ok()),
        counters: sample.counters.as_ref().ok().copied(),
        pool_loads: sample.pool_loads,
    }
}

fn to_estimate(judgement: &Judgement) -> SlowdownEstimate {
    SlowdownEstimate {
        loss: judgement.loss,
        severity: judgement.severity,
        samples: u32::try_from(judgement.samples).unwrap_or(u32::MAX),
    }
}

const fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Fine => "fine",
        Verdict::Watch => "watch",
        Verdict::Migrate => "migrate",
    }
}

const fn reason_text(reason: Reason) -> &'static str {
    match reason {
        Reason::NoEvidence => "the host reports neither accesses to the pool memory nor counters",
        Reason::IdlePool => "the VM does not access its pool memory",
        Reason::Insensitive => "pool memory slows the VM down by less than the margin",
        Reason::Suspected => "some samples indicate a slowdown beyond the margin",
        Reason::Sensitive => "the processor counters indicate a slowdown beyond the margin",
        Reason::AccessedPool => "the VM accesses much of its pool memory",
        Reason::Recovering => "the VM was slowed down beyond the margin in the last hour",
    }
}
