//! Error of training and evaluating sensitivity models.

use std::collections::BTreeSet;

use units::{Fraction, limits::CROSS_VALIDATION_SPLITS_MAX};

use super::Workload;

/// Error from training or evaluating a sensitivity model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationError {
    /// The workloads run too few different programs. The field is the number of programs.
    #[error("the labelled workloads run {0} different programs: must be at least {PROGRAMS_MIN}")]
    TooFewPrograms(usize),
    /// All workloads are slowed down beyond the margin, or none of them.
    #[error(
        "all or none of the workloads are slowed down beyond the margin (PDM): must be some, but not all"
    )]
    SingleClass,
    /// The number of splits is out of range.
    #[error("number of splits: {0} is out of range, must be 1 to {CROSS_VALIDATION_SPLITS_MAX}")]
    Splits(u32),
}

/// Smallest number of programs for training and evaluation.
const PROGRAMS_MIN: usize = 10;

impl EvaluationError {
    /// Checks that there are enough programs, and that some but not all workloads are slowed down
    /// beyond the margin.
    pub(crate) fn check<'a>(
        workloads: impl ExactSizeIterator<Item = &'a Workload> + Clone,
        pdm: Fraction,
    ) -> Result<(), Self> {
        let programs: BTreeSet<&str> = workloads.clone().map(|workload| workload.program.as_str()).collect();
        let count = workloads.len();
        let slowed = workloads.filter(|workload| workload.slowdown > pdm.get()).count();
        if programs.len() < PROGRAMS_MIN {
            Err(Self::TooFewPrograms(programs.len()))
        } else if slowed == 0 || slowed == count {
            Err(Self::SingleClass)
        } else {
            Ok(())
        }
    }
}
