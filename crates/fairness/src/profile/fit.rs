//! Fit of a power law in two phases (Spirit, section 4.2). The first phase fits the shape of the
//! law to the access counts of sampled pages by rank. The second phase adjusts the law so that it
//! gives the miss ratio measured with the current local memory.
//!
//! The paper uses gradient descent with up to ten thousand steps in both phases. Here the first
//! phase is a least-squares fit of two parameters to log-spaced groups of ranks; a third parameter,
//! the factor α1, cancels out. The second phase is a closed form, or a bisection of the slope if
//! the closed form has no valid solution.

use thiserror::Error;

use super::{
    MissModel as _,
    power_law::{PowerLaw, power_law_integral},
};

/// Access counts of sampled pages.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Access count of each sampled page, in descending order, without zeros.
    counts: Vec<u32>,
    /// Count that corresponds to one sample; 0 in the default, which is empty.
    unit: u32,
}

impl Histogram {
    /// Creates a histogram from the number of samples of each page, in any order. Counts of 0 are
    /// dropped.
    pub fn new(counts: impl IntoIterator<Item = u32>) -> Self {
        Self::with_unit(counts, 1)
    }

    /// Creates a histogram from scaled counts: a count of `unit` corresponds to one sample.
    pub fn with_unit(counts: impl IntoIterator<Item = u32>, unit: u32) -> Self {
        let mut counts: Vec<u32> = counts.into_iter().filter(|count| *count > 0).collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        Self { counts, unit }
    }

    /// Returns the total number of samples of all pages.
    pub fn samples(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum::<u64>() / u64::from(self.unit.max(1))
    }
}

/// Miss ratio of a tenant measured with its current local memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredMissRatio {
    /// Number of pages of the tenant, local and remote. If it is less than the number of sampled
    /// pages, the fit uses the number of sampled pages.
    pub pages: f64,
    /// Number of pages in local memory.
    pub local: f64,
    /// Miss ratio of local memory, 0 to 1.
    pub misses: f64,
    /// Number of pages per MiB.
    pub pages_per_mib: f64,
}

/// Error for samples or measurements to which no power law can be fitted.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum FitError {
    /// There are too few samples or sampled pages.
    #[error(
        "too few samples: {samples} on {pages} pages, must be at least {ACCESS_SAMPLES_MIN} on {SAMPLED_PAGES_MIN} pages"
    )]
    TooFewSamples {
        /// Number of samples in the histogram.
        samples: u64,
        /// Number of sampled pages in the histogram.
        pages: usize,
    },
    /// A measurement is out of range.
    #[error("{quantity}: {value} is out of range, must be {rule}")]
    InvalidMeasurement {
        /// Name of the measurement in messages.
        quantity: &'static str,
        /// Rejected value of the measurement.
        value: f64,
        /// Required range, as a phrase that follows "must be" in messages.
        rule: &'static str,
    },
}

/// Smallest number of samples for a fit.
const ACCESS_SAMPLES_MIN: u64 = 64;
/// Smallest number of sampled pages for a fit.
const SAMPLED_PAGES_MIN: usize = 8;
/// Largest number of rank groups. The end ranks of the groups grow by a constant factor.
const RANK_GROUPS_MAX: usize = 48;
/// Smallest slope, the exponent α3, that a fit returns.
const SLOPE_MIN: f64 = -6.0;
/// Largest slope, the exponent α3, that a fit returns.
const SLOPE_MAX: f64 = 0.0;

