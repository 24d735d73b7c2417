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

/// Convex, decreasing miss-ratio curve, linear between its knots and constant beyond the last knot.
///
/// Convexity makes the value of a tenant's demand continuous in prices, so that the market clears
/// exactly. Spirit (section 3.2) assumes convexity implicitly. A measured curve is replaced by its
/// lower convex hull.
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
    /// The memory or the miss ratio of a knot is not finite or out of range, or memory does not
    /// increase from knot to knot.
    #[error("knot {at}, {quantity}: {value} is out of range, must be {rule}")]
    InvalidKnot {
        /// Index of the invalid knot in the list.
        at: usize,
        /// Name of the rejected number in messages: `memory in MiB` or `miss ratio`.
        quantity: &'static str,
        /// Rejected memory or miss ratio.
        value: f64,
        /// Required range, as a phrase that follows "must be" in messages.
        rule: &'static str,
    },
}

impl MissCurve {
    /// Creates the lower convex hull of points in ascending order of memory. If the first point is
    /// above 0 MiB, its miss ratio is also used for 0 MiB.
    ///
    /// # Errors
    /// Returns a [`CurveError`] if there are no or too many points, memory does not increase from
    /// point to point, or a number is out of range.
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
            while hull.len() >= 2 && is_above_segment(hull[hull.len() - 1], hull[hull.len() - 2], knot) {
                hull.pop();
            }
            hull.push(knot);
        }
        Ok(Self(hull))
    }

    /// Returns the knots in ascending order of memory, from 0 MiB. Miss ratios decrease at a
    /// decreasing rate.
    pub fn knots(&self) -> &[Knot] {
        &self.0
    }

    /// Returns the miss ratio with `memory` MiB, 0 to 1.
    pub fn misses(&self, memory: f64) -> f64 {
        interpolate(&self.0, memory)
    }
}

/// Estimates the index of the first knot beyond `memory` MiB. The estimate is exact if knots are
/// equally spaced.
fn estimate_index(knots: &[Knot], memory: f64) -> usize {
    let last = knots.len() - 1;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "NaN becomes 0")]
    let before = (memory / knots[last].memory * last as f64) as usize;
    before.saturating_add(1)
}

/// Returns the miss ratio with `memory` MiB, interpolated linearly between knots in ascending order
/// of memory. The miss ratio is constant before the first and beyond the last knot.
pub(crate) fn interpolate(knots: &[Knot], memory: f64) -> f64 {
    let above =
        partition_point_near(knots.len(), estimate_index(knots, memory), |at| knots[at].memory <= memory);
    match (above.checked_sub(1).map(|below| knots[below]), knots.get(above)) {
        (Some(below), Some(above)) => {
            let part = (memory - below.memory) / (above.memory - below.memory);
            below.misses + part * (above.misses - below.misses)
        }
        (Some(last), None) => last.misses,
        (None, _) => knots[0].misses,
    }
}

/// Returns whether `knots` already form a convex, decreasing curve. This is usually the case for
/// the knots of a model. Reads each knot once.
fn is_convex_curve(knots: &[Knot]) -> bool {
    let (Some(first), Some(last)) = (knots.first(), knots.last()) else { return false };
    let is_falling = |two: &[Knot]| (two[1].memory > two[0].memory) & (two[1].misses < two[0].misses);
    knots.len() <= CURVE_KNOTS_MAX
        && (first.memory == 0.0 && first.misses <= 1.0)
        && (last.memory.is_finite() && last.misses >= 0.0)
        && knots.windows(2).take(1).all(is_falling)
        && knots.windows(3).fold(true, |so_far, three| {
            so_far & is_falling(&three[1..]) & !is_above_segment(three[1], three[0], three[2])
        })
}

/// Checks that `knots` are valid and in ascending order of memory. The curve may be non-convex.
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
            return invalid("memory in MiB", memory, MEMORY_RULE);
        }
        if !(0.0..=1.0).contains(&misses) {
            return invalid("miss ratio", misses, "0 to 1");
        }
        last = memory;
    }
    Ok(())
}

/// Required range of a knot's memory, for messages.
const MEMORY_RULE: &str = "finite, at least 0 and more than the memory of the previous knot";

/// Returns whether `knot` is on or above the line from `before` to `after`.
fn is_above_segment(knot: Knot, before: Knot, after: Knot) -> bool {
    (knot.misses - before.misses) * (after.memory - before.memory)
        >= (after.misses - before.misses) * (knot.memory - before.memory)
}

/// Returns the first index of `0..end` for which `predicate` is false, or `end` if it is true for
/// all. The predicate must be true for all indices before the result and false from there on.
/// Searches from `hint` with doubling steps (galloping search), then bisects.
#[inline]
pub(crate) fn partition_point_near(end: usize, hint: usize, predicate: impl Fn(usize) -> bool) -> usize {
    let hint = hint.min(end);
    if (hint == end || !predicate(hint)) && (hint == 0 || predicate(hint - 1)) {
        hint
    } else {
        gallop_partition_point(end, hint, predicate)
    }
}

/// Implements [`partition_point_near`] for a `hint` that is not the result itself.
fn gallop_partition_point(end: usize, hint: usize, predicate: impl Fn(usize) -> bool) -> usize {
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
            prop_assert!(knots.windows(3).all(|three| !is_above_segment(three[1], three[0], three[2])));
            prop_assert!(points.iter().all(|point| curve.misses(point.memory) <= point.misses + 1e-12));
            // Every knot except the first is one of the input points. The first knot is at 0 MiB
            // and has the miss ratio of the first point.
            prop_assert!(knots[1..].iter().all(|knot| points.contains(knot)) && knots[0].misses == points[0].misses);
            // Creating a curve from its own knots returns the same curve.
            prop_assert_eq!(MissCurve::new(knots.to_vec()).unwrap(), curve);
        }
    }

    #[test]
    fn invalid_knot_is_rejected_with_index_value_and_rule() {
        let memory_error =
            |at, value| format!("knot {at}, memory in MiB: {value} is out of range, must be {MEMORY_RULE}");
        let misses_error = |value| format!("knot 0, miss ratio: {value} is out of range, must be 0 to 1");
        let invalid: [(Vec<Knot>, String); 6] = [
            (vec![], "a miss-ratio curve needs at least one knot".into()),
            (vec![knot(0.0, 1.1)], misses_error("1.1")),
            (vec![knot(0.0, f64::NAN)], misses_error("NaN")),
            (vec![knot(-1.0, 0.5)], memory_error(0, "-1")),
            (vec![knot(0.0, 0.5), knot(0.0, 0.4)], memory_error(1, "0")),
            (vec![knot(0.0, 0.5), knot(f64::INFINITY, 0.4)], memory_error(1, "inf")),
        ];
        for (knots, message) in invalid {
            assert_eq!(MissCurve::new(knots).unwrap_err().to_string(), message);
        }
        let many = (0..=CURVE_KNOTS_MAX).map(|at| knot(at as f64, 0.5)).collect();
        assert_eq!(MissCurve::new(many).unwrap_err(), CurveError::TooManyKnots(CURVE_KNOTS_MAX + 1));
    }
}
