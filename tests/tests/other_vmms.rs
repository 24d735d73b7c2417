//! Tests of other VMMs with memory of a rack. The files in printed arguments must exist, and
//! printing arguments must not attach a VM. An executed VMM must be recorded as the VM until the
//! VMM ends. The programs that these tests execute are stand-ins, which run no guest.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use proto::v1 as wire;
use serde_json::Value;
use tests::rack::{Plan, Rack, programs_dir, reserve_request, vm_ref, wait_for_line};

/// Returns the folder with the libvirt schemas and xmllint: `TARN_LIBVIRT` if set; otherwise the
/// folder that `cargo xtask test` creates.
fn libvirt_dir() -> PathBuf {
    let path = std::env::var_os("TARN_LIBVIRT").map(PathBuf::from);
    let path = path.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/libvirt"));
    assert!(
        path.join("xmllint").exists(),
        "no xmllint in {}: run `cargo xtask test`, which downloads it",
        path.display()
    );
    path
}

/// Starts a rack with one reserved VM. The VM has two slices and no process.
async fn rack_with_vm() -> Rack {
    let rack = Rack::start(Plan::small(4)).await;
    let request = wire::ReserveRequest {
        local_bytes: 64 << 20,
        wait_ready: true,
        ..reserve_request("h0", "v", 2, "r1")
    };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack
}

