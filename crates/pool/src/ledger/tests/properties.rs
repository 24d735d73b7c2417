//! Property tests of the ledger with random decisions: a rejected decision changes nothing,
//! applying the records again yields the same ledger, and all totals are correct.

use proptest::prelude::*;

use super::*;
use crate::{ledger::ended::RequestLimits, slice::Call};

/// Random request or report, which may be invalid.
#[derive(Clone, Debug)]
enum Action {
    Reserve { vm: u8, host: u8, slices: u32, cores: u32, request: u8, client: u8 },
    Commit(u64),
    End { id: u64, force: bool },
    Break(u64),
    Process { id: u64, running: bool },
    Step { slice: u32, kind: u8 },
    Quarantine { slice: u32, kind: u8 },
    Schedule { place: u8, to: u8 },
    Fence { host: u32, powered_off: bool },
    FenceConfirmed { host: u32, emc: u32 },
    FenceCompleted(u32),
    AgentIdentity { host: u32, boot: u8, clean: bool },
    Restore,
    HostReported(u32),
    Adopt { id: u64, vm: u8, slices: Vec<u32> },
    ReleaseUnclaimed(u32),
    ResolveMigration(u8),
    RequestSlowdownMigration { id: u64, max_per_hour: u32 },
    EndSlowdown(u64),
    Rehome { id: u64, is_automatic: bool },
    CancelRehome { id: u64 },
    RehomeEnded { id: u64, failed_attempt: Option<u32> },
    Configure(usize),
    SetLive { host: u32, live: bool },
    SetUnseen { host: u32, emc: Option<u32> },
    AdvanceTime { seconds: u64 },
}

const RACK_SPECS: [&str; 4] = [
    "e1=6 e2=6 e3=3 h1:e1+e2 h2:e1+e2+e3 h3:e3",
    "e1=6 e2=6 h1:e1+e2 h2:e1+e2 h3:e2",
    "e1=6 e2=6 e3=3 e4=2 h1:e1+e2 h2:e1+e2+e3 h3:e3+e4 h4:e4",
    "e2=6 e3=3 h1:e2 h2:e2+e3",
];

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (0..6u8, 0..4u8, 0..9u32, 0..9u32, 0..30u8, 0..3u8).prop_map(|(vm, host, slices, cores, request, client)| {
            Action::Reserve { vm, host, slices, cores, request, client }
        }),
        3 => (0..20u64).prop_map(Action::Commit),
        4 => (0..20u64, any::<bool>()).prop_map(|(id, force)| Action::End { id, force }),
        1 => (0..20u64).prop_map(Action::Break),
        4 => (0..20u64, any::<bool>()).prop_map(|(id, running)| Action::Process { id, running }),
        24 => (0..15u32, any::<u8>()).prop_map(|(slice, kind)| Action::Step { slice, kind }),
        2 => (0..15u32, any::<u8>()).prop_map(|(slice, kind)| Action::Quarantine { slice, kind }),
        2 => (0..16u8, 0..3u8).prop_map(|(place, to)| Action::Schedule { place, to }),
        1 => (0..4u32, any::<bool>()).prop_map(|(host, powered_off)| Action::Fence { host, powered_off }),
        2 => (0..4u32, 0..4u32).prop_map(|(host, emc)| Action::FenceConfirmed { host, emc }),
        1 => (0..4u32).prop_map(Action::FenceCompleted),
        2 => (0..4u32, 0..3u8, any::<bool>()).prop_map(|(host, boot, clean)| Action::AgentIdentity { host, boot, clean }),
        1 => Just(Action::Restore),
        2 => (0..4u32).prop_map(Action::HostReported),
        3 => (0..20u64, 0..6u8, prop::collection::vec(0..15u32, 1..3))
            .prop_map(|(id, vm, slices)| Action::Adopt { id, vm, slices }),
        1 => (0..15u32).prop_map(Action::ReleaseUnclaimed),
        1 => (0..6u8).prop_map(Action::ResolveMigration),
        3 => (0..20u64, 0..4u32)
            .prop_map(|(id, max_per_hour)| Action::RequestSlowdownMigration { id, max_per_hour }),
        1 => (0..20u64).prop_map(Action::EndSlowdown),
        3 => (0..20u64, any::<bool>()).prop_map(|(id, is_automatic)| Action::Rehome { id, is_automatic }),
        1 => (0..20u64).prop_map(|id| Action::CancelRehome { id }),
        2 => (0..20u64, prop::option::of(1..3u32))
            .prop_map(|(id, failed_attempt)| Action::RehomeEnded { id, failed_attempt }),
        1 => (0..RACK_SPECS.len()).prop_map(Action::Configure),
        3 => (0..4u32, prop::bool::weighted(0.8)).prop_map(|(host, live)| Action::SetLive { host, live }),
        1 => (0..4u32, prop::option::of(0..4u32)).prop_map(|(host, emc)| Action::SetUnseen { host, emc }),
        2 => prop_oneof![0..400u64, Just(90_000)].prop_map(|seconds| Action::AdvanceTime { seconds }),
    ]
}

