//! What a tenant is like: from what a host sees of it to what shares are worth to it (Spirit 4.2).
//!
//! Two things are learnt: how often it misses with how much memory, by a [`MissModel`] (two are here: `power_law` from samples of which pages it touches,
//! `reuse` from all touches of some of its pages), and how much bandwidth it could use. A [`Learner`] keeps both for one tenant, epoch after epoch. Where the
//! numbers come from is the host's to know.

mod bandwidth;
mod fit;
mod learner;
mod power_law;
mod reuse;
mod waits;
mod worth;

pub use bandwidth::wanted;
pub use fit::{FitError, Histogram, Seen, fit};
pub use learner::{Learner, Sample, SampleError, Touched};
pub use power_law::PowerLaw;
pub use reuse::Reuse;
pub use worth::{Moves, Value, Worth, WorthError};

use crate::curve::{CurveError, Knot, MissCurve};

/// Anything that can say how often a tenant misses, from what it has seen so far.
pub trait MissModel {
    /// Accesses that miss with so much memory (MiB), 0 to 1; never more with more memory.
    fn misses(&self, memory: f64) -> f64;

    /// From so much memory on (MiB), more is of no use.
    fn footprint(&self) -> f64;

    /// How far off miss ratios may be, about: the standard error of one, 0 to 1.
    fn error(&self) -> f64;

    /// Miss ratios at so many sizes or fewer, closer to each other where there is less memory; not convex where it misses in leaps.
    fn knots(&self) -> Vec<Knot> {
        let size = |at: u32| self.footprint() * (f64::from(at) / f64::from(KNOTS)).powi(2);
        let knots = (0..=KNOTS).map(size).map(|memory| Knot { memory, misses: self.misses(memory) });
        let mut knots: Vec<Knot> = knots.collect();
        knots.dedup_by(|next, last| next.memory <= last.memory);
        knots
    }

    /// The convex curve that the market solves exactly.
    ///
    /// # Errors
    /// A miss ratio is out of range: the model is wrong.
    fn curve(&self) -> Result<MissCurve, CurveError> {
        MissCurve::new(self.knots())
    }
}

/// Steps of a curve.
const KNOTS: u32 = 64;

#[cfg(test)]
mod tests;
