//! Other VMMs with the memory of a rack: the files in their arguments exist, no other process
//! counts as a VM, and an executed VMM is the VM until it ends. The programs executed here run no
//! guest.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use proto::v1 as wire;
use serde_json::Value;
use tests::rack::{Plan, Rack, by_vm, programs, reserve, wait_for_line};

/// libvirt's schemas and their validator: in `TARN_LIBVIRT`, or where `cargo xtask test` puts them.
fn libvirt() -> PathBuf {
    let place = std::env::var_os("TARN_LIBVIRT").map(PathBuf::from);
    let place = place.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/libvirt"));
    assert!(place.join("xmllint").exists(), "{} is missing: `cargo xtask test` fetches it", place.display());
    place
}

/// A rack with one VM, which has two slices and no process.
async fn waiting() -> Rack {
    let rack = Rack::start(Plan::small(4)).await;
    let request =
        wire::ReserveRequest { local_bytes: 64 << 20, wait_ready: true, ..reserve("h0", "v", 2, "r1") };
    rack.scheduler().await.reserve(request).await.unwrap();
    rack
}

/// A program that is started in place of a VMM.
fn stand_in(rack: &Rack, script: &str) -> PathBuf {
    let place = rack.dir().join("stand-in");
    fs::write(&place, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).unwrap();
    place
}

fn plugin(rack: &Rack, what: &[&str]) -> Command {
    let kernel = rack.dir().join("kernel");
    fs::write(&kernel, "no kernel").unwrap();
    let mut command = Command::new(programs().join("vmm-plugin"));
    command.args(what).args(["--vm", "v", "--agent"]).arg(rack.host_memory(0));
    command.arg("--kernel").arg(kernel).stdin(Stdio::null());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The process that the agent has on record as the VM, if any.
fn recorded(rack: &Rack) -> Option<u64> {
    let record = fs::read_dir(rack.dir().join("h0/vms")).unwrap().next()?.unwrap().path();
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    record["pid"].as_u64()
}

/// Files that QEMU opens for slices.
fn slices_of(arguments: &str) -> Vec<PathBuf> {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    let words = arguments.as_array().unwrap().iter().filter_map(Value::as_str);
    let parts = words.flat_map(|word| word.split(','));
    parts.filter_map(|part| part.strip_prefix("mem-path=")).map(PathBuf::from).collect()
}

#[tokio::test]
async fn what_is_printed_names_slices_that_exist_and_registers_nobody() {
    let rack = waiting().await;
    let printed = plugin(&rack, &["args", "--vmm", "qemu", "-o", "json"]).output().unwrap();
    assert!(printed.status.success(), "{}", said(&printed));
    let slices = slices_of(&said(&printed));
    assert_eq!(slices.len(), 2, "{}", said(&printed));
    assert!(slices.iter().all(|path| path.metadata().unwrap().len() == 1 << 30));
    for vmm in ["cloud-hypervisor", "libvirt"] {
        let printed = plugin(&rack, &["args", "--vmm", vmm]).output().unwrap();
        assert!(printed.status.success(), "{}", said(&printed));
        assert!(slices.iter().all(|path| said(&printed).contains(path.to_str().unwrap())), "{vmm}");
    }
    let odd = plugin(&rack, &["args", "--vmm", "libvirt", "-o", "json"]).output().unwrap();
    assert_eq!(
        (odd.status.code(), said(&odd).as_str()),
        (Some(1), "error: output: Libvirt does not support Json\n")
    );
    assert_eq!(recorded(&rack), None, "somebody was registered");
    let mut vm = rack.start_vm(0, "v");
    wait_for_line(&mut vm); // it can still be had
    drop(vm.stdin.take());
    assert!(vm.wait().unwrap().success());
}

#[tokio::test]
async fn a_vmm_that_was_become_is_the_vm_until_it_ends() {
    for vmm in ["qemu", "cloud-hypervisor"] {
        let mut rack = waiting().await;
        rack.scheduler().await.commit(wire::CommitRequest { target: by_vm("v") }).await.unwrap();
        let program = stand_in(&rack, "echo started; exec sleep 1000");
        let mut exec = plugin(&rack, &["exec", "--vmm", vmm, "--program", program.to_str().unwrap()]);
        let mut process = exec.stdout(Stdio::piped()).spawn().unwrap();
        wait_for_line(&mut process);
        assert_eq!(recorded(&rack), Some(process.id().into()));
        rack.kill_agent(0);
        rack.start_agent(0);
        rack.wait_hosts_up().await;
        let args = |rack: &Rack| said(&plugin(rack, &["args", "--vmm", vmm]).output().unwrap());
        // The manager may have spoken of the agent before.
        rack.wait_for("the agent to listen", async |rack| !args(rack).contains("connect to the host agent"))
            .await;
        let again = args(&rack);
        assert!(again.contains("(VM_ATTACHED)"), "{again}");
        process.kill().unwrap();
        process.wait().unwrap();
        rack.wait_all_free().await;
        assert!(rack.reservations().await.is_empty());
    }
}

#[tokio::test]
async fn what_is_missing_is_found_before_anybody_is_registered() {
    let rack = waiting().await;
    let program = stand_in(&rack, "exit 0");
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
        let mut command = plugin(&rack, &["exec"]);
        let refused = command.args(options).env("PATH", "/nowhere").output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
        assert!(said(&refused).contains(expected), "{}", said(&refused));
        assert_eq!(recorded(&rack), None, "{}", said(&refused));
    }
}

#[test]
fn a_domain_is_as_libvirts_schemas_have_it() {
    let dir = tempfile::tempdir().unwrap();
    let options = "args --vmm libvirt --vm web-1 --standalone --cpus 3 --memory size=512MiB,cpus=1,host_numa_node=0 \
        --memory size=64MiB,cpus=2,hugepages=on --pool size=3GiB --pool size=1GiB,host_numa_node=2,prefault=on \
        --kernel k --initrd i --disk path=/d,readonly=on --disk path=/dev/sdb --net tap=t0,mac=52:54:00:12:34:56";
    for serial in ["tty", "null", "file=/c"] {
        let mut print = Command::new(programs().join("vmm-plugin"));
        let printed = print.args(options.split_whitespace()).args(["--serial", serial]).output().unwrap();
        assert!(printed.status.success(), "{}", said(&printed));
        assert!(is_valid(dir.path(), &said(&printed)), "{}", said(&printed));
        let odd = said(&printed).replace("memAccess=\"shared\"", "memAccess=\"odd\"");
        assert!(!is_valid(dir.path(), &odd), "whatever is written is valid");
    }
}

fn is_valid(dir: &Path, xml: &str) -> bool {
    let domain = dir.join("domain.xml");
    fs::write(&domain, xml).unwrap();
    let schema = libvirt().join("usr/share/libvirt/schemas/domain.rng");
    let mut xmllint = Command::new(libvirt().join("xmllint"));
    let checked = xmllint.args(["--noout", "--relaxng"]).arg(schema).arg(domain).output().unwrap();
    println!("{}", String::from_utf8_lossy(&checked.stderr));
    checked.status.success()
}
