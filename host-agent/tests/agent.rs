//! Integration tests of the agent: the real `host-agent`, a fake manager, and VMMs run as
//! processes.

mod rig;
#[path = "../src/skipped.rs"]
mod skipped;

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
};

use host_agent::host::process::{FileId, find_users};
use host_memory::{Client, ClientError, Region, RegionBacking};
use proto::v1::{self as wire, MemoryForm};
use rig::{RACK, Rig, desired_state, desired_vm, desired_vms, release_state, serve, slice_epochs};
use skipped::report_skipped;

const GIB: u64 = 1 << 30;

/// Returns a rack in which VM `a` runs and has attached to its local memory and slice 1.
fn running_rig() -> (Rig, rig::Vmm) {
    let mut rig = Rig::new();
    let slice = rig.create_slice(1, 1);
    rig.apply(desired_vm(vec![slice]), |report| slice_epochs(&report.online) == [(1, 1)]);
    let mut vmm = rig.vmm();
    assert_eq!(vmm.request("attach a descriptors"), format!("attached local={} 1.1={GIB}", 16 << 20));
    rig.wait(|report| report.vms.len() == 1);
    (rig, vmm)
}

#[test]
fn hello_identifies_the_agent() {
    let rig = Rig::new();
    assert_eq!(rig.hello.host, "h0");
    assert_eq!(rig.hello.protocol_version, proto::PROTOCOL_VERSION);
    assert_eq!(rig.hello.host_memory_socket, rig.socket().to_str().unwrap());
    assert_eq!(rig.bearer.as_deref(), Some(format!("Bearer {}", rig.token).as_str()));
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert_eq!(rig.hello.boot_id, boot_id.trim());
}

#[test]
fn vm_keeps_its_memory_until_its_process_ends() {
    let (mut rig, mut vmm) = running_rig();
    assert_eq!(vmm.request("zero"), "true");
    assert_eq!(vmm.request("write"), "written");
    let report = rig.apply(release_state(1, 1, false), |report| report.vms.len() == 1);
    assert_eq!(report.vms[0].pid, vmm.pid());
    assert_eq!(slice_epochs(&report.online), [(1, 1)], "the slice was taken from a running VM");
    assert_eq!(slice_epochs(&report.released), []);
    vmm.kill();
    let report = rig.wait(|report| slice_epochs(&report.released) == [(1, 1)]);
    assert_eq!(report.ended, ["r-1"]);
    assert!(report.clean && report.vms.is_empty() && report.online.is_empty());
}

/// The files in /proc/PID of such a process are empty, as those of a zombie.
#[test]
fn process_without_its_first_thread_is_a_user_of_its_slice() {
    let (rig, mut vmm) = running_rig();
    let slice = FileId::of(&fs::metadata(rig.slice_path(1, 1)).unwrap());
    assert_eq!(vmm.request("end-first-thread"), "ended");
    let is_zombie = |pid| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
    while !is_zombie(vmm.pid()) {
        std::thread::yield_now();
    }
    assert!(find_users(slice).unwrap().pids.contains(&vmm.pid()));
    assert_eq!(vmm.request("write"), "written");
}

#[test]
fn slice_that_is_not_zero_is_not_passed_to_a_vm() {
    let mut rig = Rig::new();
    let slice = rig.create_slice(1, 1);
    let file = OpenOptions::new().write(true).open(rig.slice_path(1, 1)).unwrap();
    file.write_all_at(b"secret", GIB / 2).unwrap();
    let report = rig.apply(desired_vm(vec![slice]), |report| !report.failed.is_empty());
    assert_eq!(report.failed[0].reason(), wire::SliceFailureReason::NotZero);
    assert!(report.failed[0].message.contains("00001.1.h0 is not zero"), "{}", report.failed[0].message);
    let reply = rig.vmm().request("attach a descriptors");
    assert!(reply.starts_with("refused VM_NOT_READY 0 of 1 slices of VM a are online"), "{reply}");
}

