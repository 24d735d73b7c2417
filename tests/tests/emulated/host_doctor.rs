//! The doctor on a real host of a rack in a box: passed checks, and injected problems.

use serde_json::Value;
use tests::real_rack::{RealRack, plan};

const DOCTOR: &str = "host-agent doctor --config /etc/tarn/h0.toml -o json 2> /dev/null";

/// Returns the findings of a doctor on the host; its exit code must match.
fn findings(rack: &RealRack, doctor: &str) -> Vec<Value> {
    let said = rack.run(0, &format!("{doctor}; echo $?"));
    let (json, code) = said.trim_end().rsplit_once('\n').unwrap();
    let findings: Vec<Value> = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(code != "0", findings.iter().any(|finding| finding["ok"] == false), "{said}");
    findings
}

/// Returns the host's problems as `check: finding`, and the commands that fix them.
fn wrong(rack: &RealRack) -> (Vec<String>, Vec<String>) {
    let all = findings(rack, DOCTOR);
    let wrong: Vec<_> = all.iter().filter(|finding| finding["ok"] == false).collect();
    let word = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let what = |finding: &&Value| format!("{}: {}", word(finding, "check"), word(finding, "what"));
    let command = |finding: &&Value| word(finding, "mend").split('`').nth(1).unwrap_or_default().to_owned();
    (wrong.iter().map(what).collect(), wrong.iter().map(command).collect())
}

/// Makes something wrong, sees that it is found and nothing else is, and that the command that is named mends it.
fn found_and_mended(rack: &RealRack, make: &str, expected: &str) {
    rack.run(0, make);
    let (found, mend) = wrong(rack);
    assert!(found.len() == 1 && found[0].starts_with(expected), "after {make}: {found:?}");
    rack.run(0, &mend[0]);
    assert_eq!(wrong(rack).0, [""; 0], "after {}", mend[0]);
}

#[test]
fn a_healthy_host_is_found_healthy_and_what_is_wrong_with_it_is_found_with_the_command_that_mends_it() {
    let rack = RealRack::start(plan(1, &[2], "memory_block"));
    assert_eq!(wrong(&rack).0, [""; 0]);

    let list = "/lib/modules/$(uname -r)/modules.dep";
    rack.run(0, &format!("mv {list} /run"));
    let (found, _) = wrong(&rack);
    assert!(found.len() == 1 && found[0].starts_with("modules: kmem is neither loaded"), "{found:?}");
    rack.run(0, &format!("mv /run/modules.dep {list}"));

    rack.reserve(0, "vm", 1);
    assert_eq!(wrong(&rack).0, [""; 0], "with a slice");
    let policy = "/sys/devices/system/memory/auto_online_blocks";
    found_and_mended(
        &rack,
        &format!("echo online > {policy}"),
        "onlining: added memory comes online by itself (online)",
    );
    let demotion = "/sys/kernel/mm/numa/demotion_enabled";
    found_and_mended(&rack, &format!("echo 1 > {demotion}"), "movers: ");
    found_and_mended(&rack, "chmod 644 /etc/tarn/h0.key", "secrets: /etc/tarn/h0.key has mode 0644");

    rack.run(0, "echo 'somebody:x:1000:1000::/:/bin/sh' > /etc/passwd");
    let somebody = findings(&rack, &format!("su somebody -c '{DOCTOR}'"));
    let denied = somebody.iter().find(|finding| finding["check"] == "secrets").unwrap();
    assert!(denied["mend"].as_str().unwrap().contains("sudo host-agent doctor"), "{denied}");

    let both = findings(&rack, "tarn doctor --host-config /etc/tarn/h0.toml -o json 2> /dev/null");
    let wrong: Vec<_> = both.iter().filter(|finding| finding["ok"] == false).collect();
    assert!(wrong.len() == 1 && wrong[0]["check"] == "endpoint", "no manager is in reach: {wrong:?}");
    assert!(both.iter().any(|finding| finding["check"] == "devices"), "{both:?}");
}
