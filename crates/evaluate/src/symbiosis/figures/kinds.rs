//! Figure 1: throughput of a tenant of each kind as a function of memory and of bandwidth.

use serde::Serialize;
use sim::symbiosis::{
    Kind, SMALL_HOST_TENANTS, Tenant, memory_and_compute_bound, memory_preference, share_sensitivity, typical,
};

use super::{FigureInputs, line};
use crate::figure::{Figure, Panel, Scale};

const KINDS: [(Kind, &str); 3] = [
    (Kind::Bandwidth, "bound by bandwidth"),
    (Kind::Memory, "bound by memory too"),
    (Kind::Compute, "bound by its processor"),
];

/// One tenant, drawn or not.
#[derive(Serialize)]
pub(super) struct Row {
    trace: String,
    gamma: f64,
    kind: String,
    /// Logarithm of the gain from twice against half the memory, relative to that from bandwidth.
    #[serde(rename = "leaning")]
    memory_preference: f64,
    is_drawn: bool,
    #[serde(rename = "along")]
    curve: Vec<CurvePoint>,
}

#[derive(Serialize)]
struct CurvePoint {
    equal_shares: f64,
    /// Throughput relative to an equal share of both.
    by_memory: f64,
    by_bandwidth: f64,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, Vec<Row>) {
    let equal = inputs.host().equal(SMALL_HOST_TENANTS);
    let tenants = memory_and_compute_bound(&inputs.tenants);
    // CPU-bound tenants form a kind of their own; the others stall, as most do in a mix.
    let of = |kind| if kind == Kind::Compute { &tenants[..] } else { &tenants[..inputs.tenants.len()] };
    let drawn: Vec<(usize, &str, &Tenant)> = (0..)
        .zip(KINDS)
        .filter_map(|(nth, (kind, name))| Some((nth, name, typical(of(kind), kind, equal)?)))
        .collect();
    let panel = |title: &str, x_title, value: fn(&sim::symbiosis::ShareSensitivity) -> f64| Panel {
        title: title.to_owned(),
        x_title,
        y_title: "Throughput (of that with an equal split, times)",
        x: Scale::Number,
        y: Scale::Number,
        x_max: f64::INFINITY,
        series: drawn
            .iter()
            .map(|(nth, name, tenant)| {
                let points = share_sensitivity(tenant, equal);
                let name = format!("{name}: {}, a miss costs {:.0} hits more", tenant.name, tenant.gamma);
                line(*nth, name, points.iter().map(|at| (at.times, value(at))))
            })
            .collect(),
    };
    let figure = Figure(vec![
        panel("(a) More or less local memory", "Local memory (equal shares)", |at| at.by_memory),
        panel("(b) More or less of the link", "Bandwidth (equal shares)", |at| at.by_bandwidth),
    ]);
    let row = |tenant: &Tenant| Row {
        trace: tenant.name.clone(),
        gamma: tenant.gamma,
        kind: format!("{:?}", tenant.kind(equal)).to_lowercase(),
        memory_preference: memory_preference(tenant, equal),
        is_drawn: drawn.iter().any(|(_, _, one)| std::ptr::eq(*one, tenant)),
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
