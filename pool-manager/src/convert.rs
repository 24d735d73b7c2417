//! Converts between protobuf messages and the types of `pool`, and validates requests. [`agent`]
//! converts messages of agents, [`shares`] validates their reports of shares.

pub mod agent;
pub mod lists;
pub mod profile;
mod requests;
pub mod shares;
mod views;

pub use requests::{Invalid, named, place, plan, reason, reserve, target, timeout};
pub use views::{
    alarm, capacity, decision, emc, emc_views, events, host, host_name, migration, reservation,
    reservation_state, slice,
};
