//! Slice ownership. The [`ledger`] decides and records; [`manager`] and [`agent`] are the two ends
//! of the protocol, as state machines from events to effects. No clock, file, socket, thread or
//! task is used: the services perform the effects, and the simulation performs the same effects in
//! a simulated world.
#![forbid(unsafe_code)]

pub mod agent;
pub mod audit;
pub mod ledger;
pub mod manager;
pub mod protocol;
pub mod record;
pub mod rejection;
pub mod slice;
