//! Backtest of the sensitivity prediction (Pond, figure 10b). The programs are split into two
//! random halves several times. The forest is trained on one half. The forest and the threshold
//! baselines are scored on the other half. All workloads of one program are in the same half.
//!
//! Programs of one kind are often in both halves. Each method is therefore also scored on each kind
//! of programs after training on all other kinds (leave one group out).

use std::collections::BTreeSet;

use rand::{SeedableRng, seq::SliceRandom as _};
use rand_pcg::Pcg64Mcg;
use serde::Serialize;
use units::{Fraction, limits::CROSS_VALIDATION_SPLITS_MAX};

pub use super::evaluation_error::EvaluationError;
use super::{DRAM_BOUND_INDEX, L3_MPKI_INDEX, MEMORY_BOUND_INDEX, Workload, train_forest};

/// Fractions of all workloads that a method places on the pool at a target rate of false positives.
/// All shares are 0 to 1, and statistics are over the splits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PlacementStats {
    /// Mean fraction of placed workloads with the best cutoff for the held-out half, which is known
    /// only in hindsight.
    pub placed: f64,
    /// Standard deviation of the fraction of placed workloads.
    pub placed_sd: f64,
    /// 1st percentile of the fraction of placed workloads.
    pub placed_p1: f64,
    /// 99th percentile of the fraction of placed workloads.
    pub placed_p99: f64,
    /// Mean fraction of placed workloads with the best cutoff for the training half.
    pub tuned_placed: f64,
    /// Mean fraction of false positives with the best cutoff for the training half.
    pub tuned_fp: f64,
    /// Result on kinds of programs that are not in the training set. `None` if there is only one
    /// kind.
    pub unseen_kind: Option<UnseenKindStats>,
}

/// Fractions of all workloads if each kind of programs is scored with a model and a cutoff from all
/// other kinds. All values are 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct UnseenKindStats {
    /// Fraction of placed workloads.
    pub placed: f64,
    /// Fraction of false positives.
    pub fp: f64,
}

/// Result of a backtest at one target rate of false positives.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BacktestResult {
    /// Target fraction of workloads that are placed although they are slowed down beyond the
    /// margin, 0 to 1.
    #[serde(rename = "fp_asked")]
    pub fp_target: f64,
    /// Result of the random forest.
    pub forest: PlacementStats,
    /// Result of a threshold on the DRAM-bound fraction of cycles.
    pub dram_bound: PlacementStats,
    /// Result of a threshold on the memory-bound fraction of pipeline slots.
    pub memory_bound: PlacementStats,
    /// Result of a threshold on the misses of the last-level cache per 1000 instructions.
    pub l3_mpki: PlacementStats,
}

/// Number of methods: the forest and the threshold baselines.
const METHODS: usize = 4;

/// Evaluates all methods at each target rate on `splits` random splits of the programs.
///
/// # Errors
/// Returns [`EvaluationError`] if there are too few programs, if all or none of the workloads are
/// slowed down beyond the margin, or if `splits` is out of range.
pub fn run(
    workloads: &[Workload],
    pdm: Fraction,
    rates: &[Fraction],
    splits: u32,
    seed: u64,
) -> Result<Vec<BacktestResult>, EvaluationError> {
    let programs: BTreeSet<&str> = workloads.iter().map(|workload| workload.program.as_str()).collect();
    let mut programs: Vec<&str> = programs.into_iter().collect();
    EvaluationError::check(workloads.iter(), pdm)?;
    if !(1..=CROSS_VALIDATION_SPLITS_MAX).contains(&splits) {
        return Err(EvaluationError::Splits(splits));
    }
    let mut rng = Pcg64Mcg::seed_from_u64(seed);
    let mut totals = vec![<[MethodTotals; METHODS]>::default(); rates.len()];
    for split in 0..splits {
        programs.shuffle(&mut rng);
        let training: BTreeSet<&str> = programs[..programs.len() / 2].iter().copied().collect();
        let (train, test): (Vec<&Workload>, Vec<&Workload>) =
            workloads.iter().partition(|workload| training.contains(workload.program.as_str()));
        let methods = score_split(&train, &test, pdm.get(), seed ^ u64::from(split));
        for (totals, rate) in totals.iter_mut().zip(rates) {
            totals
                .iter_mut()
                .zip(&methods)
                .for_each(|(totals, split_scores)| totals.add(split_scores, *rate));
        }
    }
    let unseen_kinds = leave_one_kind_out(workloads, pdm.get(), rates, seed);
    let result = |((totals, rate), unseen): ((_, &Fraction), [Option<UnseenKindStats>; METHODS])| {
        let [forest, dram_bound, memory_bound, l3_mpki]: [MethodTotals; METHODS] = totals;
        BacktestResult {
            fp_target: rate.get(),
            forest: forest.placement_stats(unseen[0]),
            dram_bound: dram_bound.placement_stats(unseen[1]),
            memory_bound: memory_bound.placement_stats(unseen[2]),
            l3_mpki: l3_mpki.placement_stats(unseen[3]),
        }
    };
    Ok(totals.into_iter().zip(rates).zip(unseen_kinds).map(result).collect())
}

