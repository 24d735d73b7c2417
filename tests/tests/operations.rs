//! Tests of operations on a rack: reloads of rack.toml, restarts, damaged or lost stores, and
//! invalid configurations. Uses real processes.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs::{self, File},
    os::unix::fs::OpenOptionsExt as _,
    process::Command,
};

use proto::v1 as wire;
use rustix::process::Signal;
use tests::rack::{Plan, Rack, programs_dir, reserve_request, vm_ref};

#[tokio::test]
async fn reload_adds_hosts_and_emcs_and_removes_only_unused_hosts() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut scheduler = rack.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve_request("h1", "v", 1, "r1") })
        .await
        .unwrap();
    let old = rack.rack_toml();
    let emc2 = rack.dir().join("emc2");
    let added = format!(
        "{old}[[emc]]\nname = \"emc2\"\nslices = 3\ndriver = \"emulated\"\npath = {emc2:?}\n\
         [[host]]\nname = \"h2\"\ncores = 8\nlocal_mib = 1024\nemcs = [\"emc2\"]\n"
    );
    rack.write_rack_toml(&added);
    rack.signal_manager(Signal::HUP);
    rack.wait_for("the new host and EMC", async |rack| {
        rack.hosts().await.len() == 3 && rack.slices().await.len() == 7
    })
    .await;

    let h1 = "[[host]]\nname = \"h1\"";
    let without_h1 = added.replace(h1, "[[host]]\nname = \"h9\"");
    rack.write_rack_toml(&without_h1);
    rack.signal_manager(Signal::HUP);
    rack.wait_for("the rejection", async |rack| rack.read_log("manager").contains("drain it first")).await;
    assert!(rack.hosts().await.iter().any(|h| h.host == "h1"), "a host in use was removed");

    rack.write_rack_toml("[manager]\nlisten = 5\nbogus = true\n");
    rack.signal_manager(Signal::HUP);
    rack.wait_for("the second rejection", async |rack| rack.read_log("manager").contains("bogus")).await;
    assert_eq!(rack.hosts().await.len(), 3);

    scheduler.release(wire::ReleaseRequest { target: vm_ref("v"), ..Default::default() }).await.unwrap();
    rack.wait_all_slices_free().await;
    rack.kill_agent(1);
    rack.write_rack_toml(&without_h1);
    rack.signal_manager(Signal::HUP);
    rack.wait_for("h9 to replace h1", async |rack| rack.hosts().await.iter().any(|h| h.host == "h9")).await;
    assert!(rack.hosts().await.iter().all(|h| h.host != "h1"));
}

#[tokio::test]
async fn watch_survives_manager_restarts() {
    let mut rack = Rack::start(Plan::small(2)).await;
    let capacity_file = rack.dir().join("capacity");
    let mut watch = Command::new(programs_dir().join("tarn"));
    watch.args(["watch", "capacity", "--endpoint", &rack.endpoint()]);
    let mut watch = watch.stdout(fs::File::create(&capacity_file).unwrap()).spawn().unwrap();
    let last_line_contains = |words: &str| {
        let text = fs::read_to_string(&capacity_file).unwrap();
        text.lines().rfind(|line| line.contains("h0")).is_some_and(|line| line.contains(words))
    };
    rack.wait_for("capacity to be shown", async |_| last_line_contains("enabled")).await;
    rack.stop_manager();
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.kill_manager();
    rack.start_manager().await;
    rack.wait_hosts_up().await;
    rack.wait_for("capacity to be shown again", async |_| last_line_contains("enabled")).await;
    assert!(rack.tarn(&["cordon", "host", "h0"]).status.success());
    rack.wait_for("the cordoned host to be shown", async |_| last_line_contains("disabled")).await;
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[tokio::test]
async fn locked_or_corrupt_store_is_rejected() {
    let mut rack = Rack::new(Plan::small(2));
    rack.start_manager().await;
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("in use by another pool-manager"), "{output}");
    rack.stop_manager();
    let (ok, output) = rack.run_pool_manager(&["check"]);
    assert!(ok && output.contains("ok"), "{output}");

    let file = fs::read_dir(rack.dir().join("store")).unwrap().map(|entry| entry.unwrap().path());
    let file = file.filter(|path| path.is_file()).max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 3;
    bytes[..middle].fill(0x5a);
    fs::write(&file, bytes).unwrap();
    for command in ["check", "serve"] {
        let (ok, output) = rack.run_pool_manager(&[command]);
        assert!(!ok && output.contains("corrupt") && output.contains("restore"), "{command}: {output}");
    }
}