/// Fits a power law to samples and a measured miss ratio.
///
/// # Errors
/// Returns [`FitError::TooFewSamples`] for fewer than 64 samples or 8 sampled pages, and
/// [`FitError::InvalidMeasurement`] if a number of `measured` is out of range.
pub fn fit(histogram: &Histogram, measured: &MeasuredMissRatio) -> Result<PowerLaw, FitError> {
    let (samples, sampled_pages) = (histogram.samples(), histogram.counts.len());
    if samples < ACCESS_SAMPLES_MIN || sampled_pages < SAMPLED_PAGES_MIN {
        return Err(FitError::TooFewSamples { samples, pages: sampled_pages });
    }
    check_measurement(measured)?;
    let pages = measured.pages.max(sampled_pages as f64);
    let (scale, slope) = RankGroups::new(&histogram.counts).fit_least_squares();
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
    let law = adjust_to_miss_ratio(law, measured.local.min(pages), 1.0 - measured.misses);
    Ok(PowerLaw { scan_fraction: scan_fraction(&law, measured), ..law })
}

/// Returns the fraction of accesses attributed to a scan of all pages, 0 to 1. A measured miss
/// ratio above that of uniformly random accesses can only be explained by a scan.
fn scan_fraction(law: &PowerLaw, measured: &MeasuredMissRatio) -> f64 {
    if measured.local <= 0.0 || measured.local >= law.pages {
        return 0.0;
    }
    let missed = law.misses(measured.local / measured.pages_per_mib);
    // If almost all accesses miss, the few hits are within the measurement error. A fraction below
    // 1 would suggest that every page of memory reduces misses a little.
    if measured.misses >= SCAN_MISS_RATIO_MIN.max(1.0 - 0.5 * measured.local / law.pages) {
        return 1.0;
    }
    let part = (measured.misses - missed) / (1.0 - missed);
    if part > SCAN_FRACTION_MIN { part.min(1.0) } else { 0.0 }
}

/// Smallest fraction of accesses that counts as a scan. A smaller fraction is rounding error.
const SCAN_FRACTION_MIN: f64 = 1e-6;
/// Smallest miss ratio of a tenant that counts as a pure scan. Its hit ratio must also be at most
/// half that of uniformly random accesses.
const SCAN_MISS_RATIO_MIN: f64 = 0.9;

fn check_measurement(measured: &MeasuredMissRatio) -> Result<(), FitError> {
    let invalid = |quantity, value, rule| Err(FitError::InvalidMeasurement { quantity, value, rule });
    let MeasuredMissRatio { pages, local, misses, pages_per_mib } = *measured;
    if !(pages.is_finite() && pages >= 1.0) {
        return invalid("number of pages", pages, "a finite number of at least 1");
    }
    if !(local.is_finite() && local >= 0.0) {
        return invalid("number of local pages", local, "a finite number of at least 0");
    }
    if !(0.0..=1.0).contains(&misses) {
        return invalid("miss ratio", misses, "0 to 1");
    }
    if !(pages_per_mib.is_finite() && pages_per_mib > 0.0) {
        return invalid("pages per MiB", pages_per_mib, "a finite number above 0");
    }
    Ok(())
}

/// Performs the second phase of the fit: adjusts the floor of the law so that the first `local`
/// pages receive the fraction `hits` of all accesses. If no floor of at least 0 achieves that,
/// adjusts the slope.
fn adjust_to_miss_ratio(law: PowerLaw, local: f64, hits: f64) -> PowerLaw {
    let all = law.pages;
    if local <= 0.0 || local >= all {
        // A miss ratio measured with no or all pages in local memory does not constrain the curve.
        return law;
    }
    let integral = |slope, rank| power_law_integral(law.scale, slope, rank);
    let floor = (hits * integral(law.slope, all) - integral(law.slope, local)) / (local - hits * all);
    if floor.is_finite() && floor >= 0.0 {
        return PowerLaw { floor, ..law };
    }
    // The steeper the slope, the larger the fraction of accesses to the first pages.
    let (mut steep, mut flat) = (SLOPE_MIN, SLOPE_MAX);
    for _ in 0..SLOPE_BISECTIONS {
        let slope = f64::midpoint(steep, flat);
        if integral(slope, local) > hits * integral(slope, all) { steep = slope } else { flat = slope }
    }
    PowerLaw { slope: f64::midpoint(steep, flat), floor: 0.0, ..law }
}

/// Number of bisections of the slope. They narrow its range of 6 to less than 1e-11.
const SLOPE_BISECTIONS: u32 = 40;

