//! Random desired states, also repeated, reordered and foreign ones, for an agent whose host is
//! slow and fails and whose VMs end at any time. Every effect is checked.

use units::limits::SCRUBS_PER_HOST_MAX;

use super::*;

/// User of VM a's reservation; VM b's names none.
const TENANT: u32 = 2001;
/// User of the agent.
const AGENT: u32 = 990;

/// A random event.
#[derive(Clone, Debug)]
enum Turn {
    Order { number: u64, foreign: u8, wants: Vec<(u8, u32, u64)>, fenced: bool },
    HostAnswers { which: usize, ok: u8 },
    Attach { vm: u8, pid: u32, uid: u32 },
    DiskAnswers { which: usize, ok: bool },
    Dies { which: usize },
    Restart,
    Wait { ms: u64 },
}

fn turn() -> impl Strategy<Value = Turn> {
    let wants = prop::collection::vec((0..6u8, 0..4u32, 1..3u64), 0..6);
    prop_oneof![
        4 => (1..12u64, 0..12u8, wants, prop::bool::weighted(0.1))
            .prop_map(|(number, foreign, wants, fenced)| Turn::Order { number, foreign, wants, fenced }),
        8 => (any::<usize>(), 0..8u8).prop_map(|(which, ok)| Turn::HostAnswers { which, ok }),
        4 => (0..2u8, 100..102u32, prop::sample::select(vec![0, TENANT, AGENT, 2002]))
            .prop_map(|(vm, pid, uid)| Turn::Attach { vm, pid, uid }),
        4 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(which, ok)| Turn::DiskAnswers { which, ok }),
        1 => any::<usize>().prop_map(|which| Turn::Dies { which }),
        1 => Just(Turn::Restart),
        2 => (0..2000u64).prop_map(|ms| Turn::Wait { ms }),
    ]
}

/// Model of a host as sets: calls, records on disk, slices of processes.
struct World {
    now: Ns,
    agent: Agent,
    calls: BTreeMap<Holding, Effect>,
    to_record: BTreeMap<ReservationId, VmRecord>,
    disk: BTreeMap<ReservationId, VmRecord>,
    /// Slices that the kernel may still have, by location.
    kernel: BTreeSet<Arc<str>>,
    clearing: BTreeSet<Arc<str>>,
    running: BTreeMap<ReservationId, VmRecord>,
    order: Option<Want>,
    given_back: BTreeSet<Holding>,
    tickets: u64,
    open_tickets: BTreeMap<Ticket, Caller>,
}

impl World {
    fn new() -> Self {
        let mut agent = Agent::new(Ns::ZERO, INSTANCE, None, Vec::new(), Vec::new());
        agent.set_user(user(AGENT));
        agent.handle(Ns::ZERO, Event::SessionUp { rack: "R".to_owned(), lease_ttl: Ns::secs(4) });
        Self {
            now: Ns::ZERO,
            agent,
            calls: BTreeMap::new(),
            to_record: BTreeMap::new(),
            disk: BTreeMap::new(),
            kernel: BTreeSet::new(),
            clearing: BTreeSet::new(),
            running: BTreeMap::new(),
            order: None,
            given_back: BTreeSet::new(),
            tickets: 0,
            open_tickets: BTreeMap::new(),
        }
    }

    fn take(&mut self, turn: Turn) {
        match turn {
            Turn::Order { number, foreign, wants, fenced } => self.order(number, foreign, &wants, fenced),
            Turn::HostAnswers { which, ok } if which % 3 == 0 && !self.clearing.is_empty() => {
                self.cleared(which, ok > 0);
            }
            Turn::HostAnswers { which, ok } => self.host_answers(which, ok),
            Turn::Attach { vm, pid, uid } => self.attach(vm, pid, uid),
            Turn::DiskAnswers { which, ok } => self.disk_answers(which, ok),
            Turn::Dies { which } => self.dies(which),
            Turn::Restart => self.restart(),
            Turn::Wait { ms } => {
                self.now = self.now.after(Ns::ms(ms));
                self.handle(Event::Tick);
            }
        }
    }

