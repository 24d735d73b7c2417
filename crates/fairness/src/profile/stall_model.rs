//! Stall model: stall ratio of a tenant as a function of local memory, by a model that is scaled to
//! measurements.
//!
//! The stall ratio is the time stalled per second of work. A miss model describes how often pages
//! are accessed, but not how long the kernel makes a tenant wait. Measurements are exact at the
//! sizes at which they were taken; the model extends them to other sizes.

use units::limits::{STALL_POINT_EPOCHS_MAX, STALL_POINTS_MAX};

/// Relative difference of sizes that count as the same.
const SAME_SIZE_TOLERANCE: f64 = 0.03;
/// Largest number of measurements that a mean covers.
const MEAN_SAMPLES_MAX: f64 = 8.0;
/// Relative difference up to which a measurement enters the mean; a larger one replaces it.
const MEAN_TOLERANCE: f64 = 0.15;
/// Stall ratio below which stalls are indistinguishable from none, in seconds per second of work.
pub(super) const STALL_NOISE_FLOOR: f64 = 0.01;
/// Stall ratio assumed for a tenant without stalls when its stalls with less memory are
/// extrapolated.
const STALL_RATIO_MIN: f64 = 0.25 * STALL_NOISE_FLOOR;
/// Relative difference of stall ratios at two sizes that count as equal: more memory is then of no
/// use between them.
const EQUAL_STALL_TOLERANCE: f64 = 0.05;
/// Factor between measured and predicted stall ratio from which a phase change is assumed.
const PHASE_CHANGE_FACTOR: f64 = 2.0;
/// Difference that a phase change requires in addition, in seconds per second of work.
const PHASE_CHANGE_DIFFERENCE_MIN: f64 = 0.1;

/// Measurement at one memory size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StallPoint {
    /// Memory, in MiB.
    memory: f64,
    /// Stall ratio, in seconds per second of work.
    stall_ratio: RunningMean,
    /// Epochs since the measurement.
    age: u32,
}

/// Running mean of a repeated measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunningMean {
    pub value: f64,
    /// Number of measurements in the mean.
    count: f64,
}

impl RunningMean {
    /// Adds a measurement to a mean, or starts a new mean if it differs too much.
    pub(super) fn with(before: Option<Self>, value: f64) -> Self {
        let before = before.filter(|before| (before.value - value).abs() <= MEAN_TOLERANCE * before.value);
        let count = before.map_or(1.0, |before| (before.count + 1.0).min(MEAN_SAMPLES_MAX));
        Self { value: before.map_or(value, |before| before.value + (value - before.value) / count), count }
    }
}

/// Measurements of one tenant at several memory sizes.
#[derive(Clone, Debug, Default)]
pub(super) struct StallModel {
    /// Points in ascending order of memory. Stall ratios do not increase.
    points: Vec<StallPoint>,
}

impl StallModel {
    /// Records the stall ratio measured with `memory` MiB. `model` returns the modeled stall ratio,
    /// up to a factor.
    pub(super) fn record(&mut self, memory: f64, stall_ratio: f64, model: impl Fn(f64) -> f64) {
        let expected = self.predict(memory, model);
        let is_phase_change = (stall_ratio - expected).abs() > PHASE_CHANGE_DIFFERENCE_MIN
            && !(expected / PHASE_CHANGE_FACTOR..=expected * PHASE_CHANGE_FACTOR).contains(&stall_ratio);
        if is_phase_change {
            self.points.clear();
        }
        self.points.iter_mut().for_each(|one| one.age += 1);
        let is_near = |one: &StallPoint| (one.memory - memory).abs() <= SAME_SIZE_TOLERANCE * memory;
        let near = self.points.iter().position(is_near).map(|at| self.points.remove(at));
        let mean = RunningMean::with(near.map(|near| near.stall_ratio), stall_ratio);
        let stall_ratio = mean.value;
        // A point is outdated if it contradicts this measurement, that is, if stalls would increase
        // with memory.
        self.points.retain(|one| {
            one.age < STALL_POINT_EPOCHS_MAX
                && if one.memory < memory {
                    one.stall_ratio.value >= stall_ratio
                } else {
                    one.stall_ratio.value <= stall_ratio
                }
        });
        if self.points.len() == STALL_POINTS_MAX {
            let oldest = (0..self.points.len()).max_by_key(|at| self.points[*at].age);
            oldest.map(|at| self.points.remove(at));
        }
        let at = self.points.partition_point(|one| one.memory < memory);
        self.points.insert(at, StallPoint { memory, stall_ratio: mean, age: 0 });
        self.merge_equal(stall_ratio);
    }

