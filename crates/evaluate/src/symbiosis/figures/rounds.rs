//! Figure 3: demand in each round of a market. The paper uses three synthetic tenants. This figure
//! uses the small mix of tenants that gains most by the market alone.

use serde::Serialize;
use sim::symbiosis::{Auction, Mix, Outcome, Round, SMALL_HOST_TENANTS, Scheme, auction};

use super::{ComparedMix, FigureInputs, horizontal_line_series, line_series};
use crate::figure::{Figure, Panel, Point, Scale, Series, SeriesStyle};

/// Largest demand that is drawn, relative to the supply.
const PLOTTED_DEMAND_MAX: f64 = 2.0;

/// Data of figure 3 as JSON.
#[derive(Serialize)]
pub(super) struct FigureData {
    mix: String,
    traces: Vec<String>,
    status: String,
    memory_price: f64,
    demand: Vec<Row>,
    rounds: Vec<Row>,
    shares: Vec<Share>,
}

/// Total demand at one price, as fractions of all memory and of the link.
#[derive(Serialize)]
struct Row {
    memory_price: f64,
    dividend: f64,
    #[serde(rename = "memory_asked")]
    memory_demand: f64,
    #[serde(rename = "bandwidth_asked")]
    bandwidth_demand: f64,
}

/// Share of a tenant, as fractions of its footprint and of the link.
#[derive(Serialize)]
struct Share {
    memory: f64,
    bandwidth: f64,
}

pub(super) fn draw(inputs: &FigureInputs) -> (Figure, FigureData) {
    let mix = mix_with_largest_gain(&inputs.compared);
    let auction = auction(&mix.tenants, inputs.host());
    let figure = Figure(vec![demand_panel(mix, &auction), rounds_panel(&auction)]);
    let row = |round: &Round| Row {
        memory_price: round.price,
        dividend: round.dividend,
        memory_demand: round.sum.memory,
        bandwidth_demand: round.sum.bandwidth,
    };
    let numbers = FigureData {
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
    let gain = |compared: &&ComparedMix| {
        let by_market = compared.outcomes.iter().find(|outcome| outcome.scheme == Scheme::Market);
        by_market.map_or(0.0, Outcome::gain)
    };
    let small = compared.iter().filter(|compared| compared.mix.tenants.len() == SMALL_HOST_TENANTS);
    let largest = small.max_by(|left, right| gain(left).total_cmp(&gain(right)));
    &largest.expect("there is a small mix for each trace").mix
}

fn demand_panel(mix: &Mix, auction: &Auction) -> Panel {
    let of = |resource: fn(&Round) -> f64| {
        let all = auction.demand.iter().map(move |round| (round.price, resource(round)));
        all.filter(|(_, demand)| *demand <= PLOTTED_DEMAND_MAX)
    };
    Panel {
        title: format!("(a) Demand by price: {}", mix.name),
        x_title: "Price of all memory (% of all budgets)",
        y_title: "Demand (% of the supply)",
        x: Scale::Percent,
        y: Scale::Percent,
        x_max: 1.0,
        series: vec![
            line_series(0, "memory", of(|round| round.sum.memory)),
            line_series(1, "bandwidth", of(|round| round.sum.bandwidth)),
            horizontal_line_series("supply", 1.0),
            Series {
                name: "clearing price".to_owned(),
                style: SeriesStyle::VerticalLine,
                points: vec![Point::new(auction.price, 0.0)],
            },
        ],
    }
}

fn rounds_panel(auction: &Auction) -> Panel {
    let of = |resource: fn(&Round) -> f64| {
        (1_u32..).zip(&auction.rounds).map(move |(n, r)| (f64::from(n), resource(r)))
    };
    Panel {
        title: "(b) Demand and price by round".to_owned(),
        x_title: "Round",
        y_title: "Demand (% of the supply), price (% of all budgets)",
        x: Scale::Number,
        y: Scale::Percent,
        x_max: f64::INFINITY,
        series: vec![
            line_series(0, "memory", of(|round| round.sum.memory)),
            line_series(1, "bandwidth", of(|round| round.sum.bandwidth)),
            line_series(2, "price of memory", of(|round| round.price)),
            horizontal_line_series("supply", 1.0),
        ],
    }
}
