//! Stall model: stall ratio of a tenant as a function of local memory.
//!
//! The stall ratio is the time stalled per second of work. A miss model describes how often pages
//! are accessed, but not how long the kernel makes a tenant wait. Measurements of stalls are used
//! at the memory sizes at which they were taken. For other sizes, the miss model is scaled to the
//! measurements.

use units::limits::{STALL_POINT_EPOCHS_MAX, STALL_POINTS_MAX};

/// Relative difference up to which two memory sizes count as the same.
const SAME_SIZE_TOLERANCE: f64 = 0.03;
/// Largest weight of past measurements in a running mean, as a number of measurements.
const MEAN_SAMPLES_MAX: f64 = 8.0;
/// Relative difference up to which a measurement is added to the running mean. With a larger
/// difference, a new mean starts.
const RUNNING_MEAN_TOLERANCE: f64 = 0.15;
/// Stall ratio below which stalls are measurement noise, in seconds per second of work.
pub(super) const STALL_NOISE_FLOOR: f64 = 0.01;
/// Lower bound of a measured stall ratio before it is extrapolated to less memory, in seconds per
/// second of work. Extrapolation from 0 would always give 0.
const STALL_RATIO_MIN: f64 = 0.25 * STALL_NOISE_FLOOR;
/// Relative difference up to which the stall ratios at two memory sizes count as equal.
const EQUAL_STALL_TOLERANCE: f64 = 0.05;
/// Factor between the measured and the predicted stall ratio above which a phase change is assumed.
const PHASE_CHANGE_FACTOR: f64 = 2.0;
/// Smallest difference between the measured and the predicted stall ratio that counts as a phase
/// change, in seconds per second of work.
const PHASE_CHANGE_DIFFERENCE_MIN: f64 = 0.1;

/// Stall ratio measured at one memory size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StallPoint {
    /// Local memory during the measurement, in MiB.
    memory: f64,
    /// Mean stall ratio, in seconds per second of work.
    stall_ratio: RunningMean,
    /// Number of epochs since the last measurement at this size.
    age: u32,
}

/// Running mean of a repeated measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RunningMean {
    pub value: f64,
    /// Number of measurements in the mean, at most [`MEAN_SAMPLES_MAX`].
    count: f64,
}

impl RunningMean {
    /// Returns the mean `before` with the measurement `value` added. Returns a new mean if `value`
    /// differs from `before` by more than [`RUNNING_MEAN_TOLERANCE`].
    pub(super) fn add_or_restart(before: Option<Self>, value: f64) -> Self {
        let before =
            before.filter(|before| (before.value - value).abs() <= RUNNING_MEAN_TOLERANCE * before.value);
        let count = before.map_or(1.0, |before| (before.count + 1.0).min(MEAN_SAMPLES_MAX));
        Self { value: before.map_or(value, |before| before.value + (value - before.value) / count), count }
    }
}

/// Stall ratios of one tenant measured at several memory sizes.
#[derive(Clone, Debug, Default)]
pub(super) struct StallModel {
    /// Points in ascending order of memory. Stall ratios do not increase from point to point.
    points: Vec<StallPoint>,
}

impl StallModel {
    /// Records the stall ratio measured with `memory` MiB. `model` returns the modeled stall ratio
    /// for a memory size in MiB; only the ratio of its results at two sizes matters.
    pub(super) fn record(&mut self, memory: f64, stall_ratio: f64, model: impl Fn(f64) -> f64) {
        let expected = self.predict(memory, model);
        let is_phase_change = (stall_ratio - expected).abs() > PHASE_CHANGE_DIFFERENCE_MIN
            && !(expected / PHASE_CHANGE_FACTOR..=expected * PHASE_CHANGE_FACTOR).contains(&stall_ratio);
        if is_phase_change {
            self.points.clear();
        }
        self.points.iter_mut().for_each(|point| point.age += 1);
        let is_near = |point: &StallPoint| (point.memory - memory).abs() <= SAME_SIZE_TOLERANCE * memory;
        let near = self.points.iter().position(is_near).map(|at| self.points.remove(at));
        let mean = RunningMean::add_or_restart(near.map(|near| near.stall_ratio), stall_ratio);
        let stall_ratio = mean.value;
        // Stalls cannot increase with memory. A point that contradicts the new measurement is
        // outdated.
        self.points.retain(|point| {
            point.age < STALL_POINT_EPOCHS_MAX
                && if point.memory < memory {
                    point.stall_ratio.value >= stall_ratio
                } else {
                    point.stall_ratio.value <= stall_ratio
                }
        });
        if self.points.len() == STALL_POINTS_MAX {
            let oldest = (0..self.points.len()).max_by_key(|at| self.points[*at].age);
            oldest.map(|at| self.points.remove(at));
        }
        let at = self.points.partition_point(|point| point.memory < memory);
        self.points.insert(at, StallPoint { memory, stall_ratio: mean, age: 0 });
        self.merge_equal_points(stall_ratio);
    }

    /// Replaces all stall ratios that are nearly equal to `stall_ratio` by their weighted mean.
    fn merge_equal_points(&mut self, stall_ratio: f64) {
        let is_equal =
            |mean: &&mut RunningMean| (mean.value - stall_ratio).abs() <= EQUAL_STALL_TOLERANCE * stall_ratio;
        let mut equal: Vec<&mut RunningMean> =
            self.points.iter_mut().map(|point| &mut point.stall_ratio).filter(is_equal).collect();
        let add = |(sum, count): (f64, f64), mean: &&mut RunningMean| {
            (sum + mean.value * mean.count, count + mean.count)
        };
        let (sum, count) = equal.iter().fold((0.0, 0.0), add);
        equal.iter_mut().for_each(|mean| mean.value = sum / count);
    }

