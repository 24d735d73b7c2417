//! Tests of the manager's invariants: scenarios written as lines of words, each with the expected
//! effects, and properties of random sequences of events. The [`rig`] simulates store, devices,
//! agents and callers. It checks every effect: no effect follows from a decision that is not
//! durable, and no slice has two owners or old data.

mod adoption;
mod alarms;
mod claims;
mod devices;
mod driver;
mod guards;
mod hosts;
mod long_work;

mod processes;
mod properties;
mod rehome;
mod reports;
mod requests;
mod restore;
mod restore_rack;
mod rig;
mod scrubbing;
mod shared;
mod store;
mod upkeep;
mod wakeups;
