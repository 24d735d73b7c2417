//! Processor counters of running VMs: top-down categories, stalls by memory level, and cache misses
//! of the vCPU threads, counted by perf events. The manager defines the names of the counters.
//!
//! The events of a VM are opened at its first sample, and count until the VM ends. A sample is
//! derived from the counts since the previous sample. Perf multiplexes the event groups, so counts
//! are scaled by the time for which their group was counted. A sample without a trustworthy value is
//! an error, never a guess.

mod events;
mod perf;
mod processors;
mod threads;

pub use self::{
    events::{EncodedEvent, EventGroup},
    perf::PerfEvents,
    processors::CounterValues,
    threads::{VmThread, list_threads, vcpu_threads},
};

use std::{collections::BTreeMap, fmt, fs, io, time::Duration};

use pool::agent::Process;
use rustix::process::{Resource, getrlimit};
use units::{
    ReservationId,
    limits::{VM_COUNTER_DESCRIPTORS_MAX, VM_COUNTER_EVENTS_PER_THREAD_MAX, VM_COUNTER_THREADS_MAX},
};

use self::processors::{CounterPlan, GroupCounts};
use super::{
    process::{ProcessError, ProcessHandle},
    sysfs::{Sysfs, SysfsError},
};

/// File with the model of the processors.
const CPUINFO_FILE: &str = "/proc/cpuinfo";
/// Minimum fraction of the vCPUs' running time in which a group must have been counted. Below it,
/// the scaled counts are unreliable. Perf multiplexes at most four groups of this agent.
const RUNNING_FRACTION_MIN: f64 = 0.05;
/// Minimum running time of all vCPUs in an interval. The ratios of fewer events are unreliable.
const VCPU_TIME_MIN: Duration = Duration::from_millis(10);
/// Divisor of the limit on open files of this process that gives the limit of the counters, so that
/// counters never prevent other functions of the agent.
const OPEN_FILES_DIVISOR: u64 = 2;