    /// Returns the predicted stall ratio with `memory` MiB, in seconds per second of work.
    pub(super) fn predict(&self, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
        let above = self.points.partition_point(|point| point.memory <= memory);
        let below = above.checked_sub(1).map(|at| &self.points[at]);
        match (below, self.points.get(above)) {
            (Some(less), Some(more)) => interpolate(less, more, memory, model),
            (None, Some(nearest)) | (Some(nearest), None) => extrapolate(nearest, memory, model),
            (None, None) => model(memory),
        }
    }

    /// Returns the memory sizes at which stalls were measured, in MiB, in ascending order.
    pub(super) fn measured_memory_sizes(&self) -> impl Iterator<Item = f64> + '_ {
        self.points.iter().map(|point| point.memory)
    }
}

/// Interpolates the stall ratio between two points in proportion to the model, or linearly if the
/// model is constant between the points.
fn interpolate(less: &StallPoint, more: &StallPoint, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (high, low) = (model(less.memory), model(more.memory));
    let part = if high > low {
        (model(memory) - low) / (high - low)
    } else {
        (more.memory - memory) / (more.memory - less.memory)
    };
    more.stall_ratio.value + part.clamp(0.0, 1.0) * (less.stall_ratio.value - more.stall_ratio.value)
}

/// Extrapolates the stall ratio from the nearest point by scaling the model. If the model predicts
/// no stalls at that point, the modeled stall ratio is added to the measured one. For less memory
/// than measured, the measured stall ratio is raised to at least `STALL_RATIO_MIN`, because scaling
/// 0 would always give 0.
fn extrapolate(nearest: &StallPoint, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let stall_ratio = nearest.stall_ratio.value;
    let (model_at_point, model_at_memory) = (model(nearest.memory), model(memory));
    if model_at_point <= 0.0 {
        (stall_ratio + model_at_memory).max(0.0)
    } else if memory < nearest.memory {
        stall_ratio.max(STALL_RATIO_MIN) * model_at_memory / model_at_point
    } else {
        stall_ratio * model_at_memory / model_at_point
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Linear model: the stall ratio is 1 without memory and falls to 0 at 100 MiB.
    fn linear_model(memory: f64) -> f64 {
        (1.0 - memory / 100.0).max(0.0)
    }

    #[test]
    fn prediction_without_points_equals_the_model() {
        assert_eq!(StallModel::default().predict(25.0, linear_model), 0.75);
    }

    #[test]
    fn prediction_scales_the_model_to_measured_points() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 1.0, linear_model);
        assert_eq!(stalls.predict(50.0, linear_model), 1.0);
        assert_eq!(stalls.predict(75.0, linear_model), 0.5, "scaled by the model");
        assert_eq!(stalls.predict(0.0, linear_model), 2.0);
        stalls.record(75.0, 0.6, linear_model);
        assert_eq!(stalls.predict(62.5, linear_model), 0.8, "interpolated");
        assert_eq!(stalls.predict(100.0, linear_model), 0.0);
    }

    #[test]
    fn point_without_stalls_is_extrapolated_by_the_model() {
        let mut stalls = StallModel::default();
        stalls.record(150.0, 0.0, linear_model);
        assert_eq!(stalls.predict(100.0, linear_model), 0.0);
        assert_eq!(stalls.predict(50.0, linear_model), 0.5);
    }

    #[test]
    fn phase_change_discards_old_points() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 0.5, linear_model);
        stalls.record(80.0, 0.2, linear_model);
        stalls.record(50.0, 0.55, linear_model);
        assert_eq!(stalls.points.len(), 2, "both points kept");
        assert_eq!(stalls.predict(50.0, linear_model), 0.525, "mean of both measurements");
        stalls.record(50.0, 5.0, linear_model);
        assert_eq!(stalls.points.len(), 1);
        assert_eq!(stalls.predict(50.0, linear_model), 5.0);
    }

    #[test]
    fn point_expires_after_the_maximum_number_of_epochs() {
        let mut stalls = StallModel::default();
        stalls.record(50.0, 0.5, linear_model);
        for _ in 0..STALL_POINT_EPOCHS_MAX {
            stalls.record(80.0, 0.2, linear_model);
        }
        assert_eq!(stalls.measured_memory_sizes().collect::<Vec<_>>(), [80.0]);
    }

    proptest! {
        #[test]
        fn predicted_stall_never_rises_with_memory(
            measured in vec((1.0..200.0_f64, prop_oneof![Just(0.0), 0.0..50.0_f64]), 0..40),
        ) {
            let mut stalls = StallModel::default();
            for (memory, stall_ratio) in measured {
                stalls.record(memory, stall_ratio, linear_model);
                prop_assert!(stalls.measured_memory_sizes().count() <= STALL_POINTS_MAX);
            }
            let all: Vec<f64> = (0..=220).map(|memory| stalls.predict(f64::from(memory), linear_model)).collect();
            prop_assert!(all.iter().all(|stalls| stalls.is_finite() && *stalls >= 0.0), "{all:?}");
            prop_assert!(all.windows(2).all(|two| two[1] <= two[0] + 1e-9), "{all:?}");
        }
    }
}
