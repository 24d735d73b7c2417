//! Tenants of one host out of real traces, and who gets how much by several schemes: what each scheme is worth to each tenant against an equal split
//! (Spirit's figure 6). And what there is to see of it: what throughputs hang on (figure 1), a market's rounds (3), markets of ever more tenants (8), and
//! tenants that change what they do (9).
//!
//! A tenant's true throughput is Spirit's slowdown (4.2, resolved) with the miss ratios of its whole trace under LRU, counted. Schemes but the ideal one do
//! not know it: they are told what a host would measure.

mod auction;
mod change;
mod crowd;
mod host;
mod ideal;
mod leaning;
mod lru;
mod mixes;
mod schemes;
mod tenant;
mod touches;

pub use auction::{Auction, Round, auction};
pub use change::{
    Activity, CHANGES, Change, EPOCHS, Epoch, FOLLOWED_WITHIN, Followed, Played, TENANTS, followed, play,
};
pub use crowd::{Bidders, Crowd};
pub use host::Host;
pub use leaning::{Along, along, leaning, opposites, typical};
pub use mixes::{Mix, SMALL, both_ways, mixes};
pub use schemes::{Outcome, Scheme, compare};
pub use tenant::{Curve, Kind, Tenant};
pub use touches::{NoTouches, read};

#[cfg(test)]
mod tests;
