//! Thread that samples the accesses of VMs by DAMON, one VM after another. The thread is separate
//! because a result takes several seconds.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use pool::{agent::Process, protocol::Holding};
use units::{
    ReservationId,
    limits::{DAMON_WINDOW, QOS_PROBLEM_BYTES_MAX},
    truncated,
};

use crate::{
    host::{
        Host,
        damon::{
            Damon,
            page_sampler::{PageSample, PageSampler, PageSamplerError},
        },
    },
    metrics::{Measurement, Metrics},
    symbiosis::PersistedShares,
};

/// Time before the next attempt if there is no VM to sample, or after an error.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// VM to be sampled.
#[derive(Clone, Debug)]
pub(super) struct DamonTarget {
    pub process: Process,
    pub slices: Vec<Holding>,
}

/// Stops DAMON if an earlier agent of this boot ended while it used DAMON. The agent calls this if it does
/// not use DAMON itself. Errors are logged.
pub fn stop_damon_of_earlier_agent(sys: &Path, runtime_dir: &Path, boot_id: &str) {
    let marker = PersistedShares::at(runtime_dir);
    if !marker.was_monitoring(boot_id) {
        return;
    }
    match Damon::at(sys, true).stop() {
        Ok(()) => marker.set_monitoring(None),
        Err(error) => tracing::warn!(error = units::chain(&error), "cannot stop DAMON of an earlier agent"),
    }
}

/// Objects that the thread needs.
#[derive(Debug)]
pub(super) struct DamonInputs<'a> {
    /// Host with the files of the slices.
    pub host: Arc<dyn Host>,
    /// Root of sysfs.
    pub sys: &'a Path,
    /// Runtime directory, which stores whether an agent uses DAMON.
    pub runtime_dir: &'a Path,
    /// Boot id of this machine.
    pub boot_id: String,
    /// Metrics that count failures.
    pub metrics: Arc<Metrics>,
}

/// Access sampling by DAMON. Dropping the value stops the thread.
#[derive(Debug)]
pub(super) enum DamonThread {
    /// The thread runs.
    Running {
        /// Targets and results.
        shared: Arc<Mutex<Shared>>,
        /// Dropped to stop the thread.
        _stop: mpsc::Sender<()>,
    },
    /// DAMON cannot be used, for this reason.
    Unavailable(&'static str),
}

#[derive(Debug, Default)]
pub(super) struct Shared {
    targets: BTreeMap<ReservationId, DamonTarget>,
    results: BTreeMap<ReservationId, Result<PageSample, String>>,
    /// Whether the thread has panicked.
    has_failed: bool,
}

impl DamonThread {
    /// Starts the thread.
    pub fn start(inputs: DamonInputs<'_>) -> Self {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let marker = PersistedShares::at(inputs.runtime_dir);
        let is_own = marker.was_monitoring(&inputs.boot_id);
        let worker = Worker {
            shared: Arc::clone(&shared),
            host: inputs.host,
            sampler: PageSampler::at(inputs.sys, is_own),
            marker,
            boot_id: inputs.boot_id,
            metrics: inputs.metrics,
        };
        let (stop, stopped) = mpsc::channel();
        let thread = tokio::task::spawn_blocking(move || worker.run(&stopped));
        let observed = Arc::clone(&shared);
        tokio::spawn(async move {
            if let Err(error) = thread.await {
                tracing::error!(%error, "access sampling by DAMON ended unexpectedly; restart the agent");
                lock(&observed).has_failed = true;
            }
        });
        Self::Running { shared, _stop: stop }
    }

    /// Replaces the VMs to be sampled. Results of other VMs are dropped.
    pub fn set_targets(&self, targets: BTreeMap<ReservationId, DamonTarget>) {
        if let Self::Running { shared, .. } = self {
            let mut shared = lock(shared);
            shared.results.retain(|id, _| targets.contains_key(id));
            shared.targets = targets;
        }
    }

