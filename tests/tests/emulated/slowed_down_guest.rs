//! Test of the monitor with stock Debian guests on CXL memory of an emulated host. A guest that
//! reads its pool memory all the time gets a migration request. A guest that has touched its pool
//! memory only once does not.

use emulated_host::Initrd;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
    rack::programs_dir,
};

/// Version of the guest kernel.
const KERNEL_VERSION: &str = "6.12";
/// Local memory of a host, in GiB.
const HOST_GIB: u32 = 4;
/// Beginning of the guests' scripts: writes 850 MiB to the pool node of 1 GiB.
const FILL_SCRIPT: &str = r"
mkdir /n1
mount -t tmpfs -o size=860m,mpol=bind:1 n1 /n1
dd if=/dev/zero of=/n1/data bs=1M count=850
echo FILLED
";
/// Reads the data in each round. `cat` would pass the pages on without an access to their contents.
const READ_SCRIPT: &str = r#"
n=0
while :; do n=$((n+1)); dd if=/n1/data of=/dev/null bs=1M 2> /dev/null; echo "ROUND $n"; done
"#;
const SLEEP_SCRIPT: &str = "while :; do sleep 1; echo AWAKE; done\n";

/// Returns the host script that starts a guest.
fn start_script(vm: &str) -> String {
    format!(
        "(vmm-plugin run --uid 65534 --gid 65534 --vm {vm} --cpus 1 --kernel /guest/kernel --initrd /guest/{vm} \
         --serial file=/run/{vm}.console --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/{vm}.log) > /dev/null &"
    )
}

fn start_rack(backend: &str) -> EmulatedRack {
    let (artifacts, folder) = (artifacts(), tempfile::tempdir().unwrap());
    let mut plan = plan(2, &[2], backend);
    plan.agent_toml_extra = "sample_interval_s = 10\n".to_owned();
    plan.hosts.memory_gib = HOST_GIB;
    // A VMM maps slices of an aligned device in pages of 1 GiB, whose accesses cannot be sampled.
    plan.hosts.devices[0].is_aligned = backend != "dax";
    plan.hosts.programs.push(programs_dir().join("vmm-plugin"));
    plan.hosts.files.push((artifacts.kernel_path(KERNEL_VERSION), "guest/kernel".to_owned()));
    for (vm, rest) in [("busy", READ_SCRIPT), ("calm", SLEEP_SCRIPT)] {
        let initrd = folder.path().join(vm);
        Initrd::for_guest(&artifacts, KERNEL_VERSION, &format!("{FILL_SCRIPT}{rest}"))
            .unwrap()
            .pack(&initrd)
            .unwrap();
        plan.hosts.files.push((initrd, format!("guest/{vm}")));
    }
    let rack = EmulatedRack::start(plan);
    for vm in ["busy", "calm"] {
        rack.tarn(&format!(
            "reserve --host h0 --vm {vm} --pool 1GiB --local 512MiB --cores 1 --request-id {vm} --wait-ready"
        ));
        rack.tarn(&format!("commit {vm}"));
        rack.run(0, &start_script(vm));
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
    let rack = start_rack(backend);
    for vm in ["busy", "calm"] {
        rack.wait_until(&format!("{vm} has touched its pool memory"), |rack| {
            console_output(rack, vm).contains("FILLED")
        });
    }
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
