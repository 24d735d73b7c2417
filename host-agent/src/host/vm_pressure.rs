//! Signs of resource shortage of running VMs, from the kernel's accounting: time for which vCPUs
//! waited for a processor, memory pressure of the VM's cgroup, and major page faults. They explain
//! slowdowns that pool memory does not cause.

use std::{collections::BTreeMap, io, time::Duration};

use pool::agent::Process;
use rustix::io::Errno;
use units::ReservationId;

use super::{
    cgroup::find_unified_hierarchy,
    process::{ProcessError, ProcessHandle},
    sysfs::{Sysfs, SysfsError},
    vm_counters::vcpu_threads,
};

/// Root of the kernel's process information.
const PROC: &str = "/proc";
/// Field of /proc/PID/stat with the number of major faults, counted from the state, which is field
/// 3 (proc_pid_stat(5)).
const MAJOR_FAULTS_INDEX: usize = 12 - 3;
/// Longest delay of the kernel's accounting: a wait counts when it ends, also if it began before the
/// interval. An account that grew by more than the interval and this delay is invalid.
const ACCOUNTING_DELAY_MAX: Duration = Duration::from_secs(1);

/// Reason why the accounting of a VM is not available.
#[derive(Debug, thiserror::Error)]
pub enum VmPressureError {
    /// The process of the VM cannot be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The pid belongs to no process, or to another process.
    #[error("process {pid} is not the process of the VM any more")]
    NotTheProcess {
        /// Registered pid.
        pid: u32,
    },
    /// The vCPU threads cannot be listed.
    #[error("cannot list the threads of process {pid}")]
    Threads {
        /// Registered pid.
        pid: u32,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// A file of the kernel cannot be read or parsed.
    #[error(transparent)]
    Unreadable(#[from] SysfsError),
    /// An account of the kernel decreased, or grew faster than time.
    #[error("{account} of process {pid} decreased, or grew faster than time")]
    Implausible {
        /// Name of the account.
        account: &'static str,
        /// Registered pid.
        pid: u32,
    },
}

/// Signs of resource shortage of a VM in an interval. `None` means not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VmPressure {
    /// Fraction of the interval in which a vCPU waited for a processor, on average over the vCPUs
    /// (steal), 0 to 1.
    pub steal: Option<f64>,
    /// Fraction of the interval in which at least one task of the VM's cgroup was stalled on memory,
    /// 0 to 1.
    pub memory_some: Option<f64>,
    /// Fraction of the interval in which all tasks of the VM's cgroup were stalled on memory at the
    /// same time, 0 to 1.
    pub memory_full: Option<f64>,
    /// Page faults of the VM's process that required I/O, per second.
    pub major_faults_per_s: Option<f64>,
}

/// Reader of the kernel's accounting of VMs.
#[derive(Debug)]
pub struct VmPressureReader {
    proc: Sysfs,
    cgroups: Option<Sysfs>,
    vms: BTreeMap<ReservationId, Accounts>,
}

/// Accounts of a VM at one time, since the start of its process.
#[derive(Clone, Debug, PartialEq)]
struct Accounts {
    process: Process,
    at: Duration,
    /// Time for which each vCPU thread waited for a processor while it was runnable.
    waited: BTreeMap<u32, Duration>,
    /// Cgroup with the time for which some task and all tasks were stalled on memory.
    stalled: Option<(String, [Duration; 2])>,
    major_faults: u64,
}

impl VmPressureReader {
    /// Creates a reader for this machine.
    pub fn new() -> Self {
        Self { proc: Sysfs::at(PROC), cgroups: find_unified_hierarchy(), vms: BTreeMap::new() }
    }

    /// Forgets VMs that do not run any more.
    pub fn retain(&mut self, mut is_running: impl FnMut(ReservationId) -> bool) {
        self.vms.retain(|id, _| is_running(*id));
    }

    /// Returns the signs of a VM since its previous sample; `None` for the first sample. Steal is `None`
    /// if the VM has other vCPU threads than before. `now` is the time of a monotonic clock.
    ///
    /// # Errors
    /// [`VmPressureError`]. The next sample is then a first sample.
    pub fn sample(
        &mut self,
        vm: ReservationId,
        process: &Process,
        now: Duration,
    ) -> Result<Option<VmPressure>, VmPressureError> {
        let earlier = self.vms.remove(&vm);
        if ProcessHandle::open(process)?.is_none() {
            return Err(VmPressureError::NotTheProcess { pid: process.pid });
        }
        let accounts = self.read(process, now)?;
        let earlier = earlier.filter(|earlier| accounts.is_comparable(earlier));
        let pressure = earlier.map(|earlier| accounts.since(&earlier)).transpose()?;
        self.vms.insert(vm, accounts);
        Ok(pressure)
    }

