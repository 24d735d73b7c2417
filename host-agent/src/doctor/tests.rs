//! Tests of the doctor on simulated machines: a healthy machine, and machines with one problem
//! each.

use std::{
    fs::{self, File, Permissions},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener,
    },
};

use rustix::fs::{major, minor};

use units::UserId;

use super::*;
use crate::{
    host::{
        cxl::fake::{ROOT, machine},
        sysfs::fake::FakeSysfs,
    },
    secrets::tests::write_tls_files,
    skipped::report_skipped,
    user::current_user,
};

const REGION_FOLDER: &str = "devices/platform/root0/decoder0.1/region7/dax_region7";
const BLOCKS_FOLDER: &str = "devices/system/memory";
const NODE_FOLDER: &str = "devices/system/node/node5";
/// Number of the first memory block of the region, which begins at 43 GiB; a GiB has 8 blocks.
const FIRST_BLOCK: u64 = 43 * 8;
/// Process identifier of the simulated agent.
const AGENT_PID: &str = "4711";

/// Machine without problems on which an agent runs. With the backend `memory_block`, slice 0 is
/// memory of node 5.
struct TestHost {
    tree: FakeSysfs,
    backend: &'static str,
    _socket: UnixListener,
}

impl TestHost {
    fn new(backend: &'static str) -> Self {
        let tree = machine();
        add_kernel_files(&tree);
        write_settings(&tree, backend);
        fs::create_dir_all(tree.path("run")).unwrap();
        let socket = UnixListener::bind(tree.path("run/host-memory.sock")).unwrap();
        let host = Self { tree, backend, _socket: socket };
        host.add_agent();
        if backend == "memory_block" {
            host.add_slice("kmem");
            host.add_blocks(FIRST_BLOCK..FIRST_BLOCK + 8, "online");
        }
        host
    }

    /// Adds an agent that holds the lock of `runtime_dir` and has all capabilities.
    fn add_agent(&self) {
        let lock = File::create(self.tree.path("run/lock")).unwrap().metadata().unwrap();
        let (device, inode) = (lock.dev(), lock.ino());
        let line = format!(
            "1: FLOCK  ADVISORY  WRITE {AGENT_PID} {:02x}:{:02x}:{inode} 0 EOF",
            major(device),
            minor(device)
        );
        self.tree.files("proc", &[("locks", &line)]);
        self.add_process(AGENT_PID, "000001ffffffffff");
    }

    fn add_process(&self, pid: &str, capabilities: &str) {
        let status = format!("Name:\thost-agent\nCapEff:\t{capabilities}");
        let command = "/usr/bin/host-agent\0serve\0--config\0/etc/tarn/host.toml";
        let mounts = "sysfs /sys sysfs rw,nosuid 0 0\ntmpfs /run tmpfs ro 0 0";
        let files = [("status", &*status), ("cmdline", command), ("mounts", mounts)];
        self.tree.files(&format!("proc/{pid}"), &files);
    }

    /// Removes the agent, and gives the doctor's process all capabilities.
    fn without_agent(self) -> Self {
        self.tree.files("proc", &[("locks", "")]);
        fs::remove_dir_all(self.tree.path("proc").join(AGENT_PID)).unwrap();
        self.tree.files("proc/self", &[("status", "CapEff:\t000001ffffffffff"), ("mounts", "")]);
        self
    }

    /// Adds the dax device of slice 0, bound to a driver unless `driver` is empty.
    fn add_slice(&self, driver: &str) {
        let (device, last) = (format!("{REGION_FOLDER}/dax7.1"), (44_u64 << 30) - 1);
        let files = [("size", "1073741824"), ("align", "2097152"), ("dev", "253:1"), ("target_node", "5")];
        self.tree.files(&device, &files);
        self.tree.files(&device, &[("resource", "0xac0000000")]);
        let ends = [("start", "0xac0000000"), ("end", &*format!("{last:#x}"))];
        self.tree.files(&format!("{device}/mapping0"), &ends);
        let link = format!("{device}/driver");
        let _ = fs::remove_file(self.tree.path(&link));
        if !driver.is_empty() {
            self.tree.link(&link, &format!("bus/dax/drivers/{driver}"));
        }
    }

    fn add_blocks(&self, numbers: std::ops::Range<u64>, state: &str) {
        for number in numbers {
            let files = [("state", state), ("valid_zones", "Movable")];
            self.tree.files(&format!("{BLOCKS_FOLDER}/memory{number}"), &files);
            fs::create_dir_all(self.tree.path(&format!("{NODE_FOLDER}/memory{number}"))).unwrap();
        }
    }

