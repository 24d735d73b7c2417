//! Figure 3: rounds of a market. The paper has three synthetic tenants; this is the mix of six that
//! gains most by the market alone.

use serde::Serialize;
use sim::symbiosis::{Auction, Mix, Outcome, Round, SMALL_HOST_TENANTS, Scheme, auction};

use super::{ComparedMix, FigureInputs, horizontal, line};
use crate::figure::{Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Largest drawn demand, relative to the supply.
const DEMAND_DRAWN_MAX: f64 = 2.0;

/// Demands in a market.
#[derive(Serialize)]
pub(super) struct Numbers {
    mix: String,
    traces: Vec<String>,
    status: String,
    memory_price: f64,
    demand: Vec<Row>,
    rounds: Vec<Row>,
    shares: Vec<Share>,
}

/// Fractions of all memory, or of the link.
#[derive(Serialize)]
struct Row {
    memory_price: f64,
    dividend: f64,
    #[serde(rename = "memory_asked")]
    memory_demand: f64,
    #[serde(rename = "bandwidth_asked")]
    bandwidth_demand: f64,
}

/// Fractions of a footprint, and of the link.
#[derive(Serialize)]
struct Share {
    memory: f64,
    bandwidth: f64,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, Numbers) {
    let mix = mix_with_largest_gain(&inputs.compared);
    let auction = auction(&mix.tenants, inputs.host());
    let figure = Figure(vec![demand(mix, &auction), rounds(&auction)]);
    let row = |round: &Round| Row {
        memory_price: round.price,
        dividend: round.dividend,
        memory_demand: round.sum.memory,
        bandwidth_demand: round.sum.bandwidth,
    };
    let numbers = Numbers {
        mix: mix.name.clone(),
        traces: mix.tenants.iter().map(|tenant| tenant.name.clone()).collect(),
        status: format!("{:?}", auction.status),
        memory_price: auction.price,
        demand: auction.demand.iter().map(row).collect(),
        rounds: auction.rounds.iter().map(row).collect(),
        shares: auction
            .shares
            .iter()
            .map(|share| Share { memory: share.memory, bandwidth: share.bandwidth })
            .collect(),
    };
    (figure, numbers)
}

fn mix_with_largest_gain(compared: &[ComparedMix]) -> &Mix {
    let gain = |one: &&ComparedMix| {
        let by_market = one.outcomes.iter().find(|outcome| outcome.scheme == Scheme::Market);
        by_market.map_or(0.0, Outcome::gain)
    };
    let small = compared.iter().filter(|one| one.mix.tenants.len() == SMALL_HOST_TENANTS);
    let most = small.max_by(|one, other| gain(one).total_cmp(&gain(other)));
    &most.expect("each trace has a mix of six").mix
}

fn demand(mix: &Mix, auction: &Auction) -> Panel {
    let of = |resource: fn(&Round) -> f64| {
        let all = auction.demand.iter().map(move |round| (round.price, resource(round)));
        all.filter(|(_, demand)| *demand <= DEMAND_DRAWN_MAX)
    };
    Panel {
        title: format!("(a) What six tenants ask for, by price: {}", mix.name),
        x_title: "Price of all memory (% of all money)",
        y_title: "Asked for (% of what there is)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: 1.0,
        series: vec![
            line(0, "memory", of(|round| round.sum.memory)),
            line(1, "bandwidth", of(|round| round.sum.bandwidth)),
            horizontal("all there is", 1.0),
            Series {
                name: "where the market ended".to_owned(),
                style: SeriesStyle::Upright,
                points: vec![Point::new(auction.price, 0.0)],
            },
        ],
    }
}

fn rounds(auction: &Auction) -> Panel {
    let of = |resource: fn(&Round) -> f64| {
        (1_u32..).zip(&auction.rounds).map(move |(n, r)| (f64::from(n), resource(r)))
    };
    Panel {
        title: "(b) Round by round".to_owned(),
        x_title: "Round",
        y_title: "Asked for (% of what there is); price (% of all money)",
        x: Scale::Number,
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: vec![
            line(0, "memory", of(|round| round.sum.memory)),
            line(1, "bandwidth", of(|round| round.sum.bandwidth)),
            line(2, "the price of memory", of(|round| round.price)),
            horizontal("all there is", 1.0),
        ],
    }
}