    fn handle(&mut self, event: Event) {
        self.agent.handle(self.now, event);
        while let Some(effect) = self.agent.poll_effect() {
            self.perform(effect);
        }
    }

    /// VM a has the even slices, VM b the odd ones, so that a slice never has two VMs.
    fn order(&mut self, number: u64, foreign: u8, wants: &[(u8, u32, u64)], fenced: bool) {
        let mut want = want(number);
        want.fenced = fenced;
        let mut slices = [BTreeSet::new(), BTreeSet::new()];
        for (what, slice, epoch) in wants {
            let holding = Holding { slice: SliceId(*slice), epoch: Epoch(*epoch) };
            match what {
                0 => drop(want.release.insert(holding, release(holding, false))),
                1 => drop(want.release.insert(holding, release(holding, true))),
                2 => {
                    let scrubbed = Holding { epoch: Epoch(epoch + 10), ..holding };
                    drop(want.scrub.insert(scrubbed, handle(scrubbed)));
                }
                _ => drop(slices[(slice % 2) as usize].insert(holding)),
            }
        }
        for (vm, slices) in ["a", "b"].into_iter().zip(slices) {
            if !slices.is_empty() && !fenced {
                let uid = (vm == "a").then(|| user(TENANT));
                want.vms.insert(reservation(vm), WantVm { uid, ..want_vm(vm, slices.into_iter()) });
            }
        }
        let rack = if foreign == 0 { "Q" } else { "R" };
        if foreign == 1 {
            want.instance = InstanceId(4);
        }
        self.send(rack, want, foreign > 1);
    }

    fn send(&mut self, rack: &str, want: Want, ours: bool) {
        let newest = self.order.as_ref().map_or(DesiredVersion::default(), |order| order.number);
        let obeyed = ours && want.number >= newest;
        let before = (self.agent.have(), self.calls.clone());
        let before_order = self.order.clone();
        if obeyed {
            self.given_back.retain(|holding| want.release.contains_key(holding));
            self.order = Some(want.clone());
        }
        let want = match before_order {
            Some(before) if want.number.revision.0.is_multiple_of(2) => {
                let change = change(&before, &want);
                let mut told = before;
                told.amend(change.clone());
                assert_eq!(told, want, "a change adds up to the whole");
                change
            }
            _ => want,
        };
        self.handle(Event::Want { rack: rack.to_owned(), want });
        if !obeyed {
            assert_eq!(
                before,
                (self.agent.have(), self.calls.clone()),
                "a stale or foreign order changed something"
            );
        }
    }

    fn host_answers(&mut self, which: usize, ok: u8) {
        let Some(holding) = self.calls.keys().copied().nth(which % self.calls.len().max(1)) else { return };
        let call = self.calls.remove(&holding).unwrap();
        let result = match (ok, &call) {
            (0, _) => Err(failure(FailedReason::Host)),
            (1, Effect::Online { check_zero: true, .. }) => Err(failure(FailedReason::NotZero)),
            _ => Ok(done(&self.agent, holding)),
        };
        if matches!((&call, &result), (Effect::Offline { .. } | Effect::Scrub { .. }, Ok(_))) {
            self.kernel.remove(&handle(holding).place);
        }
        if matches!((&call, &result), (Effect::Offline { .. }, Ok(_))) {
            self.running.values_mut().for_each(|vm| drop(vm.slices.remove(&holding))); // removed by force, if at all
        }
        self.handle(Event::Done { holding, result });
    }

    fn attach(&mut self, vm: u8, pid: u32, uid: u32) {
        self.tickets += 1;
        let (ticket, vm) = (Ticket(self.tickets), Name::new(["a", "b"][usize::from(vm)]).unwrap());
        let caller = Caller { process: process(pid), uid: user(uid) };
        self.open_tickets.insert(ticket, caller.clone());
        self.handle(Event::Attach { ticket, vm, caller });
    }

