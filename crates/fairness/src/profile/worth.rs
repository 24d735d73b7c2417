//! What shares are worth to a tenant whose miss ratios were measured: exactly solved where they fall ever more slowly, on a grid where they leap.

use std::{fmt, sync::Arc};

use thiserror::Error;

use crate::{
    curve::{CurveError, Knot, MissCurve},
    market::{Asked, Bundle, Grid, Limits, Mark, Purse, Slowdown, SlowdownError, Supply, Utility},
};

/// How much longer, relative, a tenant would take than its convex curve says, from which on the curve is not used: a loop that only just does not fit
/// misses everything, whatever a straight line to where it fits may promise.
const LEAP: f64 = 0.02;

/// And misses more, of all accesses: of who hardly waits for memory, the promise would still be counted as its due.
const MISSES: f64 = 0.05;

/// Spirit's slowdown with measured miss ratios.
pub enum Worth {
    /// They are nearly convex.
    Exact(Slowdown),
    /// They are not.
    Leaping(Grid<Value>),
}

/// What a bundle is worth.
pub type Value = Box<dyn Fn(Bundle) -> f64 + Send + Sync>;

/// Why there is none.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum WorthError {
    /// The miss ratios are none.
    #[error(transparent)]
    Curve(#[from] CurveError),
    /// Gamma or the wanted bandwidth is out of range.
    #[error(transparent)]
    Slowdown(#[from] SlowdownError),
}

impl Worth {
    /// With miss ratios at these sizes; a miss takes `gamma` times as long as a hit, `wanted` MB/s are what it could use of the link.
    ///
    /// # Errors
    /// Knots are no miss-ratio curve, or a number is out of range.
    pub fn new(supply: Supply, knots: &[Knot], gamma: f64, wanted: f64) -> Result<Self, WorthError> {
        let curve = Arc::new(MissCurve::new(knots)?);
        let slowdown = Slowdown::new(Arc::clone(&curve), gamma, wanted)?;
        let is_leap = |knot: &Knot| {
            let convex = curve.misses(knot.memory);
            knot.misses > convex + MISSES || 1.0 + gamma * knot.misses > (1.0 + LEAP) * (1.0 + gamma * convex)
        };
        if !knots.iter().any(is_leap) {
            return Ok(Self::Exact(slowdown));
        }
        let measured = Falling::new(knots);
        let value = move |bundle: Bundle| {
            slowdown.with_misses(measured.misses(bundle.memory), bundle.bandwidth).recip()
        };
        Ok(Self::Leaping(Grid::new(supply, Box::new(value))))
    }
}

impl fmt::Debug for Worth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(slowdown) => f.debug_tuple("Exact").field(slowdown).finish(),
            Self::Leaping(_) => f.write_str("Leaping"),
        }
    }
}

impl Utility for Worth {
    fn value(&self, bundle: Bundle) -> f64 {
        match self {
            Self::Exact(slowdown) => slowdown.value(bundle),
            Self::Leaping(grid) => grid.value(bundle),
        }
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        match self {
            Self::Exact(slowdown) => slowdown.asks(purse, within, mark),
            Self::Leaping(grid) => grid.asks(purse, within, mark),
        }
    }
}

/// Miss ratios as they were measured, but that they never rise; straight between knots.
struct Falling(Vec<Knot>);

impl Falling {
    fn new(knots: &[Knot]) -> Self {
        let mut lowest = 1.0_f64;
        let falling = |knot: &Knot| {
            lowest = lowest.min(knot.misses);
            Knot { misses: lowest, ..*knot }
        };
        Self(knots.iter().map(falling).collect())
    }

    fn misses(&self, memory: f64) -> f64 {
        crate::curve::between(&self.0, memory)
    }
}
