//! From samples to a power law, in two phases (Spirit 4.2): the shape from how often pages were sampled, by their rank; the rest from the miss ratio that
//! was measured with the memory that the tenant has.
//!
//! The paper descends along gradients, for up to ten thousand steps. Here the first phase is least squares over ranks that are spaced by their logarithm,
//! in two unknowns, since the third only scales; and the second is a formula.

use thiserror::Error;

use super::{
    MissModel as _,
    power_law::{PowerLaw, falling},
};

/// How often each page was sampled that was.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// The largest first.
    counts: Vec<u32>,
    /// How many of what was counted make a sample; 0 if nothing was.
    unit: u32,
}

impl Histogram {
    /// Of numbers of samples in any order; pages without any are left out.
    pub fn new(counts: impl IntoIterator<Item = u32>) -> Self {
        Self::in_parts(counts, 1)
    }

    /// The same, counted in parts of samples: so many are one.
    pub fn in_parts(counts: impl IntoIterator<Item = u32>, unit: u32) -> Self {
        let mut counts: Vec<u32> = counts.into_iter().filter(|count| *count > 0).collect();
        counts.sort_unstable_by(|one, other| other.cmp(one));
        Self { counts, unit }
    }

    /// All samples.
    pub fn samples(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum::<u64>() / u64::from(self.unit.max(1))
    }
}

/// What was measured beside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Pages that the tenant has, wherever they are; those that were sampled, at least.
    pub pages: f64,
    /// Those of them that are in local memory.
    pub local: f64,
    /// Accesses that missed local memory, 0 to 1.
    pub misses: f64,
    /// Pages of a MiB.
    pub pages_per_mib: f64,
}

/// Why there is no fit.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum FitError {
    /// Too little was sampled.
    #[error("{samples} samples of {pages} pages: at least {SAMPLES_MIN} of {PAGES_MIN} are needed")]
    TooFew {
        /// All samples.
        samples: u64,
        /// Pages that were sampled.
        pages: usize,
    },
    /// A number is out of range.
    #[error("{what} {value} must be {rule}")]
    Wrong {
        /// Which.
        what: &'static str,
        /// What it was.
        value: f64,
        /// What it has to be.
        rule: &'static str,
    },
}

/// Samples below which nothing can be said.
const SAMPLES_MIN: u64 = 64;
/// Pages below which there is no shape.
const PAGES_MIN: usize = 8;
/// Groups of ranks: each about a fifth longer than the one before.
const GROUPS: usize = 48;
/// Between what the unknowns are sought.
const SLOPE_MIN: f64 = -6.0;
const SLOPE_MAX: f64 = 0.0;

/// The power law that these samples and measurements fit.
///
/// # Errors
/// There are too few samples, or a measurement is out of range.
pub fn fit(histogram: &Histogram, seen: &Seen) -> Result<PowerLaw, FitError> {
    let (samples, touched) = (histogram.samples(), histogram.counts.len());
    if samples < SAMPLES_MIN || touched < PAGES_MIN {
        return Err(FitError::TooFew { samples, pages: touched });
    }
    check(seen)?;
    let pages = seen.pages.max(touched as f64);
    let (scale, slope) = Shape::of(&histogram.counts).fitted();
    let error = (seen.misses * (1.0 - seen.misses) / samples as f64).sqrt().max(1.0 / samples as f64);
    let law =
        PowerLaw { scale, slope, floor: 0.0, scanned: 0.0, pages, pages_per_mib: seen.pages_per_mib, error };
    let law = through(law, seen.local.min(pages), 1.0 - seen.misses);
    Ok(PowerLaw { scanned: scanned(&law, seen), ..law })
}

/// What misses more often than touches of any page at random would goes through pages in turn.
fn scanned(law: &PowerLaw, seen: &Seen) -> f64 {
    if seen.local <= 0.0 || seen.local >= law.pages {
        return 0.0;
    }
    let missed = law.misses(seen.local / seen.pages_per_mib);
    // Nearly all: what is left is how finely that was measured, and would look as if every page were worth a little.
    if seen.misses >= ALL.max(1.0 - 0.5 * seen.local / law.pages) {
        return 1.0;
    }
    let part = (seen.misses - missed) / (1.0 - missed);
    if part > SCANNED_MIN { part.min(1.0) } else { 0.0 }
}

