//! Restarts of the manager and failed writes. `rig.rs` documents the words of the scripts.

use units::limits::{AUDIT_ENTRIES_MAX, AUDIT_ENTRIES_PRUNED_PER_BATCH};

use super::rig::{Rig, name, settings};
use crate::{
    audit::Subject,
    manager::Settings,
    record::{Key, Meta, Record},
};

#[test]
fn restored_slices_are_quarantined_until_hosts_have_reported() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go");
    let backup = rig.disk.clone();
    rig.run("reserve:b@h2=1 go commit:b go reserve:c@h1=1 go release:a go");
    rig.check("slices | 1.1:online@h1 4.1:online@h2");
    rig.disk = backup;
    rig.check(
        "restore | e1.contents e2.contents store
         stored device go
         slices | 0.2:quarantined 1.1:quarantined@h1 2.0:quarantined 3.0:quarantined 4.1:quarantined@h2 5.0:quarantined 6.0:quarantined 7.0:quarantined
         alarms | RESTORE_PENDING RESTORE_PENDING RESTORE_PENDING CAPACITY_ZERO",
    );
    // Two hosts report, one with a VM that is not in the backup. The third host has not reported.
    rig.check(
        "restart device up:h1 up:h3 tick:10 stored
         reserve:d@h1=1 | reserve:d->HOST_NOT_SCHEDULABLE
         report:h1:online=1.1:vm3c=1.1 report:h3 tick:10 go
         slices | 0.2:quarantined 1.1:online@h1 2.0:quarantined 3.0:quarantined 4.1:quarantined@h2 5.0:quarantined 6.0:quarantined 7.0:quarantined",
    );
    // The third host reports and keeps its slices; the other slices are scrubbed before their next
    // use.
    rig.check(
        "up:h2 report:h2:online=4.1:vm2b=4.1 go
         slices | 1.1:online@h1 4.1:online@h2
         wait:b wait:c wait:a | wait:b->ok(4) wait:c->ok(1) wait:a->RESERVATION_WRONG_STATE
         report:h2:ended=2 go
         slices | 1.1:online@h1",
    );
    assert!(rig.has_decision(&Subject::Vm(name("c")), "found running (1 slice)"));
}

#[test]
fn downtime_of_the_manager_does_not_count_towards_deadlines() {
    let mut rig = Rig::connected();
    rig.check(
        "reserve:a@h1=1 go
         tick:250000 go restart",
    );
    rig.manager.set(Settings { fence_after: None, ..settings() });
    rig.check(
        "go
         tick:49000 go
         slices | 0.1:online@h1
         tick:1500 go
         slices | 0.1:draining@h1",
    );
}

#[test]
fn only_uncommitted_reservation_ends_at_its_deadline() {
    Rig::connected().check(
        "reserve:a@h1=1 reserve:b@h1=1 go commit:b go
         tick:299000 up:h1 up:h2 up:h3 go
         slices | 0.1:online@h1 4.1:online@h1
         tick:1001 go
         slices | 4.1:online@h1",
    );
}

#[test]
fn new_device_is_unused_until_it_is_compared() {
    Rig::connected().check(
        "rack:e1=4&e2=4&e3=16&h1:e1+e2+e3&h2:e1+e2&h3:e2 | store
         reserve:a@h1=9 |
         stored | rack:e1=4&e2=4&e3=16&h1:e1+e2+e3&h2:e1+e2&h3:e2->ok reserve:a->STARTING e3.contents
         reserve:a@h1=9 | reserve:a->STARTING
         device reserve:a@h1=9 | store",
    );
}

/// A batch is on disk although its write reported an error. Connected hosts have answered the older
/// desired state and must receive the new state.
#[test]
fn effects_of_a_torn_write_are_sent_to_connected_hosts() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 stored device tick:10 torn reload go");
    rig.check("slices | 0.1:online@h1");
}

#[test]
fn oldest_decisions_are_pruned_in_batches() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go");
    let stored_decisions = |rig: &Rig| match &rig.disk[&Key::Meta] {
        Record::Meta(Meta { first_decision, next_decision, .. }) => next_decision - first_decision,
        other => panic!("no meta record: {other:?}"),
    };
    let Some(Record::Meta(meta)) = rig.disk.get_mut(&Key::Meta) else { panic!("no meta record") };
    meta.next_decision = meta.first_decision + AUDIT_ENTRIES_MAX;
    rig.run("restart device go up:h1 report:h1 go");
    let (mut before, mut pruning_writes) = (stored_decisions(&rig), 0);
    for vm in 0..2 * AUDIT_ENTRIES_PRUNED_PER_BATCH {
        rig.run(&format!("validate:v{vm}@h1=1 reserve:v{vm}@h1=0 go force:v{vm} go"));
        let now = stored_decisions(&rig);
        assert!(now <= AUDIT_ENTRIES_MAX, "{now} decisions are stored");
        pruning_writes += u32::from(now < before);
        before = now;
    }
    assert!((2..=5).contains(&pruning_writes), "{pruning_writes} writes pruned decisions");
}

/// The removal of a host and an EMC is on disk although its write reported an error. The manager
/// must drop both.
#[test]
fn host_and_emc_removed_by_a_torn_write_are_dropped() {
    let mut rig = Rig::connected();
    rig.check(
        "rack:e1=4&h1:e1&h2:e1 torn reload | store rack:e1=4&h1:e1&h2:e1->STORE_FAILED reload host#2.close(HostRemoved) e1.contents
         device tick:60000 | h1.close(LeaseExpired) h2.close(LeaseExpired)",
    );
    assert_eq!(rig.manager.durable().hosts().count(), 2);
}
