//! Common parts of the system tests.

pub mod linux_guests;
pub mod place;
pub mod rack;
pub mod real_rack;
pub mod scripted_agent;
pub mod small_guests;

/// Steps of a simulated rack before it becomes quiescent.
pub const SIMULATION_STEPS: u64 = 4000;
