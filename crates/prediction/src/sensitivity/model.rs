//! A forest to serve: how likely a workload is slowed down beyond the margin, and which cut places how many of all, how many of them
//! wrongly. Cuts are learnt from what trees say of workloads that they have not seen.

use serde::{Deserialize, Serialize};
use units::Fraction;

use super::{COUNTERS, Workload, forest, trial::Untold};
use crate::{import::Foreign, trees::Ensemble};

/// What was learnt of latency sensitivity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    says: Says,
    /// The margin: a workload that is slowed down by more is sensitive.
    pub pdm: Fraction,
    cuts: Vec<Cut>,
}

/// Who says it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Says {
    /// A forest that was trained here.
    Own(Ensemble),
    /// A model that was trained elsewhere.
    Foreign(Foreign),
}

/// One operating point: workloads of which at most this is said are placed. Shares are of all workloads, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cut {
    /// The highest probability that is placed.
    pub at_most: f64,
    /// Share that is placed although it is slowed down beyond the margin: false positives.
    pub fp: f64,
    /// Share that is placed.
    pub placed: f64,
}

/// Cuts that are kept.
const CUTS_MAX: usize = 200;

impl Model {
    /// Trains on labelled workloads. The same rows and seed make the same model.
    ///
    /// # Errors
    /// [`Untold`]: too few programs, or all of one kind.
    pub fn train(workloads: &[Workload], pdm: Fraction, seed: u64) -> Result<Self, Untold> {
        Untold::check(workloads, pdm)?;
        let bagged = forest(&workloads.iter().collect::<Vec<_>>(), pdm.get(), seed);
        let said = workloads.iter().zip(bagged.unseen);
        let said = said.filter_map(|(workload, said)| Some((said?, workload.slowdown > pdm.get())));
        Ok(Self { says: Says::Own(bagged.forest), pdm, cuts: cuts(said.collect()) })
    }

    /// A model that was trained elsewhere, with cuts learnt from workloads that it should not have been trained on.
    ///
    /// # Errors
    /// [`Untold`]: too few programs, or all of one kind.
    pub fn foreign(model: Foreign, workloads: &[Workload], pdm: Fraction) -> Result<Self, Untold> {
        Untold::check(workloads, pdm)?;
        let said = |workload: &Workload| (model.predict(&workload.counters), workload.slowdown > pdm.get());
        let said = workloads.iter().map(said).filter(|(said, _)| !said.is_nan()).collect();
        Ok(Self { says: Says::Foreign(model), pdm, cuts: cuts(said) })
    }

    /// How likely a workload is slowed down beyond the margin. Counters that were not measured are NaN.
    pub fn probability(&self, counters: &[f64; COUNTERS.len()]) -> f64 {
        match &self.says {
            Says::Own(forest) => forest.predict_one(counters),
            Says::Foreign(model) => model.predict(counters),
        }
    }

    /// Operating points, the fewest false positives first; of those with as many, the one that places most.
    pub fn cuts(&self) -> &[Cut] {
        &self.cuts
    }

    /// Whether it fits the counters of this version, and its cuts are shares.
    pub(crate) fn fits(&self) -> bool {
        let fits = match &self.says {
            Says::Own(forest) => forest.features() == COUNTERS.len() && forest.outputs() == 1,
            Says::Foreign(model) => model.fits(COUNTERS.len()),
        };
        let is_share = |share: f64| (0.0..=1.0).contains(&share);
        fits && self.cuts.len() <= CUTS_MAX
            && self.cuts.iter().all(|cut| is_share(cut.fp) && is_share(cut.placed))
    }
}

/// The best cut for each number of false positives. What is said alike is placed together or not at all.
fn cuts(mut said: Vec<(f64, bool)>) -> Vec<Cut> {
    said.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
    let all = said.len() as f64;
    let (mut slowed, mut below, mut cuts) = (0_u32, 0_u32, Vec::<Cut>::new());
    for alike in said.chunk_by(|(one, _), (other, _)| one == other) {
        slowed += alike.iter().map(|(_, is_slowed)| u32::from(*is_slowed)).sum::<u32>();
        below += u32::try_from(alike.len()).expect("few workloads");
        let (fp, placed) = (f64::from(slowed) / all, f64::from(below) / all);
        let cut = Cut { at_most: alike[0].0, fp, placed };
        match cuts.last_mut() {
            Some(last) if last.fp == fp => *last = cut,
            _ => cuts.push(cut),
        }
    }
    let step = cuts.len().div_ceil(CUTS_MAX).max(1);
    cuts.into_iter().step_by(step).collect()
}
