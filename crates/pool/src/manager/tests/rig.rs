//! Test rig: one manager with a simulated store, devices and agents. A test script consists of
//! lines `WORDS | OUTPUT`: [`Rig::check`] runs the words and compares their whole output with
//! OUTPUT. Without `|`, the output is not compared. A word may be repeated. Words have the form
//! `VERB` or `VERB:ARGUMENTS`.
//!
//! Notation: VMs are `a`, `b`, hosts `h1`, `h2`, and EMCs `e1`, `e2`. `0.1` is epoch 1 of slice 0;
//! `+` separates several slices. `e1=4` is an EMC with 4 slices, `e1=4!` one that cannot revoke
//! access, and `h1:e1+e2` a host that is attached to two EMCs.
//!
//! Requests. `RESERVE` is for example `a@h1=2`, which reserves 2 slices for VM a on h1. A suffix
//! `!5` sets request id 5, `!c/5` sets request id 5 of client c, and a final `~` waits 1 s for the
//! slices:
//! - `reserve:RESERVE`, `validate:RESERVE`, `wait:a`, `gone:a` (the caller that waits for VM a
//!   disconnects), `commit:a`, `release:a`, `force:a` (a forced release), `decline:a` (declines the
//!   migration of VM a), `slow:a` (requests the migration of VM a because of a slowdown),
//!   `rehome:a` (moves the pool memory of VM a)
//! - `cordon:h1`, `drain:e1`, `enable:0`, `fence:h1`, `poweroff:h1` (a fence of a host that is
//!   confirmed to be powered off), `rack:e1=4&h1:e1` (a configuration)
//!
//! Agents:
//! - `up:h1` (connects), `up:h1#7` (connects as instance 7), `up:h1/b2` (connects with boot id b2),
//!   `copy:h1/b2` (connects with boot id b2 while the old connection remains), `down:h1`
//! - `report:h1:PARTS`, `apply:h1` (applies its desired state and reports)
//! - `sees:h1=3`: from its next connection on, h1 reports 3 slices of each shared device
//!
//! Parts of a report: `online=0.1+1.1`, `released=`, `scrubbed=`, `half=` (scrubbed, but only
//! partly verified), `dirty=`, `broken=` (failed), `ended=1`, `vm1a=0.1` (VM a of reservation 1 is
//! running; later `apply` reports contain the VM), `vm1a!done=` (VM a was moved), `vm1a!2=0.1`
//! (attempt 2 failed), `clean`, `early` (sent before the desired state
//! was received), `part` (not complete), `more` (another part follows), `nth=1` (index of this
//! part), `after=1>2` (sequence number 2 after 1).
//!
//! Store: `stored`, `lost` (the write failed), `torn` (the write failed but is on disk), `reload`,
//! `restart`, `restore`, `low`, `ample` (free space).
//!
//! Devices: `device` (completes all calls), `contents:e1` (returns the contents of e1 before the
//! results of its other calls), `break:e1`, `recover:e1`, `fault:3`, `repair:3` (grants
//! and revocations of slice 3 fail or work), `stops:e1` (e1 has a command that stops machines).
//!
//! Time: `tick:MS` (MS milliseconds pass, and the manager handles timers that are due), `go`
//! (store, devices and agents act until the rig is idle).
//!
//! Queries: `slices`, `alarms`, `state:h1`.
//!
//! Output: `store`, `reload`, `e1.grant(0.1>h1)`, `h1<a=0.1;release=1.1` (a desired state),
//! `h1<report` (a report request), `h1.close(LeaseExpired)` (the reason why the manager closed the
//! session), `h1.close(FalseClaim:4.1)` (the host claimed a slice that it cannot own),
//! `reserve:a->ok(0,1)` (a reply, with slices 0 and 1).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::sync::Arc;

use units::limits::DESIRED_STATE_RESEND_AFTER;
use units::{Bytes, EmcId, Epoch, HostId, InstanceId, Name, Ns, RequestId, ReservationId, SliceId, UnixMs};

use crate::{
    audit::{Actor, Subject},
    ledger::{RackSpec, Reserve, SchedulingTarget, Target, When},
    manager::{
        CloseReason, Contents, DeviceCall, DeviceFailure, DeviceReply, Effect, Event, Grant, Manager,
        Request, RequestReply, SessionId, Settings, SliceError, Token,
    },
    protocol::{
        DesiredState, FailureReason, Hello, Holding, ObservedRehome, ObservedState, ObservedVm, ScrubReport,
        SeenDevice, SliceFailure,
    },
    record::{Key, Meta, MigrationAnswer, Record, RequestKey, Scheduling, SlowdownEstimate},
    rejection::Rejection,
    slice::{Scrub, Slot, State},
};

/// Lease time of every host.
const LEASE_DURATION: Ns = Ns::secs(4);
/// Time from the end of a lease to the automatic fence.
const FENCE_DELAY: Ns = Ns::secs(60);
/// Rack with two EMCs of four slices. h1 and h2 are attached to both EMCs, h3 only to e2.
pub(super) const RACK: &str = "e1=4 e2=4 h1:e1+e2 h2:e1+e2 h3:e2";
/// [`RACK`] with an EMC e2 that cannot revoke access.
pub(super) const SHARED_RACK: &str = "e1=4 e2=4! h1:e1+e2 h2:e1+e2 h3:e2";