    fn disk_answers(&mut self, which: usize, ok: bool) {
        let Some(id) = self.to_record.keys().copied().nth(which % self.to_record.len().max(1)) else {
            return;
        };
        let record = self.to_record.remove(&id).unwrap();
        if ok {
            self.disk.insert(id, record);
        }
        let result = if ok { Ok(()) } else { Err("full".to_owned()) };
        self.handle(Event::Recorded { reservation: id, result });
    }

    fn dies(&mut self, which: usize) {
        let Some(id) = self.running.keys().copied().nth(which % self.running.len().max(1)) else { return };
        self.running.remove(&id);
        self.handle(Event::ProcessGone { reservation: id });
    }

    /// Crashes the agent; VMs and disk stay.
    fn restart(&mut self) {
        let found = self.disk.values().map(|record| Adopted {
            record: record.clone(),
            lives: self.running.contains_key(&record.reservation),
        });
        let found: Vec<_> = found.collect();
        self.calls.clear();
        self.clearing.clear();
        self.to_record.clear();
        self.given_back.clear();
        self.open_tickets.clear();
        self.order = None;
        let left = self.kernel.iter().cloned().collect();
        self.agent = Agent::new(self.now, INSTANCE, Some("R".to_owned()), found, left);
        self.agent.set_user(user(AGENT));
        self.handle(Event::SessionUp { rack: "R".to_owned(), lease_ttl: Ns::secs(4) });
    }

    /// Checks the invariants of every effect.
    fn perform(&mut self, effect: Effect) {
        match &effect {
            Effect::Online { holding, check_zero, .. } => {
                let recorded = self.disk.values().any(|record| record.slices.contains_key(holding));
                assert!(*check_zero || recorded, "{holding:?} was taken unseen");
                self.kernel.insert(handle(*holding).place);
                self.call(*holding, effect);
            }
            Effect::Offline { holding, .. } => {
                let forced = self.is_forced(*holding);
                assert!(forced || !self.has_user(*holding), "{holding:?} was taken from under a VM");
                self.call(*holding, effect);
            }
            Effect::Scrub { holding, .. } => {
                self.kernel.insert(handle(*holding).place);
                self.call(*holding, effect);
            }
            Effect::Clear { place } => self.clear(place),
            Effect::Record(record) => drop(self.to_record.insert(record.reservation, record.clone())),
            Effect::Forget(id) => {
                assert!(!self.running.contains_key(id), "a running VM was forgotten");
                self.disk.remove(id);
            }
            Effect::HandOut { ticket, record } => {
                let caller = self.open_tickets.remove(ticket).expect("a ticket is answered once");
                self.check_caller(record, &caller);
                self.hand_out(record);
            }
            Effect::Refuse { ticket, .. } => {
                assert!(self.open_tickets.remove(ticket).is_some(), "{ticket:?} was answered twice");
            }
            Effect::SendHave(have) => self.check_have(have),
            Effect::Watch { reservation, .. } => assert!(self.disk.contains_key(reservation)),
            Effect::Kill(id) => {
                assert!(self.order.as_ref().is_some_and(|o| o.fenced && named(o, *id).is_none()))
            }
            Effect::FreeLocal(id) => assert!(!self.running.contains_key(id)),
            Effect::Remember { .. } | Effect::HangUp(_) | Effect::Bounced(..) => {}
        }
    }

    fn call(&mut self, holding: Holding, effect: Effect) {
        assert!(!self.clearing.contains(&handle(holding).place), "two calls at once for one slice");
        let before = self.calls.insert(holding, effect);
        assert_eq!(before, None, "two calls at once for one slice");
        let scrubs = self.calls.values().filter(|call| matches!(call, Effect::Scrub { .. }));
        assert!(scrubs.count() <= SCRUBS_PER_HOST_MAX);
    }

