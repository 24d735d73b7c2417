//! Utility of a tenant according to Spirit's slowdown model. Demand is computed exactly for a nearly
//! convex miss-ratio curve, and on a grid otherwise.

use std::sync::Arc;

use fairness::{
    curve::{CurveError, Knot, MissCurve},
    market::{BudgetConstraint, Bundle, Demand, DemandHint, Grid, Limits, Slowdown, Supply, Utility},
};

use super::tenant::MissRatioCurve;

/// The convex hull replaces a curve only if their slowdowns differ by at most this fraction.
/// Otherwise the hull may be wrong: a loop that almost fits into memory misses on every access, but
/// the hull of its curve predicts hits.
const CONVEXITY_GAP_MAX: f64 = 0.02;
/// The convex hull replaces a curve only if their miss ratios differ by at most this much. For
/// tenants with few stalls, the slowdown alone would not show the difference.
const CONVEXITY_MISS_GAP_MAX: f64 = 0.05;

/// Function that returns the value of a bundle.
type ValueFn = Box<dyn Fn(Bundle) -> f64 + Send + Sync>;

/// Utility of a tenant, by the method that computes its demand.
#[derive(Debug)]
pub enum TraceUtility {
    /// Nearly convex miss-ratio curve. Demand is computed exactly.
    Exact(Slowdown),
    /// Any other curve. Demand is searched on a grid.
    Searched(Grid<ValueFn>),
}

impl TraceUtility {
    /// Creates the utility. `footprint_mib` is the size of the curve's footprint, `gamma` the ratio
    /// of miss time to hit time, and `wanted` the bandwidth that the tenant could use, in MB/s.
    pub(super) fn new(
        supply: Supply,
        curve: &Arc<MissRatioCurve>,
        footprint_mib: f64,
        gamma: f64,
        wanted: f64,
    ) -> Result<Self, CurveError> {
        let scale = |knot: Knot| Knot { memory: knot.memory * footprint_mib, ..knot };
        let knots: Vec<Knot> = curve.knots().into_iter().map(scale).collect();
        let convex = MissCurve::new(knots.clone())?;
        let is_nonconvex = |knot: &Knot| {
            let hull = convex.misses(knot.memory);
            knot.misses > hull + CONVEXITY_MISS_GAP_MAX
                || 1.0 + gamma * knot.misses > (1.0 + CONVEXITY_GAP_MAX) * (1.0 + gamma * hull)
        };
        let is_searched = knots.iter().any(is_nonconvex);
        let slowdown = Slowdown::new(convex, gamma, wanted).expect("gamma and link shares are valid");
        if !is_searched {
            return Ok(Self::Exact(slowdown));
        }
        let curve = Arc::clone(curve);
        let value = move |bundle: Bundle| {
            let misses = curve.misses(bundle.memory / footprint_mib);
            slowdown.slowdown_with_miss_ratio(misses, bundle.bandwidth).recip()
        };
        Ok(Self::Searched(Grid::new(supply, Box::new(value))))
    }
}

impl Utility for TraceUtility {
    fn value(&self, bundle: Bundle) -> f64 {
        match self {
            Self::Exact(slowdown) => slowdown.value(bundle),
            Self::Searched(grid) => grid.value(bundle),
        }
    }

    fn demand(&self, constraint: &BudgetConstraint, within: &Limits, hint: &mut DemandHint) -> Demand {
        match self {
            Self::Exact(slowdown) => slowdown.demand(constraint, within, hint),
            Self::Searched(grid) => grid.demand(constraint, within, hint),
        }
    }
}
