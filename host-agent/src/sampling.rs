//! Samples running VMs with pool memory for the manager's monitor (Pond, section 4.5 B).
//!
//! The VMM `vmm-plugin` samples the accesses to the pool memory itself, see [`crate::vmm_client`].
//! For other VMMs, which have no such socket, DAMON of the kernel samples them, unless Symbiosis of
//! this host uses DAMON. Processor counters and signs of resource shortage are measured for all
//! VMMs, also after a move of the pool memory to local memory: the counters before and after the move
//! show how much pool memory slowed the VM down. Each sample names the source of its accesses, or the reason for their absence.

mod damon_thread;
mod measurements;

pub use self::{
    damon_thread::stop_damon_of_earlier_agent,
    measurements::{Measured, Measurements},
};

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use pool::{
    agent::{Agent, Process, VmRecord},
    protocol::Holding,
};
use proto::v1 as wire;
use tokio::{sync::Semaphore, task::JoinSet, time::MissedTickBehavior};
use units::{
    Ns, ReservationId,
    limits::{QOS_PROBLEM_BYTES_MAX, SAMPLES_AFTER_MOVE_MAX, VMM_CALLS_IN_FLIGHT_MAX, VMM_RESPONSE_TIMEOUT},
    truncated,
};

use self::damon_thread::{DamonInputs, DamonTarget, DamonThread};
use crate::{
    driver::Handle,
    host::{Host, damon::page_sampler::PageSample, latency::read_latency_ratio, sysfs::Sysfs},
    metrics::{Measurement, Metrics},
    outbox::SampleOutbox,
    usage_table::UsageTable,
    vmm_client::VmmClient,
};

/// VM to be sampled.
#[derive(Clone, Debug)]
struct Target {
    reservation: ReservationId,
    process: Process,
    /// Slices that the VM uses. A VM without slices was moved to local memory.
    slices: Vec<Holding>,
    control_socket: Option<PathBuf>,
}

/// Objects that the sampler needs.
#[derive(Debug)]
pub struct SamplingInputs {
    /// Interval between two samples of a VM.
    pub interval: Ns,
    /// Driver, which knows the running VMs.
    pub driver: Handle,
    /// Host with the files of the slices.
    pub host: Arc<dyn Host>,
    /// Touched memory of the VMs.
    pub usage: Arc<UsageTable>,
    /// Outbox of the samples.
    pub outbox: Arc<SampleOutbox>,
    /// Metrics that count failures.
    pub metrics: Arc<Metrics>,
    /// Root of sysfs.
    pub sys: &'static str,
    /// Runtime directory of the agent.
    pub runtime_dir: PathBuf,
    /// Boot id of this machine.
    pub boot_id: String,
    /// Function of the agent that uses DAMON, as a reason why VMs are not sampled by DAMON.
    pub damon_user: Option<&'static str>,
    /// Idle latency of the pool divided by the idle latency of local memory. `None` if the kernel's value
    /// is used.
    pub pool_latency_ratio: Option<f64>,
}

/// Samples all running VMs that have or had pool memory at an interval until the driver ends.
pub async fn sample_periodically(inputs: SamplingInputs) {
    let mut ticks = tokio::time::interval(inputs.interval.as_duration());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let SamplingInputs { driver, usage, outbox, .. } = &inputs;
    let mut sampler = Sampler::start(&inputs);
    loop {
        ticks.tick().await;
        let Ok(mut targets) = driver.inspect(targets).await else { return };
        sampler.drop_measured_moves(&mut targets);
        let samples = sampler.sample_all(targets, usage).await;
        if !samples.is_empty() {
            outbox.put(wire::VmSamples { samples });
        }
    }
}

fn targets(agent: &Agent) -> Vec<Target> {
    let target = |record: &VmRecord| Target {
        reservation: record.reservation,
        process: record.process.clone(),
        slices: record.used_slices().collect(),
        control_socket: record.control_socket.clone().map(PathBuf::from),
    };
    agent.live_records().filter(|record| is_sampled(record)).map(target).collect()
}

/// Returns whether a VM is sampled: it has pool memory, or had it before a move to local memory.
fn is_sampled(record: &VmRecord) -> bool {
    record.is_rehomed || record.used_slices().next().is_some()
}

