//! What happened, in words, and what came of it: the whole bug report of a failing seed.

use std::{collections::VecDeque, fmt};

use units::Ns;

/// A promise was broken. The seed replays it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Of the world.
    pub seed: u64,
    /// After so many steps.
    pub step: u64,
    /// Which promise.
    pub promise: &'static str,
    /// In which way.
    pub what: String,
    /// The latest events, if they were told.
    pub story: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.story.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        write!(f, "seed {} step {}: {}: {}", self.seed, self.step, self.promise, self.what)
    }
}

impl std::error::Error for Failure {}

/// What a world that kept every promise went through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Steps lived.
    pub steps: u64,
    /// Reservations acknowledged.
    pub reserved: u64,
    /// Processes that got the memory of their VM.
    pub started: u64,
    /// Slices scrubbed.
    pub scrubbed: u64,
    /// Slices handed to another host than the last.
    pub moved: u64,
    /// Troubles that came.
    pub troubles: u64,
    /// Stores replaced by a backup.
    pub restored: u64,
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
    }
}

#[derive(Debug, Default)]
pub(super) struct Story {
    /// The latest events, at most so many.
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
