//! What shares are worth to a tenant: by Spirit's model, from miss ratios, exactly solved where they fall ever more slowly and on a grid where they leap; or
//! by how long it was seen to wait for pages and how much it moves meanwhile.

use std::fmt;

use thiserror::Error;

use super::waits::HARDLY;
use crate::{
    curve::{CurveError, Knot, MissCurve, check},
    market::{Asked, Bundle, Grid, Limits, Mark, Purse, Slowdown, SlowdownError, Supply, Utility},
};

/// How much longer, relative, a tenant would take than its convex curve says, from which on the curve is not used: a loop that only just does not fit
/// misses everything, whatever a straight line to where it fits may promise.
const LEAP: f64 = 0.02;

/// And misses more, of all accesses: of who hardly waits for memory, the promise would still be counted as its due.
const MISSES: f64 = 0.05;

/// How sharply throughput turns from what waiting allows to what the link lets through: with a link for just what it moves if nothing holds it up, a tenant
/// loses a sixth, since its requests queue; with one for twice as much, a sixtieth.
const KNEE: i32 = 4;

/// What a tenant moves over the link, if nothing holds it up.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moves {
    /// MB for each second that it waits: pages that it waits for, and those read ahead with them.
    pub waiting: f64,
    /// MB for each second of work, however much memory it has: what it writes, above all.
    pub always: f64,
}

/// What a bundle is worth, and how the best that can be paid is found.
pub enum Worth {
    /// Spirit's slowdown, where miss ratios are nearly convex.
    Exact(Slowdown),
    /// Anything else.
    Sought(Grid<Value>),
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
    /// By Spirit's model, with miss ratios at these sizes; a miss takes `gamma` times as long as a hit, `wanted` MB/s are what it could use of the link.
    ///
    /// # Errors
    /// Knots are no miss-ratio curve, or a number is out of range.
    pub fn new(supply: Supply, knots: Vec<Knot>, gamma: f64, wanted: f64) -> Result<Self, WorthError> {
        let slowdown = Slowdown::new(MissCurve::new(knots.clone())?, gamma, wanted)?;
        let is_leap = |knot: &Knot| {
            let convex = slowdown.misses(knot.memory);
            knot.misses > convex + MISSES || 1.0 + gamma * knot.misses > (1.0 + LEAP) * (1.0 + gamma * convex)
        };
        if !knots.iter().any(is_leap) {
            return Ok(Self::Exact(slowdown));
        }
        let measured = Falling::new(knots);
        let value = move |bundle: Bundle| {
            slowdown.with_misses(measured.misses(bundle.memory), bundle.bandwidth).recip()
        };
        Ok(Self::Sought(Grid::new(supply, Box::new(value))))
    }

    /// Of a tenant that waits `gamma` seconds for each second of work without any memory, and with more of it the part that `knots` say.
    ///
    /// Spirit (4.2) lets each miss take longer by what the link lacks, as if tenants missed all the time. One that works a while between misses moves what it
    /// moves meanwhile: it takes as long as work and waiting do, or as the link needs for all that is moved, whichever is longer. So who seldom misses needs
    /// little of the link, and loses all the more below that.
    ///
    /// # Errors
    /// Knots are no miss-ratio curve, or a number is out of range.
    pub fn of_waits(supply: Supply, knots: Vec<Knot>, gamma: f64, moves: Moves) -> Result<Self, WorthError> {
        check(&knots)?;
        Slowdown::check(gamma, moves.waiting)?;
        Slowdown::check(gamma, moves.always)?;
        let measured = Falling::new(knots);
        let value = move |bundle: Bundle| {
            let waits = gamma * measured.misses(bundle.memory);
            let moved = waits * moves.waiting + moves.always;
            let link = if moved > 0.0 { moved / bundle.bandwidth } else { 0.0 };
            // Who waits so little is not measured better, and would else hold on to memory that others want as if it were its life.
            let alone = 1.0 + (waits - HARDLY).max(0.0);
            (alone.powi(KNEE) + link.powi(KNEE)).powf(-1.0 / f64::from(KNEE))
        };
        Ok(Self::Sought(Grid::new(supply, Box::new(value))))
    }
}

impl fmt::Debug for Worth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(slowdown) => f.debug_tuple("Exact").field(slowdown).finish(),
            Self::Sought(_) => f.write_str("Sought"),
        }
    }
}

impl Utility for Worth {
    fn value(&self, bundle: Bundle) -> f64 {
        match self {
            Self::Exact(slowdown) => slowdown.value(bundle),
            Self::Sought(grid) => grid.value(bundle),
        }
    }

    fn is_convex(&self) -> bool {
        match self {
            Self::Exact(slowdown) => slowdown.is_convex(),
            Self::Sought(grid) => grid.is_convex(),
        }
    }

    fn asks(&self, purse: &Purse, within: &Limits, mark: &mut Mark) -> Asked {
        match self {
            Self::Exact(slowdown) => slowdown.asks(purse, within, mark),
            Self::Sought(grid) => grid.asks(purse, within, mark),
        }
    }

    fn look_ahead(&self, mark: &Mark) {
        match self {
            Self::Exact(slowdown) => slowdown.look_ahead(mark),
            Self::Sought(grid) => grid.look_ahead(mark),
        }
    }
}

/// Miss ratios as they were measured, but that they never rise; straight between knots.
struct Falling(Vec<Knot>);

impl Falling {
    fn new(mut knots: Vec<Knot>) -> Self {
        let mut lowest = 1.0_f64;
        for knot in &mut knots {
            lowest = lowest.min(knot.misses);
            knot.misses = lowest;
        }
        Self(knots)
    }

    fn misses(&self, memory: f64) -> f64 {
        crate::curve::between(&self.0, memory)
    }
}