    fn machine(&self) -> Machine {
        let at = |name: &str| Sysfs::at(self.tree.path(name));
        Machine {
            sys: self.tree.sysfs.clone(),
            proc: at("proc"),
            dev: self.tree.path("dev"),
            modules: at("modules"),
        }
    }

    fn findings(&self) -> Vec<Finding> {
        examine_host(&self.machine(), &self.tree.path("host.toml"))
    }

    /// Returns the only problem as text. Panics unless there is exactly one problem.
    #[track_caller]
    fn only_problem(&self) -> String {
        let problems: Vec<_> = self.findings().into_iter().filter(|finding| !finding.ok).collect();
        assert_eq!(problems.len(), 1, "{problems:#?}");
        format_findings(&problems)
    }

    #[track_caller]
    fn assert_problem(&self, parts: &[&str]) {
        let problems = self.only_problem();
        assert!(parts.iter().all(|part| problems.contains(part)), "{parts:?} in\n{problems}");
    }

    #[track_caller]
    fn assert_healthy(&self) {
        let all = self.findings();
        assert!(all.iter().all(|finding| finding.ok), "with {}:\n{}", self.backend, format_findings(&all));
    }
}

/// Adds the files of a kernel without problems.
fn add_kernel_files(tree: &FakeSysfs) {
    let drivers = ["platform/drivers/cxl_acpi", "pci/drivers/cxl_pci", "cxl/drivers/cxl_port"];
    let more =
        ["cxl/drivers/cxl_mem", "cxl/drivers/cxl_dax_region", "dax/drivers/device_dax", "dax/drivers/kmem"];
    for driver in drivers.iter().chain(&more) {
        fs::create_dir_all(tree.path(&format!("bus/{driver}"))).unwrap();
    }
    tree.files("proc", &[("sys/kernel/osrelease", "6.12.95-cloud"), ("sys/kernel/numa_balancing", "0")]);
    let cmdline = "quiet memhp_default_state=offline";
    tree.files("proc", &[("cmdline", cmdline), ("swaps", "Filename Type Size Used Priority")]);
    tree.files("dev", &[("kvm", "")]);
    tree.files(BLOCKS_FOLDER, &[("block_size_bytes", "8000000"), ("auto_online_blocks", "offline")]);
    tree.files("kernel/mm/numa", &[("demotion_enabled", "false")]);
    tree.files(NODE_FOLDER, &[("cpulist", ""), ("meminfo", &meminfo(0))]);
}

fn meminfo(others_mib: u64) -> String {
    let line = |name: &str, mib: u64| format!("Node 5 {name} {} kB\n", mib * 1024);
    line("MemTotal:", 1024)
        + &line("AnonPages:", others_mib)
        + &line("FilePages:", 512)
        + &line("Shmem:", 512)
}

fn write_settings(tree: &FakeSysfs, backend: &str) {
    let text = format!(
        "[agent]\nhost = \"h0\"\nruntime_dir = \"run\"\ntoken_file = \"h0.token\"\n[backend]\nkind = \"{backend}\""
    );
    tree.files("", &[("host.toml", &text), ("h0.token", "secret")]);
    set_mode(tree, "host.toml", 0o644);
    set_mode(tree, "h0.token", 0o600);
}

fn set_mode(tree: &FakeSysfs, name: &str, mode: u32) {
    fs::set_permissions(tree.path(name), Permissions::from_mode(mode)).unwrap();
}

#[test]
fn healthy_host_passes_and_reports_every_check() {
    let checks = |backend| {
        let host = TestHost::new(backend);
        host.assert_healthy();
        host.findings().iter().map(|finding| finding.check).collect::<Vec<_>>().join(" ")
    };
    let always = "config secrets runtime_dir local_dir agent permissions kvm hugepages";
    let cxl = format!("{always} kernel modules auto_online encryption records devices");
    assert_eq!(checks("emulated"), always);
    assert_eq!(checks("dax"), cxl);
    assert_eq!(checks("memory_block"), format!("{cxl} blocks migration node"));
}

#[test]
fn doctor_does_not_delete_an_incomplete_region() {
    let host = TestHost::new("dax").without_agent();
    host.tree.files(&format!("{ROOT}/decoder0.1"), &[("delete_region", "")]);
    host.tree.files(&format!("{ROOT}/decoder0.1/region7"), &[("commit", "0")]);
    let output = format_findings(&host.findings());
    assert!(output.contains("region7 is incomplete: the agent fixes this when it starts"), "{output}");
    assert_eq!(host.tree.sysfs.text(format!("{ROOT}/decoder0.1/delete_region")).unwrap(), "");
}