/// Below that, what is left between a law and what was measured is the law's rounding.
const SCANNED_MIN: f64 = 1e-6;
/// Who misses so much, and hits less than half of what it would by touching pages at random, misses all.
const ALL: f64 = 0.9;

fn check(seen: &Seen) -> Result<(), FitError> {
    let wrong = |what, value, rule| Err(FitError::Wrong { what, value, rule });
    let Seen { pages, local, misses, pages_per_mib } = *seen;
    if !(pages.is_finite() && pages >= 1.0) {
        return wrong("pages", pages, "a number, 1 or more");
    }
    if !(local.is_finite() && local >= 0.0) {
        return wrong("local pages", local, "a number, 0 or more");
    }
    if !(0.0..=1.0).contains(&misses) {
        return wrong("miss ratio", misses, "from 0 to 1");
    }
    if !(pages_per_mib.is_finite() && pages_per_mib > 0.0) {
        return wrong("pages of a MiB", pages_per_mib, "a number more than 0");
    }
    Ok(())
}

/// The second phase: the floor with which so many pages take so many of all touches; where no floor does, the slope.
fn through(law: PowerLaw, local: f64, hits: f64) -> PowerLaw {
    let all = law.pages;
    if local <= 0.0 || local >= all {
        // What is missed with nothing, or with everything, says nothing of what lies between.
        return law;
    }
    let falls = |slope, rank| falling(law.scale, slope, rank);
    let floor = (hits * falls(law.slope, all) - falls(law.slope, local)) / (local - hits * all);
    if floor.is_finite() && floor >= 0.0 {
        return PowerLaw { floor, ..law };
    }
    // The steeper, the more touches the first pages take.
    let (mut steep, mut flat) = (SLOPE_MIN, SLOPE_MAX);
    for _ in 0..SLOPES_TRIED {
        let slope = f64::midpoint(steep, flat);
        if falls(slope, local) > hits * falls(slope, all) { steep = slope } else { flat = slope }
    }
    PowerLaw { slope: f64::midpoint(steep, flat), floor: 0.0, ..law }
}

const SLOPES_TRIED: u32 = 40;

/// What the first phase fits: mean counts of groups of ranks.
struct Shape {
    groups: Vec<Group>,
}

/// Ranks from one to another, and the logarithm of their mean count.
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

    /// Scale and slope by Levenberg and Marquardt's least squares of logarithms.
    fn fitted(&self) -> (f64, f64) {
        let last = self.groups[self.groups.len() - 1].to;
        let mut at = [(last / 20.0).max(1.0).ln(), -1.0];
        let mut damping = 1e-2;
        let mut error = self.error(at);
        for _ in 0..STEPS_MAX {
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

    /// What remains between counts and shape in each group, but for a common factor.
    fn residuals(&self, [log_scale, slope]: [f64; 2]) -> Vec<f64> {
        let scale = log_scale.exp();
        let shape = |group: &Group| {
            let touches = falling(scale, slope, group.to) - falling(scale, slope, group.from);
            group.log_count - (touches / (group.to - group.from)).ln()
        };
        let off: Vec<f64> = self.groups.iter().map(shape).collect();
        let weights: f64 = self.groups.iter().map(|group| group.weight).sum();
        let mean = off.iter().zip(&self.groups).map(|(off, group)| off * group.weight).sum::<f64>() / weights;
        off.into_iter().map(|off| off - mean).collect()
    }

    fn error(&self, at: [f64; 2]) -> f64 {
        self.residuals(at).iter().zip(&self.groups).map(|(off, group)| group.weight * off * off).sum()
    }

    fn step(&self, at: [f64; 2], damping: f64) -> Option<[f64; 2]> {
        let here = self.residuals(at);
        let along = |unknown: usize| {
            let mut near = at;
            near[unknown] += DIFFERENCE;
            let there = self.residuals(near);
            here.iter().zip(there).map(|(here, there)| (there - here) / DIFFERENCE).collect::<Vec<f64>>()
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

const STEPS_MAX: u32 = 40;
const DIFFERENCE: f64 = 1e-5;
const DAMPING_MAX: f64 = 1e8;
