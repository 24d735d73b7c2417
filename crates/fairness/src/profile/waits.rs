//! How long a tenant waits for memory, by how much of it there is: as a model says, bent so that it goes through what was measured.
//!
//! A model knows which pages are touched how often; how long the kernel lets a tenant wait with so much memory it does not. What was measured with the memory
//! that the tenant had is true there, and the model says how it goes on from there.

use units::limits::{STALL_POINT_EPOCHS_MAX, STALL_POINTS_MAX};

/// Sizes that are told apart, relative.
const NEAR: f64 = 0.03;
/// Measurements of which the mean is taken, while they differ by no more than this, relative; else the last alone counts.
const MEAN_OF: f64 = 8.0;
const SAME: f64 = 0.15;
/// Seconds waited for each second of work that are as good as none: less is not told apart from it.
pub(super) const HARDLY: f64 = 0.01;
/// What who did not wait is taken to have waited, where it is reckoned how many times as long it would with less.
const NEXT_TO_NOTHING: f64 = 0.25 * HARDLY;
/// Waits at two sizes that are taken for one, relative: between them more memory is of no use as far as anybody can tell.
const ALIKE: f64 = 0.05;
/// From this factor, and this difference, between what was measured and what was expected, a tenant does something else than it did.
const OTHERWISE: f64 = 2.0;
const OTHERWISE_BY: f64 = 0.1;

/// What was measured at one size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    /// MiB.
    memory: f64,
    /// Seconds waited for each second of work.
    waits: Mean,
    /// Epochs since.
    age: u32,
}

/// A number that is measured again and again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Mean {
    pub value: f64,
    /// Of how many measurements.
    count: f64,
}

impl Mean {
    /// With one more measurement; if that differs too much, of that alone.
    pub(super) fn with(before: Option<Self>, value: f64) -> Self {
        let before = before.filter(|before| (before.value - value).abs() <= SAME * before.value);
        let count = before.map_or(1.0, |before| (before.count + 1.0).min(MEAN_OF));
        Self { value: before.map_or(value, |before| before.value + (value - before.value) / count), count }
    }
}

/// What was measured of one tenant, at several sizes.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// Memory rises, and waits never do.
    measured: Vec<Measured>,
}

impl Waits {
    /// With so much memory it waited so many seconds for each second of work. `model` says how long it would, up to a factor and what was measured.
    pub(super) fn note(&mut self, memory: f64, waits: f64, model: impl Fn(f64) -> f64) {
        let expected = self.at(memory, model);
        let is_otherwise = (waits - expected).abs() > OTHERWISE_BY
            && !(expected / OTHERWISE..=expected * OTHERWISE).contains(&waits);
        if is_otherwise {
            self.measured.clear();
        }
        self.measured.iter_mut().for_each(|one| one.age += 1);
        let is_near = |one: &Measured| (one.memory - memory).abs() <= NEAR * memory;
        let near = self.measured.iter().position(is_near).map(|at| self.measured.remove(at));
        let mean = Mean::with(near.map(|near| near.waits), waits);
        let waits = mean.value;
        // What says that more memory made it wait longer is of another time.
        self.measured.retain(|one| {
            one.age < STALL_POINT_EPOCHS_MAX
                && if one.memory < memory { one.waits.value >= waits } else { one.waits.value <= waits }
        });
        if self.measured.len() == STALL_POINTS_MAX {
            let oldest = (0..self.measured.len()).max_by_key(|at| self.measured[*at].age);
            oldest.map(|at| self.measured.remove(at));
        }
        let at = self.measured.partition_point(|one| one.memory < memory);
        self.measured.insert(at, Measured { memory, waits: mean, age: 0 });
        self.level(waits);
    }

    /// Those that waited about as long are taken to have waited equally long.
    fn level(&mut self, waits: f64) {
        let is_alike = |one: &&mut Mean| (one.value - waits).abs() <= ALIKE * waits;
        let mut alike: Vec<&mut Mean> =
            self.measured.iter_mut().map(|one| &mut one.waits).filter(is_alike).collect();
        let add =
            |(sum, count): (f64, f64), one: &&mut Mean| (sum + one.value * one.count, count + one.count);
        let (sum, count) = alike.iter().fold((0.0, 0.0), add);
        alike.iter_mut().for_each(|one| one.value = sum / count);
    }

