//! Invariants after random sequences: rejections change nothing, a ledger is the fold of its
//! records, and its sums are right.

use proptest::prelude::*;

use super::*;
use crate::{ledger::ended::Bounds, slice::Call};

/// A random request or report, valid or not.
#[derive(Clone, Debug)]
enum Turn {
    Reserve { vm: u8, host: u8, slices: u32, cores: u32, request: u8, client: u8 },
    Commit(u64),
    End { id: u64, force: bool },
    Break(u64),
    Step { slice: u32, kind: u8 },
    Quarantine { slice: u32, kind: u8 },
    Schedule { place: u8, to: u8 },
    Fence { host: u32, vouched: bool },
    CutOff { host: u32, emc: u32 },
    Fenced(u32),
    Report { host: u32, boot: u8, clean: bool },
    Restore,
    Reported(u32),
    Adopt { id: u64, vm: u8, slices: Vec<u32> },
    Unclaimed(u32),
    Answer(u8),
    Configure(usize),
    Live { host: u32, live: bool },
    Unseen { host: u32, emc: Option<u32> },
    Later { seconds: u64 },
}

const RACKS: [&str; 4] = [
    "e1=6 e2=6 e3=3 h1:e1+e2 h2:e1+e2+e3 h3:e3",
    "e1=6 e2=6 h1:e1+e2 h2:e1+e2 h3:e2",
    "e1=6 e2=6 e3=3 e4=2 h1:e1+e2 h2:e1+e2+e3 h3:e3+e4 h4:e4",
    "e2=6 e3=3 h1:e2 h2:e2+e3",
];

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        8 => (0..6u8, 0..4u8, 0..9u32, 0..9u32, 0..30u8, 0..3u8).prop_map(|(vm, host, slices, cores, request, client)| {
            Turn::Reserve { vm, host, slices, cores, request, client }
        }),
        3 => (0..20u64).prop_map(Turn::Commit),
        4 => (0..20u64, any::<bool>()).prop_map(|(id, force)| Turn::End { id, force }),
        1 => (0..20u64).prop_map(Turn::Break),
        24 => (0..15u32, any::<u8>()).prop_map(|(slice, kind)| Turn::Step { slice, kind }),
        2 => (0..15u32, any::<u8>()).prop_map(|(slice, kind)| Turn::Quarantine { slice, kind }),
        2 => (0..16u8, 0..3u8).prop_map(|(place, to)| Turn::Schedule { place, to }),
        1 => (0..4u32, any::<bool>()).prop_map(|(host, vouched)| Turn::Fence { host, vouched }),
        2 => (0..4u32, 0..4u32).prop_map(|(host, emc)| Turn::CutOff { host, emc }),
        1 => (0..4u32).prop_map(Turn::Fenced),
        2 => (0..4u32, 0..3u8, any::<bool>()).prop_map(|(host, boot, clean)| Turn::Report { host, boot, clean }),
        1 => Just(Turn::Restore),
        2 => (0..4u32).prop_map(Turn::Reported),
        3 => (0..20u64, 0..6u8, prop::collection::vec(0..15u32, 1..3))
            .prop_map(|(id, vm, slices)| Turn::Adopt { id, vm, slices }),
        1 => (0..15u32).prop_map(Turn::Unclaimed),
        1 => (0..6u8).prop_map(Turn::Answer),
        1 => (0..RACKS.len()).prop_map(Turn::Configure),
        3 => (0..4u32, prop::bool::weighted(0.8)).prop_map(|(host, live)| Turn::Live { host, live }),
        1 => (0..4u32, prop::option::of(0..4u32)).prop_map(|(host, emc)| Turn::Unseen { host, emc }),
        2 => prop_oneof![0..400u64, Just(90_000)].prop_map(|seconds| Turn::Later { seconds }),
    ]
}

fn vm(number: u8) -> Name {
    name(&format!("vm{number}"))
}

impl Rack {
    fn take(&mut self, when: &mut When, turn: &Turn) -> Result<(), Denied> {
        let change = match turn {
            Turn::Later { seconds } => {
                when.now = when.now.after(Ns::secs(*seconds));
                self.upkeep(*when);
                return Ok(());
            }
            Turn::Live { host, live } => {
                self.ledger.set_live(HostId(*host), *live);
                return Ok(());
            }
            Turn::Unseen { host, emc } => {
                let unseen = emc.iter().map(|emc| (EmcId(*emc), "why".to_owned())).collect();
                self.ledger.set_unseen(HostId(*host), unseen);
                return Ok(());
            }
            turn => self.decide(*when, turn)?,
        };
        self.apply(change);
        Ok(())
    }

