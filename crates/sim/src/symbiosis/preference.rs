//! Sensitivity of throughput to each resource (Spirit, figure 1), and selection of typical tenants
//! and of the two most different traces.

use fairness::market::Bundle;

use super::{
    mixes::MEMORY_BOUND_MISS_COST,
    tenant::{Kind, Tenant},
};

/// Throughput with one scaled resource, relative to the throughput with equal shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareSensitivity {
    /// Factor by which the share of one resource is scaled.
    pub times: f64,
    /// Relative throughput with scaled memory and an equal share of the link.
    pub by_memory: f64,
    /// Relative throughput with scaled bandwidth and an equal share of memory.
    pub by_bandwidth: f64,
}

/// Number of points of the sensitivity curve within one equal share.
const POINTS_PER_SHARE: u32 = 8;
/// End of the sensitivity curve, in equal shares.
const CURVE_SHARES_MAX: u32 = 3;
/// Factor by which [`memory_preference`] raises and lowers a share.
const SHARE_SCALE_FACTOR: f64 = 2.0;

/// Computes the sensitivity of throughput for shares from a quarter of an equal share to three
/// equal shares.
pub fn share_sensitivity(tenant: &Tenant, equal: Bundle) -> Vec<ShareSensitivity> {
    let baseline = tenant.throughput(equal);
    let at = |step: u32| {
        let times = f64::from(step) / f64::from(POINTS_PER_SHARE);
        let (more_memory, more_bandwidth) = scale_each_resource(equal, times);
        ShareSensitivity {
            times,
            by_memory: tenant.throughput(more_memory) / baseline,
            by_bandwidth: tenant.throughput(more_bandwidth) / baseline,
        }
    };
    (POINTS_PER_SHARE / 4..=POINTS_PER_SHARE * CURVE_SHARES_MAX).map(at).collect()
}

/// Returns two bundles: one with scaled memory, one with scaled bandwidth.
fn scale_each_resource(equal: Bundle, times: f64) -> (Bundle, Bundle) {
    let memory = Bundle { memory: equal.memory * times, ..equal };
    (memory, Bundle { bandwidth: equal.bandwidth * times, ..equal })
}

/// Returns the preference of a tenant for memory over bandwidth. For each resource, the gain is the
/// log ratio of the throughputs at twice and at half of the equal share. The result is the gain of
/// memory minus the gain of bandwidth: negative if the tenant prefers bandwidth.
pub fn memory_preference(tenant: &Tenant, equal: Bundle) -> f64 {
    let ((memory, bandwidth), (less_memory, less_bandwidth)) = (
        scale_each_resource(equal, SHARE_SCALE_FACTOR),
        scale_each_resource(equal, 1.0 / SHARE_SCALE_FACTOR),
    );
    let gain = |more, less| (tenant.throughput(more) / tenant.throughput(less)).ln();
    gain(memory, less_memory) - gain(bandwidth, less_bandwidth)
}

/// Returns the tenant with the median preference among the tenants of a kind, or `None` if there is
/// no tenant of this kind.
pub fn typical(tenants: &[Tenant], kind: Kind, equal: Bundle) -> Option<&Tenant> {
    let mut of_kind: Vec<&Tenant> = tenants.iter().filter(|tenant| tenant.kind(equal) == kind).collect();
    of_kind.sort_by(|a, b| memory_preference(a, equal).total_cmp(&memory_preference(b, equal)));
    of_kind.get(of_kind.len() / 2).copied()
}

/// Returns the indexes of the trace that prefers bandwidth most and of the trace that prefers
/// memory most. All traces are compared as memory-bound tenants. Returns `None` for fewer than two
/// traces.
pub fn most_different_traces(traces: &[Tenant], equal: Bundle) -> Option<(usize, usize)> {
    let preferences: Vec<f64> = traces
        .iter()
        .map(|trace| memory_preference(&trace.with_params(MEMORY_BOUND_MISS_COST, 1.0), equal))
        .collect();
    let mut order: Vec<usize> = (0..traces.len()).collect();
    order.sort_by(|a, b| preferences[*a].total_cmp(&preferences[*b]));
    let (stream, cache) = (*order.first()?, *order.last()?);
    (stream != cache).then_some((stream, cache))
}
