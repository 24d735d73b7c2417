//! Which process is which VM. On record before it gets anything, watched until it is gone, never followed by another.

use std::collections::BTreeMap;

use units::limits::{ENDED_VM_REPORTED_FOR, ENDED_VMS_REPORTED_MAX};
use units::{Name, Ns, ReservationId, UserId};

use super::{Adopted, Agent, Caller, Effect, Process, Refusal, Ticket, VmRecord};
use crate::protocol::{Handle, HaveVm, Holding, WantVm};

/// A VM that has, will have or had a process.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    record: VmRecord,
    life: Life,
}

#[derive(Clone, Debug)]
enum Life {
    /// On its way to the disk; these wait for it.
    Recording(Vec<Ticket>),
    /// Has been handed its memory.
    Running,
    /// Its process is gone.
    Ended {
        /// Since when no order names it. A manager that has just started may not name it yet.
        unnamed: Option<Ns>,
    },
}

/// What a caller is to a VM that it may have.
enum Permitted {
    /// Its process.
    Again(ReservationId),
    /// The first process that asks for it.
    First(ReservationId, WantVm),
}

impl Vm {
    /// Whether a process has its memory, or is about to.
    pub(super) fn lives(&self) -> bool {
        !matches!(self.life, Life::Ended { .. })
    }

    fn runs(&self) -> bool {
        matches!(self.life, Life::Running)
    }

    /// The slices it was handed, and where it was told to find them.
    pub(super) fn slices(&self) -> &BTreeMap<Holding, Handle> {
        &self.record.slices
    }
}

impl Agent {
    pub(super) fn adopt(&mut self, Adopted { record, lives }: Adopted) {
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
        self.effects.push_back(Effect::Forget(reservation));
        Some(vm)
    }

    /// Whether a process that lives has this slice, or is about to.
    pub(super) fn is_in_use(&self, holding: Holding) -> bool {
        self.handed.get(&holding).and_then(|id| self.vms.get(id)).is_some_and(Vm::lives)
    }

    /// How the VM that has or had this slice was told to find it.
    pub(super) fn handle_on_record(&self, holding: Holding) -> Option<Handle> {
        let reservation = self.handed.get(&holding)?;
        self.vms.get(reservation)?.record.slices.get(&holding).cloned()
    }