    fn upkeep(&mut self, when: When) {
        for id in self.ledger.overdue(when, 100) {
            let change = self.ledger.decide_end(when, id, EndedBy::Deadline, Actor::Manager).unwrap();
            self.apply(change);
        }
        for change in [self.ledger.decide_ask_again(when, 100), self.ledger.decide_forget(when, 100)] {
            self.apply(change);
        }
        while let Some(change) = self.ledger.decide_evict(when, Ns::NEVER) {
            self.apply(change);
        }
    }

    fn decide(&self, when: When, turn: &Turn) -> Result<Change, Denied> {
        let ledger = &self.ledger;
        Ok(match turn {
            Turn::Reserve { vm, host, slices, cores, request, client } => {
                let asked = ask(&format!("vm{vm}"), &format!("h{}", host + 1), *slices);
                let id = RequestId::new(&format!("r{request}")).unwrap();
                let request = RequestKey { id, client: name(&format!("c{client}")) };
                match ledger.decide_reserve(when, Reserve { request, cores: *cores, ..asked })? {
                    Decided::New(_, change) => change,
                    Decided::Repeat(_) => Change::default(),
                }
            }
            Turn::Commit(id) => ledger.decide_commit(when, ReservationId(*id), tester())?,
            Turn::End { id, force } => {
                let why = EndedBy::Released { force: *force, reason: String::new() };
                ledger.decide_end(when, ReservationId(*id), why, tester())?
            }
            Turn::Break(id) => ledger.decide_break(when, ReservationId(*id), "why".into()),
            Turn::Step { slice, kind } => self.step(SliceId(*slice), *kind),
            Turn::Quarantine { slice, kind } => {
                let host = HostId(u32::from(*kind) % 4);
                let why = match kind % 3 {
                    0 => Quarantine::LostGrant,
                    1 => Quarantine::UnknownGrant { host },
                    _ => Quarantine::Restored { host: Some(host) },
                };
                ledger
                    .decide_quarantine(when, SliceId(*slice), Event::Quarantine(why), "")
                    .unwrap_or_default()
            }
            Turn::Schedule { place, to } => {
                let to = [Scheduling::Enabled, Scheduling::Cordoned, Scheduling::Draining][usize::from(*to)];
                ledger.decide_scheduling(when, &some_place(*place), to, tester(), "why")?
            }
            Turn::Fence { host, vouched } => {
                ledger.decide_fence(when, HostId(*host), *vouched, tester(), "why")
            }
            Turn::CutOff { host, emc } => ledger.decide_cut_off(when, HostId(*host), EmcId(*emc)),
            Turn::Fenced(host) => ledger.decide_fenced(when, HostId(*host)),
            Turn::Report { host, boot, clean } => {
                ledger.decide_report(when, HostId(*host), &format!("b{boot}"), *clean)
            }
            Turn::Restore => ledger.decide_restored(),
            Turn::Reported(host) => ledger.decide_reported(when, HostId(*host)),
            Turn::Adopt { id, vm: number, slices } => {
                self.adopt(when, ReservationId(*id), &vm(*number), slices)
            }
            Turn::Unclaimed(slice) => {
                let quarantined = |slot: Slot| matches!(slot.state, State::Quarantined(_));
                let such = |s: &SliceId| ledger.slot(*s).is_some_and(quarantined);
                let slices: Vec<_> = [SliceId(*slice)].into_iter().filter(such).collect();
                ledger.decide_unclaimed(&slices)
            }
            Turn::Answer(number) => {
                let (_, change) = ledger.decide_migration(
                    when,
                    &vm(*number),
                    [MigrationAnswer::Accepted, MigrationAnswer::Declined, MigrationAnswer::Done]
                        [usize::from(number % 3)],
                    String::new(),
                    tester(),
                )?;
                change
            }
            Turn::Configure(which) => ledger.decide_configure(when, &RackSpec::in_words(RACKS[*which]))?,
            Turn::Live { .. } | Turn::Unseen { .. } | Turn::Later { .. } => Change::default(),
        })
    }

