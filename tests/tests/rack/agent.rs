//! Agents that are killed in the middle of what they do to their kernel's devices, in a rack in a box: each time right before one of
//! their changes of sysfs, from the first to the last, while a VM beside it keeps its bytes.

use emulated_host::rack::RackPlan;
use tests::{
    linux_guests::bed,
    real_rack::{RealRack, plan},
};

/// Scrubs: among hosts that do nothing, the manager takes the first.
const SCRUBBER: usize = 0;
/// Has the VMs.
const OWNER: usize = 1;
/// What a VM writes into its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Memory blocks of a slice.
const BLOCKS: usize = 8;
/// What is written to have a device-dax device of a slice, and to have it no more.
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
/// Has the agent that runs now killed before its n-th change of sysfs, as counted for each call.
const ARM: &str = r"
until pid=$(pidof host-agent); do sleep 0.05; done
strace -f -y -p $pid -o /run/steps -e trace=pwrite64 -e inject=pwrite64:signal=KILL:when=STEP 2> /dev/null &
echo $! > /run/strace.pid
while grep -q '^TracerPid:.0$' /proc/$pid/task/*/status; do sleep 0.05; done
";
/// Says before which one it was killed, or lets it go.
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

/// What agents on these hosts were killed before, each at its step of whatever is done meanwhile.
fn killed(rack: &RealRack, hosts: &[usize], step: u32, work: impl FnOnce()) -> Vec<String> {
    for host in hosts {
        rack.run(*host, &ARM.replace("STEP", &step.to_string()));
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
fn come_and_go(rack: &RealRack, step: u32) -> Vec<String> {
    let vm = format!("vm{step}");
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

/// All that agents were killed before.
fn kill_at_every_step(rack: &RealRack) -> Vec<String> {
    rack.reserve(OWNER, "stays", 1);
    rack.start_vm(OWNER, "stays", TOUCH_MIB);
    let mut all = Vec::new();
    for step in 1.. {
        assert!(step < STEPS_MAX, "there is an end to it: {all:#?}");
        let writes = come_and_go(rack, step);
        println!("step {step}: {writes:#?}");
        if writes.is_empty() {
            break;
        }
        all.extend(writes);
    }
    assert_eq!(rack.end_vm(OWNER, "stays"), [0; 0], "bytes of the VM that stayed");
    rack.until_free();
    assert_eq!(slices(rack), [0, 0]);
    all
}

/// In a rack of its own, and it is seen that they were killed before changes of all these kinds.
fn kill_before_every(backend: &str, kinds: &[&str]) -> Vec<String> {
    let rack = RealRack::start(with_strace(backend));
    let writes = kill_at_every_step(&rack);
    for kind in DAX.iter().chain(kinds) {
        assert!(writes.iter().any(|write| write.contains(kind)), "{kind}: {writes:#?}");
    }
    writes
}

#[test]
fn an_agent_killed_before_any_step_with_device_dax_completes_it_and_no_vm_loses_a_byte() {
    kill_before_every("dax", &[]);
}

#[test]
fn an_agent_killed_before_any_step_with_memory_blocks_completes_it_and_no_vm_loses_a_byte() {
    let writes = kill_before_every("memory_block", &["/kmem/bind>", "/kmem/unbind>"]);
    for word in ["\"online_movable\"", "\"offline\""] {
        let kills = writes.iter().filter(|write| write.contains(word)).count();
        assert!(kills >= BLOCKS, "{kills} kills before a block went {word}");
    }
}
