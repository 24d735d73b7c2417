//! Fit of a power law in two phases (Spirit, section 4.2). The first phase fits the shape to the
//! access counts of sampled pages by rank. The second phase makes the curve pass through the miss
//! ratio measured with the current local memory.
//!
//! The paper uses gradient descent with up to ten thousand steps. Here the first phase is a
//! least-squares fit of two parameters to log-spaced groups of ranks (the third parameter is a
//! scale factor), and the second phase is a closed form.

use thiserror::Error;

use super::{
    MissModel as _,
    power_law::{PowerLaw, falling_integral},
};

/// Access counts of sampled pages.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Counts in descending order.
    counts: Vec<u32>,
    /// Number of counts that make one sample; 0 for an empty histogram.
    unit: u32,
}

impl Histogram {
    /// Creates a histogram of sample counts in any order. Counts of 0 are dropped.
    pub fn new(counts: impl IntoIterator<Item = u32>) -> Self {
        Self::with_unit(counts, 1)
    }

    /// Creates a histogram of counts in fractions of a sample: `unit` of them make one sample.
    pub fn with_unit(counts: impl IntoIterator<Item = u32>, unit: u32) -> Self {
        let mut counts: Vec<u32> = counts.into_iter().filter(|count| *count > 0).collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        Self { counts, unit }
    }

    /// Returns the number of samples.
    pub fn samples(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum::<u64>() / u64::from(self.unit.max(1))
    }
}

/// Miss ratio measured with the current local memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredMissRatio {
    /// Pages of the tenant, local and remote. The fit uses at least the number of sampled pages.
    pub pages: f64,
    /// Pages in local memory.
    pub local: f64,
    /// Miss ratio of local memory, 0 to 1.
    pub misses: f64,
    /// Pages per MiB.
    pub pages_per_mib: f64,
}

/// Error for samples or measurements that cannot be fitted.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum FitError {
    /// There are too few samples or sampled pages.
    #[error("too few samples: {samples} of {pages} pages, at least {SAMPLES_MIN} of {PAGES_MIN} are needed")]
    TooFewSamples {
        /// Number of samples.
        samples: u64,
        /// Number of sampled pages.
        pages: usize,
    },
    /// A measurement is out of range.
    #[error("{quantity} {value} must be {rule}")]
    InvalidMeasurement {
        /// Name of the measurement.
        quantity: &'static str,
        /// Rejected value.
        value: f64,
        /// Required range.
        rule: &'static str,
    },
}

/// Smallest number of samples for a fit.
const SAMPLES_MIN: u64 = 64;
/// Smallest number of sampled pages for a fit.
const PAGES_MIN: usize = 8;
/// Groups of ranks. Each is about a fifth longer than the last.
const GROUPS: usize = 48;
/// Range of the slope.
const SLOPE_MIN: f64 = -6.0;
const SLOPE_MAX: f64 = 0.0;

/// Fits a power law to samples and a measured miss ratio.
///
/// # Errors
/// [`FitError::TooFewSamples`] or [`FitError::InvalidMeasurement`].
pub fn fit(histogram: &Histogram, measured: &MeasuredMissRatio) -> Result<PowerLaw, FitError> {
    let (samples, touched) = (histogram.samples(), histogram.counts.len());
    if samples < SAMPLES_MIN || touched < PAGES_MIN {
        return Err(FitError::TooFewSamples { samples, pages: touched });
    }
    check(measured)?;
    let pages = measured.pages.max(touched as f64);
    let (scale, slope) = Shape::of(&histogram.counts).least_squares();
    let error = (measured.misses * (1.0 - measured.misses) / samples as f64).sqrt().max(1.0 / samples as f64);
    let law = PowerLaw {
        scale,
        slope,
        floor: 0.0,
        scan_fraction: 0.0,
        pages,
        pages_per_mib: measured.pages_per_mib,
        error,
    };
    let law = pass_through(law, measured.local.min(pages), 1.0 - measured.misses);
    Ok(PowerLaw { scan_fraction: scan_fraction(&law, measured), ..law })
}

