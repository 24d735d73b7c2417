//! Alarms and the start times of their conditions. `rig.rs` documents the words of the scripts.

use units::{ReservationId, UnixMs, limits::RESERVATION_ALARMS_MAX};

use super::rig::{Rig, name};
use crate::{
    audit::Subject,
    manager::Alarm,
    record::{Record, Reservation, Stage},
};

fn find_alarm(rig: &Rig, reason: &str) -> Alarm {
    let alarms = rig.manager.alarms();
    let undated = alarms.iter().find(|alarm| alarm.since == UnixMs(0));
    assert!(undated.is_none(), "{undated:?}");
    let alarm = alarms.iter().find(|alarm| alarm.reason == reason);
    alarm.unwrap_or_else(|| panic!("no {reason} in {alarms:?}")).clone()
}

#[test]
fn fence_alarm_starts_with_the_fence() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h1 report:h2 report:h3 tick:2000 report:h2 report:h3 tick:2000");
    let unknown = find_alarm(&rig, "HOST_UNKNOWN").since;
    rig.run("report:h2 report:h3 tick:500");
    let fence = rig.current_time().wall;
    assert!(fence > unknown);
    rig.run("fence:h1 stored");
    assert_eq!(find_alarm(&rig, "HOST_FENCING").since, fence);
    rig.run("tick:100 go");
    let fenced = find_alarm(&rig, "HOST_FENCED");
    assert_eq!(fenced.since, fence);
    let message = "access of host h1 is revoked until it restarts or reports that it is clean";
    assert_eq!(fenced.message, message, "no confirmation is missing");
    rig.run("restart go");
    assert_eq!(find_alarm(&rig, "HOST_FENCED").since, fence, "the ledger stores the start time");
}

#[test]
fn quarantine_alarm_starts_with_the_quarantine() {
    let mut rig = Rig::new("e1=1 h1:e1");
    rig.set_grant(0, Some((1, "h1")));
    rig.run("tick:700 restart device tick:10");
    let quarantined = rig.current_time().wall;
    rig.write_all();
    assert_eq!(find_alarm(&rig, "SLICE_QUARANTINED").since, quarantined);
    assert_eq!(find_alarm(&rig, "CAPACITY_ZERO").since, quarantined);
    rig.run("tick:500 restart");
    assert_eq!(
        find_alarm(&rig, "SLICE_QUARANTINED").since,
        rig.current_time().wall,
        "the start time is unknown after a restart"
    );
}

#[test]
fn low_space_alarm_contains_start_time_and_limit() {
    let mut rig = Rig::connected();
    rig.run("tick:300");
    let low = rig.current_time().wall;
    rig.run("low tick:300 low tick:300");
    let alarm = find_alarm(&rig, "STORE_LOW_SPACE");
    assert_eq!(alarm.since, low);
    assert!(alarm.message.contains("less than 64MiB free"), "{}", alarm.message);
    rig.check("ample alarms |");
}

#[test]
fn reservation_broken_by_a_restore_raises_an_alarm() {
    let mut rig = Rig::connected().into_restored("reserve:a@h1=1 go commit:a go", "", "");
    rig.run("up:h1 up:h2 up:h3 tick:10 report:h1 report:h2 report:h3 tick:10 go");
    let broken = find_alarm(&rig, "RESERVATION_BROKEN");
    assert_eq!(broken.subject, Subject::Vm(name("a")));
    assert!(broken.message.contains("was not in use when the hosts reported after a restore"), "{broken:?}");
    rig.run("release:a go");
    let alarms = rig.manager.alarms();
    assert!(alarms.iter().all(|alarm| alarm.reason != "RESERVATION_BROKEN"), "{alarms:?}");
}

#[test]
fn host_never_started_stays_expected() {
    let mut rig = Rig::new("e1=4 h1:e1 h2:e1");
    rig.run("up:h1 tick:10 go");
    for _ in 0..20 {
        rig.run("report:h1 tick:2000 go");
    }
    rig.check("state:h2 alarms | Expected");
    assert_eq!(rig.manager.leases_expired(), 0);
    rig.run("up:h2 go report:h1 tick:2000 report:h1 tick:2000 report:h1 tick:500");
    rig.check("state:h2 alarms | Unknown HOST_UNKNOWN");
}

/// The device has granted a slice to a host whose agent has never connected. The host must not be
/// treated as a host without slices.
#[test]
fn host_with_a_grant_that_never_connected_is_unknown() {
    let mut rig = Rig::new("e1=4 h1:e1");
    rig.set_grant(0, Some((1, "h1")));
    rig.run("restart device go tick:4000");
    rig.check("slices state:h1 alarms | 0.1:quarantined@h1 Unknown HOST_UNKNOWN SLICE_QUARANTINED");
    assert_eq!(rig.manager.leases_expired(), 1);
}

#[test]
fn broken_reservations_beyond_the_limit_share_one_alarm() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=0 go");
    let id = rig.manager.durable().reservation_of(&name("a")).unwrap();
    let reserved = rig.manager.durable().reservation(id).unwrap().clone();
    let mut break_reservations = |ids: std::ops::Range<usize>| {
        for id in ids {
            let stage = Stage::Broken { why: "dirty".into(), deadline: None, at: UnixMs(5) };
            let broken = Reservation { stage, ..reserved.clone() };
            rig.manager.durable.install(Record::Reservation(ReservationId(100 + id as u64), broken));
        }
        let broken = |alarm: &Alarm| alarm.reason == "RESERVATION_BROKEN";
        rig.manager.alarms().into_iter().filter(broken).collect::<Vec<_>>()
    };
    let listed = break_reservations(0..RESERVATION_ALARMS_MAX);
    assert_eq!(listed.len(), RESERVATION_ALARMS_MAX);
    assert!(listed.iter().all(|alarm| alarm.since == UnixMs(5)));
    let alarms = break_reservations(RESERVATION_ALARMS_MAX..RESERVATION_ALARMS_MAX + 2);
    assert_eq!(alarms.len(), RESERVATION_ALARMS_MAX + 1);
    let last = alarms.last().unwrap();
    assert!(last.message.starts_with("2 more reservations are broken"), "{}", last.message);
}