    /// A slice was taken from its VM, dead or alive. With the last one the record on disk is written anew: an agent that starts
    /// again would look for slices that are somebody else's by then.
    pub(super) fn drop_from_records(&mut self, holding: Holding) {
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

    /// Returns all VMs whose process runs.
    pub fn live_vms(&self) -> BTreeMap<ReservationId, HaveVm> {
        self.vms.iter().filter(|(_, vm)| vm.runs()).map(|(id, vm)| (*id, reported(&vm.record))).collect()
    }

    /// Returns one VM, if its process runs.
    pub fn live_vm(&self, reservation: ReservationId) -> Option<HaveVm> {
        self.vms.get(&reservation).filter(|vm| vm.runs()).map(|vm| reported(&vm.record))
    }

    pub(super) fn ended_vms(&self) -> Vec<ReservationId> {
        self.vms.iter().filter(|(_, vm)| !vm.lives()).map(|(id, _)| *id).collect()
    }

    /// A process asks for the memory of a VM and is told, or waits for the disk.
    pub(super) fn on_attach(&mut self, ticket: Ticket, vm: &Name, caller: Caller) {
        let outcome = match self.permit(vm, &caller) {
            Ok(Permitted::Again(id)) => self.join(ticket, id),
            Ok(Permitted::First(id, wanted)) => {
                self.record(ticket, id, wanted, caller.process).map(|()| None)
            }
            Err(why) => Err(why),
        };
        match outcome {
            Ok(Some(record)) => self.effects.push_back(Effect::HandOut { ticket, record }),
            Ok(None) => {} // it hears when the record is on disk
            Err(why) => self.effects.push_back(Effect::Refuse { ticket, why }),
        }
    }

    /// What a process that asked for the memory of a VM now would be handed. It is not: nothing is remembered of it.
    ///
    /// # Errors
    /// Why it would not be.
    pub fn look(&self, vm: &Name, caller: Caller) -> Result<VmRecord, Refusal> {
        match self.permit(vm, &caller)? {
            Permitted::Again(id) => self.ready(self.vms[&id].record.clone()),
            Permitted::First(id, wanted) => self.first(id, wanted, caller.process),
        }
    }

    /// Decides whether a caller may have a VM, whether its slices are online or not.
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
                self.check_is_no_vm(vm, &caller.process)?;
                Ok(Permitted::First(id, wanted))
            }
            (None, None) => Err(Refusal::VmUnknown(vm.clone())),
        }
    }

    /// Permits root and the user that the reservation names; the agent's own user if it names none.
    fn check_user(&self, vm: &Name, named: Option<UserId>, caller: &Caller) -> Result<(), Refusal> {
        let user = named.unwrap_or(self.user);
        if [user, UserId::ROOT].contains(&caller.uid) {
            return Ok(());
        }
        let hint = if named.is_none() { "; its reservation names no user" } else { "" };
        Err(Refusal::OtherUser { vm: vm.clone(), user, caller: caller.uid, hint })
    }

    /// A guest that broke out into its VMM must not fetch the memory of another VM, through a new connection either.
    fn check_is_no_vm(&self, vm: &Name, process: &Process) -> Result<(), Refusal> {
        let Some(own) = self.vms.values().find(|known| known.is(process)) else { return Ok(()) };
        let VmRecord { vm: own, reservation, process, .. } = &own.record;
        Err(Refusal::OtherVm {
            vm: vm.clone(),
            pid: process.pid,
            own: own.clone(),
            reservation: *reservation,
        })
    }

    fn wanted_vm(&self, vm: &Name) -> Option<(ReservationId, WantVm)> {
        let wanted = self.wanted.iter().find(|(_, wanted)| wanted.vm == *vm);
        wanted.map(|(id, wanted)| (*id, wanted.clone()))
    }

    /// Which VM of this name a process is, whether an order names it at the moment or not.
    pub fn vm_of(&self, vm: &Name, process: &Process) -> Option<ReservationId> {
        let same = |known: &&Vm| known.runs() && known.record.vm == *vm && known.record.process.is(process);
        self.vms.values().find(same).map(|known| known.record.reservation)
    }

    /// A VM's own process asks again: it gets the same again, or waits with those that asked before the record was on disk.
    fn join(&mut self, ticket: Ticket, reservation: ReservationId) -> Result<Option<VmRecord>, Refusal> {
        let vm = self.vms.get_mut(&reservation).expect("a VM that was permitted again is there");
        if let Life::Recording(tickets) = &mut vm.life {
            tickets.push(ticket);
            return Ok(None);
        }
        let record = vm.record.clone();
        self.ready(record).map(Some)
    }

    /// A VM is handed out whole or not at all.
    fn ready(&self, record: VmRecord) -> Result<VmRecord, Refusal> {
        let online = record.slices.keys().filter(|holding| self.is_online(**holding)).count();
        let slices = record.slices.len();
        if online == slices { Ok(record) } else { Err(Refusal::NotReady { vm: record.vm, online, slices }) }
    }

    /// A new process for a VM that has none: on record before it gets anything.
    fn record(
        &mut self,
        ticket: Ticket,
        reservation: ReservationId,
        wanted: WantVm,
        process: Process,
    ) -> Result<(), Refusal> {
        let record = self.first(reservation, wanted, process)?;
        self.effects.push_back(Effect::Record(record.clone()));
        self.register(Vm { record, life: Life::Recording(vec![ticket]) });
        Ok(())
    }

    /// What the first process of a VM gets, if nobody has any of it.
    fn first(
        &self,
        reservation: ReservationId,
        wanted: WantVm,
        process: Process,
    ) -> Result<VmRecord, Refusal> {
        let WantVm { vm, local, pinned, uid, slices } = wanted;
        let record = self.ready(VmRecord { reservation, vm, process, local, pinned, uid, slices })?;
        let other = record.slices.keys().find_map(|holding| self.vms.get(self.handed.get(holding)?));
        other.map_or(Ok(record), |other| Err(other.refusal()))
    }

    /// The disk has answered. What was ordered meanwhile counts: only a VM that is still wanted is handed out.
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
        let hand_out = |ticket| Effect::HandOut { ticket, record: record.clone() };
        self.effects.extend(tickets.into_iter().map(hand_out));
    }

    /// Nobody got anything, so it never happened.
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

    /// A fenced host ends the VMs that its order no longer names: they may have been started elsewhere.
    pub(super) fn end_strangers(&mut self) {
        let strangers = self.vms.values().filter(|vm| vm.runs() && !self.is_named(&vm.record));
        let kill: Vec<_> = strangers.map(|vm| Effect::Kill(vm.record.reservation)).collect();
        self.effects.extend(kill);
    }

    fn is_named(&self, record: &VmRecord) -> bool {
        self.wanted.contains_key(&record.reservation)
    }

    /// After a new order: who has ended is told until it has not been named for a while.
    pub(super) fn note_unnamed(&mut self) {
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

    /// While a slice of it is open, a VM is not forgotten: another process might be handed what it left.
    fn forget_at(&self, vm: &Vm) -> Option<Ns> {
        let Life::Ended { unnamed: Some(since) } = vm.life else { return None };
        let closed = !vm.record.slices.keys().any(|holding| self.slices.contains_key(holding));
        closed.then(|| since.after(ENDED_VM_REPORTED_FOR))
    }
}

fn reported(record: &VmRecord) -> HaveVm {
    HaveVm {
        vm: record.vm.clone(),
        pid: record.process.pid,
        slices: record.slices.keys().copied().collect(),
        local: record.local,
        pinned: record.pinned,
        uid: record.uid,
    }
}

impl Vm {
    /// Whether it has a process, and this one.
    fn is(&self, process: &Process) -> bool {
        self.lives() && self.record.process.is(process)
    }

    fn refusal(&self) -> Refusal {
        let (vm, pid) = (self.record.vm.clone(), self.record.process.pid);
        if self.lives() { Refusal::Attached { vm, pid } } else { Refusal::Ended { vm, pid } }
    }
}
