//! A rack around one manager: a disk, devices and agents that do what a line of words says, and no more.
//!
//! Words in: `up:h1` (`up:h1#7` instance 7, `up:h1/b2` boot b2, `copy:h1/b2` the same while the old connection stays), `down:h1`, `reserve:a@h1=2` (`~` waits 1 s, `!5` takes
//! request 5, `!c/5` request 5 of client c), `validate:...`, `wait:a`, `gone:a`, `commit:a`, `release:a`, `force:a`, `cordon:h1`, `drain:e1`,
//! `enable:0`, `fence:h1`, `vouch:h1`, `decline:a` (its move), `rack:...`; `stored`, `lost` (a write that failed), `torn` (one that failed and is
//! on disk all the same), `reload`, `restart`, `restore`, `low`, `roomy`; `device` (all calls are answered),
//! `break:e1`, `mend:e1`, `fault:3`, `repair:3` (grants and revocations of slice 3 fail), `stops:e1` (its operator's command stops a machine; else there is none); `have:h1:PARTS`, `obey:h1`, `tick:MS`, `sees:h1=3` (of a shared device, as
//! it says when it next connects), `go` (all do their part until nothing is left to do).
//! Parts of a report: `online=0.1+1.1`, `released=`, `scrubbed=`, `half=` (scrubbed, not all verified), `dirty=`,
//! `broken=`, `ended=1`, `vm1a=0.1` (a VM that runs: an agent that obeys reports it from then on), `clean`, `early` (it
//! answers no order), `part` (a partial report).
//! Questions: `slices`, `alarms`, `state:h1`.
//!
//! Words out: `store`, `reload`, `e1.grant(0.1>h1)`, `h1<a=0.1;release=1.1`, `h1.close(LeaseOver)`, `reserve:a->ok(0,1)`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;

use units::limits::DESIRED_STATE_RESEND_AFTER;
use units::{Bytes, EmcId, Epoch, HostId, InstanceId, Name, Ns, RequestId, ReservationId, SliceId, UnixMs};

use crate::{
    audit::{Actor, Subject},
    denied::Denied,
    ledger::{Place, RackSpec, Reserve, Target, When},
    manager::{
        Answer, Ask, Closed, Contents, DeviceCall, DeviceDone, DeviceFailure, Effect, Event, Grant, Manager,
        SessionId, Settings, SliceError, Token,
    },
    protocol::{Failed, FailedReason, Have, HaveVm, Hello, Holding, Scrubbed, SeenDevice, Want},
    record::{Key, Meta, MigrationAnswer, Record, RequestKey, Scheduling},
    slice::{Scrub, Slot, State},
};

/// The lease in every story.
const LEASE: Ns = Ns::secs(4);
/// How long a host is silent past its lease before it is fenced.
const FENCE_AFTER: Ns = Ns::secs(60);
/// Two EMCs of four slices; the third host reaches only the second.
pub(super) const RACK: &str = "e1=4 e2=4 h1:e1+e2 h2:e1+e2 h3:e2";
/// The same with a second EMC that cannot cut hosts off.
pub(super) const SHARED: &str = "e1=4 e2=4! h1:e1+e2 h2:e1+e2 h3:e2";

pub(super) struct Rig {
    pub(super) manager: Manager,
    pub(super) now: Ns,
    pub(super) disk: BTreeMap<Key, Record>,
    to_store: VecDeque<(u64, Arc<Vec<Record>>)>,
    to_reload: bool,
    /// The highest generation of the ledger so far: a restore continues above it.
    generation: u64,
    devices: BTreeMap<EmcId, Device>,
    agents: BTreeMap<HostId, Agent>,
    sessions: BTreeMap<SessionId, HostId>,
    connections: u64,
    /// Slices that hosts see of each shared device, if not all.
    sees: BTreeMap<HostId, u32>,
    /// State changes of slices as they were published, and how many orders were sent as changes of the one before.
    pub(super) transitions: Vec<(SliceId, &'static str, &'static str)>,
    pub(super) orders_of_changes: u32,
    callers: Vec<String>,
    said: Vec<String>,
}

#[derive(Default)]
struct Device {
    broken: bool,
    /// Slices whose calls fail while the device works.
    faulty: BTreeSet<SliceId>,
    calls: VecDeque<DeviceCall>,
    granted: BTreeMap<SliceId, (Epoch, HostId)>,
    highest: BTreeMap<SliceId, Epoch>,
    /// Slices with bytes of an owner, until a scrubber was there.
    dirty: BTreeSet<SliceId>,
    /// Grants asked for since the manager or the device last had reason to doubt.
    asked: BTreeSet<(SliceId, Epoch)>,
    /// It cannot cut off by itself; and whether machines can be stopped for it.
    shared: bool,
    slices: Vec<SliceId>,
    stops: bool,
    /// Hosts that received a slice and have not released it: they reach it on a shared device.
    reached: BTreeSet<(SliceId, Epoch, HostId)>,
}

