//! Utility of a tenant: by Spirit's slowdown model from miss ratios, or from measured stalls and
//! link traffic. The slowdown model is solved exactly for convex curves and on a grid otherwise.

use std::fmt;

use thiserror::Error;

use super::stall_model::STALL_NOISE_FLOOR;
use crate::{
    curve::{CurveError, Knot, MissCurve, check_knots},
    market::{
        BudgetConstraint, Bundle, Demand, Grid, Limits, Slowdown, SlowdownError, Supply, Utility, WarmStart,
    },
};

/// Relative increase of the slowdown over that of the convex hull from which the hull is not used.
/// A loop that just does not fit misses everything, although the hull promises hits.
const CONVEXITY_GAP_MAX: f64 = 0.02;

/// Difference of miss ratios from which the hull is not used. It matters for tenants with few
/// stalls, whose guaranteed throughput would be computed from the hull.
const CONVEXITY_MISS_GAP_MAX: f64 = 0.05;

/// Exponent that sets how sharply throughput changes from stall-bound to link-bound. If the link
/// carries exactly the unthrottled traffic, a tenant loses a sixth by queueing; with twice that
/// bandwidth, a sixtieth.
const KNEE_EXPONENT: i32 = 4;

/// Link traffic of an unthrottled tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkTraffic {
    /// MB per second of stall: faulted pages and readahead.
    pub per_stall_second: f64,
    /// MB per second of work, independent of memory: mostly writes.
    pub per_work_second: f64,
}

/// Utility with the matching solver.
pub enum TenantUtility {
    /// Spirit's slowdown, for miss ratios that are nearly convex.
    Exact(Slowdown),
    /// Any other function, by search on a grid.
    Searched(Grid<ValueFn>),
}

/// Function that values a bundle.
pub type ValueFn = Box<dyn Fn(Bundle) -> f64 + Send + Sync>;

/// Error for estimates that do not define a utility.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum UtilityError {
    /// The points are not a miss-ratio curve.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// `gamma` or a bandwidth is out of range.
    #[error(transparent)]
    Slowdown(#[from] SlowdownError),
}

impl TenantUtility {
    /// Creates the utility of Spirit's model. A miss takes `gamma` times as long as a hit; `wanted`
    /// is the bandwidth the tenant could use, in MB/s.
    ///
    /// # Errors
    /// [`UtilityError`] if the knots are not a miss-ratio curve or a number is out of range.
    pub fn new(supply: Supply, knots: Vec<Knot>, gamma: f64, wanted: f64) -> Result<Self, UtilityError> {
        let slowdown = Slowdown::new(MissCurve::new(knots.clone())?, gamma, wanted)?;
        let is_nonconvex = |knot: &Knot| {
            let convex = slowdown.misses(knot.memory);
            knot.misses > convex + CONVEXITY_MISS_GAP_MAX
                || 1.0 + gamma * knot.misses > (1.0 + CONVEXITY_GAP_MAX) * (1.0 + gamma * convex)
        };
        if !knots.iter().any(is_nonconvex) {
            return Ok(Self::Exact(slowdown));
        }
        let measured = MonotoneCurve::new(knots);
        let value = move |bundle: Bundle| {
            slowdown.with_misses(measured.misses(bundle.memory), bundle.bandwidth).recip()
        };
        Ok(Self::Searched(Grid::new(supply, Box::new(value))))
    }

    /// Creates a utility from stalls. `gamma` is the stall ratio without local memory, in seconds
    /// per second of work; `knots` are the fractions of it that remain with more memory.
    ///
    /// Deviation from Spirit (section 4.2), which extends each miss by the shortage of bandwidth,
    /// as if tenants missed all the time: a tenant that works between misses moves its pages
    /// meanwhile. Here its run time is the larger of work plus stalls and the time that the link
    /// needs for its traffic. A tenant with few misses therefore needs little bandwidth, but loses
    /// much below that.
    ///
    /// # Errors
    /// [`UtilityError`] if the knots are not a miss-ratio curve or a number is out of range.
    pub fn from_stalls(
        supply: Supply,
        knots: Vec<Knot>,
        gamma: f64,
        traffic: LinkTraffic,
    ) -> Result<Self, UtilityError> {
        check_knots(&knots)?;
        Slowdown::check(gamma, traffic.per_stall_second)?;
        Slowdown::check(gamma, traffic.per_work_second)?;
        let measured = MonotoneCurve::new(knots);
        let value = move |bundle: Bundle| {
            let stall_ratio = gamma * measured.misses(bundle.memory);
            let traffic_mb = stall_ratio * traffic.per_stall_second + traffic.per_work_second;
            let link = if traffic_mb > 0.0 { traffic_mb / bundle.bandwidth } else { 0.0 };
            // Stalls below the noise floor are not measurable. If they counted, the tenant would
            // keep memory that others need.
            let alone = 1.0 + (stall_ratio - STALL_NOISE_FLOOR).max(0.0);
            (alone.powi(KNEE_EXPONENT) + link.powi(KNEE_EXPONENT)).powf(-1.0 / f64::from(KNEE_EXPONENT))
        };
        Ok(Self::Searched(Grid::new(supply, Box::new(value))))
    }
}

impl fmt::Debug for TenantUtility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(slowdown) => f.debug_tuple("Exact").field(slowdown).finish(),
            Self::Searched(_) => f.write_str("Searched"),
        }
    }
}

impl Utility for TenantUtility {
    fn value(&self, bundle: Bundle) -> f64 {
        match self {
            Self::Exact(slowdown) => slowdown.value(bundle),
            Self::Searched(grid) => grid.value(bundle),
        }
    }

    fn is_convex(&self) -> bool {
        match self {
            Self::Exact(slowdown) => slowdown.is_convex(),
            Self::Searched(grid) => grid.is_convex(),
        }
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, warm: &mut WarmStart) -> Demand {
        match self {
            Self::Exact(slowdown) => slowdown.demand(constraint, within, warm),
            Self::Searched(grid) => grid.demand(constraint, within, warm),
        }
    }

    fn prefetch(&self, warm: &WarmStart) {
        match self {
            Self::Exact(slowdown) => slowdown.prefetch(warm),
            Self::Searched(grid) => grid.prefetch(warm),
        }
    }
}

/// Measured miss ratios made monotone, linear between knots.
struct MonotoneCurve(Vec<Knot>);

impl MonotoneCurve {
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
