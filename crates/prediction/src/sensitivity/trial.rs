//! How good each way to tell would be (Pond figure 10b): programs parted by chance into two halves, many times; the forest learns from one
//! half and all three tell of the other. Runs of one program lie in one half.

use std::collections::BTreeSet;

use rand::{SeedableRng, seq::SliceRandom as _};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use units::{Fraction, limits::CROSS_VALIDATION_SPLITS_MAX};

use super::{DRAM_BOUND, MEMORY_BOUND, Workload, forest};

/// What a way to tell places on the pool where so many may be placed wrongly. Shares are of all workloads, 0 to 1, with the mean
/// over the splits and its error bars.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Placed {
    /// Share placed at that rate of false positives, at the best cut of the half that is told.
    pub placed: f64,
    /// Standard deviation over the splits.
    pub placed_sd: f64,
    /// The 1st and the 99th of a hundred splits.
    pub placed_p1: f64,
    /// As above.
    pub placed_p99: f64,
    /// Share placed by a cut that was chosen on the half that was learnt from.
    pub tuned_placed: f64,
    /// And wrongly placed by it.
    pub tuned_fp: f64,
}

/// One rate of false positives.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Share of all workloads that may be placed although they are slowed down beyond the margin.
    pub fp_asked: f64,
    /// The forest.
    pub forest: Placed,
    /// A threshold on the share of cycles that wait for memory behind the caches.
    pub dram_bound: Placed,
    /// A threshold on the share of cycles that wait for memory or caches.
    pub memory_bound: Placed,
}

/// Why nothing can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untold {
    /// There are too few programs to part.
    #[error("{0} programs: must be at least {PROGRAMS_MIN}")]
    Few(usize),
    /// All are slowed down beyond the margin, or none.
    #[error("all workloads are slowed down beyond the margin, or none: must be some of each")]
    OneKind,
    /// Too many splits, or none.
    #[error("{0} splits: must be from 1 to {CROSS_VALIDATION_SPLITS_MAX}")]
    Splits(u32),
}

/// Programs that can be parted.
const PROGRAMS_MIN: usize = 10;

impl Untold {
    /// Refuses workloads that nothing can be learnt from.
    pub(super) fn check(workloads: &[Workload], pdm: Fraction) -> Result<(), Self> {
        let programs: BTreeSet<&str> = workloads.iter().map(|workload| workload.program.as_str()).collect();
        let slowed = workloads.iter().filter(|workload| workload.slowdown > pdm.get()).count();
        if programs.len() < PROGRAMS_MIN {
            Err(Self::Few(programs.len()))
        } else if slowed == 0 || slowed == workloads.len() {
            Err(Self::OneKind)
        } else {
            Ok(())
        }
    }
}

/// Parts the programs so many times.
///
/// # Errors
/// [`Untold`].
pub fn run(
    workloads: &[Workload],
    pdm: Fraction,
    rates: &[Fraction],
    splits: u32,
    seed: u64,
) -> Result<Vec<Verdict>, Untold> {
    let programs: BTreeSet<&str> = workloads.iter().map(|workload| workload.program.as_str()).collect();
    let mut programs: Vec<&str> = programs.into_iter().collect();
    Untold::check(workloads, pdm)?;
    if !(1..=CROSS_VALIDATION_SPLITS_MAX).contains(&splits) {
        return Err(Untold::Splits(splits));
    }
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut told = vec![<[Told; 3]>::default(); rates.len()];
    for split in 0..splits {
        programs.shuffle(&mut rng);
        let learnt: BTreeSet<&str> = programs[..programs.len() / 2].iter().copied().collect();
        let (learn, tell): (Vec<&Workload>, Vec<&Workload>) =
            workloads.iter().partition(|workload| learnt.contains(workload.program.as_str()));
        let ways = ways(&learn, &tell, pdm.get(), seed ^ u64::from(split));
        for (told, rate) in told.iter_mut().zip(rates) {
            told.iter_mut().zip(&ways).for_each(|(told, way)| told.add(way, *rate));
        }
    }
    let verdict = |([forest, dram_bound, memory_bound], rate): ([Told; 3], &Fraction)| Verdict {
        fp_asked: rate.get(),
        forest: forest.placed(),
        dram_bound: dram_bound.placed(),
        memory_bound: memory_bound.placed(),
    };
    Ok(told.into_iter().zip(rates).map(verdict).collect())
}