/// Returns the fraction of accesses attributed to a scan: a measured miss ratio above that of
/// uniformly random accesses requires one.
fn scan_fraction(law: &PowerLaw, measured: &MeasuredMissRatio) -> f64 {
    if measured.local <= 0.0 || measured.local >= law.pages {
        return 0.0;
    }
    let missed = law.misses(measured.local / measured.pages_per_mib);
    // Almost all accesses miss. The rest is within the resolution of the measurement and would be
    // mistaken for a uniform value of memory.
    if measured.misses >= SCAN_MISS_RATIO_MIN.max(1.0 - 0.5 * measured.local / law.pages) {
        return 1.0;
    }
    let part = (measured.misses - missed) / (1.0 - missed);
    if part > SCAN_FRACTION_MIN { part.min(1.0) } else { 0.0 }
}

/// Smallest fraction that counts as a scan. Below it the difference is rounding error.
const SCAN_FRACTION_MIN: f64 = 1e-6;
/// Miss ratio from which a tenant counts as a pure scan if it also hits less than half as often as
/// with uniformly random accesses.
const SCAN_MISS_RATIO_MIN: f64 = 0.9;

fn check(measured: &MeasuredMissRatio) -> Result<(), FitError> {
    let invalid = |quantity, value, rule| Err(FitError::InvalidMeasurement { quantity, value, rule });
    let MeasuredMissRatio { pages, local, misses, pages_per_mib } = *measured;
    if !(pages.is_finite() && pages >= 1.0) {
        return invalid("pages", pages, "a finite number of at least 1");
    }
    if !(local.is_finite() && local >= 0.0) {
        return invalid("local pages", local, "a finite number of at least 0");
    }
    if !(0.0..=1.0).contains(&misses) {
        return invalid("miss ratio", misses, "between 0 and 1");
    }
    if !(pages_per_mib.is_finite() && pages_per_mib > 0.0) {
        return invalid("pages per MiB", pages_per_mib, "a finite number above 0");
    }
    Ok(())
}

/// Second phase: returns the law with the floor for which `local` pages receive the fraction `hits`
/// of all accesses, or with an adjusted slope if no floor does.
fn pass_through(law: PowerLaw, local: f64, hits: f64) -> PowerLaw {
    let all = law.pages;
    if local <= 0.0 || local >= all {
        // A miss ratio with no or all pages in local memory does not constrain the curve between.
        return law;
    }
    let integral = |slope, rank| falling_integral(law.scale, slope, rank);
    let floor = (hits * integral(law.slope, all) - integral(law.slope, local)) / (local - hits * all);
    if floor.is_finite() && floor >= 0.0 {
        return PowerLaw { floor, ..law };
    }
    // A steeper slope concentrates accesses on the first pages.
    let (mut steep, mut flat) = (SLOPE_MIN, SLOPE_MAX);
    for _ in 0..SLOPE_BISECTIONS {
        let slope = f64::midpoint(steep, flat);
        if integral(slope, local) > hits * integral(slope, all) { steep = slope } else { flat = slope }
    }
    PowerLaw { slope: f64::midpoint(steep, flat), floor: 0.0, ..law }
}

/// Bisections of the slope.
const SLOPE_BISECTIONS: u32 = 40;

/// Mean counts of groups of ranks, the data of the first phase.
struct Shape {
    groups: Vec<Group>,
}

/// Range of ranks with the logarithm of its mean count.
struct Group {
    from: f64,
    to: f64,
    log_count: f64,
    weight: f64,
}

