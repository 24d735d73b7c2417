//! Figure 1: throughput of a tenant of each kind as a function of memory and of bandwidth.

use serde::Serialize;
use sim::symbiosis::{
    Kind, SMALL_HOST_TENANTS, Tenant, memory_and_compute_bound_tenants, memory_preference, share_sensitivity,
    typical,
};

use super::{FigureInputs, line_series};
use crate::figure::{Figure, Panel, Scale};

/// Kinds of tenants, with their names in the legend.
const KINDS: [(Kind, &str); 3] = [
    (Kind::Bandwidth, "bound by bandwidth"),
    (Kind::Memory, "bound by bandwidth and memory"),
    (Kind::Compute, "bound by the processor"),
];

/// Data of one tenant as JSON. One tenant of each kind is drawn.
#[derive(Serialize)]
pub(super) struct Row {
    trace: String,
    gamma: f64,
    kind: String,
    /// Logarithm of the ratio of the throughputs with twice and with half the memory, minus the
    /// same logarithm for bandwidth.
    #[serde(rename = "leaning")]
    memory_preference: f64,
    is_drawn: bool,
    #[serde(rename = "along")]
    curve: Vec<CurvePoint>,
}

#[derive(Serialize)]
struct CurvePoint {
    equal_shares: f64,
    /// Throughput with scaled memory, relative to an equal share of both resources.
    by_memory: f64,
    /// Throughput with scaled bandwidth, relative to an equal share of both resources.
    by_bandwidth: f64,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, Vec<Row>) {
    let equal = inputs.host().equal(SMALL_HOST_TENANTS);
    let tenants = memory_and_compute_bound_tenants(&inputs.tenants);
    // `tenants` contains all traces as memory-bound tenants, then all traces as compute-bound
    // tenants. Typical tenants of the other kinds are selected from the first half only, because
    // most tenants of a mix are memory-bound.
    let of = |kind| if kind == Kind::Compute { &tenants[..] } else { &tenants[..inputs.tenants.len()] };
    let drawn: Vec<(usize, &str, &Tenant)> = (0..)
        .zip(KINDS)
        .filter_map(|(index, (kind, name))| Some((index, name, typical(of(kind), kind, equal)?)))
        .collect();
    let panel = |title: &str, x_title, value: fn(&sim::symbiosis::ShareSensitivity) -> f64| Panel {
        title: title.to_owned(),
        x_title,
        y_title: "Throughput (relative to an equal split)",
        x: Scale::Number,
        y: Scale::Number,
        x_max: f64::INFINITY,
        series: drawn
            .iter()
            .map(|(index, name, tenant)| {
                let points = share_sensitivity(tenant, equal);
                let name = format!("{name}: {}, miss penalty of {:.0} hits", tenant.name, tenant.gamma);
                line_series(*index, name, points.iter().map(|at| (at.times, value(at))))
            })
            .collect(),
    };
    let figure = Figure(vec![
        panel("(a) Throughput by local memory", "Local memory (equal shares)", |at| at.by_memory),
        panel("(b) Throughput by bandwidth", "Bandwidth (equal shares)", |at| at.by_bandwidth),
    ]);
    let row = |tenant: &Tenant| Row {
        trace: tenant.name.clone(),
        gamma: tenant.gamma,
        kind: format!("{:?}", tenant.kind(equal)).to_lowercase(),
        memory_preference: memory_preference(tenant, equal),
        is_drawn: drawn.iter().any(|(_, _, other)| std::ptr::eq(*other, tenant)),
        curve: share_sensitivity(tenant, equal)
            .iter()
            .map(|at| CurvePoint {
                equal_shares: at.times,
                by_memory: at.by_memory,
                by_bandwidth: at.by_bandwidth,
            })
            .collect(),
    };
    (figure, tenants.iter().map(row).collect())
}