#[derive(Default)]
struct Agent {
    instance: u64,
    boot: String,
    session: Option<SessionId>,
    order: Option<(Want, Ns)>,
    answered: bool,
    /// VMs that it has reported and that have not ended; its later reports name them too.
    running: BTreeMap<ReservationId, HaveVm>,
}

pub(super) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn holding(text: &str) -> Holding {
    let (slice, epoch) = text.split_once('.').expect("slice.epoch");
    Holding { slice: SliceId(slice.parse().unwrap()), epoch: Epoch(epoch.parse().unwrap()) }
}

fn holdings(text: &str) -> Vec<Holding> {
    text.split('+').filter(|one| !one.is_empty()).map(holding).collect()
}

fn list(holdings: impl IntoIterator<Item = Holding>) -> String {
    let words: Vec<_> = holdings.into_iter().map(|h| format!("{}.{}", h.slice, h.epoch)).collect();
    words.join("+")
}

pub(super) fn scrubbed(holding: Holding, verified: Bytes) -> Scrubbed {
    Scrubbed { holding, started: UnixMs(1), ended: UnixMs(2), verified }
}

pub(super) fn settings() -> Settings {
    Settings { lease_ttl: LEASE, fence_after: Some(FENCE_AFTER) }
}

impl Rig {
    /// A rack whose devices have been compared and whose agents have yet to connect.
    pub(super) fn of(rack: &str) -> Self {
        let mut rig = Self {
            manager: Manager::new(settings()),
            now: Ns::secs(1),
            disk: BTreeMap::new(),
            to_store: VecDeque::new(),
            to_reload: false,
            generation: 1,
            devices: BTreeMap::new(),
            agents: BTreeMap::new(),
            sessions: BTreeMap::new(),
            connections: 0,
            sees: BTreeMap::new(),
            transitions: Vec::new(),
            orders_of_changes: 0,
            callers: Vec::new(),
            said: Vec::new(),
        };
        let meta = Meta::new("rack".to_owned());
        rig.disk.insert(Key::Meta, Record::Meta(meta.clone()));
        rig.event(Event::Loaded { meta, records: Vec::new(), restored: false });
        rig.ask("found", Ask::Configure(RackSpec::in_words(rack)));
        rig.run("stored device");
        rig
    }

    /// Returns a rack of the usual shape with all agents connected and up to date.
    pub(super) fn up() -> Self {
        Self::up_as(RACK)
    }

    /// Returns a rack with all agents connected and up to date.
    pub(super) fn up_as(rack: &str) -> Self {
        let mut rig = Self::of(rack);
        rig.run("up:h1 up:h2 up:h3 go");
        rig
    }