    /// Takes the result of a VM; `None` if the VM was not sampled since the previous call. An error
    /// remains until the VM is sampled again.
    pub fn take_result(&self, id: ReservationId) -> Option<Result<PageSample, String>> {
        let shared = match self {
            Self::Unavailable(reason) => return Some(Err((*reason).to_owned())),
            Self::Running { shared, .. } => shared,
        };
        let mut shared = lock(shared);
        if shared.has_failed {
            return Some(Err("access sampling by DAMON ended unexpectedly".to_owned()));
        }
        let result = shared.results.get(&id).cloned();
        if matches!(result, Some(Ok(_))) {
            shared.results.remove(&id);
        }
        result
    }
}

/// Locks the targets and results. A poisoned value is consistent, because each change is one
/// operation.
fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// State of the thread.
struct Worker {
    shared: Arc<Mutex<Shared>>,
    host: Arc<dyn Host>,
    sampler: PageSampler,
    marker: PersistedShares,
    boot_id: String,
    metrics: Arc<Metrics>,
}

impl Worker {
    /// Samples the VMs in turn until the sender of `stopped` is dropped.
    fn run(mut self, stopped: &mpsc::Receiver<()>) {
        if self.marker.was_monitoring(&self.boot_id) {
            self.stop(); // an earlier agent ended while it used DAMON
        }
        let (mut last, mut delay) = (None, Duration::ZERO);
        while stopped.recv_timeout(delay) == Err(mpsc::RecvTimeoutError::Timeout) {
            let Some((id, target)) = self.next_target(last) else {
                delay = RETRY_DELAY;
                continue;
            };
            last = Some(id);
            let Some(result) = self.sample(&target, stopped) else { break };
            delay = if result.is_ok() { Duration::ZERO } else { RETRY_DELAY };
            self.store_result(id, result);
        }
    }

    /// Stops DAMON, which this agent or an earlier one has started.
    fn stop(&mut self) {
        match self.sampler.stop() {
            Ok(()) => self.marker.set_monitoring(None),
            Err(error) => tracing::warn!(error = units::chain(&error), "cannot stop DAMON"),
        }
    }

    /// Returns the VM after `last` in the order of reservations, or the first VM.
    fn next_target(&self, last: Option<ReservationId>) -> Option<(ReservationId, DamonTarget)> {
        let shared = lock(&self.shared);
        let mut targets = shared.targets.iter();
        let next = targets.clone().find(|(id, _)| last.is_none_or(|last| **id > last));
        next.or_else(|| targets.next()).map(|(id, target)| (*id, target.clone()))
    }

    /// Samples a VM; `None` if the thread has to stop.
    fn sample(
        &mut self,
        target: &DamonTarget,
        stopped: &mpsc::Receiver<()>,
    ) -> Option<Result<PageSample, String>> {
        let files = match self.host.observable_files(&target.slices) {
            Ok(files) => files,
            Err(reason) => return Some(Err(reason.to_owned())),
        };
        // DAMON of another program must not be marked as that of an agent.
        if let Err(error) = self.sampler.check_available() {
            return Some(Err(units::chain(&error)));
        }
        self.marker.set_monitoring(Some(&self.boot_id));
        let started = self.sampler.start(&target.process, &files);
        let result = match started {
            Err(error) => Err(error),
            Ok(started) => {
                let rest = PageSampler::wait_time().saturating_sub(started.elapsed());
                if stopped.recv_timeout(rest) != Err(mpsc::RecvTimeoutError::Timeout) {
                    self.stop();
                    return None;
                }
                self.sampler.finish(started)
            }
        };
        if !self.sampler.is_running() {
            self.marker.set_monitoring(None);
        }
        Some(result.map_err(|error| {
            let is_failure = !matches!(error, PageSamplerError::Damon(_));
            if is_failure {
                self.metrics.count_sampling_failure(Measurement::Accesses);
            }
            units::chain(&error)
        }))
    }

    fn store_result(&self, id: ReservationId, result: Result<PageSample, String>) {
        let mut shared = lock(&self.shared);
        if shared.targets.contains_key(&id) {
            let result = result.map_err(|problem| truncated(problem, QOS_PROBLEM_BYTES_MAX));
            shared.results.insert(id, result);
        }
    }
}

/// Length of the interval of a result, in milliseconds.
pub(super) const INTERVAL_MS: u64 = DAMON_WINDOW.as_ms();

#[cfg(test)]
mod tests {
    use units::Name;

    use super::*;
    use crate::host::{damon, fake::Fake, process::identify_process};

    fn target() -> DamonTarget {
        DamonTarget { process: identify_process(std::process::id()).unwrap(), slices: Vec::new() }
    }

    fn worker(folder: &Path) -> Worker {
        Worker {
            shared: Arc::default(),
            host: Arc::new(Fake::default()),
            sampler: PageSampler::at(folder, false),
            marker: PersistedShares::at(folder),
            boot_id: "boot".to_owned(),
            metrics: Arc::new(Metrics::new(&Name::new("h0").unwrap(), "fake")),
        }
    }

