//! Access to the manager and to slices on two machines, for hosts with CXL memory: certificates as
//! in docs/install.md, and attacks by other users of a host.

use std::{fs, path::Path, process::Command};

use emulated_host::rack::{CommandOutput, RackPlan};
use tests::{
    emulated_rack::{EmulatedRack, HOST_MEMORY_SOCKET, WAIT_TIMEOUT, plan},
    rack::programs_dir,
};

/// Memory that a VM writes into its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// User of the VM.
const TENANT_USER: &str = "tenant";
/// User of another VM of the host.
const NEIGHBOUR_USER: &str = "neighbour";
/// User that may not attach to any VM.
const UNAUTHORIZED_USER: &str = "stranger";
/// Users of each host, and a folder in which a namespace can mount.
const USERS_SCRIPT: &str = "
for user in root:0 tenant:1000 neighbour:1001 stranger:1002; do
  echo ${user%:*}:x:${user#*:}:${user#*:}::/:/bin/sh >> /etc/passwd
done
mkdir -p /mnt
";
/// Command that lists the device nodes of slices. The undivided range is excluded by the number 0
/// after its dot.
const LIST_NODES_COMMAND: &str = r"ls /dev/dax*.[1-9]*";

/// Returns a plan of hosts that have the users in [`USERS_SCRIPT`].
fn plan_with_users(hosts: usize, backend: &str) -> RackPlan {
    let mut plan = plan(hosts, &[1], backend);
    plan.hosts.script.push_str(USERS_SCRIPT);
    plan.hosts.programs.push(programs_dir().join("vmm-plugin"));
    plan.agent_toml_extra = "allowed_uids = [0, 1000, 1001]\n".to_owned();
    plan
}

/// Runs a command on host 0 as a user.
fn run_as_user(rack: &EmulatedRack, user: &str, command: &str) -> CommandOutput {
    let quoted = command.replace('\'', r"'\''");
    rack.host(0).run_with_timeout(&format!("su -s /bin/sh {user} -c '{quoted}' 2>&1"), WAIT_TIMEOUT).unwrap()
}

#[track_caller]
fn assert_denied(rack: &EmulatedRack, user: &str, command: &str, expected: &str) {
    let output = run_as_user(rack, user, command);
    assert!(output.status != 0 && output.text.contains(expected), "{user}: {command}: {}", output.text);
}

#[track_caller]
fn assert_allowed(rack: &EmulatedRack, user: &str, command: &str) {
    let output = run_as_user(rack, user, command);
    assert_eq!(output.status, 0, "{user}: {command}: {}\n{}", output.text, rack.logs());
}

/// Reserves the only slice for a VM of a user.
fn reserve_for_user(rack: &EmulatedRack, vm: &str, uid: u32) {
    let request = format!(
        "reserve --host h0 --vm {vm} --pool 1GiB --request-id {vm} --uid {uid} --local 64MiB --wait-ready"
    );
    rack.tarn(&request);
    rack.tarn(&format!("commit {vm}"));
}

/// Checks which users can attach the VM of the tenant.
fn assert_attach_is_limited(rack: &EmulatedRack) {
    let attach =
        format!("tarn test-vmm --socket {HOST_MEMORY_SOCKET} --vm bound --touch 1 --verify 1 < /dev/null");
    assert_denied(rack, UNAUTHORIZED_USER, &attach, "PEER_NOT_ALLOWED");
    assert_denied(rack, NEIGHBOUR_USER, &attach, "VM_UNKNOWN");
    for user in [TENANT_USER, NEIGHBOUR_USER, UNAUTHORIZED_USER] {
        for file in ["/etc/tarn/h0.key", "/run/tarn-agent/rack"] {
            assert_denied(rack, user, &format!("cat {file}"), "Permission denied");
        }
    }
}

/// Checks that other users cannot reach the memory of a running process.
fn assert_process_is_protected(rack: &EmulatedRack, pid: &str) {
    for user in [NEIGHBOUR_USER, UNAUTHORIZED_USER] {
        assert_denied(rack, user, &format!("ls /proc/{pid}/fd"), "Permission denied");
        assert_denied(rack, user, &format!("head -c 1 /proc/{pid}/mem"), "Permission denied");
    }
}

/// Returns the ID of the process that runs a program.
fn program_pid(rack: &EmulatedRack, program: &str) -> String {
    rack.run(0, &format!("pidof {program}")).trim().to_owned()
}

/// Runs the commands of docs/install.md that create certificates, in a folder.
fn create_documented_certificates(folder: &Path) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/install.md");
    let text = fs::read_to_string(page).unwrap();
    let mut blocks = text.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
    let commands = blocks.find(|block| block.starts_with("openssl")).expect("a block of commands");
    let output = Command::new("sh").args(["-e", "-c", commands]).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Checks that a host can neither act as an operator nor as another host.
fn assert_host_has_only_its_own_role(rack: &EmulatedRack) {
    let port = rack.rack.endpoint().rsplit(':').next().unwrap().to_owned();
    let run =
        |command: &str| rack.host(1).run_with_timeout(&format!("{command} 2>&1"), WAIT_TIMEOUT).unwrap();
    let release = run(&format!(
        "cd /etc/tarn && tarn --endpoint https://10.0.2.2:{port} --server-name pool-manager --ca ca.pem \
         --cert h1.pem --key h1.key release bound --force --reason test"
    ));
    assert!(release.status != 0 && release.text.contains("role"), "{}", release.text);
    let agent = run("cd /etc/tarn && cp h1.key copy.key && chmod 600 copy.key && \
         sed -e 's/host = \"h1\"/host = \"h0\"/' -e s/h1.key/copy.key/ -e s,/run/tarn-agent,/run/other, h1.toml > h0-by-h1.toml && \
         timeout 10 host-agent serve --config h0-by-h1.toml");
    assert!(agent.text.contains("certificate: must contain the name of host h0"), "{}", agent.text);
    assert!(!agent.text.contains("connected to the manager"), "{}", agent.text);
    assert_eq!(rack.host_state(0), "up");
}

#[test]
fn documented_certificates_and_users_limit_access_with_device_dax() {
    let certificates = tempfile::tempdir().unwrap();
    create_documented_certificates(certificates.path());
    let rack = EmulatedRack::start(RackPlan {
        certificates: Some(certificates.path().to_owned()),
        ..plan_with_users(2, "dax")
    });
    let owner = || rack.run(0, &format!("stat -c '%u %a' $({LIST_NODES_COMMAND})")).trim().to_owned();
    reserve_for_user(&rack, "bound", 1000);
    assert_attach_is_limited(&rack);
    let open = format!("exec 9<> $({LIST_NODES_COMMAND})");
    assert_eq!(owner(), "0 600");
    for user in [TENANT_USER, NEIGHBOUR_USER, UNAUTHORIZED_USER] {
        assert_denied(&rack, user, &open, "Permission denied");
    }
    assert_eq!(rack.start_vm_as(TENANT_USER, 0, "bound", TOUCH_MIB), [0; 0]);
    assert_process_is_protected(&rack, &program_pid(&rack, "tarn"));
    assert_host_has_only_its_own_role(&rack);
    assert_eq!(rack.end_vm(0, "bound"), [0; 0]);
    rack.wait_all_slices_free();

    reserve_for_user(&rack, "by-path", 1000);
    let inspect =
        format!("vmm-plugin args --vmm qemu --agent {HOST_MEMORY_SOCKET} --vm by-path --kernel /etc/passwd");
    assert_denied(&rack, NEIGHBOUR_USER, &inspect, "VM_UNKNOWN");
    assert_eq!(owner(), "0 600");
    assert_allowed(&rack, TENANT_USER, &inspect);
    assert_eq!(owner(), "0 660", "the tenant is in the access control list");
    assert_allowed(&rack, TENANT_USER, &open);
    for user in [NEIGHBOUR_USER, UNAUTHORIZED_USER] {
        assert_denied(&rack, user, &open, "Permission denied");
        assert_denied(&rack, user, &format!("unshare -U -r sh -c \"{open}\""), "Permission denied");
    }
    rack.tarn("release by-path");
    rack.wait_all_slices_free();

    reserve_for_user(&rack, "next", 1001);
    assert_eq!(owner(), "0 600");
    assert_denied(&rack, TENANT_USER, &open, "Permission denied");
}

/// Script of an attack: in a mount namespace, gives a file of root the same name as the agent's
/// file for a slice.
const RENAME_SCRIPT: &str = r#"
name="memfd:tarn-slice-0.1 (deleted)"
mount -t tmpfs none /mnt && cd /mnt && : > "$name" && mount --bind /etc/victim "$name" && mount --move . / &&
exec 9< "$name" && sleep 100000"#;

#[test]
fn users_cannot_access_memory_of_others_with_memory_blocks() {
    let rack = EmulatedRack::start(plan_with_users(1, "memory_block"));
    reserve_for_user(&rack, "bound", 1000);
    assert_attach_is_limited(&rack);
    let inspect =
        format!("vmm-plugin args --vmm qemu --agent {HOST_MEMORY_SOCKET} --vm bound --kernel /etc/passwd");
    assert_denied(&rack, TENANT_USER, &inspect, "cannot open memory blocks by path");
    assert_eq!(rack.start_vm_as(TENANT_USER, 0, "bound", TOUCH_MIB), [0; 0]);
    assert_process_is_protected(&rack, &program_pid(&rack, "tarn"));
    assert_process_is_protected(&rack, &program_pid(&rack, "host-agent"));

    rack.run(0, "echo data > /etc/victim");
    rack.run(
        0,
        &format!(
            "cat > /bin/rename <<'END'\n{RENAME_SCRIPT}\nEND\n\
             su -s /bin/sh {NEIGHBOUR_USER} -c 'unshare -U -r -m sh /bin/rename' > /run/attack.log 2>&1 &"
        ),
    );
    rack.wait_until("the attacker has the file", |rack| {
        let links =
            rack.run(0, "ls -l /proc/[0-9]*/fd 2> /dev/null | grep -c '9 -> .*memfd:tarn-slice-0.1' || true");
        assert_eq!(rack.run(0, "cat /run/attack.log"), "");
        links.trim() != "0"
    });
    rack.run(0, "kill -9 $(pidof host-agent)");
    rack.wait_until("the agent is restarted", |rack| {
        rack.host(0).run("pidof host-agent").unwrap().status == 0 && rack.host_state(0) == "up"
    });
    assert_eq!(rack.end_vm(0, "bound"), [0; 0]);
    rack.wait_all_slices_free();
    assert_eq!(rack.run(0, "cat /etc/victim"), "data\n");
}
