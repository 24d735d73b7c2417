//! Monitors running VMs (Pond, sections 4.5 B and 4.6). The agents report samples, and a
//! [`Judge`] per VM derives a verdict. VMs that pool memory slows down get a migration request in
//! the ledger, the most harmed VMs first, within the hourly budget. The counters of a VM before and after a
//! move to local memory show its true loss, which becomes training data.
//!
//! ```text
//!   agent ──sample──▶ record ──▶ Judge of the VM ──verdict──▶ round, every few seconds
//!                                                               │ request, confirm, withdraw
//!                                             scheduler ◀── migration requests of the ledger
//! ```

mod moved;
mod rehome;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use pool::{
    manager::Request,
    record::{Rehome, Reservation, SlowdownEstimate},
    rejection::Rejection,
};
use prediction::qos::{
    Judge, Judgement, Placement, Reason, Sample, Verdict, hourly_budget, select_most_harmed,
};
use proto::v1 as wire;
use service_files::log_limit::LogLimit;
use tokio::sync::watch;
use units::{
    Bytes, Fraction, HostId, Name, Ns, ReservationId, UnixMs,
    limits::{QOS_SAMPLE_INTERVAL_MIN, SLOWDOWN_REQUEST_TTL},
};

use self::{
    moved::{MovedVm, MovedVms},
    rehome::OwnerLimit,
};
use crate::{
    config::RehomePolicy,
    convert::{
        InvalidField,
        samples::{HostPressure, ReportedSample, SourcedShare},
    },
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
    moved: MovedVms,
    forecasts: Arc<Forecasts>,
    driver: Handle,
    metrics: Arc<Metrics>,
    rehome: watch::Receiver<RehomePolicy>,
    rehomes: Mutex<OwnerLimit>,
    log_limit: LogLimit,
}

/// Running VM with its latest sample. Its size is bounded.
#[derive(Debug)]
struct MonitoredVm {
    judge: Judge,
    /// Latest valid sample.
    latest: Option<LatestSample>,
    /// Rack time at which the request of this VM was made or confirmed last; `None` without request.
    confirmed_at: Option<Ns>,
    /// Rack time of the latest sample that was not judged because it covers a part of a move.
    moving_at: Option<Ns>,
    /// Budget of requests per hour, if it is used up and this VM waits for it.
    waits_for_budget: Option<u32>,
    /// Rack time of the latest attempt to move the pool memory to local memory.
    rehome_tried_at: Option<Ns>,
}

/// Parts of a sample that clients see.
#[derive(Debug)]
struct LatestSample {
    accessed: Result<SourcedShare, String>,
    /// Reason why there are no counters; `None` with counters.
    counter_problem: Option<String>,
    pressure: HostPressure,
    /// Version of the model of the loss that was serving.
    loss_version: Option<u32>,
    /// Name of the model that estimated the loss.
    loss_model: Option<String>,
    /// Rack time at which the sample arrived.
    at: Ns,
    /// Wall-clock time at which the sample arrived.
    unix: UnixMs,
}

/// Where the pool memory of a sampled VM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolMemory {
    /// On the pool. If a move to local memory has failed, `moved_until` is the rack time of the failure.
    OnPool {
        /// Size of the pool memory.
        pool: Bytes,
        /// Rack time at which the latest move failed.
        moved_until: Option<Ns>,
    },
    /// It is being moved to local memory. The copy itself slows the VM down.
    Moving,
    /// It was moved to local memory.
    Moved,
}

impl PoolMemory {
    /// Returns the state of an active VM's pool memory. `None` if the VM never had pool memory.
    fn of(reservation: &Reservation) -> Option<Self> {
        match &reservation.rehome {
            Rehome::Moving { .. } | Rehome::Cancelling { .. } => Some(Self::Moving),
            Rehome::Done { .. } => Some(Self::Moved),
            rehome @ (Rehome::None | Rehome::Failed { .. }) => {
                let moved_until = if let Rehome::Failed { at, .. } = rehome { Some(*at) } else { None };
                let pool = reservation.pool();
                (pool > Bytes::ZERO).then_some(Self::OnPool { pool, moved_until })
            }
        }
    }
}

