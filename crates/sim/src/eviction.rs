//! Simulation of tenants whose memory is evicted to memory outside of the host (Glitter, section IV).
//!
//! [`simulate_cluster`] runs tasks on servers that evict memory to each other over a leaf-spine network.
//! [`Network`] computes the rates of their flows. [`simulate_task`] runs one task alone. A [`Topology`] is a network
//! with a list of flows, whose completion times can be compared with those of a packet simulation.
//!
//! [`Tenant`] is a fluid model of one tenant of a host. The tenant touches new memory at a constant rate
//! until it has touched its working set. A part of its accesses goes to memory that it has touched
//! before, at random. Evicted memory must be fetched before it can be accessed. While usage is above the
//! threshold, memory is evicted at a limited rate. At the limit, the tenant waits for evictions.

mod cluster;
mod flow_list;
mod flow_times;
mod one_task;
mod parameters;
mod sharing;
mod tenant;
mod topology;

pub use cluster::{ClusterReport, EvictionScheme, simulate_cluster};
pub use flow_list::{FlowReport, FlowScheme};
pub use one_task::{TaskReport, simulate_task};
pub use parameters::{Parameters, Workload};
pub use sharing::{Flow, Network, QUEUES};
pub use tenant::{Outcome, Tenant, TenantSpec};
pub use topology::{FlowNetwork, FlowSpec, LinkSpec, Topology};

#[cfg(test)]
mod tests;
