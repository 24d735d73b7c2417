//! Policies for memory tiers: which memory of which tenant is in local memory, and which is in CXL
//! memory.
//!
//! [`fair`] is the policy of Equilibria. It shares the tiers of a host fairly among tenants. [`evict`] is
//! the policy of Glitter. It evicts memory before a tenant waits for it.
//!
//! The crate is pure. The caller measures counters, passes them to a policy, and performs the
//! returned orders.
#![forbid(unsafe_code)]

pub mod evict;
pub mod fair;