#[test]
fn missing_slice_is_reported_with_os_error() {
    let mut rig = Rig::new();
    let slice = rig.desired_slice(1, 1);
    let report = rig.apply(desired_vm(vec![slice]), |report| !report.failed.is_empty());
    assert_eq!(report.failed[0].reason(), wire::SliceFailureReason::Host);
    assert!(report.failed[0].message.contains("No such file"), "{}", report.failed[0].message);
    rig.create_slice(1, 1);
    rig.wait(|report| slice_epochs(&report.online) == [(1, 1)]);
}

#[test]
fn vm_runs_during_agent_restart_and_is_reported_after_it() {
    let (mut rig, mut vmm) = running_rig();
    let earlier = rig.hello.instance;
    vmm.request("write");
    rig.kill_agent();
    assert_eq!(vmm.request("write"), "written");
    rig.start_agent();
    assert!(rig.hello.instance > earlier);
    assert_eq!(rig.hello.rack_uuid, RACK);
    let report = rig
        .apply(desired_vm(vec![rig.desired_slice(1, 1)]), |report| slice_epochs(&report.online) == [(1, 1)]);
    assert_eq!((report.vms[0].reservation.as_str(), report.vms[0].pid), ("r-1", vmm.pid()));
    let other = rig.vmm().request("attach a descriptors");
    assert!(other.starts_with("refused VM_ATTACHED"), "{other}");
    rig.apply(release_state(1, 1, false), |report| slice_epochs(&report.online) == [(1, 1)]);
    vmm.kill();
    rig.wait(|report| slice_epochs(&report.released) == [(1, 1)] && report.ended == ["r-1"]);
}

#[test]
fn vm_that_ends_while_no_agent_runs_is_reported_as_ended() {
    let (mut rig, mut vmm) = running_rig();
    rig.kill_agent();
    vmm.kill();
    drop(vmm);
    rig.start_agent();
    let report = rig.apply(desired_vm(vec![rig.desired_slice(1, 1)]), |_| true);
    assert_eq!(report.ended, ["r-1"]);
    let reply = rig.vmm().request("attach a descriptors");
    assert!(reply.starts_with("refused VM_ATTACHED VM a was attached to process"), "{reply}");
}

#[test]
fn agent_reconnects_and_sends_a_complete_report() {
    let (mut rig, _vmm) = running_rig();
    let earlier = rig.hello.clone();
    rig.disconnect_agent();
    assert_eq!(rig.hello, wire::Hello { rack_uuid: RACK.to_owned(), ..earlier });
    rig.wait(|report| report.vms.len() == 1 && slice_epochs(&report.online) == [(1, 1)]);
}

#[test]
fn terminated_agent_exits_cleanly_and_releases_nothing() {
    let (mut rig, mut vmm) = running_rig();
    assert!(rig.terminate_agent().success());
    assert_eq!(vmm.request("write"), "written");
    assert!(!vmm.has_ended());
    rig.start_agent();
    rig.apply(desired_state(), |report| report.vms.len() == 1 && slice_epochs(&report.online) == [(1, 1)]);
}

#[test]
fn repeated_attach_returns_the_same_memory() {
    let (_rig, mut vmm) = running_rig();
    vmm.request("write");
    assert_eq!(vmm.request("attach a descriptors"), format!("attached local={} 1.1={GIB}", 16 << 20));
    assert_eq!(vmm.request("zero"), "false");
}

#[test]
fn attach_by_path_returns_files_that_the_vmm_can_open() {
    let (mut rig, mut vmm) = (Rig::new(), None);
    let slice = rig.create_slice(1, 1);
    rig.apply(desired_vm(vec![slice]), |report| slice_epochs(&report.online) == [(1, 1)]);
    let vmm = vmm.insert(rig.vmm());
    assert_eq!(vmm.request("attach a paths"), format!("attached local={} 1.1={GIB}", 16 << 20));
    assert_eq!(vmm.request("zero"), "true");
    assert_eq!(vmm.request("write"), "written");
    let local = rig.dir.path().join("local/r-1.local");
    assert_eq!(local.metadata().unwrap().mode() & 0o777, 0o600);
    vmm.kill();
    rig.wait(|report| report.ended == ["r-1"]);
    assert!(!local.exists(), "the local memory of the ended VM was not removed");
}