    fn clear(&mut self, place: &Arc<str>) {
        let called = self.calls.keys().any(|holding| handle(*holding).place == *place);
        assert!(!called, "two calls at once for one slice");
        let used = self.running.values().flat_map(|vm| vm.slices.values()).any(|h| h.place == *place);
        assert!(!used, "{place} was cleared from under a VM");
        assert!(self.clearing.insert(Arc::clone(place)), "two calls at once for one slice");
    }

    fn cleared(&mut self, which: usize, ok: bool) {
        let Some(place) = self.clearing.iter().nth(which % self.clearing.len().max(1)).cloned() else {
            return;
        };
        self.clearing.remove(&place);
        if ok {
            self.kernel.remove(&place);
        }
        let result = if ok { Ok(()) } else { Err(failure(FailedReason::Host)) };
        self.handle(Event::Cleared { place, result });
    }

    fn is_forced(&self, holding: Holding) -> bool {
        let order = self.order.as_ref().and_then(|order| order.release.get(&holding));
        order.is_some_and(|release| release.force)
    }

    /// Memory is for one user and root, and a process serves one VM. The VM's own process may
    /// repeat the request as any user.
    fn check_caller(&self, record: &VmRecord, caller: &Caller) {
        assert!(record.process.is(&caller.process), "handed to another process than the one on record");
        let expected = if record.vm.as_str() == "a" { TENANT } else { AGENT };
        let permitted = [expected, 0].contains(&caller.uid.get());
        let again = self.running.contains_key(&record.reservation);
        assert!(permitted || again, "VM {} was handed to user {}", record.vm, caller.uid);
        let mut others = self.running.iter().filter(|(id, _)| **id != record.reservation);
        assert!(!others.any(|(_, vm)| vm.process.is(&caller.process)), "one process is two VMs");
    }

    fn hand_out(&mut self, record: &VmRecord) {
        let on_disk = self.disk.get(&record.reservation).map(|found| &found.process);
        assert_eq!(on_disk, Some(&record.process), "handed out before it was on record");
        for holding in record.slices.keys() {
            assert_eq!(self.agent.slices.get(holding), Some(&Stand::Online(handle(*holding))));
            let other = self
                .running
                .values()
                .any(|vm| !vm.process.is(&record.process) && vm.slices.contains_key(holding));
            assert!(!other, "{holding:?} has two users");
        }
        self.running.insert(record.reservation, record.clone());
    }

    fn has_user(&self, holding: Holding) -> bool {
        self.running.values().any(|vm| vm.slices.contains_key(&holding))
    }

    /// Slices taken by force before a restart of the agent are still recorded, and wait for the
    /// VM's end.
    fn is_on_record(&self, holding: Holding) -> bool {
        let live = self.disk.iter().filter(|(id, _)| self.running.contains_key(id));
        live.into_iter().any(|(_, record)| record.slices.contains_key(&holding))
    }

    fn check_have(&mut self, have: &Have) {
        let newest = self.order.as_ref().map_or(DesiredVersion::default(), |order| order.number);
        assert_eq!(have.number, newest);
        for holding in &have.released {
            let forced = self.is_forced(*holding);
            assert!(forced || !self.has_user(*holding), "{holding:?} was said to be given back");
            assert!(!self.kernel.contains(&handle(*holding).place), "{holding:?} is still there");
        }
        let released: BTreeSet<_> = have.released.iter().copied().collect();
        assert!(self.given_back.is_subset(&released), "said to be given back, and then no longer");
        self.given_back = released;
        let vms: Vec<_> = self.running.keys().filter(|_| have.whole).collect();
        assert_eq!(have.vms.keys().collect::<Vec<_>>(), vms);
        assert!(!have.clean || self.running.is_empty() && self.calls.is_empty() && self.kernel.is_empty());
        for failed in have.failed.iter().filter(|failed| !self.given_back.contains(&failed.holding)) {
            let left = self.kernel.contains(&handle(failed.holding).place);
            let lives = self.has_user(failed.holding) || self.is_on_record(failed.holding);
            // A slice that cannot be closed remains, and the report contains it.
            let gives_back = self.order.as_ref().is_some_and(|order| must_go(order, failed.holding));
            assert!(!left || lives || gives_back, "{:?} failed, and something is left", failed.holding);
        }
    }

