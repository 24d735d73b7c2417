//! Measures the loss of VMs after the moves of their pool memory to local memory.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use prediction::qos::{Judge, MeasuredLoss, MoveMeasurement, MoveProgress};
use units::{Name, Ns, ReservationId, limits::UNRECORDED_LOSSES_MAX};

use crate::records::forecast_rows::Counters;

/// VMs that were moved. They are forgotten in a restart.
#[derive(Debug, Default)]
pub(super) struct MovedVms(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    measuring: BTreeMap<ReservationId, (MovedVm, MoveMeasurement)>,
    measured: Vec<(MovedVm, MeasuredLoss)>,
}

/// VM that was moved.
#[derive(Clone, Debug)]
pub(super) struct MovedVm {
    pub name: Name,
    /// Customer or application of the VM, or its name.
    pub program: String,
}

impl MovedVms {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the measurement of a VM that was moved, if it had counters before the move.
    pub(super) fn begin(&self, id: ReservationId, vm: MovedVm, judge: &Judge) {
        if let Some(measurement) = MoveMeasurement::after_move(judge) {
            self.lock().measuring.insert(id, (vm, measurement));
        }
    }

    /// Adds the counters of a sample that ends at `at`. Ignores VMs that are not being measured.
    pub(super) fn observe(&self, id: ReservationId, counters: &Counters, at: Ns) {
        let State { measuring, measured } = &mut *self.lock();
        let Some((vm, measurement)) = measuring.get_mut(&id) else { return };
        match measurement.observe(counters, at) {
            MoveProgress::Measuring => return,
            MoveProgress::Measured(loss) => measured.push((vm.clone(), *loss)),
            MoveProgress::TooLate => {}
        }
        measuring.remove(&id);
    }

    /// Removes and returns the measured losses.
    pub(super) fn take_measured(&self) -> Vec<(MovedVm, MeasuredLoss)> {
        std::mem::take(&mut self.lock().measured)
    }

    /// Puts back a measured loss that could not be recorded. The number of such losses is limited to
    /// [`UNRECORDED_LOSSES_MAX`]; further ones are lost.
    pub(super) fn put_back(&self, vm: MovedVm, loss: MeasuredLoss) {
        let measured = &mut self.lock().measured;
        if measured.len() < UNRECORDED_LOSSES_MAX {
            measured.push((vm, loss));
        }
    }

    /// Returns the VMs that are being measured.
    pub(super) fn ids(&self) -> Vec<ReservationId> {
        self.lock().measuring.keys().copied().collect()
    }

    /// Forgets a VM that has ended.
    pub(super) fn remove(&self, id: ReservationId) {
        self.lock().measuring.remove(&id);
    }
}
