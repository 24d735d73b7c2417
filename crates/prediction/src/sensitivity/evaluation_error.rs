//! Error of training and evaluation, shared by the model and the backtest.

use std::collections::BTreeSet;

use units::{Fraction, limits::CROSS_VALIDATION_SPLITS_MAX};

use super::Workload;

/// Error training or evaluating a sensitivity model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluationError {
    /// There are too few programs to split.
    #[error("{0} programs: must be at least {PROGRAMS_MIN}")]
    TooFewPrograms(usize),
    /// All workloads are slowed down beyond the margin, or none.
    #[error("all workloads are slowed down beyond the margin, or none: must be some of each")]
    SingleClass,
    /// The number of splits is out of range.
    #[error("{0} splits: must be from 1 to {CROSS_VALIDATION_SPLITS_MAX}")]
    Splits(u32),
}

/// Minimum number of programs.
const PROGRAMS_MIN: usize = 10;

impl EvaluationError {
    /// Checks that there are enough programs, and workloads of both classes.
    pub(super) fn check(workloads: &[Workload], pdm: Fraction) -> Result<(), Self> {
        let programs: BTreeSet<&str> = workloads.iter().map(|workload| workload.program.as_str()).collect();
        let slowed = workloads.iter().filter(|workload| workload.slowdown > pdm.get()).count();
        if programs.len() < PROGRAMS_MIN {
            Err(Self::TooFewPrograms(programs.len()))
        } else if slowed == 0 || slowed == workloads.len() {
            Err(Self::SingleClass)
        } else {
            Ok(())
        }
    }
}
