//! Accessed address ranges of the tenants' processes, measured by DAMON. Each process has its own
//! kdamond, because DAMON does not report to which of several processes a range belongs.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, Instant},
};

use units::{Name, limits::PROMOTION_PROCESSES_MAX};

use crate::{
    host::{
        access_profile::{SAMPLE_INTERVAL_US, SAMPLES_PER_RESULT},
        damon::{Damon, DamonError, MonitoredRange, Target},
        sysfs::Sysfs,
    },
    symbiosis::PersistedShares,
};

/// Time after which DAMON has a first result: twice the time of one result.
const FIRST_RESULT_DELAY: Duration =
    Duration::from_micros(2 * SAMPLE_INTERVAL_US * SAMPLES_PER_RESULT as u64);

/// Process of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TenantProcess {
    /// Tenant.
    pub tenant: Name,
    /// Identifier of the process.
    pub pid: u32,
}

/// Returns the processes of a tenant. `processes` are in their order.
pub(super) fn of_tenant<'a>(processes: &'a [TenantProcess], tenant: &Name) -> &'a [TenantProcess] {
    let first = processes.partition_point(|process| process.tenant < *tenant);
    let rest = &processes[first..];
    &rest[..rest.partition_point(|process| process.tenant == *tenant)]
}

/// Monitor of the accesses of processes.
#[derive(Debug)]
pub(super) struct RangeMonitor {
    sys: Sysfs,
    damon: Damon,
    marker: PersistedShares,
    boot_id: String,
    /// Monitored processes, in the order of DAMON's results.
    monitored: Vec<TenantProcess>,
    started: Instant,
    /// Entry of `monitored` whose result is read first.
    next_read: usize,
    /// Number of times that other processes were selected.
    turn: u64,
    /// Latest turn of each process.
    turns: BTreeMap<TenantProcess, u64>,
    /// Reason why no process is monitored; empty if there is none.
    problem: String,
}

impl RangeMonitor {
    /// Creates a monitor that does not monitor yet. `sys` is the root of sysfs.
    pub fn at(sys: &Path, runtime_dir: &Path, boot_id: String) -> Self {
        let marker = PersistedShares::at(runtime_dir);
        let is_own = marker.was_monitoring(&boot_id);
        let damon = Damon::at(sys, is_own);
        let mut monitor = Self {
            sys: Sysfs::at(sys),
            damon,
            marker,
            boot_id,
            monitored: Vec::new(),
            started: Instant::now(),
            next_read: 0,
            turn: 0,
            turns: BTreeMap::new(),
            problem: String::new(),
        };
        if is_own {
            monitor.stop(); // an earlier agent ended while it used DAMON
        }
        monitor
    }

    /// Returns the reason why no process is monitored; empty if there is none.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the accessed ranges of monitored processes, and monitors these processes from now on.
    /// More processes than [`PROMOTION_PROCESSES_MAX`] are monitored in turn. Processes without a
    /// result are omitted. Reading results takes at most `limit` and the time of one result.
    pub fn monitor(
        &mut self,
        processes: &[TenantProcess],
        limit: Duration,
    ) -> Vec<(TenantProcess, Vec<MonitoredRange>)> {
        let is_ready = !self.monitored.is_empty() && self.started.elapsed() >= FIRST_RESULT_DELAY;
        let (results, next_read) =
            if is_ready { self.damon.read_ranges(self.next_read, limit) } else { (Vec::new(), 0) };
        let results = self.monitored.iter().cloned().zip(results);
        let results: Vec<_> = results.filter_map(|(process, ranges)| Some((process, ranges?))).collect();
        self.next_read = next_read;
        // Other processes are monitored only after each result was read: a restart drops all results.
        let next = self.next_processes(processes, is_ready && next_read == 0);
        if next != self.monitored {
            self.restart(next);
        } else if next.is_empty() {
            self.problem.clear();
        }
        results
    }

    /// Lets the next call read results.
    #[cfg(test)]
    pub fn skip_first_result_delay(&mut self) {
        self.started -= FIRST_RESULT_DELAY;
    }