pub(super) struct Rig {
    pub(super) manager: Manager,
    pub(super) now: Ns,
    pub(super) disk: BTreeMap<Key, Record>,
    pending_writes: VecDeque<(u64, Arc<Vec<Record>>)>,
    needs_reload: bool,
    /// Highest generation of all loaded ledgers; a restore must use a higher generation.
    generation: u64,
    devices: BTreeMap<EmcId, Device>,
    agents: BTreeMap<HostId, Agent>,
    sessions: BTreeMap<SessionId, HostId>,
    connections: u64,
    /// Number of slices of each shared device that a host reports; absent if it reports all slices.
    visible_slices: BTreeMap<HostId, u32>,
    /// State changes of slices in all durable batches.
    pub(super) transitions: Vec<(SliceId, &'static str, &'static str)>,
    /// Number of desired states that contained only changes.
    pub(super) incremental_states: u32,
    callers: Vec<String>,
    output: Vec<String>,
}

#[derive(Default)]
struct Device {
    broken: bool,
    /// Slices whose device calls fail although the device works.
    faulty: BTreeSet<SliceId>,
    calls: VecDeque<DeviceCall>,
    granted: BTreeMap<SliceId, (Epoch, HostId)>,
    highest: BTreeMap<SliceId, Epoch>,
    /// Slices that may contain data of an owner, because they were not scrubbed.
    dirty: BTreeSet<SliceId>,
    /// Grants requested since the last load of the store or failure of the device.
    requested: BTreeSet<(SliceId, Epoch)>,
    /// Whether the device cannot revoke access.
    shared: bool,
    slices: Vec<SliceId>,
    /// Whether the device has a command that stops machines.
    can_stop_machines: bool,
    /// Hosts that received a slice and have not released it. On a shared device, these hosts can
    /// access the slice.
    accessible: BTreeSet<(SliceId, Epoch, HostId)>,
}

#[derive(Clone, Default)]
struct Agent {
    instance: u64,
    boot: String,
    session: Option<SessionId>,
    desired_state: Option<(DesiredState, Ns)>,
    answered: bool,
    /// Running VMs that the agent reports, by reservation.
    running: BTreeMap<ReservationId, ObservedVm>,
}

pub(super) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn holding(text: &str) -> Holding {
    let (slice, epoch) = text.split_once('.').expect("the format is SLICE.EPOCH");
    Holding { slice: SliceId(slice.parse().unwrap()), epoch: Epoch(epoch.parse().unwrap()) }
}

fn holdings(text: &str) -> Vec<Holding> {
    text.split('+').filter(|one| !one.is_empty()).map(holding).collect()
}

fn format_holdings(holdings: impl IntoIterator<Item = Holding>) -> String {
    let words: Vec<_> = holdings.into_iter().map(|h| format!("{}.{}", h.slice, h.epoch)).collect();
    words.join("+")
}

pub(super) fn scrub_report(holding: Holding, verified: Bytes) -> ScrubReport {
    ScrubReport { holding, started: UnixMs(1), ended: UnixMs(2), verified }
}

pub(super) fn settings() -> Settings {
    Settings { lease_ttl: LEASE_DURATION, fence_after: Some(FENCE_DELAY) }
}

impl Rig {
    /// Returns a rig whose devices have been compared and whose agents are not connected.
    pub(super) fn new(rack: &str) -> Self {
        let mut rig = Self {
            manager: Manager::new(settings()),
            now: Ns::secs(1),
            disk: BTreeMap::new(),
            pending_writes: VecDeque::new(),
            needs_reload: false,
            generation: 1,
            devices: BTreeMap::new(),
            agents: BTreeMap::new(),
            sessions: BTreeMap::new(),
            connections: 0,
            visible_slices: BTreeMap::new(),
            transitions: Vec::new(),
            incremental_states: 0,
            callers: Vec::new(),
            output: Vec::new(),
        };
        let meta = Meta::new("rack".to_owned());
        rig.disk.insert(Key::Meta, Record::Meta(meta.clone()));
        rig.handle_event(Event::Loaded { meta, records: Vec::new(), restored: false });
        rig.send_request("configure", Request::Configure(RackSpec::parse(rack)));
        rig.run("stored device");
        rig
    }

    /// Returns a rig of [`RACK`] with all agents connected and all desired states applied.
    pub(super) fn connected() -> Self {
        Self::connected_with(RACK)
    }

    /// Returns a rig of this rack with all agents connected and all desired states applied.
    pub(super) fn connected_with(rack: &str) -> Self {
        let mut rig = Self::new(rack);
        rig.run("up:h1 up:h2 up:h3 go");
        rig
    }

