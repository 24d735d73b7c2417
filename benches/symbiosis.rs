//! Goals: on one thread, from miss-ratio curves, the market clears 24 tenants within 10 µs, 1,000
//! within 300 µs and 100,000 within 50 ms; 100,000 slightly changed ones within 10 ms; and 1,000
//! with opaque utilities within 15 ms. A miss-ratio curve is fitted to 40,000 samples within 200
//! µs. Spirit's own allocator in the same language (`port`) runs with the same tenants: one epoch,
//! and the ten epochs after which six tenants have most of their gain.

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
    report::{Rounds, ratio, table},
};
use fairness::{
    market::{
        Bundle, ClearingOptions, Grid, Market, MarketWarmStart, Outcome, Slowdown, Supply, Tenant, Utility,
    },
    profile::{Histogram, MeasuredMissRatio, fit},
};
use port::Port;
use rand::SeedableRng as _;
use rand_pcg::Pcg64Mcg;
use tenants::{Known, drawn, six, supply};

/// As in pool-manager.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SIZES: [usize; 6] = [3, 24, 100, 1_000, 10_000, 100_000];
/// Sizes that a grid is asked for.
const ON_A_GRID: [usize; 3] = [24, 100, 1_000];
/// Sizes from which on time is expected to grow with the number of tenants.
const GROWS_FROM: usize = 1_000;
/// The smallest market that is compared with the port: theirs have 24 tenants, four times six.
const COMPARED_FROM: usize = 24;
/// Epochs after which the port's shares are looked at; its ratio is of `EPOCHS`.
const EPOCHS_LOOKED_AT: [u32; 4] = [1, 5, 10, 20];
const EPOCHS: u32 = 10;
/// A call is repeated for so long, and so often at least.
const REPEATED_FOR: Duration = Duration::from_millis(500);
const CALLS_MIN: u32 = 11;
/// Permitted loss against an equal split.
const SPLIT_LOSS: f64 = 1e-6;
const SEED: u64 = 20_251_013;