    /// Returns an event that is possible in the slice's state, sometimes an impossible one.
    fn step(&self, slice: SliceId, kind: u8) -> Change {
        let Some(slot) = self.ledger.slot(slice) else { return Change::default() };
        let (epoch, holder) = (slot.epoch, slot.holder().unwrap_or(HostId(u32::from(kind) % 3)));
        let scrubbed = Scrubbed {
            holding: Holding { slice, epoch },
            started: UnixMs(0),
            ended: UnixMs(1),
            verified: units::SLICE,
        };
        let event = match (slot.device_call(true), slot.state, kind % 8) {
            (_, _, 0) => Event::Raise(Epoch(epoch.0 + 2)),
            (_, State::Onlining(_), 1) => Event::FoundDirty(holder, epoch),
            (_, State::Scrubbing(Scrub::Working(_)), 1) => Event::ScrubFailed(holder, epoch),
            (_, _, 1) => Event::OwnerFenced(holder),
            (Some(Call::Grant { .. }), ..) => Event::Granted(epoch),
            (Some(Call::Revoke { .. }), ..) => Event::Revoked(epoch),
            (None, State::Onlining(_), _) => Event::Onlined(holder, epoch),
            (None, State::Draining(..), _) => Event::Released(holder, epoch),
            (None, State::Scrubbing(Scrub::Waiting), _) => Event::ScrubBy(holder),
            (None, State::Scrubbing(_), _) => Event::Scrubbed(holder, scrubbed),
            (None, State::Quarantined(_), 2) => Event::Requalify { let_go: true },
            (None, ..) => Event::Onlined(holder, Epoch(epoch.0 + 1)),
        };
        self.ledger.decide_slice(slice, event).unwrap_or_default()
    }

    fn adopt(&self, when: When, id: ReservationId, vm: &Name, slices: &[u32]) -> Change {
        let mut slices = slices.to_vec();
        slices.sort_unstable();
        slices.dedup();
        let found: Vec<_> =
            slices.iter().filter_map(|s| Some((SliceId(*s), self.ledger.slot(SliceId(*s))?))).collect();
        let Some(host) = found.first().and_then(|(_, slot)| slot.holder()) else { return Change::default() };
        let known = self.ledger.reservation(id);
        if known.is_some_and(|known| known.vm != *vm || known.host != host)
            || !self.ledger.hosts.contains_key(&host)
        {
            return Change::default(); // the manager assigns a number of its own
        }
        let slices = found.into_iter().map(|(slice, slot)| Holding { slice, epoch: slot.epoch }).collect();
        let running = HaveVm { vm: vm.clone(), pid: 7, slices, local: Bytes::ZERO, pinned: false, uid: None };
        self.ledger.decide_adopt(when, host, id, &running).unwrap_or_default()
    }
}

fn some_place(number: u8) -> Place {
    match number {
        0..4 => Place::Host(name(&format!("h{}", number + 1))),
        4..8 => Place::Emc(name(&format!("e{}", number - 3))),
        slice => Place::Slice(SliceId(u32::from(slice) - 8)),
    }
}

/// Returns the complete state of a ledger, derived values included, in a fixed order.
fn all_of(ledger: &Ledger) -> String {
    let by_vm: BTreeMap<_, _> = ledger.by_vm.iter().collect();
    let by_request: BTreeMap<_, _> = ledger.by_request.iter().collect();
    let slices_out: BTreeMap<_, _> = ledger.slices_out.iter().collect();
    let slots: Vec<_> = ledger.slots_from(SliceId(0)).collect();
    let named = (&ledger.by_emc_name, &ledger.by_host_name);
    let known = (&ledger.meta, slots, &ledger.emcs, &ledger.hosts, &ledger.reservations, &ledger.migrations);
    let times = (&ledger.deadlines, &ledger.declined);
    let progress: BTreeMap<_, _> = ledger.progress.iter().collect();
    let by_name = (by_vm, &ledger.ended_of_vm, progress);
    format!("{:#?}", (known, named, by_name, by_request, times, ledger.ended.checked(), slices_out))
}

/// Checks that indexes of ended requests agree with the reservations, and that requests of active
/// ones are found.
fn requests(ledger: &Ledger) {
    let mut out: BTreeMap<ReservationId, u32> = BTreeMap::new();
    for id in ledger.slots_from(SliceId(0)).filter_map(|(_, _, slot)| slot.reservation()) {
        *out.entry(id).or_default() += 1;
    }
    assert_eq!(out, ledger.slices_out.iter().map(|(id, slices)| (*id, *slices)).collect());
    let mut ended: BTreeMap<Name, BTreeSet<(Ns, ReservationId)>> = BTreeMap::new();
    for (id, reservation) in &ledger.reservations {
        match reservation.stage {
            Stage::Ended { at, .. } if !out.contains_key(id) => {
                ended.entry(reservation.request.client.clone()).or_default().insert((at, *id));
            }
            Stage::Ended { .. } => {}
            _ => assert_eq!(ledger.by_request.get(&reservation.request), Some(id)),
        }
    }
    assert_eq!(&ended, ledger.ended.checked());
}

