//! Rack with an emulated host and stock Debian guests that write the same data to their local node and
//! to their pool node, and compare both. Their pool memory is moved to local memory while they write.

use std::time::Duration;

use emulated_host::Initrd;
use serde_json::Value;

use crate::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::{HUGE_PAGES_SCRIPT, artifacts},
    rack::programs_dir,
};

/// Version of the guest kernel.
const KERNEL_VERSION: &str = "6.12";
/// Memory of the host, in GiB, without CXL memory.
const HOST_GIB: u32 = 7;
/// Directory of the control sockets on the host.
const RUN_DIR: &str = "/run/guests";
/// Fills `$mib` MiB of each node with the same random data. Then each round writes 16 MiB to both nodes,
/// which is at most 10 % of the pool memory per second, and compares all data of both nodes.
const GUEST_SCRIPT: &str = r#"
mkdir /n0 /n1
mount -t tmpfs -o size=800m,mpol=bind:0 n0 /n0
mount -t tmpfs -o size=800m,mpol=bind:1 n1 /n1
dd if=/dev/urandom of=/n1/data bs=1M count=$mib 2> /dev/null
cp /n1/data /n0/data
echo FILLED
n=0
while :; do
  n=$((n + 1))
  dd if=/dev/urandom of=/block bs=1M count=16 2> /dev/null
  at=$(((n * 7 % (mib / 16)) * 16))
  for node in 0 1; do dd if=/block of=/n$node/data bs=1M seek=$at conv=notrunc 2> /dev/null; done
  if cmp -s /n0/data /n1/data; then echo "SAME $n"; else echo "DIFFERENT $n"; fi
  sleep 0.1
done
"#;

/// Times of a move of 1 GiB of pool memory, as the VMM reports them.
#[derive(Clone, Copy, Debug)]
pub struct RehomeTimes {
    /// Time for which the guest was paused at the end of the move.
    pub pause: Duration,
    /// Duration of the whole move.
    pub duration: Duration,
}

/// Starts a rack with one host, with one slice per guest. Each guest writes `data_mib` MiB to its slice, at
/// most 768.
pub fn start_rack(backend: &str, guests: u32, data_mib: u32) -> EmulatedRack {
    let (artifacts, folder) = (artifacts(), tempfile::tempdir().expect("a temporary folder is created"));
    let mut plan = plan(1, &[guests], backend);
    plan.hosts.memory_gib = HOST_GIB;
    plan.hosts.script.push_str(HUGE_PAGES_SCRIPT);
    plan.hosts.programs.push(programs_dir().join("vmm-plugin"));
    plan.hosts.files.push((artifacts.kernel_path(KERNEL_VERSION), "guest/kernel".to_owned()));
    let initrd = folder.path().join("initrd");
    let built = Initrd::for_guest(&artifacts, KERNEL_VERSION, &format!("mib={data_mib}\n{GUEST_SCRIPT}"));
    built.expect("the file system is created").pack(&initrd).expect("the initrd is packed");
    plan.hosts.files.push((initrd, "guest/initrd".to_owned()));
    EmulatedRack::start(plan)
}

/// Starts a guest with 1 GiB of pool memory, and waits until it has compared its data twice.
pub fn start_guest(rack: &EmulatedRack, vm: &str) {
    rack.tarn(&format!(
        "reserve --host h0 --vm {vm} --pool 1GiB --local 1200MiB --cores 1 --request-id {vm} --wait-ready"
    ));
    rack.tarn(&format!("commit {vm}"));
    rack.run(
        0,
        &format!(
            "(vmm-plugin run --uid 65534 --gid 65534 --vm {vm} --cpus 1 --kernel /guest/kernel --initrd /guest/initrd \
             --run-dir {RUN_DIR} --serial file=/run/{vm}.console \
             --cmdline 'console=ttyS0 quiet panic=-1 pci=off' 2> /run/{vm}.log) > /dev/null &"
        ),
    );
    wait_for_rounds(rack, vm, 2);
}

fn console_output(rack: &EmulatedRack, vm: &str) -> String {
    rack.run(0, &format!("cat /run/{vm}.console /run/{vm}.log; true"))
}

/// Waits until the guest has compared its data this many times. All comparisons must be successful.
pub fn wait_for_rounds(rack: &EmulatedRack, vm: &str, rounds: usize) {
    let done = |rack: &EmulatedRack| console_output(rack, vm).matches("SAME").count();
    let target = done(rack) + rounds;
    rack.wait_until(&format!("{vm} has compared its data"), |rack| done(rack) >= target);
    let output = console_output(rack, vm);
    assert!(!output.contains("DIFFERENT"), "{vm} has lost data: {output}");
}

/// Pauses or resumes a guest.
pub fn control_guest(rack: &EmulatedRack, vm: &str, command: &str) {
    rack.run(0, &format!("vmm-plugin {command} {vm} --run-dir {RUN_DIR}"));
}

/// Moves the pool memory of a guest to local memory. With the backend `memory_block`, the kernel moves
/// the memory, so that both times are 0.
pub fn rehome(rack: &EmulatedRack, vm: &str) -> RehomeTimes {
    let moved = rack.tarn_json(&format!("rehome {vm} --wait --timeout 5m"));
    assert_eq!((&moved["rehome"]["state"], &moved["slices"]), (&"done".into(), &Value::Array(Vec::new())));
    let reservation = moved["reservation"].as_str().expect("the reservation has an ID").to_owned();
    let log = rack.rack.hosts().as_slice()[0].agent_log();
    let is_result = |line: &&str| line.contains("moved pool memory") && line.contains(&reservation);
    let line = log.lines().rev().find(is_result).unwrap_or_else(|| panic!("no result in {log}"));
    let time = |field: &str| {
        let value = line.split(&format!("{field}=")).nth(1).and_then(|rest| rest.split_whitespace().next());
        let micros = value.and_then(|value| value.parse().ok());
        Duration::from_micros(micros.unwrap_or_else(|| panic!("no {field} in {line}")))
    };
    RehomeTimes { pause: time("pause_us"), duration: time("duration_us") }
}