#[test]
fn missing_or_invalid_config_is_reported() {
    let host = TestHost::new("dax");
    host.tree.files("", &[("host.toml", "[agent]\nhots = 1")]);
    let output = format_findings(&host.findings());
    for expected in ["host.toml: line 2: agent.hots: unknown key", "host.toml: backend: is missing"] {
        let line = output.lines().find(|line| line.contains(expected));
        assert!(line.is_some_and(|line| line.starts_with("PROBLEM config ")), "no {expected:?} in\n{output}");
    }
    assert!(output.contains("--check-config"), "{output}");
    fs::remove_file(host.tree.path("host.toml")).unwrap();
    host.assert_problem(&["config", "No such file", "host.example.toml"]);
}

#[test]
fn missing_controllers_and_swap_are_reported() {
    let host = TestHost::new("emulated");
    let others = fs::read_to_string(host.tree.path("host.toml")).unwrap();
    let symbiosis = "\n[symbiosis]\ncgroups = \"tenants\"\nmemory_mib = 1024\nbandwidth_mb_s = 100\nenforce = \"swap\"\nremote = \"/dev/null\"";
    host.tree.files("", &[("host.toml", &format!("{others}{symbiosis}"))]);
    let output = format_findings(&host.findings());
    assert!(output.contains("is not a directory of cgroup v2") && output.contains("fix: mkdir "), "{output}");
    assert!(output.contains("symbiosis.remote: /dev/null is not a block device"), "{output}");
    host.tree.files("tenants", &[("cgroup.subtree_control", "cpu memory pids")]);
    let output = format_findings(&host.findings());
    assert!(output.contains("lack the controllers io") && output.contains("fix: echo '+io' > "), "{output}");
    assert!(
        output.contains("page accesses are not monitored") && output.contains("CONFIG_DAMON_SYSFS"),
        "{output}"
    );
    host.tree.files("kernel/mm/damon/admin/kdamonds", &[("nr_kdamonds", "0")]);
    assert!(format_findings(&host.findings()).contains("monitored by DAMON; no processor of this host"));
    host.tree.files("tenants", &[("cgroup.subtree_control", "cpu io memory pids")]);
    assert!(!format_findings(&host.findings()).contains("symbiosis.cgroups"));
}

#[test]
fn files_accessible_by_other_users_are_reported() {
    let host = TestHost::new("emulated");
    set_mode(&host.tree, "h0.token", 0o640);
    host.assert_problem(&[
        "secrets",
        "h0.token has mode 0640: users other than its owner can access it",
        "`chmod 600 ",
    ]);
    fs::remove_file(host.tree.path("h0.token")).unwrap();
    host.assert_problem(&["secrets", "agent.token_file: cannot read ", "h0.token: No such file"]);
    fs::create_dir(host.tree.path("h0.token")).unwrap();
    host.assert_problem(&["secrets", "agent.token_file: ", "h0.token: must be a regular file"]);
    fs::remove_dir(host.tree.path("h0.token")).unwrap();
    host.tree.files("", &[("h0.token", "two words")]);
    set_mode(&host.tree, "h0.token", 0o600);
    host.assert_problem(&["secrets", "printable characters"]);
    host.tree.files("", &[("h0.token", "secret")]);
    set_mode(&host.tree, "host.toml", 0o666);
    host.assert_problem(&["config", "can change it", "`chmod 644 "]);
}

#[test]
fn private_key_may_be_accessible_to_its_group_only() {
    let host = TestHost::new("emulated");
    let text = fs::read_to_string(host.tree.path("host.toml")).unwrap();
    let text = text.replacen("[agent]", "[agent]\nmanager = \"https://10.0.0.1:9750\"", 1);
    let tls = "[tls]\nca = \"ca.pem\"\ncertificate = \"h0.pem\"\nkey = \"h0.key\"\nserver_name = \"manager\"";
    host.tree.files("", &[("host.toml", &format!("{text}\n{tls}"))]);
    let config = Config::load(&host.tree.path("host.toml")).unwrap();
    write_tls_files(&config.tls.unwrap(), 2020, 2500);
    for name in ["ca.pem", "h0.pem", "h0.key"] {
        set_mode(&host.tree, name, 0o640);
    }
    host.assert_healthy();
    set_mode(&host.tree, "h0.key", 0o644);
    host.assert_problem(&[
        "secrets",
        "tls.key: ",
        "h0.key has mode 0644: users other than its owner and group can access it",
        "`chmod o= ",
    ]);
}