/// Checks that after upkeep no more ended requests are recorded than allowed.
fn is_bounded(ledger: &Ledger) {
    let ended = ledger.ended.checked();
    assert!(ledger.ended.len() <= ledger.ended.bounds.total);
    assert!(ended.values().all(|requests| requests.len() <= ledger.ended.bounds.per_client));
}

/// Compares every index with one computed from slots, hosts and reservations.
pub(super) fn indexes(ledger: &Ledger) {
    let slots = || ledger.slots_from(SliceId(0));
    for (id, host) in ledger.hosts() {
        let of_host = || slots().filter(|(_, _, slot)| slot.holder() == Some(id));
        let held: BTreeSet<_> = of_host().map(|(slice, ..)| slice).collect();
        let scrubs =
            of_host().filter(|(.., slot)| slot.is_being_scrubbed()).map(|(slice, ..)| slice).collect();
        assert_eq!((&host.held, &host.scrubs), (&held, &scrubs), "slices of {id:?}");
    }
    let mut outside = BTreeMap::<HostId, BTreeSet<SliceId>>::new();
    for (slice, _, slot) in slots() {
        if let Some(host) = slot.holder().filter(|host| !ledger.hosts.contains_key(host)) {
            outside.entry(host).or_default().insert(slice);
        }
    }
    assert_eq!(ledger.held_outside, outside, "slices whose holders are not in the rack");
    for (id, emc) in ledger.emcs() {
        let wired = || ledger.hosts().filter(|(_, host)| host.host.emcs.contains(&id));
        let unreported = wired().filter(|(_, host)| host.host.must_report_on(id)).count();
        assert_eq!(emc.unreported as usize, unreported, "hosts of {id:?} that have yet to report");
        let fit = wired().filter(|(_, host)| {
            let cut = host.unseen().contains_key(&id) || host.host.unconfirmed_fences.contains(&id);
            let barred = host.host.must_report || cut;
            host.live && host.host.fence == Fence::None && !barred
        });
        let scrubbers: BTreeSet<_> = fit.map(|(host, entry)| (entry.scrubbing(), host)).collect();
        assert_eq!(emc.scrubbers, scrubbers, "hosts that may scrub slices of {id:?}");
        let mut states = BTreeMap::<&str, u32>::new();
        for (.., slot) in slots().filter(|(_, of, _)| *of == id) {
            *states.entry(slot.state_name()).or_default() += 1;
        }
        let counted: BTreeMap<_, _> = emc.states().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, states, "slices of {id:?} by state");
        let waits =
            slots().filter(|(_, of, slot)| *of == id && slot.state == State::Scrubbing(Scrub::Waiting));
        let waits = waits.map(|(slice, ..)| slice);
        assert!(emc.slices_to_scrub().eq(waits), "slices of {id:?} that wait for a scrubber");
        let restored = slots().filter(|(_, of, slot)| {
            let restored = matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }));
            let known = slot.holder().is_none_or(|host| ledger.hosts.contains_key(&host));
            *of == id && restored && known
        });
        let unclaimed: BTreeSet<_> = restored.map(|(slice, ..)| slice).collect();
        assert_eq!(emc.unclaimed, unclaimed, "slices of {id:?} that wait for a claim");
        let quarantined = slots().filter(|(_, of, slot)| *of == id && slot.is_quarantined());
        let for_good: Vec<_> =
            quarantined.map(|(slice, ..)| slice).filter(|slice| !unclaimed.contains(slice)).collect();
        assert_eq!(emc.quarantined_for_good().collect::<Vec<_>>(), for_good, "quarantined in {id:?}");
        assert_eq!(emc.quarantined_for_good_count(), for_good.len());
    }
    for (id, reservation) in &ledger.reservations {
        let named = || reservation.slices.iter().filter_map(|slice| Some((*slice, ledger.slot(*slice)?)));
        let own = |slot: Slot| slot.reservation() == Some(*id);
        let is = |slot: Slot, names: &[&str]| own(slot) && names.contains(&slot.state_name());
        let granted = named().filter(|(_, slot)| is(*slot, &["onlining", "online"])).count();
        let online = named().filter(|(_, slot)| is(*slot, &["online"])).count();
        assert_eq!(ledger.is_granted(*id, reservation), granted == reservation.slices.len());
        assert_eq!(ledger.online(*id) as usize, online, "online slices of {id:?}");
        let mut recomputed = ledger.clone();
        recomputed.recompute_progress(*id, reservation);
        assert_eq!(ledger.progress, recomputed.progress, "progress of {id:?}");
    }
    assert_eq!(ledger.progress.len(), ledger.reservations.len());
}

