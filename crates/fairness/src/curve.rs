//! Miss-ratio curves: miss ratio as a function of local memory.

use thiserror::Error;
use units::limits::CURVE_KNOTS_MAX;

/// Point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Knot {
    /// Local memory, in MiB.
    pub memory: f64,
    /// Miss ratio of local memory, 0 to 1.
    pub misses: f64,
}

/// A convex, decreasing miss-ratio curve, linear between its knots and constant beyond the last.
///
/// Convexity makes the value of a tenant's demand continuous in prices, so that the market clears
/// exactly. Spirit (section 3.2) assumes this implicitly. A measured curve is replaced by its lower
/// convex hull.
#[derive(Clone, Debug, PartialEq)]
pub struct MissCurve(Vec<Knot>);

/// Error for points that do not form a miss-ratio curve.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum CurveError {
    /// There are no points.
    #[error("a miss-ratio curve needs at least one knot")]
    Empty,
    /// There are more than [`CURVE_KNOTS_MAX`] points.
    #[error("a miss-ratio curve of {0} knots exceeds the limit of {CURVE_KNOTS_MAX}")]
    TooManyKnots(usize),
    /// A number is not finite, out of range, or not in ascending order.
    #[error("knot {at}: {quantity} {value} must be {rule}")]
    InvalidKnot {
        /// Index of the knot.
        at: usize,
        /// Name of the number: `memory` or `misses`.
        quantity: &'static str,
        /// Rejected value.
        value: f64,
        /// Required range.
        rule: &'static str,
    },
}

impl MissCurve {
    /// Creates the lower convex hull of points in ascending order of memory. If the first point is
    /// above 0 MiB, its miss ratio also holds at 0 MiB.
    ///
    /// # Errors
    /// A [`CurveError`] if there are no or too many points, memory does not increase, or a number
    /// is out of range.
    pub fn new(knots: Vec<Knot>) -> Result<Self, CurveError> {
        if is_convex_curve(&knots) {
            return Ok(Self(knots));
        }
        check_knots(&knots)?;
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

    /// Returns the knots. Memory increases from 0, and misses decrease at a decreasing rate.
    pub fn knots(&self) -> &[Knot] {
        &self.0
    }

    /// Returns the miss ratio with `memory` MiB, 0 to 1.
    pub fn misses(&self, memory: f64) -> f64 {
        interpolate(&self.0, memory)
    }
}

/// Estimates the index of the first knot beyond `memory`, assuming equal distances as most curves
/// have.
fn index_estimate(knots: &[Knot], memory: f64) -> usize {
    let last = knots.len() - 1;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "NaN becomes 0")]
    let before = (memory / knots[last].memory * last as f64) as usize;
    before.saturating_add(1)
}

/// Interpolates linearly between knots in ascending order of memory. The value is constant before
/// the first and beyond the last knot.
pub(crate) fn interpolate(knots: &[Knot], memory: f64) -> f64 {
    let above =
        partition_point_near(knots.len(), index_estimate(knots, memory), |at| knots[at].memory <= memory);
    match (above.checked_sub(1).map(|below| knots[below]), knots.get(above)) {
        (Some(below), Some(above)) => {
            let part = (memory - below.memory) / (above.memory - below.memory);
            below.misses + part * (above.misses - below.misses)
        }
        (Some(last), None) => last.misses,
        (None, _) => knots[0].misses,
    }
}

/// Returns whether knots already form a convex curve, as those of a model usually do. Reads each
/// knot once.
fn is_convex_curve(knots: &[Knot]) -> bool {
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

/// Checks that points form a miss-ratio curve, convex or not.
pub(crate) fn check_knots(knots: &[Knot]) -> Result<(), CurveError> {
    match knots.len() {
        0 => return Err(CurveError::Empty),
        n if n > CURVE_KNOTS_MAX => return Err(CurveError::TooManyKnots(n)),
        _ => {}
    }
    let mut last = -1.0;
    for (at, Knot { memory, misses }) in knots.iter().copied().enumerate() {
        let invalid = |quantity, value, rule| Err(CurveError::InvalidKnot { at, quantity, value, rule });
        if !(memory.is_finite() && memory >= 0.0 && memory > last) {
            return invalid("memory", memory, "at least 0 and more than that of the previous knot");
        }
        if !(0.0..=1.0).contains(&misses) {
            return invalid("misses", misses, "between 0 and 1");
        }
        last = memory;
    }
    Ok(())
}

/// Returns whether a knot is on or above the line through its neighbors.
fn is_above(knot: Knot, before: Knot, after: Knot) -> bool {
    (knot.misses - before.misses) * (after.memory - before.memory)
        >= (after.misses - before.misses) * (knot.memory - before.memory)
}

/// Returns the first index of `0..end` for which the predicate is false, or `end`. The predicate
/// must be true for all indices before it. Gallops from `hint`, then bisects.
#[inline]
pub(crate) fn partition_point_near(end: usize, hint: usize, predicate: impl Fn(usize) -> bool) -> usize {
    let hint = hint.min(end);
    if (hint == end || !predicate(hint)) && (hint == 0 || predicate(hint - 1)) {
        hint
    } else {
        gallop(end, hint, predicate)
    }
}

fn gallop(end: usize, hint: usize, predicate: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, end);
    let mut step = 1;
    if hint < end && predicate(hint) {
        low = hint + 1;
        while low + step <= end && predicate(low + step - 1) {
            low += step;
            step *= 2;
        }
        high = high.min(low + step - 1);
    } else {
        high = hint;
        while high >= step && !predicate(high - step) {
            high -= step;
            step *= 2;
        }
        low = low.max((high + 1).saturating_sub(step));
    }
    while low < high {
        let middle = low.midpoint(high);
        if predicate(middle) { low = middle + 1 } else { high = middle }
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
        fn curve_is_the_lower_convex_hull_of_its_points(
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
            // Every knot is one of the points, except the first, which has the miss ratio of the
            // first point.
            prop_assert!(knots[1..].iter().all(|knot| points.contains(knot)) && knots[0].misses == points[0].misses);
            // Creating a curve from its own knots returns the same curve.
            prop_assert_eq!(MissCurve::new(knots.to_vec()).unwrap(), curve);
        }
    }

    #[test]
    fn invalid_points_are_rejected_by_name() {
        let wrong: [(Vec<Knot>, &str); 6] = [
            (vec![], "a miss-ratio curve needs at least one knot"),
            (vec![knot(0.0, 1.1)], "knot 0: misses 1.1 must be between 0 and 1"),
            (vec![knot(0.0, f64::NAN)], "knot 0: misses NaN must be between 0 and 1"),
            (
                vec![knot(-1.0, 0.5)],
                "knot 0: memory -1 must be at least 0 and more than that of the previous knot",
            ),
            (
                vec![knot(0.0, 0.5), knot(0.0, 0.4)],
                "knot 1: memory 0 must be at least 0 and more than that of the previous knot",
            ),
            (
                vec![knot(0.0, 0.5), knot(f64::INFINITY, 0.4)],
                "knot 1: memory inf must be at least 0 and more than that of the previous knot",
            ),
        ];
        for (knots, message) in wrong {
            assert_eq!(MissCurve::new(knots).unwrap_err().to_string(), message);
        }
        let many = (0..=CURVE_KNOTS_MAX).map(|at| knot(at as f64, 0.5)).collect();
        assert_eq!(MissCurve::new(many).unwrap_err(), CurveError::TooManyKnots(CURVE_KNOTS_MAX + 1));
    }
}