/// Regression test: the end of a process that received no memory ended the reservation.
#[test]
fn failed_attach_leaves_the_vm_reserved() {
    let mut rig = Rig::new();
    let slice = rig.create_slice(1, 1);
    rig.apply(desired_vm(vec![slice]), |report| slice_epochs(&report.online) == [(1, 1)]);
    let local = rig.dir.path().join("local");
    fs::set_permissions(&local, fs::Permissions::from_mode(0o775)).unwrap();
    let mut failed = rig.vmm();
    let reply = failed.request("attach a paths");
    assert!(reply.contains("has mode 0775"), "{reply}");
    failed.kill();
    fs::set_permissions(&local, fs::Permissions::from_mode(0o711)).unwrap();
    let mut vmm = rig.vmm();
    assert_eq!(vmm.request("attach a paths"), format!("attached local={} 1.1={GIB}", 16 << 20));
    let report = rig.wait(|report| report.vms.len() == 1);
    assert!(report.ended.is_empty(), "{report:?}");
    assert!(!rig.log().contains("process of VM ended"), "{}", rig.log());
}

#[test]
fn inspection_returns_paths_and_does_not_attach_the_caller() {
    let mut rig = Rig::new();
    let slices = vec![rig.create_slice(1, 1), rig.create_slice(2, 1)];
    rig.apply(desired_vm(slices), |report| slice_epochs(&report.online) == [(1, 1), (2, 1)]);
    let client = Client::connect(&rig.socket()).unwrap();
    let memory = client.inspect("a").unwrap();
    let [local, one, two] = <[Region; 3]>::try_from(memory.regions).unwrap();
    assert_eq!((local.slice, local.bytes), (None, 16 << 20));
    assert!(matches!(local.backing, RegionBacking::VmmAllocated) && local.into_file().is_err());
    assert_eq!((one.slice, two.slice, two.bytes), (Some((1, 1)), Some((2, 1)), GIB));
    assert!(matches!(&two.backing, RegionBacking::Path(path) if *path == rig.slice_path(2, 1)));
    assert!(two.into_file().is_ok());
    assert!(!rig.dir.path().join("local/r-1.local").exists(), "inspection created local memory");
    let report = rig.apply(desired_state(), |_| true);
    assert!(report.vms.is_empty(), "inspection attached the caller");
}

#[test]
fn inspection_is_rejected_for_the_same_reasons_as_attach() {
    let (rig, _vmm) = running_rig();
    for (vm, reason) in [("a", "VM_ATTACHED"), ("b", "VM_UNKNOWN"), ("../a", "BAD_MESSAGE")] {
        let client = Client::connect(&rig.socket()).unwrap();
        let Err(ClientError::Rejected { reason: actual, .. }) = client.inspect(vm) else {
            panic!("{vm} was inspected")
        };
        assert_eq!(actual, reason);
    }
    let rig = Rig::with("allowed_uids = [12345]");
    let reply = Client::connect(&rig.socket()).unwrap().inspect("a");
    assert!(matches!(reply, Err(ClientError::Rejected { reason, .. }) if reason == "PEER_NOT_ALLOWED"));
}

/// Regression test: an agent without a desired state returned VM_UNKNOWN for a reserved VM.
#[test]
fn vm_is_not_unknown_before_first_desired_state() {
    let mut rig = Rig::new();
    let mut vmm = rig.vmm();
    for request in ["attach a descriptors", "inspect a"] {
        let reply = vmm.request(request);
        assert!(reply.starts_with("refused NO_DESIRED_STATE cannot look up VM a: "), "{reply}");
    }
    let slice = rig.create_slice(1, 1);
    rig.apply(desired_vm(vec![slice]), |report| slice_epochs(&report.online) == [(1, 1)]);
    assert_vm_unknown(&vmm.request("attach b descriptors"), "b");
    assert!(vmm.request("attach a descriptors").starts_with("attached local="));
}

#[test]
fn attached_connection_is_limited_to_its_vm() {
    let (_rig, mut vmm) = running_rig();
    assert!(vmm.request("attach b descriptors").starts_with("refused OTHER_VM attach.vm: b: must be a"));
    assert!(vmm.request("inspect b").starts_with("refused OTHER_VM inspect.vm: b: must be a"));
    assert!(vmm.request("attach a descriptors").starts_with("attached local="));
}

