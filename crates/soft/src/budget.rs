//! Decisions of the soft memory daemon: which processes give budget up for another process (Soft
//! Memory, section 3.3 and 4).
//!
//! The module is pure. [`Daemon`] is the daemon without its sockets and its clock, [`Ledger`] records the budget of
//! each client, and [`decide`] selects the clients that must give pages up:
//!
//! 1. Free pages of the host are used first.
//! 2. Unused budget is taken in the order of descending [`Weight`].
//! 3. Pages in use are taken in the order of descending weight.
//!
//! The number of clients per request is limited. A request that cannot be fulfilled within this limit is
//! denied, and no client is asked.
//!
//! ```
//! use soft::budget::{ClientSample, Decision, Demand, Pid, Settings, decide};
//!
//! let settings = Settings { over_reclaim_percent: 0, ..Settings::default() };
//! // All of the budget is in use, beside 440 pages of traditional memory.
//! let cache = ClientSample { pid: Pid(10), budget: 2560, claimed_used: 2560, footprint: 3000 };
//! let demands = vec![Demand { pid: cache.pid, unused_pages: 0, used_pages: 512 }];
//! assert_eq!(decide(&settings, 2560, &[cache], Pid(11), 3072), Decision::Reclaim { demands });
//! ```

mod daemon;
mod decision;
mod ledger;
mod queue;
mod sample;
mod weight;

pub use daemon::{ClientReport, Counters, Daemon, HostMemory, Outgoing};
pub use decision::{Decision, Demand, Settings, decide, decide_for_host};
pub use ledger::{Ledger, LedgerError};
pub use sample::{ClientSample, Pid};
pub use weight::Weight;

#[cfg(test)]
mod tests;
