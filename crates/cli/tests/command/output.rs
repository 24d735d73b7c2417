//! Tests of the exact output of commands.

use crate::rack::{Rack, RackBehavior, command};

/// Asserts that a command succeeds with exactly this text on stdout and no text on stderr.
async fn assert_output(arguments: &str, expected: &str) {
    let ran = Rack::default().tarn(arguments).await;
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str(), ran.code), (expected, "", 0), "tarn {arguments}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_tables_without_borders() {
    assert_output(
        "get slices",
        "\
SLICE  EMC  STATE        HOST  VM
0      e0   online       h1    web
1      e0   online       h1    web
2      e0   free         -     -
3      e0   draining     h1    -
4      e1   free         -     -
5      e1   scrubbing    h1    -
6      e1   free         -     -
7      e1   quarantined  h1    -
",
    )
    .await;
    assert_output(
        "get hosts",
        "\
HOST  STATE  SCHEDULING  CORES  LOCAL        SLICES  VMS
h1    up     enabled     30/32  63GiB/64GiB  2       1
h2    up     enabled     30/32  63GiB/64GiB  2       1
",
    )
    .await;
    assert_output(
        "get reservations",
        "\
RESERVATION  VM   HOST  STATE  ONLINE  LOCAL   POOL
r-1          web  h1    ready  2/2     512MiB  2GiB
r-2          db   h2    ready  2/2     512MiB  2GiB
",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wide_tables_have_all_columns() {
    assert_output(
        "get emcs -o wide",
        "\
EMC  STATE  SCHEDULING  SLICES  FREE  IN USE  DRAINING  QUARANTINED  FIRST  DRIVER    PATH      SERIAL  ERROR
e0   up     enabled     4       1     2       1         0            0      emulated  /pool/e0  -       -
e1   up     enabled     4       1     2       1         0            4      emulated  /pool/e1  -       -
",
    )
    .await;
    assert_output(
        "get rack -o wide",
        concat!(
            "RACK  VERSION  SLICES  FREE  BUFFER  ALARMS  REVISION  STARTED\n",
            "u-1   ",
            env!("CARGO_PKG_VERSION"),
            "    8       3     2       0       1.11      2023-11-14T22:13:20Z\n",
        ),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slices_as_json_have_the_documented_keys() {
    let ran = Rack::default().tarn("get slices -o json").await;
    let slices: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(slices.as_array().unwrap().len(), 8);
    let used = serde_json::json!({"slice": 1, "emc": "e0", "state": "online", "host": "h1", "vm": "web", "epoch": 2});
    let free =
        serde_json::json!({"slice": 2, "emc": "e0", "state": "free", "host": null, "vm": null, "epoch": 3});
    assert_eq!((&slices[1], &slices[2]), (&used, &free));
}

#[tokio::test(flavor = "multi_thread")]
async fn single_resource_is_a_json_object() {
    for arguments in
        ["get slices 1", "get hosts h1", "get emcs e0", "get reservations web", "get reservations r-1"]
    {
        let ran = Rack::default().tarn(&format!("{arguments} -o json")).await;
        let printed: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        assert!(printed.is_object(), "tarn {arguments}: {printed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn yaml_has_the_structure_of_json() {
    for arguments in [
        "get slices",
        "get hosts",
        "describe vm web",
        "explain vm web",
        "describe slice 6",
        "explain shares h1",
    ] {
        let rack = Rack::default();
        let json = rack.tarn(&format!("{arguments} -o json")).await.stdout;
        let yaml = rack.tarn(&format!("{arguments} -o yaml")).await.stdout;
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let yaml: serde_json::Value = serde_norway::from_str(&yaml).unwrap();
        assert_eq!(json, yaml, "tarn {arguments}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vm_is_described_with_its_slices() {
    assert_output(
        "describe vm web",
        "\
RESERVATION:  r-1
VM:           web
HOST:         h1
STATE:        ready
ONLINE:       2/2
LOCAL:        512MiB
POOL:         2GiB
CORES:        2
PINNED:       no
UID:          2001
PROCESS:      -
REHOME:       -
SLICES:       0-1
CREATED:      2023-11-14T22:13:20Z
COMMIT BY:    2023-11-14T22:18:20Z
REQUEST ID:   q1
REASON:       -

SLICES
SLICE  EMC  STATE   HOST  VM   EPOCH
0      e0   online  h1    web  1
1      e0   online  h1    web  2
",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn description_of_vm_omits_slices_of_a_later_owner() {
    let ran = Rack::default().tarn("describe vm r-0 -o json").await;
    let vm: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let details = vm["slice_details"].as_array().unwrap().iter();
    let shown: Vec<_> = details.filter_map(|s| s["slice"].as_u64()).collect();
    assert_eq!((&vm["slices"], shown), (&serde_json::json!([1, 2]), vec![1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_is_described_with_its_last_scrub() {
    assert_output(
        "describe slice 6",
        "\
SLICE:       6
EMC:         e1
STATE:       free
HOST:        -
VM:          -
EPOCH:       7
REASON:      -
LAST SCRUB:  2023-11-14T22:13:21Z by h2, epoch 4, 1GiB verified
",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn descriptions_include_alarms() {
    let degraded = Rack::new(RackBehavior::Degraded);
    let described = degraded.tarn("describe rack").await.stdout;
    assert!(described.contains("BUFFER:    2\n") && described.contains("\nALARMS\nSINCE"), "{described}");
    let described = degraded.tarn("describe host h2").await.stdout;
    assert!(
        described.contains("\nRESERVATIONS\n") && described.contains("r-2          db  h2"),
        "{described}"
    );
    assert!(!described.contains("r-1") && described.contains("HOST_UNKNOWN"), "{described}");
    let described = degraded.tarn("describe emc e0").await.stdout;
    assert!(described.contains("DRIVER:       emulated\n") && !described.contains("ALARMS"), "{described}");
}

#[tokio::test(flavor = "multi_thread")]
async fn decision_is_explained_with_its_inputs() {
    let explained = "\
2023-11-14T22:13:20Z  #7 reserve vm web (by nova)
  e0 alone has enough free slices
  model: fewest-emcs 1
  free_on_e0 = 4
  alternative: e1: 2 free slices
2023-11-14T22:13:20Z  verdict watch: some samples indicate a slowdown
  accessed: 35.5 % of the pool memory (29.0 % to 42.0 %), source vmm
  counters are unknown: the host has no performance counters
  steal: 12.5 % of the time
";
    assert_output("explain vm web", explained).await;
    assert_output("explain vm r-1", explained).await;
    assert_output("explain rack", "no decisions recorded for rack\n").await;
    let unknown = Rack::default().tarn("explain vm nope").await;
    assert_eq!((unknown.code, unknown.stdout.as_str()), (3, ""), "{}", unknown.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_lists_hosts_with_reasons() {
    assert_output(
        "plan-vm --vm new --cores 4 --memory 8GiB",
        "\
local 6GiB, pool 2GiB
reason: e0 alone has enough free slices

HOST  FITS  FREE CORES  FREE LOCAL  EMC  REASON
h1    yes   30          63GiB       e0   -
h2    no    30          63GiB       -    too few cores
",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reservation_as_json_is_complete() {
    let arguments = "reserve --host h1 --vm web --pool 2GiB --request-id q1 -o json";
    let ran = Rack::default().tarn(arguments).await;
    let printed: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let expected = serde_json::json!({
        "reservation": "r-1", "vm": "web", "host": "h1", "state": "ready", "slices": [0, 1], "slices_online": 2,
        "local_bytes": 536_870_912_u64, "pool_bytes": 2_147_483_648_u64, "cores": 2, "pinned": false,
        "uid": 2001, "process_running": false,
        "request_id": "q1", "created_unix_ms": 1_700_000_000_000_u64,
        "commit_deadline_unix_ms": 1_700_000_300_000_u64, "reason": null, "rehome": null,
    });
    assert_eq!((printed, ran.stderr.as_str()), (expected, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn rehome_waits_for_the_result() {
    let ran = Rack::default().tarn("rehome r-1 --wait -o wide").await;
    assert_eq!((ran.stderr.as_str(), ran.stdout.contains(" done ")), ("", true), "{}", ran.stdout);
    let ran = Rack::default().tarn("rehome web -o wide").await;
    assert!(ran.stdout.contains(" copying "), "{}", ran.stdout);
    let ran = Rack::default().tarn("rehome web --wait").await;
    assert_eq!(ran.stderr, "error: the memory was not moved: the VM has ended\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn release_warns_while_process_of_vm_runs() {
    let ran = Rack::default().tarn("release web --force --reason stuck").await;
    let warning = "warning: the process of VM web still runs on host h1; \
                   its cores and local memory stay in use until it ends\n";
    assert_eq!(ran.stderr, warning);
    assert!(ran.stdout.contains("released, running"), "{}", ran.stdout);
    let ran = Rack::default().tarn("release web").await;
    assert_eq!(ran.stderr, "");
    assert!(!ran.stdout.contains("running"), "{}", ran.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_prints_a_line_per_change() {
    let ran = Rack::default().tarn("watch").await;
    let lines = "\
2023-11-14T22:13:20Z  1        slice       7                quarantined  e1 epoch 8 host h1: not zero after a scrub
2023-11-14T22:13:20Z  2        reservation r-1              ready        web host h1 2/2 online
2023-11-14T22:13:20Z  3        dropped     3                batches      list the resources again
";
    assert_eq!((ran.stdout.as_str(), ran.code), (lines, 6));
    assert!(ran.stderr.contains("the manager ended the watch"), "{}", ran.stderr);
    let capacity = Rack::default().tarn("watch capacity").await.stdout;
    assert_eq!(capacity, "9        h1               enabled  cores 30    local 63GiB      e0 1/4  e1 1/4\n");
    let migrations = Rack::default().tarn("watch migrations").await.stdout;
    assert_eq!(
        migrations,
        "requested 2023-11-14T22:13:20Z  m-3    drain    web              on h1               open (h1 is draining)\n"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn managers_are_listed() {
    let listed = "\
NAME  ROLE     ADDRESS         VERSION  STARTED
a     standby  https://a:9750  0.1.0    2023-11-14T22:13:20Z
b     leader   https://b:9750  0.1.0    2023-11-14T22:13:20Z
";
    assert_output("get managers", listed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migration_requests_are_listed() {
    let listed = "\
ID   REQUESTED             VM   HOST  KIND   STATE  REASON
m-3  2023-11-14T22:13:20Z  web  h1    drain  open   h1 is draining
";
    assert_output("get migrations", listed).await;
    assert_output("get migrations web", listed).await;
    assert_output("get migrations other", "ID  REQUESTED  VM  HOST  KIND  STATE  REASON\n").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_are_listed_with_the_verdict_of_the_monitor() {
    let listed = "\
VM   HOST  POOL  VERDICT  LOSS  ACCESSED  SOURCE  REASON
web  h1    2GiB  watch    -     35.5 %    vmm     some samples indicate a slowdown
db   h2    2GiB  unknown  -     -         -       -
";
    assert_output("get vms", listed).await;
    let output = Rack::default().tarn("get vm web -o json").await;
    let vm: serde_json::Value = serde_json::from_str(&output.stdout).unwrap();
    assert_eq!(vm["verdict"], "watch");
    assert_eq!([&vm["accessed_share_low"], &vm["accessed_share_high"]], [0.29, 0.42]);
    assert_eq!([&vm["loss"], &vm["access_problem"]], [&serde_json::Value::Null; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_are_listed_with_their_shares() {
    let listed = "\
TENANT  WEIGHT  ENFORCER  MEMORY/FAIR  LINK      STALLED  GAIN
web     2       swap      40GiB/32GiB  2500MB/s  12.5 %   7.3 %
db      1       advise    8GiB/16GiB   9500MB/s  0.0 %    0.0 %
";
    let at = "note: reported by host h1 at 2023-11-14T22:13:20Z\n";
    let step = "note: shares change gradually: 50.0 % of the change was applied in this epoch, and gains refer to the current shares\n";
    for arguments in ["get shares h1", "get share h1"] {
        let output = Rack::default().tarn(arguments).await;
        let notes = format!("{step}{at}");
        assert_eq!((output.stdout.as_str(), output.stderr.as_str(), output.code), (listed, &*notes, 0));
    }
    let wide = Rack::default().tarn("get shares h1 -o wide").await.stdout;
    let head = "GAIN   MEMORY USED  LINK USED  LINK DEMAND  ACCESS SOURCE  ERROR  PROBLEM\n";
    assert!(wide.contains(head), "{wide}");
    assert!(wide.contains("39GiB        1234MB/s   3000MB/s     damon          5.0 %  -\n"), "{wide}");
    let json = Rack::default().tarn("get shares h1 -o json").await.stdout;
    let tenants: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        tenants[1],
        serde_json::json!({
            "tenant": "db", "weight": 1.0, "enforcer": "advise",
            "fair": {"memory_mib": 16384, "bandwidth_mb_s": 4000}, "share": {"memory_mib": 8192, "bandwidth_mb_s": 9500},
            "memory_used_mib": 0, "bandwidth_used_mb_s": 0.0, "stalled": 0.0, "bandwidth_demand_mb_s": 0.0,
            "gain": 0.99999, "access_source": "none", "error": 0.0, "problem": "it is no cgroup",
        })
    );
    let blocked = Rack::new(RackBehavior::Degraded).tarn("get shares h1").await;
    let note = format!("note: the last epoch did not update shares and estimates: no link is known\n{at}");
    assert_eq!((blocked.stdout.as_str(), blocked.stderr.as_str(), blocked.code), (listed, &*note, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_are_explained_with_all_numbers() {
    assert_output(
        "explain shares h1",
        "\
2023-11-14T22:13:20Z  epoch 7 of host h1: shares updated
  capacity: 48GiB of local memory, 12000MB/s of link bandwidth in each direction
  market:
    exact: every tenant gets its demand at one price
    price of all memory 0.620, of all link bandwidth 0.380; prices and budgets each add up to 1
    budget of each tenant: 1.050 times its fraction of all weights, because some tenants do not spend their whole budget
    23 prices were evaluated
    no trade after the market increases the geometric mean of throughputs, or trades were not searched
    50.0 % of the change to the new shares was applied
    supply above demand, which was distributed too: 0.0 % of memory, 1.2 % of link bandwidth
    no purchase exceeds its budget by more than 0.0 %
    estimated throughput of db, the worst-off tenant: 1.000 times that with an equal split; no tenant loses by sharing
    envy: a tenant would have 3.4 % more throughput with another tenant's share
  tenant web, weight 2, swap: memory beyond its share is swapped out
    memory: share 40GiB, fair share by weight 32GiB, used 39GiB
    link: share 2500MB/s, fair share by weight 8000MB/s, used 1234MB/s, demand 3000MB/s
    stalled on memory or I/O 12.5 % of the time
    throughput: 1.073 times that with an equal split, estimated from damon, error 5.0 %
  tenant db, weight 1, advise: not enforced (advisory)
    memory: share 8GiB, fair share by weight 16GiB, used 0B
    link: share 9500MB/s, fair share by weight 4000MB/s, used 0MB/s, demand 0MB/s
    stalled on memory or I/O 0.0 % of the time
    throughput: about 1.00 times that with an equal split, estimated from stall time without page accesses
    share not enforced: it is no cgroup
",
    )
    .await;
    let blocked = Rack::new(RackBehavior::Degraded).tarn("explain shares h1").await.stdout;
    let expected =
        "shares unchanged: new shares could not be computed or enforced\n  no link is known\n  capacity";
    assert!(blocked.contains(expected) && !blocked.contains("market:"), "{blocked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn set_weights_prints_all_weights() {
    assert_output("set weights h1 web=2 db=0.5 old=0", "TENANT  WEIGHT\nweb     2\ndb      0.5\n").await;
    let ran = Rack::default().tarn("set weights h1 web=2 -o json").await;
    let set: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(set, serde_json::json!([{"tenant": "web", "weight": 2.0}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_as_json_is_one_object_per_line() {
    let ran = Rack::default().tarn("watch events -o json").await;
    let events: Vec<serde_json::Value> =
        ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 3);
    assert_eq!((&events[0]["slice"]["state"], &events[0]["revision"]), (&"quarantined".into(), &1.into()));
    assert_eq!(events[2]["events_dropped"]["batches"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_no_problem_in_a_healthy_rack() {
    let ran = Rack::default().tarn("doctor -o json").await;
    let findings: Vec<serde_json::Value> = serde_json::from_str(&ran.stdout).unwrap();
    assert!(findings.len() >= 8 && findings.iter().all(|f| f["ok"] == true), "{findings:#?}");
    assert_eq!((ran.stderr.as_str(), ran.code), ("", 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_shows_problems_and_fixes() {
    let ran = Rack::new(RackBehavior::Degraded).tarn("doctor").await;
    assert_eq!((ran.stderr.as_str(), ran.code), ("error: 2 problems found\n", 1), "{}", ran.stdout);
    for part in ["host h2", "`tarn fence h2`", "not zero after a scrub", "`tarn uncordon slice 7`"] {
        assert!(ran.stdout.contains(part), "{part} is missing in\n{}", ran.stdout);
    }
    let alarms = Rack::new(RackBehavior::Degraded).tarn("get alarms h2").await.stdout;
    assert!(
        alarms.contains("2023-11-14T22:13:20Z  HOST_UNKNOWN  host h2  silent past its lease"),
        "{alarms}"
    );
}

/// Shell script that copies `tarn` ($1) into a directory ($0). If $2 is not empty, it also creates
/// a program `host-agent` that runs the script $2.
const INSTALL_SCRIPT: &str = r#"cp "$1" "$0/tarn"; [ -z "$2" ] || { printf '#!/bin/sh\n%s\n' "$2" > "$0/host-agent"; chmod 755 "$0/host-agent"; }"#;

/// Runs `tarn doctor` without a manager and with the given script as `host-agent`. Returns its
/// finding about the local host, and its exit code.
async fn host_findings(agent: &str) -> (serde_json::Value, Option<i32>) {
    let folder = tempfile::tempdir().unwrap();
    // A separate process writes the programs. If this process wrote them, a child forked by another
    // test could still have the files open for writing, and executing them would fail (ETXTBSY).
    let mut install = tokio::process::Command::new("sh");
    install.args(["-c", INSTALL_SCRIPT]).arg(folder.path()).args([env!("CARGO_BIN_EXE_tarn"), agent]);
    assert!(install.status().await.unwrap().success());
    let tarn = folder.path().join("tarn");
    let arguments = ["doctor", "--host-config", "/host.toml", "--endpoint", "unix:/nowhere", "-o", "json"];
    let output = tokio::process::Command::new(tarn).args(arguments).env_clear().output().await.unwrap();
    let mut findings: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((findings.len(), &findings[0]["check"]), (2, &"endpoint".into()), "{findings:#?}");
    (findings.remove(1), output.status.code())
}

#[tokio::test]
async fn host_is_checked_without_its_manager() {
    let finding = r#"{"check":"kvm","ok":true,"subject":"this host","message":"'"$*"'","fix":null}"#;
    let (found, code) = host_findings(&format!("echo '[{finding}]'; exit 1")).await;
    assert_eq!((found["check"].as_str(), code), (Some("kvm"), Some(1)));
    assert_eq!(found["message"], "doctor --output json --config /host.toml");
}

#[tokio::test]
async fn failed_host_check_is_a_finding() {
    let (found, _) = host_findings("echo 'error: too old' >&2; exit 2").await;
    assert!(found["message"].as_str().unwrap().ends_with("doctor` failed: error: too old"), "{found}");
    let (found, _) = host_findings("").await;
    assert!(found["message"].as_str().unwrap().starts_with("`host-agent doctor` failed: "), "{found}");
    assert_eq!((found["ok"].as_bool(), found["check"].as_str()), (Some(false), Some("host")));
}

#[tokio::test(flavor = "multi_thread")]
async fn closed_pipe_is_not_an_error() {
    let rack = Rack::default();
    let address = rack.listen().await;
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut tarn = command(&format!("--endpoint http://{address} get slices"));
    let output = tarn.stdout(writer).output().await.unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()), (Some(0), ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn validation_result_differs_from_a_reservation() {
    let rack = Rack::default();
    let ran = rack.tarn("reserve --host h1 --vm web --pool 2GiB --validate-only").await;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "a validation does not print a request ID");
    let expected = "valid, nothing reserved: vm web on host h1 would get 2GiB of pool memory (slices 0-1), 512MiB of local memory and 2 cores\n";
    assert_eq!(ran.stdout, expected);
    let ran = rack.tarn("reserve --host h1 --vm web --pool 2GiB --validate-only -o json").await;
    let printed: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(printed["valid"], true);
    assert!(printed.get("reservation").is_none() && printed.get("state").is_none(), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_ends_after_its_timeout() {
    let ran = Rack::new(RackBehavior::OpenWatch).tarn("watch --timeout 300ms").await;
    assert_eq!(ran.code, 124, "{}", ran.stderr);
    assert_eq!(ran.stderr, "error: watch ended by --timeout after 300ms\n");
    assert_eq!(ran.stdout.lines().count(), 3, "{}", ran.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_without_decisions_shows_the_state() {
    let ran = Rack::default().tarn("explain slice 1").await;
    assert_eq!(
        ran.stdout,
        "no decisions recorded for slice 1; state online, host h1, epoch 2\nsee also: `tarn explain vm web`\n"
    );
    let ran = Rack::default().tarn("explain slice 7").await;
    assert!(
        ran.stdout.contains("state quarantined, host h1, epoch 8: not zero after a scrub"),
        "{}",
        ran.stdout
    );
    let ran = Rack::new(RackBehavior::Degraded).tarn("explain host h2").await;
    for text in
        ["state up, scheduling enabled", "HOST_UNKNOWN: silent past its lease", "`tarn explain vm db`"]
    {
        assert!(ran.stdout.contains(text), "{text}: {}", ran.stdout);
    }
}
