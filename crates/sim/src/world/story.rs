//! Event log and counts of a run: the report of a failing seed.

use std::{collections::VecDeque, fmt};

use units::Ns;

/// A violated invariant. The seed reproduces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Seed of the world.
    pub seed: u64,
    /// Number of steps before the violation.
    pub step: u64,
    /// The invariant.
    pub promise: &'static str,
    /// Description of the violation.
    pub what: String,
    /// The latest events, if they were logged.
    pub story: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.story.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        write!(f, "seed {} step {}: {}: {}", self.seed, self.step, self.promise, self.what)
    }
}

impl std::error::Error for Failure {}

const SUMMARY_COUNTS: usize = 29;

/// Counts of events in a run without violations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Steps.
    pub steps: u64,
    /// Reservations acknowledged.
    pub reserved: u64,
    /// Processes that attached the memory of their VM.
    pub started: u64,
    /// Slices scrubbed.
    pub scrubbed: u64,
    /// Slices granted to another host than before.
    pub moved: u64,
    /// Faults injected.
    pub troubles: u64,
    /// Restores from a backup.
    pub restored: u64,
    /// Stores with a long history of ended reservations.
    pub long_pasts: u64,
    /// Power failures of emulated devices.
    pub devices_off: u64,
    /// Power failures that emptied the device's directory.
    pub devices_emptied: u64,
    /// Records of shared devices lost or replaced by an older copy.
    pub records_rolled_back: u64,
    /// Full disks of the store.
    pub full_disks: u64,
    /// Durable writes that failed on a full disk.
    pub writes_without_room: u64,
    /// Releases acknowledged while the disk had too little space for reservations.
    pub releases_without_room: u64,
    /// Failures of single slices.
    pub slice_faults: u64,
    /// Scrubs that verified only a part of the slice.
    pub partial_scrubs: u64,
    /// Jumps of the wall clock.
    pub clock_jumps: u64,
    /// Days in which nothing ran.
    pub days: u64,
    /// Acknowledged cordons, drains and uncordons of hosts.
    pub hosts_scheduled: u64,
    /// Acknowledged cordons, drains and uncordons of EMCs.
    pub emcs_scheduled: u64,
    /// Accepted changes of rack.toml.
    pub rack_changes: u64,
    /// Refused changes of rack.toml.
    pub rack_refusals: u64,
    /// Agents rejected because another one represents the host.
    pub contested: u64,
    /// Migration requests accepted by the scheduler.
    pub moves_accepted: u64,
    /// Migration requests declined.
    pub moves_declined: u64,
    /// Migration requests reported as done.
    pub moves_done: u64,
    /// Repeated answers to a migration request.
    pub moves_repeated: u64,
    /// Answers refused because no such request exists, also for ended VMs.
    pub moves_unknown: u64,
    /// Declined migration requests that were sent again.
    pub moves_asked_again: u64,
}

impl Summary {
    /// Returns the counts with their names.
    pub fn counts(&self) -> [(&'static str, u64); SUMMARY_COUNTS] {
        [
            ("steps", self.steps),
            ("reserved", self.reserved),
            ("started", self.started),
            ("scrubbed", self.scrubbed),
            ("moved", self.moved),
            ("troubles", self.troubles),
            ("restored", self.restored),
            ("long_pasts", self.long_pasts),
            ("devices_off", self.devices_off),
            ("devices_emptied", self.devices_emptied),
            ("records_rolled_back", self.records_rolled_back),
            ("full_disks", self.full_disks),
            ("writes_without_room", self.writes_without_room),
            ("releases_without_room", self.releases_without_room),
            ("slice_faults", self.slice_faults),
            ("partial_scrubs", self.partial_scrubs),
            ("clock_jumps", self.clock_jumps),
            ("days", self.days),
            ("hosts_scheduled", self.hosts_scheduled),
            ("emcs_scheduled", self.emcs_scheduled),
            ("rack_changes", self.rack_changes),
            ("rack_refusals", self.rack_refusals),
            ("contested", self.contested),
            ("moves_accepted", self.moves_accepted),
            ("moves_declined", self.moves_declined),
            ("moves_done", self.moves_done),
            ("moves_repeated", self.moves_repeated),
            ("moves_unknown", self.moves_unknown),
            ("moves_asked_again", self.moves_asked_again),
        ]
    }
}

impl std::ops::AddAssign for Summary {
    fn add_assign(&mut self, more: Self) {
        self.steps += more.steps;
        self.reserved += more.reserved;
        self.started += more.started;
        self.scrubbed += more.scrubbed;
        self.moved += more.moved;
        self.troubles += more.troubles;
        self.restored += more.restored;
        self.long_pasts += more.long_pasts;
        self.devices_off += more.devices_off;
        self.devices_emptied += more.devices_emptied;
        self.records_rolled_back += more.records_rolled_back;
        self.full_disks += more.full_disks;
        self.writes_without_room += more.writes_without_room;
        self.releases_without_room += more.releases_without_room;
        self.slice_faults += more.slice_faults;
        self.partial_scrubs += more.partial_scrubs;
        self.clock_jumps += more.clock_jumps;
        self.days += more.days;
        self.hosts_scheduled += more.hosts_scheduled;
        self.emcs_scheduled += more.emcs_scheduled;
        self.rack_changes += more.rack_changes;
        self.rack_refusals += more.rack_refusals;
        self.contested += more.contested;
        self.moves_accepted += more.moves_accepted;
        self.moves_declined += more.moves_declined;
        self.moves_done += more.moves_done;
        self.moves_repeated += more.moves_repeated;
        self.moves_unknown += more.moves_unknown;
        self.moves_asked_again += more.moves_asked_again;
    }
}

#[derive(Debug, Default)]
pub(super) struct Story {
    /// Returns up to `events` of the latest events.
    told: VecDeque<String>,
    most: usize,
    broken: Option<(&'static str, String)>,
    pub(super) counts: Summary,
}

impl Story {
    pub(super) fn tell(&mut self, events: usize) {
        self.most = events;
    }

    pub(super) fn say(&mut self, now: Ns, words: impl FnOnce() -> String) {
        if self.most == 0 {
            return;
        }
        if self.told.len() >= self.most {
            self.told.pop_front();
        }
        self.told.push_back(format!("{:>9.3} ms  {}", now.as_duration().as_secs_f64() * 1000.0, words()));
    }

    pub(super) fn blame(&mut self, promise: &'static str, what: String) {
        self.broken.get_or_insert((promise, what));
    }

    pub(super) fn failure(&self, seed: u64, step: u64) -> Option<Box<Failure>> {
        let (promise, what) = self.broken.clone()?;
        let story = self.told.iter().cloned().collect();
        Some(Box::new(Failure { seed, step, promise, what, story }))
    }

    pub(super) fn summary(&self, steps: u64) -> Summary {
        Summary { steps, ..self.counts }
    }
}