fn vm_name(number: u8) -> Name {
    name(&format!("vm{number}"))
}

impl Rack {
    fn perform_action(&mut self, when: &mut When, action: &Action) -> Result<(), Rejection> {
        let change = match action {
            Action::AdvanceTime { seconds } => {
                when.now = when.now.after(Ns::secs(*seconds));
                self.perform_upkeep(*when);
                return Ok(());
            }
            Action::SetLive { host, live } => {
                self.ledger.set_host_live(HostId(*host), *live);
                return Ok(());
            }
            Action::SetUnseen { host, emc } => {
                let unusable_emcs = emc.iter().map(|emc| (EmcId(*emc), "why".to_owned())).collect();
                self.ledger.set_unusable_emcs(HostId(*host), unusable_emcs);
                return Ok(());
            }
            action => self.decide(*when, action)?,
        };
        self.apply(change);
        Ok(())
    }

    fn perform_upkeep(&mut self, when: When) {
        for id in self.ledger.overdue_reservations(when, 100) {
            let change =
                self.ledger.decide_reservation_end(when, id, EndReason::Deadline, Actor::Manager).unwrap();
            self.apply(change);
        }
        for change in [
            self.ledger.decide_migration_retry(when, 100),
            self.ledger.decide_slowdown_expiry(when, 100),
            self.ledger.decide_pruning(when, 100),
        ] {
            self.apply(change);
        }
        while let Some(change) = self.ledger.decide_eviction(when, Ns::NEVER) {
            self.apply(change);
        }
    }

