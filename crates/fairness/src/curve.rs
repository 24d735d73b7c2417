//! How often a tenant misses local memory, by how much of it there is.

use thiserror::Error;
use units::limits::CURVE_KNOTS_MAX;

/// One point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knot {
    /// Local memory, in MiB.
    pub memory: f64,
    /// Accesses that miss it, 0 to 1.
    pub misses: f64,
}

/// A miss-ratio curve: straight between its knots, falling and convex, flat beyond the last.
///
/// Convex, because then what a tenant asks for at some price changes without jumps of what it is worth, and so the market clears exactly
/// (Spirit 3.2 needs it tacitly). A measured curve that is not is lowered onto the largest convex curve that is nowhere above it.
#[derive(Clone, Debug, PartialEq)]
pub struct MissCurve(Vec<Knot>);

/// Why points are no miss-ratio curve.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum CurveError {
    /// There is none.
    #[error("a miss-ratio curve has at least one knot")]
    Empty,
    /// There are too many.
    #[error("{0} knots: a miss-ratio curve has at most {CURVE_KNOTS_MAX}")]
    TooMany(usize),
    /// A number that is none, or out of range.
    #[error("knot {at}: {what} {value} must be {rule}")]
    Wrong {
        /// Which knot, from 0.
        at: usize,
        /// Which number of it.
        what: &'static str,
        /// What it was.
        value: f64,
        /// What it has to be.
        rule: &'static str,
    },
}

impl MissCurve {
    /// The largest convex and falling curve that is nowhere above these points. Before the first, nothing is kept of memory: a curve
    /// that begins later begins with its first miss ratio at 0.
    ///
    /// # Errors
    /// There are none, too many, sizes do not rise, or a number is out of range.
    pub fn new(knots: Vec<Knot>) -> Result<Self, CurveError> {
        if is_curve(&knots) {
            return Ok(Self(knots));
        }
        check(&knots)?;
        let mut hull: Vec<Knot> = Vec::with_capacity(knots.len() + 1);
        if knots[0].memory > 0.0 {
            hull.push(Knot { memory: 0.0, misses: knots[0].misses });
        }
        for knot in knots {
            let lowest = hull.last().map_or(knot.misses, |last| last.misses);
            if knot.misses >= lowest && !hull.is_empty() {
                continue;
            }
            while hull.len() >= 2 && is_above(hull[hull.len() - 1], hull[hull.len() - 2], knot) {
                hull.pop();
            }
            hull.push(knot);
        }
        Ok(Self(hull))
    }

    /// Its knots: memory rises from 0, misses fall, ever more slowly.
    pub fn knots(&self) -> &[Knot] {
        &self.0
    }

    /// Accesses that miss so much memory (MiB), 0 to 1.
    pub fn misses(&self, memory: f64) -> f64 {
        between(&self.0, memory)
    }
}

/// Which knot would be the first beyond so much memory if all were evenly apart, as they mostly are.
fn about(knots: &[Knot], memory: f64) -> usize {
    let last = knots.len() - 1;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "what is none is 0")]
    let before = (memory / knots[last].memory * last as f64) as usize;
    before.saturating_add(1)
}

/// Straight between knots whose memory rises, flat before the first and beyond the last.
pub(crate) fn between(knots: &[Knot], memory: f64) -> f64 {
    let above = first_not(knots.len(), about(knots, memory), |at| knots[at].memory <= memory);
    match (above.checked_sub(1).map(|below| knots[below]), knots.get(above)) {
        (Some(below), Some(above)) => {
            let part = (memory - below.memory) / (above.memory - below.memory);
            below.misses + part * (above.misses - below.misses)
        }
        (Some(last), None) => last.misses,
        (None, _) => knots[0].misses,
    }
}

/// Whether knots are a curve already, as those of a model mostly are: seen in one look at each.
fn is_curve(knots: &[Knot]) -> bool {
    let (Some(first), Some(last)) = (knots.first(), knots.last()) else { return false };
    let falls = |two: &[Knot]| (two[1].memory > two[0].memory) & (two[1].misses < two[0].misses);
    knots.len() <= CURVE_KNOTS_MAX
        && (first.memory == 0.0 && first.misses <= 1.0)
        && (last.memory.is_finite() && last.misses >= 0.0)
        && knots.windows(2).take(1).all(falls)
        && knots
            .windows(3)
            .fold(true, |so_far, three| so_far & falls(&three[1..]) & !is_above(three[1], three[0], three[2]))
}

