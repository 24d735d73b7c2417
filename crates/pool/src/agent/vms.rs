//! Processes of VMs. Each process is recorded before it gets memory, and watched until it ends.
//! After its end, no other process gets the VM's memory.

use std::collections::BTreeMap;

use units::limits::{ENDED_VM_REPORT_DURATION, ENDED_VMS_REPORTED_MAX};
use units::{Name, Ns, ReservationId, UserId};

use super::{Agent, Caller, Effect, Process, RecoveredVm, Refusal, Ticket, VmRecord, rehome::RehomePhase};
use crate::protocol::{DesiredVm, Handle, Holding, ObservedVm};

/// VM whose process is being recorded, is running or has ended.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    pub(super) record: VmRecord,
    phase: VmPhase,
    pub(super) rehome: RehomePhase,
}

#[derive(Clone, Debug)]
enum VmPhase {
    /// The record is being written; these requests are answered after the write.
    Recording(Vec<Ticket>),
    /// The process received its memory.
    Running,
    /// The process has ended.
    Ended {
        /// Time since which desired states do not contain the VM; `None` while they do. The desired
        /// state of a newly started manager may lack the VM at first.
        absent_since: Option<Ns>,
    },
}

/// Relation of a permitted caller to a VM.
enum AttachPermission {
    /// The caller is the VM's process.
    SameProcess(ReservationId),
    /// The VM has no process; the caller becomes its process.
    FirstProcess(ReservationId, DesiredVm),
}

impl Vm {
    /// Returns whether the VM has a process that has the VM's memory or will get it.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(self.phase, VmPhase::Ended { .. })
    }

    pub(super) fn is_running(&self) -> bool {
        matches!(self.phase, VmPhase::Running)
    }

    /// Returns the slices that the process received, with their locations.
    pub(super) fn slices(&self) -> &BTreeMap<Holding, Handle> {
        &self.record.slices
    }
}

impl Agent {
    pub(super) fn adopt_recovered_vm(&mut self, RecoveredVm { record, is_alive }: RecoveredVm) {
        let reservation = record.reservation;
        let phase = if is_alive { VmPhase::Running } else { VmPhase::Ended { absent_since: None } };
        let process = record.process.clone();
        let slices = if record.is_rehomed { BTreeMap::new() } else { record.slices.clone() };
        self.register_vm(Vm { rehome: RehomePhase::of_recovered(&record), record, phase });
        if is_alive {
            self.effects.push_back(Effect::Watch { reservation, process });
            slices.into_iter().for_each(|(holding, handle)| self.open(holding, handle));
        } else {
            self.effects.push_back(Effect::FreeLocal(reservation));
        }
    }

    fn register_vm(&mut self, vm: Vm) {
        let reservation = vm.record.reservation;
        self.slice_vms.extend(vm.record.slices.keys().map(|holding| (*holding, reservation)));
        self.vms.insert(reservation, vm);
    }

    fn unregister_vm(&mut self, reservation: ReservationId) -> Option<Vm> {
        let vm = self.vms.remove(&reservation)?;
        self.slice_vms.retain(|_, id| *id != reservation);
        self.effects.push_back(Effect::DeleteRecord(reservation));
        Some(vm)
    }

    /// Returns whether a running process has this slice or will get it.
    pub(super) fn is_in_use(&self, holding: Holding) -> bool {
        let vm = self.slice_vms.get(&holding).and_then(|id| self.vms.get(id));
        vm.is_some_and(|vm| vm.is_alive() && !vm.record.is_rehomed)
    }

    /// Returns the location of a slice from the record of the VM that has or had it.
    pub(super) fn recorded_handle(&self, holding: Holding) -> Option<Handle> {
        let reservation = self.slice_vms.get(&holding)?;
        self.vms.get(reservation)?.record.slices.get(&holding).cloned()
    }

