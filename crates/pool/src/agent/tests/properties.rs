//! Property tests of the agent with random desired states, including repeated and reordered states
//! and states for other agents. Host calls may be slow or fail, and VMs may end at any time. The
//! host model checks every effect.

use units::limits::SCRUBS_PER_HOST_MAX;

use super::*;

/// User of VM a's reservation; VM b's reservation has no user.
const TENANT_UID: u32 = 2001;
/// User that runs the agent.
const AGENT_UID: u32 = 990;

/// Random event of the host, the manager or a VM.
#[derive(Clone, Debug)]
enum Action {
    DesiredState { number: u64, foreign: u8, entries: Vec<(u8, u32, u64)>, fenced: bool },
    HostCallEnds { which: usize, ok: u8 },
    Attach { vm: u8, pid: u32, uid: u32 },
    RecordWriteEnds { which: usize, ok: bool },
    ProcessExits { which: usize },
    VmmMovesMemory { which: usize },
    RehomeEnds { which: usize },
    Restart,
    AdvanceTime { ms: u64 },
}

fn any_action() -> impl Strategy<Value = Action> {
    let entries = prop::collection::vec((0..6u8, 0..4u32, 1..3u64), 0..6);
    prop_oneof![
        4 => (1..12u64, 0..12u8, entries, prop::bool::weighted(0.1))
            .prop_map(|(number, foreign, entries, fenced)| Action::DesiredState { number, foreign, entries, fenced }),
        8 => (any::<usize>(), 0..8u8).prop_map(|(which, ok)| Action::HostCallEnds { which, ok }),
        4 => (0..2u8, 100..102u32, prop::sample::select(vec![0, TENANT_UID, AGENT_UID, 2002]))
            .prop_map(|(vm, pid, uid)| Action::Attach { vm, pid, uid }),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(which, ok)| Action::RecordWriteEnds { which, ok }),
        1 => any::<usize>().prop_map(|which| Action::ProcessExits { which }),
        1 => any::<usize>().prop_map(|which| Action::VmmMovesMemory { which }),
        2 => any::<usize>().prop_map(|which| Action::RehomeEnds { which }),
        1 => Just(Action::Restart),
        2 => (0..2000u64).prop_map(|ms| Action::AdvanceTime { ms }),
    ]
}

/// Model of a host: pending calls, records on disk, and slices of processes.
struct HostModel {
    now: Ns,
    agent: Agent,
    calls: BTreeMap<Holding, Effect>,
    pending_records: BTreeMap<ReservationId, VmRecord>,
    disk: BTreeMap<ReservationId, VmRecord>,
    /// Locations of slices that the kernel may still have open.
    open_in_kernel: BTreeSet<Arc<str>>,
    closing: BTreeSet<Arc<str>>,
    running: BTreeMap<ReservationId, VmRecord>,
    /// VMs whose process moves its pool memory.
    moving: BTreeSet<ReservationId>,
    /// Calls that wait for the result of a move, each with whether the move is cancelled.
    rehome_calls: BTreeMap<ReservationId, bool>,
    /// VMs with a process that the agent has reported.
    reported_vms: BTreeSet<ReservationId>,
    desired_state: Option<DesiredState>,
    reported_released: BTreeSet<Holding>,
    tickets: u64,
    open_tickets: BTreeMap<Ticket, Caller>,
}

impl HostModel {
    fn new() -> Self {
        let mut agent = Agent::new(Ns::ZERO, INSTANCE, None, Vec::new(), Vec::new());
        agent.set_default_user(user_id(AGENT_UID));
        agent.handle(Ns::ZERO, Event::SessionUp { rack: "R".to_owned(), lease_ttl: Ns::secs(4) });
        Self {
            now: Ns::ZERO,
            agent,
            calls: BTreeMap::new(),
            pending_records: BTreeMap::new(),
            disk: BTreeMap::new(),
            open_in_kernel: BTreeSet::new(),
            closing: BTreeSet::new(),
            running: BTreeMap::new(),
            moving: BTreeSet::new(),
            rehome_calls: BTreeMap::new(),
            reported_vms: BTreeSet::new(),
            desired_state: None,
            reported_released: BTreeSet::new(),
            tickets: 0,
            open_tickets: BTreeMap::new(),
        }
    }