/// Scores each kind of programs with models and cutoffs from all other kinds. Returns the result of
/// each method at each rate.
fn leave_one_kind_out(
    workloads: &[Workload],
    pdm: f64,
    rates: &[Fraction],
    seed: u64,
) -> Vec<[Option<UnseenKindStats>; METHODS]> {
    let kinds: BTreeSet<&str> = workloads.iter().map(Workload::kind).collect();
    if kinds.len() < 2 {
        return vec![[None; METHODS]; rates.len()];
    }
    let mut results = vec![[UnseenKindStats::default(); METHODS]; rates.len()];
    for kind in kinds {
        let (test, train): (Vec<&Workload>, Vec<&Workload>) =
            workloads.iter().partition(|workload| workload.kind() == kind);
        let weight = test.len() as f64 / workloads.len() as f64;
        let methods = score_split(&train, &test, pdm, seed);
        for (result, rate) in results.iter_mut().zip(rates) {
            for (stats, split_scores) in result.iter_mut().zip(&methods) {
                let (placed, fp) = split_scores.tuned_placed_and_fp(*rate);
                stats.placed += weight * placed;
                stats.fp += weight * fp;
            }
        }
    }
    results.into_iter().map(|result| result.map(Some)).collect()
}

/// Scores of a method on one split. Each entry is the score of a workload, and whether the workload
/// is slowed down beyond the margin. Workloads with low scores are placed first.
struct ScoredSplit {
    /// Scores of the training half. Scores of the forest are out-of-bag predictions.
    training: Vec<(f64, bool)>,
    /// Scores of the other half.
    held_out: Vec<(f64, bool)>,
}

impl ScoredSplit {
    /// Returns the fractions of the other half that are placed and that are false positives with the
    /// best cutoff for the training half.
    fn tuned_placed_and_fp(&self, rate: Fraction) -> (f64, f64) {
        let (tuned_cutoff, _) = best_cutoff(&self.training, rate.get());
        let all = self.held_out.len() as f64;
        let accepted = || self.held_out.iter().filter(|(score, _)| *score <= tuned_cutoff);
        let slowed = accepted().filter(|(_, is_slowed)| *is_slowed);
        (accepted().count() as f64 / all, slowed.count() as f64 / all)
    }
}

/// Trains the forest on one half, and returns the scores of the forest and of the thresholds.
fn score_split(train: &[&Workload], test: &[&Workload], pdm: f64, seed: u64) -> [ScoredSplit; METHODS] {
    let fitted = train_forest(train, pdm, seed);
    let is_slowed = |workload: &&Workload| workload.slowdown > pdm;
    let out_of_bag = train.iter().zip(fitted.out_of_bag);
    let forest_scores = ScoredSplit {
        training: out_of_bag.filter_map(|(workload, score)| Some((score?[0], is_slowed(workload)))).collect(),
        held_out: test
            .iter()
            .map(|workload| (fitted.forest.predict_one(&workload.counters), is_slowed(workload)))
            .collect(),
    };
    let threshold = |counter: usize| {
        let scores = |workloads: &[&Workload]| -> Vec<(f64, bool)> {
            // Workloads for which the counter was not measured are placed last.
            let score = |workload: &&Workload| workload.counters[counter];
            let or_last = |score: f64| if score.is_nan() { f64::INFINITY } else { score };
            workloads.iter().map(|workload| (or_last(score(workload)), is_slowed(workload))).collect()
        };
        ScoredSplit { training: scores(train), held_out: scores(test) }
    };
    [forest_scores, threshold(DRAM_BOUND_INDEX), threshold(MEMORY_BOUND_INDEX), threshold(L3_MPKI_INDEX)]
}

/// Results of one method at one target rate over all splits.
#[derive(Clone, Debug, Default)]
struct MethodTotals {
    /// Fraction of placed workloads of each split.
    placed: Vec<f64>,
    /// Sum over the splits of [`PlacementStats::tuned_placed`].
    tuned_placed: f64,
    /// Sum over the splits of [`PlacementStats::tuned_fp`].
    tuned_fp: f64,
}

impl MethodTotals {
    fn add(&mut self, split_scores: &ScoredSplit, rate: Fraction) {
        let (_, placed) = best_cutoff(&split_scores.held_out, rate.get());
        let (tuned_placed, tuned_fp) = split_scores.tuned_placed_and_fp(rate);
        self.placed.push(placed);
        self.tuned_placed += tuned_placed;
        self.tuned_fp += tuned_fp;
    }

    fn placement_stats(mut self, unseen_kind: Option<UnseenKindStats>) -> PlacementStats {
        self.placed.sort_unstable_by(f64::total_cmp);
        let n = self.placed.len() as f64;
        let mean = self.placed.iter().sum::<f64>() / n;
        let variance = self.placed.iter().map(|placed| (placed - mean).powi(2)).sum::<f64>() / n;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among the splits"
        )]
        let percentile = |part: f64| self.placed[(part * (n - 1.0)).round() as usize];
        PlacementStats {
            placed: mean,
            placed_sd: variance.sqrt(),
            placed_p1: percentile(0.01),
            placed_p99: percentile(0.99),
            tuned_placed: self.tuned_placed / n,
            tuned_fp: self.tuned_fp / n,
            unseen_kind,
        }
    }
}

/// Returns the highest cutoff at which at most the fraction `rate` of all workloads are false
/// positives, and the fraction of placed workloads. Workloads with equal scores are placed
/// together.
fn best_cutoff(scores: &[(f64, bool)], rate: f64) -> (f64, f64) {
    let mut sorted = scores.to_vec();
    sorted.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
    let (mut slowed, mut accepted, mut best) = (0, 0, (f64::NEG_INFINITY, 0.0));
    for ties in sorted.chunk_by(|(one, _), (other, _)| one == other) {
        slowed += ties.iter().filter(|(_, is_slowed)| *is_slowed).count();
        accepted += ties.len();
        if slowed as f64 > rate * scores.len() as f64 {
            break;
        }
        best = (ties[0].0, accepted as f64 / scores.len() as f64);
    }
    best
}