#[test]
fn local_memory_on_disk_is_reported() {
    let is_ok = |dir: Option<&str>| files::check_local_dir(dir.map(Path::new), current_user()).ok;
    assert!(is_ok(None));
    assert!(is_ok(Some("/dev/shm/tarn-missing/local")));
    assert!(!is_ok(Some("/proc/tarn")));
}

#[test]
fn directories_that_others_can_change_are_reported() {
    let host = TestHost::new("emulated");
    set_mode(&host.tree, "run", 0o775);
    host.assert_problem(&["runtime_dir", "agent.runtime_dir: ", "has mode 0775", "`chmod go-w "]);
    set_mode(&host.tree, "run", 0o711);
    host.assert_healthy();
    let local = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::set_permissions(local.path(), Permissions::from_mode(0o1777)).unwrap();
    let finding = files::check_local_dir(Some(local.path()), current_user());
    assert!(!finding.ok && finding.message.contains("has mode 1777"), "{finding:?}");
}

#[test]
fn directories_may_belong_to_the_user_of_the_running_agent() {
    let host = TestHost::new("emulated");
    if current_user() != UserId::ROOT {
        return report_skipped("doctor for an agent of another user: only root can change an owner");
    }
    std::os::unix::fs::chown(host.tree.path("run"), Some(4242), None).unwrap();
    host.assert_problem(&[
        "runtime_dir",
        "belongs to user 4242: must belong to the agent's user (0) or root",
    ]);
    let status = "Name:\thost-agent\nUid:\t4242\t4242\t4242\t4242\nCapEff:\t000001ffffffffff";
    host.tree.files(&format!("proc/{AGENT_PID}"), &[("status", status)]);
    host.assert_healthy();
}

#[test]
fn missing_agent_second_agent_and_missing_socket_are_reported() {
    let host = TestHost::new("dax");
    host.add_process("99", "0");
    host.assert_problem(&["agent", "processes [99] are also host-agents", "`kill PID`"]);
    fs::remove_dir_all(host.tree.path("proc/99")).unwrap();
    fs::remove_file(host.tree.path("run/host-memory.sock")).unwrap();
    host.assert_problem(&["agent", "process 4711 does not listen on", "`systemctl restart host-agent`"]);
    host.without_agent().assert_problem(&["agent", "`systemctl start host-agent`"]);
}

#[test]
fn agent_without_capabilities_is_reported() {
    let host = TestHost::new("memory_block");
    host.add_process(AGENT_PID, "000001ffff5fffff");
    host.assert_problem(&[
        "permissions",
        "the agent (process 4711) lacks CAP_SYS_ADMIN CAP_SYS_NICE",
        "CapabilityBoundingSet=",
    ]);
    host.add_process(AGENT_PID, "000001ffffffffff");
    host.tree.files("proc/4711", &[("mounts", "sysfs /sys sysfs ro,nosuid 0 0")]);
    host.assert_problem(&["permissions", "cannot write to /sys"]);
}

#[test]
fn old_kernel_and_missing_kvm_are_reported() {
    let host = TestHost::new("dax");
    for old in ["6.2.16", "5.15.0-91-generic", "invalid"] {
        host.tree.files("proc", &[("sys/kernel/osrelease", old)]);
        host.assert_problem(&["kernel", old, "version 6.3 or later is required"]);
    }
    host.tree.files("proc", &[("sys/kernel/osrelease", "6.3.0-rc1")]);
    host.assert_healthy();
    fs::remove_file(host.tree.path("dev/kvm")).unwrap();
    host.assert_problem(&["kvm", "no guest can run", "`modprobe kvm_intel`"]);
}

#[test]
fn unloaded_or_missing_module_is_reported_by_name() {
    let host = TestHost::new("dax");
    fs::remove_dir(host.tree.path("bus/dax/drivers/kmem")).unwrap();
    host.assert_healthy();
    fs::remove_dir(host.tree.path("bus/cxl/drivers/cxl_mem")).unwrap();
    host.assert_problem(&["modules", "cxl_mem is neither loaded nor installed", "CONFIG_CXL_MEM"]);
    let list = "kernel/drivers/cxl/cxl_mem.ko.xz: kernel/drivers/cxl/core/cxl_core.ko.xz\nkernel/drivers/dax/device_dax.ko:";
    host.tree.files("modules/6.12.95-cloud", &[("modules.dep", list)]);
    host.assert_problem(&["modules", "cxl_mem is not loaded", "`modprobe cxl_mem`"]);
    fs::create_dir(host.tree.path("bus/cxl/drivers/cxl_mem")).unwrap();
    fs::remove_dir(host.tree.path("bus/dax/drivers/device_dax")).unwrap();
    host.assert_healthy();
}

