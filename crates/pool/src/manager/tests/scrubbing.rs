//! Number of concurrent scrubs, and their distribution over hosts. `rig.rs` documents the words of
//! the scripts.

use super::rig::Rig;

/// Returns the number of scrubs of each host in each durable write after the release of VM a. h1 is
/// attached to one of two EMCs, each with 64 slices.
fn scrubs_per_write(slices: u32, before_release: &str) -> Vec<[usize; 2]> {
    let mut rig = Rig::connected_with("e1=64 e2=64 h1:e1 h2:e1+e2 h3:e2");
    rig.run(&format!("reserve:a@h1={slices} go {before_release}"));
    let output = rig.run("release:a go");
    let scrubs = output
        .split("store")
        .map(|write| ["h1", "h2"].map(|host| write.matches(&format!(".2>{host})")).count()));
    scrubs.filter(|scrubs| *scrubs != [0, 0]).collect()
}

#[test]
fn scrubs_are_limited_while_enough_slices_are_free() {
    assert_eq!(scrubs_per_write(8, "down:h2 down:h3"), [[4, 0], [4, 0]]);
}

#[test]
fn scrubs_increase_while_many_slices_wait() {
    let writes = scrubs_per_write(20, "down:h2 down:h3");
    assert!(writes.iter().any(|[h1, _]| *h1 > 4), "{writes:?}");
}

#[test]
fn scrubs_are_spread_over_attached_hosts() {
    assert_eq!(scrubs_per_write(8, ""), [[4, 4]]);
}

#[test]
fn failed_device_gets_no_scrub() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h2 down:h3 release:a stored tick:10 apply:h1 down:h1 tick:10 stored");
    rig.run("device tick:10 stored");
    rig.check("slices | 0.1:scrubbing");
    rig.run("break:e1 restart device up:h1 tick:10 tick:10");
    assert!(!rig.is_storing(), "no scrubber is chosen");
    rig.check(
        "alarms slices | EMC_FAILED 0.1:scrubbing
         recover:e1 tick:1000 go
         slices |",
    );
}

#[test]
fn scrubs_of_one_batch_are_spread_over_hosts() {
    let mut rig = Rig::connected_with("e1=64 e2=64 h1:e1 h2:e1+e2 h3:e2");
    rig.run("reserve:a@h1=8 go down:h2 down:h3 release:a stored tick:10 apply:h1 down:h1 tick:10 stored");
    rig.run("device tick:10 stored break:e1 restart device up:h1 up:h2");
    rig.run("recover:e1 tick:1000 device tick:10");
    let output = rig.run("stored");
    assert_eq!(["h1", "h2"].map(|host| output.matches(&format!(".2>{host})")).count()), [4, 4], "{output}");
}

/// Regression test: a restarted manager sent a complete desired state without the scrub, because the
/// EMC was not compared yet, and then the scrub. The agent dropped its earlier result and started the
/// scrub again. A delayed report of the earlier result freed the slice while the agent zeroed it.
#[test]
fn result_from_before_the_scrub_was_sent_is_ignored() {
    let mut rig = Rig::connected();
    rig.run("reserve:a@h1=1 go down:h2 down:h3 release:a stored tick:10 apply:h1 tick:10 stored");
    let sent = rig.run("device tick:10 stored tick:100 apply:h1 device tick:10 stored tick:1000 tick:1000");
    assert!(sent.contains("h1<scrub=0.2"), "{sent}");
    rig.run("report:h1:part:scrubbed=0.2:early tick:10");
    assert!(!rig.is_storing(), "the result was accepted");
    let accepted = rig.run("report:h1:part:scrubbed=0.2 go");
    assert!(accepted.contains("e1.revoke(0.2)"), "{accepted}");
    rig.check("slices |");
}
