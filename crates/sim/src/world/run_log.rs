//! Event log of a run, counts of events, and the report of a violated invariant.

use std::{collections::VecDeque, fmt};

use units::Ns;

/// Violation of an invariant. A run with the same seed reproduces the violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Seed of the run.
    pub seed: u64,
    /// Number of steps before the violation.
    pub step: u64,
    /// Invariant that was violated, as a sentence.
    pub invariant: &'static str,
    /// Description of the violation.
    pub description: String,
    /// Log lines of the latest events. Empty if the event log is off.
    pub events: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.events.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        write!(f, "seed {} step {}: {}: {}", self.seed, self.step, self.invariant, self.description)
    }
}

impl std::error::Error for Failure {}

const SUMMARY_COUNTER_COUNT: usize = 36;

/// Counts of events in a run without violations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunSummary {
    /// Number of steps.
    pub steps: u64,
    /// Number of acknowledged reservations.
    pub reserved: u64,
    /// Number of processes that attached the memory of their VM.
    pub started: u64,
    /// Number of completed scrubs.
    pub scrubbed: u64,
    /// Number of grants of a slice to another host than before.
    pub moved: u64,
    /// Number of injected faults.
    pub faults: u64,
    /// Number of restores from a backup.
    pub restored: u64,
    /// Number of stores with a long history of ended reservations.
    pub long_histories: u64,
    /// Number of power failures of emulated devices.
    pub device_power_failures: u64,
    /// Number of power failures that emptied the device's directory.
    pub devices_emptied: u64,
    /// Number of records of shared devices that were lost or replaced by an older copy.
    pub records_rolled_back: u64,
    /// Number of faults that filled the disk of the store.
    pub full_disks: u64,
    /// Number of durable writes that failed on a full disk.
    pub full_disk_writes: u64,
    /// Number of releases acknowledged while the disk of the store had too little space for
    /// reservations.
    pub low_space_releases: u64,
    /// Number of faults of single slices.
    pub slice_faults: u64,
    /// Number of scrubs that verified only a part of the slice.
    pub partial_scrubs: u64,
    /// Number of jumps of the wall clock.
    pub clock_jumps: u64,
    /// Number of days during which all machines were suspended.
    pub days: u64,
    /// Number of acknowledged cordons, drains and uncordons of hosts.
    pub hosts_scheduled: u64,
    /// Number of acknowledged cordons, drains and uncordons of EMCs.
    pub emcs_scheduled: u64,
    /// Number of accepted changes of rack.toml.
    pub rack_changes: u64,
    /// Number of rejected changes of rack.toml.
    pub rack_refusals: u64,
    /// Number of agents rejected because another agent of the host was connected.
    pub duplicate_agents_rejected: u64,
    /// Number of migration requests accepted by the scheduler.
    pub migrations_accepted: u64,
    /// Number of migration requests declined by the scheduler.
    pub migrations_declined: u64,
    /// Number of migration requests reported as done by the scheduler.
    pub migrations_done: u64,
    /// Number of repeated answers to a migration request.
    pub migration_answers_repeated: u64,
    /// Number of answers rejected because the VM has no migration request.
    pub migration_answers_refused: u64,
    /// Number of declined migration requests that were sent again.
    pub migrations_retried: u64,
    /// Number of migration requests because of slowdowns.
    pub slowdowns_requested: u64,
    /// Number of processes that moved their pool memory to local memory.
    pub rehomed: u64,
    /// Moves of pool memory to local memory that a client cancelled.
    pub rehomes_cancelled: u64,
    /// Leaders that were not informed that another manager was elected.
    pub leaders_deposed: u64,
    /// Writes of former leaders that became durable, and whose answer arrived after the election.
    pub late_write_answers: u64,
    /// Device calls of former leaders that the device rejected by their fencing token.
    pub former_calls_rejected: u64,
    /// Sessions with former leaders that the agent rejected by their fencing token.
    pub former_sessions_rejected: u64,
}

