//! Test of the monitor with stock Debian guests on CXL memory of an emulated host. A guest that
//! reads its pool memory all the time gets a migration request. A guest that has touched its pool
//! memory only once does not.

use emulated_host::Initrd;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::{HUGE_PAGES_SCRIPT, artifacts},
    rack::programs_dir,
};

/// Version of the guest kernel.
const KERNEL_VERSION: &str = "6.12";
/// Local memory of a host, in GiB.
const HOST_GIB: u32 = 4;
/// Data that the busy guest writes to its pool node of 1 GiB, in MiB, if its VMM samples the accesses. The
/// monitor requests a migration for a guest that reads all of it.
const DATA_MIB: u64 = 850;
/// Data of the calm guest, in MiB.
const CALM_DATA_MIB: u64 = 256;
/// Data of a guest under QEMU, in MiB. QEMU's memory has small pages, and each takes a nested page fault.
const QEMU_DATA_MIB: u64 = 128;
/// Reads the data in each round. `cat` would pass the pages on without an access to their contents.
const READ_SCRIPT: &str = r#"
n=0
while :; do n=$((n+1)); dd if=/n1/data of=/dev/null bs=1M 2> /dev/null; echo "ROUND $n"; done
"#;
const SLEEP_SCRIPT: &str = "while :; do sleep 1; echo AWAKE; done\n";
/// Address of the agent's metrics in its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9464";
/// Local memory of a guest, in MiB.
const GUEST_LOCAL_MIB: u64 = 512;
/// VMM that runs the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vmm {
    Tarn,
    Qemu,
}

/// Returns the beginning of the guests' scripts, which writes this much data to the pool node.
fn fill_script(data_mib: u64) -> String {
    format!(
        "mkdir /n1\nmount -t tmpfs -o size={}m,mpol=bind:1 n1 /n1\n\
         dd if=/dev/zero of=/n1/data bs=1M count={data_mib}\necho FILLED\n",
        data_mib + 10
    )
}

/// Returns the host script that starts a guest.
fn start_script(vmm: Vmm, vm: &str) -> String {
    let (command, cmdline) = match vmm {
        Vmm::Tarn => ("run --uid 65534 --gid 65534", "pci=off"),
        Vmm::Qemu => ("exec --vmm qemu", ""),
    };
    format!(
        "(vmm-plugin {command} --vm {vm} --cpus 1 --kernel /guest/kernel --initrd /guest/{vm} \
         --serial file=/run/{vm}.console --cmdline 'console=ttyS0 quiet panic=-1 {cmdline}' 2> /run/{vm}.log) > /dev/null &"
    )
}

/// Starts a rack with both guests, and waits until they have touched their pool memory.
fn start_rack(backend: &str, vmm: Vmm) -> EmulatedRack {
    let (artifacts, folder) = (artifacts(), tempfile::tempdir().unwrap());
    let mut plan = plan(1, &[2], backend);
    plan.agent_toml_extra = format!("sample_interval_s = 10\nmetrics_listen = \"{METRICS_ADDRESS}\"\n");
    plan.hosts.has_qemu = vmm == Vmm::Qemu;
    plan.hosts.memory_gib = HOST_GIB;
    // A VMM maps slices of an aligned device in pages of 1 GiB, whose accesses cannot be sampled.
    plan.hosts.devices[0].is_aligned = backend != "dax";
    plan.hosts.programs.push(programs_dir().join("vmm-plugin"));
    plan.hosts.files.push((artifacts.kernel_path(KERNEL_VERSION), "guest/kernel".to_owned()));
    if vmm == Vmm::Tarn {
        plan.hosts.script.push_str(HUGE_PAGES_SCRIPT);
    }
    let data_mib = |mib| if vmm == Vmm::Qemu { QEMU_DATA_MIB } else { mib };
    for (vm, mib, rest) in [("busy", DATA_MIB, READ_SCRIPT), ("calm", CALM_DATA_MIB, SLEEP_SCRIPT)] {
        let initrd = folder.path().join(vm);
        let script = fill_script(data_mib(mib)) + rest;
        Initrd::for_guest(&artifacts, KERNEL_VERSION, &script).unwrap().pack(&initrd).unwrap();
        plan.hosts.files.push((initrd, format!("guest/{vm}")));
    }
    let rack = EmulatedRack::start(plan);
    for vm in ["busy", "calm"] {
        rack.tarn(&format!(
            "reserve --host h0 --vm {vm} --pool 1GiB --local {GUEST_LOCAL_MIB}MiB --cores 1 --request-id {vm} --wait-ready"
        ));
        rack.tarn(&format!("commit {vm}"));
        rack.run(0, &start_script(vmm, vm));
    }
    for vm in ["busy", "calm"] {
        rack.wait_until(&format!("{vm} has touched its pool memory"), |rack| {
            console_output(rack, vm).contains("FILLED")
        });
    }
    rack
}

