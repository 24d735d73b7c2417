//! A stock Debian guest on real CXL memory, in a host of a rack in a box: its data is unchanged
//! while other slices are added and removed, with both backends.

use emulated_host::Initrd;
use tests::{
    linux_guests::bed,
    rack::programs,
    real_rack::{RealRack, plan},
};

/// The kernel that the guest has.
const KERNEL: &str = "6.12";
/// Memory of a host that has a guest, in GiB.
const HOST_GIB: u32 = 3;
/// Where the agent's metrics are, in its host.
const METRICS: &str = "127.0.0.1:9751";
/// Writes 64 MiB on the pool's node, and reads all of it in each round, until the power button is
/// pressed.
const SUMS: &str = r#"
exec 3< /dev/input/event0
(head -c 1 <&3 > /dev/null; touch /pressed) &
mkdir /n1
mount -t tmpfs -o size=80m,mpol=bind:1 n1 /n1
head -c 67108864 /dev/urandom > /n1/data
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
/// Begins with the guest, and notes how its VMM ends.
const START: &str = r"
(vmm-plugin run --uid 65534 --gid 65534 --vm guest --cpus 1 --kernel /guest/kernel --initrd /guest/initrd --serial file=/run/guest.console \
  --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/guest.log; echo $? > /run/guest.code) > /dev/null &
";
/// On which nodes of its host the guest's slice is.
const NODES: &str =
    "grep tarn-slice /proc/$(pidof vmm-plugin)/numa_maps | grep -o 'N[0-9]*=' | sort -u | xargs";

/// A rack with a guest that has one slice. Another VM had one before it: memory that came first is used first.
fn with_guest(backend: &str) -> RealRack {
    let (bed, folder) = (bed(), tempfile::tempdir().unwrap());
    let initrd = folder.path().join("initrd");
    Initrd::for_guest(&bed, KERNEL, SUMS).unwrap().pack(&initrd).unwrap();
    let mut plan = plan(2, &[2], backend);
    plan.agent_toml_extra = format!("metrics_listen = {METRICS:?}\n");
    plan.hosts.memory_gib = HOST_GIB;
    plan.hosts.programs.push(programs().join("vmm-plugin"));
    let files = [(bed.kernel(KERNEL), "guest/kernel"), (initrd, "guest/initrd")];
    plan.hosts.files.extend(files.map(|(from, name)| (from, name.to_owned())));
    let rack = RealRack::start(plan);
    rack.reserve(0, "other0", 1);
    rack.tarn(
        "reserve --host h0 --vm guest --pool 1GiB --local 512MiB --cores 1 --request-id guest --wait-ready",
    );
    rack.tarn("commit guest");
    rack.run(0, START);
    goes_on(&rack, "from its start");
    rack
}

fn console(rack: &RealRack) -> String {
    rack.run(0, "cat /run/guest.console /run/guest.log; true")
}

fn rounds(rack: &RealRack) -> usize {
    console(rack).matches("ROUND").count()
}

/// It looks at all its bytes twice: once from beginning to end.
fn goes_on(rack: &RealRack, when: &str) {
    let before = rounds(rack);
    rack.until(&format!("the guest goes on {when}"), |rack| rounds(rack) >= before + 2);
    assert!(!console(rack).contains("WRONG"), "{when}: {}", console(rack));
}

/// The slice that another VM had goes, comes and goes again.
fn others_come_and_go(rack: &RealRack) {
    rack.tarn("release other0");
    rack.until("one slice is free", |rack| rack.states().contains(&"free".to_owned()));
    goes_on(rack, "beside a slice that went");
    rack.reserve(0, "other1", 1);
    goes_on(rack, "beside a slice that came");
    rack.tarn("release other1");
    rack.until("one slice is free", |rack| rack.states().contains(&"free".to_owned()));
    goes_on(rack, "beside a slice that went again");
}

/// How the guest's VMM ended.
fn code(rack: &RealRack) -> String {
    rack.until("the guest has ended", |rack| rack.run(0, "ls /run").contains("guest.code"));
    rack.run(0, "cat /run/guest.code").trim().to_owned()
}

fn metric(rack: &RealRack, name: &str) -> f64 {
    let all = rack.run(0, &format!("wget -q -O - http://{METRICS}/metrics"));
    let line = all.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{all}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn a_guests_pages_are_moved_when_a_memory_block_leaves_and_end_up_on_the_pools_node_unchanged() {
    let rack = with_guest("memory_block");
    others_come_and_go(&rack);
    let (back, astray) =
        (metric(&rack, "tarn_agent_pages_migrated"), metric(&rack, "tarn_agent_page_migration_failures"));
    let nodes = rack.run(0, NODES);
    println!("{back} pages were migrated back, {astray} were not; they are on {nodes}");
    assert!(back > 0.0, "{}", rack.logs());
    assert_eq!(astray, 0.0, "{}", rack.logs());
    assert!(nodes.trim().starts_with('N') && !nodes.contains("N0="), "{nodes}");
    rack.run(0, "vmm-plugin stop guest");
    assert_eq!(code(&rack), "0", "{}", console(&rack));
    assert!(console(&rack).contains("SUMS END"), "{}", console(&rack));
    rack.until_free();
}

#[test]
fn a_guest_on_device_dax_keeps_its_bytes_beside_slices_that_come_and_go_until_its_own_is_taken_by_force() {
    let rack = with_guest("dax");
    others_come_and_go(&rack);
    rack.tarn("release guest --force --reason test");
    assert_eq!(code(&rack), "20", "{}", console(&rack));
    assert!(console(&rack).contains("the rack revoked it"), "{}", console(&rack));
    rack.until_free();
}
