//! Decisions of the soft memory daemon: which processes give budget up for another process (Soft
//! Memory, section 3.3 and 4).
//!
//! The module is pure. The daemon passes requests and measured samples of its clients, and sends the
//! returned demands. [`Ledger`] records the budget of each client, and [`decide`] selects the clients
//! that must give pages up:
//!
//! 1. Free pages of the host are used first.
//! 2. Unused budget is taken in the order of descending [`Weight`].
//! 3. Pages in use are taken in the order of descending weight.
//!
//! The number of clients per request is limited. A request that cannot be fulfilled within this limit is
//! denied, and no client is asked.
//!
//! ```
//! use soft::budget::{Decision, Demand, Ledger, Pid, Settings};
//!
//! # fn main() -> Result<(), soft::budget::LedgerError> {
//! let mut ledger = Ledger::new(5120, Settings { over_reclaim_percent: 0, ..Settings::default() }); // 20 MiB
//! let (cache, batch) = (Pid(10), Pid(11));
//! ledger.connect(cache)?;
//! ledger.grant(cache, 2560)?;
//! ledger.report(cache, 2560, 3000)?; // all in use, and 440 pages of traditional memory
//!
//! ledger.connect(batch)?;
//! let demands = vec![Demand { pid: cache, unused_pages: 0, used_pages: 512 }];
//! assert_eq!(ledger.decide(batch, 3072), Decision::Reclaim { demands });
//!
//! ledger.record_returned(cache, 512)?; // the reply of the cache
//! ledger.grant(batch, 3072)?;
//! assert_eq!((ledger.budget(cache), ledger.budget(batch), ledger.free()), (2048, 3072, 0));
//! # Ok(())
//! # }
//! ```

mod decision;
mod ledger;
mod sample;
mod weight;

pub use decision::{Decision, Demand, Settings, decide, decide_for_host};
pub use ledger::{Ledger, LedgerError};
pub use sample::{ClientSample, Pid};
pub use weight::Weight;

#[cfg(test)]
mod tests;
