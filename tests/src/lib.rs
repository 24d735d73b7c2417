//! What system tests share.

pub mod linux_guests;
pub mod place;
pub mod rack;
pub mod real_rack;
pub mod scripted_agent;
pub mod small_guests;

/// Steps of one simulated rack before everything comes to rest.
pub const SIMULATION_STEPS: u64 = 4000;