/// Flips one byte in each page of the store. Also zeroes each eighth page, and truncates the file
/// at each eighth page. Either the state is unchanged, or `check` and `serve` end with a clear
/// error and no panic. The unit tests of the store cover more cases.
#[tokio::test]
async fn damaged_store_page_is_detected_or_harmless() {
    const STORE_PAGE_BYTES: usize = 4096;
    let mut rack = Rack::start(Plan::small(2)).await;
    let mut scheduler = rack.scheduler().await;
    for vm in ["a", "b", "c"] {
        let request = wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", vm, 1, vm) };
        scheduler.reserve(request).await.unwrap();
    }
    scheduler.release(wire::ReleaseRequest { target: vm_ref("b"), ..Default::default() }).await.unwrap();
    rack.stop_manager();
    let run = |command: &str| {
        let program = programs_dir().join("pool-manager");
        let mut run = Command::new("timeout"); // exits with code 124 if pool-manager hangs
        let output =
            run.arg("20").arg(program).arg(command).arg("--config").arg(rack.rack_toml_path()).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let ledger = rack.dir().join("store/ledger.redb");
    let (intact, (code, expected)) = (fs::read(&ledger).unwrap(), run("check"));
    assert_eq!(code, Some(0), "{expected}");

    let pages = intact.len() / STORE_PAGE_BYTES;
    let (mut harmless, mut detected) = (0, 0);
    for page in 0..pages {
        let start = page * STORE_PAGE_BYTES;
        let mut damaged = vec![intact.clone(), intact.clone(), intact[..start].to_vec()];
        damaged[0][start + page % 64] ^= 0xff;
        damaged[1][start..start + STORE_PAGE_BYTES].fill(0);
        damaged.truncate(if page % 8 == 0 { 3 } else { 1 });
        damaged.retain(|bytes| *bytes != intact);
        for (n, bytes) in damaged.iter().enumerate() {
            fs::write(&ledger, bytes).unwrap();
            let (code, output) = run("check");
            if code == Some(0) {
                assert_eq!(output, expected, "page {page}, {n}");
                harmless += 1;
                continue;
            }
            let is_clear = output.contains("`pool-manager restore") && !output.contains("panicked");
            assert!(code == Some(1) && is_clear, "page {page}, {n}: {code:?} {output}");
            detected += 1;
            if detected % 8 == 0 {
                fs::write(&ledger, bytes).unwrap();
                let (code, served) = run("serve");
                let error = output.lines().last().unwrap();
                assert!(code == Some(1) && served.contains(error), "page {page}, {n}: {code:?} {served}");
            }
        }
    }
    assert!(
        detected > 10,
        "too few detected damages: {detected} detected, {harmless} harmless, in {pages} pages"
    );
}

#[tokio::test]
async fn lost_ledger_is_not_treated_as_new_rack() {
    let mut rack = Rack::new(Plan::small(2));
    for command in ["check", "serve"] {
        let (ok, output) = rack.run_pool_manager(&[command]);
        let is_clear = output.contains("no store at") && output.contains("`pool-manager init --config ");
        assert!(!ok && is_clear, "{command}: {output}");
        assert!(!rack.dir().join("store").exists(), "{command} created a store");
    }
    let (ok, output) = rack.run_pool_manager(&["init"]);
    assert!(ok && output.contains("created"), "{output}");
    let (ok, output) = rack.run_pool_manager(&["init"]);
    assert!(!ok && output.contains("already"), "{output}");
    rack.start_manager().await;
    let backup = rack.dir().join("backup");
    rack.stop_manager();
    assert!(rack.run_pool_manager(&["backup", "--to", backup.to_str().unwrap()]).0);

    let ledger = rack.dir().join("store/ledger.redb");
    for problem in ["is missing", "is empty"] {
        match problem {
            "is empty" => {
                drop(File::options().create_new(true).write(true).mode(0o600).open(&ledger).unwrap())
            }
            _ => fs::remove_file(&ledger).unwrap(),
        }
        for command in ["check", "serve", "init"] {
            let (ok, output) = rack.run_pool_manager(&[command]);
            let is_clear = output.contains(problem) && output.contains("pool-manager restore");
            assert!(!ok && is_clear, "{command}: {output}");
        }
        assert_eq!(fs::metadata(&ledger).map_or(0, |file| file.len()), 0, "no new ledger must be created");
    }
    let (ok, output) = rack.run_pool_manager(&["restore", "--from", backup.to_str().unwrap()]);
    assert!(ok, "{output}");
    rack.start_manager().await;
}

/// The manager cannot distinguish the path of another rack from a lost store, so it must not change
/// the EMC.
#[tokio::test]
async fn emc_of_another_rack_fails_and_is_not_changed() {
    let mut owner = Rack::start(Plan::small(1)).await;
    let mut scheduler = owner.scheduler().await;
    scheduler
        .reserve(wire::ReserveRequest { wait_ready: true, ..reserve_request("h0", "v", 1, "r1") })
        .await
        .unwrap();
    owner.stop_manager();
    let mut other = Rack::new(Plan::small(1));
    let [own, foreign] = [&other, &owner].map(|rack| format!("{:?}", rack.emc_dir(0)));
    other.write_rack_toml(&other.rack_toml().replace(&own, &foreign));
    other.start_manager().await;
    let message = async |rack: &Rack| {
        let response = rack.admin().await.get_rack(wire::GetRackRequest {}).await.unwrap().into_inner();
        response.alarms.into_iter().find(|alarm| alarm.reason == "EMC_FAILED").map(|alarm| alarm.message)
    };
    other.wait_for("the alarm", async |rack| message(rack).await.is_some()).await;
    let message = message(&other).await.unwrap();
    assert!(message.contains("rack-uuid contains rack"), "{message}");
    other.stop_manager();
    owner.start_manager().await;
    owner.wait_hosts_up().await;
    assert!(
        owner.slices().await.iter().any(|slice| slice.vm.as_deref() == Some("v")),
        "the VM must keep its slice"
    );
}

#[tokio::test]
async fn manager_that_cannot_start_reports_reason_and_ends() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap();
    let mut rack = Rack::new(Plan::small(2));
    let good = rack.rack_toml();
    rack.write_rack_toml(&good.replacen("[manager]", &format!("[manager]\nmetrics_listen = \"{port}\""), 1));
    rack.create_store();
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains(&port.to_string()) && output.contains("in use"), "{output}");

    rack.write_rack_toml(&good);
    rack.start_manager().await;
    rack.stop_manager();
    rack.write_rack_toml(&good.replacen("slices = 2", "slices = 1", 1));
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("emc0") && output.contains("from 2 to 1"), "{output}");
}