fn main() -> ExitCode {
    match measure() {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("symbiosis: {}", failure.story());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<String, Failure> {
    let sizes = SIZES.into_iter().map(Times::measure).collect::<Result<Vec<_>, _>>()?;
    let compared = sizes.iter().filter(|times| times.tenants >= COMPARED_FROM);
    let ratios: String = compared.map(Times::ratios).collect();
    let growth = [growth("cold", &sizes, |times| times.cold), growth("warm", &sizes, |times| times.warm)];
    let rows: Vec<_> = sizes.iter().map(Times::row).collect();
    let lines: String = sizes.iter().map(Times::lines).collect();
    let head = ["tenants; medians in us", "cold", "warm", "grid, cold", "port, an epoch", "ten"];
    Ok(format!("\n{}\n{lines}{}{}{}{}", table(&head, &rows), fits_us(), growth.concat(), ratios, quality()?))
}

/// How long a market of so many takes, in microseconds.
struct Times {
    tenants: usize,
    cold: f64,
    warm: f64,
    grid: Option<f64>,
    epoch: f64,
    epochs: f64,
}

impl Times {
    fn measure(tenants: usize) -> Result<Self, Failure> {
        let mut random = Pcg64Mcg::seed_from_u64(SEED + tenants as u64);
        let (supply, known) = (supply(tenants), drawn(tenants, &mut random));
        let warm_start = checked(&ready(known.clone(), supply), supply)?;
        let later: Vec<Known> = known.iter().map(|one| one.later(&mut random)).collect();
        Ok(Self {
            tenants,
            cold: median_us(|| known.clone(), |known| cold(known, supply)),
            warm: warm(later, supply, &warm_start)?,
            grid: ON_A_GRID.contains(&tenants).then(|| on_a_grid(&known, supply)).transpose()?,
            epoch: median_us(|| Port::new(&known, supply), |port| after(port, 1)),
            epochs: median_us(|| Port::new(&known, supply), |port| after(port, EPOCHS)),
        })
    }

    fn row(&self) -> Vec<String> {
        let us = |us: f64| format!("{us:.1}");
        let grid = self.grid.map_or_else(String::new, us);
        vec![self.tenants.to_string(), us(self.cold), us(self.warm), grid, us(self.epoch), us(self.epochs)]
    }

    fn lines(&self) -> String {
        let line = |kind: &str, us: f64| format!("time symbiosis_{kind}_{} {us:.1} us\n", self.tenants);
        let grid = self.grid.map_or_else(String::new, |us| line("grid", us));
        format!("{}{}{grid}{}", line("cold", self.cold), line("warm", self.warm), line("port", self.epoch))
    }

    fn ratios(&self) -> String {
        let line = |what: &str, theirs: f64| {
            ratio(&format!("symbiosis_{}_vs_{what}", self.tenants), theirs / self.cold)
        };
        format!("{}\n{}\n", line("spirit_epoch", self.epoch), line("spirit_ten_epochs", self.epochs))
    }
}

/// Returns the median duration of a call, in microseconds, without preparation and clean-up.
fn median_us<G, L>(mut given: impl FnMut() -> G, mut call: impl FnMut(G) -> L) -> f64 {
    let (mut rounds, mut calls, begun) = (Rounds::default(), 0, Instant::now());
    while calls < CALLS_MIN || begun.elapsed() < REPEATED_FOR {
        let given = black_box(given());
        let start = Instant::now();
        let left = black_box(call(given));
        rounds.add(start.elapsed().as_nanos() as f64 / 1e3);
        drop(left);
        calls += 1;
    }
    rounds.median()
}

fn ready(known: Vec<Known>, supply: Supply) -> Vec<Tenant<Slowdown>> {
    known.into_iter().map(|known| known.tenant(supply)).collect()
}

/// From ready knots to shares, with nothing remembered. Everything it made is given back, to be dropped later.
fn cold(known: Vec<Known>, supply: Supply) -> (Vec<Tenant<Slowdown>>, Outcome) {
    let tenants = ready(known, supply);
    let outcome = market(&tenants, supply).clear(ClearingOptions::default());
    (tenants, outcome)
}

/// From ready tenants to shares, near where the market was before they changed.
fn warm(later: Vec<Known>, supply: Supply, warm_start: &MarketWarmStart) -> Result<f64, Failure> {
    let tenants = ready(later, supply);
    let how = || ClearingOptions { warm_start: warm_start.clone(), turn: 1 };
    fits(&tenants, supply, &market(&tenants, supply).clear(how()))?;
    Ok(median_us(how, |how| market(&tenants, supply).clear(how)))
}

/// Computes shares for opaque utilities.
fn on_a_grid(known: &[Known], supply: Supply) -> Result<f64, Failure> {
    let tenant = |known: &Known| {
        let slowdown = known.clone().slowdown();
        Tenant::new(1.0, supply, Grid::new(supply, move |bundle: Bundle| slowdown.value(bundle)))
    };
    let tenants: Vec<_> = known.iter().map(tenant).collect();
    checked(&tenants, supply)?;
    Ok(median_us(|| (), |()| market(&tenants, supply).clear(ClearingOptions::default())))
}

/// How long a fit takes, of 40,000 samples by Zipf's law of 8 GiB of pages; they are sorted already.
fn fits_us() -> String {
    const PAGES: u32 = 2 << 20;
    const SAMPLES: f64 = 40_000.0;
    let weights: Vec<f64> = (1..=PAGES).map(|rank| f64::from(rank).powf(-0.9)).collect();
    let all: f64 = weights.iter().sum();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let counts: Vec<u32> = weights.iter().map(|weight| (weight / all * SAMPLES).round() as u32).collect();
    let local = PAGES as usize / 4;
    let misses = 1.0 - weights[..local].iter().sum::<f64>() / all;
    let seen =
        MeasuredMissRatio { pages: f64::from(PAGES), local: local as f64, misses, pages_per_mib: 256.0 };
    let histogram = Histogram::new(counts.iter().copied());
    let us = median_us(|| (), |()| fit(&histogram, &seen));
    format!("time symbiosis_fit {us:.1} us\n")
}

fn after(mut port: Port, epochs: u32) -> Port {
    (0..epochs).for_each(|_| port.epoch());
    port
}

fn market<U: Utility>(tenants: &[Tenant<U>], supply: Supply) -> Market<'_, U> {
    Market::new(supply, tenants).expect("as many shares as tenants, all of one weight")
}

/// Clears a market, checks its outcome, and returns the warm start.
fn checked<U: Utility>(tenants: &[Tenant<U>], supply: Supply) -> Result<MarketWarmStart, Failure> {
    let outcome = market(tenants, supply).clear(ClearingOptions::default());
    fits(tenants, supply, &outcome)?;
    Ok(outcome.warm_start)
}

/// Checks that the sum is at most the supply, and no tenant is worse off than with an equal split.
fn fits<U: Utility>(tenants: &[Tenant<U>], supply: Supply, outcome: &Outcome) -> Result<(), Failure> {
    let memory: u64 = outcome.shares.iter().map(|share| share.memory_mib).sum();
    let bandwidth: u64 = outcome.shares.iter().map(|share| share.bandwidth_mb_s).sum();
    let certificate = market(tenants, supply).certify(outcome);
    let fits = memory <= supply.memory_mib && bandwidth <= supply.bandwidth_mb_s;
    if fits && certificate.sharing_incentive >= 1.0 - SPLIT_LOSS {
        return Ok(());
    }
    let answer = format!("{memory} MiB and {bandwidth} MB/s of {supply:?}; {certificate:?}");
    Err(Failure::Answer { what: format!("a market of {}", tenants.len()), answer })
}

/// The power of the number of tenants with which time grows: the slope of the straight line through the logarithms of both.
fn growth(kind: &str, sizes: &[Times], of: fn(&Times) -> f64) -> String {
    let large = sizes.iter().filter(|times| times.tenants >= GROWS_FROM);
    let points: Vec<_> = large.map(|times| ((times.tenants as f64).ln(), of(times).ln())).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let together: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let alone: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    format!("growth symbiosis_{kind} {:.2}\n", together / alone)
}

/// Returns the geometric mean of six tenants' slowdowns with shares of either kind.
fn quality() -> Result<String, Failure> {
    let known = six();
    let supply = supply(known.len());
    let tenants = ready(known.clone(), supply);
    let mean = |bundles: &mut dyn Iterator<Item = Bundle>| {
        let slowdowns =
            tenants.iter().zip(bundles).map(|(tenant, bundle)| tenant.utility.slowdown(bundle).ln());
        (slowdowns.sum::<f64>() / tenants.len() as f64).exp()
    };
    let market = market(&tenants, supply);
    let outcome = market.clear(ClearingOptions::default());
    fits(&tenants, supply, &outcome)?;
    let ours = mean(&mut outcome.shares.iter().map(|share| (*share).into()));
    let split = mean(&mut (0..known.len()).map(|tenant| market.fair_share(tenant)));
    let mut lines = format!("slowdown equal_split {split:.3}\n");
    let (mut port, mut ahead) = (Port::new(&known, supply), f64::NAN);
    for epoch in 1..=EPOCHS_LOOKED_AT[EPOCHS_LOOKED_AT.len() - 1] {
        port.epoch();
        let theirs = mean(&mut port.bundles());
        if EPOCHS_LOOKED_AT.contains(&epoch) {
            lines += &format!("slowdown spirit_after_{epoch} {theirs:.3}\n");
        }
        if epoch == EPOCHS {
            ahead = theirs / ours;
        }
    }
    let ratio = ratio("symbiosis_slowdown_vs_spirit", ahead);
    Ok(format!("{lines}slowdown ours {ours:.3}\n{ratio}\n"))
}