/// User ids of two tenants that run VMMs.
const TENANT_UIDS: [u32; 2] = [2001, 2002];

/// Returns a rack with three VMs whose slices are online: `a` belongs to the first tenant, `b` to
/// the second tenant, and `c` to the agent's user. Returns `None` if this test does not run as
/// root, so that it cannot start VMMs of other users.
fn two_tenant_rig() -> Option<Rig> {
    if !rustix::process::geteuid().is_root() {
        report_skipped("VMMs of other users, which requires root");
        return None;
    }
    let mut rig = Rig::with("allowed_uids = [0, 2001, 2002]");
    let users = [Some(TENANT_UIDS[0]), Some(TENANT_UIDS[1]), None];
    let vms = (1..).zip(users).map(|(slice, uid)| (rig.create_slice(slice, 1), uid)).collect::<Vec<_>>();
    rig.apply(desired_vms(vms), |report| slice_epochs(&report.online) == [(1, 1), (2, 1), (3, 1)]);
    Some(rig)
}

/// Returns the user in the access control list of a file that belongs to root.
fn permitted_user(path: &std::path::Path) -> Option<u32> {
    assert_eq!(path.metadata().expect("the file of the slice exists").uid(), 0);
    let mut list = [0; 128];
    let len = rustix::fs::getxattr(path, "system.posix_acl_access", &mut list[..]).ok()?;
    let entries = list[4..len].as_chunks::<8>().0;
    let named_user = entries.iter().find(|entry| entry[..2] == [2, 0])?;
    Some(u32::from_le_bytes(named_user[4..].try_into().expect("an entry has eight bytes")))
}

#[track_caller]
fn assert_vm_unknown(reply: &str, vm: &str) {
    assert_eq!(reply, format!("refused VM_UNKNOWN no VM {vm} on this host that the caller may use"));
}

#[test]
fn user_attaches_and_inspects_own_vms_only() {
    let Some(rig) = two_tenant_rig() else { return };
    let [one, two] = TENANT_UIDS;
    let mut vmm = rig.vmm_of(one);
    // The VM of the other tenant, the VM without a user and a VM that does not exist.
    for vm in ["b", "c", "nowhere"] {
        assert_vm_unknown(&vmm.request(&format!("inspect {vm}")), vm);
        assert_vm_unknown(&vmm.request(&format!("attach {vm} descriptors")), vm);
        assert_vm_unknown(&vmm.request(&format!("attach {vm} paths")), vm);
    }
    let reason = format!("VM b belongs to user {two}: the caller must be user {two} or root, not user {one}");
    assert!(rig.log().contains(&reason), "the log lacks the reason");
    let user = |slice| permitted_user(&rig.slice_path(slice, 1));
    assert_eq!([1, 2, 3].map(user), [None; 3], "a rejected request permitted access to a file");
    assert_eq!(vmm.request("inspect a"), format!("inspected 1.1={GIB}"));
    assert_eq!([1, 2, 3].map(user), [Some(one), None, None]);
    assert_eq!(vmm.request("attach a paths"), format!("attached local={} 1.1={GIB}", 16 << 20));
    assert_eq!(vmm.request("zero"), "true");
}

/// Checks the rule in docs/access.md for files of slices that a VM received by path.
#[test]
fn released_vm_keeps_its_slice_files_until_its_process_ends() {
    let Some(mut rig) = two_tenant_rig() else { return };
    let [one, two] = TENANT_UIDS;
    let mut vmm = rig.vmm_of(one);
    assert!(vmm.request("attach a paths").starts_with("attached"));
    let others = [(2, Some(two)), (3, None)].map(|(slice, uid)| (rig.desired_slice(slice, 1), uid));
    let mut released = release_state(1, 1, false);
    released.vms =
        desired_vms([(rig.desired_slice(1, 1), Some(one))].into_iter().chain(others)).vms.split_off(1);
    let report = rig.apply(released, |report| report.complete);
    assert_eq!(
        (slice_epochs(&report.released), report.vms.len()),
        (vec![], 1),
        "the running VM lost its slice"
    );
    // A repeated attach opens the paths again.
    assert!(vmm.request("attach a paths").starts_with("attached"));
    assert_eq!(vmm.request("write"), "written");
    assert_eq!(permitted_user(&rig.slice_path(1, 1)), Some(one));
    vmm.kill();
    rig.wait(|report| slice_epochs(&report.released) == [(1, 1)] && report.ended == ["r-1"]);
}

