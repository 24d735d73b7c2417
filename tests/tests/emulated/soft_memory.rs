//! Tests of soft memory on an emulated host, with the memory of a real kernel. The client of soft memory fills a list;
//! other programs fill files in memory.

use serde_json::Value;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    rack::programs_dir,
};

/// Program that is a client of soft memory. It reads requests from its standard input.
const CLIENT: &str = "host-agent-test-soft-client";
/// Socket of the daemon.
const SOCKET: &str = "/run/tarn-agent/soft-memory.sock";
/// Memory that stays available for other use, in MiB.
const RESERVE_MIB: u64 = 250;
/// Reservation with the slices of soft memory.
const RESERVATION: &str = "soft";
/// Bytes per MiB.
const MIB: u64 = 1 << 20;

/// Starts a rack with one host, and a client on it.
fn start_rack(backend: &str, keys: &str) -> EmulatedRack {
    let mut plan = plan(1, &[1], backend);
    plan.backend_toml_extra = format!("[soft_memory]\n{keys}\n");
    plan.hosts.cpus = 2;
    plan.hosts.cmdline_extra += " psi=1";
    plan.hosts.programs.push(programs_dir().join(CLIENT));
    let rack = EmulatedRack::start(plan);
    let host_command = format!(
        "mkfifo /tmp/requests; sleep 1000000 > /tmp/requests & {CLIENT} {SOCKET} < /tmp/requests > /tmp/replies 2>&1 &"
    );
    rack.run(0, &host_command);
    rack.wait_until("the client is connected", |rack| replies(rack) == ["connected"]);
    rack
}

/// Returns all replies of the client.
fn replies(rack: &EmulatedRack) -> Vec<String> {
    rack.run(0, "cat /tmp/replies").lines().map(str::to_owned).collect()
}

/// Sends a request to the client, and waits for the reply.
fn request(rack: &EmulatedRack, request: &str) -> String {
    let count = replies(rack).len();
    rack.run(0, &format!("echo '{request}' > /tmp/requests"));
    rack.wait_until(request, |rack| replies(rack).len() > count);
    replies(rack).swap_remove(count)
}

/// Returns the pages that the client holds, and the number of evicted values.
fn held_and_evicted(rack: &EmulatedRack) -> (u64, u64) {
    let stats = request(rack, "stats");
    let numbers: Vec<u64> = stats.split(' ').map(|number| number.parse().unwrap()).collect();
    (numbers[1], numbers[2])
}

fn available_mib(rack: &EmulatedRack) -> u64 {
    let kib = rack.run(0, "sed -n 's/^MemAvailable: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo");
    kib.trim().parse::<u64>().unwrap() >> 10
}

/// Returns the report of the daemon.
fn report(rack: &EmulatedRack) -> Value {
    let output = rack.try_tarn("get soft h0 -o json");
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

/// Files in memory grow by up to 100 MiB/s while soft memory has the rest of the memory.
#[test]
fn soft_memory_gives_way_before_the_host_is_out_of_memory() {
    let rack = start_rack("dax", &format!("size_mib = 100000\nreserve_mib = {RESERVE_MIB}"));
    let total = available_mib(&rack);
    let pushed: u64 = request(&rack, "push 100000000").parse().unwrap();
    let (held, _) = held_and_evicted(&rack);
    println!("{total} MiB available, {pushed} values pushed, {held} pages held");
    assert!(held * 4096 >= (total - 2 * RESERVE_MIB) * MIB, "soft memory uses the memory above the reserve");
    assert!(available_mib(&rack) >= RESERVE_MIB / 2);
    let files_mib = (total - RESERVE_MIB) / 2;
    rack.run(
        0,
        &format!(
            "mkdir /tmp/files; for n in $(seq {}); do \
             dd if=/dev/zero of=/tmp/files/$n bs=1048576 count=10 2> /dev/null; sleep 0.1; done",
            files_mib / 10
        ),
    );
    let (held_now, evicted) = held_and_evicted(&rack);
    println!("{files_mib} MiB of files, {held_now} pages held, {evicted} values evicted");
    assert!(held_now < held && evicted > 0);
    assert_eq!(rack.run(0, "dmesg | grep -ci 'out of memory' || true").trim(), "0");
    rack.wait_until("the reserve is available again", |rack| available_mib(rack) >= RESERVE_MIB * 9 / 10);
    // The memory returns.
    rack.run(0, "rm -r /tmp/files");
    rack.wait_until("soft memory grows again", |rack| {
        request(rack, "push 1000") == "1000" && held_and_evicted(rack).0 > held_now
    });
    println!("{}", rack.tarn("get soft h0"));
}

/// Slices of a reservation add to soft memory until the reservation is released.
#[test]
fn slices_extend_soft_memory_until_they_are_released() {
    let keys = format!("size_mib = 64\nreserve_mib = {RESERVE_MIB}\nreservation = {RESERVATION:?}");
    let rack = start_rack("memory_block", &keys);
    let pushed: u64 = request(&rack, "push 100000").parse().unwrap();
    assert!(pushed <= 64 * MIB / 4096, "{pushed}");
    rack.reserve(0, RESERVATION, 1);
    rack.wait_until("the slice adds to the limit", |rack| {
        report(rack)["limit_bytes"].as_u64() == Some((64 + 1024) * MIB)
    });
    let more: u64 = request(&rack, "push 200000").parse().unwrap();
    assert_eq!(more, 200_000);
    assert!(held_and_evicted(&rack).0 >= 200_000);
    rack.tarn(&format!("release {RESERVATION}"));
    rack.wait_all_slices_free();
    let (held, evicted) = held_and_evicted(&rack);
    assert!(held <= 64 * MIB / 4096 && evicted >= 183_000, "{held} {evicted}");
    assert_eq!(report(&rack)["limit_bytes"].as_u64(), Some(64 * MIB));
    rack.assert_devices_zeroed();
}