/// Sources of the measurements.
#[derive(Debug)]
struct Sampler {
    /// Access sampling of VMs whose VMM has no control socket.
    damon: DamonThread,
    /// Measurements without help of the VMM. `None` after a panic of a measurement.
    measurements: Option<Measurements>,
    /// Number of samples of each VM that was moved to local memory.
    samples_after_move: BTreeMap<ReservationId, u32>,
    sys: Sysfs,
    pool_latency_ratio: Option<f64>,
    metrics: Arc<Metrics>,
}

/// Result of an interval of access sampling.
#[derive(Debug, PartialEq)]
struct Interval {
    length_ms: u64,
    accessed: Option<wire::AccessedPages>,
}

/// Result of access sampling: `None` if the interval has just begun, or the reason why accesses are
/// not observed.
type AccessResult = Result<Option<Interval>, String>;

impl Sampler {
    fn start(inputs: &SamplingInputs) -> Self {
        let damon = match inputs.damon_user {
            Some(user) => DamonThread::Unavailable(user),
            None => DamonThread::start(DamonInputs {
                host: Arc::clone(&inputs.host),
                sys: Path::new(inputs.sys),
                runtime_dir: &inputs.runtime_dir,
                boot_id: inputs.boot_id.clone(),
                metrics: Arc::clone(&inputs.metrics),
            }),
        };
        let metrics = Arc::clone(&inputs.metrics);
        let (sys, pool_latency_ratio) = (Sysfs::at(inputs.sys), inputs.pool_latency_ratio);
        let measurements = Some(Measurements::new(&sys, Arc::clone(&metrics)));
        let samples_after_move = BTreeMap::new();
        Self { damon, measurements, samples_after_move, sys, pool_latency_ratio, metrics }
    }

    /// Removes the VMs whose moves the manager has measured: their counters would use file descriptors
    /// until they end.
    fn drop_measured_moves(&mut self, targets: &mut Vec<Target>) {
        let earlier = std::mem::take(&mut self.samples_after_move);
        for target in targets.iter().filter(|target| target.slices.is_empty()) {
            let samples = earlier.get(&target.reservation).copied().unwrap_or(0);
            self.samples_after_move.insert(target.reservation, samples.saturating_add(1));
        }
        targets.retain(|target| {
            let samples = self.samples_after_move.get(&target.reservation);
            samples.is_none_or(|samples| *samples <= SAMPLES_AFTER_MOVE_MAX)
        });
    }

    /// Samples all VMs. A VM has no sample if the interval of its access sampling has just begun.
    async fn sample_all(&mut self, targets: Vec<Target>, usage: &UsageTable) -> Vec<wire::VmSample> {
        let processes = targets.iter().map(|target| (target.reservation, target.process.clone())).collect();
        let results = self.sample_accesses(targets).await;
        let is_due =
            |(id, result): &(ReservationId, AccessResult)| (!matches!(result, Ok(None))).then_some(*id);
        let mut measured = self.measure(processes, results.iter().filter_map(is_due).collect()).await;
        let latency_ratio = self.latency_ratio();
        let (mut samples, usage) = (Vec::new(), usage.all());
        for (reservation, result) in results {
            let Some(mut sample) = to_sample(result) else { continue };
            sample.reservation = reservation.to_string();
            let touched = usage.get(&reservation).and_then(|usage| usage.pool);
            sample.touched_pool_bytes = touched.map(units::Bytes::get);
            sample.latency_ratio = latency_ratio;
            match measured.remove(&reservation) {
                Some(measured) => measured.write_to(&mut sample),
                None => sample.counter_problem = "the measurement failed".to_owned(),
            }
            samples.push(sample);
        }
        samples
    }

    /// Returns the configured latency of the pool relative to local memory, or the kernel's. The kernel's
    /// is read for each sample, because the pool may have a node only while slices are online.
    fn latency_ratio(&self) -> Option<f64> {
        self.pool_latency_ratio.or_else(|| {
            read_latency_ratio(&self.sys).unwrap_or_else(|error| {
                tracing::debug!(error = units::chain(&error), "cannot read the latencies of memory nodes");
                None
            })
        })
    }