    /// Runs a script line by line. If a line contains `|`, compares the output with the text after
    /// it.
    pub(super) fn check(&mut self, scenario: &str) -> &mut Self {
        let (mut log, mut as_expected) = (String::new(), true);
        for line in scenario.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (words, expected) = line.split_once('|').map_or((line, None), |(w, e)| (w, Some(e.trim())));
            let output = self.run(words);
            let differs = expected.is_some_and(|expected| output != expected);
            as_expected &= !differs;
            let _ = writeln!(log, "{} {} | {output}", if differs { "->" } else { "  " }, words.trim());
        }
        assert!(as_expected, "unexpected output:\n{log}");
        self
    }

    /// Runs the words of a script, and returns their output.
    pub(super) fn run(&mut self, words: &str) -> String {
        self.output.clear();
        words.split_whitespace().for_each(|word| self.run_word(word));
        std::mem::take(&mut self.output).join(" ")
    }

    fn run_word(&mut self, word: &str) {
        let (verb, rest) = word.split_once(':').unwrap_or((word, ""));
        match verb {
            "up" => self.connect_agent(rest, true),
            "copy" => self.connect_agent(rest, false),
            "down" => self.disconnect_agent(rest),
            "report" => self.send_scripted_report(rest),
            "apply" => self.apply_desired_state(self.host(rest)),
            "stored" => self.complete_write(true, true),
            "lost" => self.complete_write(false, false),
            "torn" => self.complete_write(false, true),
            "reload" => self.load(false),
            "sees" => {
                let (host, slices) = rest.split_once('=').unwrap();
                self.visible_slices.insert(self.host(host), slices.parse().unwrap());
            }
            "restart" | "restore" => self.restart(verb == "restore"),
            "low" | "ample" => self.handle_event(Event::StoreSpace { low: verb == "low" }),
            "device" => self.complete_device_calls(),
            "contents" => {
                let emc = self.manager.durable().find_emc_by_name(&name(rest)).unwrap();
                self.devices.get_mut(&emc).unwrap().calls.retain(|call| *call != DeviceCall::Contents);
                self.complete_device_call(emc, DeviceCall::Contents);
            }
            "break" | "recover" => self.device(rest).broken = verb == "break",
            "stops" => self.device(rest).can_stop_machines = true,
            "fault" => self.set_slice_working(SliceId(rest.parse().unwrap()), false),
            "repair" => self.set_slice_working(SliceId(rest.parse().unwrap()), true),
            "tick" => {
                self.now = self.now.after(Ns::ms(rest.parse().unwrap()));
                self.handle_event(Event::Tick);
            }
            "go" => self.run_until_idle(),
            "slices" => self.print_slices(),
            "alarms" => {
                let reasons: Vec<_> = self.manager.alarms().iter().map(|a| a.reason.to_owned()).collect();
                self.output.extend(reasons);
            }
            "state" => self.output.push(format!("{:?}", self.manager.host_state(self.host(rest)))),
            "gone" => {
                let is_of_vm = |caller: &String| caller.split_once(':').is_some_and(|(_, vm)| vm == rest);
                let token = self.callers.iter().rposition(is_of_vm).expect("a caller waits for the VM");
                self.handle_event(Event::CallerGone(Token(token as u64)));
            }
            _ => {
                let request = self.parse_request(verb, rest);
                let about = rest.split(['@', '~', '!']).next().unwrap();
                self.send_request(&format!("{verb}:{about}"), request);
            }
        }
    }

    /// Parses the request of a script word.
    fn parse_request(&self, verb: &str, rest: &str) -> Request {
        let actor = Actor::Client(name("tester"));
        let target = || Target::Vm(name(rest));
        let schedule = |to| Request::Schedule {
            place: parse_place(rest),
            to,
            actor: actor.clone(),
            reason: "why".into(),
        };
        let release =
            |force| Request::Release { target: target(), force, reason: String::new(), actor: actor.clone() };
        let fence = |powered_off| Request::Fence {
            host: name(rest),
            powered_off,
            actor: actor.clone(),
            reason: "why".into(),
        };
        match verb {
            "reserve" => {
                let (rest, wait) =
                    rest.strip_suffix('~').map_or((rest, None), |rest| (rest, Some(Ns::secs(1))));
                Request::Reserve { reserve: parse_reserve(rest), wait }
            }
            "validate" => Request::Validate(parse_reserve(rest)),
            "wait" => Request::WaitReady { target: target(), within: Ns::secs(1) },
            "commit" => Request::Commit { target: target(), actor },
            "release" => release(false),
            "force" => release(true),
            "cordon" => schedule(Scheduling::Cordoned),
            "drain" => schedule(Scheduling::Draining),
            "enable" => schedule(Scheduling::Enabled),
            "fence" => fence(false),
            "poweroff" => fence(true),
            "decline" => {
                let (answer, words) = (MigrationAnswer::Declined, "busy".to_owned());
                Request::ResolveMigration { vm: name(rest), id: None, answer, explanation: words, actor }
            }
            "slow" => {
                let vm = self.manager.durable().reservation_of(&name(rest));
                let estimate = SlowdownEstimate { loss: Some(0.1), severity: 2.0, samples: 3 };
                let reservation = vm.expect("the VM has a reservation");
                Request::RequestSlowdownMigration { reservation, estimate, max_per_hour: 9 }
            }
            "cancel_rehome" => Request::CancelRehome { target: Target::Vm(name(rest)), actor },
            "rehome" => Request::Rehome { target: Target::Vm(name(rest)), actor, is_automatic: false },
            "rack" => Request::Configure(RackSpec::parse(&rest.replace('&', " "))),
            other => panic!("unknown word {other:?}"),
        }
    }

    fn send_request(&mut self, caller: &str, request: Request) {
        self.callers.push(caller.to_owned());
        self.handle_event(Event::Request(Token(self.callers.len() as u64 - 1), request));
    }

    pub(super) fn current_time(&self) -> When {
        When { now: self.now, wall: UnixMs(self.now.as_ms()) }
    }

    pub(super) fn handle_event(&mut self, event: Event) {
        let when = self.current_time();
        self.manager.handle(when, event);
        self.manager.settle(when);
        while let Some(effect) = self.manager.poll_effect() {
            self.perform_effect(effect);
        }
    }

    /// Sends several requests before any effect is performed, as the driver of the manager may do.
    pub(super) fn send_requests_together(&mut self, words: &[&str]) -> String {
        self.output.clear();
        for word in words {
            let (verb, rest) = word.split_once(':').unwrap();
            let request = self.parse_request(verb, rest);
            self.callers.push(format!("{verb}:{}", rest.split('@').next().unwrap()));
            let token = Token(self.callers.len() as u64 - 1);
            self.manager.handle(self.current_time(), Event::Request(token, request));
        }
        self.handle_event(Event::CallerGone(Token(u64::MAX)));
        std::mem::take(&mut self.output).join(" ")
    }

    fn perform_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Store { batch, records } => {
                self.pending_writes.push_back((batch, records));
                self.output.push("store".into());
            }
            Effect::Reload => {
                self.needs_reload = true;
                self.output.push("reload".into());
            }
            Effect::Reply(Token(token), answer) => self.record_reply(token, &answer),
            Effect::Device(emc, call) => self.receive_device_call(emc, call),
            Effect::Send(session, desired) => self.receive_desired_state(session, desired),
            Effect::RequestReport(session) => {
                let host = self.sessions[&session];
                self.output.push(format!("{}<report", self.host_name(host)));
            }
            Effect::Close(session, why) => {
                let host = self.sessions.remove(&session).expect("the session is open");
                let agent = self.agents.get_mut(&host).unwrap();
                agent.session = agent.session.filter(|live| *live != session);
                let why = match why {
                    CloseReason::FalseClaim(slice, epoch) => format!("FalseClaim:{slice}.{epoch}"),
                    why => format!("{why:?}"),
                };
                self.output.push(format!("{}.close({why})", self.host_name(host)));
            }
            Effect::Durable(published) => self.transitions.extend(published.transitions),
        }
    }

    fn record_reply(&mut self, token: u64, answer: &Result<RequestReply, Rejection>) {
        let answer = match answer {
            Err(denied) => denied.reason().to_owned(),
            Ok(RequestReply::Reservation(view)) if self.caller(token).starts_with("validate") => {
                format!("would({})", view.reservation.slices.len())
            }
            Ok(RequestReply::Reservation(view)) => {
                let slices: Vec<_> = view.reservation.slices.iter().map(ToString::to_string).collect();
                let on_disk = self.disk.get(&Key::Reservation(view.id));
                let same = Some(&Record::Reservation(view.id, view.reservation.clone()));
                assert_eq!(on_disk, same, "a reply contains a reservation that is not durable");
                format!("ok({})", slices.join(","))
            }
            Ok(RequestReply::Scheduled { waiting_for, .. }) => format!("ok[{}]", waiting_for.len()),
            Ok(RequestReply::Migration(..) | RequestReply::Done(_)) => "ok".to_owned(),
        };
        self.output.push(format!("{}->{answer}", self.caller(token)));
    }

    fn caller(&self, token: u64) -> &str {
        &self.callers[usize::try_from(token).unwrap()]
    }

    fn slot_on_disk(&self, slice: SliceId) -> Slot {
        match self.disk.get(&Key::Slice(slice)) {
            Some(Record::Slice(_, slot)) => *slot,
            _ => Slot::default(),
        }
    }

    fn receive_device_call(&mut self, emc: EmcId, call: DeviceCall) {
        let word = match &call {
            DeviceCall::Contents => "contents".to_owned(),
            DeviceCall::Grant { slice, epoch, host } => {
                let slot = self.slot_on_disk(*slice);
                assert_eq!(slot.epoch, *epoch, "the grant has no durable slot");
                let is_intended =
                    matches!(slot.state, State::Assigned(_) | State::Scrubbing(Scrub::Granting(_)));
                assert!(
                    is_intended && slot.holder() == Some(*host),
                    "the ledger requires no grant: {slot:?}"
                );
                let first = self.devices.get_mut(&emc).unwrap().requested.insert((*slice, *epoch));
                assert!(first, "slice {slice} epoch {epoch} is granted twice");
                format!("grant({slice}.{epoch}>{})", self.host_name(*host))
            }
            DeviceCall::Revoke { slice, epoch } => {
                let slot = self.slot_on_disk(*slice);
                assert_eq!(slot.epoch, *epoch, "the revocation has no durable slot");
                format!("revoke({slice}.{epoch})")
            }
            DeviceCall::Fence { host, powered_off } => {
                format!("fence({}{})", self.host_name(*host), if *powered_off { "!" } else { "" })
            }
        };
        let emc_name = self.manager.durable().emc(emc).unwrap().emc.name.clone();
        self.output.push(format!("{emc_name}.{word}"));
        let record = &self.manager.durable().emc(emc).unwrap().emc;
        let (shared, slices) = (!record.can_revoke(), record.range().collect());
        let device = self.devices.entry(emc).or_default();
        device.set_slices(slices);
        device.shared = shared;
        device.calls.push_back(call);
    }

    fn receive_desired_state(&mut self, session: SessionId, desired: DesiredState) {
        let host = self.sessions[&session];
        let before = self.agents[&host].desired_state.as_ref().map(|(before, _)| before.clone());
        let mut complete = before.clone().unwrap_or_else(|| desired.clone());
        assert!(desired.base.is_none() || desired.base == before.map(|before| before.number), "{desired:?}");
        self.incremental_states += u32::from(desired.base.is_some());
        assert_eq!(
            desired.instance,
            InstanceId(self.agents[&host].instance),
            "the desired state is for another instance"
        );
        complete.merge_newer(desired);
        let desired = complete;
        assert_eq!(
            Some(&desired),
            self.manager.desired_state(host).as_ref(),
            "changes must add up to the complete state"
        );
        let mut parts = Vec::new();
        for (id, desired_vm) in &desired.vms {
            let vm = &desired_vm.vm;
            let reservation = self.manager.durable().reservation(*id).unwrap();
            let sent: Vec<_> = desired_vm.slices.keys().map(|h| h.slice).collect();
            assert_eq!(sent, reservation.slices, "a desired state contains only some slices of a VM");
            desired_vm.slices.keys().for_each(|h| self.check_granted(host, *h));
            parts.push(format!("{vm}={}", format_holdings(desired_vm.slices.keys().copied())));
        }
        desired.scrub.keys().for_each(|h| self.check_granted(host, *h));
        let sent = desired.vms.values().flat_map(|vm| vm.slices.keys()).chain(desired.scrub.keys());
        sent.copied().collect::<Vec<_>>().into_iter().for_each(|h| self.add_access(host, h));
        let released = |force: bool| {
            format_holdings(desired.release.iter().filter(|(_, r)| r.force == force).map(|(h, _)| *h))
        };
        let lists = [
            ("release", released(false)),
            ("force", released(true)),
            ("scrub", format_holdings(desired.scrub.keys().copied())),
        ];
        parts.extend(lists.into_iter().filter(|(_, l)| !l.is_empty()).map(|(kind, l)| format!("{kind}={l}")));
        parts.extend(desired.fenced.then(|| "fenced".to_owned()));
        let words = if parts.is_empty() { "nothing".to_owned() } else { parts.join(";") };
        self.output.push(format!("{}<{words}", self.host_name(host)));
        let (now, agent) = (self.now, self.agents.get_mut(&host).unwrap());
        if let Some((before, at)) = &agent.desired_state {
            let is_resend = now >= at.after(DESIRED_STATE_RESEND_AFTER);
            assert!(
                agent.answered || is_resend,
                "a desired state was sent before the report on the previous state"
            );
            assert!(
                desired.number > before.number || desired == *before,
                "two desired states of one version differ: {desired:?} and {before:?}"
            );
        }
        agent.answered &=
            agent.desired_state.as_ref().is_some_and(|(before, _)| desired.number == before.number);
        agent.desired_state = Some((desired, now));
    }

    /// Checks that the device grants the slice to this host only, before the host receives the
    /// slice.
    fn check_granted(&self, host: HostId, holding: Holding) {
        let emc = self.manager.durable().emc_of(holding.slice).unwrap();
        let granted = self.devices[&emc].granted.get(&holding.slice);
        assert_eq!(
            granted,
            Some(&(holding.epoch, host)),
            "the desired state contains slice {} without a grant",
            holding.slice
        );
    }

    fn add_access(&mut self, host: HostId, Holding { slice, epoch }: Holding) {
        let emc = self.manager.durable().emc_of(slice).unwrap();
        self.devices.get_mut(&emc).unwrap().accessible.insert((slice, epoch, host));
    }

    /// Removes the host's access to the slices that `is_released` selects.
    fn remove_access(&mut self, host: HostId, is_released: impl Fn(Holding) -> bool) {
        for device in self.devices.values_mut() {
            device.accessible.retain(|(slice, epoch, by)| {
                *by != host || !is_released(Holding { slice: *slice, epoch: *epoch })
            });
        }
    }

    pub(super) fn complete_write(&mut self, ok: bool, on_disk: bool) {
        let Some((batch, records)) = self.pending_writes.pop_front() else { panic!("no write is pending") };
        if on_disk {
            self.write_to_disk(&records);
        }
        self.handle_event(Event::Stored { batch, ok });
    }

    fn write_to_disk(&mut self, records: &[Record]) {
        for record in records {
            match record {
                Record::Deleted(key) => drop(self.disk.remove(key)),
                record => drop(self.disk.insert(record.key(), record.clone())),
            }
        }
    }

    fn load(&mut self, restored: bool) {
        self.needs_reload = false;
        let mut records = self.disk.clone();
        let Some(Record::Meta(mut meta)) = records.remove(&Key::Meta) else {
            panic!("the disk has no meta record")
        };
        self.generation += u64::from(restored);
        meta.generation = if restored { self.generation } else { meta.generation };
        self.devices.values_mut().for_each(|device| device.requested.clear());
        self.handle_event(Event::Loaded { meta, records: records.into_values().collect(), restored });
    }

    /// Restarts the manager, which loses connections and data that is not on disk. Rack time
    /// continues from the latest time on disk.
    fn restart(&mut self, restored: bool) {
        if let Some(Record::Meta(meta)) = self.disk.get(&Key::Meta) {
            self.now = meta.rack_time;
        }
        self.manager = Manager::new(settings());
        self.pending_writes.clear();
        self.sessions.clear();
        self.agents.values_mut().for_each(|agent| {
            (agent.session, agent.desired_state) = (None, None);
        });
        self.devices.values_mut().for_each(|device| device.calls.clear());
        self.load(restored);
    }

    fn device(&mut self, emc: &str) -> &mut Device {
        let id = self.manager.durable().find_emc_by_name(&name(emc)).unwrap();
        self.devices.get_mut(&id).unwrap()
    }

    fn set_slice_working(&mut self, slice: SliceId, works: bool) {
        let emc = self.manager.durable().emc_of(slice).unwrap();
        let faulty = &mut self.devices.get_mut(&emc).unwrap().faulty;
        if works {
            faulty.remove(&slice);
        } else {
            faulty.insert(slice);
        }
    }

    fn complete_device_calls(&mut self) {
        let emcs: Vec<EmcId> = self.devices.keys().copied().collect();
        for emc in emcs {
            while let Some(call) = self.devices.get_mut(&emc).unwrap().calls.pop_front() {
                self.complete_device_call(emc, call);
            }
        }
    }

    fn complete_device_call(&mut self, emc: EmcId, call: DeviceCall) {
        let slot = match &call {
            DeviceCall::Grant { slice, .. } => self.slot_on_disk(*slice),
            _ => Slot::default(),
        };
        let done = self.devices.get_mut(&emc).unwrap().perform(call, slot);
        self.handle_event(Event::Device(emc, done));
    }

    /// Changes the grant of a slice at its device without the manager; `None` removes the grant.
    pub(super) fn set_grant(&mut self, slice: u32, granted: Option<(u64, &str)>) {
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

    /// Sets the highest epoch that a device has recorded for a slice.
    pub(super) fn set_highest_epoch(&mut self, slice: u32, epoch: u64) {
        let emc = self.manager.durable().emc_of(SliceId(slice)).unwrap();
        self.devices.get_mut(&emc).unwrap().highest.insert(SliceId(slice), Epoch(epoch));
    }

    pub(super) fn host(&self, text: &str) -> HostId {
        self.manager.durable().find_host_by_name(&name(text)).expect("the rack contains the host")
    }

    fn host_name(&self, host: HostId) -> String {
        let entry = self.manager.durable().host(host);
        entry.map_or_else(|| format!("{host}"), |entry| entry.host.name.to_string())
    }

    /// Connects an agent. With `restarts`, the agent or its machine restarted, and its previous
    /// connection is closed, unless the agent reconnects as the same instance. Otherwise the agent
    /// is a copy, which may run on another machine.
    fn connect_agent(&mut self, rest: &str, restarts: bool) {
        let (rest, boot) = rest.split_once('/').unwrap_or((rest, "b1"));
        let (host, instance) = rest.split_once('#').map_or((rest, None), |(h, i)| (h, Some(i)));
        let id = self.host(host);
        let devices = self.visible_devices(id);
        let earlier = self.agents.get(&id).cloned();
        let last = earlier.as_ref().map_or(0, |agent| agent.instance);
        let instance = instance.map_or(last + 1, |i| i.parse().unwrap());
        let restarted = earlier.as_ref().filter(|agent| agent.boot != boot || instance != last);
        let open = restarted.and_then(|agent| agent.session).filter(|id| self.sessions.contains_key(id));
        if restarts && open.is_some() {
            // The connections of an ended process are closed.
            self.disconnect_agent(host);
        }
        let agent = self.agents.entry(id).or_default();
        agent.instance = instance;
        self.connections += 1;
        let session = SessionId(self.connections);
        self.sessions.insert(session, id);
        let hello = Hello {
            instance: InstanceId(agent.instance),
            boot_id: boot.to_owned(),
            host_memory_socket: String::new(),
            devices,
            can_rehome: true,
        };
        (agent.session, agent.desired_state, agent.answered) = (Some(session), None, false);
        if std::mem::replace(&mut agent.boot, boot.to_owned()) != boot {
            agent.running.clear();
            self.remove_access(id, |_| true);
        }
        self.handle_event(Event::AgentUp(session, id, hello));
        if !restarts && !self.sessions.contains_key(&session) {
            // The copy was rejected, and the host's agent is unaffected.
            self.agents.extend(earlier.map(|earlier| (id, earlier)));
        }
    }

    /// Returns the shared devices that the agent of a host reports.
    fn visible_devices(&self, host: HostId) -> Vec<SeenDevice> {
        let emcs = self.manager.durable().emcs().filter_map(|(_, entry)| {
            let serial = entry.emc.serial.clone()?;
            let slices = self.visible_slices.get(&host).copied().unwrap_or(entry.emc.slices);
            Some(SeenDevice { serial, slices, problem: None })
        });
        emcs.filter(|device| device.slices > 0).collect()
    }

    fn disconnect_agent(&mut self, host: &str) {
        let id = self.host(host);
        let session = self.agents.get_mut(&id).unwrap().session.take().expect("the agent is connected");
        self.sessions.remove(&session);
        self.handle_event(Event::AgentDown(session));
    }

    fn send_scripted_report(&mut self, rest: &str) {
        let mut parts = rest.split(':');
        let host = self.host(parts.next().unwrap());
        let mut report = ObservedState { whole: true, ..ObservedState::default() };
        let mut early = false;
        for part in parts {
            match part.split_once('=') {
                None if part == "clean" => report.clean = true,
                None if part == "early" => early = true,
                None if part == "part" => report.whole = false,
                None if part == "more" => report.is_continued = true,
                Some(("nth", nth)) => report.part = nth.parse().unwrap(),
                Some(("after", numbers)) => {
                    let (after, sequence) = numbers.split_once('>').unwrap();
                    (report.after, report.sequence) = (after.parse().unwrap(), sequence.parse().unwrap());
                }
                Some(("online", list)) => report.online = holdings(list),
                Some(("released", list)) => report.released = holdings(list),
                Some(("scrubbed", list)) => {
                    report.scrubbed.extend(holdings(list).into_iter().map(|h| scrub_report(h, units::SLICE)));
                }
                Some(("half", list)) => {
                    report
                        .scrubbed
                        .extend(holdings(list).into_iter().map(|h| scrub_report(h, Bytes::mib(512))));
                }
                Some((kind @ ("dirty" | "broken"), list)) => {
                    let reason = if kind == "dirty" { FailureReason::NotZero } else { FailureReason::Host };
                    let message = "EIO".to_owned();
                    report.failed.extend(holdings(list).into_iter().map(|holding| SliceFailure {
                        holding,
                        reason,
                        message: message.clone(),
                    }));
                }
                Some(("ended", id)) => report.ended.push(ReservationId(id.parse().unwrap())),
                Some((vm, list)) => {
                    let (vm, rehome) = match vm.split_once('!') {
                        None => (vm, ObservedRehome::None),
                        Some((vm, "done")) => (vm, ObservedRehome::Done),
                        Some((vm, attempt)) => {
                            let attempt = attempt.parse().unwrap();
                            (vm, ObservedRehome::Failed { attempt, why: "busy".to_owned() })
                        }
                    };
                    let vm = vm.strip_prefix("vm").expect("the part of the report is known");
                    let (id, vm) = vm.split_at(vm.len() - 1);
                    let (vm, slices) = (name(vm), holdings(list));
                    let running = ObservedVm {
                        vm,
                        pid: 7,
                        slices,
                        local: Bytes::ZERO,
                        pinned: false,
                        uid: None,
                        rehome,
                    };
                    report.vms.insert(ReservationId(id.parse().unwrap()), running);
                }
                None => panic!("unknown part {part:?}"),
            }
        }
        self.send_report(host, report, early);
    }

    pub(super) fn send_report(&mut self, host: HostId, mut report: ObservedState, early: bool) {
        let agent = self.agents.get_mut(&host).unwrap();
        let Some(session) = agent.session else { return };
        agent.running.extend(report.vms.clone());
        agent.running.retain(|id, _| !report.ended.contains(id));
        if let Some((desired, _)) = agent.desired_state.as_ref().filter(|_| !early) {
            report.number = desired.number;
            agent.answered = true;
        }
        for scrub in report.scrubbed.iter().filter(|s| s.verified >= units::SLICE) {
            let Some(emc) = self.manager.durable().emc_of(scrub.holding.slice) else { continue };
            let device = self.devices.get_mut(&emc).unwrap();
            if device.granted.get(&scrub.holding.slice) == Some(&(scrub.holding.epoch, host)) {
                device.dirty.remove(&scrub.holding.slice);
            }
        }
        let scrubbed = report.scrubbed.iter().filter(|s| s.verified >= units::SLICE).map(|s| s.holding);
        let released: BTreeSet<Holding> = report.released.iter().copied().chain(scrubbed).collect();
        self.remove_access(host, |holding| report.clean || released.contains(&holding));
        self.handle_event(Event::AgentReport(session, report));
    }

    /// Applies the desired state of an agent to its host, and sends a report.
    pub(super) fn apply_desired_state(&mut self, host: HostId) {
        let Some(agent) = self.agents.get(&host) else { return };
        let Some((desired, _)) = &agent.desired_state else { return };
        let desired_slices = desired.vms.values().flat_map(|vm| vm.slices.keys().copied());
        let in_use = agent.running.values().flat_map(|vm| vm.slices.iter().copied());
        let in_use = in_use.filter(|holding| !desired.release.contains_key(holding));
        let report = ObservedState {
            online: desired_slices.chain(in_use.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
            vms: agent.running.clone(),
            released: desired.release.keys().copied().filter(|holding| !agent.is_using(*holding)).collect(),
            scrubbed: desired.scrub.keys().map(|h| scrub_report(*h, units::SLICE)).collect(),
            clean: desired.fenced && agent.running.is_empty(),
            whole: true,
            ..ObservedState::default()
        };
        self.send_report(host, report, false);
    }

    /// Lets the store, the devices and the agents act until the rig is idle. Advances the time to
    /// wakeups that are due within 50 ms.
    fn run_until_idle(&mut self) {
        for _ in 0..200 {
            if !self.pending_writes.is_empty() {
                self.complete_write(true, true);
            } else if self.needs_reload {
                self.load(false);
            } else if self.devices.values().any(|device| !device.calls.is_empty()) {
                self.complete_device_calls();
            } else if let Some(host) = self.find_unanswered_host() {
                self.apply_desired_state(host);
            } else if let Some(at) = self.manager.next_wakeup().filter(|at| *at <= self.now.after(Ns::ms(50)))
            {
                self.now = self.now.max(at);
                self.handle_event(Event::Tick);
            } else {
                return;
            }
        }
        panic!("the rig does not become idle");
    }

    fn find_unanswered_host(&self) -> Option<HostId> {
        let must_answer =
            |agent: &Agent| agent.session.is_some() && agent.desired_state.is_some() && !agent.answered;
        self.agents.iter().find(|(_, agent)| must_answer(agent)).map(|(host, _)| *host)
    }

    /// Outputs the durable state of every slice that is not free.
    fn print_slices(&mut self) {
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
        self.output.extend(words);
    }

    /// Returns whether a durable decision about this subject has a reason that contains `words`.
    pub(super) fn has_decision(&self, subject: &Subject, words: &str) -> bool {
        self.disk.values().any(|record| {
            matches!(record, Record::Decision(_, d) if d.subject == *subject && d.what.describe().why.contains(words))
        })
    }

    /// Takes a backup between the scripts `before` and `after`, restores it, and restarts the
    /// manager. The script `on_restore` runs before the restart. No agent is connected afterwards.
    pub(super) fn into_restored(mut self, before: &str, after: &str, on_restore: &str) -> Self {
        self.run(before);
        let backup = self.disk.clone();
        self.run(after);
        self.disk = backup;
        self.run(on_restore);
        self.run("restore stored device tick:10");
        self.write_all();
        self
    }

    /// Completes all pending writes.
    pub(super) fn write_all(&mut self) {
        while self.is_storing() {
            self.complete_write(true, true);
        }
    }

    pub(super) fn is_storing(&self) -> bool {
        !self.pending_writes.is_empty()
    }

    pub(super) fn is_reloading(&self) -> bool {
        self.needs_reload
    }

    pub(super) fn is_connected(&self, host: HostId) -> bool {
        self.agents.get(&host).is_some_and(|agent| agent.session.is_some())
    }
}

impl Agent {
    fn is_using(&self, holding: Holding) -> bool {
        self.running.values().any(|vm| vm.slices.contains(&holding))
    }
}

impl Device {
    /// Changes the slice numbers of the device. The contents of each slice keep their position.
    fn set_slices(&mut self, slices: Vec<SliceId>) {
        let renumber =
            |slice: SliceId, old: &[SliceId]| old.iter().position(|s| *s == slice).map(|at| slices[at]);
        if !self.slices.is_empty() && self.slices != slices {
            let old = std::mem::take(&mut self.slices);
            let granted = std::mem::take(&mut self.granted).into_iter();
            self.granted = granted.filter_map(|(s, grant)| Some((renumber(s, &old)?, grant))).collect();
            let highest = std::mem::take(&mut self.highest).into_iter();
            self.highest = highest.filter_map(|(s, epoch)| Some((renumber(s, &old)?, epoch))).collect();
            self.dirty = self.dirty.iter().filter_map(|s| renumber(*s, &old)).collect();
        }
        self.slices = slices;
    }

    fn perform(&mut self, call: DeviceCall, intent: Slot) -> DeviceReply {
        if self.broken {
            self.requested.clear();
            return DeviceReply::Failed { call, failure: DeviceFailure::Error("EIO".into()) };
        }
        match call {
            DeviceCall::Contents => DeviceReply::Contents(self.contents()),
            DeviceCall::Grant { slice, epoch, .. } if self.faulty.contains(&slice) => {
                self.requested.remove(&(slice, epoch));
                DeviceReply::Failed { call, failure: slice_failure() }
            }
            DeviceCall::Revoke { slice, .. } if self.faulty.contains(&slice) => {
                DeviceReply::Failed { call, failure: slice_failure() }
            }
            DeviceCall::Grant { slice, epoch, host } => self.grant(slice, epoch, host, intent),
            DeviceCall::Revoke { slice, epoch } => {
                self.granted.retain(|s, (e, _)| *s != slice || *e > epoch);
                DeviceReply::Revoked { slice, epoch }
            }
            DeviceCall::Fence { powered_off: false, .. } if self.shared && !self.can_stop_machines => {
                DeviceReply::Failed { call, failure: DeviceFailure::NotFenced("no command".into()) }
            }
            DeviceCall::Fence { host, .. } => {
                self.granted.retain(|slice, (_, owner)| *owner != host || self.faulty.contains(slice));
                self.accessible.retain(|(_, _, by)| *by != host);
                DeviceReply::Fenced { host }
            }
        }
    }

    fn grant(&mut self, slice: SliceId, epoch: Epoch, host: HostId, intent: Slot) -> DeviceReply {
        let held = self.granted.get(&slice).copied();
        let highest = self.highest.get(&slice).copied().unwrap_or_default();
        if let Some((held_epoch, holder)) = held.filter(|(held, _)| *held > epoch) {
            let call = DeviceCall::Grant { slice, epoch, host };
            let failure = DeviceFailure::Held { epoch: held_epoch, host: holder };
            return DeviceReply::Failed { call, failure };
        }
        if held != Some((epoch, host)) {
            assert_eq!(held, None, "slice {slice} would have two owners");
            let others =
                self.accessible.iter().find(|(accessible, _, by)| *accessible == slice && *by != host);
            assert!(
                !self.shared || others.is_none(),
                "slice {slice} is granted to {host:?} while accessible by {others:?}"
            );
            if highest >= epoch {
                let call = DeviceCall::Grant { slice, epoch, host };
                return DeviceReply::Failed { call, failure: DeviceFailure::StaleEpoch { highest } };
            }
        }
        if matches!(intent.state, State::Assigned(_)) {
            assert!(
                !self.dirty.contains(&slice) || held.is_some(),
                "slice {slice} reaches its next owner with old data"
            );
            self.dirty.insert(slice);
        }
        self.granted.insert(slice, (epoch, host));
        self.highest.insert(slice, epoch);
        DeviceReply::Granted { slice, epoch, handle: self.handle(slice, epoch) }
    }

    /// Returns the handle of a slice. On a shared device, the handle is the same for all owners.
    fn handle(&self, slice: SliceId, epoch: Epoch) -> crate::protocol::Handle {
        let place = if self.shared { format!("/{slice}") } else { format!("/{slice}.{epoch}") };
        crate::protocol::Handle::new("emc", place)
    }

    fn contents(&self) -> Contents {
        let grant = |(slice, (epoch, host)): (&SliceId, &(Epoch, HostId))| Grant {
            slice: *slice,
            epoch: *epoch,
            host: *host,
            handle: self.handle(*slice, *epoch),
        };
        Contents {
            grants: self.granted.iter().map(grant).collect(),
            highest: self.highest.iter().map(|(s, e)| (*s, *e)).collect(),
            places: self
                .slices
                .iter()
                .filter(|_| self.shared)
                .map(|s| (*s, self.handle(*s, Epoch(0))))
                .collect(),
        }
    }
}

/// Returns the error EISDIR, as for a slice whose file was replaced by a directory.
fn slice_failure() -> DeviceFailure {
    DeviceFailure::Slice(SliceError { message: "open /slices/0: it is a directory".into(), errno: Some(21) })
}

fn parse_place(text: &str) -> SchedulingTarget {
    match text.as_bytes()[0] {
        b'h' => SchedulingTarget::Host(name(text)),
        b'e' => SchedulingTarget::Emc(name(text)),
        _ => SchedulingTarget::Slice(SliceId(text.parse().unwrap())),
    }
}

fn parse_reserve(text: &str) -> Reserve {
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