    fn running(worker: &Worker) -> DamonThread {
        DamonThread::Running { shared: Arc::clone(&worker.shared), _stop: mpsc::channel().0 }
    }

    #[test]
    fn vms_are_sampled_in_turn() {
        let folder = tempfile::tempdir().unwrap();
        let worker = worker(folder.path());
        let thread = running(&worker);
        assert!(worker.next_target(None).is_none());
        let ids = [1, 3, 7].map(ReservationId);
        thread.set_targets(ids.map(|id| (id, target())).into());
        let mut last = None;
        let order: Vec<_> = (0..7)
            .map(|_| {
                last = worker.next_target(last).map(|(id, _)| id);
                last.unwrap().0
            })
            .collect();
        assert_eq!(order, [1, 3, 7, 1, 3, 7, 1]);
        // The VM that was sampled last has ended.
        thread.set_targets([(ids[0], target()), (ids[2], target())].into());
        assert_eq!(worker.next_target(Some(ids[1])).unwrap().0, ids[2]);
    }

    #[test]
    fn result_is_taken_once_and_error_remains() {
        let folder = tempfile::tempdir().unwrap();
        let worker = worker(folder.path());
        let thread = running(&worker);
        let id = ReservationId(1);
        let sample = PageSample { sampled: 200, accessed: 3 };
        worker.store_result(id, Ok(sample));
        assert_eq!(thread.take_result(id), None, "the VM is no target");
        thread.set_targets([(id, target())].into());
        worker.store_result(id, Ok(sample));
        assert_eq!((thread.take_result(id), thread.take_result(id)), (Some(Ok(sample)), None));
        worker.store_result(id, Err("in use".to_owned()));
        assert_eq!(thread.take_result(id), Some(Err("in use".to_owned())));
        assert_eq!(thread.take_result(id), Some(Err("in use".to_owned())));
        thread.set_targets(BTreeMap::new());
        assert_eq!(thread.take_result(id), None);
        let unavailable = DamonThread::Unavailable("Symbiosis uses DAMON");
        assert_eq!(unavailable.take_result(id), Some(Err("Symbiosis uses DAMON".to_owned())));
    }

    #[test]
    fn reason_of_the_backend_is_the_result() {
        let folder = tempfile::tempdir().unwrap();
        let mut worker = worker(folder.path());
        let (_stop, stopped) = mpsc::channel();
        let result = worker.sample(&target(), &stopped);
        assert_eq!(result, Some(Err("the fake host has no files".to_owned())));
        assert!(!worker.marker.was_monitoring("boot"), "DAMON was not used");
    }

    #[test]
    fn failed_thread_is_the_result() {
        let folder = tempfile::tempdir().unwrap();
        let worker = worker(folder.path());
        let thread = running(&worker);
        lock(&worker.shared).has_failed = true;
        let error = "access sampling by DAMON ended unexpectedly".to_owned();
        assert_eq!(thread.take_result(ReservationId(1)), Some(Err(error)));
    }

    #[test]
    fn damon_of_an_earlier_agent_is_stopped_and_that_of_others_is_not() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon::fake::damon(1, &[]));
        let kdamonds = || sys.sysfs.number("kernel/mm/damon/admin/kdamonds/nr_kdamonds").unwrap();
        sys.files("kernel/mm/damon/admin/kdamonds", &[("nr_kdamonds", "1")]);
        let marker = PersistedShares::at(folder.path());
        let stop = || stop_damon_of_earlier_agent(&sys.path(""), folder.path(), "boot");
        stop();
        assert_eq!(kdamonds(), 1, "another program uses DAMON");
        let mut worker = Worker { sampler: PageSampler::at(&sys.path(""), false), ..worker(folder.path()) };
        assert_eq!(worker.sampler.check_available().unwrap_err().to_string(), "another program uses DAMON");
        let (_stop, stopped) = mpsc::channel();
        worker.sample(&target(), &stopped);
        assert!(!marker.was_monitoring("boot"), "another program uses DAMON");
        marker.set_monitoring(Some("boot"));
        stop();
        assert_eq!((kdamonds(), marker.was_monitoring("boot")), (0, false));
    }

    #[test]
    fn stopped_thread_takes_no_further_sample() {
        let folder = tempfile::tempdir().unwrap();
        let worker = worker(folder.path());
        let thread = running(&worker);
        let shared = Arc::clone(&worker.shared);
        thread.set_targets([(ReservationId(1), target())].into());
        let (stop, stopped) = mpsc::channel();
        drop(stop);
        worker.run(&stopped);
        assert!(lock(&shared).results.is_empty());
    }
}
