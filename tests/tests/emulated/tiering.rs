//! Test of fair tiering on an emulated host with CXL memory, cgroups and DAMON of a real kernel. The
//! tenants are unmodified Debian programs that copy memory.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    emulated_rack::EmulatedRack,
    tiered_tenants::{CGROUPS, end_tenant, local_mib, start_rack, start_tenant},
};

/// Local memory that the tenants share, in MiB. They can use 240 MiB of it without demotion, because the
/// high watermark is 2 %.
const LOCAL_MIB: u64 = 245;
/// Protection of each tenant, in MiB.
const PROTECTION_MIB: u64 = 80;
/// Largest permitted difference from the expected local memory, in MiB: 5 % of the protection.
const TOLERANCE_MIB: u64 = 4;
/// Time for which each sample must be as expected: five steps.
const STEADY_TIME: Duration = Duration::from_secs(10);

fn local_memory(rack: &EmulatedRack) -> [u64; 3] {
    ["a", "b", "c"].map(|tenant| local_mib(rack, tenant))
}

/// Waits until each tenant has the expected local memory, in MiB, for [`STEADY_TIME`].
fn wait_for_local_memory(rack: &EmulatedRack, scenario: &str, expected: [u64; 3]) {
    let since = Cell::new(None);
    rack.wait_until(&format!("{scenario}: local memory of {expected:?} MiB"), |rack| {
        let local = local_memory(rack);
        println!("{scenario}: {local:?}");
        let is_near = |(local, expected): (&u64, u64)| local.abs_diff(expected) <= TOLERANCE_MIB;
        let is_expected = local.iter().zip(expected).all(is_near);
        since.set(is_expected.then(|| since.get().unwrap_or_else(Instant::now)));
        since.get().is_some_and(|since: Instant| since.elapsed() >= STEADY_TIME)
    });
}

/// Returns the report of the host about fair tiering, which must contain the tenant `a`.
fn report(rack: &EmulatedRack) -> Value {
    rack.tarn_json("explain tenant h0 a")["tiering"].take()
}

/// Waits until the report of the host contains this problem or reason.
fn wait_for_note(rack: &EmulatedRack, note: &str) {
    rack.wait_until(note, |rack| {
        String::from_utf8_lossy(&rack.try_tarn("get tenants h0").stderr).contains(note)
    });
}

fn write_to_damon(rack: &EmulatedRack, count: u32) {
    rack.run(0, &format!("echo {count} > /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds"));
}

#[test]
fn tenants_share_local_memory_by_protections_and_demands() {
    let rack = start_rack(LOCAL_MIB, &["a", "b", "c"].map(|tenant| (tenant.to_owned(), PROTECTION_MIB)));
    for (tenant, mib) in [("a", 120), ("b", 40), ("c", 40)] {
        start_tenant(&rack, tenant, mib);
    }
    wait_for_local_memory(&rack, "120/40/40", [120, 40, 40]);

    // While another program uses DAMON, no pages are promoted.
    write_to_damon(&rack, 1);
    for tenant in ["b", "c"] {
        end_tenant(&rack, tenant);
        start_tenant(&rack, tenant, 90);
    }
    wait_for_note(&rack, "no pages are promoted: another program uses DAMON");
    write_to_damon(&rack, 0);
    wait_for_local_memory(&rack, "120/90/90", [80, 80, 80]);
    println!("{}\n{}", rack.tarn("get tenants h0 -o wide"), rack.tarn("explain tenant h0 a"));
    let report = report(&rack);
    assert_eq!((&report["reason"], &report["problems"]), (&Value::Null, &serde_json::json!([])), "{report}");

    // When the others need less, the first tenant borrows their memory. A tenant that starts processes all
    // the time, and a killed agent, do not prevent this.
    for tenant in ["b", "c"] {
        end_tenant(&rack, tenant);
        start_tenant(&rack, tenant, 70);
    }
    rack.run(
        0,
        &format!(
            "sh -c 'echo $$ > {CGROUPS}/b/cgroup.procs; while :; do sleep 0.1; done' > /dev/null 2>&1 &"
        ),
    );
    rack.run(0, "kill -9 $(pidof host-agent)");
    wait_for_local_memory(&rack, "120/70/70", [100, 70, 70]);
    take_slice_away(&rack);
}

/// Releases the slice while it contains pages of tenants. The kernel moves the pages to local memory, and
/// nothing is demoted until there is another slice.
fn take_slice_away(rack: &EmulatedRack) {
    rack.tarn("release slow");
    rack.wait_all_slices_free();
    wait_for_note(rack, "no pages are moved: no node without processors has memory");
    let local: u64 = local_memory(rack).iter().sum();
    assert!((260..270).contains(&local), "all tenants are in local memory: {local} MiB");
    for tenant in ["a", "b", "c"] {
        rack.run(0, &format!("kill -0 $(head -n 1 {CGROUPS}/{tenant}/cgroup.procs)"));
    }
    rack.tarn("reserve --host h0 --vm slow --pool 1GiB --cores 1 --wait-ready");
    rack.tarn("commit slow");
    wait_for_local_memory(rack, "after another slice", [100, 70, 70]);
}