    fn read(&self, process: &Process, at: Duration) -> Result<Accounts, VmPressureError> {
        let pid = process.pid;
        let threads = vcpu_threads(pid).map_err(|error| VmPressureError::Threads { pid, error })?;
        let wait_time = |thread: u32| match self.wait_time(pid, thread) {
            Err(error) if error.is_gone() => Ok(None), // the thread has ended since it was listed
            read => read.map(|waited| Some((thread, waited))),
        };
        let waited = threads.into_iter().filter_map(|thread| wait_time(thread).transpose());
        let waited = waited.collect::<Result<_, SysfsError>>()?;
        let stalled = match self.cgroup_of(pid)? {
            Some(cgroup) => self.stall_times(&cgroup)?.map(|times| (cgroup, times)),
            None => None,
        };
        let file = format!("{pid}/stat");
        let stat = self.proc.text(&file)?;
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let faults = fields.split_whitespace().nth(MAJOR_FAULTS_INDEX).and_then(|count| count.parse().ok());
        let major_faults =
            faults.ok_or_else(|| self.proc.unreadable_error(file, stat, "a number of major faults"))?;
        Ok(Accounts { process: process.clone(), at, waited, stalled, major_faults })
    }

    /// Returns the time for which a thread waited for a processor: the second field of `schedstat`,
    /// in nanoseconds.
    fn wait_time(&self, pid: u32, thread: u32) -> Result<Duration, SysfsError> {
        let file = format!("{pid}/task/{thread}/schedstat");
        let text = self.proc.text(&file)?;
        let nanoseconds = text.split_whitespace().nth(1).and_then(|number| number.parse().ok());
        let nanoseconds =
            nanoseconds.ok_or_else(|| self.proc.unreadable_error(file, text, "three numbers"))?;
        Ok(Duration::from_nanos(nanoseconds))
    }

    /// Returns the cgroup of a process; `None` if it has none of its own, or if the agent cannot see
    /// it.
    fn cgroup_of(&self, pid: u32) -> Result<Option<String>, SysfsError> {
        let text = self.proc.text(format!("{pid}/cgroup"))?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let is_visible = !path.is_empty() && path.split('/').all(|part| part != "..");
        Ok(is_visible.then(|| path.to_owned()))
    }

    /// Returns the time for which some task and all tasks of a cgroup were stalled on memory; `None`
    /// if the kernel does not count it.
    fn stall_times(&self, cgroup: &str) -> Result<Option<[Duration; 2]>, SysfsError> {
        let Some(cgroups) = &self.cgroups else { return Ok(None) };
        let file = format!("{cgroup}/memory.pressure");
        if !cgroups.has(&file) {
            return Ok(None);
        }
        let text = match cgroups.text(&file) {
            Err(SysfsError::Read { errno, .. }) if is_disabled(&errno) => return Ok(None),
            read => read?,
        };
        let total = |kind: &str| {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(kind))?;
            let total = line.split_whitespace().find_map(|word| word.strip_prefix("total="))?;
            total.parse().ok().map(Duration::from_micros)
        };
        let times = total("some").zip(total("full")).map(|(some, full)| [some, full]);
        times.map(Some).ok_or_else(|| cgroups.unreadable_error(file, text, "pressure stall information"))
    }
}

/// Returns whether the kernel refuses to read a pressure file because it does not count stalls.
fn is_disabled(errno: &io::Error) -> bool {
    errno.raw_os_error() == Some(Errno::OPNOTSUPP.raw_os_error())
}

impl Default for VmPressureReader {
    fn default() -> Self {
        Self::new()
    }
}

impl Accounts {
    /// Returns whether differences to earlier accounts are meaningful.
    fn is_comparable(&self, earlier: &Self) -> bool {
        self.process == earlier.process && self.at > earlier.at
    }

