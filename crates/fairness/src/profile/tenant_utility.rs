//! Utility of a tenant from measured stalls and link traffic.

use thiserror::Error;

use super::stall_model::STALL_NOISE_FLOOR;
use crate::{
    curve::{CurveError, Knot, check_knots},
    market::{Bundle, Grid, Slowdown, SlowdownError, Supply},
};

/// Exponent that sets how sharply throughput changes from stall-bound to link-bound. Because of
/// queueing, a tenant loses a sixth of its throughput if its bandwidth equals its unthrottled
/// traffic, and a sixtieth with twice that bandwidth.
const KNEE_EXPONENT: i32 = 4;

/// Link traffic of an unthrottled tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkTraffic {
    /// Traffic of page faults and readahead, in MB per second of stall.
    pub mb_per_stall_second: f64,
    /// Traffic that does not depend on the amount of local memory, mostly writes; in MB per second
    /// of work.
    pub mb_per_work_second: f64,
}

/// Utility of a tenant from measured stalls and link traffic. Its demand is searched on a grid.
pub type TenantUtility = Grid<ValueFn>;

/// Function that returns the value of a bundle.
pub type ValueFn = Box<dyn Fn(Bundle) -> f64 + Send + Sync>;

/// Error for estimates from which no utility can be created.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum UtilityError {
    /// The knots do not form a miss-ratio curve.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// `gamma` or a bandwidth is out of range.
    #[error(transparent)]
    Slowdown(#[from] SlowdownError),
}

/// Creates a utility from measured stalls. `gamma` is the stall ratio without local memory, in
/// seconds per second of work. `knots` are the stall ratios with more memory, as fractions of
/// `gamma`.
///
/// Deviation from Spirit (section 4.2): the paper multiplies the duration of each miss by the
/// shortage of bandwidth. That is too pessimistic for a tenant that works between misses,
/// because its pages are transferred meanwhile. Here the run time is approximately the larger
/// of two times: work plus stalls, and the transfer time of the traffic on the link. A tenant
/// with few misses therefore needs little bandwidth, but loses much throughput with less.
///
/// # Errors
/// Returns [`UtilityError`] if the knots do not form a miss-ratio curve or a number is out of
/// range.
pub fn stall_utility(
    supply: Supply,
    knots: Vec<Knot>,
    gamma: f64,
    traffic: LinkTraffic,
) -> Result<TenantUtility, UtilityError> {
    check_knots(&knots)?;
    Slowdown::check(gamma, traffic.mb_per_stall_second)?;
    Slowdown::check(gamma, traffic.mb_per_work_second)?;
    let measured = MonotoneCurve::new(knots);
    let value = move |bundle: Bundle| {
        let stall_ratio = gamma * measured.misses(bundle.memory);
        let traffic_mb = stall_ratio * traffic.mb_per_stall_second + traffic.mb_per_work_second;
        let link = if traffic_mb > 0.0 { traffic_mb / bundle.bandwidth } else { 0.0 };
        // Stalls below the noise floor are not measurable. If such stalls counted, the tenant
        // would keep memory that other tenants need.
        let alone = 1.0 + (stall_ratio - STALL_NOISE_FLOOR).max(0.0);
        (alone.powi(KNEE_EXPONENT) + link.powi(KNEE_EXPONENT)).powf(-1.0 / f64::from(KNEE_EXPONENT))
    };
    Ok(Grid::new(supply, Box::new(value)))
}

/// Measured miss-ratio curve that does not increase with memory, linear between knots.
struct MonotoneCurve(Vec<Knot>);

impl MonotoneCurve {
    /// Creates a curve in which each miss ratio is at most the miss ratio of the previous knot.
    fn new(mut knots: Vec<Knot>) -> Self {
        let mut lowest = 1.0_f64;
        for knot in &mut knots {
            lowest = lowest.min(knot.misses);
            knot.misses = lowest;
        }
        Self(knots)
    }

    fn misses(&self, memory: f64) -> f64 {
        crate::curve::interpolate(&self.0, memory)
    }
}