/// Regression test: inspection gave the files of any VM to the caller.
#[test]
fn files_inspected_by_root_are_permitted_to_vm_user() {
    let Some(rig) = two_tenant_rig() else { return };
    let mut root = rig.vmm();
    for (vm, slice) in [("a", 1), ("b", 2), ("c", 3)] {
        assert_eq!(root.request(&format!("inspect {vm}")), format!("inspected {slice}.1={GIB}"));
    }
    let user = |slice| permitted_user(&rig.slice_path(slice, 1));
    assert_eq!([1, 2, 3].map(user), [Some(TENANT_UIDS[0]), Some(TENANT_UIDS[1]), None]);
    assert!(rig.vmm_of(TENANT_UIDS[1]).request("attach b descriptors").starts_with("attached"));
}

#[test]
fn vmm_cannot_attach_or_inspect_other_vms() {
    let Some(mut rig) = two_tenant_rig() else { return };
    let [one, two] = TENANT_UIDS;
    let mut vmm = rig.vmm_switching_to(one);
    assert!(vmm.request("attach a descriptors").starts_with("attached"));
    for request in ["attach b descriptors", "attach c descriptors", "inspect b", "inspect c"] {
        let reply = vmm.request(request);
        assert!(reply.starts_with("refused OTHER_VM"), "{request} on the attached connection: {reply}");
    }
    assert_eq!(vmm.request("reconnect"), "connected");
    assert_vm_unknown(&vmm.request("attach b descriptors"), "b");
    assert_vm_unknown(&vmm.request("inspect c"), "c");
    assert!(vmm.request("attach a descriptors").starts_with("attached"), "the VMM's own VM");
    let mut root = rig.vmm();
    assert!(root.request("attach c descriptors").starts_with("attached"));
    for restart in [false, true] {
        if restart {
            rig.kill_agent();
            rig.start_agent();
            let vms = (1..).zip([Some(one), Some(two), None]);
            let vms = vms.map(|(slice, uid)| (rig.desired_slice(slice, 1), uid)).collect::<Vec<_>>();
            let report = rig.apply(desired_vms(vms), |report| report.complete && report.online.len() == 3);
            let users: Vec<_> = report.vms.iter().map(|vm| (vm.vm.as_str(), vm.uid)).collect();
            assert_eq!(users, [("a", Some(one)), ("c", None)], "the restarted agent does not know the users");
        }
        assert_eq!(root.request("reconnect"), "connected");
        for request in ["attach b descriptors", "inspect b"] {
            let reply = root.request(request);
            let expected = format!("refused OTHER_VM process {} is attached to VM c (r-3)", root.pid());
            assert!(reply.starts_with(&expected), "{request} on a new connection: {reply}");
        }
        assert!(root.request("attach c descriptors").starts_with("attached"), "the VMM's own VM");
    }
}

/// Regression test: 1,024 connections of any user prevented all VMs from starting.
#[test]
fn connections_of_another_user_do_not_block_vm_start() {
    if !rustix::process::geteuid().is_root() {
        return report_skipped("connections of another user, which requires root");
    }
    let mut rig = Rig::new();
    let slice = rig.create_slice(1, 1);
    rig.apply(desired_vm(vec![slice]), |report| slice_epochs(&report.online) == [(1, 1)]);
    let socket = rig.socket();
    let others = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(None, nobody, None).unwrap(); // changes only this thread
        (0..1100).map(|_| Client::connect(&socket).unwrap()).collect::<Vec<_>>()
    });
    let others = others.join().unwrap();
    assert!(rig.vmm().request("attach a descriptors").starts_with("attached"));
    drop(others);
}

