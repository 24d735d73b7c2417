//! Client workload: schedulers, launchers and operators send, repeat and contradict requests, stop
//! waiting, and check the replies.

use std::collections::BTreeMap;

use pool::{
    audit::Actor,
    denied::Denied,
    ledger::{Place, Reserve, Target},
    manager::{Answer, Ask, Event, ReservationView, Token},
    record::{Record, RequestKey, Scheduling, Stage},
    slice::{Quarantine, Slot, State},
};
use rand::Rng as _;
use units::{Bytes, HostId, Name, Ns, RequestId, ReservationId, SliceId, UserId};

use super::{
    Happening, World,
    check::{Acked, Demand, holder},
    device::Device,
    migrations::AskedMove,
    weather::name,
};

/// Number of the latest requests that clients act upon.
const TENANTS_ACTIVE: usize = 10;
/// Number of names that VMs share.
const VM_NAMES: usize = 12;

#[derive(Debug, Default)]
pub(super) struct People {
    tenants: Vec<Tenant>,
    pub(super) asked: BTreeMap<Token, Asked>,
    /// The store's disk has little space.
    store_low: bool,
}

/// A client with a request for a VM's memory.
#[derive(Clone, Debug)]
struct Tenant {
    reserve: Reserve,
    host: HostId,
    id: Option<ReservationId>,
}

#[derive(Clone, Debug)]
pub(super) enum Asked {
    Reserve {
        tenant: usize,
        content: Box<Reserve>,
        wait: bool,
        /// The store's disk had space for it.
        room: bool,
    },
    Wait,
    Commit,
    Release,
    /// A fence of a connected or disconnected host.
    Fence {
        connected: bool,
    },
    Configure,
    Schedule(Place),
    Move(AskedMove),
}

impl World {
    pub(super) fn people_act(&mut self) {
        if self.calm {
            return;
        }
        let pause = self.about(self.weather.act_every);
        self.after(pause, Happening::PeopleAct);
        match self.rng.random_range(0..100) {
            0..24 => self.reserve_anew(),
            24..32 => self.reserve_again(false),
            32..34 => self.reserve_again(true),
            34..40 => self.wait_ready(),
            40..47 => self.commit(),
            47..59 => self.release_some(),
            59..77 => self.launch_some(),
            77..82 => self.schedule_some(),
            82..88 => self.answer_move(),
            88..90 if self.weather.rack_changes => self.change_rack(),
            88..92 => self.fence_some(),
            92..95 => self.let_back_some(),
            95..96 => self.stop_waiting(),
            96..97 => self.set_store_low(!self.people.store_low),
            97..99 if self.weather.old_backups && self.chance(0.8) => self.change_rack(),
            97..99 => self.back_up(),
            _ => self.kill_some(),
        }
    }

    fn back_up(&mut self) {
        self.program.store.backup();
        let devices = self.devices.iter_mut().filter(|_| self.rng.random_bool(0.5));
        devices.for_each(Device::take_snapshot);
    }

    /// Sends a request if the manager is running.
    pub(super) fn ask(&mut self, ask: Ask, asked: Asked) {
        self.demand(ask, asked, None);
    }

    /// Sends a request and records its demand on memory.
    pub(super) fn demand(&mut self, ask: Ask, asked: Asked, demand: Option<Demand>) {
        if self.program.is_open() {
            let token = self.program.token();
            self.say(|| format!("{} asks {}", token.0, brief(&ask)));
            self.people.asked.insert(token, asked);
            if let Some(demand) = demand {
                self.truth.demand(token, demand);
            }
            self.manager(Event::Ask(token, ask));
        }
    }

    fn reserve_anew(&mut self) {
        let number = self.people.tenants.len();
        let Some(host) = self.any(&self.hosts()) else { return };
        let client = name("c", self.rng.random_range(0..3));
        let id = RequestId::new(&format!("r{number}")).expect("a letter and a number are a request id");
        let reserve = Reserve {
            request: RequestKey { client, id },
            host: self.machine(host).name.clone(),
            vm: name("v", self.rng.random_range(0..VM_NAMES)),
            slices: self.rng.random_range(1..=3),
            local: Bytes::gib(1),
            cores: 1,
            pinned: false,
            commit_within: Ns::ms(self.rng.random_range(200..5000)),
            uid: (number % 2 == 1).then(|| user(number)),
        };
        self.people.tenants.push(Tenant { reserve, host, id: None });
        self.ask_reserve(number, false);
    }