#[test]
fn soft_reserved_memory_without_cxl_bus_is_reported() {
    let host = TestHost::new("dax");
    for module in ["cxl_port", "cxl_mem", "cxl_dax_region"] {
        fs::rename(host.tree.path(&format!("bus/cxl/drivers/{module}")), host.tree.path(module)).unwrap();
    }
    fs::remove_dir_all(host.tree.path("bus/cxl")).unwrap();
    let iomem =
        "00000000-00000fff : Reserved\n100000000-1ffffffff : Soft Reserved\n  100000000-1ffffffff : dax0.0";
    host.tree.files("proc", &[("iomem", iomem)]);
    let output = format_findings(&host.findings());
    assert!(
        output.contains("no CXL bus")
            && output.contains("has reserved memory (4GiB")
            && output.contains("dax_hmem"),
        "{output}"
    );
}

#[test]
fn auto_online_policy_and_boot_option_are_reported() {
    let host = TestHost::new("dax");
    host.tree.files("proc", &[("cmdline", "quiet")]);
    host.assert_healthy();
    let finding = host.findings().into_iter().find(|finding| finding.check == "auto_online").unwrap();
    assert!(finding.fix.unwrap().contains("memhp_default_state=offline"));
    host.tree.files(BLOCKS_FOLDER, &[("auto_online_blocks", "online_movable")]);
    host.assert_problem(&[
        "auto_online",
        "(online_movable)",
        "`echo offline > /sys/",
        "memhp_default_state=offline",
    ]);
}

#[test]
fn unusable_device_is_reported_with_its_problem() {
    let host = TestHost::new("dax");
    let region = format!("{ROOT}/decoder0.1/region7");
    host.tree.files(&region, &[("resource", "0xac0100000")]);
    host.assert_problem(&["device 0x1", "0xac0100000, which is not aligned to 2MiB"]);
    host.tree.files(&region, &[("resource", "0xac0000000"), ("interleave_ways", "2")]);
    host.assert_problem(&["device 0x1", "interleaves 2 devices", "systemctl restart"]);
}

#[test]
fn missing_region_is_a_problem_only_if_agent_runs() {
    let host = TestHost::new("dax");
    host.tree.files(&format!("{ROOT}/port1/endpoint2/decoder2.0"), &[("region", "")]);
    fs::remove_dir_all(host.tree.path(&format!("{ROOT}/decoder0.1/region7"))).unwrap();
    host.assert_problem(&[
        "device 0x1",
        "4GiB have no region; decoder0.1 has space for a region aligned to 1GiB, and the running agent",
    ]);
    let output = format_findings(&host.without_agent().findings());
    assert!(output.contains("aligned to 1GiB: the agent fixes this when it starts"), "{output}");
}

#[test]
fn foreign_dax_device_is_reported() {
    let host = TestHost::new("dax");
    host.add_slice("device_dax");
    host.assert_healthy();
    host.tree.files(&format!("{REGION_FOLDER}/dax7.1"), &[("size", "536870912")]);
    host.assert_problem(&["device 0x1", "dax7.1 uses memory of the region", "`daxctl destroy-device`"]);
}

#[test]
fn partial_slice_is_reported_only_without_agent() {
    let host = TestHost::new("memory_block");
    host.add_blocks(FIRST_BLOCK..FIRST_BLOCK + 3, "offline");
    host.assert_healthy();
    let host = host.without_agent();
    let partial_slice = format_findings(&host.findings());
    assert!(
        partial_slice
            .contains("cxl:0x1:0: incomplete slice: 5 of 8 memory blocks are online; no recorded VM"),
        "{partial_slice}"
    );
    host.add_slice("");
    let partial_slice = format_findings(&host.findings());
    assert!(
        partial_slice.contains("cxl:0x1:0: incomplete slice: it has no driver; no recorded VM"),
        "{partial_slice}"
    );
}

