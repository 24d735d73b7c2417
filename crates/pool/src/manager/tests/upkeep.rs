//! Limits of one round of upkeep: the work of a round is bounded, and the next rounds do the rest.
//! `rig.rs` documents the words of the scripts.

use units::{Ns, ReservationId, SliceId};

use super::rig::{Rig, name};
use crate::{
    ledger::ended::RequestLimits,
    manager::Settings,
    record::Record,
    slice::{Scrub, Slot, State},
};

/// Maximum number of changes of each kind per round.
const CHANGES_PER_ROUND: usize = 256;

/// Returns the number of recorded reservations, including ended reservations.
fn recorded_reservations(rig: &Rig) -> usize {
    rig.manager.head.reservations_after(ReservationId(0)).count()
}

/// Returns a rack whose leases do not expire during a test.
fn rig_without_leases(rack: &str) -> Rig {
    let mut rig = Rig::new(rack);
    rig.manager.set(Settings { lease_ttl: Ns::secs(1_000_000), fence_after: None });
    rig
}

#[test]
fn overdue_reservations_are_ended_in_several_rounds() {
    let hosts = (1..=10).map(|host| format!("h{host}:e1"));
    let mut rig = rig_without_leases(&format!("e1=4 {}", hosts.collect::<Vec<_>>().join(" ")));
    for host in 1..=10 {
        rig.run(&format!("up:h{host}"));
        (0..16).for_each(|vm| drop(rig.run(&format!("reserve:v{vm}-{host}@h{host}=0"))));
    }
    rig.run("go");
    let active =
        |rig: &Rig| rig.manager.head.hosts().map(|(_, entry)| entry.reservations().len()).sum::<usize>();
    assert_eq!(active(&rig), 160);
    rig.run("tick:301000");
    assert_eq!(active(&rig), 160 - CHANGES_PER_ROUND / 2, "each end is a record and a decision");
    rig.run("go");
    assert_eq!(active(&rig), 0);
}

/// Reserves and releases VMs without slices, with request IDs of this client.
fn end_reservations(rig: &mut Rig, client: &str, count: usize) {
    for n in 0..count {
        rig.run(&format!("reserve:{client}{n}@h1=0!{client}/{n} release:{client}{n}"));
    }
    rig.write_all();
}

#[test]
fn expired_requests_are_deleted_in_several_rounds() {
    let mut rig = rig_without_leases("e1=4 h1:e1");
    rig.run("up:h1 go");
    end_reservations(&mut rig, "c", CHANGES_PER_ROUND + 40);
    rig.run("tick:500");
    end_reservations(&mut rig, "d", 1);
    rig.run("tick:86399500");
    assert_eq!(recorded_reservations(&rig), 41);
    rig.run("tick:0");
    assert_eq!(recorded_reservations(&rig), 1, "the next round follows at once");
    rig.run("tick:999");
    assert_eq!(recorded_reservations(&rig), 1, "the next deletion is one second after the last");
    rig.run("tick:1");
    assert_eq!(recorded_reservations(&rig), 0);
}

#[test]
fn expired_and_excess_requests_share_the_limit_of_a_round() {
    let mut rig = rig_without_leases("e1=4 h1:e1");
    rig.run("up:h1 go");
    end_reservations(&mut rig, "c", 200);
    rig.run("tick:3600000");
    end_reservations(&mut rig, "d", 100);
    // Only reservations whose end is durable are deleted as excess.
    rig.run("tick:1000 cordon:e1 stored");
    let limits = RequestLimits { per_client: 10, ..RequestLimits::default() };
    rig.manager.head.set_ended_request_limits(limits);
    rig.run("tick:82799000");
    assert_eq!(recorded_reservations(&rig), 300 - CHANGES_PER_ROUND);
}

#[test]
fn scrubs_of_a_round_are_divided_among_emcs() {
    for (waiting, expected) in [([256, 256], [64, 64]), ([10, 256], [10, 118]), ([0, 256], [0, 128])] {
        let mut rig = Rig::connected_with("e1=256 e2=256 h1:e1+e2 h2:e1+e2 h3:e1+e2");
        let [on_e1, on_e2] = waiting;
        let slot = Slot { state: State::Scrubbing(Scrub::Waiting), ..Slot::default() };
        for slice in (0..on_e1).chain(256..256 + on_e2) {
            rig.manager.head.install(Record::Slice(SliceId(slice), slot));
            rig.manager.durable.install(Record::Slice(SliceId(slice), slot));
        }
        rig.run("tick:0");
        let started = ["e1", "e2"].map(|emc| {
            let head = &rig.manager.head;
            let slices = head.emc(head.find_emc_by_name(&name(emc)).unwrap()).unwrap().emc.range();
            slices.filter(|slice| head.slot(*slice).unwrap().is_being_scrubbed()).count()
        });
        assert_eq!(started, expected, "{waiting:?}");
    }
}