    fn some_tenant(&mut self) -> Option<usize> {
        let count = self.people.tenants.len();
        (count > 0).then(|| self.rng.random_range(count.saturating_sub(TENANTS_ACTIVE)..count))
    }

    /// Returns the VM of one of the latest requests.
    pub(super) fn some_vm(&mut self) -> Option<Name> {
        self.some_tenant().map(|tenant| self.people.tenants[tenant].reserve.vm.clone())
    }

    fn reserve_again(&mut self, altered: bool) {
        if let Some(tenant) = self.some_tenant() {
            self.ask_reserve(tenant, altered);
        }
    }

    fn ask_reserve(&mut self, tenant: usize, altered: bool) {
        let mut content = self.people.tenants[tenant].reserve.clone();
        content.slices += u32::from(altered);
        let wait = self.chance(0.3).then(|| Ns::ms(500));
        let (room, boxed) = (!self.people.store_low, Box::new(content.clone()));
        if room && self.program.is_open() {
            self.truth.had_room.insert(content.request.clone());
        }
        let asked = Asked::Reserve { tenant, content: boxed, wait: wait.is_some(), room };
        self.ask(Ask::Reserve { reserve: content, wait }, asked);
    }

    fn some_target(&mut self) -> Option<(usize, Target)> {
        let tenant = self.some_tenant()?;
        let Tenant { reserve, id, .. } = &self.people.tenants[tenant];
        let (vm, id) = (Target::Vm(reserve.vm.clone()), id.map(Target::Reservation));
        let by_id = self.chance(0.7);
        Some((tenant, id.filter(|_| by_id).unwrap_or(vm)))
    }

    fn wait_ready(&mut self) {
        if let Some((_, target)) = self.some_target() {
            let within = self.between(Ns::ZERO, Ns::secs(3));
            self.ask(Ask::WaitReady { target, within }, Asked::Wait);
        }
    }

    fn commit(&mut self) {
        if let Some((_, target)) = self.some_target() {
            self.ask(Ask::Commit { target, actor: Actor::Manager }, Asked::Commit);
        }
    }

    fn release_some(&mut self) {
        if let Some((tenant, target)) = self.some_target() {
            let force = self.chance(0.25);
            let vm = self.people.tenants[tenant].reserve.vm.clone();
            self.release(vm, target, force);
        }
    }

    pub(super) fn release(&mut self, vm: Name, target: Target, force: bool) {
        let reason = if force { "by force".into() } else { String::new() };
        let ask = Ask::Release { target, force, reason, actor: Actor::Manager };
        self.demand(ask, Asked::Release, force.then_some(Demand::Force(vm)));
    }

    fn launch_some(&mut self) {
        let Some(tenant) = self.some_tenant() else { return };
        let Tenant { reserve, host, .. } = self.people.tenants[tenant].clone();
        let elsewhere = self.chance(0.05);
        let host = if elsewhere { self.any(&self.hosts()).unwrap_or(host) } else { host };
        self.launch(host, &reserve.vm);
    }

    fn schedule_some(&mut self) {
        let hosts = self.rack.spec().hosts.iter().map(|host| Place::Host(host.name.clone()));
        let emcs = self.rack.spec().emcs.iter().map(|emc| Place::Emc(emc.name.clone()));
        let places: Vec<Place> = hosts.chain(emcs).collect();
        let to = [Scheduling::Enabled, Scheduling::Enabled, Scheduling::Cordoned, Scheduling::Draining];
        let (place, to) = (self.any(&places), self.any(&to));
        if let Some((place, to)) = place.zip(to) {
            self.schedule(place, to);
        }
    }

    pub(super) fn schedule(&mut self, place: Place, to: Scheduling) {
        let demand = match place {
            Place::Slice(slice) => Some(Demand::LetBack(slice)),
            Place::Host(_) | Place::Emc(_) => None,
        };
        let asked = Asked::Schedule(place.clone());
        let ask = Ask::Schedule { place, to, actor: Actor::Manager, reason: "maintenance".into() };
        self.demand(ask, asked, demand);
    }

    /// Operators confirm a power-off only for machines that are off.
    fn fence_some(&mut self) {
        let Some(host) = self.any(&self.hosts()) else { return };
        let off = !self.machine(host).up;
        let name = self.machine(host).name.clone();
        let demand = Demand::Fence(name.clone());
        let ask = Ask::Fence { host: name, powered_off: off, actor: Actor::Manager, reason: "lost".into() };
        let connected = self.speaks(host);
        self.demand(ask, Asked::Fence { connected }, Some(demand));
    }

