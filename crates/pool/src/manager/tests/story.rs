//! Random sequences of requests, reports, failures, restarts and silence. The [rig](super::rig)
//! checks every effect; invariants between effects are checked here.

use std::collections::BTreeMap;

use proptest::prelude::*;
use units::{EmcId, Ns};

use super::rig::{RACK, Rig, SHARED};
use crate::{
    ledger::Ledger,
    record::{Key, Record},
    slice::State,
};

/// A random event, skipped where it is impossible.
#[derive(Clone, Debug)]
enum Turn {
    Say(String),
    Store { ok: bool, on_disk: bool },
    Obey(usize),
    Connect { host: usize, up: bool },
    Wake,
    Restart,
}

fn rack() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![RACK, SHARED])
}

const HOSTS: [&str; 3] = ["h1", "h2", "h3"];

fn turn() -> impl Strategy<Value = Turn> {
    let vm = || prop::sample::select(vec!["a", "b", "c", "d"]);
    let host = || prop::sample::select(HOSTS.to_vec());
    let say = |text: String| Turn::Say(text);
    prop_oneof![
        6 => (vm(), 0..100u32, host(), 0..6u32)
            .prop_map(move |(vm, request, host, n)| say(format!("reserve:{vm}@{host}={n}!{request}"))),
        2 => (vm(), prop::sample::select(vec!["commit", "release", "force", "wait"]))
            .prop_map(move |(vm, verb)| say(format!("{verb}:{vm}"))),
        1 => (prop::sample::select(vec!["cordon", "drain", "enable"]), prop::sample::select(vec!["h1", "e1", "e2"]))
            .prop_map(move |(verb, place)| say(format!("{verb}:{place}"))),
        1 => (0..8u32).prop_map(move |slice| say(format!("enable:{slice}"))),
        1 => host().prop_map(move |host| say(format!("fence:{host}"))),
        1 => (host(), 1..20u32).prop_map(move |(host, id)| say(format!("have:{host}:ended={id}"))),
        1 => (host(), 0..8u32, 1..4u32, prop::sample::select(vec!["released", "scrubbed", "half", "dirty", "broken"]))
            .prop_map(move |(host, slice, epoch, what)| say(format!("have:{host}:{what}={slice}.{epoch}"))),
        1 => Just(Turn::Say("stops:e2".to_owned())),
        1 => (host(), prop::sample::select(vec!["vouch", "clean"])).prop_map(move |(host, word)| {
            say(if word == "vouch" { format!("vouch:{host}") } else { format!("have:{host}:clean") })
        }),
        1 => (prop::sample::select(vec!["break", "mend", "mend"]), prop::sample::select(vec!["e1", "e2"]))
            .prop_map(move |(verb, emc)| say(format!("{verb}:{emc}"))),
        1 => (prop::sample::select(vec!["fault", "repair"]), 0..8u32)
            .prop_map(move |(verb, slice)| say(format!("{verb}:{slice}"))),
        1 => prop::sample::select(vec!["low", "roomy", "roomy"]).prop_map(move |word| say(word.to_owned())),
        8 => Just(Turn::Say("device".to_owned())),
        10 => (prop::bool::weighted(0.9), any::<bool>()).prop_map(|(ok, disk)| Turn::Store { ok, on_disk: ok || disk }),
        8 => (0..3usize).prop_map(Turn::Obey),
        2 => (0..3usize, prop::bool::weighted(0.7)).prop_map(|(host, up)| Turn::Connect { host, up }),
        8 => Just(Turn::Wake),
        3 => (1..5000u64).prop_map(move |ms| say(format!("tick:{ms}"))),
        1 => Just(Turn::Restart),
    ]
}

impl Rig {
    fn take(&mut self, turn: &Turn) {
        match turn {
            Turn::Say(words) => drop(self.run(words)),
            Turn::Store { ok, on_disk } if self.is_storing() => self.stored(*ok, *on_disk),
            Turn::Store { .. } if self.is_reloading() => drop(self.run("reload")),
            Turn::Store { .. } => {}
            Turn::Obey(host) => self.obey(self.host(HOSTS[*host])),
            Turn::Connect { host, up } => {
                let name = HOSTS[*host];
                if self.is_connected(self.host(name)) != *up {
                    self.run(&format!("{}:{name}", if *up { "up" } else { "down" }));
                }
            }
            Turn::Wake => self.wake(),
            Turn::Restart => drop(self.run("restart")),
        }
    }

