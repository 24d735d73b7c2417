//! Test of a stock Debian guest on CXL memory of an emulated host, with both backends. The data of
//! the guest must not change while other slices are added and removed.

use emulated_host::Initrd;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
    rack::programs_dir,
};

/// Version of the guest kernel.
const KERNEL_VERSION: &str = "6.12";
/// Local memory of a host, in GiB.
const HOST_GIB: u32 = 3;
/// Address of the metrics endpoint of the agent, on its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";
/// Guest script that writes 32 MiB on the pool node, and verifies the data in each round until the
/// power button is pressed.
const CHECKSUM_SCRIPT: &str = r#"
exec 3< /dev/input/event0
(head -c 1 <&3 > /dev/null; touch /pressed) &
mkdir /n1
mount -t tmpfs -o size=40m,mpol=bind:1 n1 /n1
head -c 33554432 /dev/urandom > /n1/data
SUM=$(md5sum < /n1/data)
n=0
while [ ! -e /pressed ]; do
  n=$((n+1))
  [ "$(md5sum < /n1/data)" = "$SUM" ] || echo "WRONG in round $n"
  echo "ROUND $n"
  sleep 0.2
done
echo "SUMS END"
"#;
/// Host script that starts the guest and stores the exit code of its VMM.
const START_SCRIPT: &str = r"
(vmm-plugin run --uid 65534 --gid 65534 --shutdown-timeout 10m --vm guest --cpus 1 --kernel /guest/kernel --initrd /guest/initrd --serial file=/run/guest.console \
  --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/guest.log; echo $? > /run/guest.code) > /dev/null &
";
/// Host script that prints the NUMA nodes of the host that contain pages of the guest's slice.
const LIST_NODES_SCRIPT: &str =
    "grep tarn-slice /proc/$(pidof vmm-plugin)/numa_maps | grep -o 'N[0-9]*=' | sort -u | xargs";

/// Starts a rack with a guest that has one slice. Another VM gets a slice first, so that the guest's
/// slice is not the one from which the kernel allocates first.
fn start_rack_with_guest(backend: &str) -> EmulatedRack {
    let (artifacts, folder) = (artifacts(), tempfile::tempdir().unwrap());
    let initrd = folder.path().join("initrd");
    Initrd::for_guest(&artifacts, KERNEL_VERSION, CHECKSUM_SCRIPT).unwrap().pack(&initrd).unwrap();
    let mut plan = plan(2, &[2], backend);
    plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
    plan.hosts.memory_gib = HOST_GIB;
    plan.hosts.programs.push(programs_dir().join("vmm-plugin"));
    let files = [(artifacts.kernel_path(KERNEL_VERSION), "guest/kernel"), (initrd, "guest/initrd")];
    plan.hosts.files.extend(files.map(|(from, name)| (from, name.to_owned())));
    let rack = EmulatedRack::start(plan);
    rack.reserve(0, "other0", 1);
    rack.tarn(
        "reserve --host h0 --vm guest --pool 1GiB --local 512MiB --cores 1 --request-id guest --wait-ready",
    );
    rack.tarn("commit guest");
    rack.run(0, START_SCRIPT);
    wait_for_progress(&rack, "after its start");
    rack
}

fn console_output(rack: &EmulatedRack) -> String {
    rack.run(0, "cat /run/guest.console /run/guest.log; true")
}

fn count_rounds(rack: &EmulatedRack) -> usize {
    console_output(rack).matches("ROUND").count()
}

/// Waits until the guest has verified its data in a complete round.
fn wait_for_progress(rack: &EmulatedRack, when: &str) {
    let before = count_rounds(rack);
    rack.wait_until(&format!("the guest makes progress {when}"), |rack| count_rounds(rack) >= before + 2);
    assert!(!console_output(rack).contains("WRONG"), "{when}: {}", console_output(rack));
}

/// Removes a slice of another VM from the host, adds a slice, and removes a slice again.
fn reserve_and_release_others(rack: &EmulatedRack) {
    rack.tarn("release other0");
    rack.wait_until("one slice is free", |rack| rack.slice_states().contains(&"free".to_owned()));
    wait_for_progress(rack, "after a slice was removed");
    rack.reserve(0, "other1", 1);
    wait_for_progress(rack, "after a slice was added");
    rack.tarn("release other1");
    rack.wait_until("one slice is free", |rack| rack.slice_states().contains(&"free".to_owned()));
    wait_for_progress(rack, "after a slice was removed again");
}

/// Waits until the VMM of the guest has ended, and returns its exit code.
fn wait_for_exit_code(rack: &EmulatedRack) -> String {
    rack.wait_until("the guest has ended", |rack| rack.run(0, "ls /run").contains("guest.code"));
    rack.run(0, "cat /run/guest.code").trim().to_owned()
}

fn read_metric(rack: &EmulatedRack, name: &str) -> f64 {
    let all = rack.run(0, &format!("wget -q -O - http://{METRICS_ADDRESS}/metrics"));
    let line = all.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{all}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn guest_pages_are_migrated_when_a_memory_block_is_removed() {
    let rack = start_rack_with_guest("memory_block");
    reserve_and_release_others(&rack);
    let (migrated, failed) = (
        read_metric(&rack, "tarn_agent_pages_migrated"),
        read_metric(&rack, "tarn_agent_page_migration_failures"),
    );
    let nodes = rack.run(0, LIST_NODES_SCRIPT);
    println!("{migrated} pages were migrated, {failed} migrations failed; pages are on nodes {nodes}");
    assert!(migrated > 0.0, "{}", rack.logs());
    assert_eq!(failed, 0.0, "{}", rack.logs());
    assert!(nodes.trim().starts_with('N') && !nodes.contains("N0="), "{nodes}");
    rack.run(0, "vmm-plugin stop guest --timeout 10m");
    assert_eq!(wait_for_exit_code(&rack), "0", "{}", console_output(&rack));
    assert!(console_output(&rack).contains("SUMS END"), "{}", console_output(&rack));
    rack.wait_all_slices_free();
}

#[test]
fn device_dax_guest_keeps_data_until_forced_release() {
    let rack = start_rack_with_guest("dax");
    reserve_and_release_others(&rack);
    rack.tarn("release guest --force --reason test");
    assert_eq!(wait_for_exit_code(&rack), "20", "{}", console_output(&rack));
    assert!(console_output(&rack).contains("the rack revoked it"), "{}", console_output(&rack));
    rack.wait_all_slices_free();
}