impl RunSummary {
    /// Returns the name and value of each count.
    pub fn counts(&self) -> [(&'static str, u64); SUMMARY_COUNTER_COUNT] {
        [
            ("steps", self.steps),
            ("reserved", self.reserved),
            ("started", self.started),
            ("scrubbed", self.scrubbed),
            ("moved", self.moved),
            ("faults", self.faults),
            ("restored", self.restored),
            ("long_histories", self.long_histories),
            ("device_power_failures", self.device_power_failures),
            ("devices_emptied", self.devices_emptied),
            ("records_rolled_back", self.records_rolled_back),
            ("full_disks", self.full_disks),
            ("full_disk_writes", self.full_disk_writes),
            ("low_space_releases", self.low_space_releases),
            ("slice_faults", self.slice_faults),
            ("partial_scrubs", self.partial_scrubs),
            ("clock_jumps", self.clock_jumps),
            ("days", self.days),
            ("hosts_scheduled", self.hosts_scheduled),
            ("emcs_scheduled", self.emcs_scheduled),
            ("rack_changes", self.rack_changes),
            ("rack_refusals", self.rack_refusals),
            ("duplicate_agents_rejected", self.duplicate_agents_rejected),
            ("migrations_accepted", self.migrations_accepted),
            ("migrations_declined", self.migrations_declined),
            ("migrations_done", self.migrations_done),
            ("migration_answers_repeated", self.migration_answers_repeated),
            ("migration_answers_refused", self.migration_answers_refused),
            ("migrations_retried", self.migrations_retried),
            ("slowdowns_requested", self.slowdowns_requested),
            ("rehomed", self.rehomed),
            ("rehomes_cancelled", self.rehomes_cancelled),
            ("leaders_deposed", self.leaders_deposed),
            ("late_write_answers", self.late_write_answers),
            ("former_calls_rejected", self.former_calls_rejected),
            ("former_sessions_rejected", self.former_sessions_rejected),
        ]
    }
}

impl std::ops::AddAssign for RunSummary {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.reserved += other.reserved;
        self.started += other.started;
        self.scrubbed += other.scrubbed;
        self.moved += other.moved;
        self.faults += other.faults;
        self.restored += other.restored;
        self.long_histories += other.long_histories;
        self.device_power_failures += other.device_power_failures;
        self.devices_emptied += other.devices_emptied;
        self.records_rolled_back += other.records_rolled_back;
        self.full_disks += other.full_disks;
        self.full_disk_writes += other.full_disk_writes;
        self.low_space_releases += other.low_space_releases;
        self.slice_faults += other.slice_faults;
        self.partial_scrubs += other.partial_scrubs;
        self.clock_jumps += other.clock_jumps;
        self.days += other.days;
        self.hosts_scheduled += other.hosts_scheduled;
        self.emcs_scheduled += other.emcs_scheduled;
        self.rack_changes += other.rack_changes;
        self.rack_refusals += other.rack_refusals;
        self.duplicate_agents_rejected += other.duplicate_agents_rejected;
        self.migrations_accepted += other.migrations_accepted;
        self.migrations_declined += other.migrations_declined;
        self.migrations_done += other.migrations_done;
        self.migration_answers_repeated += other.migration_answers_repeated;
        self.migration_answers_refused += other.migration_answers_refused;
        self.migrations_retried += other.migrations_retried;
        self.slowdowns_requested += other.slowdowns_requested;
        self.rehomed += other.rehomed;
        self.rehomes_cancelled += other.rehomes_cancelled;
        self.leaders_deposed += other.leaders_deposed;
        self.late_write_answers += other.late_write_answers;
        self.former_calls_rejected += other.former_calls_rejected;
        self.former_sessions_rejected += other.former_sessions_rejected;
    }
}

#[derive(Debug, Default)]
pub(super) struct RunLog {
    /// Log lines of the latest events, at most `events_max`.
    events: VecDeque<String>,
    events_max: usize,
    violation: Option<(&'static str, String)>,
    pub(super) counts: RunSummary,
}

impl RunLog {
    pub(super) fn keep_events(&mut self, max: usize) {
        self.events_max = max;
    }

    pub(super) fn log(&mut self, now: Ns, line: impl FnOnce() -> String) {
        if self.events_max == 0 {
            return;
        }
        if self.events.len() >= self.events_max {
            self.events.pop_front();
        }
        self.events.push_back(format!("{:>9.3} ms  {}", now.as_duration().as_secs_f64() * 1000.0, line()));
    }

    pub(super) fn record_violation(&mut self, invariant: &'static str, description: String) {
        self.violation.get_or_insert((invariant, description));
    }

    pub(super) fn failure(&self, seed: u64, step: u64) -> Option<Box<Failure>> {
        let (invariant, description) = self.violation.clone()?;
        let events = self.events.iter().cloned().collect();
        Some(Box::new(Failure { seed, step, invariant, description, events }))
    }

    pub(super) fn summary(&self, steps: u64) -> RunSummary {
        RunSummary { steps, ..self.counts }
    }
}