    fn perform_action(&mut self, action: Action) {
        match action {
            Action::DesiredState { number, foreign, entries, fenced } => {
                self.receive_desired_state(number, foreign, &entries, fenced)
            }
            Action::HostCallEnds { which, ok } if which % 3 == 0 && !self.closing.is_empty() => {
                self.end_orphan_close(which, ok > 0);
            }
            Action::HostCallEnds { which, ok } => self.end_host_call(which, ok),
            Action::Attach { vm, pid, uid } => self.attach(vm, pid, uid),
            Action::RecordWriteEnds { which, ok } => self.end_record_write(which, ok),
            Action::ProcessExits { which } => self.end_process(which),
            Action::VmmMovesMemory { which } => self.move_memory(which),
            Action::RehomeEnds { which } => self.end_rehome(which),
            Action::Restart => self.restart(),
            Action::AdvanceTime { ms } => {
                self.now = self.now.after(Ns::ms(ms));
                self.handle(Event::Tick);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.agent.handle(self.now, event);
        while let Some(effect) = self.agent.poll_effect() {
            self.perform_effect(effect);
        }
    }

    /// Builds and sends a desired state. VM a has slices with even numbers and VM b slices with odd
    /// numbers, so that a slice never belongs to two VMs.
    fn receive_desired_state(&mut self, number: u64, foreign: u8, entries: &[(u8, u32, u64)], fenced: bool) {
        let mut desired = desired_state(number);
        desired.fenced = fenced;
        let mut slices = [BTreeSet::new(), BTreeSet::new()];
        for (kind, slice, epoch) in entries {
            let holding = Holding { slice: SliceId(*slice), epoch: Epoch(*epoch) };
            match kind {
                0 => drop(desired.release.insert(holding, desired_release(holding, false))),
                1 => drop(desired.release.insert(holding, desired_release(holding, true))),
                2 => {
                    let scrubbed = Holding { epoch: Epoch(epoch + 10), ..holding };
                    drop(desired.scrub.insert(scrubbed, handle(scrubbed)));
                }
                _ => drop(slices[(slice % 2) as usize].insert(holding)),
            }
        }
        for (vm, slices) in ["a", "b"].into_iter().zip(slices) {
            if !slices.is_empty() && !fenced {
                let uid = (vm == "a").then(|| user_id(TENANT_UID));
                let rehome = (!number.is_multiple_of(3)).then(|| DesiredRehome {
                    attempt: u32::try_from(number / 3).unwrap(),
                    is_cancelled: number % 3 == 2,
                });
                let memory = DesiredVm { uid, rehome, ..desired_vm(vm, slices.into_iter()) };
                desired.vms.insert(reservation(vm), memory);
            }
        }
        let rack = if foreign == 0 { "Q" } else { "R" };
        if foreign == 1 {
            desired.instance = InstanceId(4);
        }
        self.send_desired_state(rack, desired, foreign > 1);
    }

    fn send_desired_state(&mut self, rack: &str, desired: DesiredState, is_own: bool) {
        let newest = self.desired_state.as_ref().map_or(DesiredVersion::default(), |desired| desired.number);
        let is_accepted = is_own && desired.number >= newest;
        let before = (self.agent.observed_state(), self.calls.clone());
        let previous = self.desired_state.clone();
        if is_accepted {
            self.reported_released.retain(|holding| desired.release.contains_key(holding));
            self.desired_state = Some(desired.clone());
        }
        let desired = match previous {
            Some(before) if desired.number.revision.0.is_multiple_of(2) => {
                let change = changes_between(&before, &desired);
                let mut complete = before;
                complete.merge_newer(change.clone());
                assert_eq!(complete, desired, "changes must add up to the complete state");
                change
            }
            _ => desired,
        };
        self.handle(Event::DesiredState { rack: rack.to_owned(), desired });
        if !is_accepted {
            assert_eq!(
                before,
                (self.agent.observed_state(), self.calls.clone()),
                "a stale or foreign desired state changed the agent"
            );
        }
    }

    fn end_host_call(&mut self, which: usize, ok: u8) {
        let Some(holding) = self.calls.keys().copied().nth(which % self.calls.len().max(1)) else { return };
        let call = self.calls.remove(&holding).unwrap();
        let result = match (ok, &call) {
            (0, _) => Err(host_failure(FailureReason::Host)),
            (1, Effect::Online { check_zero: true, .. }) => Err(host_failure(FailureReason::NotZero)),
            _ => Ok(expected_outcome(&self.agent, holding)),
        };
        if matches!((&call, &result), (Effect::Offline { .. } | Effect::Scrub { .. }, Ok(_))) {
            self.open_in_kernel.remove(&handle(holding).place);
        }
        if matches!((&call, &result), (Effect::Offline { .. }, Ok(_))) {
            // A slice in use can be closed only by a forced release.
            self.running.values_mut().for_each(|vm| drop(vm.slices.remove(&holding)));
        }
        self.handle(Event::Done { holding, result });
    }

    fn attach(&mut self, vm: u8, pid: u32, uid: u32) {
        self.tickets += 1;
        let (ticket, vm) = (Ticket(self.tickets), Name::new(["a", "b"][usize::from(vm)]).unwrap());
        let caller = Caller {
            process: process(pid),
            uid: user_id(uid),
            control_socket: Some("/run/vm.sock".to_owned()),
        };
        self.open_tickets.insert(ticket, caller.clone());
        self.handle(Event::Attach { ticket, vm, caller });
    }

    fn end_record_write(&mut self, which: usize, ok: bool) {
        let Some(id) = self.pending_records.keys().copied().nth(which % self.pending_records.len().max(1))
        else {
            return;
        };
        let record = self.pending_records.remove(&id).unwrap();
        if ok {
            self.disk.insert(id, record);
        }
        let result = if ok { Ok(()) } else { Err("full".to_owned()) };
        self.handle(Event::Recorded { reservation: id, result });
    }

    fn end_process(&mut self, which: usize) {
        let Some(id) = self.running.keys().copied().nth(which % self.running.len().max(1)) else { return };
        self.running.remove(&id);
        self.moving.remove(&id);
        self.rehome_calls.remove(&id);
        self.handle(Event::ProcessGone { reservation: id });
    }

    /// A process completes its move. The agent learns this only from the end of its call.
    fn move_memory(&mut self, which: usize) {
        let Some(id) = nth(self.moving.iter(), which) else { return };
        self.moving.remove(&id);
        let vm = self.running.get_mut(&id).expect("the process runs");
        vm.slices.clear();
        vm.is_rehomed = true;
    }

    /// The call for a move ends: the memory was moved before, or the move fails or is cancelled.
    fn end_rehome(&mut self, which: usize) {
        let Some(reservation) = nth(self.rehome_calls.keys(), which) else { return };
        self.rehome_calls.remove(&reservation);
        self.moving.remove(&reservation);
        let is_moved = self.running.get(&reservation).is_some_and(|vm| vm.is_rehomed);
        let result = if is_moved { Ok(()) } else { Err("busy".to_owned()) };
        self.handle(Event::RehomeEnded { reservation, result });
    }

    /// Crashes and restarts the agent. Running VMs and records on disk remain.
    fn restart(&mut self) {
        let recovered = self.disk.values().map(|record| RecoveredVm {
            record: record.clone(),
            is_alive: self.running.contains_key(&record.reservation),
        });
        let recovered: Vec<_> = recovered.collect();
        self.calls.clear();
        self.closing.clear();
        self.pending_records.clear();
        self.rehome_calls.clear();
        self.reported_released.clear();
        self.reported_vms.clear();
        self.open_tickets.clear();
        self.desired_state = None;
        let orphans = self.open_in_kernel.iter().cloned().collect();
        self.agent = Agent::new(self.now, INSTANCE, Some("R".to_owned()), recovered, orphans);
        self.agent.set_default_user(user_id(AGENT_UID));
        self.handle(Event::SessionUp { rack: "R".to_owned(), lease_ttl: Ns::secs(4) });
    }

    /// Checks the invariants of an effect and applies the effect to the model.
    fn perform_effect(&mut self, effect: Effect) {
        match &effect {
            Effect::Online { holding, check_zero, .. } => {
                let recorded = self.disk.values().any(|record| record.slices.contains_key(holding));
                assert!(*check_zero || recorded, "{holding:?} was opened without a check for zeros");
                self.open_in_kernel.insert(handle(*holding).place);
                self.start_call(*holding, effect);
            }
            Effect::Offline { holding, .. } => {
                let forced = self.is_release_forced(*holding);
                assert!(forced || !self.is_in_use(*holding), "{holding:?} was closed while a VM uses it");
                self.start_call(*holding, effect);
            }
            Effect::Scrub { holding, .. } => {
                self.open_in_kernel.insert(handle(*holding).place);
                self.start_call(*holding, effect);
            }
            Effect::CloseOrphan { place } => self.start_orphan_close(place),
            Effect::Record(record) => drop(self.pending_records.insert(record.reservation, record.clone())),
            Effect::DeleteRecord(id) => {
                assert!(!self.running.contains_key(id), "the record of a running VM was deleted");
                self.disk.remove(id);
            }
            Effect::PassMemory { ticket, record } => {
                let caller = self.open_tickets.remove(ticket).expect("the ticket is pending");
                self.check_caller(record, &caller);
                self.pass_memory(record);
            }
            Effect::Refuse { ticket, .. } => {
                assert!(self.open_tickets.remove(ticket).is_some(), "{ticket:?} was not pending");
            }
            Effect::SendReport(report) => self.check_report(report),
            Effect::Watch { reservation, .. } => assert!(self.disk.contains_key(reservation)),
            Effect::Kill(id) => {
                assert!(
                    self.desired_state
                        .as_ref()
                        .is_some_and(|o| o.fenced && find_desired_vm(o, *id).is_none())
                )
            }
            Effect::FreeLocal(id) => assert!(!self.running.contains_key(id)),
            Effect::Rehome { reservation: id, .. } => {
                assert_eq!(self.rehome_calls.insert(*id, false), None, "two calls for one move");
                if !self.running.get(id).expect("the process runs").is_rehomed {
                    self.moving.insert(*id);
                }
            }
            Effect::CancelRehome { reservation: id, .. } => {
                let before = self.rehome_calls.insert(*id, true);
                assert_ne!(before, Some(true), "a move was cancelled twice");
            }
            Effect::RecordRack { .. } | Effect::Disconnect(_) | Effect::CommandRejection(..) => {}
        }
    }

    fn start_call(&mut self, holding: Holding, effect: Effect) {
        assert!(!self.closing.contains(&handle(holding).place), "two concurrent calls for one slice");
        let before = self.calls.insert(holding, effect);
        assert_eq!(before, None, "two concurrent calls for one slice");
        let scrubs = self.calls.values().filter(|call| matches!(call, Effect::Scrub { .. }));
        assert!(scrubs.count() <= SCRUBS_PER_HOST_MAX);
    }

    fn start_orphan_close(&mut self, place: &Arc<str>) {
        let called = self.calls.keys().any(|holding| handle(*holding).place == *place);
        assert!(!called, "two concurrent calls for one slice");
        let used = self.running.values().flat_map(|vm| vm.slices.values()).any(|h| h.place == *place);
        assert!(!used, "{place} was closed while a VM uses it");
        assert!(self.closing.insert(Arc::clone(place)), "two concurrent calls for one slice");
    }

    fn end_orphan_close(&mut self, which: usize, ok: bool) {
        let Some(place) = self.closing.iter().nth(which % self.closing.len().max(1)).cloned() else {
            return;
        };
        self.closing.remove(&place);
        if ok {
            self.open_in_kernel.remove(&place);
        }
        let result = if ok { Ok(()) } else { Err(host_failure(FailureReason::Host)) };
        self.handle(Event::OrphanClosed { place, result });
    }

    fn is_release_forced(&self, holding: Holding) -> bool {
        let desired = self.desired_state.as_ref().and_then(|desired| desired.release.get(&holding));
        desired.is_some_and(|release| release.force)
    }

    /// Checks that only root or the VM's user receives the memory, and that a process belongs to
    /// one VM. The VM's own process may repeat the request as any user.
    fn check_caller(&self, record: &VmRecord, caller: &Caller) {
        assert!(
            record.process.is(&caller.process),
            "memory was passed to a process other than the recorded one"
        );
        let expected = if record.vm.as_str() == "a" { TENANT_UID } else { AGENT_UID };
        let permitted = [expected, 0].contains(&caller.uid.get());
        let again = self.running.contains_key(&record.reservation);
        assert!(permitted || again, "memory of VM {} was passed to user {}", record.vm, caller.uid);
        let mut others = self.running.iter().filter(|(id, _)| **id != record.reservation);
        assert!(!others.any(|(_, vm)| vm.process.is(&caller.process)), "one process belongs to two VMs");
    }

    fn pass_memory(&mut self, record: &VmRecord) {
        let on_disk = self.disk.get(&record.reservation).map(|stored| &stored.process);
        assert_eq!(on_disk, Some(&record.process), "memory was passed before the process was recorded");
        for holding in record.slices.keys() {
            assert_eq!(self.agent.slices.get(holding), Some(&SliceStatus::Online(handle(*holding))));
            let other = self
                .running
                .values()
                .any(|vm| !vm.process.is(&record.process) && vm.slices.contains_key(holding));
            assert!(!other, "{holding:?} has two users");
        }
        if !self.running.get(&record.reservation).is_some_and(|vm| vm.is_rehomed) {
            self.running.insert(record.reservation, record.clone());
        }
    }

    fn is_in_use(&self, holding: Holding) -> bool {
        self.running.values().any(|vm| vm.slices.contains_key(&holding))
    }

    /// Returns whether the record of a running VM contains a slice. After a restart of the agent,
    /// the record may still contain a slice that was released by force.
    fn is_recorded(&self, holding: Holding) -> bool {
        let live = self.disk.iter().filter(|(id, _)| self.running.contains_key(id));
        live.into_iter().any(|(_, record)| record.used_slices().any(|used| used == holding))
    }

    fn check_report(&mut self, report: &ObservedState) {
        let newest = self.desired_state.as_ref().map_or(DesiredVersion::default(), |desired| desired.number);
        assert_eq!(report.number, newest);
        for holding in &report.released {
            let forced = self.is_release_forced(*holding);
            assert!(forced || !self.is_in_use(*holding), "{holding:?} was reported released while in use");
            assert!(
                !self.open_in_kernel.contains(&handle(*holding).place),
                "{holding:?} was reported released while open"
            );
        }
        let released: BTreeSet<_> = report.released.iter().copied().collect();
        assert!(
            self.reported_released.is_subset(&released),
            "a released slice is missing from a later report"
        );
        self.reported_released = released;
        self.reported_vms.retain(|id| self.running.contains_key(id));
        self.reported_vms.extend(report.vms.keys());
        assert!(self.reported_vms.iter().eq(self.running.keys()), "a running VM was not reported");
        for (id, vm) in report.vms.iter().filter(|(_, vm)| vm.rehome == ObservedRehome::Done) {
            assert!(vm.slices.is_empty(), "a moved VM was reported with slices");
            assert!(self.running[id].is_rehomed, "a VM with pool memory was reported as moved");
            assert!(self.disk[id].is_rehomed, "a moved VM was reported before it was recorded");
            assert_eq!(vm.local, self.disk[id].local);
        }
        assert!(
            !report.whole || report.vms.keys().eq(self.running.keys()),
            "a complete report lacks a running VM"
        );
        assert!(
            !report.clean
                || self.running.is_empty() && self.calls.is_empty() && self.open_in_kernel.is_empty()
        );
        for failed in report.failed.iter().filter(|failed| !self.reported_released.contains(&failed.holding))
        {
            let is_open = self.open_in_kernel.contains(&handle(failed.holding).place);
            let is_used = self.is_in_use(failed.holding) || self.is_recorded(failed.holding);
            // A slice that cannot be closed remains open and is reported as failed.
            let must_close =
                self.desired_state.as_ref().is_some_and(|desired| must_release(desired, failed.holding));
            assert!(!is_open || is_used || must_close, "{:?} was reported failed while open", failed.holding);
        }
    }

    /// Completes all calls, and checks that the host reaches the desired state, except for slices
    /// that running VMs use.
    fn check_reaches_desired_state(&mut self) {
        for _ in 0..200 {
            while !self.calls.is_empty()
                || !self.pending_records.is_empty()
                || !self.closing.is_empty()
                || !self.rehome_calls.is_empty()
            {
                self.end_rehome(0);
                self.end_host_call(0, 2);
                self.end_orphan_close(0, true);
                self.end_record_write(0, true);
            }
            self.now = self.now.after(HOST_CALL_RETRY_DELAY);
            self.handle(Event::Tick);
        }
        let Some(desired) = self.desired_state.clone() else { return };
        let report = self.agent.observed_state();
        for (holding, release) in &desired.release {
            let waits = !release.force && (self.is_in_use(*holding) || self.is_recorded(*holding));
            assert!(report.released.contains(holding) || waits, "{holding:?} was not released");
        }
        for holding in desired.scrub.keys() {
            assert!(report.scrubbed.iter().any(|s| s.holding == *holding), "{holding:?} was not scrubbed");
        }
        let is_moved = |id| report.vms.get(id).is_some_and(|vm| vm.rehome == ObservedRehome::Done);
        let with_slices = |id| !report.ended.contains(id) && !is_moved(id);
        for (_, vm) in desired.vms.iter().filter(|(id, _)| with_slices(id)) {
            for holding in vm.slices.keys().filter(|holding| !desired.release.contains_key(holding)) {
                let failed = report.failed.iter().any(|failed| failed.holding == *holding);
                assert!(failed || report.online.contains(holding), "{holding:?} did not come online");
            }
        }
        assert!(self.open_tickets.is_empty(), "an attach request is unanswered");
        assert!(
            !desired.fenced || report.clean || !self.running.is_empty(),
            "a fenced host without VMs is not clean"
        );
    }
}

fn nth<'a>(ids: impl ExactSizeIterator<Item = &'a ReservationId>, which: usize) -> Option<ReservationId> {
    let count = ids.len().max(1);
    ids.copied().nth(which % count)
}

fn find_desired_vm(desired: &DesiredState, id: ReservationId) -> Option<&DesiredVm> {
    desired.vms.get(&id)
}

/// Returns whether a desired state requires that a slice is closed, because of a release, a fence
/// or a later owner.
fn must_release(desired: &DesiredState, holding: Holding) -> bool {
    let mentioned = desired.vms.values().flat_map(|vm| vm.slices.keys()).chain(desired.release.keys());
    let mut later = mentioned.chain(desired.scrub.keys()).filter(|other| other.slice == holding.slice);
    desired.fenced || desired.release.contains_key(&holding) || later.any(|other| other.epoch > holding.epoch)
}

/// Returns the part of a desired state for one VM: VM b and slices with odd numbers if `odd` is
/// set, otherwise VM a and slices with even numbers.
fn desired_state_of_vm(desired: &DesiredState, odd: bool) -> DesiredState {
    let is_part = |slice: SliceId| (slice.0 % 2 == 1) == odd;
    let mut part = desired.clone();
    part.vms.retain(|id, _| (*id == reservation("b")) == odd);
    part.release.retain(|holding, _| is_part(holding.slice));
    part.scrub.retain(|holding, _| is_part(holding.slice));
    part
}

/// Returns the changes that turn one desired state into another.
fn changes_between(before: &DesiredState, after: &DesiredState) -> DesiredState {
    let mut change = DesiredState { base: Some(before.number), ..desired_state(after.number.revision.0) };
    (change.instance, change.fenced) = (after.instance, after.fenced);
    for odd in [false, true] {
        let (old, new) = (desired_state_of_vm(before, odd), desired_state_of_vm(after, odd));
        if (&old.vms, &old.release, &old.scrub) == (&new.vms, &new.release, &new.scrub) {
            continue;
        }
        change.removals.vms.extend(old.vms.keys().filter(|id| !new.vms.contains_key(id)));
        let mentioned: BTreeSet<SliceId> = new.slices().collect();
        change.removals.slices.extend(old.slices().filter(|slice| !mentioned.contains(slice)));
        change.vms.extend(new.vms);
        change.release.extend(new.release);
        change.scrub.extend(new.scrub);
    }
    change
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn agent_invariants_hold_after_random_events(actions in prop::collection::vec(any_action(), 0..80)) {
        let mut host = HostModel::new();
        actions.into_iter().for_each(|action| host.perform_action(action));
        host.check_reaches_desired_state();
    }
}
