//! Which tenants share a host.

use super::tenant::Tenant;

/// Tenants of one host.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Of how many, and from which trace on.
    pub name: String,
    /// They.
    pub tenants: Vec<Tenant>,
}

/// Tenants of a small host and of a large one: a server of Spirit's, and four of them.
pub const SMALL: usize = 6;
const LARGE: usize = 24;
/// How much longer a miss takes than a hit: where tenants wait for memory, and where they mostly reckon.
pub(super) const GAMMA: f64 = 100.0;
const GAMMA_COMPUTE: f64 = 1.0;

/// One of six tenants reckons more than it waits, as on Spirit's servers.
pub(super) const fn gamma(at: usize) -> f64 {
    if at % SMALL == SMALL - 1 { GAMMA_COMPUTE } else { GAMMA }
}

/// From each trace on, it and the five after it; and all of them in turn. Every tenant that waits could fill the link.
pub fn mixes(traces: &[Tenant]) -> Vec<Mix> {
    let mix = |size: usize, first: usize| {
        let tenant = |at: usize| traces[(first + at) % traces.len()].again(gamma(at), 1.0);
        let name = format!("{size} from {}", traces[first].name);
        Mix { name, tenants: (0..size).map(tenant).collect() }
    };
    (0..traces.len())
        .map(|first| mix(SMALL, first))
        .chain((!traces.is_empty()).then(|| mix(LARGE, 0)))
        .collect()
}

/// Every trace as a tenant that waits, and as one that reckons.
pub fn both_ways(traces: &[Tenant]) -> Vec<Tenant> {
    let of = |gamma| traces.iter().map(move |trace| trace.again(gamma, 1.0));
    of(GAMMA).chain(of(GAMMA_COMPUTE)).collect()
}