    /// Runs lines of words, each with the expected result if one is given.
    pub(super) fn tells(&mut self, story: &str) -> &mut Self {
        let (mut told, mut as_told) = (String::new(), true);
        for line in story.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (words, expected) = line.split_once('|').map_or((line, None), |(w, e)| (w, Some(e.trim())));
            let said = self.run(words);
            let differs = expected.is_some_and(|expected| said != expected);
            as_told &= !differs;
            let _ = writeln!(told, "{} {} | {said}", if differs { "->" } else { "  " }, words.trim());
        }
        assert!(as_told, "it went otherwise:\n{told}");
        self
    }

    /// Runs words, and returns their effects.
    pub(super) fn run(&mut self, words: &str) -> String {
        self.said.clear();
        words.split_whitespace().for_each(|word| self.word(word));
        std::mem::take(&mut self.said).join(" ")
    }

    fn word(&mut self, word: &str) {
        let (verb, rest) = word.split_once(':').unwrap_or((word, ""));
        match verb {
            "up" => self.agent_up(rest, true),
            "copy" => self.agent_up(rest, false),
            "down" => self.agent_down(rest),
            "have" => self.have(rest),
            "obey" => self.obey(self.host(rest)),
            "stored" => self.stored(true, true),
            "lost" => self.stored(false, false),
            "torn" => self.stored(false, true),
            "reload" => self.load(false),
            "sees" => {
                let (host, slices) = rest.split_once('=').unwrap();
                self.sees.insert(self.host(host), slices.parse().unwrap());
            }
            "restart" | "restore" => self.restart(verb == "restore"),
            "low" | "roomy" => self.event(Event::StoreSpace { low: verb == "low" }),
            "device" => self.answer_devices(),
            "break" | "mend" => self.device(rest).broken = verb == "break",
            "stops" => self.device(rest).stops = true,
            "fault" => self.slice_works(SliceId(rest.parse().unwrap()), false),
            "repair" => self.slice_works(SliceId(rest.parse().unwrap()), true),
            "tick" => {
                self.now = self.now.after(Ns::ms(rest.parse().unwrap()));
                self.event(Event::Tick);
            }
            "go" => self.go(),
            "slices" => self.slices(),
            "alarms" => {
                let reasons: Vec<_> = self.manager.alarms().iter().map(|a| a.reason.to_owned()).collect();
                self.said.extend(reasons);
            }
            "state" => self.said.push(format!("{:?}", self.manager.host_state(self.host(rest)))),
            "gone" => {
                let waits = |caller: &String| caller.split_once(':').is_some_and(|(_, vm)| vm == rest);
                let token = self.callers.iter().rposition(waits).expect("somebody who waits");
                self.event(Event::Gone(Token(token as u64)));
            }
            _ => {
                let ask = self.asked(verb, rest);
                let about = rest.split(['@', '~', '!']).next().unwrap();
                self.ask(&format!("{verb}:{about}"), ask);
            }
        }
    }

    fn asked(&self, verb: &str, rest: &str) -> Ask {
        let actor = Actor::Client(name("tester"));
        let target = || Target::Vm(name(rest));
        let schedule =
            |to| Ask::Schedule { place: place(rest), to, actor: actor.clone(), reason: "why".into() };
        let release =
            |force| Ask::Release { target: target(), force, reason: String::new(), actor: actor.clone() };
        let fence = |powered_off| Ask::Fence {
            host: name(rest),
            powered_off,
            actor: actor.clone(),
            reason: "why".into(),
        };
        match verb {
            "reserve" => {
                let (rest, wait) =
                    rest.strip_suffix('~').map_or((rest, None), |rest| (rest, Some(Ns::secs(1))));
                Ask::Reserve { reserve: reserve(rest), wait }
            }
            "validate" => Ask::Validate(reserve(rest)),
            "wait" => Ask::WaitReady { target: target(), within: Ns::secs(1) },
            "commit" => Ask::Commit { target: target(), actor },
            "release" => release(false),
            "force" => release(true),
            "cordon" => schedule(Scheduling::Cordoned),
            "drain" => schedule(Scheduling::Draining),
            "enable" => schedule(Scheduling::Enabled),
            "fence" => fence(false),
            "vouch" => fence(true),
            "decline" => {
                let (answer, words) = (MigrationAnswer::Declined, "busy".to_owned());
                Ask::ResolveMigration { vm: name(rest), answer, words, actor }
            }
            "rack" => Ask::Configure(RackSpec::in_words(&rest.replace('&', " "))),
            other => panic!("no word {other:?}"),
        }
    }

    fn ask(&mut self, caller: &str, ask: Ask) {
        self.callers.push(caller.to_owned());
        self.event(Event::Ask(Token(self.callers.len() as u64 - 1), ask));
    }

    pub(super) fn when(&self) -> When {
        When { now: self.now, wall: UnixMs(self.now.as_ms()) }
    }

    pub(super) fn event(&mut self, event: Event) {
        let when = self.when();
        self.manager.handle(when, event);
        self.manager.settle(when);
        while let Some(effect) = self.manager.poll_effect() {
            self.perform(effect);
        }
    }

    /// Several events before anything is done about them, as the driver takes them in.
    pub(super) fn burst(&mut self, words: &[&str]) -> String {
        self.said.clear();
        for word in words {
            let (verb, rest) = word.split_once(':').unwrap();
            let ask = self.asked(verb, rest);
            self.callers.push(format!("{verb}:{}", rest.split('@').next().unwrap()));
            let token = Token(self.callers.len() as u64 - 1);
            self.manager.handle(self.when(), Event::Ask(token, ask));
        }
        self.event(Event::Gone(Token(u64::MAX)));
        std::mem::take(&mut self.said).join(" ")
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, records } => {
                self.to_store.push_back((batch, records));
                self.said.push("store".into());
            }
            Effect::Reload => {
                self.to_reload = true;
                self.said.push("reload".into());
            }
            Effect::Reply(Token(token), answer) => self.reply(token, &answer),
            Effect::Device(emc, call) => self.device_call(emc, call),
            Effect::Send(session, want) => self.order(session, want),
            Effect::RequestReport(session) => {
                let host = self.sessions[&session];
                self.said.push(format!("{}<report", self.host_name(host)));
            }
            Effect::Close(session, why) => {
                let host = self.sessions.remove(&session).expect("a session that is there");
                let agent = self.agents.get_mut(&host).unwrap();
                agent.session = agent.session.filter(|live| *live != session);
                let why = match why {
                    Closed::FalseClaim(slice, epoch) => format!("FalseClaim:{slice}.{epoch}"),
                    why => format!("{why:?}"),
                };
                self.said.push(format!("{}.close({why})", self.host_name(host)));
            }
            Effect::Durable(published) => self.transitions.extend(published.transitions),
        }
    }

    fn reply(&mut self, token: u64, answer: &Result<Answer, Denied>) {
        let answer = match answer {
            Err(denied) => denied.reason().to_owned(),
            Ok(Answer::Reservation(view)) if self.caller(token).starts_with("validate") => {
                format!("would({})", view.reservation.slices.len())
            }
            Ok(Answer::Reservation(view)) => {
                let slices: Vec<_> = view.reservation.slices.iter().map(ToString::to_string).collect();
                let written = self.disk.get(&Key::Reservation(view.id));
                let same = Some(&Record::Reservation(view.id, view.reservation.clone()));
                assert_eq!(written, same, "a reply tells what is not durable");
                format!("ok({})", slices.join(","))
            }
            Ok(Answer::Scheduled { waiting_for, .. }) => format!("ok[{}]", waiting_for.len()),
            Ok(Answer::Migration(..) | Answer::Done(_)) => "ok".to_owned(),
        };
        self.said.push(format!("{}->{answer}", self.caller(token)));
    }

    fn caller(&self, token: u64) -> &str {
        &self.callers[usize::try_from(token).unwrap()]
    }

    fn written(&self, slice: SliceId) -> Slot {
        match self.disk.get(&Key::Slice(slice)) {
            Some(Record::Slice(_, slot)) => *slot,
            _ => Slot::default(),
        }
    }

    fn device_call(&mut self, emc: EmcId, call: DeviceCall) {
        let word = match &call {
            DeviceCall::Contents => "contents".to_owned(),
            DeviceCall::Grant { slice, epoch, host } => {
                let slot = self.written(*slice);
                assert_eq!(slot.epoch, *epoch, "a grant whose intent is not durable");
                let meant = matches!(slot.state, State::Assigned(_) | State::Scrubbing(Scrub::Granting(_)));
                assert!(meant && slot.holder() == Some(*host), "a grant that is not meant: {slot:?}");
                let first = self.devices.get_mut(&emc).unwrap().asked.insert((*slice, *epoch));
                assert!(first, "slice {slice} epoch {epoch} is granted twice");
                format!("grant({slice}.{epoch}>{})", self.host_name(*host))
            }
            DeviceCall::Revoke { slice, epoch } => {
                let slot = self.written(*slice);
                assert_eq!(slot.epoch, *epoch, "a revocation whose intent is not durable");
                format!("revoke({slice}.{epoch})")
            }
            DeviceCall::Fence { host, powered_off } => {
                format!("fence({}{})", self.host_name(*host), if *powered_off { "!" } else { "" })
            }
        };
        let emc_name = self.manager.durable().emc(emc).unwrap().emc.name.clone();
        self.said.push(format!("{emc_name}.{word}"));
        let record = &self.manager.durable().emc(emc).unwrap().emc;
        let (shared, slices) = (!record.cuts_off(), record.range().collect());
        let device = self.devices.entry(emc).or_default();
        device.number(slices);
        device.shared = shared;
        device.calls.push_back(call);
    }

    fn order(&mut self, session: SessionId, want: Want) {
        let host = self.sessions[&session];
        let before = self.agents[&host].order.as_ref().map(|(before, _)| before.clone());
        let mut whole = before.clone().unwrap_or_else(|| want.clone());
        assert!(want.base.is_none() || want.base == before.map(|before| before.number), "{want:?}");
        self.orders_of_changes += u32::from(want.base.is_some());
        assert_eq!(want.instance, InstanceId(self.agents[&host].instance), "an order for another instance");
        whole.amend(want);
        let want = whole;
        assert_eq!(Some(&want), self.manager.want(host).as_ref(), "changes add up to the whole truth");
        let mut parts = Vec::new();
        for (id, wanted) in &want.vms {
            let vm = &wanted.vm;
            let reservation = self.manager.durable().reservation(*id).unwrap();
            let told: Vec<_> = wanted.slices.keys().map(|h| h.slice).collect();
            assert_eq!(told, reservation.slices, "an order shows a part of a VM's memory");
            wanted.slices.keys().for_each(|h| self.may_reach(host, *h));
            parts.push(format!("{vm}={}", list(wanted.slices.keys().copied())));
        }
        want.scrub.keys().for_each(|h| self.may_reach(host, *h));
        let told = want.vms.values().flat_map(|vm| vm.slices.keys()).chain(want.scrub.keys());
        told.copied().collect::<Vec<_>>().into_iter().for_each(|h| self.reaches(host, h));
        let released =
            |force: bool| list(want.release.iter().filter(|(_, r)| r.force == force).map(|(h, _)| *h));
        let lists = [
            ("release", released(false)),
            ("force", released(true)),
            ("scrub", list(want.scrub.keys().copied())),
        ];
        parts.extend(lists.into_iter().filter(|(_, l)| !l.is_empty()).map(|(what, l)| format!("{what}={l}")));
        parts.extend(want.fenced.then(|| "fenced".to_owned()));
        let words = if parts.is_empty() { "nothing".to_owned() } else { parts.join(";") };
        self.said.push(format!("{}<{words}", self.host_name(host)));
        let (now, agent) = (self.now, self.agents.get_mut(&host).unwrap());
        if let Some((before, at)) = &agent.order {
            let repeated = now >= at.after(DESIRED_STATE_RESEND_AFTER);
            assert!(agent.answered || repeated, "a second order before the first is answered");
            assert!(
                want.number > before.number || want == *before,
                "two orders of one number differ: {want:?} and {before:?}"
            );
        }
        agent.answered &= agent.order.as_ref().is_some_and(|(before, _)| want.number == before.number);
        agent.order = Some((want, now));
    }

    /// Checks that a host receives a slice only while the device grants it to this host alone.
    fn may_reach(&self, host: HostId, holding: Holding) {
        let emc = self.manager.durable().emc_of(holding.slice).unwrap();
        let granted = self.devices[&emc].granted.get(&holding.slice);
        assert_eq!(granted, Some(&(holding.epoch, host)), "an order for slice {}", holding.slice);
    }

    fn reaches(&mut self, host: HostId, Holding { slice, epoch }: Holding) {
        let emc = self.manager.durable().emc_of(slice).unwrap();
        self.devices.get_mut(&emc).unwrap().reached.insert((slice, epoch, host));
    }

    /// A host has let go of a slice, or of everything.
    fn lets_go(&mut self, host: HostId, of: impl Fn(Holding) -> bool) {
        for device in self.devices.values_mut() {
            device
                .reached
                .retain(|(slice, epoch, by)| *by != host || !of(Holding { slice: *slice, epoch: *epoch }));
        }
    }

    pub(super) fn stored(&mut self, ok: bool, on_disk: bool) {
        let Some((batch, records)) = self.to_store.pop_front() else { panic!("nothing is being stored") };
        if on_disk {
            self.write(&records);
        }
        self.event(Event::Stored { batch, ok });
    }

    fn write(&mut self, records: &[Record]) {
        for record in records {
            match record {
                Record::Gone(key) => drop(self.disk.remove(key)),
                record => drop(self.disk.insert(record.key(), record.clone())),
            }
        }
    }

    fn load(&mut self, restored: bool) {
        self.to_reload = false;
        let mut records = self.disk.clone();
        let Some(Record::Meta(mut meta)) = records.remove(&Key::Meta) else { panic!("no meta") };
        self.generation += u64::from(restored);
        meta.generation = if restored { self.generation } else { meta.generation };
        self.devices.values_mut().for_each(|device| device.asked.clear());
        self.event(Event::Loaded { meta, records: records.into_values().collect(), restored });
    }

    /// The manager's process ends and begins again: what is not on disk is gone, and so are all connections. Its clock
    /// goes on from the latest moment on disk.
    fn restart(&mut self, restored: bool) {
        if let Some(Record::Meta(meta)) = self.disk.get(&Key::Meta) {
            self.now = meta.rack_time;
        }
        self.manager = Manager::new(settings());
        self.to_store.clear();
        self.sessions.clear();
        self.agents.values_mut().for_each(|agent| {
            (agent.session, agent.order) = (None, None);
        });
        self.devices.values_mut().for_each(|device| device.calls.clear());
        self.load(restored);
    }

    fn device(&mut self, emc: &str) -> &mut Device {
        let id = self.manager.durable().emc_named(&name(emc)).unwrap();
        self.devices.get_mut(&id).unwrap()
    }

    fn slice_works(&mut self, slice: SliceId, works: bool) {
        let emc = self.manager.durable().emc_of(slice).unwrap();
        let faulty = &mut self.devices.get_mut(&emc).unwrap().faulty;
        if works {
            faulty.remove(&slice);
        } else {
            faulty.insert(slice);
        }
    }

    fn answer_devices(&mut self) {
        let emcs: Vec<EmcId> = self.devices.keys().copied().collect();
        for emc in emcs {
            while let Some(call) = self.devices.get_mut(&emc).unwrap().calls.pop_front() {
                self.answer_device(emc, call);
            }
        }
    }

    fn answer_device(&mut self, emc: EmcId, call: DeviceCall) {
        let slot = match &call {
            DeviceCall::Grant { slice, .. } => self.written(*slice),
            _ => Slot::default(),
        };
        let done = self.devices.get_mut(&emc).unwrap().perform(call, slot);
        self.event(Event::Device(emc, done));
    }

    /// A device grants a slice to a host behind the manager's back, or forgets that it did.
    pub(super) fn meddle(&mut self, slice: u32, granted: Option<(u64, &str)>) {
        let slice = SliceId(slice);
        let owner = granted.map(|(epoch, host)| (Epoch(epoch), self.host(host)));
        let emc = self.manager.durable().emc_of(slice).unwrap();
        let device = self.devices.get_mut(&emc).unwrap();
        device.granted.remove(&slice);
        if let Some((epoch, host)) = owner {
            device.granted.insert(slice, (epoch, host));
            let highest = device.highest.entry(slice).or_default();
            *highest = epoch.max(*highest);
        }
    }

    /// A device has seen owners that the ledger has not.
    pub(super) fn seen(&mut self, slice: u32, epoch: u64) {
        let emc = self.manager.durable().emc_of(SliceId(slice)).unwrap();
        self.devices.get_mut(&emc).unwrap().highest.insert(SliceId(slice), Epoch(epoch));
    }

    pub(super) fn host(&self, text: &str) -> HostId {
        self.manager.durable().host_named(&name(text)).expect("a host of this rack")
    }

    fn host_name(&self, host: HostId) -> String {
        let entry = self.manager.durable().host(host);
        entry.map_or_else(|| format!("{host}"), |entry| entry.host.name.to_string())
    }

    /// A machine that restarts closes its connections; a copy of an agent runs on a machine beside it.
    fn agent_up(&mut self, rest: &str, restarts: bool) {
        let (rest, boot) = rest.split_once('/').unwrap_or((rest, "b1"));
        let (host, instance) = rest.split_once('#').map_or((rest, None), |(h, i)| (h, Some(i)));
        let id = self.host(host);
        let devices = self.seen_by(id);
        let restarted =
            self.agents.get(&id).filter(|agent| agent.boot != boot).and_then(|agent| agent.session);
        if restarts && restarted.is_some_and(|session| self.sessions.contains_key(&session)) {
            self.agent_down(host); // a machine that restarts closes its connections
        }
        let agent = self.agents.entry(id).or_default();
        agent.instance = instance.map_or(agent.instance + 1, |i| i.parse().unwrap());
        self.connections += 1;
        let session = SessionId(self.connections);
        self.sessions.insert(session, id);
        let hello = Hello {
            instance: InstanceId(agent.instance),
            boot_id: boot.to_owned(),
            host_memory_socket: String::new(),
            devices,
        };
        (agent.session, agent.order, agent.answered) = (Some(session), None, false);
        if std::mem::replace(&mut agent.boot, boot.to_owned()) != boot {
            agent.running.clear();
            self.lets_go(id, |_| true);
        }
        self.event(Event::AgentUp(session, id, hello));
    }

    /// Shared devices reported by its agent.
    fn seen_by(&self, host: HostId) -> Vec<SeenDevice> {
        let emcs = self.manager.durable().emcs().filter_map(|(_, entry)| {
            let serial = entry.emc.serial.clone()?;
            let slices = self.sees.get(&host).copied().unwrap_or(entry.emc.slices);
            Some(SeenDevice { serial, slices, problem: None })
        });
        emcs.filter(|device| device.slices > 0).collect()
    }

    fn agent_down(&mut self, host: &str) {
        let id = self.host(host);
        let session = self.agents.get_mut(&id).unwrap().session.take().expect("a connected agent");
        self.sessions.remove(&session);
        self.event(Event::AgentDown(session));
    }

    fn have(&mut self, rest: &str) {
        let mut parts = rest.split(':');
        let host = self.host(parts.next().unwrap());
        let mut have = Have { whole: true, ..Have::default() };
        let mut early = false;
        for part in parts {
            match part.split_once('=') {
                None if part == "clean" => have.clean = true,
                None if part == "early" => early = true,
                None if part == "part" => have.whole = false,
                None if part == "more" => have.is_continued = true,
                Some(("nth", nth)) => have.part = nth.parse().unwrap(),
                Some(("after", numbers)) => {
                    let (after, sequence) = numbers.split_once('>').unwrap();
                    (have.after, have.sequence) = (after.parse().unwrap(), sequence.parse().unwrap());
                }
                Some(("online", list)) => have.online = holdings(list),
                Some(("released", list)) => have.released = holdings(list),
                Some(("scrubbed", list)) => {
                    have.scrubbed.extend(holdings(list).into_iter().map(|h| scrubbed(h, units::SLICE)));
                }
                Some(("half", list)) => {
                    have.scrubbed.extend(holdings(list).into_iter().map(|h| scrubbed(h, Bytes::mib(512))));
                }
                Some((what @ ("dirty" | "broken"), list)) => {
                    let reason = if what == "dirty" { FailedReason::NotZero } else { FailedReason::Host };
                    let message = "EIO".to_owned();
                    have.failed.extend(holdings(list).into_iter().map(|holding| Failed {
                        holding,
                        reason,
                        message: message.clone(),
                    }));
                }
                Some(("ended", id)) => have.ended.push(ReservationId(id.parse().unwrap())),
                Some((vm, list)) => {
                    let vm = vm.strip_prefix("vm").expect("a part of a report");
                    let (id, vm) = vm.split_at(vm.len() - 1);
                    let (vm, slices) = (name(vm), holdings(list));
                    let running = HaveVm { vm, pid: 7, slices, local: Bytes::ZERO, pinned: false, uid: None };
                    have.vms.insert(ReservationId(id.parse().unwrap()), running);
                }
                None => panic!("no part {part:?}"),
            }
        }
        self.report(host, have, early);
    }

    pub(super) fn report(&mut self, host: HostId, mut have: Have, early: bool) {
        let agent = self.agents.get_mut(&host).unwrap();
        let Some(session) = agent.session else { return };
        agent.running.extend(have.vms.clone());
        agent.running.retain(|id, _| !have.ended.contains(id));
        if let Some((want, _)) = agent.order.as_ref().filter(|_| !early) {
            have.number = want.number;
            agent.answered = true;
        }
        for scrub in have.scrubbed.iter().filter(|s| s.verified >= units::SLICE) {
            let Some(emc) = self.manager.durable().emc_of(scrub.holding.slice) else { continue };
            let device = self.devices.get_mut(&emc).unwrap();
            if device.granted.get(&scrub.holding.slice) == Some(&(scrub.holding.epoch, host)) {
                device.dirty.remove(&scrub.holding.slice);
            }
        }
        let scrubbed = have.scrubbed.iter().filter(|s| s.verified >= units::SLICE).map(|s| s.holding);
        let back: BTreeSet<Holding> = have.released.iter().copied().chain(scrubbed).collect();
        self.lets_go(host, |holding| have.clean || back.contains(&holding));
        self.event(Event::AgentHave(session, have));
    }

    /// Lets an agent apply its desired state and report.
    pub(super) fn obey(&mut self, host: HostId) {
        let Some(agent) = self.agents.get(&host) else { return };
        let Some((want, _)) = &agent.order else { return };
        let wanted = want.vms.values().flat_map(|vm| vm.slices.keys().copied());
        let in_use = agent.running.values().flat_map(|vm| vm.slices.iter().copied());
        let in_use = in_use.filter(|holding| !want.release.contains_key(holding));
        let have = Have {
            online: wanted.chain(in_use.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
            vms: agent.running.clone(),
            released: want.release.keys().copied().filter(|holding| !agent.uses(*holding)).collect(),
            scrubbed: want.scrub.keys().map(|h| scrubbed(*h, units::SLICE)).collect(),
            clean: want.fenced && agent.running.is_empty(),
            whole: true,
            ..Have::default()
        };
        self.report(host, have, false);
    }

    /// Lets all parties act, and short timers expire, until nothing is left to do.
    fn go(&mut self) {
        for _ in 0..200 {
            if !self.to_store.is_empty() {
                self.stored(true, true);
            } else if self.to_reload {
                self.load(false);
            } else if self.devices.values().any(|device| !device.calls.is_empty()) {
                self.answer_devices();
            } else if let Some(host) = self.unanswered() {
                self.obey(host);
            } else if let Some(at) = self.manager.next_wakeup().filter(|at| *at <= self.now.after(Ns::ms(50)))
            {
                self.now = self.now.max(at);
                self.event(Event::Tick);
            } else {
                return;
            }
        }
        panic!("the rack does not come to rest");
    }

    fn unanswered(&self) -> Option<HostId> {
        let waits = |agent: &Agent| agent.session.is_some() && agent.order.is_some() && !agent.answered;
        self.agents.iter().find(|(_, agent)| waits(agent)).map(|(host, _)| *host)
    }

    /// Every slice that is not free, as the outside may see it.
    fn slices(&mut self) {
        let durable = self.manager.durable();
        let words = durable.slots_from(SliceId(0)).filter(|(_, _, slot)| slot.state != State::Free);
        let words = words.map(|(slice, _, slot)| {
            let mut word = format!("{slice}.{}:{}", slot.epoch, slot.state_name());
            if let Some(host) = slot.holder() {
                let _ = write!(word, "@{}", self.host_name(host));
            }
            word
        });
        let words: Vec<_> = words.collect();
        self.said.extend(words);
    }

    /// Whether a decision about this subject with these words in its reason was made durable.
    pub(super) fn remembers(&self, subject: &Subject, words: &str) -> bool {
        self.disk.values().any(|record| {
            matches!(record, Record::Decision(_, d) if d.subject == *subject && d.what.words().why.contains(words))
        })
    }

    // Actions of a random sequence, which apply only where possible.

    /// Restores the ledger after these words from the backup between `before` and `after`. The manager runs again, and no
    /// agent is connected yet.
    pub(super) fn restored(mut self, before: &str, after: &str, broken: &str) -> Self {
        self.run(before);
        let backup = self.disk.clone();
        self.run(after);
        self.disk = backup;
        self.run(broken);
        self.run("restore stored device tick:10");
        self.write_all();
        self
    }

    /// Makes everything durable that waits for a write.
    pub(super) fn write_all(&mut self) {
        while self.is_storing() {
            self.stored(true, true);
        }
    }

    pub(super) fn is_storing(&self) -> bool {
        !self.to_store.is_empty()
    }

    pub(super) fn is_reloading(&self) -> bool {
        self.to_reload
    }

    pub(super) fn is_connected(&self, host: HostId) -> bool {
        self.agents.get(&host).is_some_and(|agent| agent.session.is_some())
    }
}

