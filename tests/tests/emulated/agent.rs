//! Agents that are killed during changes of their kernel's devices, in a rack in a box: before each
//! of their writes to sysfs in turn, while another VM keeps its data.

use emulated_host::rack::RackPlan;
use tests::{
    linux_guests::bed,
    real_rack::{RealRack, plan},
};

/// Scrubs: among hosts that do nothing, the manager takes the first.
const SCRUBBER: usize = 0;
/// Has the VMs.
const OWNER: usize = 1;
/// Memory that a VM writes into its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Memory blocks of a slice.
const BLOCKS: usize = 8;
/// Files written to create and delete a device-dax device of a slice.
const DAX: [&str; 8] = [
    "/create>",
    "/mapping>",
    "/align>",
    "/device_dax/new_id>",
    "/device_dax/remove_id>",
    "/device_dax/unbind>",
    "/size>",
    "/delete>",
];
/// More steps than any call of an agent's has.
const STEPS_MAX: u32 = 40;
/// Has the agent that runs now killed before the n-th change of sysfs, or of files among it, that one of its threads makes.
const ARM: &str = r"
until pid=$(pidof host-agent); do sleep 0.05; done
strace -f -y -p $pid -o /run/steps FILES -e trace=pwrite64 -e inject=pwrite64:signal=KILL:when=STEP 2> /dev/null &
echo $! > /run/strace.pid
while grep -q '^TracerPid:.0$' /proc/$pid/task/*/status; do sleep 0.05; done
";
/// The states of the memory blocks that slices have, or will have.
const BLOCK_FILES: &str = r"$(
block=$((0x$(cat /sys/devices/system/memory/block_size_bytes)))
region=$(dirname /sys/bus/cxl/devices/region*/commit)
first=$(($(cat $region/resource) / block))
for n in $(seq $first $((first + $(cat $region/size) / block - 1))); do
  echo -P /sys/devices/system/memory/memory$n/state
done
)";
/// Prints the write before which it was killed, or detaches from it.
const DISARM: &str = r"
pid=$(cat /run/strace.pid)
kill -INT $pid 2> /dev/null || grep 'pwrite64(' /run/steps | tail -n 1
while kill -0 $pid 2> /dev/null; do sleep 0.05; done
";

/// Two hosts that have strace, and share one device of two slices.
fn with_strace(backend: &str) -> RackPlan {
    let mut plan = plan(2, &[2], backend);
    plan.hosts.programs.push(bed().tool("strace"));
    plan
}

/// Files that bind a slice to its node's driver, and unbind it.
const KMEM_FILES: &str = "-P /sys/bus/dax/drivers/kmem/bind -P /sys/bus/dax/drivers/kmem/unbind";

/// Files that unbind a device from the device-dax driver.
const DEVICE_DAX_FILES: &str =
    "-P /sys/bus/dax/drivers/device_dax/remove_id -P /sys/bus/dax/drivers/device_dax/unbind";

/// Files that remove a slice's memory from its device, and delete the device.
const REMOVAL_FILES: &str = r"$(
cd /sys/bus/cxl/devices
for file in region*/dax_region*/dax*/size region*/dax_region*/dax_region/delete; do
  if [ -e $file ]; then echo -P $(readlink -f $file); fi
done
)";

/// Which changes of sysfs count. Each thread counts its own: blocks are switched, drivers unbound and devices removed in threads of
/// their own.
#[derive(Clone, Copy, Debug)]
enum Changes {
    All,
    OfRemoval,
    OfDeviceDax,
    OfKmem,
    OfBlocks,
}

impl Changes {
    fn files(self) -> &'static str {
        match self {
            Self::All => "",
            Self::OfRemoval => REMOVAL_FILES,
            Self::OfDeviceDax => DEVICE_DAX_FILES,
            Self::OfKmem => KMEM_FILES,
            Self::OfBlocks => BLOCK_FILES,
        }
    }
}

/// Before which of them an agent is killed.
#[derive(Clone, Copy, Debug)]
struct Step {
    of: Changes,
    number: u32,
}