    /// Measures the VMs that are due without help of their VMMs, in a separate thread.
    async fn measure(
        &mut self,
        vms: Vec<(ReservationId, Process)>,
        due: BTreeSet<ReservationId>,
    ) -> BTreeMap<ReservationId, Measured> {
        let Some(mut measurements) = self.measurements.take() else { return BTreeMap::new() };
        let measuring = tokio::task::spawn_blocking(move || {
            let measured = measurements.sample(&vms, &due);
            (measurements, measured)
        });
        match measuring.await {
            Ok((measurements, measured)) => {
                self.measurements = Some(measurements);
                measured
            }
            Err(error) => {
                tracing::error!(%error, "cannot measure VMs; restart the agent");
                BTreeMap::new()
            }
        }
    }

    /// Returns the results of access sampling of all VMs.
    async fn sample_accesses(&mut self, targets: Vec<Target>) -> Vec<(ReservationId, AccessResult)> {
        let (targets, moved): (Vec<Target>, Vec<Target>) =
            targets.into_iter().partition(|target| !target.slices.is_empty());
        let (with_socket, others): (Vec<Target>, Vec<Target>) =
            targets.into_iter().partition(|target| target.control_socket.is_some());
        let no_pool_memory = || Err("the VM uses only local memory".to_owned());
        let mut results: Vec<(ReservationId, AccessResult)> =
            moved.iter().map(|target| (target.reservation, no_pool_memory())).collect();
        results
            .extend(others.iter().map(|target| (target.reservation, self.damon_result(target.reservation))));
        let to_damon_target = |target: Target| {
            (target.reservation, DamonTarget { process: target.process, slices: target.slices })
        };
        self.damon.set_targets(others.into_iter().map(to_damon_target).collect());
        results.extend(self.call_vmms(with_socket).await);
        results
    }

    fn damon_result(&self, reservation: ReservationId) -> AccessResult {
        let Some(result) = self.damon.take_result(reservation) else { return Ok(None) };
        let PageSample { sampled, accessed } = result?;
        let source = wire::AccessedPagesSource::Damon.into();
        let accessed = wire::AccessedPages { source, sampled_pages: sampled, accessed_pages: accessed };
        Ok(Some(Interval { length_ms: damon_thread::INTERVAL_MS, accessed: Some(accessed) }))
    }

    /// Calls VMMs, several at the same time.
    async fn call_vmms(&mut self, targets: Vec<Target>) -> Vec<(ReservationId, AccessResult)> {
        let permits = Arc::new(Semaphore::new(VMM_CALLS_IN_FLIGHT_MAX));
        let mut calls = JoinSet::new();
        for target in targets {
            let permits = Arc::clone(&permits);
            calls.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let reservation = target.reservation;
                let called = tokio::time::timeout(VMM_RESPONSE_TIMEOUT.as_duration(), call_vmm(target));
                let late = |_| Err(format!("the VMM did not reply within {VMM_RESPONSE_TIMEOUT}"));
                (reservation, called.await.unwrap_or_else(late))
            });
        }
        let mut results = Vec::new();
        while let Some(called) = calls.join_next().await {
            let Ok((reservation, result)) = called else { continue }; // a panicked call has no sample
            if result.is_err() {
                self.metrics.count_sampling_failure(Measurement::Accesses);
            }
            results.push((reservation, result));
        }
        results
    }
}

/// Samples the accesses of a VM. The connection is closed afterwards, so that a VMM cannot occupy the agent
/// with messages between two samples.
async fn call_vmm(target: Target) -> AccessResult {
    let path = target.control_socket.ok_or("the VMM has no control socket")?;
    let mut client = VmmClient::connect(path, target.process).await.map_err(|error| units::chain(&error))?;
    let response = client.sample_access().await.map_err(|error| units::chain(&error))?;
    Ok(response.interval_ms.map(|length_ms| Interval { length_ms, accessed: combine(&response.nodes) }))
}

/// Combines the results of all pool nodes of a VM, weighted by the sizes of the nodes. Returns `None`
/// if no node could be sampled, or if the reported numbers are invalid.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is between 0 and 1")]
fn combine(nodes: &[wire::NodeAccess]) -> Option<wire::AccessedPages> {
    let total: u64 = nodes.iter().try_fold(0_u64, |sum, node| sum.checked_add(node.bytes))?;
    let sampled: u32 = nodes.iter().try_fold(0_u32, |sum, node| sum.checked_add(node.sampled_pages))?;
    let is_valid =
        |node: &wire::NodeAccess| node.sampled_pages > 0 && node.accessed_pages <= node.sampled_pages;
    if total == 0 || !nodes.iter().all(is_valid) {
        return None;
    }
    let share = |node: &wire::NodeAccess| {
        let weight = node.bytes as f64 / total as f64;
        weight * f64::from(node.accessed_pages) / f64::from(node.sampled_pages)
    };
    let share: f64 = nodes.iter().map(share).sum();
    Some(wire::AccessedPages {
        source: wire::AccessedPagesSource::Vmm.into(),
        sampled_pages: sampled,
        accessed_pages: (share * f64::from(sampled)).round().min(f64::from(sampled)) as u32,
    })
}

