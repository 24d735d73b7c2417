//! Limits of capacity planning.

use crate::Ns;

/// Maximum number of rows of a VM trace that is planned.
pub const PLAN_TRACE_ROWS_MAX: usize = 256 << 20;
/// Number of VMs of a trace that are read at a time while a trace is planned.
pub const PLAN_CHUNK_VMS: usize = 64 << 10;
/// Maximum number of sockets of a planned cluster.
pub const PLAN_SOCKETS_MAX: u32 = 64 << 10;
/// Maximum number of pool sizes that one plan compares.
pub const PLAN_POOL_SIZES_MAX: usize = 32;
/// Maximum number of policies that one plan compares.
pub const PLAN_POLICIES_MAX: usize = 64;
/// Maximum number of fractions of local memory that one plan compares.
pub const PLAN_LOCAL_FRACTIONS_MAX: usize = 64;
/// Shortest time between two samples of a plan.
pub const PLAN_SAMPLE_INTERVAL_MIN: Ns = Ns::secs(1);
/// Maximum number of seeds that one plan compares.
pub const PLAN_SEEDS_MAX: usize = 64;