impl Monitor {
    /// Starts a monitor without VMs. It runs until the manager stops.
    pub fn start(
        forecasts: Arc<Forecasts>,
        driver: Handle,
        metrics: Arc<Metrics>,
        rehome: watch::Receiver<RehomePolicy>,
    ) -> Arc<Self> {
        let (vms, moved, rehomes, log_limit) = Default::default();
        let monitor = Arc::new(Self { vms, moved, forecasts, driver, metrics, rehome, rehomes, log_limit });
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
            let (states, now, wall) = self.driver.read(|manager, when| {
                let state = |sample: &ReportedSample| {
                    let reservation = manager.durable().reservation(sample.reservation)?;
                    let is_here = reservation.is_active() && reservation.host == host;
                    PoolMemory::of(reservation).filter(|_| is_here)
                };
                (chunk.iter().map(state).collect::<Vec<_>>(), when.now, when.wall)
            })?;
            for (sample, state) in chunk.iter().zip(states) {
                match state {
                    None => self.drop_sample(name, "unknown_vm", &sample.reservation.to_string()),
                    Some(PoolMemory::OnPool { pool, moved_until }) => {
                        self.judge(name, sample, pool, moved_until, (now, wall));
                    }
                    Some(PoolMemory::Moving) => {
                        if let Some(vm) = self.lock().get_mut(&sample.reservation) {
                            vm.moving_at = Some(now);
                        }
                    }
                    Some(PoolMemory::Moved) => {
                        self.metrics.vm_samples.inc();
                        if let Ok(counters) = &sample.counters {
                            self.moved.observe(sample.reservation, counters, now);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn judge(
        &self,
        host: &Name,
        sample: &ReportedSample,
        pool: Bytes,
        moved_until: Option<Ns>,
        (now, wall): (Ns, UnixMs),
    ) {
        let is_pool_only = || self.forecasts.is_pool_only(sample.reservation);
        let placement = || if is_pool_only() { Placement::EntirelyOnPool } else { Placement::Split };
        let mut vms = self.lock();
        let vm = vms.entry(sample.reservation).or_insert_with(|| MonitoredVm {
            judge: Judge::new(placement()),
            latest: None,
            confirmed_at: None,
            moving_at: None,
            waits_for_budget: None,
            rehome_tried_at: None,
        });
        if vm.latest.as_ref().is_some_and(|latest| now.since(latest.at) < QOS_SAMPLE_INTERVAL_MIN) {
            return self.drop_sample(host, "too_frequent", &sample.reservation.to_string());
        }
        if moved_until > vm.sampled_at() {
            vm.moving_at = Some(now);
            return; // the sample covers a part of the move, which has failed
        }
        let before = vm.judge.judgement().verdict;
        let loss_model = self.forecasts.loss_model();
        let loss_version = loss_model.as_ref().map(|serving| serving.version);
        if vm.latest.as_ref().is_some_and(|latest| latest.loss_version != loss_version) {
            vm.judge.forget_harm();
        }
        if let Some(ratio) = sample.latency_ratio {
            vm.judge.set_latency_ratio(ratio);
        }
        let model = loss_model.as_ref().map(|serving| serving.model.as_ref());
        match vm.judge.observe(&to_sample(sample, pool, now), model, now) {
            Err(error) => self.drop_sample(host, "invalid", &error.to_string()),
            Ok(judgement) => {
                self.metrics.vm_samples.inc();
                vm.latest = Some(LatestSample {
                    accessed: sample.accessed.clone(),
                    counter_problem: sample.counters.as_ref().err().cloned(),
                    pressure: sample.pressure,
                    loss_version,
                    loss_model: judgement.loss.and(loss_model.as_ref()).map(ToString::to_string),
                    at: now,
                    unix: wall,
                });
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
        self.record_measured_losses().await?;
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
        let mut waiting = BTreeSet::new();
        for id in select_most_harmed(harmed.iter().map(|(id, e)| (*id, e.severity)), harmed.len()) {
            let estimate = harmed[&id];
            if !waiting.is_empty() && !requested.contains(&id) {
                waiting.insert(id);
                continue;
            }
            let request = Request::RequestSlowdownMigration { reservation: id, estimate, max_per_hour };
            match self.driver.request(request).await {
                Ok(_) => self.set_confirmed(id, Some(now)),
                Err(DriverError::Rejection(Rejection::SlowdownBudgetExhausted { .. })) => {
                    waiting.insert(id);
                }
                // The reservation has just ended.
                Err(DriverError::Rejection(
                    Rejection::NoSuchReservation(_) | Rejection::WrongState { .. },
                )) => {}
                Err(error) => return Err(error),
            }
        }
        self.set_waiting(&waiting, max_per_hour);
        if *self.rehome.borrow() == RehomePolicy::Auto {
            self.rehome_harmed_vms(now).await?;
        }
        Ok(())
    }

    /// Records the losses of VMs that have been measured after their moves.
    async fn record_measured_losses(&self) -> Result<(), DriverError> {
        for (vm, loss) in self.moved.take_measured() {
            match self.forecasts.record_measured_loss(&vm.name, vm.program.clone(), loss.clone()).await {
                Ok(()) => {
                    let (slowdown, standard_error) = (loss.loss, loss.standard_error);
                    tracing::info!(vm = %vm.name, loss = slowdown, standard_error, "measured the loss of a VM by its move");
                }
                Err(DriverError::Stopping) => return Err(DriverError::Stopping),
                Err(error) => {
                    tracing::warn!(vm = %vm.name, error = units::chain(&error), "cannot record a measured loss");
                    self.moved.put_back(vm, loss);
                }
            }
        }
        Ok(())
    }

    fn set_confirmed(&self, id: ReservationId, at: Option<Ns>) {
        if let Some(vm) = self.lock().get_mut(&id) {
            vm.confirmed_at = at;
        }
    }

    /// Marks the VMs whose requests wait for the hourly budget.
    fn set_waiting(&self, waiting: &BTreeSet<ReservationId>, max_per_hour: u32) {
        let mut vms = self.lock();
        vms.iter_mut()
            .for_each(|(id, vm)| vm.waits_for_budget = waiting.contains(id).then_some(max_per_hour));
        self.metrics.requests_waiting.set(i64::try_from(waiting.len()).unwrap_or(i64::MAX));
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

    /// Returns the VMs that need a request or the confirmation of a request. A VM that has not been
    /// sampled recently is not confirmed, so that its request expires. A VM that is recovering gets no
    /// new request. `requested` are the VMs that have a request.
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
                && vm.is_sampled_within(CONFIRM_AFTER, now)
        });
        harmed.map(|(id, vm)| (*id, to_estimate(&vm.judge.judgement()))).collect()
    }

    /// Removes the VMs that have ended or have no pool memory. Begins the measurements of VMs that were
    /// moved.
    fn remove_ended_vms(&self) -> Result<(), DriverError> {
        let mut ids: Vec<ReservationId> = self.lock().keys().copied().collect();
        ids.extend(self.moved.ids());
        for chunk in ids.chunks(LOOKUP_CHUNK) {
            let states = self.driver.read(|manager, _| {
                let state = |id: &ReservationId| {
                    let reservation = manager.durable().reservation(*id).filter(|found| found.is_active());
                    (*id, reservation.and_then(|found| Some((PoolMemory::of(found)?, found.vm.clone()))))
                };
                chunk.iter().map(state).collect::<Vec<_>>()
            })?;
            let mut vms = self.lock();
            for (id, state) in states {
                match state {
                    Some((PoolMemory::OnPool { .. } | PoolMemory::Moving, _)) => {}
                    Some((PoolMemory::Moved, name)) => {
                        if let Some(vm) = vms.remove(&id) {
                            let program = self.forecasts.owner(id).unwrap_or_else(|| name.to_string());
                            self.moved.begin(id, MovedVm { name, program }, &vm.judge);
                        }
                    }
                    None => {
                        vms.remove(&id);
                        self.moved.remove(id);
                    }
                }
            }
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
        self.lock().get(&id).and_then(MonitoredVm::message)
    }
}

impl MonitoredVm {
    /// Returns the rack time of the latest sample, also if it was not judged because of a move.
    fn sampled_at(&self) -> Option<Ns> {
        self.latest.as_ref().map(|latest| latest.at).max(self.moving_at)
    }

    /// Returns whether the latest sample is at most `age` old at `now`.
    fn is_sampled_within(&self, age: Ns, now: Ns) -> bool {
        self.sampled_at().is_some_and(|at| now.since(at) < age)
    }

    fn reason(&self, reason: Reason) -> String {
        let text = reason_text(reason);
        match self.waits_for_budget {
            None => text.to_owned(),
            Some(max) => format!("{text}; no request yet: the budget of {max} per hour is used up"),
        }
    }

    fn message(&self) -> Option<wire::Monitoring> {
        let (judgement, latest) = (self.judge.judgement(), self.latest.as_ref()?);
        let accessed = latest.accessed.as_ref();
        let share = accessed.ok().map(|accessed| accessed.share);
        let verdict = match judgement.verdict {
            _ if judgement.reason == Reason::NoEvidence => wire::MonitoringVerdict::Unspecified,
            Verdict::Fine => wire::MonitoringVerdict::Fine,
            Verdict::Watch => wire::MonitoringVerdict::Watch,
            Verdict::Migrate => wire::MonitoringVerdict::Migrate,
        };
        let HostPressure { steal, memory_some, memory_full, major_faults_per_s } = latest.pressure;
        Some(wire::Monitoring {
            verdict: verdict.into(),
            reason: self.reason(judgement.reason),
            loss: judgement.loss,
            accessed_share: share.map(|share| share.estimate.get()),
            accessed_share_low: share.map(|share| share.low.get()),
            accessed_share_high: share.map(|share| share.high.get()),
            access_source: accessed.map_or("none", |accessed| accessed.source).into(),
            access_problem: accessed.err().cloned().unwrap_or_default(),
            counter_source: if latest.counter_problem.is_none() { "perf" } else { "none" }.into(),
            sampled_unix_ms: latest.unix.0,
            counter_problem: latest.counter_problem.clone().unwrap_or_default(),
            loss_model: latest.loss_model.clone().unwrap_or_default(),
            samples: u32::try_from(judgement.samples).unwrap_or(u32::MAX),
            steal_share: steal.map(Fraction::get),
            memory_stalled_some: memory_some.map(Fraction::get),
            memory_stalled_full: memory_full.map(Fraction::get),
            major_faults_per_s,
        })
    }
}

fn to_sample(sample: &ReportedSample, pool: Bytes, at: Ns) -> Sample {
    let touched = sample.touched_pool.map(|touched| touched.get() as f64 / pool.get() as f64);
    Sample {
        at,
        accessed: sample.accessed.as_ref().ok().map(|accessed| accessed.share),
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
        Reason::IdlePool => "the VM accesses or has touched almost none of its pool memory",
        Reason::Insensitive => "pool memory slows the VM down by less than the margin",
        Reason::FewAccesses => "the VM accesses a small part of its pool memory",
        Reason::Suspected => "some samples indicate a slowdown beyond the margin",
        Reason::Sensitive => "the processor counters indicate a slowdown beyond the margin",
        Reason::AccessedPool => "the VM accesses much of its pool memory",
        Reason::Recovering => "the VM was slowed down beyond the margin in the last hour",
    }
}