#[tokio::test]
async fn invalid_rack_toml_is_rejected_with_all_errors() {
    let rack = Rack::new(Plan::small(2));
    let good = rack.rack_toml();
    let (ok, output) = rack.run_pool_manager(&["serve", "--check-config"]);
    assert!(ok && output.contains("2 hosts, 2 EMCs, 4 slices"), "{output}");
    let faulty =
        good.replace("name = \"h1\"", "name = \"h0\"").replace("emcs = [\"emc0\"", "emcs = [\"nowhere\"")
            + "[policy]\npool_share = 1.5\n";
    rack.write_rack_toml(&faulty);
    let (ok, output) = rack.run_pool_manager(&["serve", "--check-config"]);
    assert!(!ok);
    for word in ["h0", "nowhere", "pool_share", "1.5"] {
        assert!(output.contains(word), "{output} does not contain {word}");
    }
    rack.write_rack_toml(&good.replace("ttl_s", "tll_s"));
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("tll_s"), "{output}");
    let without_emcs = good.replacen("emcs = [\"emc0\", \"emc1\"]", "emcs = []", 1);
    rack.write_rack_toml(&without_emcs);
    let (ok, output) = rack.run_pool_manager(&["serve"]);
    assert!(!ok && output.contains("emcs"), "{output}");
}

#[tokio::test]
async fn log_can_be_json_and_invalid_filter_is_an_error() {
    let rack = Rack::new(Plan::small(2));
    rack.create_store();
    let log = fs::File::create(rack.dir().join("manager.log")).unwrap();
    let mut manager = Command::new(programs_dir().join("pool-manager"));
    manager.args(["serve", "--log-format", "json", "--config"]).arg(rack.rack_toml_path()).stderr(log);
    let mut manager = manager.spawn().unwrap();
    rack.wait_for("the manager", async |rack| rack.read_log("manager").contains("pool-manager ready")).await;
    manager.kill().unwrap();
    manager.wait().unwrap();
    let lines: Vec<serde_json::Value> =
        rack.read_log("manager").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ready = lines.iter().find(|line| line["message"] == "pool-manager ready").unwrap();
    assert_eq!((&ready["level"], &ready["listen"]), (&"INFO".into(), &rack.endpoint().into()));
    let mut invalid = Command::new(programs_dir().join("pool-manager"));
    invalid
        .args(["serve", "--check-config", "--config"])
        .arg(rack.rack_toml_path())
        .env("RUST_LOG", "pool=loud");
    let invalid = invalid.output().unwrap();
    let stderr = String::from_utf8_lossy(&invalid.stderr);
    assert!(!invalid.status.success() && stderr.contains("RUST_LOG"), "{stderr}");
}