impl Shape {
    fn of(counts: &[u32]) -> Self {
        let growth = (counts.len() as f64).powf(1.0 / GROUPS as f64);
        let mut groups = Vec::with_capacity(GROUPS);
        let (mut from, mut edge) = (0, 1.0_f64);
        while from < counts.len() {
            edge = (edge * growth).max(from as f64 + 1.0);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
            let to = (edge.round() as usize).clamp(from + 1, counts.len());
            let sum: u64 = counts[from..to].iter().map(|count| u64::from(*count)).sum();
            let log_count = (sum as f64 / (to - from) as f64).ln();
            groups.push(Group { from: from as f64, to: to as f64, log_count, weight: (sum as f64).sqrt() });
            from = to;
        }
        Self { groups }
    }

    /// Fits scale and slope to the logarithms of counts (Levenberg-Marquardt).
    fn least_squares(&self) -> (f64, f64) {
        let last = self.groups[self.groups.len() - 1].to;
        let mut at = [(last / 20.0).max(1.0).ln(), -1.0];
        let mut damping = 1e-2;
        let mut error = self.error(at);
        for _ in 0..ITERATIONS_MAX {
            let Some(step) = self.step(at, damping) else { break };
            let next = [
                (at[0] + step[0]).clamp(-2.0, last.ln() + 3.0),
                (at[1] + step[1]).clamp(SLOPE_MIN, SLOPE_MAX),
            ];
            let next_error = self.error(next);
            if next_error < error {
                let is_done = error - next_error <= 1e-9 * error;
                (at, error, damping) = (next, next_error, damping * 0.3);
                if is_done {
                    break;
                }
            } else {
                damping *= 10.0;
                if damping > DAMPING_MAX {
                    break;
                }
            }
        }
        (at[0].exp(), at[1])
    }

    /// Returns the difference between the logarithms of count and shape for each group, up to a
    /// common factor.
    fn residuals(&self, [log_scale, slope]: [f64; 2]) -> Vec<f64> {
        let scale = log_scale.exp();
        let shape = |group: &Group| {
            let touches =
                falling_integral(scale, slope, group.to) - falling_integral(scale, slope, group.from);
            group.log_count - (touches / (group.to - group.from)).ln()
        };
        let residuals: Vec<f64> = self.groups.iter().map(shape).collect();
        let weights: f64 = self.groups.iter().map(|group| group.weight).sum();
        let mean = residuals
            .iter()
            .zip(&self.groups)
            .map(|(residuals, group)| residuals * group.weight)
            .sum::<f64>()
            / weights;
        residuals.into_iter().map(|residuals| residuals - mean).collect()
    }

    fn error(&self, at: [f64; 2]) -> f64 {
        self.residuals(at)
            .iter()
            .zip(&self.groups)
            .map(|(residuals, group)| group.weight * residuals * residuals)
            .sum()
    }

    fn step(&self, at: [f64; 2], damping: f64) -> Option<[f64; 2]> {
        let here = self.residuals(at);
        let along = |unknown: usize| {
            let mut near = at;
            near[unknown] += FINITE_DIFFERENCE;
            let there = self.residuals(near);
            here.iter()
                .zip(there)
                .map(|(here, there)| (there - here) / FINITE_DIFFERENCE)
                .collect::<Vec<f64>>()
        };
        let (by_scale, by_slope) = (along(0), along(1));
        let dot = |one: &[f64], other: &[f64]| -> f64 {
            let weighted = one.iter().zip(other).zip(&self.groups);
            weighted.map(|((one, other), group)| group.weight * one * other).sum()
        };
        let (a, b, d) = (dot(&by_scale, &by_scale), dot(&by_scale, &by_slope), dot(&by_slope, &by_slope));
        let (e, f) = (-dot(&by_scale, &here), -dot(&by_slope, &here));
        let (a, d) = (a * (1.0 + damping) + f64::MIN_POSITIVE, d * (1.0 + damping) + f64::MIN_POSITIVE);
        let determinant = a * d - b * b;
        let step = [(e * d - b * f) / determinant, (a * f - b * e) / determinant];
        step.iter().all(|part| part.is_finite()).then_some(step)
    }
}

const ITERATIONS_MAX: u32 = 40;
const FINITE_DIFFERENCE: f64 = 1e-5;
const DAMPING_MAX: f64 = 1e8;