    /// Removes a slice from the record of the VM that has or had it. When its last slice is
    /// removed, the record is written again. Otherwise a restarted agent would look for slices that
    /// may already have other owners.
    pub(super) fn remove_from_record(&mut self, holding: Holding) {
        if let Some(vm) = self.slice_vms.remove(&holding).and_then(|id| self.vms.get_mut(&id)) {
            vm.record.slices.remove(&holding);
            if vm.record.slices.is_empty() && !matches!(vm.phase, VmPhase::Recording(_)) {
                self.effects.push_back(Effect::Record(vm.record_to_write()));
            }
        }
    }

    /// Returns whether the VM has ended or uses only local memory, so that it needs no slices.
    pub(super) fn has_released_memory(&self, reservation: ReservationId) -> bool {
        self.vms.get(&reservation).is_some_and(|vm| !vm.is_alive() || vm.record.is_rehomed)
    }

    /// Returns whether a move of the VM's pool memory may be in progress, or has ended without a record.
    pub fn is_rehoming(&self, reservation: ReservationId) -> bool {
        self.vms.get(&reservation).is_some_and(|vm| match vm.rehome {
            RehomePhase::Calling { .. }
            | RehomePhase::Unknown
            | RehomePhase::Recording
            | RehomePhase::Unrecorded { .. } => true,
            RehomePhase::Idle | RehomePhase::Failed { .. } | RehomePhase::Done => false,
        })
    }

    /// Returns all VMs with a running process.
    pub fn live_vms(&self) -> BTreeMap<ReservationId, ObservedVm> {
        self.vms.iter().filter(|(_, vm)| vm.is_running()).map(|(id, vm)| (*id, vm.observed())).collect()
    }

    /// Returns the records of all VMs with a running process.
    pub fn live_records(&self) -> impl Iterator<Item = &VmRecord> {
        self.vms.values().filter(|vm| vm.is_running()).map(|vm| &vm.record)
    }

    /// Returns the number of online slices of a reservation under this VM name, if the reservation has no
    /// process. Slices that must be released are not counted.
    pub fn unattached_slice_count(&self, vm: &Name) -> usize {
        let Some((id, desired)) = self.desired_vms.iter().find(|(_, desired)| desired.vm == *vm) else {
            return 0;
        };
        if self.live_record(*id).is_some() {
            return 0;
        }
        let is_usable = |slice: &&Holding| self.is_online(**slice) && !self.is_release_ordered(**slice);
        desired.slices.keys().filter(is_usable).count()
    }

    /// Returns the record of a VM with a running process.
    pub fn live_record(&self, reservation: ReservationId) -> Option<&VmRecord> {
        self.vms.get(&reservation).filter(|vm| vm.is_running()).map(|vm| &vm.record)
    }

    /// Returns a VM with a running process.
    pub fn live_vm(&self, reservation: ReservationId) -> Option<ObservedVm> {
        self.vms.get(&reservation).filter(|vm| vm.is_running()).map(Vm::observed)
    }

    pub(super) fn ended_vms(&self) -> Vec<ReservationId> {
        self.vms.iter().filter(|(_, vm)| !vm.is_alive()).map(|(id, _)| *id).collect()
    }

    /// Handles a process's request for a VM's memory. Replies immediately, or after the VM's record
    /// is durable.
    pub(super) fn on_attach(&mut self, ticket: Ticket, vm: &Name, caller: Caller) {
        let outcome = match self.authorize_attach(vm, &caller) {
            Ok(AttachPermission::SameProcess(id)) => self.reply_again(ticket, id),
            Ok(AttachPermission::FirstProcess(id, desired)) => {
                self.record_process(ticket, id, desired, caller).map(|()| None)
            }
            Err(why) => Err(why),
        };
        match outcome {
            Ok(Some(record)) => self.effects.push_back(Effect::PassMemory { ticket, record }),
            // The reply follows when the record is durable.
            Ok(None) => {}
            Err(why) => self.effects.push_back(Effect::Refuse { ticket, why }),
        }
    }

