//! Converts between protobuf messages and the types of `pool`, and validates requests. [`agent`]
//! converts messages of agents, [`shares`] validates their reports of shares.

pub mod agent;
pub mod evictions;
pub mod lists;
pub mod profile;
mod reports;
mod requests;
pub mod samples;
pub mod shares;
pub mod soft_memory;
pub mod tenants;
mod views;

pub use requests::{
    InvalidField, check_reason, parse_migration_id, parse_name, parse_plan, parse_reservation_ref,
    parse_reserve, parse_scheduling_target, parse_timeout,
};
pub use views::{
    MigrationList, alarm_message, capacity, decision_message, emc_message, emc_messages, event_messages,
    host_message, host_name, migration_list, reservation_message, reservation_state, slice_message,
};