#[test]
fn large_vm_receives_all_memory_in_order() {
    let mut rig = Rig::new();
    let slices: Vec<_> = (0..150).map(|slice| rig.create_slice(slice, 1)).collect();
    rig.apply(desired_vm(slices), |report| report.online.len() == 150);
    let client = Client::connect(&rig.socket()).unwrap();
    let memory = client.attach("a", MemoryForm::Descriptors).unwrap();
    let slices: Vec<_> = memory.regions.iter().filter_map(|region| region.slice).collect();
    assert!(
        memory.regions.iter().all(|region| region.emc == if region.slice.is_some() { "emc0" } else { "" })
    );
    assert_eq!(slices, (0..150).map(|slice| (slice, 1)).collect::<Vec<_>>());
}

#[test]
fn scrubbed_slice_is_zero_and_reported() {
    let mut rig = Rig::new();
    let slice = rig.create_slice(7, 3);
    let file = OpenOptions::new().read(true).write(true).open(rig.slice_path(7, 3)).unwrap();
    file.write_all_at(b"secret", GIB - 6).unwrap();
    let wire::DesiredSlice { slice, epoch, handle, .. } = slice;
    let scrub =
        wire::DesiredState { scrub: vec![wire::DesiredScrub { slice, epoch, handle }], ..desired_state() };
    let report = rig.apply(scrub, |report| !report.scrubbed.is_empty());
    let scrubbed = &report.scrubbed[0];
    assert_eq!((scrubbed.slice, scrubbed.epoch, scrubbed.bytes_verified), (7, 3, GIB));
    assert!(scrubbed.started_unix_ms > 0 && scrubbed.started_unix_ms <= scrubbed.ended_unix_ms);
    assert_eq!(file.metadata().unwrap().blocks(), 0);
    rig.apply(desired_state(), |report| report.scrubbed.is_empty() && report.clean);
}

#[test]
fn fenced_host_kills_its_vms_and_reports_itself_clean() {
    let (mut rig, mut vmm) = running_rig();
    let report = rig.apply(wire::DesiredState { fenced: true, ..desired_state() }, |report| report.clean);
    assert_eq!(report.ended, ["r-1"]);
    assert!(report.online.is_empty());
    assert!(vmm.has_ended());
}

#[test]
fn forced_release_takes_slice_from_running_vm() {
    let (mut rig, mut vmm) = running_rig();
    let report = rig.apply(release_state(1, 1, true), |report| {
        report.complete && slice_epochs(&report.released) == [(1, 1)]
    });
    assert_eq!(report.vms.len(), 1);
    assert!(!vmm.has_ended());
}

#[test]
fn desired_state_of_another_instance_changes_nothing() {
    let (mut rig, _vmm) = running_rig();
    let instance = rig.hello.instance;
    rig.hello.instance = instance - 1;
    rig.send_state(release_state(1, 1, true));
    rig.hello.instance = instance;
    let report = rig.apply(desired_state(), |_| true);
    assert_eq!(slice_epochs(&report.online), [(1, 1)]);
}

#[test]
fn caller_whose_uid_is_not_allowed_is_rejected() {
    let rig = Rig::with("allowed_uids = [12345]");
    let client = Client::connect(&rig.socket()).unwrap();
    let Err(ClientError::Rejected { reason, message }) = client.attach("a", MemoryForm::Descriptors) else {
        panic!("an unauthorized caller attached");
    };
    assert_eq!(reason, "PEER_NOT_ALLOWED");
    assert!(message.contains("agent.allowed_uids"), "{message}");
}

#[test]
fn agent_serves_requests_after_malformed_messages() {
    let (rig, mut vmm) = running_rig();
    let client = Client::connect(&rig.socket()).unwrap();
    for (vm, form, expected) in [
        ("../a", MemoryForm::Descriptors, "attach.vm: \"../a\" is not a name"),
        ("a", MemoryForm::Unspecified, "attach.form = 0: must be 1 or 2"),
        (&"x".repeat(70_000), MemoryForm::Descriptors, "at most 65536 bytes"),
    ] {
        let Err(ClientError::Rejected { reason, message }) = client.attach(vm, form) else {
            panic!("the message was accepted");
        };
        assert_eq!(reason, "BAD_MESSAGE");
        assert!(message.contains(expected), "{message}");
    }
    let Err(ClientError::Rejected { reason, .. }) = client.attach("b", MemoryForm::Descriptors) else {
        panic!("VM b was attached");
    };
    assert_eq!(reason, "VM_UNKNOWN");
    assert!(vmm.request("attach a descriptors").starts_with("attached local="));
}

