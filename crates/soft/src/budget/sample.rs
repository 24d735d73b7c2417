//! State of a client, as input of a decision.

use super::weight::Weight;

/// Process ID of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pid(pub u32);

/// Budget and memory of a client, in pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientSample {
    /// Process of the client.
    pub pid: Pid,
    /// Pages that the client may hold, as recorded by the daemon.
    pub budget: u64,
    /// Pages of soft memory that the client claims to hold.
    pub claimed_used: u64,
    /// Soft and traditional memory that the client really uses, as measured by the daemon: the usage of
    /// the client's cgroup or, if several clients share one, the resident memory of the process.
    pub footprint: u64,
}

impl ClientSample {
    /// Returns the soft memory in use. A claim counts at most as the budget and as the footprint.
    pub fn used(&self) -> u64 {
        self.claimed_used.min(self.budget).min(self.footprint)
    }

    /// Returns the budget that is not in use.
    pub fn unused(&self) -> u64 {
        self.budget - self.used()
    }

    /// Returns the reclamation weight. Traditional memory is the part of the footprint that is not soft, so that
    /// claims of traditional memory have no effect. A claim of more soft memory than the client holds lowers the
    /// weight, at most to that of a client that uses its whole budget.
    pub fn weight(&self) -> Weight {
        Weight::new(self.used(), self.footprint - self.used())
    }
}