/// Writes a script that tests execute instead of a VMM.
fn write_fake_vmm(rack: &Rack, script: &str) -> PathBuf {
    let path = rack.dir().join("stand-in");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

fn plugin_command(rack: &Rack, arguments: &[&str]) -> Command {
    let kernel = rack.dir().join("kernel");
    fs::write(&kernel, "no kernel").unwrap();
    let mut command = Command::new(programs_dir().join("vmm-plugin"));
    command.args(arguments).args(["--vm", "v", "--agent"]).arg(rack.host_memory_socket(0));
    command.arg("--kernel").arg(kernel).stdin(Stdio::null());
    command
}

fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Returns the process id of the VM in the records of the agent, if there is a record.
fn recorded_pid(rack: &Rack) -> Option<u64> {
    let record = fs::read_dir(rack.dir().join("h0/vms")).unwrap().next()?.unwrap().path();
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    record["pid"].as_u64()
}

/// Returns the paths of slices in the JSON list of QEMU arguments.
fn parse_slice_paths(arguments: &str) -> Vec<PathBuf> {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    let words = arguments.as_array().unwrap().iter().filter_map(Value::as_str);
    let parts = words.flat_map(|word| word.split(','));
    parts.filter_map(|part| part.strip_prefix("mem-path=")).map(PathBuf::from).collect()
}

#[tokio::test]
async fn printed_arguments_name_existing_slices_and_attach_nothing() {
    let rack = rack_with_vm().await;
    let output = plugin_command(&rack, &["args", "--vmm", "qemu", "-o", "json"]).output().unwrap();
    assert!(output.status.success(), "{}", output_text(&output));
    let slices = parse_slice_paths(&output_text(&output));
    assert_eq!(slices.len(), 2, "{}", output_text(&output));
    assert!(slices.iter().all(|path| path.metadata().unwrap().len() == 1 << 30));
    for vmm in ["cloud-hypervisor", "libvirt"] {
        let output = plugin_command(&rack, &["args", "--vmm", vmm]).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        assert!(slices.iter().all(|path| output_text(&output).contains(path.to_str().unwrap())), "{vmm}");
    }
    let unsupported = plugin_command(&rack, &["args", "--vmm", "libvirt", "-o", "json"]).output().unwrap();
    assert_eq!(
        (unsupported.status.code(), output_text(&unsupported).as_str()),
        (Some(1), "error: --output: Libvirt does not support Json\n")
    );
    assert_eq!(recorded_pid(&rack), None, "a VM was attached");
    let mut vm = rack.start_vm(0, "v");
    wait_for_line(&mut vm); // the test VMM gets the memory, so no VM was attached before
    drop(vm.stdin.take());
    assert!(vm.wait().unwrap().success());
}

#[tokio::test]
async fn executed_vmm_is_recorded_as_vm_until_exit() {
    for vmm in ["qemu", "cloud-hypervisor"] {
        let mut rack = rack_with_vm().await;
        rack.scheduler().await.commit(wire::CommitRequest { target: vm_ref("v") }).await.unwrap();
        let program = write_fake_vmm(&rack, "echo started; exec sleep 1000");
        let mut exec = plugin_command(&rack, &["exec", "--vmm", vmm, "--program", program.to_str().unwrap()]);
        let mut process = exec.stdout(Stdio::piped()).spawn().unwrap();
        wait_for_line(&mut process);
        assert_eq!(recorded_pid(&rack), Some(process.id().into()));
        rack.kill_agent(0);
        rack.start_agent(0);
        rack.wait_hosts_up().await;
        let args =
            |rack: &Rack| output_text(&plugin_command(rack, &["args", "--vmm", vmm]).output().unwrap());
        // The manager may report the host as up before the agent listens on its socket.
        rack.wait_for("the agent to listen", async |rack| !args(rack).contains("connect to the host agent"))
            .await;
        let arguments = args(&rack);
        assert!(arguments.contains("(VM_ATTACHED)"), "{arguments}");
        process.kill().unwrap();
        process.wait().unwrap();
        rack.wait_all_slices_free().await;
        assert!(rack.reservations().await.is_empty());
    }
}

#[tokio::test]
async fn missing_files_are_reported_before_attach() {
    let rack = rack_with_vm().await;
    let program = write_fake_vmm(&rack, "exit 0");
    let program = program.to_str().unwrap();
    for (options, expected) in [
        (vec!["--vmm=qemu", "--program=/nowhere/qemu"], "program: cannot use /nowhere/qemu: No such file"),
        (vec!["--vmm=cloud-hypervisor"], "program: cannot use cloud-hypervisor: No such file"),
        (vec!["--vmm=qemu", "--program", program, "--initrd=/nowhere/initrd"], "initrd: cannot use"),
        (
            vec!["--vmm=qemu", "--program", program, "--memory=size=1GiB"],
            "but 64MiB of local memory are reserved",
        ),
    ] {
        let mut command = plugin_command(&rack, &["exec"]);
        let rejected = command.args(options).env("PATH", "/nowhere").output().unwrap();
        assert_eq!(rejected.status.code(), Some(1), "{}", output_text(&rejected));
        assert!(output_text(&rejected).contains(expected), "{}", output_text(&rejected));
        assert_eq!(recorded_pid(&rack), None, "{}", output_text(&rejected));
    }
}

#[test]
fn libvirt_domain_is_valid_by_schema() {
    let dir = tempfile::tempdir().unwrap();
    let options = "args --vmm libvirt --vm web-1 --standalone --cpus 3 --memory size=512MiB,cpus=1,host_numa_node=0 \
        --memory size=64MiB,cpus=2,hugepages=on --pool size=3GiB --pool size=1GiB,host_numa_node=2,prefault=on \
        --kernel k --initrd i --disk path=/d,readonly=on --disk path=/dev/sdb --net tap=t0,mac=52:54:00:12:34:56";
    for serial in ["tty", "null", "file=/c"] {
        let mut print = Command::new(programs_dir().join("vmm-plugin"));
        let output = print.args(options.split_whitespace()).args(["--serial", serial]).output().unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        assert!(is_valid_domain(dir.path(), &output_text(&output)), "{}", output_text(&output));
        let invalid = output_text(&output).replace("memAccess=\"shared\"", "memAccess=\"odd\"");
        assert!(!is_valid_domain(dir.path(), &invalid), "the schema accepts an invalid document");
    }
}

fn is_valid_domain(dir: &Path, xml: &str) -> bool {
    let domain = dir.join("domain.xml");
    fs::write(&domain, xml).unwrap();
    let schema = libvirt_dir().join("usr/share/libvirt/schemas/domain.rng");
    let mut xmllint = Command::new(libvirt_dir().join("xmllint"));
    let output = xmllint.args(["--noout", "--relaxng"]).arg(schema).arg(domain).output().unwrap();
    println!("{}", String::from_utf8_lossy(&output.stderr));
    output.status.success()
}