    /// Merges stall ratios that are nearly equal to `stall_ratio` into their mean.
    fn merge_equal(&mut self, stall_ratio: f64) {
        let is_equal =
            |one: &&mut RunningMean| (one.value - stall_ratio).abs() <= EQUAL_STALL_TOLERANCE * stall_ratio;
        let mut equal: Vec<&mut RunningMean> =
            self.points.iter_mut().map(|one| &mut one.stall_ratio).filter(is_equal).collect();
        let add = |(sum, count): (f64, f64), one: &&mut RunningMean| {
            (sum + one.value * one.count, count + one.count)
        };
        let (sum, count) = equal.iter().fold((0.0, 0.0), add);
        equal.iter_mut().for_each(|one| one.value = sum / count);
    }

    /// Returns the stall ratio with `memory` MiB.
    pub(super) fn predict(&self, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
        let above = self.points.partition_point(|one| one.memory <= memory);
        let below = above.checked_sub(1).map(|at| &self.points[at]);
        match (below, self.points.get(above)) {
            (Some(less), Some(more)) => interpolate(less, more, memory, model),
            (None, Some(one)) | (Some(one), None) => extrapolate(one, memory, model),
            (None, None) => model(memory),
        }
    }

    /// Returns the measured sizes, in MiB.
    pub(super) fn sizes(&self) -> impl Iterator<Item = f64> + '_ {
        self.points.iter().map(|one| one.memory)
    }
}

/// Interpolates between two points along the model, or linearly if the model is constant there.
fn interpolate(less: &StallPoint, more: &StallPoint, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (high, low) = (model(less.memory), model(more.memory));
    let part = if high > low {
        (model(memory) - low) / (high - low)
    } else {
        (more.memory - memory) / (more.memory - less.memory)
    };
    more.stall_ratio.value + part.clamp(0.0, 1.0) * (less.stall_ratio.value - more.stall_ratio.value)
}

/// Extrapolates from the nearest point by scaling the model. If the model has no stalls at that
/// point, its stalls are added instead. If the point has no stalls but the model has, a tenant does
/// not access its remote memory as modeled; the scale then starts from `STALL_RATIO_MIN` for less
/// memory.
fn extrapolate(one: &StallPoint, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (here, there, stall_ratio) = (model(one.memory), model(memory), one.stall_ratio.value);
    if here <= 0.0 {
        (stall_ratio + there).max(0.0)
    } else if memory < one.memory {
        stall_ratio.max(STALL_RATIO_MIN) * there / here
    } else {
        stall_ratio * there / here
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Stalled for a second per second of work without memory, not at all from 100 MiB.
    fn straight(memory: f64) -> f64 {
        (1.0 - memory / 100.0).max(0.0)
    }

    #[test]
    fn prediction_without_points_equals_the_model() {
        assert_eq!(StallModel::default().predict(25.0, straight), 0.75);
    }

    #[test]
    fn model_is_scaled_to_measured_points() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 1.0, straight);
        assert_eq!(stalls.predict(50.0, straight), 1.0);
        assert_eq!(stalls.predict(75.0, straight), 0.5, "scaled by the model");
        assert_eq!(stalls.predict(0.0, straight), 2.0);
        stalls.record(75.0, 0.6, straight);
        assert_eq!(stalls.predict(62.5, straight), 0.8, "interpolated");
        assert_eq!(stalls.predict(100.0, straight), 0.0);
    }

    #[test]
    fn zero_stall_is_extrapolated_by_the_model() {
        let mut stalls = StallModel::default();
        stalls.record(150.0, 0.0, straight);
        assert_eq!(stalls.predict(100.0, straight), 0.0);
        assert_eq!(stalls.predict(50.0, straight), 0.5);
    }

    #[test]
    fn phase_change_discards_old_points() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 0.5, straight);
        stalls.record(80.0, 0.2, straight);
        stalls.record(50.0, 0.55, straight);
        assert_eq!(stalls.points.len(), 2, "both points kept");
        assert_eq!(stalls.predict(50.0, straight), 0.525, "mean of both measurements");
        stalls.record(50.0, 5.0, straight);
        assert_eq!(stalls.points.len(), 1);
        assert_eq!(stalls.predict(50.0, straight), 5.0);
    }

    #[test]
    fn old_points_expire() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 0.5, straight);
        for _ in 0..STALL_POINT_EPOCHS_MAX {
            stalls.record(80.0, 0.2, straight);
        }
        assert_eq!(stalls.sizes().collect::<Vec<_>>(), [80.0]);
    }

    proptest! {
        #[test]
        fn predicted_stall_never_rises_with_memory(
            measured in vec((1.0..200.0_f64, prop_oneof![Just(0.0), 0.0..50.0_f64]), 0..40),
        ) {
            let mut stalls = StallModel::default();
            for (memory, stall_ratio) in measured {
                stalls.record(memory, stall_ratio, straight);
                prop_assert!(stalls.sizes().count() <= STALL_POINTS_MAX);
            }
            let all: Vec<f64> = (0..=220).map(|memory| stalls.predict(f64::from(memory), straight)).collect();
            prop_assert!(all.iter().all(|stalls| stalls.is_finite() && *stalls >= 0.0), "{all:?}");
            prop_assert!(all.windows(2).all(|two| two[1] <= two[0] + 1e-9), "{all:?}");
        }
    }
}
