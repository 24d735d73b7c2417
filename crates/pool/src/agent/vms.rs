//! Processes of VMs. A process is recorded before it gets memory, watched until it ends, and never
//! succeeded by another.

use std::collections::BTreeMap;

use units::limits::{ENDED_VM_REPORTED_FOR, ENDED_VMS_REPORTED_MAX};
use units::{Name, Ns, ReservationId, UserId};

use super::{RecoveredVm, Agent, Caller, Effect, Process, Refusal, Ticket, VmRecord};
use crate::protocol::{Handle, ObservedVm, Holding, DesiredVm};

/// A VM that has, will have or had a process.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    record: VmRecord,
    life: Life,
}

#[derive(Clone, Debug)]
enum Life {
    /// The record is being written; these requests wait for it.
    Recording(Vec<Ticket>),
    /// Its memory was passed.
    Running,
    /// Its process has ended.
    Ended {
        /// Time since which no desired state contains it. A manager that has just started may not
        /// contain it yet.
        unnamed: Option<Ns>,
    },
}

/// Relation of a permitted caller to a VM.
enum Permitted {
    /// Its process.
    Again(ReservationId),
    /// The first process that requests it.
    First(ReservationId, DesiredVm),
}

impl Vm {
    /// Returns whether a process has its memory, or will have it.
    pub(super) fn lives(&self) -> bool {
        !matches!(self.life, Life::Ended { .. })
    }

    fn runs(&self) -> bool {
        matches!(self.life, Life::Running)
    }

    /// Returns the slices passed to it, with their locations.
    pub(super) fn slices(&self) -> &BTreeMap<Holding, Handle> {
        &self.record.slices
    }
}

impl Agent {
    pub(super) fn adopt(&mut self, RecoveredVm { record, lives }: RecoveredVm) {
        let reservation = record.reservation;
        let life = if lives { Life::Running } else { Life::Ended { unnamed: None } };
        let (process, slices) = (record.process.clone(), record.slices.clone());
        self.register(Vm { record, life });
        if lives {
            self.effects.push_back(Effect::Watch { reservation, process });
            slices.into_iter().for_each(|(holding, handle)| self.open(holding, handle));
        } else {
            self.effects.push_back(Effect::FreeLocal(reservation));
        }
    }

    fn register(&mut self, vm: Vm) {
        let reservation = vm.record.reservation;
        self.handed.extend(vm.record.slices.keys().map(|holding| (*holding, reservation)));
        self.vms.insert(reservation, vm);
    }

    fn unregister(&mut self, reservation: ReservationId) -> Option<Vm> {
        let vm = self.vms.remove(&reservation)?;
        self.handed.retain(|_, id| *id != reservation);
        self.effects.push_back(Effect::DeleteRecord(reservation));
        Some(vm)
    }

    /// Returns whether a running process has this slice, or will have it.
    pub(super) fn is_in_use(&self, holding: Holding) -> bool {
        self.handed.get(&holding).and_then(|id| self.vms.get(id)).is_some_and(Vm::lives)
    }

    /// Returns the location of this slice for the VM that has or had it.
    pub(super) fn recorded_handle(&self, holding: Holding) -> Option<Handle> {
        let reservation = self.handed.get(&holding)?;
        self.vms.get(reservation)?.record.slices.get(&holding).cloned()
    }

    /// Records that a slice was taken from its VM, running or ended. With the last slice the record
    /// is rewritten: a restarted agent would otherwise look for slices that belong to others by
    /// then.
    pub(super) fn remove_from_record(&mut self, holding: Holding) {
        if let Some(vm) = self.handed.remove(&holding).and_then(|id| self.vms.get_mut(&id)) {
            vm.record.slices.remove(&holding);
            if vm.record.slices.is_empty() && !matches!(vm.life, Life::Recording(_)) {
                self.effects.push_back(Effect::Record(vm.record.clone()));
            }
        }
    }