    /// An operator uncordons a quarantined slice.
    pub(super) fn let_back_some(&mut self) {
        let slices = self.quarantined();
        if let Some(slice) = self.any(&slices) {
            self.let_back(slice);
        }
    }

    pub(super) fn quarantined(&self) -> Vec<SliceId> {
        // After a restore, slices return by themselves, except those of hosts that the backup lacks.
        let returns =
            |slot: &Slot, why| matches!(why, Quarantine::Restored { .. }) && self.knows_holder(slot);
        let quarantined = |record: &Record| match record {
            Record::Slice(slice, slot) => match slot.state {
                State::Quarantined(why) => (!returns(slot, why)).then_some(*slice),
                _ => None,
            },
            _ => None,
        };
        self.truth.records().filter_map(quarantined).collect()
    }

    fn knows_holder(&self, slot: &Slot) -> bool {
        holder(slot).is_none_or(|host| self.truth.has_host(host))
    }

    /// Uncordons a slice, also one that a process uses: the manager must refuse, or the process must keep
    /// it. A host outside the rack is powered off before.
    pub(super) fn let_back(&mut self, slice: SliceId) {
        let slot = self.truth.slot(slice);
        if let Some(stranger) = holder(&slot).filter(|_| !self.knows_holder(&slot)) {
            self.power_off(stranger);
        }
        self.schedule(Place::Slice(slice), Scheduling::Enabled);
    }

    fn stop_waiting(&mut self) {
        let leaves = |asked: &Asked| !matches!(asked, Asked::Move(_));
        let waiting = self.people.asked.iter().filter(|(_, asked)| leaves(asked)).map(|(token, _)| *token);
        let waiting: Vec<Token> = waiting.collect();
        if let Some(token) = self.any(&waiting) {
            self.people.asked.remove(&token);
            self.manager(Event::Gone(token));
        }
    }

    /// Moves the free space of the store's disk below or above the limit for new reservations.
    pub(super) fn set_store_low(&mut self, low: bool) {
        self.people.store_low = low;
        self.report_store_space();
    }

    /// The manager's program checks the free space of the store's disk, also at start.
    pub(super) fn report_store_space(&mut self) {
        let low = self.people.store_low;
        self.manager(Event::StoreSpace { low });
    }

    fn kill_some(&mut self) {
        let Some(host) = self.any(&self.hosts()) else { return };
        let pids: Vec<_> = self.machine(host).processes.keys().copied().collect();
        if let Some(pid) = self.any(&pids) {
            self.end_process(host, pid);
        }
    }

    /// Drops outstanding requests after a crash of the manager.
    pub(super) fn forget_askers(&mut self) {
        self.people.asked.clear();
        self.truth.demands_cut_off();
    }

    pub(super) fn on_reply(&mut self, token: Token, answer: Result<Answer, Denied>) {
        self.truth.demand_answered(token, &answer);
        if self.program.running.as_ref().is_some_and(|running| running.ready == Some(token)) {
            return self.on_ready(&answer);
        }
        let Some(asked) = self.people.asked.remove(&token) else { return };
        self.say(|| format!("{} hears {}", token.0, brief_answer(&answer)));
        self.check_full(&asked, &answer);
        match (asked, answer) {
            (Asked::Configure, answer) => self.rack_answered(&answer),
            (Asked::Reserve { tenant, content, wait, .. }, Ok(Answer::Reservation(view))) => {
                self.on_reserved(tenant, &content, &view);
                if wait {
                    self.check_ready(&view);
                }
            }
            (Asked::Reserve { content, wait, .. }, Err(denied)) => {
                self.check_repeat_refused(&content, wait, &denied);
            }
            (Asked::Wait, Ok(Answer::Reservation(view))) => self.check_ready(&view),
            (Asked::Commit, Ok(Answer::Reservation(view))) => self.note_stage(&view, false),
            (Asked::Release, Ok(Answer::Reservation(view))) => {
                self.story.counts.releases_without_room += u64::from(self.people.store_low);
                self.note_stage(&view, true);
            }
            (Asked::Schedule(Place::Host(_)), Ok(_)) => self.story.counts.hosts_scheduled += 1,
            (Asked::Schedule(Place::Emc(_)), Ok(_)) => self.story.counts.emcs_scheduled += 1,
            (Asked::Move(asked), answer) => self.move_answered(&asked, &answer),
            (Asked::Fence { connected: true }, Ok(_)) => {
                self.blame("guests outlive us", "a host that speaks to the manager is fenced".into());
            }
            _ => {}
        }
    }

