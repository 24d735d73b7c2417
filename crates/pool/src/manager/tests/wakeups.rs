//! Wakeups: the manager returns the time of its next due work, and performs it without any other
//! event. `rig.rs` documents the words of the scripts.

use units::{
    Ns, UnixMs,
    limits::{MIGRATION_REQUEST_RETRY_AFTER, SLOWDOWN_REQUEST_TTL},
};

use super::rig::{Rig, SHARED_RACK, name, settings};
use crate::manager::{HostState, Settings};

impl Rig {
    /// Advances the time to each wakeup of the manager. Store and devices respond, but agents do
    /// not.
    fn run_timers(&mut self, time: Ns) -> String {
        let (until, mut output) = (self.now.after(time), String::new());
        for _ in 0..10_000 {
            let Some(at) = self.manager.next_wakeup().filter(|at| *at <= until) else {
                // No work is due, so no tick is sent.
                self.now = until;
                return output;
            };
            self.now = self.now.max(at);
            output += &self.run("tick:0 device");
            while self.is_storing() {
                output += &self.run("stored");
            }
        }
        panic!("the wakeups do not end: {output}");
    }
}

#[test]
fn silent_host_is_fenced_by_timers_alone() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go commit:a go down:h2 down:h3");
    let host = rig.host("h1");
    assert!(!rig.run_timers(Ns::ms(3900)).contains("close"));
    assert_eq!(rig.manager.host_state(host), HostState::Up);
    let expired = rig.run_timers(Ns::ms(200));
    assert!(expired.contains("h1.close(LeaseExpired)"), "{expired}");
    assert!(!rig.run_timers(Ns::ms(59_000)).contains("fence(h1)"));
    assert!(rig.run_timers(Ns::secs(2)).contains("fence(h1)"));
    rig.run("up:h2 go");
    assert_eq!(rig.manager.host_state(host), HostState::Fenced);
}

#[test]
fn failed_machine_stop_is_retried_by_timers_alone() {
    let mut rig = Rig::connected_with(SHARED_RACK);
    rig.run("cordon:e1 reserve:a@h1=1 go down:h1 down:h2 down:h3 fence:h1 stored device tick:10");
    rig.manager.set(Settings { lease_ttl: Ns::secs(3600), fence_after: None });
    rig.run_timers(Ns::secs(30));
    // Stores rack time now, so that it is not stored during the retry.
    rig.run("cordon:h2 stored");
    assert!(!rig.run_timers(Ns::secs(29)).contains("e2.fence(h1)"));
    assert!(rig.run_timers(Ns::secs(2)).contains("e2.fence(h1)"));
}

#[test]
fn failing_slice_is_retried_by_timers_alone() {
    let mut rig = Rig::connected();
    rig.manager.set(Settings { lease_ttl: Ns::secs(3600), fence_after: None });
    rig.run("fault:0 reserve:a@h1=1 go");
    assert!(rig.run_timers(Ns::ms(250)).contains("e1.grant(0.1>h1)"));
}

#[test]
fn uncommitted_reservation_ends_by_timers_alone() {
    let mut rig = Rig::connected();
    rig.manager.set(Settings { lease_ttl: Ns::secs(3600), fence_after: None });
    rig.run("reserve:a@h1=1 go");
    rig.run_timers(Ns::secs(299));
    rig.check("slices | 0.1:online@h1");
    rig.run_timers(Ns::secs(2));
    rig.check("slices | 0.1:draining@h1");
}

#[test]
fn declined_migration_is_requested_again_by_timers_alone() {
    let mut rig = Rig::connected();
    rig.manager.set(Settings { lease_ttl: Ns::secs(3600), fence_after: None });
    rig.run("reserve:a@h1=1 go commit:a go drain:h1 go decline:a go");
    let words = |rig: &Rig| {
        let (_, migration) = rig.manager.durable().migrations().next().unwrap();
        migration.explanation.clone()
    };
    assert_eq!(words(&rig), "busy");
    rig.run_timers(Ns(MIGRATION_REQUEST_RETRY_AFTER.0 - 1_000_000_000));
    assert_eq!(words(&rig), "busy");
    rig.run_timers(Ns::secs(2));
    assert_eq!(words(&rig), "", "the migration is requested again");
}