    /// Returns the memory that a process would get now. Does not record the process.
    ///
    /// # Errors
    /// Returns the reason why the request would be rejected.
    pub fn preview(&self, vm: &Name, caller: Caller) -> Result<VmRecord, Refusal> {
        match self.authorize_attach(vm, &caller)? {
            AttachPermission::SameProcess(id) => self.require_complete_memory(self.vms[&id].record.clone()),
            AttachPermission::FirstProcess(id, desired) => self.create_first_record(id, desired, caller),
        }
    }

    /// Decides whether a caller may get the memory of a VM, regardless of the state of the slices.
    fn authorize_attach(&self, vm: &Name, caller: &Caller) -> Result<AttachPermission, Refusal> {
        let desired = self.desired_vm(vm);
        let known =
            desired.as_ref().map(|(id, _)| *id).or_else(|| self.running_vm_of_process(vm, &caller.process));
        match (known.and_then(|id| self.vms.get(&id)), desired) {
            (Some(known), _) if known.is_live_process(&caller.process) => {
                Ok(AttachPermission::SameProcess(known.record.reservation))
            }
            (Some(known), _) => {
                self.check_user(vm, known.record.uid, caller)?;
                Err(known.refusal())
            }
            (None, Some((id, desired))) => {
                self.check_user(vm, desired.uid, caller)?;
                self.check_has_no_other_vm(vm, &caller.process)?;
                Ok(AttachPermission::FirstProcess(id, desired))
            }
            (None, None) if self.has_desired_state() => Err(Refusal::VmUnknown(vm.clone())),
            (None, None) => {
                Err(Refusal::NoDesiredState { vm: vm.clone(), is_connected: self.is_connected() })
            }
        }
    }

    /// Checks that the caller is root or the user of the reservation. For a reservation without a
    /// user, this is the agent's user.
    fn check_user(
        &self,
        vm: &Name,
        reservation_user: Option<UserId>,
        caller: &Caller,
    ) -> Result<(), Refusal> {
        let user = reservation_user.unwrap_or(self.user);
        if [user, UserId::ROOT].contains(&caller.uid) {
            return Ok(());
        }
        let hint = if reservation_user.is_none() { "; its reservation has no user" } else { "" };
        Err(Refusal::OtherUser { vm: vm.clone(), user, caller: caller.uid, hint })
    }

    /// Checks that the process does not belong to another VM. A guest that took over its VMM must
    /// not get the memory of another VM, even through a new connection.
    fn check_has_no_other_vm(&self, vm: &Name, process: &Process) -> Result<(), Refusal> {
        let Some(own) = self.vms.values().find(|known| known.is_live_process(process)) else { return Ok(()) };
        let VmRecord { vm: own, reservation, process, .. } = &own.record;
        Err(Refusal::OtherVm {
            vm: vm.clone(),
            pid: process.pid,
            own: own.clone(),
            reservation: *reservation,
        })
    }

    fn desired_vm(&self, vm: &Name) -> Option<(ReservationId, DesiredVm)> {
        let desired = self.desired_vms.iter().find(|(_, desired)| desired.vm == *vm);
        desired.map(|(id, desired)| (*id, desired.clone()))
    }

    /// Returns the reservation of the running VM with this name and process, even if the desired
    /// state does not contain the VM.
    pub fn running_vm_of_process(&self, vm: &Name, process: &Process) -> Option<ReservationId> {
        let is_match =
            |known: &&Vm| known.is_running() && known.record.vm == *vm && known.record.process.is(process);
        self.vms.values().find(is_match).map(|known| known.record.reservation)
    }

    /// Replies again to the VM's own process. If the VM's record is still being written, the reply
    /// follows after the write.
    fn reply_again(
        &mut self,
        ticket: Ticket,
        reservation: ReservationId,
    ) -> Result<Option<VmRecord>, Refusal> {
        let vm = self.vms.get_mut(&reservation).expect("an authorized process belongs to a registered VM");
        if let VmPhase::Recording(tickets) = &mut vm.phase {
            tickets.push(ticket);
            return Ok(None);
        }
        let record = vm.record.clone();
        self.require_complete_memory(record).map(Some)
    }

