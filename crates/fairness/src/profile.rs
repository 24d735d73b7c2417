//! Tenant profiles: estimates of a tenant's utility from measurements of the host (Spirit, section
//! 4.2).
//!
//! A profile consists of a miss-ratio curve and the bandwidth that the tenant could use. Two models
//! implement [`MissModel`]: `power_law` is fitted to samples of accessed pages, and
//! `reuse_distance` is measured from all accesses to a sample of pages. A [`Learner`] keeps the
//! profile of one tenant across epochs. The caller takes the measurements.

mod bandwidth;
mod fit;
mod learner;
mod power_law;
mod reuse_distance;
mod stall_model;
mod tenant_utility;

pub use bandwidth::wanted;
pub use fit::{FitError, Histogram, MeasuredMissRatio, fit};
pub use learner::{Learner, PageAccesses, Sample, SampleError};
pub use power_law::PowerLaw;
pub use reuse_distance::ReuseDistances;
pub use tenant_utility::{LinkTraffic, TenantUtility, UtilityError, ValueFn, stall_utility};

use crate::curve::{CurveError, Knot, MissCurve};

/// Model of the miss ratio of a tenant.
pub trait MissModel {
    /// Returns the miss ratio with `memory` MiB, 0 to 1. The miss ratio must not increase with
    /// memory.
    fn misses(&self, memory: f64) -> f64;

    /// Returns the memory size, in MiB, beyond which more memory does not reduce misses.
    fn footprint(&self) -> f64;

    /// Returns the approximate standard error of miss ratios, 0 to 1.
    fn error(&self) -> f64;

    /// Returns points of the miss-ratio curve in ascending order of memory, closer together at
    /// small sizes. The curve through the points is not convex if the miss ratio drops abruptly at
    /// some size.
    fn knots(&self) -> Vec<Knot> {
        let size = |at: u32| self.footprint() * (f64::from(at) / f64::from(KNOT_INTERVALS)).powi(2);
        let knots = (0..=KNOT_INTERVALS).map(size).map(|memory| Knot { memory, misses: self.misses(memory) });
        let mut knots: Vec<Knot> = knots.collect();
        knots.dedup_by(|next, last| next.memory <= last.memory);
        knots
    }

    /// Returns the lower convex hull of [`Self::knots`]. The market computes demand exactly for a
    /// convex curve.
    ///
    /// # Errors
    /// Returns a [`CurveError`] if the model returns a miss ratio out of range.
    fn curve(&self) -> Result<MissCurve, CurveError> {
        MissCurve::new(self.knots())
    }
}

/// Number of intervals into which [`MissModel::knots`] divides the footprint.
const KNOT_INTERVALS: u32 = 64;

#[cfg(test)]
mod tests;