/// Reason why a sample has no counters.
#[derive(Debug, thiserror::Error)]
pub enum VmCounterError {
    /// The processor has no suitable counters.
    #[error("no processor counters: {0}")]
    Unsupported(&'static str),
    /// The events of the processor cannot be read from sysfs.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// The process of the VM cannot be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The pid belongs to no process, or to another process.
    #[error("process {pid} is not the process of the VM any more")]
    NotTheProcess {
        /// Registered pid.
        pid: u32,
    },
    /// The events have just been opened.
    #[error("counting has just begun")]
    JustBegun,
    /// The VM has other vCPU threads than in the previous sample.
    #[error("the vCPU threads have changed since the previous sample")]
    ThreadsChanged,
    /// The threads of the VM cannot be listed.
    #[error("cannot list the threads of process {pid}")]
    Threads {
        /// Registered pid.
        pid: u32,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// The VM has too many vCPU threads.
    #[error("the VM has {threads} vCPU threads: must be at most {VM_COUNTER_THREADS_MAX}")]
    TooManyThreads {
        /// Number of threads.
        threads: usize,
    },
    /// The counters of all VMs would need too many file descriptors.
    #[error("counters of all VMs use {used} file descriptors, this VM needs {needed}: must be at most {max}")]
    TooManyDescriptors {
        /// Descriptors of the other VMs.
        used: usize,
        /// Descriptors of this VM.
        needed: usize,
        /// Limit.
        max: usize,
    },
    /// Perf refused an event.
    #[error("perf refused to count")]
    Refused(#[source] io::Error),
    /// The counters cannot be read.
    #[error("cannot read counters")]
    Read(#[source] io::Error),
    /// A counter is lower than in the previous sample.
    #[error("counter {event} ran backwards")]
    Backwards {
        /// Name of the event, or `time`.
        event: &'static str,
    },
    /// The vCPUs ran for too short a time.
    #[error("the vCPUs ran for only {0:?} in the interval")]
    Idle(Duration),
    /// Other users of the counters left too little time to each group.
    #[error("other users of the counters left less than {} % of the time", RUNNING_FRACTION_MIN * 100.0)]
    Multiplexed,
}

impl VmCounterError {
    /// Returns whether the error is a failure, in contrast to a state that is expected in operation.
    pub const fn is_failure(&self) -> bool {
        !matches!(self, Self::Unsupported(_) | Self::JustBegun | Self::Idle(_) | Self::ThreadsChanged)
    }
}

/// Source of processor counters of threads.
pub trait CounterSource: fmt::Debug + Send {
    /// Opens groups of events of a thread, and starts to count.
    ///
    /// # Errors
    /// The kernel refuses an event, or the thread has ended.
    fn open(&self, thread: u32, groups: &[EventGroup]) -> io::Result<Box<dyn ThreadCounters>>;
}

/// Open counters of a thread. Dropping the value closes them.
pub trait ThreadCounters: fmt::Debug + Send {
    /// Reads the counts of each group since it was opened.
    ///
    /// # Errors
    /// The kernel rejects the read.
    fn read(&mut self) -> io::Result<Vec<GroupReading>>;
}

/// Counts of a group of events since the group was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupReading {
    /// Running time of the thread.
    pub enabled: Duration,
    /// Running time of the thread in which the group was counted: shorter if perf multiplexes the
    /// counters.
    pub running: Duration,
    /// Count of each event.
    pub counts: Vec<u64>,
}

/// Counters of all VMs of this machine.
#[derive(Debug)]
pub struct VmCounters {
    plan: Result<CounterPlan, VmCounterError>,
    source: Box<dyn CounterSource>,
    vms: BTreeMap<ReservationId, CountedVm>,
    descriptors_max: usize,
}

/// VM with open counters.
#[derive(Debug)]
struct CountedVm {
    process: Process,
    threads: BTreeMap<u32, CountedThread>,
}

#[derive(Debug)]
struct CountedThread {
    counters: Box<dyn ThreadCounters>,
    previous: Vec<GroupReading>,
}

/// Sums over all threads of a VM for one group of events, in one interval.
#[derive(Clone, Debug)]
struct GroupSum {
    enabled: Duration,
    running: Duration,
    /// Counts, scaled by the multiplexing of each thread.
    counts: Vec<f64>,
}

impl VmCounters {
    /// Chooses the events of this machine's processors. A machine without suitable events is not an
    /// error: each sample then has the reason.
    pub fn new(sys: &Sysfs, source: Box<dyn CounterSource>) -> Self {
        let cpuinfo = fs::read_to_string(CPUINFO_FILE).unwrap_or_default();
        Self::with_cpuinfo(sys, &cpuinfo, source)
    }

    fn with_cpuinfo(sys: &Sysfs, cpuinfo: &str, source: Box<dyn CounterSource>) -> Self {
        let plan = CounterPlan::find(sys, cpuinfo);
        debug_assert!(
            plan.as_ref().map_or(0, CounterPlan::event_count) <= VM_COUNTER_EVENTS_PER_THREAD_MAX,
            "the events of a processor are bounded"
        );
        let open_files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / OPEN_FILES_DIVISOR;
        let open_files = usize::try_from(open_files).unwrap_or(usize::MAX);
        let descriptors_max = VM_COUNTER_DESCRIPTORS_MAX.min(open_files);
        Self { plan, source, vms: BTreeMap::new(), descriptors_max }
    }

    /// Closes the counters of VMs that do not run any more.
    pub fn retain(&mut self, mut is_running: impl FnMut(ReservationId) -> bool) {
        self.vms.retain(|id, _| is_running(*id));
    }

    /// Returns the counters of a VM since its previous sample. The first sample of a VM opens its
    /// counters.
    ///
    /// # Errors
    /// [`VmCounterError`]. After an error other than a short running time, the next sample opens the
    /// counters again.
    pub fn sample(&mut self, vm: ReservationId, process: &Process) -> Result<CounterValues, VmCounterError> {
        let plan = match &self.plan {
            Ok(plan) => plan.clone(),
            Err(VmCounterError::Unsupported(reason)) => return Err(VmCounterError::Unsupported(reason)),
            Err(_) => {
                return Err(VmCounterError::Unsupported("sysfs does not describe the processor's events"));
            }
        };
        let counted = self.vms.remove(&vm); // a VM with an error stays removed
        check_identity(process)?;
        let threads =
            vcpu_threads(process.pid).map_err(|error| VmCounterError::Threads { pid: process.pid, error })?;
        let is_same = |counted: &CountedVm| {
            counted.process == *process && counted.threads.keys().copied().eq(threads.iter().copied())
        };
        match counted {
            Some(mut counted) if is_same(&counted) => {
                let sums = counted.sum_since_previous(&plan)?;
                self.vms.insert(vm, counted);
                compute(&plan, &sums)
            }
            other => {
                let error =
                    if other.is_some() { VmCounterError::ThreadsChanged } else { VmCounterError::JustBegun };
                drop(other); // its descriptors are free before new ones are opened
                let counted = self.open(process, &threads, &plan)?;
                self.vms.insert(vm, counted);
                Err(error)
            }
        }
    }

    fn open(
        &self,
        process: &Process,
        threads: &[u32],
        plan: &CounterPlan,
    ) -> Result<CountedVm, VmCounterError> {
        if threads.len() > VM_COUNTER_THREADS_MAX {
            return Err(VmCounterError::TooManyThreads { threads: threads.len() });
        }
        let used = self.vms.values().map(|counted| counted.threads.len() * plan.event_count()).sum();
        let (needed, max) = (threads.len() * plan.event_count(), self.descriptors_max);
        if used + needed > max {
            return Err(VmCounterError::TooManyDescriptors { used, needed, max });
        }
        let open = |thread: &u32| {
            let mut counters = self.source.open(*thread, &plan.groups).map_err(VmCounterError::Refused)?;
            let previous = counters.read().map_err(VmCounterError::Read)?;
            Ok((*thread, CountedThread { counters, previous }))
        };
        let threads = threads.iter().map(open).collect::<Result<_, VmCounterError>>()?;
        // The threads belong to the VM if its process still runs.
        check_identity(process)?;
        Ok(CountedVm { process: process.clone(), threads })
    }
}

impl CountedVm {
    /// Reads the counters, and returns the sum of each group since the previous sample.
    fn sum_since_previous(&mut self, plan: &CounterPlan) -> Result<Vec<GroupSum>, VmCounterError> {
        let empty = |group: &EventGroup| GroupSum {
            enabled: Duration::ZERO,
            running: Duration::ZERO,
            counts: vec![0.0; group.events.len()],
        };
        let mut sums: Vec<GroupSum> = plan.groups.iter().map(empty).collect();
        for thread in self.threads.values_mut() {
            let now = thread.counters.read().map_err(VmCounterError::Read)?;
            for (at, group) in plan.groups.iter().enumerate() {
                let pair = now.get(at).zip(thread.previous.get(at));
                let (now, previous) =
                    pair.ok_or_else(|| VmCounterError::Read(io::Error::other("no counts")))?;
                sums[at].add(group, previous, now)?;
            }
            thread.previous = now;
        }
        Ok(sums)
    }
}

impl GroupSum {
    /// Adds the counts of a thread between two readings, scaled to the running time of the thread.
    fn add(
        &mut self,
        group: &EventGroup,
        previous: &GroupReading,
        now: &GroupReading,
    ) -> Result<(), VmCounterError> {
        let since = |now: Duration, previous| {
            now.checked_sub(previous).ok_or(VmCounterError::Backwards { event: "time" })
        };
        let enabled = since(now.enabled, previous.enabled)?;
        let running = since(now.running, previous.running)?;
        if running > enabled || now.counts.len() != group.events.len() {
            return Err(VmCounterError::Read(io::Error::other("invalid counts of an event group")));
        }
        let scale = if running.is_zero() { 0.0 } else { enabled.div_duration_f64(running) };
        for (at, event) in group.events.iter().enumerate() {
            let earlier = previous.counts.get(at).copied().unwrap_or(0);
            let count = now.counts[at].checked_sub(earlier);
            let count = count.ok_or(VmCounterError::Backwards { event: event.name })?;
            self.counts[at] += count as f64 * scale;
        }
        self.enabled += enabled;
        self.running += running;
        Ok(())
    }

    /// Returns the counts, unless the group was counted in too small a part of the running time.
    fn reliable_counts(&self) -> GroupCounts {
        let is_reliable = self.running.div_duration_f64(self.enabled) >= RUNNING_FRACTION_MIN;
        is_reliable.then(|| self.counts.clone())
    }
}

fn compute(plan: &CounterPlan, sums: &[GroupSum]) -> Result<CounterValues, VmCounterError> {
    let enabled = sums.iter().map(|sum| sum.enabled).max().unwrap_or_default();
    if enabled < VCPU_TIME_MIN {
        return Err(VmCounterError::Idle(enabled));
    }
    let counts: Vec<GroupCounts> = sums.iter().map(GroupSum::reliable_counts).collect();
    let values = plan.compute(&counts);
    if values.values.is_empty() { Err(VmCounterError::Multiplexed) } else { Ok(values) }
}

/// Checks that a registered process still runs, and that its pid was not reused.
fn check_identity(process: &Process) -> Result<(), VmCounterError> {
    match ProcessHandle::open(process)? {
        Some(_) => Ok(()),
        None => Err(VmCounterError::NotTheProcess { pid: process.pid }),
    }
}

#[cfg(test)]
mod tests;
