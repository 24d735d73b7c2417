//! Comparison of allocation schemes for tenants from real traces that share a host. The result is
//! the throughput of each tenant relative to an equal split (Spirit, figure 6). The module also
//! computes the data of Spirit's figures 1 (sensitivity of throughput), 3 (rounds of the market), 8
//! (markets with many tenants) and 9 (tenants that change their workload).
//!
//! The true throughput of a tenant follows from Spirit's slowdown (section 4.2, corrected form) and
//! the exact LRU miss ratios of its whole trace. Only the ideal scheme uses the true throughput.
//! The other schemes use the values that a host would measure.

mod accesses;
mod auction;
mod change;
mod host;
mod ideal;
mod lru;
mod mixes;
mod preference;
mod scaling;
mod schemes;
mod split;
mod tenant;
mod utility;

pub use accesses::{AccessTraceError, read};
pub use auction::{Auction, Round, auction};
pub use change::{
    ACTIVITY_CHANGES, Change, ChangeResponse, EPOCH_COUNT, Epoch, RESPONSE_EPOCHS_MAX, TENANTS,
    TenantActivity, TenantEpoch, change_responses, simulate_changes,
};
pub use host::Host;
pub use mixes::{Mix, SMALL_HOST_TENANTS, memory_and_compute_bound_tenants, mixes};
pub use preference::{
    ShareSensitivity, memory_preference, most_different_traces, share_sensitivity, typical,
};
pub use scaling::{Bidders, ScalingTenants};
pub use schemes::{Outcome, Scheme, compare_schemes};
pub use tenant::{Kind, MissRatioCurve, Tenant};

#[cfg(test)]
mod tests;
