//! Tenants of one host out of real traces, and who gets how much by several schemes: what each scheme is worth to each tenant against an equal split
//! (Spirit's figures 6 and 9).
//!
//! A tenant's true throughput is Spirit's slowdown (4.2, resolved) with the miss ratios of its whole trace under LRU, counted. Schemes but the ideal one do
//! not know it: they are told what a host would measure.

mod ideal;
mod mixes;
mod schemes;
mod tenant;
mod touches;

pub use mixes::{Mix, mixes};
pub use schemes::{Host, Outcome, Scheme, compare};
pub use tenant::{Curve, Kind, Tenant};
pub use touches::{NoTouches, read};

#[cfg(test)]
mod tests;