/// Converts the result of access sampling to a sample without other measurements. Returns `None` if the interval
/// has just begun.
fn to_sample(result: AccessResult) -> Option<wire::VmSample> {
    let (interval_ms, accessed) = match result {
        Ok(None) => return None,
        Ok(Some(Interval { length_ms, accessed })) => (
            length_ms,
            accessed.ok_or_else(|| {
                "the VMM cannot sample this memory: it has moved the memory to local memory, or maps it privately or in pages of 1 GiB"
                    .to_owned()
            }),
        ),
        Err(problem) => (0, Err(truncated(problem, QOS_PROBLEM_BYTES_MAX))),
    };
    let sample = wire::VmSample { interval_ms, ..wire::VmSample::default() };
    Some(match accessed {
        Ok(accessed) => wire::VmSample { accessed: Some(accessed), ..sample },
        Err(access_problem) => wire::VmSample { access_problem, ..sample },
    })
}

#[cfg(test)]
mod tests {
    use pool::protocol::Handle;
    use units::{Bytes, Epoch, Name, SliceId};

    use super::*;
    use crate::host::process::identify_process;

    fn node(bytes: u64, accessed_pages: u32) -> wire::NodeAccess {
        wire::NodeAccess { node: 1, page_bytes: 4096, sampled_pages: 200, accessed_pages, bytes }
    }

    fn shares(nodes: &[wire::NodeAccess]) -> Option<(u32, u32)> {
        combine(nodes).map(|pages| (pages.accessed_pages, pages.sampled_pages))
    }

    #[test]
    fn vm_is_sampled_if_it_has_or_had_pool_memory() {
        let record = |slices: u32, is_rehomed| VmRecord {
            reservation: ReservationId(1),
            vm: Name::new("v").unwrap(),
            process: identify_process(std::process::id()).unwrap(),
            local: Bytes::gib(1),
            pinned: false,
            uid: None,
            slices: (0..slices)
                .map(|n| (Holding { slice: SliceId(n), epoch: Epoch(1) }, Handle::new("emc", "path")))
                .collect(),
            control_socket: None,
            is_rehomed,
        };
        let sampled = [(1, false), (0, false), (1, true), (0, true)]
            .map(|(slices, is_rehomed)| is_sampled(&record(slices, is_rehomed)));
        assert_eq!(sampled, [true, false, true, true]);
    }

    #[test]
    fn nodes_are_weighted_by_size() {
        assert_eq!(shares(&[node(1 << 30, 50)]), Some((50, 200)));
        assert_eq!(shares(&[node(3 << 30, 200), node(1 << 30, 0)]), Some((300, 400)));
        assert_eq!(shares(&[node(1 << 30, 200), node(1 << 30, 200)]), Some((400, 400)));
    }

    #[test]
    fn invalid_numbers_of_a_vmm_are_no_result() {
        let nothing_sampled = wire::NodeAccess { sampled_pages: 0, ..node(1, 0) };
        for nodes in [
            vec![],
            vec![node(1, 201)],
            vec![nothing_sampled],
            vec![node(0, 1)],
            vec![node(u64::MAX, 1), node(1, 1)],
            vec![wire::NodeAccess { sampled_pages: u32::MAX, ..node(1, 1) }, node(1, 1)],
        ] {
            assert_eq!(shares(&nodes), None, "{nodes:?}");
        }
    }

    #[test]
    fn sample_without_accesses_names_the_problem() {
        assert_eq!(to_sample(Ok(None)), None, "the interval has just begun");
        let failed = to_sample(Err("no socket".into())).unwrap();
        assert_eq!((failed.accessed, failed.access_problem.as_str()), (None, "no socket"));
        let unsampled = to_sample(Ok(Some(Interval { length_ms: 30, accessed: None }))).unwrap();
        assert_eq!((unsampled.interval_ms, unsampled.accessed), (30, None));
        assert!(!unsampled.access_problem.is_empty());
    }
}