    /// Everything responds and no process ends any more: the desired state is reached, as far as
    /// the running VMs permit.
    fn settle(&mut self) {
        for _ in 0..200 {
            while !self.calls.is_empty() || !self.to_record.is_empty() || !self.clearing.is_empty() {
                self.host_answers(0, 2);
                self.cleared(0, true);
                self.disk_answers(0, true);
            }
            self.now = self.now.after(HOST_RETRY);
            self.handle(Event::Tick);
        }
        let Some(order) = self.order.clone() else { return };
        let have = self.agent.have();
        for (holding, release) in &order.release {
            let waits = !release.force && (self.has_user(*holding) || self.is_on_record(*holding));
            assert!(have.released.contains(holding) || waits, "{holding:?} stays");
        }
        for holding in order.scrub.keys() {
            assert!(have.scrubbed.iter().any(|s| s.holding == *holding), "{holding:?} was not scrubbed");
        }
        for (_, vm) in order.vms.iter().filter(|(id, _)| !have.ended.contains(id)) {
            for holding in vm.slices.keys().filter(|holding| !order.release.contains_key(holding)) {
                let failed = have.failed.iter().any(|failed| failed.holding == *holding);
                assert!(failed || have.online.contains(holding), "{holding:?} did not come online");
            }
        }
        assert!(self.open_tickets.is_empty(), "somebody still waits");
        assert!(
            !order.fenced || have.clean || !self.running.is_empty(),
            "a fenced host without VMs is not clean"
        );
    }
}

fn named(order: &Want, id: ReservationId) -> Option<&WantVm> {
    order.vms.get(&id)
}

/// Returns whether a desired state closes a slice: by a release, a fence, or a later owner.
fn must_go(order: &Want, holding: Holding) -> bool {
    let named = order.vms.values().flat_map(|vm| vm.slices.keys()).chain(order.release.keys());
    let mut later = named.chain(order.scrub.keys()).filter(|other| other.slice == holding.slice);
    order.fenced || order.release.contains_key(&holding) || later.any(|other| other.epoch > holding.epoch)
}

/// Returns the parts of a desired state about one VM and its current and former slices.
fn part(order: &Want, odd: bool) -> Want {
    let mine = |slice: SliceId| (slice.0 % 2 == 1) == odd;
    let mut part = order.clone();
    part.vms.retain(|id, _| (*id == reservation("b")) == odd);
    part.release.retain(|holding, _| mine(holding.slice));
    part.scrub.retain(|holding, _| mine(holding.slice));
    part
}

/// Expresses a desired state as changes of another.
fn change(before: &Want, after: &Want) -> Want {
    let mut change = Want { base: Some(before.number), ..want(after.number.revision.0) };
    (change.instance, change.fenced) = (after.instance, after.fenced);
    for odd in [false, true] {
        let (old, new) = (part(before, odd), part(after, odd));
        if (&old.vms, &old.release, &old.scrub) == (&new.vms, &new.release, &new.scrub) {
            continue;
        }
        change.no_more.vms.extend(old.vms.keys().filter(|id| !new.vms.contains_key(id)));
        let said: BTreeSet<SliceId> = new.slices().collect();
        change.no_more.slices.extend(old.slices().filter(|slice| !said.contains(slice)));
        change.vms.extend(new.vms);
        change.release.extend(new.release);
        change.scrub.extend(new.scrub);
    }
    change
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn agent_invariants_hold_after_random_events(story in prop::collection::vec(turn(), 0..80)) {
        let mut world = World::new();
        story.into_iter().for_each(|turn| world.take(turn));
        world.settle();
    }
}