    /// Checks that only requests for new memory are refused for lack of disk space, and only while it is
    /// short.
    fn check_full(&mut self, asked: &Asked, answer: &Result<Answer, Denied>) {
        if matches!(answer, Err(Denied::StoreFull)) && !matches!(asked, Asked::Reserve { room: false, .. }) {
            self.blame("a full disk stops nothing but new reservations", format!("{asked:?} is refused"));
        }
    }

    /// The manager accepts connections once its rack.toml is durable, and does not start without it.
    fn on_ready(&mut self, answer: &Result<Answer, Denied>) {
        let Some(running) = &mut self.program.running else { return };
        running.ready = None;
        running.open = answer.is_ok();
        self.rack_answered(answer);
        if answer.is_err() {
            self.kill_manager();
            self.after(Ns::ms(10), Happening::ManagerStarts);
        }
    }

    /// Checks that a reply matches its request, is durable, and equals earlier replies.
    fn on_reserved(&mut self, tenant: usize, content: &Reserve, view: &ReservationView) {
        let made = &view.reservation;
        let asked = (&content.vm, content.slices as usize, &content.request, content.uid);
        let here = view.host == content.host || !self.truth.has_host(made.host);
        if !here || asked != (&made.vm, made.slices.len(), &made.request, made.uid) {
            self.blame("a request gets what it asked", format!("{content:?} gets {view:?}"));
        }
        if self.truth.reservation(view.id) != Some(made) {
            self.blame("durable before done", format!("{view:?} is not on disk"));
        }
        let new = Acked { id: view.id, slices: made.slices.clone(), committed: false, ended: false };
        let known = self.truth.acked.get(&content.request).cloned();
        if let Some(known) = known.as_ref().filter(|k| (k.id, &k.slices) != (new.id, &new.slices)) {
            self.blame("a repeated request gets the same answer", format!("{known:?}, then {new:?}"));
        }
        if known.is_none() {
            self.story.counts.reserved += 1;
            self.truth.acked.insert(content.request.clone(), new);
        }
        self.people.tenants[tenant].id = Some(view.id);
        self.people.tenants[tenant].reserve = content.clone();
    }

    fn check_repeat_refused(&mut self, content: &Reserve, wait: bool, denied: &Denied) {
        let Some(acked) = self.truth.acked.get(&content.request).cloned() else { return };
        let other = acked.slices.len() != content.slices as usize;
        let fits = match denied {
            Denied::StoreFailed | Denied::Starting(_) => true,
            Denied::RequestReused { .. } => other,
            Denied::NotReadyInTime { .. } | Denied::WrongState { .. } | Denied::TooMany { .. } => {
                wait && !other
            }
            _ => false,
        };
        if !fits {
            self.blame("a repeated request gets the same answer", format!("{acked:?}, then {denied:?}"));
        }
    }

    /// Checks that every slice of a ready reservation is online.
    fn check_ready(&mut self, view: &ReservationView) {
        let online = |slice: &SliceId| matches!(self.truth.slot(*slice).state, State::Online(owner) if owner.reservation == view.id);
        let ready = view.reservation.slices.iter().all(online);
        if !ready || !view.reservation.is_active() {
            self.blame("durable before done", format!("{view:?} is said to be ready"));
        }
    }

    fn note_stage(&mut self, view: &ReservationView, release: bool) {
        let ended = matches!(view.reservation.stage, Stage::Ended { .. });
        if self.truth.reservation(view.id) != Some(&view.reservation) || (release && !ended) {
            self.blame("durable before done", format!("{view:?} is not on disk"));
        }
        for acked in self.truth.acked.values_mut().filter(|acked| acked.id == view.id) {
            acked.committed = true;
            acked.ended |= ended;
        }
    }
}

fn brief(ask: &Ask) -> String {
    match ask {
        Ask::Reserve { reserve, wait } => format!(
            "reserve {} of {} on {} as {} wait={}",
            reserve.slices,
            reserve.vm,
            reserve.host,
            reserve.request.id.as_str(),
            wait.is_some()
        ),
        other => format!("{other:?}"),
    }
}

/// Returns the user of a tenant's VMs on their host.
fn user(tenant: usize) -> UserId {
    u32::try_from(tenant).ok().and_then(|number| UserId::new(number).ok()).expect("tenants are few")
}

fn brief_answer(answer: &Result<Answer, Denied>) -> String {
    match answer {
        Ok(Answer::Reservation(view)) => {
            format!("{} {:?} {:?}", view.id, view.reservation.stage, view.reservation.slices)
        }
        Ok(other) => format!("{other:?}"),
        Err(denied) => format!("no: {denied}"),
    }
}