    /// Returns the memory of a VM if all slices are online: a process gets all of its memory or
    /// none.
    fn require_complete_memory(&self, mut record: VmRecord) -> Result<VmRecord, Refusal> {
        if record.is_rehomed {
            record.slices.clear();
        }
        let online = record.slices.keys().filter(|holding| self.is_online(**holding)).count();
        let slices = record.slices.len();
        if online == slices { Ok(record) } else { Err(Refusal::NotReady { vm: record.vm, online, slices }) }
    }

    /// Records a process as the first process of a VM, before it gets memory.
    fn record_process(
        &mut self,
        ticket: Ticket,
        reservation: ReservationId,
        desired: DesiredVm,
        caller: Caller,
    ) -> Result<(), Refusal> {
        let record = self.create_first_record(reservation, desired, caller)?;
        self.effects.push_back(Effect::Record(record.clone()));
        let (phase, rehome) = (VmPhase::Recording(vec![ticket]), RehomePhase::Idle);
        self.register_vm(Vm { record, phase, rehome });
        Ok(())
    }

    /// Returns the record of a VM's first process, if no slice is in the record of another VM.
    fn create_first_record(
        &self,
        reservation: ReservationId,
        desired: DesiredVm,
        Caller { process, control_socket, .. }: Caller,
    ) -> Result<VmRecord, Refusal> {
        let DesiredVm { vm, local, pinned, uid, slices, rehome: _ } = desired;
        let is_rehomed = false;
        let record =
            VmRecord { reservation, vm, process, local, pinned, uid, slices, control_socket, is_rehomed };
        let record = self.require_complete_memory(record)?;
        let other = record.slices.keys().find_map(|holding| self.vms.get(self.slice_vms.get(holding)?));
        other.map_or(Ok(record), |other| Err(other.refusal()))
    }

    /// Handles the result of writing a record. Passes memory only if the desired state still
    /// contains the VM.
    pub(super) fn on_recorded(&mut self, reservation: ReservationId, result: Result<(), String>) {
        let Some(Vm { record, phase: VmPhase::Recording(tickets), .. }) = self.vms.get(&reservation) else {
            return self.on_rehome_recorded(reservation, &result);
        };
        let (record, tickets) = (record.clone(), tickets.clone());
        let vm = record.vm.clone();
        let recorded = result.map_err(|message| Refusal::NotRecorded { vm: vm.clone(), message });
        let desired = self.is_desired(&record).then_some(()).ok_or(Refusal::VmUnknown(vm));
        match recorded.and(desired).and_then(|()| self.require_complete_memory(record)) {
            Ok(record) => self.start_running(record, tickets),
            Err(why) => self.drop_unrecorded_vm(reservation, tickets, &why),
        }
    }

    fn start_running(&mut self, record: VmRecord, tickets: Vec<Ticket>) {
        let (reservation, process) = (record.reservation, record.process.clone());
        self.vms.entry(reservation).and_modify(|vm| vm.phase = VmPhase::Running);
        self.effects.push_back(Effect::Watch { reservation, process });
        self.changed_vms.insert(reservation);
        self.dirty = true;
        let pass_memory = |ticket| Effect::PassMemory { ticket, record: record.clone() };
        self.effects.extend(tickets.into_iter().map(pass_memory));
        self.reconcile_rehome(reservation);
    }

    /// Removes a VM whose record could not be written or whose memory is no longer available, and
    /// rejects the waiting requests.
    fn drop_unrecorded_vm(&mut self, reservation: ReservationId, tickets: Vec<Ticket>, why: &Refusal) {
        let vm = self.unregister_vm(reservation);
        let refuse = |ticket| Effect::Refuse { ticket, why: why.clone() };
        self.effects.extend(tickets.into_iter().map(refuse));
        let slices = vm.into_iter().flat_map(|vm| vm.record.slices.into_keys());
        slices.for_each(|holding| self.step(holding));
    }