#[test]
fn slowdown_request_expires_by_timers_alone() {
    let mut rig = Rig::connected();
    rig.manager.set(Settings { lease_ttl: Ns::secs(36_000), fence_after: None });
    rig.run("reserve:a@h1=1 go commit:a go slow:a go");
    let requests = |rig: &Rig| rig.manager.durable().migrations().count();
    assert_eq!(requests(&rig), 1);
    rig.run_timers(Ns(SLOWDOWN_REQUEST_TTL.0 - 1_000_000_000));
    assert_eq!(requests(&rig), 1);
    rig.run_timers(Ns::secs(2));
    assert_eq!(requests(&rig), 0);
}

#[test]
fn failed_device_is_retried_until_removed() {
    let rack = "e1=4&e2=4&e3=4&h1:e1+e2&h2:e1+e2+e3&h3:e2";
    let mut rig = Rig::connected();
    rig.run(&format!("rack:{rack} go break:e3 restart device up:h1 up:h2 up:h3 go"));
    assert!(rig.run_timers(Ns::secs(2)).contains("e3.contents"));
    rig.run("up:h1 up:h2 up:h3 go rack:e1=4&e2=4&h1:e1+e2&h2:e1+e2&h3:e2 go");
    assert!(!rig.run_timers(Ns::secs(3)).contains("e3"));
}

#[test]
fn changed_settings_apply_to_connected_hosts() {
    let mut rig = Rig::connected();
    rig.manager.set(Settings { lease_ttl: Ns::secs(1), ..settings() });
    assert!(rig.run_timers(Ns::ms(1100)).contains("h1.close(LeaseExpired)"));
}

#[test]
fn expired_lease_is_counted_and_published_with_its_time() {
    let mut rig = Rig::connected();
    rig.manager.take_change_flag();
    assert_eq!((rig.manager.has_pending_work(), rig.manager.leases_expired()), (false, 0));
    rig.run("tick:2000 report:h2 report:h3 tick:2000");
    let expired = UnixMs(rig.now.as_ms());
    rig.run("tick:500");
    let alarms = rig.manager.alarms();
    assert_eq!((alarms.len(), alarms[0].since, rig.manager.leases_expired()), (1, expired, 1));
    assert!(rig.manager.has_pending_work(), "watchers must be notified");
    assert!(
        rig.manager.take_change_flag() && !rig.manager.take_change_flag() && !rig.manager.has_pending_work()
    );
    let host = rig.manager.durable().find_host_by_name(&name("h1")).unwrap();
    assert!(!rig.manager.is_schedulable(host));
    rig.run("up:h1 cordon:h2 go");
    assert!(rig.manager.is_schedulable(host));
    assert!(!rig.manager.is_schedulable(rig.host("h2")), "a cordoned host is not schedulable");
}

#[test]
fn removed_host_does_not_affect_fences_of_others() {
    let mut rig = Rig::connected_with(SHARED_RACK);
    rig.run("cordon:e1 reserve:a@h1=1 go enable:e1 go down:h1 fence:h1 stored device tick:10");
    rig.check(
        "alarms | HOST_NOT_FENCED
         rack:e1=4&e2=4!&h1:e1+e2&h2:e1+e2 go alarms | store rack:e1=4&e2=4->ok host#2.close(HostRemoved) HOST_NOT_FENCED",
    );
}

#[test]
fn device_replying_during_a_reload_receives_no_calls() {
    Rig::connected().check(
        "reserve:a@h1=1 stored restart | store reserve:a->ok(0) e1.grant(0.1>h1) e1.contents e2.contents
         cordon:h2 lost | store cordon:h2->STORE_FAILED reload
         device |
         reload device | e1.contents e2.contents e1.grant(0.1>h1)",
    );
}

/// The result of a scrub is not durable, so the next desired state is postponed. This must not
/// cause repeated wakeups.
#[test]
fn postponed_desired_state_does_not_cause_a_wakeup_loop() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h2 down:h3 release:a stored tick:10 apply:h1 tick:10 stored");
    rig.run("device tick:10 stored device report:h1:early tick:10 stored");
    rig.check("slices | 0.2:scrubbing@h1");
    let output =
        rig.run("report:h1:early:scrubbed=0.2 tick:1000 report:h1:early tick:999 report:h1:early tick:10");
    assert_eq!(output, "store");
    assert!(rig.manager.next_wakeup() > Some(rig.now));
    rig.check("stored | e1.revoke(0.2)");
}
