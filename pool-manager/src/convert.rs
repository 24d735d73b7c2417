//! Conversion between wire messages and the types of `pool`. Requests are validated here, with an
//! error for each rule; protobuf types are not used beyond this module. Messages of agents are
//! converted in [`agent`]; reports of shares are stored as received after the check in [`shares`].

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