/// Whether points are knots of any miss-ratio curve, convex or not.
pub(crate) fn check(knots: &[Knot]) -> Result<(), CurveError> {
    match knots.len() {
        0 => return Err(CurveError::Empty),
        n if n > CURVE_KNOTS_MAX => return Err(CurveError::TooMany(n)),
        _ => {}
    }
    let mut last = -1.0;
    for (at, Knot { memory, misses }) in knots.iter().copied().enumerate() {
        let wrong = |what, value, rule| Err(CurveError::Wrong { at, what, value, rule });
        if !(memory.is_finite() && memory >= 0.0 && memory > last) {
            return wrong("memory", memory, "0 or more, and more than that of the knot before");
        }
        if !(0.0..=1.0).contains(&misses) {
            return wrong("misses", misses, "from 0 to 1");
        }
        last = memory;
    }
    Ok(())
}

/// Whether a knot is on or above the straight line from the one before to the one after.
fn is_above(knot: Knot, before: Knot, after: Knot) -> bool {
    (knot.misses - before.misses) * (after.memory - before.memory)
        >= (after.misses - before.misses) * (knot.memory - before.memory)
}

/// The first of `0..end` for which something is not so, or `end`; it is so for all before. Sought from near `mark`, ever further.
#[inline]
pub(crate) fn first_not(end: usize, mark: usize, is_so: impl Fn(usize) -> bool) -> usize {
    let mark = mark.min(end);
    if (mark == end || !is_so(mark)) && (mark == 0 || is_so(mark - 1)) {
        mark
    } else {
        sought(end, mark, is_so)
    }
}

fn sought(end: usize, mark: usize, is_so: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    let mut step = 1;
    if mark < end && is_so(mark) {
        low = mark + 1;
        while low + step <= end && is_so(low + step - 1) {
            low += step;
            step *= 2;
        }
        high = high.min(low + step - 1);
    } else {
        high = mark;
        while high >= step && !is_so(high - step) {
            high -= step;
            step *= 2;
        }
        low = low.max((high + 1).saturating_sub(step));
    }
    while low < high {
        let middle = low.midpoint(high);
        if is_so(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn knot(memory: f64, misses: f64) -> Knot {
        Knot { memory, misses }
    }

    proptest! {
        #[test]
        fn a_curve_is_convex_falls_is_nowhere_above_the_points_and_nowhere_lower_than_it_must_be(
            points in vec((0.1..10.0_f64, prop_oneof![Just(0.0), Just(1.0), 0.0..1.0_f64]), 1..40),
        ) {
            let mut memory = 0.0;
            let points: Vec<Knot> = points.into_iter().map(|(step, misses)| { memory += step; knot(memory, misses) }).collect();
            let curve = MissCurve::new(points.clone()).unwrap();
            let knots = curve.knots();
            prop_assert_eq!(knots[0].memory, 0.0);
            prop_assert!(knots.windows(2).all(|two| two[1].memory > two[0].memory && two[1].misses < two[0].misses));
            prop_assert!(knots.windows(3).all(|three| !is_above(three[1], three[0], three[2])));
            prop_assert!(points.iter().all(|point| curve.misses(point.memory) <= point.misses + 1e-12));
            // Each knot is a point, but for the first, whose height is one.
            prop_assert!(knots[1..].iter().all(|knot| points.contains(knot)) && knots[0].misses == points[0].misses);
            // A curve is the curve of its knots.
            prop_assert_eq!(MissCurve::new(knots.to_vec()).unwrap(), curve);
        }
    }

    #[test]
    fn points_that_are_none_are_refused_by_name() {
        let wrong: [(Vec<Knot>, &str); 6] = [
            (vec![], "a miss-ratio curve has at least one knot"),
            (vec![knot(0.0, 1.1)], "knot 0: misses 1.1 must be from 0 to 1"),
            (vec![knot(0.0, f64::NAN)], "knot 0: misses NaN must be from 0 to 1"),
            (
                vec![knot(-1.0, 0.5)],
                "knot 0: memory -1 must be 0 or more, and more than that of the knot before",
            ),
            (
                vec![knot(0.0, 0.5), knot(0.0, 0.4)],
                "knot 1: memory 0 must be 0 or more, and more than that of the knot before",
            ),
            (
                vec![knot(0.0, 0.5), knot(f64::INFINITY, 0.4)],
                "knot 1: memory inf must be 0 or more, and more than that of the knot before",
            ),
        ];
        for (knots, says) in wrong {
            assert_eq!(MissCurve::new(knots).unwrap_err().to_string(), says);
        }
        let many = (0..=CURVE_KNOTS_MAX).map(|at| knot(at as f64, 0.5)).collect();
        assert_eq!(MissCurve::new(many).unwrap_err(), CurveError::TooMany(CURVE_KNOTS_MAX + 1));
    }
}
