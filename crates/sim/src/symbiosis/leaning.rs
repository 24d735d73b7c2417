//! What throughput hangs on, along each good alone (Spirit's figure 1): the tenant that stands for its kind, and the two traces that differ most.

use fairness::market::Bundle;

use super::{
    mixes::GAMMA,
    tenant::{Kind, Tenant},
};

/// Throughput with other shares, against that with an equal share of both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Along {
    /// How much of one good, in equal shares.
    pub times: f64,
    /// With so much memory, and an equal share of the link.
    pub by_memory: f64,
    /// With so much of the link, and an equal share of memory.
    pub by_bandwidth: f64,
}

/// Steps of an equal share, and how many equal shares are looked at.
const STEPS: u32 = 8;
const SHARES: u32 = 3;
/// Between how many times less and more of a good throughputs are compared.
const SPAN: f64 = 2.0;

/// From a quarter of an equal share on, to three.
pub fn along(tenant: &Tenant, equal: Bundle) -> Vec<Along> {
    let one = tenant.throughput(equal);
    let at = |step: u32| {
        let times = f64::from(step) / f64::from(STEPS);
        let (more_memory, more_bandwidth) = scaled(equal, times);
        Along {
            times,
            by_memory: tenant.throughput(more_memory) / one,
            by_bandwidth: tenant.throughput(more_bandwidth) / one,
        }
    };
    (STEPS / 4..=STEPS * SHARES).map(at).collect()
}

/// The same but for that many times the memory; and but for that many times the bandwidth.
fn scaled(equal: Bundle, times: f64) -> (Bundle, Bundle) {
    let memory = Bundle { memory: equal.memory * times, ..equal };
    (memory, Bundle { bandwidth: equal.bandwidth * times, ..equal })
}

/// How much more twice the memory does against half of it than twice the bandwidth against half of it; less than 0 where that does more.
pub fn leaning(tenant: &Tenant, equal: Bundle) -> f64 {
    let ((memory, bandwidth), (less_memory, less_bandwidth)) =
        (scaled(equal, SPAN), scaled(equal, 1.0 / SPAN));
    let gain = |more, less| (tenant.throughput(more) / tenant.throughput(less)).ln();
    gain(memory, less_memory) - gain(bandwidth, less_bandwidth)
}

/// Of a kind, the one in the middle between those that lean most to either good.
pub fn typical(tenants: &[Tenant], kind: Kind, equal: Bundle) -> Option<&Tenant> {
    let mut of_kind: Vec<&Tenant> = tenants.iter().filter(|tenant| tenant.kind(equal) == kind).collect();
    of_kind.sort_by(|one, other| leaning(one, equal).total_cmp(&leaning(other, equal)));
    of_kind.get(of_kind.len() / 2).copied()
}

/// Of traces, as of tenants that wait, those which lean most to bandwidth and most to memory; none where there are no two.
pub fn opposites(traces: &[Tenant], equal: Bundle) -> Option<(usize, usize)> {
    let leans: Vec<f64> = traces.iter().map(|trace| leaning(&trace.again(GAMMA, 1.0), equal)).collect();
    let mut order: Vec<usize> = (0..traces.len()).collect();
    order.sort_by(|one, other| leans[*one].total_cmp(&leans[*other]));
    let (stream, cache) = (*order.first()?, *order.last()?);
    (stream != cache).then_some((stream, cache))
}