    /// Lets time pass to the manager's next wakeup, and checks that it does not request the same
    /// time for ever.
    fn wake(&mut self) {
        let Some(at) = self.manager.next_wakeup().filter(|at| *at < Ns::secs(100_000)) else { return };
        self.now = self.now.max(at);
        for _ in 0..10 {
            self.run("tick:0");
            if self.manager.next_wakeup().is_none_or(|at| at > self.now) {
                return;
            }
        }
        panic!("woken ten times at {}, it asks for {:?} again", self.now, self.manager.next_wakeup());
    }
}

/// Checks that every slice is free, owned, draining or quarantined, and that no two reservations
/// hold the same slice.
fn holds_together(ledger: &Ledger) {
    for (id, entry) in ledger.emcs() {
        let of = |name: &str| count(ledger, id, name);
        let in_use = of("assigned") + of("onlining") + of("online");
        assert_eq!(entry.free(), of("free"));
        assert_eq!(entry.draining(), of("draining") + of("scrubbing"));
        assert_eq!(entry.quarantined(), of("quarantined"));
        assert_eq!(entry.free() + in_use + entry.draining() + entry.quarantined(), entry.emc.slices);
    }
    for (slice, _, slot) in ledger.slots_from(units::SliceId(0)) {
        if let State::Assigned(owner) | State::Onlining(owner) | State::Online(owner) = slot.state {
            let reservation = ledger.reservation(owner.reservation).expect("an owner that is known");
            assert!(
                reservation.is_active() && reservation.slices.contains(&slice),
                "slice {slice}: {reservation:?}"
            );
        }
    }
}

fn count(ledger: &Ledger, emc: EmcId, state: &str) -> u32 {
    let slots = ledger.slots_from(units::SliceId(0));
    let such = slots.filter(|(_, of, slot)| *of == emc && slot.state_name() == state).count();
    u32::try_from(such).unwrap()
}

/// Checks that the durable ledger equals the disk after any failure.
fn is_on_disk(rig: &Rig) {
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
    fn manager_invariants_hold_after_random_events(rack in rack(), story in prop::collection::vec(turn(), 0..150)) {
        let mut rig = Rig::up_as(rack);
        for turn in &story {
            rig.take(turn);
            holds_together(rig.manager.durable());
            is_on_disk(&rig);
            rig.manager.check_indexes();
        }
    }

    /// After any sequence: when everything works again and every VM is released, every slice
    /// becomes free.
    #[test]
    fn released_slices_become_free_after_random_events(rack in rack(), story in prop::collection::vec(turn(), 0..100)) {
        let mut rig = Rig::up_as(rack);
        story.iter().for_each(|turn| rig.take(turn));
        rig.come_to_rest();
        prop_assert_eq!(rig.run("slices"), "");
    }
}

impl Rig {
    fn come_to_rest(&mut self) {
        while self.is_storing() {
            self.stored(true, true);
        }
        (0..8).for_each(|slice| drop(self.run(&format!("repair:{slice}"))));
        self.run("restart mend:e1 mend:e2 roomy go");
        HOSTS.iter().for_each(|host| drop(self.run(&format!("up:{host} go tick:1000 up:{host}/again go"))));
        self.run("tick:4000"); // a restarted machine with VMs is accepted once its lease has expired
        HOSTS.iter().for_each(|host| drop(self.run(&format!("up:{host}/again go"))));
        for vm in ["a", "b", "c", "d"] {
            self.run(&format!("force:{vm} go tick:3 go"));
        }
        let kept: Vec<_> = self.manager.durable().quarantined().map(|(slice, _)| slice.0).collect();
        kept.into_iter().for_each(|slice| drop(self.run(&format!("enable:{slice} go"))));
        self.run("tick:1100 go tick:2100 go");
    }
}