#[test]
fn online_memory_blocks_with_dax_backend_are_reported() {
    let host = TestHost::new("dax");
    host.add_slice("kmem");
    host.add_blocks(FIRST_BLOCK..FIRST_BLOCK + 8, "offline");
    host.assert_healthy();
    host.add_blocks(FIRST_BLOCK + 2..FIRST_BLOCK + 3, "online");
    host.assert_problem(&["cxl:0x1:0: 1 memory blocks of the slice are online", "memory346/state`"]);
}

#[test]
fn blocks_larger_than_a_slice_are_reported() {
    let host = TestHost::new("memory_block");
    host.tree.files(BLOCKS_FOLDER, &[("block_size_bytes", "80000000")]);
    let output = format_findings(&host.findings());
    assert!(
        output.contains(
            "blocks      this host: a slice of 1GiB is not a whole number of memory blocks of 2GiB"
        ) && output.contains("`kind = \"dax\"`"),
        "{output}"
    );
}

#[test]
fn foreign_use_of_pool_node_is_reported() {
    let host = TestHost::new("memory_block");
    host.tree.files(NODE_FOLDER, &[("meminfo", &meminfo(65))]);
    host.assert_problem(&[
        "node 5",
        "processes other than VMs use 65MiB of this node",
        "AllowedMemoryNodes=",
        "is killed",
    ]);
    host.tree.files(NODE_FOLDER, &[("meminfo", &meminfo(64)), ("cpulist", "0-3")]);
    host.assert_problem(&["node 5", "has processors 0-3"]);
    host.tree.files(NODE_FOLDER, &[("cpulist", "")]);
    host.add_blocks(8..9, "online");
    host.assert_problem(&["node 5", "memory8 is online and belongs to no slice", "`echo offline > "]);
    host.add_blocks(8..9, "offline");
    host.tree.files(&format!("{BLOCKS_FOLDER}/memory344"), &[("valid_zones", "Normal")]);
    host.assert_problem(&["node 5", "memory344 is online in zone Normal", "memhp_default_state=offline"]);
}

#[test]
fn enabled_demotion_is_a_problem_and_numa_balancing_is_not() {
    let host = TestHost::new("memory_block");
    host.tree.files("kernel/mm/numa", &[("demotion_enabled", "true")]);
    host.assert_problem(&["migration", "`echo 0 > /sys/kernel/mm/numa/demotion_enabled`"]);
    host.tree.files("kernel/mm/numa", &[("demotion_enabled", "false")]);
    host.tree
        .files("proc", &[("sys/kernel/numa_balancing", "1"), ("swaps", "Filename\n/dev/sda2 partition")]);
    host.assert_healthy();
    let output = format_findings(&host.findings());
    assert!(output.contains("does not move memory of VMs") && output.contains("are swapped out"), "{output}");
}

#[test]
fn disabled_huge_pages_are_reported_with_fix() {
    let host = TestHost::new("emulated");
    let folder = "kernel/mm/transparent_hugepage";
    let output = || {
        let mut findings = host.findings().into_iter();
        let Finding { ok, message, fix, .. } = findings.find(|finding| finding.check == "hugepages").unwrap();
        assert!(ok, "guests also run without huge pages");
        format!("{message} ({})", fix.unwrap_or_default())
    };
    assert!(output().ends_with("(boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE)"), "{}", output());
    host.tree.files(folder, &[("shmem_enabled", "always within_size advise [never] deny force")]);
    assert!(output().starts_with("shmem_enabled is never"), "{}", output());
    assert!(
        output().contains("(`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`"),
        "{}",
        output()
    );
    host.tree.files(folder, &[("shmem_enabled", "always within_size [advise] never deny force")]);
    assert_eq!(output(), "shmem_enabled is advise: guest memory gets huge pages ()");
    let of_size = format!("{folder}/hugepages-2048kB");
    host.tree.files(&of_size, &[("shmem_enabled", "always [inherit] within_size advise never")]);
    assert_eq!(output(), "shmem_enabled is advise: guest memory gets huge pages ()");
    host.tree.files(&of_size, &[("shmem_enabled", "always inherit within_size advise [never]")]);
    assert!(output().starts_with("hugepages-2048kB/shmem_enabled is never"), "{}", output());
}

#[test]
fn active_memory_encryption_is_a_problem() {
    let host = TestHost::new("dax");
    host.tree.files("bus/pci/drivers/ccp/0000:22:00.1", &[("tsme_status", "1")]);
    let problems = host.only_problem();
    assert!(problems.contains("AMD TSME is active") && problems.contains("disable TSME"), "{problems}");
}