fn console_output(rack: &EmulatedRack, vm: &str) -> String {
    rack.run(0, &format!("cat /run/{vm}.console /run/{vm}.log; true"))
}

fn vm_state(rack: &EmulatedRack, vm: &str) -> serde_json::Value {
    rack.tarn_json(&format!("get vm {vm}"))
}

fn busy_guest_is_detected_and_calm_guest_is_not(backend: &str) {
    let rack = start_rack(backend, Vmm::Tarn);
    let samples = std::cell::RefCell::new(Vec::new());
    rack.wait_until("the request to migrate the busy guest", |rack| {
        let state = vm_state(rack, "busy");
        let sample = (state["sampled_unix_ms"].clone(), state["accessed_share"].clone());
        if samples.borrow().last() != Some(&sample) {
            samples.borrow_mut().push(sample);
        }
        rack.tarn("get migrations").contains("busy")
    });
    println!("samples of the busy guest until the request: {:?}", samples.borrow());
    // The samples of its start are no evidence, and the guest then does not access the data.
    rack.wait_until("the calm guest does not access its pool memory", |rack| {
        let calm = vm_state(rack, "calm");
        calm["verdict"] == "fine" && calm["accessed_share"].as_f64().is_some_and(|share| share < 0.1)
    });
    let (busy, calm) = (vm_state(&rack, "busy"), vm_state(&rack, "calm"));
    assert_eq!((&busy["verdict"], &busy["access_source"]), (&"migrate".into(), &"vmm".into()), "{busy}");
    assert!(busy["accessed_share"].as_f64().unwrap() > 0.6, "{busy}");
    assert_eq!((&calm["verdict"], &calm["access_source"]), (&"fine".into(), &"vmm".into()), "{calm}");
    let migrations = rack.tarn("get migrations");
    assert!(migrations.contains("slowdown") && !migrations.contains("calm"), "{migrations}");
    for (vm, word) in [("busy", "ROUND"), ("calm", "AWAKE")] {
        let before = console_output(&rack, vm).matches(word).count();
        rack.wait_until("the sampled guest makes progress", |rack| {
            console_output(rack, vm).matches(word).count() > before
        });
    }
}

#[test]
fn busy_guest_on_dax_slice_is_detected() {
    busy_guest_is_detected_and_calm_guest_is_not("dax");
}

#[test]
fn busy_guest_on_memory_block_slice_is_detected() {
    busy_guest_is_detected_and_calm_guest_is_not("memory_block");
}

/// Returns the memory that a guest has touched, in MiB, from the metrics of the agent.
fn touched_mib(rack: &EmulatedRack, vm: &str, memory: &str) -> Option<u64> {
    let metrics = rack.run(0, &format!("wget -q -O - http://{METRICS_ADDRESS}/metrics"));
    let name = format!(
        "tarn_vm_touched_bytes{{host=\"h0\",backend=\"memory_block\",vm=\"{vm}\",memory=\"{memory}\"}} "
    );
    let bytes = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok());
    bytes.map(|bytes| bytes >> 20)
}

/// DAMON of the host's kernel samples QEMU, which does not sample accesses itself. QEMU allocates the
/// local memory, and its memory counters show how much of it the guest has touched.
#[test]
fn guest_under_qemu_is_sampled_by_damon_and_its_touched_memory_is_measured() {
    let rack = start_rack("memory_block", Vmm::Qemu);
    rack.wait_until("the touched memory is measured", |rack| touched_mib(rack, "calm", "local").is_some());
    let [local, pool] = ["local", "pool"].map(|memory| touched_mib(&rack, "calm", memory).unwrap());
    println!("calm has touched {local} MiB of local memory and {pool} MiB of pool memory");
    assert!((QEMU_DATA_MIB..=QEMU_DATA_MIB + 128).contains(&pool), "{pool} MiB");
    assert!((32..GUEST_LOCAL_MIB).contains(&local), "{local} MiB");
    let share = |rack: &EmulatedRack, vm: &str| {
        let state = vm_state(rack, vm);
        let share = state["accessed_share"].as_f64().filter(|_| state["access_source"] == "damon");
        println!("{vm}: {share:?} {} {}", state["access_source"], state["access_problem"]);
        share
    };
    rack.wait_until("the busy guest accesses its pool memory, the calm guest does not", |rack| {
        let (busy, calm) = (share(rack, "busy"), share(rack, "calm"));
        busy.is_some_and(|share| share > 0.08) && calm.is_some_and(|share| share < 0.05)
    });
    let state = vm_state(&rack, "busy");
    assert_eq!(state["counter_source"], "none", "the emulated processor has no counters: {state}");
}
