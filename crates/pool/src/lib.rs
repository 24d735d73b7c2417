//! Ownership of pool slices. The [`ledger`] decides who owns a slice and records each decision. The
//! [`manager`] and the [`agent`] implement the two ends of the protocol as state machines from
//! events to effects. This crate uses no clock, file, socket, thread or task: the services perform
//! the effects, and the simulation performs the same effects in a simulated rack.
#![forbid(unsafe_code)]

pub mod agent;
pub mod audit;
pub mod ledger;
pub mod manager;
pub mod protocol;
pub mod record;
pub mod rejection;
pub mod request_budget;
pub mod slice;