/// Mean access counts by group of ranks. The first phase fits the law to them.
struct RankGroups {
    groups: Vec<Group>,
}

/// Group of consecutive ranks.
struct Group {
    /// First rank of the group.
    from: f64,
    /// End of the group, exclusive.
    to: f64,
    /// Logarithm of the mean access count of the group.
    log_count: f64,
    /// Weight of the group in the fit: the square root of its total count.
    weight: f64,
}

impl RankGroups {
    /// Groups counts in descending order by rank, in at most [`RANK_GROUPS_MAX`] log-spaced groups.
    fn new(counts: &[u32]) -> Self {
        let growth = (counts.len() as f64).powf(1.0 / RANK_GROUPS_MAX as f64);
        let mut groups = Vec::with_capacity(RANK_GROUPS_MAX);
        let (mut from, mut edge) = (0, 1.0_f64);
        while from < counts.len() {
            edge = (edge * growth).max(from as f64 + 1.0);
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a rank of at least 0"
            )]
            let to = (edge.round() as usize).clamp(from + 1, counts.len());
            let sum: u64 = counts[from..to].iter().map(|count| u64::from(*count)).sum();
            let log_count = (sum as f64 / (to - from) as f64).ln();
            groups.push(Group { from: from as f64, to: to as f64, log_count, weight: (sum as f64).sqrt() });
            from = to;
        }
        Self { groups }
    }

    /// Fits scale and slope to the logarithms of counts by the Levenberg-Marquardt method. Returns
    /// the scale and the slope, in this order.
    fn fit_least_squares(&self) -> (f64, f64) {
        let last = self.groups[self.groups.len() - 1].to;
        let mut at = [(last / 20.0).max(1.0).ln(), -1.0];
        let mut damping = 1e-2;
        let mut error = self.error(at);
        for _ in 0..FIT_ITERATIONS_MAX {
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

    /// Returns the residual of each group: the logarithm of its mean count minus the logarithm of
    /// the law. The weighted mean of all residuals is subtracted, because the factor α1 is free.
    fn residuals(&self, [log_scale, slope]: [f64; 2]) -> Vec<f64> {
        let scale = log_scale.exp();
        let shape = |group: &Group| {
            let accesses =
                power_law_integral(scale, slope, group.to) - power_law_integral(scale, slope, group.from);
            group.log_count - (accesses / (group.to - group.from)).ln()
        };
        let residuals: Vec<f64> = self.groups.iter().map(shape).collect();
        let weights: f64 = self.groups.iter().map(|group| group.weight).sum();
        let mean =
            residuals.iter().zip(&self.groups).map(|(residual, group)| residual * group.weight).sum::<f64>()
                / weights;
        residuals.into_iter().map(|residual| residual - mean).collect()
    }

    /// Returns the weighted sum of squared residuals.
    fn error(&self, at: [f64; 2]) -> f64 {
        self.residuals(at)
            .iter()
            .zip(&self.groups)
            .map(|(residual, group)| group.weight * residual * residual)
            .sum()
    }

    /// Returns one Levenberg-Marquardt step from `at` (logarithm of the scale, and slope), or
    /// `None` if the step is not finite.
    fn step(&self, at: [f64; 2], damping: f64) -> Option<[f64; 2]> {
        let here = self.residuals(at);
        let along = |unknown: usize| {
            let mut near = at;
            near[unknown] += FINITE_DIFFERENCE_STEP;
            let there = self.residuals(near);
            here.iter()
                .zip(there)
                .map(|(here, there)| (there - here) / FINITE_DIFFERENCE_STEP)
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

/// Largest number of steps of the least-squares fit.
const FIT_ITERATIONS_MAX: u32 = 40;
/// Change of a parameter for finite differences, which approximate derivatives of residuals.
const FINITE_DIFFERENCE_STEP: f64 = 1e-5;
/// Damping above which steps are too small to improve the fit.
const DAMPING_MAX: f64 = 1e8;
