//! Property tests of the manager with random requests, reports, failures, restarts and silence. The
//! [rig](super::rig) checks every effect, and the tests here check invariants over several effects.
//! `rig.rs` documents the words of the scripts.

use std::collections::BTreeMap;

use proptest::prelude::*;
use units::{EmcId, Ns};

use super::rig::{RACK, Rig, SHARED_RACK};
use crate::{
    ledger::Ledger,
    record::{Key, Record},
    slice::State,
};

/// Random event; impossible events are skipped.
#[derive(Clone, Debug)]
enum Action {
    Run(String),
    Store { ok: bool, on_disk: bool },
    ApplyDesiredState(usize),
    Connect { host: usize, up: bool },
    Wake,
    Restart,
}

fn any_rack() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![RACK, SHARED_RACK])
}

const HOSTS: [&str; 3] = ["h1", "h2", "h3"];

fn any_action() -> impl Strategy<Value = Action> {
    let vm = || prop::sample::select(vec!["a", "b", "c", "d"]);
    let host = || prop::sample::select(HOSTS.to_vec());
    let run = |text: String| Action::Run(text);
    prop_oneof![
        6 => (vm(), 0..100u32, host(), 0..6u32)
            .prop_map(move |(vm, request, host, n)| run(format!("reserve:{vm}@{host}={n}!{request}"))),
        2 => (vm(), prop::sample::select(vec!["commit", "release", "force", "wait"]))
            .prop_map(move |(vm, verb)| run(format!("{verb}:{vm}"))),
        1 => (prop::sample::select(vec!["cordon", "drain", "enable"]), prop::sample::select(vec!["h1", "e1", "e2"]))
            .prop_map(move |(verb, place)| run(format!("{verb}:{place}"))),
        1 => (0..8u32).prop_map(move |slice| run(format!("enable:{slice}"))),
        1 => host().prop_map(move |host| run(format!("fence:{host}"))),
        1 => (host(), 1..20u32).prop_map(move |(host, id)| run(format!("report:{host}:ended={id}"))),
        1 => (host(), 0..8u32, 1..4u32, prop::sample::select(vec!["released", "scrubbed", "half", "dirty", "broken"]))
            .prop_map(move |(host, slice, epoch, part)| run(format!("report:{host}:{part}={slice}.{epoch}"))),
        1 => Just(Action::Run("stops:e2".to_owned())),
        1 => (host(), prop::sample::select(vec!["poweroff", "clean"])).prop_map(move |(host, word)| {
            run(if word == "poweroff" { format!("poweroff:{host}") } else { format!("report:{host}:clean") })
        }),
        1 => (prop::sample::select(vec!["break", "recover", "recover"]), prop::sample::select(vec!["e1", "e2"]))
            .prop_map(move |(verb, emc)| run(format!("{verb}:{emc}"))),
        1 => (prop::sample::select(vec!["fault", "repair"]), 0..8u32)
            .prop_map(move |(verb, slice)| run(format!("{verb}:{slice}"))),
        1 => prop::sample::select(vec!["low", "ample", "ample"]).prop_map(move |word| run(word.to_owned())),
        8 => Just(Action::Run("device".to_owned())),
        10 => (prop::bool::weighted(0.9), any::<bool>()).prop_map(|(ok, disk)| Action::Store { ok, on_disk: ok || disk }),
        8 => (0..3usize).prop_map(Action::ApplyDesiredState),
        2 => (0..3usize, prop::bool::weighted(0.7)).prop_map(|(host, up)| Action::Connect { host, up }),
        8 => Just(Action::Wake),
        3 => (1..5000u64).prop_map(move |ms| run(format!("tick:{ms}"))),
        1 => Just(Action::Restart),
    ]
}

impl Rig {
    fn perform_action(&mut self, action: &Action) {
        match action {
            Action::Run(words) => drop(self.run(words)),
            Action::Store { ok, on_disk } if self.is_storing() => self.complete_write(*ok, *on_disk),
            Action::Store { .. } if self.is_reloading() => drop(self.run("reload")),
            Action::Store { .. } => {}
            Action::ApplyDesiredState(host) => self.apply_desired_state(self.host(HOSTS[*host])),
            Action::Connect { host, up } => {
                let name = HOSTS[*host];
                if self.is_connected(self.host(name)) != *up {
                    self.run(&format!("{}:{name}", if *up { "up" } else { "down" }));
                }
            }
            Action::Wake => self.advance_to_wakeup(),
            Action::Restart => drop(self.run("restart")),
        }
    }