    pub(super) fn has_ended(&self, reservation: ReservationId) -> bool {
        self.vms.get(&reservation).is_some_and(|vm| !vm.lives())
    }

    /// Returns all VMs with a running process.
    pub fn live_vms(&self) -> BTreeMap<ReservationId, ObservedVm> {
        self.vms.iter().filter(|(_, vm)| vm.runs()).map(|(id, vm)| (*id, reported(&vm.record))).collect()
    }

    /// Returns a VM with a running process.
    pub fn live_vm(&self, reservation: ReservationId) -> Option<ObservedVm> {
        self.vms.get(&reservation).filter(|vm| vm.runs()).map(|vm| reported(&vm.record))
    }

    pub(super) fn ended_vms(&self) -> Vec<ReservationId> {
        self.vms.iter().filter(|(_, vm)| !vm.lives()).map(|(id, _)| *id).collect()
    }

    /// Handles the request of a process for a VM's memory: replies, or waits for the disk.
    pub(super) fn on_attach(&mut self, ticket: Ticket, vm: &Name, caller: Caller) {
        let outcome = match self.permit(vm, &caller) {
            Ok(Permitted::Again(id)) => self.join(ticket, id),
            Ok(Permitted::First(id, wanted)) => {
                self.record(ticket, id, wanted, caller.process).map(|()| None)
            }
            Err(why) => Err(why),
        };
        match outcome {
            Ok(Some(record)) => self.effects.push_back(Effect::PassMemory { ticket, record }),
            Ok(None) => {} // the reply follows when the record is durable
            Err(why) => self.effects.push_back(Effect::Refuse { ticket, why }),
        }
    }

    /// Returns the memory that a process would get now, without recording anything.
    ///
    /// # Errors
    /// The reason why it would be rejected.
    pub fn look(&self, vm: &Name, caller: Caller) -> Result<VmRecord, Refusal> {
        match self.permit(vm, &caller)? {
            Permitted::Again(id) => self.ready(self.vms[&id].record.clone()),
            Permitted::First(id, wanted) => self.first(id, wanted, caller.process),
        }
    }

    /// Decides whether a caller may have a VM, independent of the state of its slices.
    fn permit(&self, vm: &Name, caller: &Caller) -> Result<Permitted, Refusal> {
        let wanted = self.wanted_vm(vm);
        let known = wanted.as_ref().map(|(id, _)| *id).or_else(|| self.vm_of(vm, &caller.process));
        match (known.and_then(|id| self.vms.get(&id)), wanted) {
            (Some(known), _) if known.is(&caller.process) => Ok(Permitted::Again(known.record.reservation)),
            (Some(known), _) => {
                self.check_user(vm, known.record.uid, caller)?;
                Err(known.refusal())
            }
            (None, Some((id, wanted))) => {
                self.check_user(vm, wanted.uid, caller)?;
                self.check_is_not_other_vm(vm, &caller.process)?;
                Ok(Permitted::First(id, wanted))
            }
            (None, None) => Err(Refusal::VmUnknown(vm.clone())),
        }
    }

    /// Permits root and the user named by the reservation; without one, the agent's user.
    fn check_user(&self, vm: &Name, named: Option<UserId>, caller: &Caller) -> Result<(), Refusal> {
        let user = named.unwrap_or(self.user);
        if [user, UserId::ROOT].contains(&caller.uid) {
            return Ok(());
        }
        let hint = if named.is_none() { "; its reservation names no user" } else { "" };
        Err(Refusal::OtherUser { vm: vm.clone(), user, caller: caller.uid, hint })
    }

    /// A guest that took over its VMM must not get the memory of another VM, also through a new
    /// connection.
    fn check_is_not_other_vm(&self, vm: &Name, process: &Process) -> Result<(), Refusal> {
        let Some(own) = self.vms.values().find(|known| known.is(process)) else { return Ok(()) };
        let VmRecord { vm: own, reservation, process, .. } = &own.record;
        Err(Refusal::OtherVm {
            vm: vm.clone(),
            pid: process.pid,
            own: own.clone(),
            reservation: *reservation,
        })
    }