/// What a way to tell says of each workload, the lowest first to be placed, and whether it is slowed down: of the half that was learnt from,
/// without having seen it, and of the other.
struct Way {
    learnt: Vec<(f64, bool)>,
    told: Vec<(f64, bool)>,
}

fn ways(learn: &[&Workload], tell: &[&Workload], pdm: f64, seed: u64) -> [Way; 3] {
    let bagged = forest(learn, pdm, seed);
    let is_slowed = |workload: &&Workload| workload.slowdown > pdm;
    let unseen = learn.iter().zip(bagged.unseen);
    let of_forest = Way {
        learnt: unseen.filter_map(|(workload, said)| Some((said?, is_slowed(workload)))).collect(),
        told: tell
            .iter()
            .map(|workload| (bagged.forest.predict_one(&workload.counters), is_slowed(workload)))
            .collect(),
    };
    let threshold = |counter: usize| {
        let say = |workloads: &[&Workload]| -> Vec<(f64, bool)> {
            // What was not measured is placed last.
            let said = |workload: &&Workload| workload.counters[counter];
            let or_last = |said: f64| if said.is_nan() { f64::INFINITY } else { said };
            workloads.iter().map(|workload| (or_last(said(workload)), is_slowed(workload))).collect()
        };
        Way { learnt: say(learn), told: say(tell) }
    };
    [of_forest, threshold(DRAM_BOUND), threshold(MEMORY_BOUND)]
}

/// What came of one way at one rate, split by split.
#[derive(Clone, Debug, Default)]
struct Told {
    placed: Vec<f64>,
    tuned_placed: f64,
    tuned_fp: f64,
}

impl Told {
    fn add(&mut self, way: &Way, rate: Fraction) {
        let (_, placed) = cut(&way.told, rate.get());
        let (tuned, _) = cut(&way.learnt, rate.get());
        let all = way.told.len() as f64;
        let below = || way.told.iter().filter(|(said, _)| *said <= tuned);
        self.placed.push(placed);
        self.tuned_placed += below().count() as f64 / all;
        self.tuned_fp += below().filter(|(_, is_slowed)| *is_slowed).count() as f64 / all;
    }

    fn placed(mut self) -> Placed {
        self.placed.sort_unstable_by(f64::total_cmp);
        let n = self.placed.len() as f64;
        let mean = self.placed.iter().sum::<f64>() / n;
        let variance = self.placed.iter().map(|placed| (placed - mean).powi(2)).sum::<f64>() / n;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among the splits"
        )]
        let of_hundred = |part: f64| self.placed[(part * (n - 1.0)).round() as usize];
        Placed {
            placed: mean,
            placed_sd: variance.sqrt(),
            placed_p1: of_hundred(0.01),
            placed_p99: of_hundred(0.99),
            tuned_placed: self.tuned_placed / n,
            tuned_fp: self.tuned_fp / n,
        }
    }
}

/// The highest cut below which at most the rate's share of all are slowed down, and the share below it. What is said alike is
/// placed together or not at all.
fn cut(said: &[(f64, bool)], rate: f64) -> (f64, f64) {
    let mut sorted = said.to_vec();
    sorted.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
    let (mut slowed, mut below, mut best) = (0, 0, (f64::NEG_INFINITY, 0.0));
    for alike in sorted.chunk_by(|(one, _), (other, _)| one == other) {
        slowed += alike.iter().filter(|(_, is_slowed)| *is_slowed).count();
        below += alike.len();
        if slowed as f64 > rate * said.len() as f64 {
            break;
        }
        best = (alike[0].0, below as f64 / said.len() as f64);
    }
    best
}