impl Agent {
    fn uses(&self, holding: Holding) -> bool {
        self.running.values().any(|vm| vm.slices.contains(&holding))
    }
}

impl Device {
    /// Sets the numbers of its slices. Its record counts from its first slice.
    fn number(&mut self, slices: Vec<SliceId>) {
        let to = |slice: SliceId, old: &[SliceId]| old.iter().position(|s| *s == slice).map(|at| slices[at]);
        if !self.slices.is_empty() && self.slices != slices {
            let old = std::mem::take(&mut self.slices);
            let granted = std::mem::take(&mut self.granted).into_iter();
            self.granted = granted.filter_map(|(s, grant)| Some((to(s, &old)?, grant))).collect();
            let highest = std::mem::take(&mut self.highest).into_iter();
            self.highest = highest.filter_map(|(s, epoch)| Some((to(s, &old)?, epoch))).collect();
            self.dirty = self.dirty.iter().filter_map(|s| to(*s, &old)).collect();
        }
        self.slices = slices;
    }

    fn perform(&mut self, call: DeviceCall, intent: Slot) -> DeviceDone {
        if self.broken {
            self.asked.clear();
            return DeviceDone::Failed { call, failure: DeviceFailure::Error("EIO".into()) };
        }
        match call {
            DeviceCall::Contents => DeviceDone::Contents(self.contents()),
            DeviceCall::Grant { slice, epoch, .. } if self.faulty.contains(&slice) => {
                self.asked.remove(&(slice, epoch));
                DeviceDone::Failed { call, failure: slice_failure() }
            }
            DeviceCall::Revoke { slice, .. } if self.faulty.contains(&slice) => {
                DeviceDone::Failed { call, failure: slice_failure() }
            }
            DeviceCall::Grant { slice, epoch, host } => self.grant(slice, epoch, host, intent),
            DeviceCall::Revoke { slice, epoch } => {
                self.granted.retain(|s, (e, _)| *s != slice || *e > epoch);
                DeviceDone::Revoked { slice, epoch }
            }
            DeviceCall::Fence { powered_off: false, .. } if self.shared && !self.stops => {
                DeviceDone::Failed { call, failure: DeviceFailure::NotFenced("no command".into()) }
            }
            DeviceCall::Fence { host, .. } => {
                self.granted.retain(|slice, (_, owner)| *owner != host || self.faulty.contains(slice));
                self.reached.retain(|(_, _, by)| *by != host);
                DeviceDone::Fenced { host }
            }
        }
    }