    fn decide(&self, when: When, action: &Action) -> Result<Change, Rejection> {
        let ledger = &self.ledger;
        Ok(match action {
            Action::Reserve { vm, host, slices, cores, request, client } => {
                let base = reserve_request(&format!("vm{vm}"), &format!("h{}", host + 1), *slices);
                let id = RequestId::new(&format!("r{request}")).unwrap();
                let request = RequestKey { id, client: name(&format!("c{client}")) };
                match ledger.decide_reserve(when, Reserve { request, cores: *cores, ..base })? {
                    ReserveOutcome::New(_, change) => change,
                    ReserveOutcome::Repeat(_) => Change::default(),
                }
            }
            Action::Commit(id) => ledger.decide_commit(when, ReservationId(*id), tester())?,
            Action::End { id, force } => {
                let why = EndReason::Released { force: *force, reason: String::new() };
                ledger.decide_reservation_end(when, ReservationId(*id), why, tester())?
            }
            Action::Break(id) => ledger.decide_reservation_break(when, ReservationId(*id), "why".into()),
            Action::Process { id, running } => self.report_process(when, ReservationId(*id), *running),
            Action::Step { slice, kind } => self.next_slice_change(SliceId(*slice), *kind),
            Action::Quarantine { slice, kind } => {
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
            Action::Schedule { place, to } => {
                let to = [Scheduling::Enabled, Scheduling::Cordoned, Scheduling::Draining][usize::from(*to)];
                ledger.decide_scheduling(when, &scheduling_target_from(*place), to, tester(), "why")?
            }
            Action::Fence { host, powered_off } => {
                ledger.decide_fence(when, HostId(*host), *powered_off, tester(), "why")
            }
            Action::FenceConfirmed { host, emc } => {
                ledger.decide_fence_confirmation(when, HostId(*host), EmcId(*emc))
            }
            Action::FenceCompleted(host) => ledger.decide_fence_completion(when, HostId(*host)),
            Action::AgentIdentity { host, boot, clean } => {
                ledger.decide_agent_identity(when, HostId(*host), &format!("b{boot}"), *clean)
            }
            Action::Restore => ledger.decide_restore(),
            Action::HostReported(host) => ledger.decide_host_report(when, HostId(*host)),
            Action::Adopt { id, vm: number, slices } => {
                self.adopt(when, ReservationId(*id), &vm_name(*number), slices)
            }
            Action::ReleaseUnclaimed(slice) => {
                let in_quarantine = |slot: Slot| matches!(slot.state, State::Quarantined(_));
                let is_quarantined = |s: &SliceId| ledger.slot(*s).is_some_and(in_quarantine);
                let slices: Vec<_> = [SliceId(*slice)].into_iter().filter(is_quarantined).collect();
                ledger.decide_unclaimed_requalification(&slices)
            }
            Action::ResolveMigration(number) => {
                let (_, change) = ledger.decide_migration(
                    when,
                    (&vm_name(*number), None),
                    [MigrationAnswer::Accepted, MigrationAnswer::Declined, MigrationAnswer::Done]
                        [usize::from(number % 3)],
                    String::new(),
                    tester(),
                )?;
                change
            }
            Action::RequestSlowdownMigration { id, max_per_hour } => {
                let estimate = SlowdownEstimate { loss: Some(0.1), severity: 2.0, samples: 3 };
                ledger.decide_slowdown(when, ReservationId(*id), estimate, *max_per_hour)?
            }
            Action::Rehome { id, is_automatic } => {
                let target = Target::Reservation(ReservationId(*id));
                ledger.decide_rehome(when, &target, tester(), *is_automatic)?.1
            }
            Action::CancelRehome { id } => {
                let target = Target::Reservation(ReservationId(*id));
                ledger.decide_rehome_cancellation(when, &target, tester())?.1
            }
            Action::RehomeEnded { id, failed_attempt: None } => {
                ledger.decide_rehome_completion(when, ReservationId(*id), tester())
            }
            Action::RehomeEnded { id, failed_attempt: Some(attempt) } => {
                ledger.decide_rehome_failure(when, ReservationId(*id), *attempt, "why", tester())
            }
            Action::EndSlowdown(id) => ledger.decide_slowdown_end(when, ReservationId(*id)),
            Action::Configure(which) => {
                ledger.decide_configuration(when, &RackSpec::parse(RACK_SPECS[*which]))?
            }
            Action::SetLive { .. } | Action::SetUnseen { .. } | Action::AdvanceTime { .. } => {
                Change::default()
            }
        })
    }

    /// Returns the change after a report that the process of a reservation runs or has ended.
    /// Ignores processes on fenced hosts, as the manager does.
    fn report_process(&self, when: When, id: ReservationId, running: bool) -> Change {
        let host = self.ledger.reservation(id).and_then(|reservation| self.ledger.host(reservation.host));
        match host {
            Some(entry) if entry.host.fence == Fence::None => {
                self.ledger.decide_process_change(when, id, running, tester())
            }
            _ => Change::default(),
        }
    }

    /// Returns the change for an event that the slice usually accepts in its current state.
    fn next_slice_change(&self, slice: SliceId, kind: u8) -> Change {
        let Some(slot) = self.ledger.slot(slice) else { return Change::default() };
        let (epoch, holder) = (slot.epoch, slot.holder().unwrap_or(HostId(u32::from(kind) % 3)));
        let scrubbed = ScrubReport {
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
            (None, State::Quarantined(_), 2) => Event::Requalify { is_released: true },
            (None, ..) => Event::Onlined(holder, Epoch(epoch.0 + 1)),
        };
        self.ledger.decide_slice_change(slice, event).unwrap_or_default()
    }

    fn adopt(&self, when: When, id: ReservationId, vm: &Name, slices: &[u32]) -> Change {
        let mut slices = slices.to_vec();
        slices.sort_unstable();
        slices.dedup();
        let existing: Vec<_> =
            slices.iter().filter_map(|s| Some((SliceId(*s), self.ledger.slot(SliceId(*s))?))).collect();
        let Some(host) = existing.first().and_then(|(_, slot)| slot.holder()) else {
            return Change::default();
        };
        let reservation = self.ledger.reservation(id);
        if reservation.is_some_and(|reservation| reservation.vm != *vm || reservation.host != host)
            || !self.ledger.hosts.contains_key(&host)
        {
            // The manager does not adopt a VM under the ID of another reservation.
            return Change::default();
        }
        let slices = existing.into_iter().map(|(slice, slot)| Holding { slice, epoch: slot.epoch }).collect();
        let running = ObservedVm {
            vm: vm.clone(),
            pid: 7,
            slices,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: crate::protocol::ObservedRehome::None,
        };
        self.ledger.decide_adoption(when, host, id, &running).unwrap_or_default()
    }
}

fn scheduling_target_from(number: u8) -> SchedulingTarget {
    match number {
        0..4 => SchedulingTarget::Host(name(&format!("h{}", number + 1))),
        4..8 => SchedulingTarget::Emc(name(&format!("e{}", number - 3))),
        slice => SchedulingTarget::Slice(SliceId(u32::from(slice) - 8)),
    }
}

/// Formats the complete state of a ledger, including derived indexes, in a fixed order.
fn format_full_state(ledger: &Ledger) -> String {
    let by_vm: BTreeMap<_, _> = ledger.by_vm.iter().collect();
    let by_request: BTreeMap<_, _> = ledger.by_request.iter().collect();
    let outstanding_slices: BTreeMap<_, _> = ledger.outstanding_slices.iter().collect();
    let slots: Vec<_> = ledger.slots_from(SliceId(0)).collect();
    let named = (&ledger.by_emc_name, &ledger.by_host_name);
    let records =
        (&ledger.meta, slots, &ledger.emcs, &ledger.hosts, &ledger.reservations, &ledger.migrations);
    let times = (&ledger.deadlines, &ledger.answered);
    let progress: BTreeMap<_, _> = ledger.progress.iter().collect();
    let by_name = (by_vm, &ledger.ended_of_vm, progress);
    format!(
        "{:#?}",
        (records, named, by_name, by_request, times, ledger.ended.check_indexes(), outstanding_slices)
    )
}

/// Checks that the request index matches the reservations and contains every active reservation.
fn check_requests(ledger: &Ledger) {
    let mut outstanding: BTreeMap<ReservationId, u32> = BTreeMap::new();
    for id in ledger.slots_from(SliceId(0)).filter_map(|(_, _, slot)| slot.reservation()) {
        *outstanding.entry(id).or_default() += 1;
    }
    assert_eq!(outstanding, ledger.outstanding_slices.iter().map(|(id, slices)| (*id, *slices)).collect());
    let mut ended: BTreeMap<Name, BTreeSet<(Ns, ReservationId)>> = BTreeMap::new();
    for (id, reservation) in &ledger.reservations {
        match reservation.stage {
            Stage::Ended { at, .. } if !outstanding.contains_key(id) && !reservation.has_process => {
                ended.entry(reservation.request.client.clone()).or_default().insert((at, *id));
            }
            Stage::Ended { .. } => {}
            _ => assert_eq!(ledger.by_request.get(&reservation.request), Some(id)),
        }
    }
    assert_eq!(&ended, ledger.ended.check_indexes());
}

/// Checks that the stored ended requests are within their limits after upkeep.
fn check_request_limits(ledger: &Ledger) {
    let ended = ledger.ended.check_indexes();
    assert!(ledger.ended.len() <= ledger.ended.bounds.total);
    assert!(ended.values().all(|requests| requests.len() <= ledger.ended.bounds.per_client));
}

/// Compares every index with an index computed from slots, hosts and reservations.
pub(super) fn check_indexes(ledger: &Ledger) {
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
    assert_eq!(ledger.held_outside_rack, outside, "slices whose holders are not in the rack");
    for (id, emc) in ledger.emcs() {
        let attached = || ledger.hosts().filter(|(_, host)| host.host.emcs.contains(&id));
        let unreported = attached().filter(|(_, host)| host.host.must_report_on(id)).count();
        assert_eq!(emc.unreported_hosts as usize, unreported, "hosts of {id:?} that have not reported");
        let eligible = attached().filter(|(_, host)| {
            let unusable =
                host.unusable_emcs().contains_key(&id) || host.host.unconfirmed_fences.contains(&id);
            let excluded = host.host.must_report || unusable;
            host.is_live && host.host.fence == Fence::None && !excluded
        });
        let scrubbers: BTreeSet<_> = eligible.map(|(host, entry)| (entry.scrubbing(), host)).collect();
        assert_eq!(emc.scrubbers, scrubbers, "hosts that may scrub slices of {id:?}");
        let mut states = BTreeMap::<&str, u32>::new();
        for (.., slot) in slots().filter(|(_, of, _)| *of == id) {
            *states.entry(slot.state_name()).or_default() += 1;
        }
        let counted: BTreeMap<_, _> = emc.states().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, states, "slices of {id:?} by state");
        let waiting =
            slots().filter(|(_, of, slot)| *of == id && slot.state == State::Scrubbing(Scrub::Waiting));
        let waiting = waiting.map(|(slice, ..)| slice);
        assert!(emc.slices_to_scrub().eq(waiting), "slices of {id:?} waiting for a scrubber");
        let restored = slots().filter(|(_, of, slot)| {
            let restored = matches!(slot.state, State::Quarantined(Quarantine::Restored { .. }));
            let is_in_rack = slot.holder().is_none_or(|host| ledger.hosts.contains_key(&host));
            *of == id && restored && is_in_rack
        });
        let unclaimed: BTreeSet<_> = restored.map(|(slice, ..)| slice).collect();
        assert_eq!(emc.unclaimed, unclaimed, "slices of {id:?} waiting for a claim");
        let quarantined = slots().filter(|(_, of, slot)| *of == id && slot.is_quarantined());
        let for_operator: Vec<_> =
            quarantined.map(|(slice, ..)| slice).filter(|slice| !unclaimed.contains(slice)).collect();
        assert_eq!(
            emc.slices_quarantined_for_operator().collect::<Vec<_>>(),
            for_operator,
            "quarantined in {id:?}"
        );
        assert_eq!(emc.operator_quarantine_count(), for_operator.len());
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

fn check_totals(ledger: &Ledger) {
    check_requests(ledger);
    check_indexes(ledger);
    for (id, entry) in ledger.emcs() {
        let own = ledger.slots_from(SliceId(0)).filter(|(_, emc, _)| *emc == id);
        let in_use = own.filter(|(_, _, slot)| {
            matches!(slot.state, State::Assigned(_) | State::Onlining(_) | State::Online(_))
        });
        let in_use = u32::try_from(in_use.count()).unwrap();
        let sum = entry.free() + in_use + entry.draining() + entry.quarantined();
        assert_eq!(sum, entry.emc.slices, "every slice is free, in use, draining or quarantined");
    }
    for (id, entry) in ledger.hosts() {
        let of_host = || ledger.reservations.values().filter(move |r| r.host == id);
        let active: u32 = of_host().filter(|r| r.is_active()).map(|r| r.cores).sum();
        assert!(active <= entry.host.cores, "active reservations exceed the host's cores");
        let in_use = || of_host().filter(|r| r.is_active() || r.has_process);
        assert_eq!(entry.cores_used, in_use().map(|r| r.cores).sum(), "cores in use");
        let is_moving =
            |r: &&Reservation| matches!(r.rehome, Rehome::Moving { .. } | Rehome::Cancelling { .. });
        let moving = in_use().filter(is_moving);
        let booked = moving.flat_map(|r| &r.slices).map(|_| units::SLICE);
        let local = in_use().map(|r| r.local).chain(booked).sum();
        assert_eq!(entry.local_used, local, "local memory in use");
        assert!(
            entry.host.fence == Fence::None || entry.ended_reservations_with_process.is_empty(),
            "a fenced host has a process of a released VM"
        );
    }
    let active = || ledger.reservations.iter().filter(|(_, r)| r.is_active());
    assert_eq!(active().count(), ledger.by_vm.len(), "each VM has one active reservation");
    for (id, reservation) in active() {
        assert_eq!(ledger.reservation_of(&reservation.vm), Some(*id));
    }
    let mut ids = BTreeSet::new();
    for (id, migration) in ledger.migrations() {
        assert!(ledger.reservations[&id].is_active(), "an ended VM has a migration request");
        assert_ne!(migration.id, MigrationId(0), "{migration:?} has no ID");
        assert!(ids.insert(migration.id), "{migration:?} has the ID of another request");
        if migration.slowdown.is_some() {
            assert!(!ledger.reservations[&id].slices.is_empty(), "no slice slows this VM down");
            continue;
        }
        let mut hosts = ledger.hosts().map(|(_, h)| ("host", &h.host.name, h.host.scheduling));
        let mut emcs = ledger.emcs().map(|(_, e)| ("emc", &e.emc.name, e.emc.scheduling));
        let requires_migration = |(kind, name, to): (&str, &Name, Scheduling)| {
            to == Scheduling::Draining && migration.why == format!("{kind} {name} is draining")
        };
        assert!(
            hosts.any(requires_migration) || emcs.any(requires_migration),
            "no draining host or EMC requires {migration:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn rejected_decision_changes_nothing_and_totals_are_correct(actions in prop::collection::vec(any_action(), 0..120)) {
        let (mut rack, mut when) = (Rack::new(RACK_SPECS[0]), at(1));
        rack.ledger.ended.bounds = RequestLimits { per_client: 2, total: 3, established_after: Ns::secs(300) };
        for action in &actions {
            let before = rack.ledger.clone();
            if rack.perform_action(&mut when, action).is_err() {
                prop_assert_eq!(format_full_state(&before), format_full_state(&rack.ledger), "{:?}", action);
            }
            check_totals(&rack.ledger);
            if let Action::AdvanceTime { .. } = action {
                check_request_limits(&rack.ledger);
            }
        }
    }

    /// A ledger loaded from its records must have the same records and derived indexes.
    #[test]
    fn loaded_ledger_equals_ledger_after_its_decisions(actions in prop::collection::vec(any_action(), 0..120)) {
        let (mut rack, mut when) = (Rack::new(RACK_SPECS[0]), at(1));
        for action in &actions {
            let _ = rack.perform_action(&mut when, action);
        }
        let mut loaded = Ledger::load(rack.ledger.meta().clone(), rack.disk.values().rev().cloned());
        for (id, host) in rack.ledger.hosts() {
            // Liveness and unusable EMCs are not durable, so copy them.
            loaded.set_host_live(id, host.is_live);
            loaded.set_unusable_emcs(id, host.unusable_emcs.clone());
        }
        check_indexes(&loaded);
        prop_assert_eq!(format_full_state(&loaded), format_full_state(&rack.ledger));
    }

    /// A slice gets a new owner only in a free or scrubbed state, and each owner has a new epoch.
    #[test]
    fn slice_owners_have_distinct_epochs(actions in prop::collection::vec(any_action(), 0..120)) {
        let (mut rack, mut when) = (Rack::new(RACK_SPECS[0]), at(1));
        let mut owners: BTreeMap<(SliceId, Epoch), HostId> = BTreeMap::new();
        for action in &actions {
            let _ = rack.perform_action(&mut when, action);
            for (slice, _, slot) in rack.ledger.slots_from(SliceId(0)) {
                if let State::Assigned(owner) | State::Onlining(owner) = slot.state {
                    let first = *owners.entry((slice, slot.epoch)).or_insert(owner.host);
                    prop_assert_eq!(first, owner.host);
                }
            }
        }
    }
}