    fn wanted_vm(&self, vm: &Name) -> Option<(ReservationId, DesiredVm)> {
        let wanted = self.wanted.iter().find(|(_, wanted)| wanted.vm == *vm);
        wanted.map(|(id, wanted)| (*id, wanted.clone()))
    }

    /// Returns the VM of this name of a process, whether or not the desired state contains it.
    pub fn vm_of(&self, vm: &Name, process: &Process) -> Option<ReservationId> {
        let same = |known: &&Vm| known.runs() && known.record.vm == *vm && known.record.process.is(process);
        self.vms.values().find(same).map(|known| known.record.reservation)
    }

    /// Repeats the reply to a VM's own process, or lets it wait with earlier requests for the
    /// record.
    fn join(&mut self, ticket: Ticket, reservation: ReservationId) -> Result<Option<VmRecord>, Refusal> {
        let vm = self.vms.get_mut(&reservation).expect("a VM that was permitted again is there");
        if let Life::Recording(tickets) = &mut vm.life {
            tickets.push(ticket);
            return Ok(None);
        }
        let record = vm.record.clone();
        self.ready(record).map(Some)
    }

    /// Returns the complete memory of a VM; a part of it is never passed.
    fn ready(&self, record: VmRecord) -> Result<VmRecord, Refusal> {
        let online = record.slices.keys().filter(|holding| self.is_online(**holding)).count();
        let slices = record.slices.len();
        if online == slices { Ok(record) } else { Err(Refusal::NotReady { vm: record.vm, online, slices }) }
    }

    /// Records a new process for a VM without one before it gets memory.
    fn record(
        &mut self,
        ticket: Ticket,
        reservation: ReservationId,
        wanted: DesiredVm,
        process: Process,
    ) -> Result<(), Refusal> {
        let record = self.first(reservation, wanted, process)?;
        self.effects.push_back(Effect::Record(record.clone()));
        self.register(Vm { record, life: Life::Recording(vec![ticket]) });
        Ok(())
    }

    /// Returns the memory for the first process of a VM, if no other process has any of it.
    fn first(
        &self,
        reservation: ReservationId,
        wanted: DesiredVm,
        process: Process,
    ) -> Result<VmRecord, Refusal> {
        let DesiredVm { vm, local, pinned, uid, slices } = wanted;
        let record = self.ready(VmRecord { reservation, vm, process, local, pinned, uid, slices })?;
        let other = record.slices.keys().find_map(|holding| self.vms.get(self.handed.get(holding)?));
        other.map_or(Ok(record), |other| Err(other.refusal()))
    }

    /// Handles the write of a record. Only a VM that is still desired gets its memory.
    pub(super) fn on_recorded(&mut self, reservation: ReservationId, result: Result<(), String>) {
        let Some(Vm { record, life: Life::Recording(tickets) }) = self.vms.get(&reservation) else { return };
        let (record, tickets) = (record.clone(), tickets.clone());
        let vm = record.vm.clone();
        let recorded = result.map_err(|message| Refusal::NotRecorded { vm: vm.clone(), message });
        let wanted = self.is_named(&record).then_some(()).ok_or(Refusal::VmUnknown(vm));
        match recorded.and(wanted).and_then(|()| self.ready(record)) {
            Ok(record) => self.run(record, tickets),
            Err(why) => self.withdraw(reservation, tickets, &why),
        }
    }

    fn run(&mut self, record: VmRecord, tickets: Vec<Ticket>) {
        let (reservation, process) = (record.reservation, record.process.clone());
        self.vms.entry(reservation).and_modify(|vm| vm.life = Life::Running);
        self.effects.push_back(Effect::Watch { reservation, process });
        let hand_out = |ticket| Effect::PassMemory { ticket, record: record.clone() };
        self.effects.extend(tickets.into_iter().map(hand_out));
    }