    fn since(&self, earlier: &Self) -> Result<VmPressure, VmPressureError> {
        let pid = self.process.pid;
        let implausible = |account| VmPressureError::Implausible { account, pid };
        let interval = self.at.saturating_sub(earlier.at);
        let fraction = |account, now: Duration, earlier: Duration, tasks: usize| {
            let per_task = now.checked_sub(earlier).ok_or(implausible(account))?.div_f64(tasks as f64);
            let is_plausible = per_task <= interval + ACCOUNTING_DELAY_MAX;
            let fraction = per_task.div_duration_f64(interval).min(1.0);
            if is_plausible { Ok(fraction) } else { Err(implausible(account)) }
        };
        let total = |accounts: &Self| accounts.waited.values().sum::<Duration>();
        let has_run_backwards = |(thread, waited): (&u32, &Duration)| {
            earlier.waited.get(thread).is_some_and(|earlier| waited < earlier)
        };
        if self.waited.iter().any(has_run_backwards) {
            return Err(implausible("run queue wait"));
        }
        let threads = self.waited.len();
        let has_same_threads = threads > 0 && self.waited.keys().eq(earlier.waited.keys());
        let steal =
            has_same_threads.then(|| fraction("run queue wait", total(self), total(earlier), threads));
        let same_cgroup = self.stalled.as_ref().zip(earlier.stalled.as_ref()).filter(|(a, b)| a.0 == b.0);
        let stalled = same_cgroup.map(|((_, now), (_, earlier))| {
            let of = |kind: usize| fraction("memory pressure", now[kind], earlier[kind], 1);
            Ok::<_, VmPressureError>([of(0)?, of(1)?])
        });
        let stalled = stalled.transpose()?;
        let faults = self.major_faults.checked_sub(earlier.major_faults);
        let faults = faults.ok_or(implausible("number of major faults"))?;
        Ok(VmPressure {
            steal: steal.transpose()?,
            memory_some: stalled.map(|[some, _]| some),
            memory_full: stalled.map(|[_, full]| full),
            major_faults_per_s: Some(faults as f64 / interval.as_secs_f64()),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::host::{process::identify_process, sysfs::fake::FakeSysfs};

    const VM: ReservationId = ReservationId(1);

    /// Process whose accounts are files of the test. The process itself only sleeps.
    struct TestVm {
        child: Child,
        process: Process,
        tree: FakeSysfs,
        reader: VmPressureReader,
    }

    impl TestVm {
        fn new() -> Self {
            let child = Command::new("sleep").arg("600").spawn().unwrap();
            let process = identify_process(child.id()).unwrap();
            let tree = FakeSysfs::new(&[]);
            let reader = VmPressureReader {
                proc: Sysfs::at(tree.path("proc")),
                cgroups: Some(Sysfs::at(tree.path("cgroup"))),
                vms: BTreeMap::new(),
            };
            let vm = Self { child, process, tree, reader };
            vm.set_cgroup("0::/machine/vm1");
            vm
        }

        fn set_cgroup(&self, text: &str) {
            self.tree.files(&format!("proc/{}", self.process.pid), &[("cgroup", text)]);
        }

        /// Sets the accounts: wait time in ms, stall times in ms, and major faults.
        fn set(&self, waited: u64, [some, full]: [u64; 2], faults: u64) {
            let pid = self.process.pid;
            let fields = format!("{pid} (a) b) S 1 2 3 4 5 6 7 8 {faults} 10 11");
            self.tree.files(&format!("proc/{pid}"), &[("stat", &fields)]);
            let schedstat = format!("5 {} 7", waited * 1_000_000);
            self.tree.files(&format!("proc/{pid}/task/{pid}"), &[("schedstat", &schedstat)]);
            let (some, full) = (some * 1000, full * 1000);
            let averages = "avg10=99.00 avg60=0.00 avg300=0.00";
            let pressure = format!("some {averages} total={some}\nfull {averages} total={full}");
            self.tree.files("cgroup/machine/vm1", &[("memory.pressure", &pressure)]);
        }

        fn sample(&mut self, seconds: u64) -> Result<Option<VmPressure>, VmPressureError> {
            self.reader.sample(VM, &self.process, Duration::from_secs(seconds))
        }
    }

    impl Drop for TestVm {
        fn drop(&mut self) {
            let _ = self.child.kill(); // the test may have killed it
            let _ = self.child.wait();
        }
    }

    #[test]
    fn accounts_are_divided_by_the_interval() {
        let mut vm = TestVm::new();
        vm.set(1000, [500, 200], 7);
        assert_eq!(vm.sample(100).unwrap(), None, "the first sample has no interval");
        vm.set(4000, [2000, 800], 67);
        let expected = VmPressure {
            steal: Some(0.1),
            memory_some: Some(0.05),
            memory_full: Some(0.02),
            major_faults_per_s: Some(2.0),
        };
        assert_eq!(vm.sample(130).unwrap(), Some(expected));
        // A wait that began before the interval counts when it ends.
        vm.set(15_000, [2000, 800], 67);
        assert_eq!(vm.sample(140).unwrap().unwrap().steal, Some(1.0));
    }

    #[test]
    fn impossible_changes_give_no_value() {
        let base = (1000, [500, 200], 7);
        for (waited, stalled, faults, account) in [
            (999, [500, 200], 7, "run queue wait"),
            (1000 + 11_001, [500, 200], 7, "run queue wait"),
            (1000, [499, 200], 7, "memory pressure"),
            (1000, [500, 200 + 11_001], 7, "memory pressure"),
            (1000, [500, 200], 6, "number of major faults"),
        ] {
            let mut vm = TestVm::new();
            vm.set(base.0, base.1, base.2);
            vm.sample(100).unwrap();
            vm.set(waited, stalled, faults);
            let error = vm.sample(110).unwrap_err().to_string();
            assert!(error.starts_with(account), "{error}");
            assert_eq!(vm.sample(120).unwrap(), None, "the sample after an error has no interval");
        }
    }

    #[test]
    fn pressure_of_a_shared_or_hidden_cgroup_is_not_the_vms() {
        for cgroup in ["0::/", "0::/../other", "5:cpu:/machine/vm1", ""] {
            let mut vm = TestVm::new();
            vm.set_cgroup(cgroup);
            vm.set(0, [0, 0], 0);
            vm.sample(100).unwrap();
            let pressure = vm.sample(110).unwrap().unwrap();
            assert_eq!((pressure.memory_some, pressure.steal), (None, Some(0.0)), "{cgroup}");
        }
        // The VM was moved to another cgroup in the interval.
        let mut vm = TestVm::new();
        vm.set(0, [0, 0], 0);
        vm.sample(100).unwrap();
        vm.set_cgroup("0::/machine/vm2");
        let pressure = std::fs::read_to_string(vm.tree.path("cgroup/machine/vm1/memory.pressure")).unwrap();
        vm.tree.files("cgroup/machine/vm2", &[("memory.pressure", &pressure)]);
        assert_eq!(vm.sample(110).unwrap().unwrap().memory_some, None);
        assert!(vm.sample(120).unwrap().unwrap().memory_some.is_some());
    }

    #[test]
    fn malformed_files_are_errors() {
        let mut vm = TestVm::new();
        vm.set(0, [0, 0], 0);
        vm.tree.files("cgroup/machine/vm1", &[("memory.pressure", "some avg10=0.00")]);
        let error = vm.sample(100).unwrap_err().to_string();
        assert!(error.ends_with("expected pressure stall information"), "{error}");
        let pid = vm.process.pid;
        vm.set(0, [0, 0], 0);
        vm.tree.files(&format!("proc/{pid}/task/{pid}"), &[("schedstat", "NaN NaN NaN")]);
        assert!(vm.sample(100).unwrap_err().to_string().ends_with("expected three numbers"));
    }

    #[test]
    fn reused_pid_gives_no_value() {
        let mut vm = TestVm::new();
        vm.set(0, [0, 0], 0);
        vm.sample(100).unwrap();
        vm.process.started += 1;
        let error = vm.sample(110).unwrap_err();
        assert!(matches!(error, VmPressureError::NotTheProcess { .. }), "{error}");
    }

    /// Two busy threads that share a processor wait for half of the time.
    #[test]
    fn threads_that_share_a_processor_wait_for_it() {
        let script = "taskset -pc 0 $$ >/dev/null; while :; do :; done";
        let busy = || Command::new("bash").args(["-c", script]).spawn().unwrap();
        let mut children = [busy(), busy(), busy()];
        let process = identify_process(children[0].id()).unwrap();
        let mut reader = VmPressureReader::new();
        let started = std::time::Instant::now();
        reader.sample(VM, &process, started.elapsed()).unwrap();
        let is_over = || started.elapsed() >= Duration::from_millis(500);
        while !is_over() {
            std::hint::spin_loop(); // the other processes share another processor
        }
        let pressure = reader.sample(VM, &process, started.elapsed()).unwrap().unwrap();
        children.iter_mut().for_each(|child| {
            child.kill().unwrap();
            child.wait().unwrap();
        });
        assert!(pressure.steal.unwrap() > 0.2, "three processes on one processor did not wait: {pressure:?}");
    }
}
