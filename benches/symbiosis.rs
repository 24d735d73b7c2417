//! Measures the market on one thread and compares it with Spirit's allocator.
//!
//! Goals for the time to clear a market from miss-ratio curves: 10 µs for 24 tenants, and 300 µs for
//! 1,000. The agent's utilities have no closed form, and their demand is searched on a grid. They
//! are measured with the numbers of tenants of a usual and of a full host, with refinement as in the
//! agent.
//!
//! Goal for the fit of a miss-ratio curve to 40,000 samples: 200 µs.
//!
//! A Rust port of Spirit's published allocator (`port`) runs with the same tenants, for one epoch
//! and for ten epochs. After ten epochs, six tenants have most of their gain.

#[path = "symbiosis/port.rs"]
mod port;
#[path = "symbiosis/tenants.rs"]
mod tenants;

use std::{
    hint::black_box,
    process::ExitCode,
    time::{Duration, Instant},
};

use benches::{
    failure::Failure,
    report::{Rounds, format_ratio, format_table},
};
use fairness::{
    market::{Bundle, Market, Outcome, Share, Slowdown, Supply, Tenant, Utility},
    profile::{Histogram, LinkTraffic, MeasuredMissRatio, fit, stall_utility},
};
use port::SpiritPort;
use rand::SeedableRng as _;
use rand_pcg::Pcg64Mcg;
use tenants::{TenantModel, random_tenants, six_tenants, supply};

/// Allocator that pool-manager uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const TENANT_COUNTS: [usize; 5] = [3, 24, 100, 1_000, 10_000];
/// Numbers of tenants in the measured markets with the agent's utilities.
const AGENT_TENANT_COUNTS: [usize; 3] = [24, 64, 256];
/// Minimum number of tenants of a market that counts towards the growth exponent of the time.
const GROWTH_TENANTS_MIN: usize = 1_000;
/// Minimum number of tenants for the comparison with the port of Spirit's allocator. The evaluation
/// of Spirit has 24 tenants.
const COMPARISON_TENANTS_MIN: usize = 24;
/// Epochs after which the slowdown of the port is reported.
const REPORTED_EPOCHS: [u32; 4] = [1, 5, 10, 20];
/// Number of epochs of the port that is compared with the market.
const COMPARED_EPOCHS: u32 = 10;
/// Minimum total duration of the repeated calls of one measurement.
const REPEAT_DURATION: Duration = Duration::from_millis(500);
/// Minimum number of repeated calls of one measurement.
const TIMED_CALLS_MIN: u32 = 11;
/// Maximum relative loss of a tenant compared with an equal split, a tolerance for rounding errors.
const SPLIT_LOSS_MAX: f64 = 1e-6;
const SEED: u64 = 20_251_013;