    /// Seconds that it waits for each second of work, with so much memory.
    pub(super) fn at(&self, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
        let above = self.measured.partition_point(|one| one.memory <= memory);
        let below = above.checked_sub(1).map(|at| &self.measured[at]);
        match (below, self.measured.get(above)) {
            (Some(less), Some(more)) => between(less, more, memory, model),
            (None, Some(one)) | (Some(one), None) => beside(one, memory, model),
            (None, None) => model(memory),
        }
    }

    /// The sizes at which something was measured; MiB.
    pub(super) fn sizes(&self) -> impl Iterator<Item = f64> + '_ {
        self.measured.iter().map(|one| one.memory)
    }
}

/// Between two measurements, as the model falls; straight, where it does not.
fn between(less: &Measured, more: &Measured, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (high, low) = (model(less.memory), model(more.memory));
    let part = if high > low {
        (model(memory) - low) / (high - low)
    } else {
        (more.memory - memory) / (more.memory - less.memory)
    };
    more.waits.value + part.clamp(0.0, 1.0) * (less.waits.value - more.waits.value)
}

/// On the side where nothing was measured: as many times as long, from next to nothing up; or as much longer where the model says that it should not have
/// waited at all. Where it should have and did not, what it has elsewhere it does not touch as the model thinks.
fn beside(one: &Measured, memory: f64, model: impl Fn(f64) -> f64) -> f64 {
    let (here, there, waits) = (model(one.memory), model(memory), one.waits.value);
    if here <= 0.0 {
        (waits + there).max(0.0)
    } else if memory < one.memory {
        waits.max(NEXT_TO_NOTHING) * there / here
    } else {
        waits * there / here
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Waits a second with nothing, and not at all from 100 MiB on.
    fn straight(memory: f64) -> f64 {
        (1.0 - memory / 100.0).max(0.0)
    }

    #[test]
    fn without_measurements_it_is_what_the_model_says() {
        assert_eq!(Waits::default().at(25.0, straight), 0.75);
    }

    #[test]
    fn what_was_measured_is_true_and_the_model_goes_on_from_there() {
        let mut waits = Waits::default();
        waits.note(50.0, 1.0, straight);
        assert_eq!(waits.at(50.0, straight), 1.0);
        assert_eq!(waits.at(75.0, straight), 0.5, "half of what it was, as the model says");
        assert_eq!(waits.at(0.0, straight), 2.0);
        waits.note(75.0, 0.6, straight);
        assert_eq!(waits.at(62.5, straight), 0.8, "between both");
        assert_eq!(waits.at(100.0, straight), 0.0);
    }

    #[test]
    fn a_tenant_that_did_not_wait_may_be_given_less_only_as_the_model_says() {
        let mut waits = Waits::default();
        waits.note(150.0, 0.0, straight);
        assert_eq!(waits.at(100.0, straight), 0.0);
        assert_eq!(waits.at(50.0, straight), 0.5);
    }

    #[test]
    fn who_does_something_else_is_measured_anew() {
        let mut waits = Waits::default();
        waits.note(50.0, 0.5, straight);
        waits.note(80.0, 0.2, straight);
        waits.note(50.0, 0.55, straight);
        assert_eq!(waits.measured.len(), 2, "as expected");
        assert_eq!(waits.at(50.0, straight), 0.525, "the mean of both, against noise");
        waits.note(50.0, 5.0, straight);
        assert_eq!(waits.measured.len(), 1);
        assert_eq!(waits.at(50.0, straight), 5.0);
    }

    #[test]
    fn what_was_measured_long_ago_is_forgotten() {
        let mut waits = Waits::default();
        waits.note(50.0, 0.5, straight);
        for _ in 0..STALL_POINT_EPOCHS_MAX {
            waits.note(80.0, 0.2, straight);
        }
        assert_eq!(waits.sizes().collect::<Vec<_>>(), [80.0]);
    }

    proptest! {
        #[test]
        fn whatever_is_measured_more_memory_never_makes_a_tenant_wait_longer(
            measured in vec((1.0..200.0_f64, prop_oneof![Just(0.0), 0.0..50.0_f64]), 0..40),
        ) {
            let mut waits = Waits::default();
            for (memory, measured) in measured {
                waits.note(memory, measured, straight);
                prop_assert!(waits.sizes().count() <= STALL_POINTS_MAX);
            }
            let all: Vec<f64> = (0..=220).map(|memory| waits.at(f64::from(memory), straight)).collect();
            prop_assert!(all.iter().all(|waits| waits.is_finite() && *waits >= 0.0), "{all:?}");
            prop_assert!(all.windows(2).all(|two| two[1] <= two[0] + 1e-9), "{all:?}");
        }
    }
}
