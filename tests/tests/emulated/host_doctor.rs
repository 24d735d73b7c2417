//! Tests of the doctor command on an emulated host, without problems and with injected problems.

use serde_json::Value;
use tests::emulated_rack::{EmulatedRack, plan};

const DOCTOR_COMMAND: &str = "host-agent doctor --config /etc/tarn/h0.toml -o json 2> /dev/null";

/// Runs a doctor command on the host and returns its findings. The exit code must be 0 exactly if
/// all findings are ok.
fn run_doctor(rack: &EmulatedRack, doctor: &str) -> Vec<Value> {
    let output = rack.run(0, &format!("{doctor}; echo $?"));
    let (json, code) = output.trim_end().rsplit_once('\n').unwrap();
    let findings: Vec<Value> = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert_eq!(code != "0", findings.iter().any(|finding| finding["ok"] == false), "{output}");
    findings
}

/// Returns the problems that the doctor finds, as `check: message`, and the commands that fix them.
fn find_problems(rack: &EmulatedRack) -> (Vec<String>, Vec<String>) {
    let findings_of_host = run_doctor(rack, DOCTOR_COMMAND);
    let failed: Vec<_> = findings_of_host.iter().filter(|finding| finding["ok"] == false).collect();
    let field = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let describe = |finding: &&Value| format!("{}: {}", field(finding, "check"), field(finding, "message"));
    let command = |finding: &&Value| field(finding, "fix").split('`').nth(1).unwrap_or_default().to_owned();
    (failed.iter().map(describe).collect(), failed.iter().map(command).collect())
}

/// Injects a problem. Checks that the doctor finds only this problem, and that the suggested
/// command fixes the problem.
fn assert_found_and_fixed(rack: &EmulatedRack, inject: &str, expected: &str) {
    rack.run(0, inject);
    let (found, fixes) = find_problems(rack);
    assert!(found.len() == 1 && found[0].starts_with(expected), "after {inject}: {found:?}");
    rack.run(0, &fixes[0]);
    assert_eq!(find_problems(rack).0, [""; 0], "after {}", fixes[0]);
}

#[test]
fn doctor_finds_problems_and_the_commands_that_fix_them() {
    let rack = EmulatedRack::start(plan(1, &[2], "memory_block"));
    assert_eq!(find_problems(&rack).0, [""; 0]);

    let list = "/lib/modules/$(uname -r)/modules.dep";
    rack.run(0, &format!("mv {list} /run"));
    let (found, _) = find_problems(&rack);
    assert!(found.len() == 1 && found[0].starts_with("modules: kmem is neither loaded"), "{found:?}");
    rack.run(0, &format!("mv /run/modules.dep {list}"));

    rack.reserve(0, "vm", 1);
    assert_eq!(find_problems(&rack).0, [""; 0], "with a slice");
    let policy = "/sys/devices/system/memory/auto_online_blocks";
    assert_found_and_fixed(
        &rack,
        &format!("echo online > {policy}"),
        "auto_online: hot-added memory comes online automatically (online)",
    );
    let demotion = "/sys/kernel/mm/numa/demotion_enabled";
    assert_found_and_fixed(&rack, &format!("echo 1 > {demotion}"), "migration: ");
    assert_found_and_fixed(
        &rack,
        "chmod 644 /etc/tarn/h0.key",
        "secrets: tls.key: /etc/tarn/h0.key has mode 0644",
    );

    rack.run(0, "echo 'somebody:x:1000:1000::/:/bin/sh' > /etc/passwd");
    let as_user = run_doctor(&rack, &format!("su somebody -c '{DOCTOR_COMMAND}'"));
    let finding = as_user.iter().find(|finding| finding["check"] == "secrets").unwrap();
    assert!(finding["fix"].as_str().unwrap().contains("sudo host-agent doctor"), "{finding}");

    let both = run_doctor(&rack, "tarn doctor --host-config /etc/tarn/h0.toml -o json 2> /dev/null");
    let failed: Vec<_> = both.iter().filter(|finding| finding["ok"] == false).collect();
    assert!(
        failed.len() == 1 && failed[0]["check"] == "endpoint",
        "only the check of the manager endpoint must fail: {failed:?}"
    );
    assert!(both.iter().any(|finding| finding["check"] == "devices"), "{both:?}");
}