/// Returns the writes before which agents on these hosts were killed, each at its step of the work.
fn killed(rack: &RealRack, hosts: &[usize], step: Step, work: impl FnOnce()) -> Vec<String> {
    for host in hosts {
        rack.run(*host, &ARM.replace("FILES", step.of.files()).replace("STEP", &step.number.to_string()));
    }
    work();
    let said = hosts.iter().map(|host| rack.run(*host, DISARM).trim().to_owned());
    said.filter(|write| !write.is_empty()).collect()
}

/// Slices on each host, as its kernel has them.
fn slices(rack: &RealRack) -> [usize; 2] {
    [SCRUBBER, OWNER].map(|host| rack.kernel(host).len())
}

/// A VM comes and goes beside another, and each agent is killed at the same step of all it does for that.
fn come_and_go(rack: &RealRack, step: Step) -> Vec<String> {
    let vm = format!("vm{}{:?}", step.number, step.of).to_lowercase();
    let mut writes = killed(rack, &[OWNER], step, || rack.reserve(OWNER, &vm, 1));
    assert_eq!(slices(rack), [0, 2], "{}", rack.logs());
    assert_eq!(rack.start_vm(OWNER, &vm, TOUCH_MIB), [0; 0], "bytes of the VM before");
    writes.extend(killed(rack, &[OWNER, SCRUBBER], step, || {
        assert_eq!(rack.end_vm(OWNER, &vm), [0; 0], "another's bytes over its own");
        rack.until("its slice is free", |rack| rack.states().contains(&"free".to_owned()));
    }));
    rack.until("nobody has it", |rack| slices(rack) == [0, 1]);
    writes
}

/// All that agents were killed before, from the first step until there are no more.
fn kill_at_every_step(rack: &RealRack, of: Changes) -> Vec<String> {
    let mut all = Vec::new();
    for number in 1.. {
        assert!(number < STEPS_MAX, "there is an end to it: {all:#?}");
        let writes = come_and_go(rack, Step { of, number });
        println!("step {number} of {of:?}: {writes:#?}");
        if writes.is_empty() {
            break;
        }
        all.extend(writes);
    }
    all
}

/// In a rack of its own, beside a VM that stays.
fn kill_before_every(backend: &str, changes: &[Changes]) -> Vec<String> {
    let rack = RealRack::start(with_strace(backend));
    rack.reserve(OWNER, "stays", 1);
    rack.start_vm(OWNER, "stays", TOUCH_MIB);
    let writes: Vec<String> = changes.iter().flat_map(|of| kill_at_every_step(&rack, *of)).collect();
    assert_eq!(rack.end_vm(OWNER, "stays"), [0; 0], "bytes of the VM that stayed");
    rack.until_free();
    assert_eq!(slices(&rack), [0, 0]);
    writes
}

/// How many of them are of a kind.
fn count(writes: &[String], kind: &str) -> usize {
    writes.iter().filter(|write| write.contains(kind)).count()
}

#[test]
fn an_agent_killed_before_any_step_with_device_dax_completes_it_and_no_vm_loses_a_byte() {
    let writes = kill_before_every("dax", &[Changes::All, Changes::OfRemoval]);
    for kind in DAX {
        assert!(count(&writes, kind) > 0, "{kind}: {writes:#?}");
    }
}

#[test]
fn an_agent_killed_before_any_step_with_memory_blocks_completes_it_and_no_vm_loses_a_byte() {
    let changes =
        [Changes::All, Changes::OfRemoval, Changes::OfDeviceDax, Changes::OfKmem, Changes::OfBlocks];
    let writes = kill_before_every("memory_block", &changes);
    for kind in DAX.iter().chain(&["/kmem/bind>", "/kmem/unbind>"]) {
        assert!(count(&writes, kind) > 0, "{kind}: {writes:#?}");
    }
    for word in ["\"online_movable\"", "\"offline\""] {
        assert!(count(&writes, word) >= BLOCKS, "before too few blocks went {word}: {writes:#?}");
    }
}
