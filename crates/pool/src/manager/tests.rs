//! The manager's promises: scenarios as lines of words, each with what the manager does about them, and a property over
//! stories of everything at once. The [`rig`] plays the store, the devices, the agents and the callers, and judges
//! every effect as it comes out: what is not durable has no consequences, and no slice has two owners or old bytes.

mod adoption;
mod alarms;
mod claims;
mod devices;
mod driver;
mod guards;
mod hosts;
mod pieces;
mod reports;
mod requests;
mod restore;
mod restore_rack;
mod rig;
mod scrubbing;
mod shared;
mod store;
mod story;
mod wakeups;