    /// Stops monitoring.
    pub fn stop(&mut self) {
        self.monitored = Vec::new();
        match self.damon.stop() {
            Ok(()) if self.marker.was_monitoring(&self.boot_id) => self.marker.set_monitoring(None),
            Ok(()) => {}
            Err(error) => tracing::warn!(error = units::chain(&error), "cannot stop DAMON"),
        }
    }

    /// Returns the processes to be monitored next. Without all results, the monitored processes remain,
    /// also if some of them have ended, so that a tenant that starts many processes does not prevent
    /// results. If all have ended, there will be no result.
    fn next_processes(&mut self, processes: &[TenantProcess], has_results: bool) -> Vec<TenantProcess> {
        let is_alive = self.monitored.iter().any(|process| processes.contains(process));
        if !has_results && is_alive {
            return self.monitored.clone();
        }
        if processes.len() <= PROMOTION_PROCESSES_MAX {
            return processes.to_vec();
        }
        self.select_in_turn(processes)
    }

    /// Selects processes so that each tenant has its turn, also if other tenants have many processes: one
    /// process of each tenant, then a second one, and so on. Those that had no turn for the longest time
    /// come first.
    fn select_in_turn(&mut self, processes: &[TenantProcess]) -> Vec<TenantProcess> {
        self.turns.retain(|process, _| processes.binary_search(process).is_ok());
        let turn = |process: &TenantProcess| self.turns.get(process).copied().unwrap_or_default();
        let mut order = Vec::with_capacity(processes.len());
        for of_tenant in processes.chunk_by(|a, b| a.tenant == b.tenant) {
            let latest = of_tenant.iter().map(turn).max();
            let mut by_turn: Vec<&TenantProcess> = of_tenant.iter().collect();
            by_turn.sort_by_key(|process| turn(process));
            order.extend(by_turn.into_iter().enumerate().map(|(rank, process)| (rank, latest, process)));
        }
        order.sort_unstable();
        let selected = order.into_iter().take(PROMOTION_PROCESSES_MAX);
        let mut selected: Vec<TenantProcess> = selected.map(|(_, _, process)| process.clone()).collect();
        selected.sort_unstable();
        self.turn += 1;
        self.turns.extend(selected.iter().cloned().map(|process| (process, self.turn)));
        selected
    }

    fn restart(&mut self, processes: Vec<TenantProcess>) {
        match self.start(&processes) {
            Ok(()) => (self.monitored, self.problem) = (processes, String::new()),
            Err(error) => {
                let problem = units::chain(&error);
                if problem != self.problem {
                    tracing::warn!(error = problem, "cannot monitor accesses, so no pages are promoted");
                }
                (self.monitored, self.problem) = (Vec::new(), problem);
            }
        }
    }

    fn start(&mut self, processes: &[TenantProcess]) -> Result<(), DamonError> {
        // DAMON of another program must not be marked as that of an agent.
        self.damon.check_available()?;
        if processes.is_empty() {
            self.stop();
            return Ok(());
        }
        let target = Target::without_device_memory(&self.sys);
        let targets: Vec<Vec<Target>> = processes.iter().map(|process| vec![target(process.pid)]).collect();
        self.marker.set_monitoring(Some(&self.boot_id));
        let started = self.damon.start(&targets);
        if !self.damon.is_running() {
            self.marker.set_monitoring(None);
        }
        (self.started, self.next_read) = (Instant::now(), 0);
        started
    }
}

impl Drop for RangeMonitor {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::damon::fake::damon;

    fn processes(count: u32) -> Vec<TenantProcess> {
        let tenant = |pid: u32| Name::new(&format!("t{}", pid / 10)).unwrap();
        let mut all: Vec<_> = (0..count).map(|pid| TenantProcess { tenant: tenant(pid), pid }).collect();
        all.sort();
        all
    }

    fn monitor(sys: &Path, folder: &Path) -> RangeMonitor {
        RangeMonitor::at(sys, folder, "boot".to_owned())
    }

    #[test]
    fn processes_of_a_tenant_are_neighbours() {
        let all = processes(25);
        let pids = |tenant: &str| -> Vec<u32> {
            of_tenant(&all, &Name::new(tenant).unwrap()).iter().map(|process| process.pid).collect()
        };
        assert_eq!(pids("t0"), (0..10).collect::<Vec<_>>());
        assert_eq!(pids("t2"), [20, 21, 22, 23, 24]);
        assert!(["t", "t11", "x"].map(pids).iter().all(Vec::is_empty));
    }

