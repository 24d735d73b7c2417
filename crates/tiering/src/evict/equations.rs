//! Equations 2 and 4 of Glitter, and the classes of eviction flows, with errata.

use std::fmt;

/// Number of classes of eviction flows.
pub const CLASSES: u8 = 7;

/// Limits of the time until a tenant exhausts its memory, in seconds, above which the class of its
/// flows increases by one. The paper prints the first two limits (Fig. 7).
pub type ExhaustionLimits = [f64; CLASSES as usize - 2];

/// Formula that raises a threshold after the cache miss rate has increased (Eq. 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullBack {
    /// The threshold is a weighted mean of the lowered and the previous threshold, with the weight 1/β
    /// of the lowered one.
    #[default]
    Arithmetic,
    /// The reciprocal of the threshold is this weighted mean of the reciprocals. The threshold rises
    /// less.
    Harmonic,
}

/// Returns a threshold after early eviction has been extended (section III-B, Eq. 2): `threshold / alpha`,
/// at least `lower`. `alpha` is the ratio of the memory growth rate to the eviction rate, more than 1.
pub fn lowered_threshold(threshold: f64, alpha: f64, lower: f64) -> f64 {
    (threshold / alpha).max(lower)
}

/// Returns a threshold that was lowered from `current` to `lowered`, after the cache miss rate has changed
/// by the ratio `beta` (section III-B, Eq. 4). It is `lowered` if `beta` is at most 1, and approaches
/// `current` as `beta` approaches infinity.
///
/// Erratum: the printed equation, T' / ((1-α)/β + α), approaches T'/α, which is below T'. The text
/// requires the range from T' to the current threshold.
pub fn pulled_back_threshold(form: PullBack, current: f64, lowered: f64, beta: f64) -> f64 {
    let weight = if beta <= 1.0 { 1.0 } else { 1.0 / beta };
    match form {
        PullBack::Arithmetic => weight * lowered + (1.0 - weight) * current,
        PullBack::Harmonic => 1.0 / (weight / lowered + (1.0 - weight) / current),
    }
}

/// Class of the eviction flows of a tenant, from 1 (most urgent) to [`CLASSES`].
///
/// Erratum: the text counts priorities upwards and Algorithm 1 counts them downwards. This is the
/// order of Algorithm 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowClass(u8);

impl FlowClass {
    /// Class of the flows of a tenant that waits for free memory (urgent eviction flows).
    pub const URGENT: Self = Self(1);
    /// Class of the flows of a tenant with the most time or memory left.
    pub const LEAST_URGENT: Self = Self(CLASSES);

    /// Returns the class of a tenant that is not blocked and exhausts its memory in this time, in seconds.
    /// A time at a limit belongs to the less urgent class.
    pub fn by_time_to_exhaustion(seconds: f64, limits: &ExhaustionLimits) -> Self {
        Self::of_unblocked(limits.iter().filter(|limit| seconds >= **limit).count())
    }

    /// Returns the class of a tenant that is not blocked, for the ratio of its unused memory, from 0 to 1
    /// (Algorithm 1). Classes 2 to 6 cover 10 % each, with the upper end. Class 7 covers the rest.
    pub fn by_remaining_memory(ratio: f64) -> Self {
        let spans: ExhaustionLimits = [0.1, 0.2, 0.3, 0.4, 0.5];
        Self::of_unblocked(spans.iter().filter(|end| ratio > **end).count())
    }

    /// Returns class 2 + `steps`, at most [`CLASSES`].
    fn of_unblocked(steps: usize) -> Self {
        let steps = u8::try_from(steps).unwrap_or(CLASSES);
        Self(steps.saturating_add(Self::URGENT.0 + 1).min(CLASSES))
    }

    /// Returns the number of the class, from 1 (most urgent) to [`CLASSES`].
    pub fn number(self) -> u8 {
        self.0
    }

    /// Returns the queue of a switch with eight queues, from 7 (most urgent) to 1. Queue 0 is reserved for
    /// control messages.
    pub fn queue(self) -> u8 {
        CLASSES + 1 - self.0
    }
}

impl fmt::Display for FlowClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