#[test]
fn second_agent_of_a_host_does_not_start() {
    let rig = Rig::new();
    let second = serve(&rig.config()).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let error = String::from_utf8(second.stderr).unwrap();
    assert!(error.contains("another host-agent runs as host h0 on this machine"), "{error}");
}

#[test]
fn second_agent_with_another_address_of_the_manager_does_not_start() {
    let rig = Rig::new();
    let text = fs::read_to_string(rig.config()).unwrap().replace("http://127.0.0.1:", "http://localhost:");
    let config = rig.dir.path().join("second.toml");
    fs::write(&config, text.replace("\"run\"", "\"second\"")).unwrap();
    let second = serve(&config).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let error = String::from_utf8(second.stderr).unwrap();
    assert!(error.contains("another host-agent runs as host h0 on this machine"), "{error}");
    assert!(!error.contains(&rig.token), "{error}");
}

#[test]
fn socket_of_a_running_agent_is_not_replaced() {
    let rig = Rig::new();
    let socket = rig.socket();
    let other = Rig::without_agent(&format!("socket = {socket:?}"));
    let output = serve(&other.config()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("agent.socket: another process serves the socket"), "{error}");
    let client = Client::connect(&socket).unwrap();
    assert!(client.attach("a", MemoryForm::Descriptors).is_err());
}

#[test]
fn local_dir_of_another_user_is_rejected() {
    let rig = Rig::without_agent("");
    let local = rig.dir.path().join("local");
    fs::create_dir(&local).unwrap();
    fs::set_permissions(&local, fs::Permissions::from_mode(0o777)).unwrap();
    let run = |check: &[&str]| {
        let output = serve(&rig.config()).args(check).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    for check in [&["--check-config"][..], &[]] {
        let error = run(check);
        assert!(error.contains("backend.local_dir: ") && error.contains("has mode 0777"), "{error}");
    }
    fs::set_permissions(&local, fs::Permissions::from_mode(0o755)).unwrap();
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&local, Some(65534), None).unwrap();
        let error = run(&[]);
        assert!(
            error.contains("local belongs to user 65534: must belong to the agent's user (0)"),
            "{error}"
        );
    } else {
        report_skipped("local_dir of another user: only root can change an owner");
    }
}

#[test]
fn agent_with_corrupt_records_does_not_start() {
    let (mut rig, _vmm) = running_rig();
    rig.kill_agent();
    fs::write(rig.dir.path().join("run/vms/r-1.json"), "{").unwrap();
    let output = serve(&rig.config()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("run/vms/r-1.json is not a record of a VM"), "{error}");
}

#[test]
fn token_readable_by_others_is_rejected_with_fix() {
    let rig = Rig::without_agent("");
    let check = || serve(&rig.config()).arg("--check-config").output().unwrap();
    assert!(check().status.success());
    fs::set_permissions(rig.dir.path().join("token"), fs::Permissions::from_mode(0o640)).unwrap();
    let output = check();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("agent.token_file: ") && error.contains("token has mode 0640"), "{error}");
    assert!(error.contains("chmod 600"), "{error}");
}

#[test]
fn config_check_reports_all_violations() {
    let rig = Rig::without_agent("allowed_uids = []\nsocket = \"\"");
    let output = serve(&rig.config()).arg("--check-config").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("agent.allowed_uids = []: must not be empty"), "{error}");
    assert!(error.contains("agent.socket = \"\": must not be an empty path"), "{error}");
}

#[test]
fn usage_and_config_errors_have_distinct_exit_codes() {
    let rig = Rig::without_agent("hots = 1");
    assert_eq!(serve(&rig.config()).arg("--nonsense").output().unwrap().status.code(), Some(2));
    let output = serve(&rig.config()).arg("--check-config").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("agent.hots: unknown key"));
}