fn main() -> ExitCode {
    match measure() {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("symbiosis: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<String, Failure> {
    let sizes = TENANT_COUNTS.into_iter().map(MarketTimes::measure).collect::<Result<Vec<_>, _>>()?;
    let compared = sizes.iter().filter(|times| times.tenants >= COMPARISON_TENANTS_MIN);
    let ratios: String = compared.map(MarketTimes::ratios).collect();
    let growth = format_growth("market", &sizes, |times| times.market_us);
    let agent = AGENT_TENANT_COUNTS.into_iter().map(measure_agent).collect::<Result<String, _>>()?;
    let rows: Vec<_> = sizes.iter().map(MarketTimes::row).collect();
    let lines: String = sizes.iter().map(MarketTimes::lines).collect();
    let head = ["tenants; medians in us", "market", "port, an epoch", "ten"];
    Ok(format!(
        "\n{}\n{lines}{agent}{}{growth}{}{}",
        format_table(&head, &rows),
        measure_fit(),
        ratios,
        format_slowdowns()?
    ))
}

/// Median times of a market with this number of tenants, in microseconds.
struct MarketTimes {
    tenants: usize,
    market_us: f64,
    port_epoch_us: f64,
    port_ten_epochs_us: f64,
}

impl MarketTimes {
    fn measure(tenants: usize) -> Result<Self, Failure> {
        let mut random = Pcg64Mcg::seed_from_u64(SEED + tenants as u64);
        let (supply, models) = (supply(tenants), random_tenants(tenants, &mut random));
        check_market(&to_tenants(models.clone(), supply), supply)?;
        Ok(Self {
            tenants,
            market_us: median_us(|| models.clone(), |models| clear_market(models, supply)),
            port_epoch_us: median_us(|| SpiritPort::new(&models, supply), |port| run_epochs(port, 1)),
            port_ten_epochs_us: median_us(
                || SpiritPort::new(&models, supply),
                |port| run_epochs(port, COMPARED_EPOCHS),
            ),
        })
    }

    fn row(&self) -> Vec<String> {
        let us = |us: f64| format!("{us:.1}");
        vec![
            self.tenants.to_string(),
            us(self.market_us),
            us(self.port_epoch_us),
            us(self.port_ten_epochs_us),
        ]
    }

    fn lines(&self) -> String {
        let line = |kind: &str, us: f64| format!("time symbiosis_{kind}_{} {us:.1} us\n", self.tenants);
        format!("{}{}", line("market", self.market_us), line("port", self.port_epoch_us))
    }

    fn ratios(&self) -> String {
        let line = |what: &str, spirit_us: f64| {
            format_ratio(&format!("symbiosis_{}_vs_{what}", self.tenants), spirit_us / self.market_us)
        };
        format!(
            "{}\n{}\n",
            line("spirit_epoch", self.port_epoch_us),
            line("spirit_ten_epochs", self.port_ten_epochs_us)
        )
    }
}

/// Returns the median duration of `call`, in microseconds. Excludes the time to create its input
/// and to drop its output.
fn median_us<G, L>(mut input: impl FnMut() -> G, mut call: impl FnMut(G) -> L) -> f64 {
    let (mut rounds, mut calls, start) = (Rounds::default(), 0, Instant::now());
    while calls < TIMED_CALLS_MIN || start.elapsed() < REPEAT_DURATION {
        let input = black_box(input());
        let start = Instant::now();
        let output = black_box(call(input));
        rounds.add(start.elapsed().as_nanos() as f64 / 1e3);
        drop(output);
        calls += 1;
    }
    rounds.median()
}

fn to_tenants(models: Vec<TenantModel>, supply: Supply) -> Vec<Tenant<Slowdown>> {
    models.into_iter().map(|model| model.into_tenant(supply)).collect()
}

/// Computes shares from miss-ratio curves. Also returns the tenants, so that dropping them is not
/// measured.
fn clear_market(models: Vec<TenantModel>, supply: Supply) -> (Vec<Tenant<Slowdown>>, Outcome) {
    let tenants = to_tenants(models, supply);
    let outcome = new_market(&tenants, supply).clear(0);
    (tenants, outcome)
}

/// Measures a market with the utilities that the agent learns from stalls, with refinement. Returns
/// a line of the report.
fn measure_agent(tenants: usize) -> Result<String, Failure> {
    let mut random = Pcg64Mcg::seed_from_u64(SEED + tenants as u64);
    let (supply, models) = (supply(tenants), random_tenants(tenants, &mut random));
    let tenant = |model: TenantModel| {
        // A tenant without local memory stalls 20 s per second of work.
        let traffic =
            LinkTraffic { mb_per_stall_second: model.bandwidth_demand / 10.0, mb_per_work_second: 1.0 };
        let utility = stall_utility(supply, model.knots, 20.0, traffic).expect("the curve is valid");
        Tenant::new(1.0, supply, utility)
    };
    let tenants_of_market: Vec<_> = models.into_iter().map(tenant).collect();
    let decide = || {
        let market = new_market(&tenants_of_market, supply);
        let mut outcome = market.clear(0);
        market.refine(&mut outcome);
        outcome
    };
    check_shares(&tenants_of_market, supply, &decide())?;
    Ok(format!("time symbiosis_agent_{tenants} {:.1} us\n", median_us(|| (), |()| decide())))
}

/// Measures the fit of a miss-ratio curve to 40,000 samples. The samples follow Zipf's law over the
/// pages of 8 GiB.
fn measure_fit() -> String {
    const PAGES: u32 = 2 << 20;
    const SAMPLES: f64 = 40_000.0;
    let weights: Vec<f64> = (1..=PAGES).map(|rank| f64::from(rank).powf(-0.9)).collect();
    let all: f64 = weights.iter().sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let counts: Vec<u32> = weights.iter().map(|weight| (weight / all * SAMPLES).round() as u32).collect();
    let local = PAGES as usize / 4;
    let misses = 1.0 - weights[..local].iter().sum::<f64>() / all;
    let measured =
        MeasuredMissRatio { pages: f64::from(PAGES), local: local as f64, misses, pages_per_mib: 256.0 };
    let histogram = Histogram::new(counts.iter().copied());
    let us = median_us(|| (), |()| fit(&histogram, &measured));
    format!("time symbiosis_fit {us:.1} us\n")
}

fn run_epochs(mut port: SpiritPort, epochs: u32) -> SpiritPort {
    (0..epochs).for_each(|_| port.run_epoch());
    port
}

fn new_market<U: Utility>(tenants: &[Tenant<U>], supply: Supply) -> Market<'_, U> {
    Market::new(supply, tenants).expect("all tenants have equal weights")
}

/// Clears a market and checks its outcome.
fn check_market<U: Utility>(tenants: &[Tenant<U>], supply: Supply) -> Result<(), Failure> {
    check_shares(tenants, supply, &new_market(tenants, supply).clear(0))
}

/// Checks that the shares are at most the supply in total, and that no tenant is worse off than
/// with an equal split.
fn check_shares<U: Utility>(tenants: &[Tenant<U>], supply: Supply, outcome: &Outcome) -> Result<(), Failure> {
    let sum: Share = outcome.shares.iter().copied().sum();
    let certificate = new_market(tenants, supply).certify(outcome);
    let is_within_supply = sum.is_within(supply.all());
    if is_within_supply && certificate.sharing_incentive >= 1.0 - SPLIT_LOSS_MAX {
        return Ok(());
    }
    let reply = format!("shares of {sum:?} of {supply:?}; {certificate:?}");
    Err(Failure::UnexpectedReply { subject: format!("a market of {} tenants", tenants.len()), reply })
}

/// Formats the growth exponent of the time with the number of tenants: the slope of a least-squares
/// line through the logarithms of both.
fn format_growth(kind: &str, sizes: &[MarketTimes], of: fn(&MarketTimes) -> f64) -> String {
    let large = sizes.iter().filter(|times| times.tenants >= GROWTH_TENANTS_MIN);
    let points: Vec<_> = large.map(|times| ((times.tenants as f64).ln(), of(times).ln())).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let variance: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    format!("growth symbiosis_{kind} {:.2}\n", covariance / variance)
}

/// Formats the geometric mean slowdown of six tenants, one line per allocator.
fn format_slowdowns() -> Result<String, Failure> {
    let models = six_tenants();
    let supply = supply(models.len());
    let tenants = to_tenants(models.clone(), supply);
    let mean = |bundles: &mut dyn Iterator<Item = Bundle>| {
        let slowdowns =
            tenants.iter().zip(bundles).map(|(tenant, bundle)| tenant.utility.slowdown(bundle).ln());
        (slowdowns.sum::<f64>() / tenants.len() as f64).exp()
    };
    let market = new_market(&tenants, supply);
    let outcome = market.clear(0);
    check_shares(&tenants, supply, &outcome)?;
    let market_slowdown = mean(&mut outcome.shares.iter().map(|share| (*share).into()));
    let split = mean(&mut (0..models.len()).map(|tenant| market.fair_share(tenant)));
    let mut lines = format!("slowdown equal_split {split:.3}\n");
    let (mut port, mut slowdown_ratio) = (SpiritPort::new(&models, supply), f64::NAN);
    for epoch in 1..=REPORTED_EPOCHS[REPORTED_EPOCHS.len() - 1] {
        port.run_epoch();
        let spirit_slowdown = mean(&mut port.bundles());
        if REPORTED_EPOCHS.contains(&epoch) {
            lines += &format!("slowdown spirit_after_{epoch} {spirit_slowdown:.3}\n");
        }
        if epoch == COMPARED_EPOCHS {
            slowdown_ratio = spirit_slowdown / market_slowdown;
        }
    }
    let ratio = format_ratio("symbiosis_slowdown_vs_spirit", slowdown_ratio);
    Ok(format!("{lines}slowdown market {market_slowdown:.3}\n{ratio}\n"))
}