    /// Drops a record whose process got nothing.
    fn withdraw(&mut self, reservation: ReservationId, tickets: Vec<Ticket>, why: &Refusal) {
        let gone = self.unregister(reservation);
        let refuse = |ticket| Effect::Refuse { ticket, why: why.clone() };
        self.effects.extend(tickets.into_iter().map(refuse));
        let slices = gone.into_iter().flat_map(|vm| vm.record.slices.into_keys());
        slices.for_each(|holding| self.step(holding));
    }

    pub(super) fn on_process_gone(&mut self, reservation: ReservationId) {
        let now = self.now;
        let Some(vm) = self.vms.get(&reservation).filter(|vm| vm.runs()) else { return };
        let unnamed = (!self.is_named(&vm.record)).then_some(now);
        let slices: Vec<Holding> = vm.record.slices.keys().copied().collect();
        self.vms.entry(reservation).and_modify(|vm| vm.life = Life::Ended { unnamed });
        self.effects.push_back(Effect::FreeLocal(reservation));
        slices.into_iter().for_each(|holding| self.step(holding));
        self.dirty = true;
    }

    /// Kills VMs of a fenced host that are outside the desired state: they may have been started
    /// elsewhere.
    pub(super) fn kill_undesired_vms(&mut self) {
        let strangers = self.vms.values().filter(|vm| vm.runs() && !self.is_named(&vm.record));
        let kill: Vec<_> = strangers.map(|vm| Effect::Kill(vm.record.reservation)).collect();
        self.effects.extend(kill);
    }

    fn is_named(&self, record: &VmRecord) -> bool {
        self.wanted.contains_key(&record.reservation)
    }

    /// After a desired state: an ended VM is reported until it has been absent for a while.
    pub(super) fn update_absence(&mut self) {
        let (now, wanted) = (self.now, &self.wanted);
        for vm in self.vms.values_mut() {
            let named = wanted.contains_key(&vm.record.reservation);
            if let Life::Ended { unnamed } = &mut vm.life {
                *unnamed = if named { None } else { unnamed.or(Some(now)) };
            }
        }
    }

    pub(super) fn next_forget(&self) -> Option<Ns> {
        self.vms.values().filter_map(|vm| self.forget_at(vm)).min()
    }

    pub(super) fn forget_ended(&mut self) {
        let at = |vm: &Vm| Some((self.forget_at(vm)?, vm.record.reservation));
        let mut ended: Vec<_> = self.vms.values().filter_map(at).collect();
        ended.sort_unstable();
        let excess = ended.len().saturating_sub(ENDED_VMS_REPORTED_MAX);
        let due = (0..).zip(ended).filter(|(n, (at, _))| *n < excess || *at <= self.now);
        for reservation in due.map(|(_, (_, id))| id).collect::<Vec<_>>() {
            drop(self.unregister(reservation));
            self.dirty = true;
        }
    }

    /// A VM is kept while one of its slices is open, because another process could otherwise get
    /// its data.
    fn forget_at(&self, vm: &Vm) -> Option<Ns> {
        let Life::Ended { unnamed: Some(since) } = vm.life else { return None };
        let closed = !vm.record.slices.keys().any(|holding| self.slices.contains_key(holding));
        closed.then(|| since.after(ENDED_VM_REPORTED_FOR))
    }
}

fn reported(record: &VmRecord) -> ObservedVm {
    ObservedVm {
        vm: record.vm.clone(),
        pid: record.process.pid,
        slices: record.slices.keys().copied().collect(),
        local: record.local,
        pinned: record.pinned,
        uid: record.uid,
    }
}

impl Vm {
    /// Returns whether the VM has a process, and it is this one.
    fn is(&self, process: &Process) -> bool {
        self.lives() && self.record.process.is(process)
    }

    fn refusal(&self) -> Refusal {
        let (vm, pid) = (self.record.vm.clone(), self.record.process.pid);
        if self.lives() { Refusal::Attached { vm, pid } } else { Refusal::Ended { vm, pid } }
    }
}