    /// Advances the time to the manager's next wakeup. Fails if the manager requests the same time
    /// again after ten wakeups.
    fn advance_to_wakeup(&mut self) {
        let Some(at) = self.manager.next_wakeup().filter(|at| *at < Ns::secs(100_000)) else { return };
        self.now = self.now.max(at);
        for _ in 0..10 {
            self.run("tick:0");
            if self.manager.next_wakeup().is_none_or(|at| at > self.now) {
                return;
            }
        }
        panic!(
            "after ten wakeups at {}, the manager requests {:?} again",
            self.now,
            self.manager.next_wakeup()
        );
    }
}

/// Checks that every slice is free, owned, draining or quarantined, and that no two reservations
/// have the same slice.
fn check_slice_counts(ledger: &Ledger) {
    for (id, entry) in ledger.emcs() {
        let of = |name: &str| count_slices(ledger, id, name);
        let in_use = of("assigned") + of("onlining") + of("online");
        assert_eq!(entry.free(), of("free"));
        assert_eq!(entry.draining(), of("draining") + of("scrubbing"));
        assert_eq!(entry.quarantined(), of("quarantined"));
        assert_eq!(entry.free() + in_use + entry.draining() + entry.quarantined(), entry.emc.slices);
    }
    for (slice, _, slot) in ledger.slots_from(units::SliceId(0)) {
        if let State::Assigned(owner) | State::Onlining(owner) | State::Online(owner) = slot.state {
            let reservation = ledger.reservation(owner.reservation).expect("an owner has a reservation");
            assert!(
                reservation.is_active() && reservation.slices.contains(&slice),
                "slice {slice}: {reservation:?}"
            );
        }
    }
}

fn count_slices(ledger: &Ledger, emc: EmcId, state: &str) -> u32 {
    let slots = ledger.slots_from(units::SliceId(0));
    let slices = slots.filter(|(_, of, slot)| *of == emc && slot.state_name() == state).count();
    u32::try_from(slices).unwrap()
}

/// Checks that the durable ledger equals the records on disk, even after failures.
fn check_ledger_equals_disk(rig: &Rig) {
    if rig.is_storing() || rig.is_reloading() {
        return;
    }
    let disk: BTreeMap<Key, Record> = rig.disk.clone();
    for (key, record) in disk.into_iter().filter(|(key, _)| !matches!(key, Key::Decision(_))) {
        assert_eq!(rig.manager.durable().record(key), record);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4 * ProptestConfig::default().cases, ..ProptestConfig::default() })]

    #[test]
    fn manager_invariants_hold_after_random_events(rack in any_rack(), actions in prop::collection::vec(any_action(), 0..150)) {
        let mut rig = Rig::connected_with(rack);
        for action in &actions {
            rig.perform_action(action);
            check_slice_counts(rig.manager.durable());
            check_ledger_equals_disk(&rig);
            rig.manager.check_indexes();
        }
    }

    /// After all failures are repaired and every VM is released, every slice must become free.
    #[test]
    fn released_slices_become_free_after_random_events(rack in any_rack(), actions in prop::collection::vec(any_action(), 0..100)) {
        let mut rig = Rig::connected_with(rack);
        actions.iter().for_each(|action| rig.perform_action(action));
        rig.release_everything();
        prop_assert_eq!(rig.run("slices"), "");
    }
}

impl Rig {
    fn release_everything(&mut self) {
        while self.is_storing() {
            self.complete_write(true, true);
        }
        (0..8).for_each(|slice| drop(self.run(&format!("repair:{slice}"))));
        self.run("restart recover:e1 recover:e2 ample go");
        HOSTS.iter().for_each(|host| drop(self.run(&format!("up:{host} go tick:1000 up:{host}/again go"))));
        // An agent of a restarted host with VMs is accepted after the lease.
        self.run("tick:4000");
        HOSTS.iter().for_each(|host| drop(self.run(&format!("up:{host}/again go"))));
        for vm in ["a", "b", "c", "d"] {
            self.run(&format!("force:{vm} go tick:3 go"));
        }
        let quarantined: Vec<_> = self.manager.durable().quarantined().map(|(slice, _)| slice.0).collect();
        quarantined.into_iter().for_each(|slice| drop(self.run(&format!("enable:{slice} go"))));
        self.run("tick:1100 go tick:2100 go");
    }
}
