//! Moves of pool memory to local memory. The desired state names the attempt. The VM's process moves
//! the memory, or the kernel does if the slices are memory of a NUMA node. The result is reported
//! after it is recorded, so that a restarted agent knows which memory the process uses. A restarted
//! agent does not know whether a move by the process is in progress or has ended, and therefore asks
//! the process.
//!
//! ```text
//!   Unknown ──┐                     ┌──▶ Failed ──▶ reported, until the next attempt
//!             ├─▶ Calling ──ended───┤
//!   Idle ─────┘   (Rehome, Cancel)  └──▶ Recording ──▶ Recorded: reported, slices are released
//! ```

use units::{Ns, ReservationId, limits::HOST_CALL_RETRY_DELAY};

use super::{Agent, Effect, VmRecord};
use crate::protocol::{DesiredRehome, Holding, ObservedRehome};

/// Phase of a VM's move to local memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RehomePhase {
    /// No move is in progress.
    Idle,
    /// An earlier agent may have started a move.
    Unknown,
    /// A call to move the memory, or to cancel the move, is in progress.
    Calling {
        /// Attempt of the desired state; `None` if the call only cancels a move.
        attempt: Option<u32>,
        /// Whether the move was cancelled. The call still ends with a result.
        is_cancelled: bool,
    },
    /// The attempt failed.
    Failed { attempt: u32, why: String },
    /// The memory was moved, and the record is being written.
    Recording,
    /// The memory was moved, and the write of the record failed. It is repeated at this time.
    Unrecorded { retry_at: Ns },
    /// The memory was moved, and this is recorded.
    Done,
}

impl RehomePhase {
    /// Returns the phase of a VM that the agent finds when it starts.
    pub(super) fn of_recovered(record: &VmRecord) -> Self {
        match record {
            VmRecord { is_rehomed: true, .. } => Self::Done,
            // A process without a control socket moves no memory on its own.
            VmRecord { control_socket: Some(_), slices, .. } if !slices.is_empty() => Self::Unknown,
            _ => Self::Idle,
        }
    }

    /// Returns the result of a move for the report.
    pub(super) fn observed(&self) -> ObservedRehome {
        match self {
            Self::Done => ObservedRehome::Done,
            Self::Failed { attempt, why } => ObservedRehome::Failed { attempt: *attempt, why: why.clone() },
            _ => ObservedRehome::None,
        }
    }
}

