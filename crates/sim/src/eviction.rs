//! Simulation of tenants whose memory is evicted to memory outside of the host (Glitter, section IV).
//!
//! [`Tenant`] is a fluid model of one tenant of a host. The tenant touches new memory at a constant rate
//! until it has touched its working set. A part of its accesses goes to memory that it has touched
//! before, at random. Evicted memory must be fetched before it can be accessed. While usage is above the
//! threshold, memory is evicted at a limited rate. At the limit, the tenant waits for evictions.

mod cluster;
mod flow_times;
mod parameters;
mod sharing;
mod tenant;

pub use cluster::{ClusterReport, EvictionScheme, simulate_cluster};
pub use parameters::{Parameters, ParametersError, Workload};
pub use sharing::{Flow, Network, QUEUES};
use tenant::STEP;
pub use tenant::{Outcome, Tenant, TenantSpec};

#[cfg(test)]
mod tests;
