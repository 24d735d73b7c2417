//! Who owns each slice. The [`ledger`] decides and records; [`manager`] and [`agent`] are the two ends of the protocol,
//! each an event-in, effects-out machine. No clock, file, socket, thread or task: the services perform the effects, and
//! the simulation performs the same ones on a world of its own.
#![forbid(unsafe_code)]

pub mod agent;
pub mod audit;
pub mod denied;
pub mod ledger;
pub mod manager;
pub mod protocol;
pub mod record;
pub mod slice;
