//! Wire to ours and back. Requests are checked here, each way to be wrong by name; behind this door no protobuf type is
//! seen. (What agents say is converted in [`agent`]; what they tell of shares is kept as it came once it is checked in
//! [`shares`], as nothing is decided by it.)

pub mod agent;
pub mod lists;
pub mod models;
mod requests;
pub mod shares;
mod views;

pub use requests::{Invalid, named, place, plan, reason, reserve, target, timeout};
pub use views::{
    alarm, capacity, decision, emc, emc_views, events, host, host_name, migration, reservation,
    reservation_state, slice,
};
