//! Sensitivity of throughput to each resource alone (Spirit, figure 1), the typical tenant of a
//! kind, and the two most different traces.

use fairness::market::Bundle;

use super::{
    mixes::GAMMA,
    tenant::{Kind, Tenant},
};

/// Throughput with scaled shares, relative to an equal share of both resources.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareSensitivity {
    /// Factor on the equal share of one resource.
    pub times: f64,
    /// Throughput with scaled memory and an equal share of the link.
    pub by_memory: f64,
    /// Throughput with scaled bandwidth and an equal share of memory.
    pub by_bandwidth: f64,
}

/// Steps per equal share, and range in equal shares.
const STEPS: u32 = 8;
const SHARES: u32 = 3;
/// Factor by which a share is raised and lowered for [`memory_preference`].
const SCALE_FACTOR: f64 = 2.0;

/// Computes the sensitivity from a quarter of an equal share to three of them.
pub fn share_sensitivity(tenant: &Tenant, equal: Bundle) -> Vec<ShareSensitivity> {
    let baseline = tenant.throughput(equal);
    let at = |step: u32| {
        let times = f64::from(step) / f64::from(STEPS);
        let (more_memory, more_bandwidth) = scaled(equal, times);
        ShareSensitivity {
            times,
            by_memory: tenant.throughput(more_memory) / baseline,
            by_bandwidth: tenant.throughput(more_bandwidth) / baseline,
        }
    };
    (STEPS / 4..=STEPS * SHARES).map(at).collect()
}

/// Returns the bundles with scaled memory and with scaled bandwidth.
fn scaled(equal: Bundle, times: f64) -> (Bundle, Bundle) {
    let memory = Bundle { memory: equal.memory * times, ..equal };
    (memory, Bundle { bandwidth: equal.bandwidth * times, ..equal })
}

/// Returns how much more the throughput gains from memory than from bandwidth, as the difference of
/// log ratios between twice and half the equal share. Negative for tenants that prefer bandwidth.
pub fn memory_preference(tenant: &Tenant, equal: Bundle) -> f64 {
    let ((memory, bandwidth), (less_memory, less_bandwidth)) =
        (scaled(equal, SCALE_FACTOR), scaled(equal, 1.0 / SCALE_FACTOR));
    let gain = |more, less| (tenant.throughput(more) / tenant.throughput(less)).ln();
    gain(memory, less_memory) - gain(bandwidth, less_bandwidth)
}

/// Returns the tenant of a kind with the median preference.
pub fn typical(tenants: &[Tenant], kind: Kind, equal: Bundle) -> Option<&Tenant> {
    let mut of_kind: Vec<&Tenant> = tenants.iter().filter(|tenant| tenant.kind(equal) == kind).collect();
    of_kind.sort_by(|baseline, other| {
        memory_preference(baseline, equal).total_cmp(&memory_preference(other, equal))
    });
    of_kind.get(of_kind.len() / 2).copied()
}

/// Returns the traces that prefer bandwidth and memory most, as memory-bound tenants; `None` with
/// fewer than two traces.
pub fn most_different(traces: &[Tenant], equal: Bundle) -> Option<(usize, usize)> {
    let preferences: Vec<f64> =
        traces.iter().map(|trace| memory_preference(&trace.with_params(GAMMA, 1.0), equal)).collect();
    let mut order: Vec<usize> = (0..traces.len()).collect();
    order.sort_by(|baseline, other| preferences[*baseline].total_cmp(&preferences[*other]));
    let (stream, cache) = (*order.first()?, *order.last()?);
    (stream != cache).then_some((stream, cache))
}
