//! Mixes of tenants that share a host.

use super::tenant::Tenant;

/// Named set of tenants that share one host.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Name of the mix: the number of tenants and the name of the first trace.
    pub name: String,
    /// Tenants of the mix.
    pub tenants: Vec<Tenant>,
}

/// Number of tenants on a small host, equal to one of Spirit's servers.
pub const SMALL_HOST_TENANTS: usize = 6;
/// Number of tenants on a large host, equal to four of Spirit's servers.
const LARGE_HOST_TENANTS: usize = 24;
/// Cost of a miss relative to a hit, for memory-bound tenants.
pub(super) const MEMORY_BOUND_MISS_COST: f64 = 100.0;
/// Cost of a miss relative to a hit, for compute-bound tenants.
const COMPUTE_BOUND_MISS_COST: f64 = 1.0;

/// Returns the miss cost of the tenant at an index. Every sixth tenant is compute-bound, as on
/// Spirit's servers.
pub(super) const fn gamma(at: usize) -> f64 {
    if at % SMALL_HOST_TENANTS == SMALL_HOST_TENANTS - 1 {
        COMPUTE_BOUND_MISS_COST
    } else {
        MEMORY_BOUND_MISS_COST
    }
}

/// Returns one small mix per trace, made of this trace and the five traces after it, and one large
/// mix of all traces in turn. The bandwidth demand of each tenant is the whole link.
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

/// Returns two tenants for every trace: one memory-bound, one compute-bound.
pub fn memory_and_compute_bound_tenants(traces: &[Tenant]) -> Vec<Tenant> {
    let of = |gamma| traces.iter().map(move |trace| trace.with_params(gamma, 1.0));
    of(MEMORY_BOUND_MISS_COST).chain(of(COMPUTE_BOUND_MISS_COST)).collect()
}