    pub(super) fn on_process_gone(&mut self, reservation: ReservationId) {
        let now = self.now;
        let Some(vm) = self.vms.get(&reservation).filter(|vm| vm.is_running()) else { return };
        let absent_since = (!self.is_desired(&vm.record)).then_some(now);
        let slices: Vec<Holding> = vm.record.slices.keys().copied().collect();
        self.vms.entry(reservation).and_modify(|vm| vm.phase = VmPhase::Ended { absent_since });
        self.effects.push_back(Effect::FreeLocal(reservation));
        slices.into_iter().for_each(|holding| self.step(holding));
        self.dirty = true;
    }

    /// Kills the VMs of a fenced host that are not in its desired state, because they may have been
    /// started on another host.
    pub(super) fn kill_undesired_vms(&mut self) {
        let undesired = self.vms.values().filter(|vm| vm.is_running() && !self.is_desired(&vm.record));
        let kill: Vec<_> = undesired.map(|vm| Effect::Kill(vm.record.reservation)).collect();
        self.effects.extend(kill);
    }

    fn is_desired(&self, record: &VmRecord) -> bool {
        self.desired_vms.contains_key(&record.reservation)
    }

    /// Updates the times since which desired states do not contain the ended VMs. The agent reports
    /// an ended VM until the VM has been absent for [`ENDED_VM_REPORT_DURATION`].
    pub(super) fn update_absence_times(&mut self) {
        let (now, desired) = (self.now, &self.desired_vms);
        for vm in self.vms.values_mut() {
            let is_desired = desired.contains_key(&vm.record.reservation);
            if let VmPhase::Ended { absent_since } = &mut vm.phase {
                *absent_since = if is_desired { None } else { absent_since.or(Some(now)) };
            }
        }
    }

    pub(super) fn next_vm_removal(&self) -> Option<Ns> {
        self.vms.values().filter_map(|vm| self.removal_time(vm)).min()
    }

    pub(super) fn drop_ended_vms(&mut self) {
        let at = |vm: &Vm| Some((self.removal_time(vm)?, vm.record.reservation));
        let mut ended: Vec<_> = self.vms.values().filter_map(at).collect();
        ended.sort_unstable();
        let excess = ended.len().saturating_sub(ENDED_VMS_REPORTED_MAX);
        let due = (0..).zip(ended).filter(|(n, (at, _))| *n < excess || *at <= self.now);
        for reservation in due.map(|(_, (_, id))| id).collect::<Vec<_>>() {
            drop(self.unregister_vm(reservation));
            self.dirty = true;
        }
    }

    /// Returns the time at which an ended VM is removed; `None` while it must be kept. A VM with an
    /// open slice is kept, because another process could otherwise get its data.
    fn removal_time(&self, vm: &Vm) -> Option<Ns> {
        let VmPhase::Ended { absent_since: Some(since) } = vm.phase else { return None };
        let closed = !vm.record.slices.keys().any(|holding| self.slices.contains_key(holding));
        closed.then(|| since.after(ENDED_VM_REPORT_DURATION))
    }
}

impl Vm {
    /// Returns the record that must be on disk. While it is being written, it can be newer than the
    /// record in memory.
    pub(super) fn record_to_write(&self) -> VmRecord {
        match self.rehome {
            RehomePhase::Recording | RehomePhase::Unrecorded { .. } => {
                VmRecord { local: self.record.total(), is_rehomed: true, ..self.record.clone() }
            }
            _ => self.record.clone(),
        }
    }

    fn observed(&self) -> ObservedVm {
        let record = &self.record;
        ObservedVm {
            vm: record.vm.clone(),
            pid: record.process.pid,
            slices: record.used_slices().collect(),
            local: record.local,
            pinned: record.pinned,
            uid: record.uid,
            rehome: self.rehome.observed(),
        }
    }

    /// Returns whether this process is the VM's process and may still be running.
    fn is_live_process(&self, process: &Process) -> bool {
        self.is_alive() && self.record.process.is(process)
    }

    fn refusal(&self) -> Refusal {
        let (vm, pid) = (self.record.vm.clone(), self.record.process.pid);
        if self.is_alive() { Refusal::Attached { vm, pid } } else { Refusal::Ended { vm, pid } }
    }
}