    fn grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId, intent: Slot) -> DeviceDone {
        let held = self.granted.get(&slice).copied();
        let highest = self.highest.get(&slice).copied().unwrap_or_default();
        if let Some((held_epoch, holder)) = held.filter(|(held, _)| *held > epoch) {
            let call = DeviceCall::Grant { slice, epoch, host };
            let failure = DeviceFailure::Held { epoch: held_epoch, host: holder };
            return DeviceDone::Failed { call, failure };
        }
        if held != Some((epoch, host)) {
            assert_eq!(held, None, "slice {slice} would have two owners");
            let others = self.reached.iter().find(|(reached, _, by)| *reached == slice && *by != host);
            assert!(
                !self.shared || others.is_none(),
                "slice {slice} goes to {host:?}, still reached by {others:?}"
            );
            if highest >= epoch {
                let call = DeviceCall::Grant { slice, epoch, host };
                return DeviceDone::Failed { call, failure: DeviceFailure::StaleEpoch { highest } };
            }
        }
        if matches!(intent.state, State::Assigned(_)) {
            assert!(
                !self.dirty.contains(&slice) || held.is_some(),
                "slice {slice} is handed on with old bytes"
            );
            self.dirty.insert(slice);
        }
        self.granted.insert(slice, (epoch, host));
        self.highest.insert(slice, epoch);
        DeviceDone::Granted { slice, epoch, handle: self.place(slice, epoch) }
    }

    /// Of a shared device a slice's place is the same for all its owners.
    fn place(&self, slice: SliceId, epoch: Epoch) -> crate::protocol::Handle {
        let place = if self.shared { format!("/{slice}") } else { format!("/{slice}.{epoch}") };
        crate::protocol::Handle::new("emc", place)
    }

    fn contents(&self) -> Contents {
        let grant = |(slice, (epoch, host)): (&SliceId, &(Epoch, HostId))| Grant {
            slice: *slice,
            epoch: *epoch,
            host: *host,
            handle: self.place(*slice, *epoch),
        };
        Contents {
            grants: self.granted.iter().map(grant).collect(),
            highest: self.highest.iter().map(|(s, e)| (*s, *e)).collect(),
            places: self
                .slices
                .iter()
                .filter(|_| self.shared)
                .map(|s| (*s, self.place(*s, Epoch(0))))
                .collect(),
        }
    }
}

/// EISDIR, as of a slice whose file was replaced by a directory.
fn slice_failure() -> DeviceFailure {
    DeviceFailure::Slice(SliceError { message: "open /slices/0: it is a directory".into(), errno: Some(21) })
}

fn place(text: &str) -> Place {
    match text.as_bytes()[0] {
        b'h' => Place::Host(name(text)),
        b'e' => Place::Emc(name(text)),
        _ => Place::Slice(SliceId(text.parse().unwrap())),
    }
}

fn reserve(text: &str) -> Reserve {
    let (text, request) = text.split_once('!').unwrap_or((text, ""));
    let (vm, rest) = text.split_once('@').unwrap();
    let (host, slices) = rest.split_once('=').unwrap();
    let request = if request.is_empty() { vm } else { request };
    let (client, request) = request.split_once('/').unwrap_or(("tester", request));
    Reserve {
        request: RequestKey { client: name(client), id: RequestId::new(request).unwrap() },
        host: name(host),
        vm: name(vm),
        slices: slices.parse().unwrap(),
        local: Bytes::gib(1),
        cores: 1,
        pinned: false,
        commit_within: Ns::secs(300),
        uid: None,
    }
}
