//! Common parts of the system tests.

pub mod emulated_rack;
pub mod linux_guests;
pub mod rack;
pub mod scripted_agent;
pub mod small_guests;
pub mod standalone_vm;

/// Steps of a simulated rack before it becomes quiescent.
pub const SIMULATION_STEPS: u64 = 4000;
