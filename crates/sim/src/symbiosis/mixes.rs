//! Mixes of tenants that share a host.

use super::tenant::Tenant;

/// Tenants of one host.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Number of tenants and name of the first trace.
    pub name: String,
    /// Tenants of the host.
    pub tenants: Vec<Tenant>,
}

/// Tenants of a small host (one of Spirit's servers) and of a large one (four of them).
pub const SMALL_HOST_TENANTS: usize = 6;
const LARGE_HOST_TENANTS: usize = 24;
/// Cost of a miss relative to a hit, for memory-bound and for compute-bound tenants.
pub(super) const GAMMA: f64 = 100.0;
const GAMMA_COMPUTE: f64 = 1.0;

/// One of six tenants is compute-bound, as on Spirit's servers.
pub(super) const fn gamma(at: usize) -> f64 {
    if at % SMALL_HOST_TENANTS == SMALL_HOST_TENANTS - 1 { GAMMA_COMPUTE } else { GAMMA }
}

/// Returns a small mix starting at each trace, with the five after it, and one large mix of all
/// traces in turn. Every memory-bound tenant could saturate the link.
pub fn mixes(traces: &[Tenant]) -> Vec<Mix> {
    let mix = |size: usize, first: usize| {
        let tenant = |at: usize| traces[(first + at) % traces.len()].with_params(gamma(at), 1.0);
        let name = format!("{size} from {}", traces[first].name);
        Mix { name, tenants: (0..size).map(tenant).collect() }
    };
    (0..traces.len())
        .map(|first| mix(SMALL_HOST_TENANTS, first))
        .chain((!traces.is_empty()).then(|| mix(LARGE_HOST_TENANTS, 0)))
        .collect()
}

/// Returns every trace as a memory-bound and as a compute-bound tenant.
pub fn memory_and_compute_bound(traces: &[Tenant]) -> Vec<Tenant> {
    let of = |gamma| traces.iter().map(move |trace| trace.with_params(gamma, 1.0));
    of(GAMMA).chain(of(GAMMA_COMPUTE)).collect()
}