    #[test]
    fn many_processes_are_monitored_in_turn() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon(1, &[]));
        let mut monitor = monitor(&sys.path(""), folder.path());
        let all = processes(40);
        let first = monitor.next_processes(&all, false);
        assert_eq!(first.len(), PROMOTION_PROCESSES_MAX);
        monitor.monitored = first.clone();
        assert_eq!(monitor.next_processes(&all, false), first, "there is no result yet");
        let second = monitor.next_processes(&all, true);
        assert!(all.iter().all(|process| first.contains(process) || second.contains(process)));
        monitor.monitored = Vec::new();
    }

    #[test]
    fn tenants_with_many_processes_do_not_delay_others() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon(1, &[]));
        let mut monitor = monitor(&sys.path(""), folder.path());
        let process =
            |tenant: u32, pid| TenantProcess { tenant: Name::new(&format!("t{tenant}")).unwrap(), pid };
        let mut all: Vec<_> = (0..15 * 64).map(|pid| process(pid / 64, pid)).collect();
        all.push(process(99, 5000));
        all.sort();
        for _ in 0..8 {
            monitor.monitored = monitor.next_processes(&all, true);
            assert!(monitor.monitored.contains(&process(99, 5000)));
        }
        // More tenants than can be monitored at a time: each one is monitored in every second turn.
        let mut all: Vec<_> = (0..64).map(|tenant| process(tenant, tenant)).collect();
        all.sort();
        let first = monitor.next_processes(&all, true);
        monitor.monitored.clone_from(&first);
        let second = monitor.next_processes(&all, true);
        assert!(all.iter().all(|process| first.contains(process) != second.contains(process)));
        monitor.monitored = Vec::new();
    }

    #[test]
    fn new_and_ended_processes_do_not_prevent_results() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon(2, &[]));
        let mut monitor = monitor(&sys.path(""), folder.path());
        let all = processes(4);
        monitor.monitored = all[..2].to_vec();
        assert_eq!(monitor.next_processes(&all[1..], false), all[..2]);
        assert_eq!(monitor.next_processes(&all[1..], true), all[1..]);
        assert_eq!(monitor.next_processes(&all[2..], false), all[2..], "all have ended");
        monitor.monitored = Vec::new();
    }

    #[test]
    fn ranges_are_results_of_their_process() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon(2, &[("4096", "12288", "3")]));
        let marker = PersistedShares::at(folder.path());
        let mut monitor = monitor(&sys.path(""), folder.path());
        let both = processes(2);
        assert_eq!(monitor.monitor(&both, FIRST_RESULT_DELAY), []);
        assert!(marker.was_monitoring("boot"));
        assert_eq!(monitor.monitor(&both, FIRST_RESULT_DELAY), [], "there is no result yet");
        monitor.skip_first_result_delay();
        let results = monitor.monitor(&both, FIRST_RESULT_DELAY);
        let ranges = vec![MonitoredRange { addresses: 4096..12_288, accesses: 3 }];
        assert_eq!(results, [(both[0].clone(), ranges), (both[1].clone(), Vec::new())]);
        drop(monitor);
        assert!(!marker.was_monitoring("boot"));
        assert_eq!(sys.sysfs.number("kernel/mm/damon/admin/kdamonds/nr_kdamonds").unwrap(), 0);
    }

    #[test]
    fn damon_of_another_program_is_reported() {
        let (folder, sys) = (tempfile::tempdir().unwrap(), damon(1, &[]));
        sys.files("kernel/mm/damon/admin/kdamonds", &[("nr_kdamonds", "1")]);
        let mut monitor = monitor(&sys.path(""), folder.path());
        monitor.monitor(&processes(1), FIRST_RESULT_DELAY);
        assert_eq!(monitor.problem(), "another program uses DAMON");
        assert!(!PersistedShares::at(folder.path()).was_monitoring("boot"));
        sys.files("kernel/mm/damon/admin/kdamonds", &[("nr_kdamonds", "0")]);
        monitor.monitor(&processes(1), FIRST_RESULT_DELAY);
        assert_eq!(monitor.problem(), "");
    }
}