impl Agent {
    /// Starts or cancels the moves of all VMs whose desired state requires it.
    pub(super) fn reconcile_rehomes(&mut self) {
        let running = self.vms.iter().filter(|(_, vm)| vm.is_running());
        let ids: Vec<ReservationId> = running.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.reconcile_rehome(id));
    }

    /// Starts or cancels the move of a VM if the desired state requires it. Does nothing if the desired
    /// state lacks the VM: it may lack a VM for a while after a restart of the manager. But if it requires
    /// the release of the VM's slices, a restarted agent asks the process whether it still uses them. A
    /// move requires that all slices are open. So does the report of a cancelled attempt: when the slices
    /// of an earlier agent are opened, pages that it has moved are moved back.
    pub(super) fn reconcile_rehome(&mut self, id: ReservationId) {
        let Some(record) = self.live_record(id) else { return };
        let is_open = record.used_slices().all(|slice| self.is_online(slice));
        let is_released = record.used_slices().any(|slice| self.is_release_ordered(slice));
        let is_unknown = self.vms.get(&id).is_some_and(|vm| vm.rehome == RehomePhase::Unknown);
        let wanted = match self.desired_vms.get(&id) {
            Some(desired) => desired.rehome,
            None if is_unknown && is_released => None,
            None => return,
        };
        let Some(vm) = self.vms.get_mut(&id).filter(|vm| vm.is_running()) else { return };
        let effect = match (&mut vm.rehome, wanted) {
            (RehomePhase::Failed { attempt, .. }, Some(wanted)) if *attempt == wanted.attempt => return,
            (RehomePhase::Failed { .. }, None) => {
                // The manager has recorded the failure. After a restore, it may use the number again.
                vm.rehome = RehomePhase::Idle;
                return;
            }
            (
                RehomePhase::Idle | RehomePhase::Failed { .. },
                Some(DesiredRehome { attempt, is_cancelled: true }),
            ) if is_open => {
                vm.rehome = RehomePhase::Failed { attempt, why: "cancelled".to_owned() };
                self.report_vm(id);
                return;
            }
            (RehomePhase::Unknown, wanted) if wanted.is_none_or(|wanted| wanted.is_cancelled) => {
                let attempt = wanted.map(|wanted| wanted.attempt);
                vm.rehome = RehomePhase::Calling { attempt, is_cancelled: true };
                Effect::CancelRehome { reservation: id, is_resumed: true }
            }
            (RehomePhase::Idle | RehomePhase::Unknown | RehomePhase::Failed { .. }, Some(wanted))
                if is_open =>
            {
                vm.rehome = RehomePhase::Calling { attempt: Some(wanted.attempt), is_cancelled: false };
                Effect::Rehome { reservation: id, is_resumed: is_unknown }
            }
            (RehomePhase::Calling { attempt, is_cancelled: is_cancelled @ false }, wanted)
                if wanted.is_none_or(|wanted| wanted.is_cancelled || *attempt != Some(wanted.attempt)) =>
            {
                *is_cancelled = true;
                Effect::CancelRehome { reservation: id, is_resumed: false }
            }
            _ => return,
        };
        self.effects.push_back(effect);
    }

    pub(super) fn on_rehome_ended(&mut self, id: ReservationId, result: Result<(), String>) {
        let Some(vm) = self.vms.get_mut(&id).filter(|vm| vm.is_running()) else { return };
        let RehomePhase::Calling { attempt, .. } = vm.rehome else { return };
        match (result, attempt) {
            (Ok(()), _) => {
                vm.rehome = RehomePhase::Recording;
                self.effects.push_back(Effect::Record(vm.record_to_write()));
            }
            (Err(why), Some(attempt)) => {
                vm.rehome = RehomePhase::Failed { attempt, why };
                self.report_vm(id);
                self.reconcile_rehome(id);
            }
            (Err(_), None) => {
                vm.rehome = RehomePhase::Idle;
                self.reconcile_rehome(id);
            }
        }
    }

    fn report_vm(&mut self, id: ReservationId) {
        self.changed_vms.insert(id);
        self.dirty = true;
    }

    /// Handles the result of writing the record of a VM that uses only local memory.
    pub(super) fn on_rehome_recorded(&mut self, id: ReservationId, result: &Result<(), String>) {
        let now = self.now;
        let running = self.vms.get_mut(&id).filter(|vm| vm.is_running());
        let Some(vm) = running.filter(|vm| vm.rehome == RehomePhase::Recording) else { return };
        if result.is_err() {
            vm.rehome = RehomePhase::Unrecorded { retry_at: now.after(HOST_CALL_RETRY_DELAY) };
            return;
        }
        vm.record = vm.record_to_write();
        vm.rehome = RehomePhase::Done;
        let slices: Vec<Holding> = vm.record.slices.keys().copied().collect();
        self.report_vm(id);
        slices.into_iter().for_each(|holding| self.step(holding));
    }

    /// Returns the time at which the write of a record is repeated.
    pub(super) fn next_record_write(&self) -> Option<Ns> {
        let retries = self.vms.values().filter_map(|vm| match vm.rehome {
            RehomePhase::Unrecorded { retry_at } if vm.is_running() => Some(retry_at),
            _ => None,
        });
        retries.min()
    }

    /// Repeats the writes of records that failed and are due.
    pub(super) fn retry_record_writes(&mut self) {
        let now = self.now;
        for vm in self.vms.values_mut().filter(|vm| vm.is_running()) {
            if matches!(vm.rehome, RehomePhase::Unrecorded { retry_at } if retry_at <= now) {
                vm.rehome = RehomePhase::Recording;
                self.effects.push_back(Effect::Record(vm.record_to_write()));
            }
        }
    }
}