fn sums(ledger: &Ledger) {
    requests(ledger);
    indexes(ledger);
    for (id, entry) in ledger.emcs() {
        let own = ledger.slots_from(SliceId(0)).filter(|(_, emc, _)| *emc == id);
        let in_use = own.filter(|(_, _, slot)| {
            matches!(slot.state, State::Assigned(_) | State::Onlining(_) | State::Online(_))
        });
        let in_use = u32::try_from(in_use.count()).unwrap();
        let sum = entry.free() + in_use + entry.draining() + entry.quarantined();
        assert_eq!(sum, entry.emc.slices, "free + in use + draining + quarantined");
    }
    for (id, entry) in ledger.hosts() {
        let active = ledger.reservations.values().filter(|r| r.host == id && r.is_active());
        let cores: u32 = active.map(|r| r.cores).sum();
        assert_eq!(entry.cores_used, cores);
        assert!(cores <= entry.host.cores, "more cores than there are");
    }
    let active = || ledger.reservations.iter().filter(|(_, r)| r.is_active());
    assert_eq!(active().count(), ledger.by_vm.len(), "one active reservation per VM");
    for (id, reservation) in active() {
        assert_eq!(ledger.reservation_of(&reservation.vm), Some(*id));
    }
    for (id, migration) in ledger.migrations() {
        assert!(ledger.reservations[&id].is_active(), "who ended need not move");
        let mut hosts = ledger.hosts().map(|(_, h)| ("host", &h.host.name, h.host.scheduling));
        let mut emcs = ledger.emcs().map(|(_, e)| ("emc", &e.emc.name, e.emc.scheduling));
        let asks = |(kind, name, to): (&str, &Name, Scheduling)| {
            to == Scheduling::Draining && migration.why == format!("{kind} {name} is draining")
        };
        assert!(hosts.any(asks) || emcs.any(asks), "asked for nothing: {migration:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn rejected_decision_changes_nothing_and_totals_are_correct(story in prop::collection::vec(turn(), 0..120)) {
        let (mut rack, mut when) = (Rack::of(RACKS[0]), at(1));
        rack.ledger.ended.bounds = Bounds { per_client: 2, total: 3, established_after: Ns::secs(300) };
        for turn in &story {
            let before = rack.ledger.clone();
            if rack.take(&mut when, turn).is_err() {
                prop_assert_eq!(all_of(&before), all_of(&rack.ledger), "{:?}", turn);
            }
            sums(&rack.ledger);
            if let Turn::Later { .. } = turn {
                is_bounded(&rack.ledger);
            }
        }
    }

    /// Derived values never differ from the records.
    #[test]
    fn loaded_ledger_equals_the_fold_of_its_records(story in prop::collection::vec(turn(), 0..120)) {
        let (mut rack, mut when) = (Rack::of(RACKS[0]), at(1));
        for turn in &story {
            let _ = rack.take(&mut when, turn);
        }
        let mut loaded = Ledger::load(rack.ledger.meta().clone(), rack.disk.values().rev().cloned());
        for (id, host) in rack.ledger.hosts() {
            loaded.set_live(id, host.live); // these two are not durable
            loaded.set_unseen(id, host.unseen.clone());
        }
        indexes(&loaded);
        prop_assert_eq!(all_of(&loaded), all_of(&rack.ledger));
    }

    /// After any sequence, slices change their owner only from free or scrubbed, and epochs never
    /// repeat.
    #[test]
    fn slice_owners_have_distinct_epochs(story in prop::collection::vec(turn(), 0..120)) {
        let (mut rack, mut when) = (Rack::of(RACKS[0]), at(1));
        let mut owners: BTreeMap<(SliceId, Epoch), HostId> = BTreeMap::new();
        for turn in &story {
            let _ = rack.take(&mut when, turn);
            for (slice, _, slot) in rack.ledger.slots_from(SliceId(0)) {
                if let State::Assigned(owner) | State::Onlining(owner) = slot.state {
                    let first = *owners.entry((slice, slot.epoch)).or_insert(owner.host);
                    prop_assert_eq!(first, owner.host);
                }
            }
        }
    }
}
