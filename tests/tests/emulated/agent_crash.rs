//! Crash tests of agents on emulated hosts. An agent is killed before each of its writes to sysfs in
//! turn. A second VM must keep its data, and each operation must complete after the restart. An agent that
//! was killed while it controlled DAMON must control DAMON again.

use emulated_host::rack::RackPlan;
use tests::{
    emulated_rack::{EmulatedRack, plan},
    linux_guests::artifacts,
};

/// Index of the host that scrubs slices. The manager chooses the first idle host.
const SCRUBBER_HOST: usize = 0;
/// Index of the host that runs the VMs.
const OWNER_HOST: usize = 1;
/// Memory that a VM writes to its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Number of memory blocks per slice.
const BLOCKS_PER_SLICE: usize = 8;
/// Sysfs files that an agent writes to create and delete the device-dax device of a slice.
const DAX_FILE_PATTERNS: [&str; 8] = [
    "/create>",
    "/mapping>",
    "/align>",
    "/device_dax/new_id>",
    "/device_dax/remove_id>",
    "/device_dax/unbind>",
    "/size>",
    "/delete>",
];
/// Upper bound on the number of writes of an agent, so that the test ends.
const TRACED_STEPS_MAX: u32 = 40;
/// Script that attaches strace to the agent. strace kills the agent before the n-th write of one of
/// the agent's threads to sysfs. STEP stands for n. FILES stands for options that limit the writes
/// to some files.
const ATTACH_STRACE_SCRIPT: &str = r"
until pid=$(pidof host-agent); do sleep 0.05; done
strace -f -y -p $pid -o /run/steps FILES -e trace=pwrite64 -e inject=pwrite64:signal=KILL:when=STEP 2> /dev/null &
echo $! > /run/strace.pid
while grep -q '^TracerPid:.0$' /proc/$pid/task/*/status; do sleep 0.05; done
";
/// strace options for the state files of the memory blocks of all slices.
const MEMORY_BLOCK_FILES: &str = r"$(
block=$((0x$(cat /sys/devices/system/memory/block_size_bytes)))
region=$(dirname /sys/bus/cxl/devices/region*/commit)
first=$(($(cat $region/resource) / block))
for n in $(seq $first $((first + $(cat $region/size) / block - 1))); do
  echo -P /sys/devices/system/memory/memory$n/state
done
)";
/// Script that waits until strace has killed the agent, for at most two minutes.
const AWAIT_KILL_SCRIPT: &str = r"
for attempt in $(seq 2400); do
  kill -0 $(cat /run/strace.pid) 2> /dev/null || exit 0
  sleep 0.05
done
echo strace has not killed the agent
exit 1
";
/// Script that prints the write that the agent was about to make when strace killed the agent. If
/// the agent still runs, detaches strace instead. Prints the state of the processes if they do not end.
const DETACH_STRACE_SCRIPT: &str = r"
pid=$(cat /run/strace.pid)
kill -INT $pid 2> /dev/null || grep 'pwrite64(' /run/steps | tail -n 1
for attempt in $(seq 2400); do
  kill -0 $pid 2> /dev/null || exit 0
  sleep 0.05
done
ps
for thread in /proc/$(pidof host-agent)/task/* /proc/$pid; do
  grep -E '^(Name|State|TracerPid)' $thread/status
  cat $thread/stack
done
echo w > /proc/sysrq-trigger
dmesg | tail -n 100
exit 1
";

/// Returns a plan of two hosts with strace, which share one device of two slices.
fn plan_with_strace(backend: &str) -> RackPlan {
    let mut plan = plan(2, &[2], backend);
    plan.hosts.programs.push(artifacts().tool_path("strace"));
    plan
}

/// strace options for the file that creates and removes the kernel's DAMON threads.
const DAMON_THREADS_FILE: &str = "-P /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";
/// strace options for the file that starts and stops DAMON and requests its result.
const DAMON_STATE_FILE: &str = "-P /sys/kernel/mm/damon/admin/kdamonds/0/state";
/// Values that an agent writes to these two files in each sampling interval.
const DAMON_VALUES: [&str; 5] = ["\"1\"", "\"on\"", "\"update_schemes_tried_regions\"", "\"off\"", "\"0\""];
/// Upper bound on the number of kills while an agent controls DAMON. The agent may use another thread for
/// each write, so several attempts can reach the same write.
const DAMON_KILLS_MAX: usize = 40;

/// strace options for the files that bind a slice to the kmem driver and unbind a slice.
const KMEM_FILES: &str = "-P /sys/bus/dax/drivers/kmem/bind -P /sys/bus/dax/drivers/kmem/unbind";

/// strace options for the files that unbind a device from the device-dax driver.
const DEVICE_DAX_FILES: &str =
    "-P /sys/bus/dax/drivers/device_dax/remove_id -P /sys/bus/dax/drivers/device_dax/unbind";

/// strace options for the files that remove the memory of a slice from its device and delete the
/// device.
const REMOVAL_FILES: &str = r"$(
cd /sys/bus/cxl/devices
for file in region*/dax_region*/dax*/size region*/dax_region*/dax_region/delete; do
  if [ -e $file ]; then echo -P $(readlink -f $file); fi
done
)";

/// Set of files whose writes are counted. strace counts the writes of each thread separately. There
/// are several sets because the agent uses separate threads to switch blocks, unbind drivers and
/// remove devices.
#[derive(Clone, Copy, Debug)]
enum WriteSet {
    All,
    Removal,
    DeviceDax,
    Kmem,
    Blocks,
    DamonThreads,
    DamonState,
}

impl WriteSet {
    fn strace_options(self) -> &'static str {
        match self {
            Self::All => "",
            Self::Removal => REMOVAL_FILES,
            Self::DeviceDax => DEVICE_DAX_FILES,
            Self::Kmem => KMEM_FILES,
            Self::Blocks => MEMORY_BLOCK_FILES,
            Self::DamonThreads => DAMON_THREADS_FILE,
            Self::DamonState => DAMON_STATE_FILE,
        }
    }
}

/// Point at which an agent is killed: before write `number`, counted from 1, to a set of files.
#[derive(Clone, Copy, Debug)]
struct TracedStep {
    write_set: WriteSet,
    number: u32,
}

/// Runs `work` while strace is attached to the agents of these hosts. Returns the write that each
/// killed agent was about to make.
fn kill_agents_during(
    rack: &EmulatedRack,
    hosts: &[usize],
    step: TracedStep,
    work: impl FnOnce(),
) -> Vec<String> {
    for host in hosts {
        rack.run(
            *host,
            &ATTACH_STRACE_SCRIPT
                .replace("FILES", step.write_set.strace_options())
                .replace("STEP", &step.number.to_string()),
        );
    }
    work();
    let writes = hosts.iter().map(|host| rack.run(*host, DETACH_STRACE_SCRIPT).trim().to_owned());
    writes.filter(|write| !write.is_empty()).collect()
}

/// Returns the number of slices in the kernels of the scrubber and of the owner.
fn count_kernel_slices(rack: &EmulatedRack) -> [usize; 2] {
    [SCRUBBER_HOST, OWNER_HOST].map(|host| rack.kernel_slices(host).len())
}

/// Starts and ends a VM while each agent is killed at this step. Returns the write that each killed
/// agent was about to make.
fn run_and_end_vm(rack: &EmulatedRack, step: TracedStep) -> Vec<String> {
    let vm = format!("vm{}{:?}", step.number, step.write_set).to_lowercase();
    let mut writes = kill_agents_during(rack, &[OWNER_HOST], step, || rack.reserve(OWNER_HOST, &vm, 1));
    assert_eq!(count_kernel_slices(rack), [0, 2], "{}", rack.logs());
    assert_eq!(rack.start_vm(OWNER_HOST, &vm, TOUCH_MIB), [0; 0], "found data of the previous VM");
    writes.extend(kill_agents_during(rack, &[OWNER_HOST, SCRUBBER_HOST], step, || {
        assert_eq!(rack.end_vm(OWNER_HOST, &vm), [0; 0], "found data of another VM in the slices");
        rack.wait_until("the slice of the VM is free", |rack| {
            rack.slice_states().contains(&"free".to_owned())
        });
    }));
    rack.wait_until("no host has the slice", |rack| count_kernel_slices(rack) == [0, 1]);
    writes
}

/// Kills agents at every step until no further write occurs. Returns the write that each killed
/// agent was about to make.
fn kill_at_every_step(rack: &EmulatedRack, write_set: WriteSet) -> Vec<String> {
    let mut all = Vec::new();
    for number in 1.. {
        assert!(number < TRACED_STEPS_MAX, "too many steps: {all:#?}");
        let writes = run_and_end_vm(rack, TracedStep { write_set, number });
        println!("step {number} of {write_set:?}: {writes:#?}");
        if writes.is_empty() {
            break;
        }
        all.extend(writes);
    }
    all
}

/// Starts a rack and kills agents before every write. A second VM runs during the whole test and
/// must keep its data.
fn kill_before_every_write(backend: &str, write_sets: &[WriteSet]) -> Vec<String> {
    let mut plan = plan_with_strace(backend);
    // Sampling writes to sysfs at any time, so that the number of writes would have no limit.
    plan.agent_toml_extra = "sample_interval_s = \"never\"\n".to_owned();
    let rack = EmulatedRack::start(plan);
    rack.reserve(OWNER_HOST, "stays", 1);
    rack.start_vm(OWNER_HOST, "stays", TOUCH_MIB);
    let writes: Vec<String> =
        write_sets.iter().flat_map(|write_set| kill_at_every_step(&rack, *write_set)).collect();
    assert_eq!(rack.end_vm(OWNER_HOST, "stays"), [0; 0], "the data of the second VM was overwritten");
    rack.wait_all_slices_free();
    assert_eq!(count_kernel_slices(&rack), [0, 0]);
    writes
}

/// Returns the number of writes that contain a pattern.
fn count_matching(writes: &[String], pattern: &str) -> usize {
    writes.iter().filter(|write| write.contains(pattern)).count()
}

#[test]
fn agent_killed_before_any_device_dax_write_recovers() {
    let writes = kill_before_every_write("dax", &[WriteSet::All, WriteSet::Removal]);
    for pattern in DAX_FILE_PATTERNS {
        assert!(count_matching(&writes, pattern) > 0, "{pattern}: {writes:#?}");
    }
}

#[test]
fn agent_killed_before_any_memory_block_write_recovers() {
    let write_sets =
        [WriteSet::All, WriteSet::Removal, WriteSet::DeviceDax, WriteSet::Kmem, WriteSet::Blocks];
    let writes = kill_before_every_write("memory_block", &write_sets);
    for pattern in DAX_FILE_PATTERNS.iter().chain(&["/kmem/bind>", "/kmem/unbind>"]) {
        assert!(count_matching(&writes, pattern) > 0, "{pattern}: {writes:#?}");
    }
    for word in ["\"online_movable\"", "\"offline\""] {
        assert!(
            count_matching(&writes, word) >= BLOCKS_PER_SLICE,
            "too few kills before {word}: {writes:#?}"
        );
    }
}

/// Waits until the manager has received a new sample of the VM whose accesses DAMON has sampled.
fn wait_for_damon_sample(rack: &EmulatedRack) {
    let sample = |rack: &EmulatedRack| {
        let vms = rack.tarn_json("get vms");
        let vm = vms.as_array().and_then(|vms| vms.first()).expect("the VM runs");
        (vm["access_source"] == "damon", vm["sampled_unix_ms"].as_u64())
    };
    let (_, before) = sample(rack);
    rack.wait_until("a sample by DAMON", |rack| {
        let (is_from_damon, at) = sample(rack);
        is_from_damon && at > before
    });
}

#[test]
fn agent_killed_while_it_controls_damon_controls_damon_again() {
    let mut plan = plan_with_strace("memory_block");
    plan.agent_toml_extra = "sample_interval_s = 2\n".to_owned();
    let rack = EmulatedRack::start(plan);
    rack.reserve(OWNER_HOST, "sampled", 1);
    rack.start_vm(OWNER_HOST, "sampled", TOUCH_MIB);
    wait_for_damon_sample(&rack);
    let mut missing = DAMON_VALUES.to_vec();
    let steps = (1..=4).flat_map(|number| {
        [WriteSet::DamonThreads, WriteSet::DamonState].map(|write_set| TracedStep { write_set, number })
    });
    for step in steps.cycle().take(DAMON_KILLS_MAX) {
        let writes = kill_agents_during(&rack, &[OWNER_HOST], step, || {
            rack.run(OWNER_HOST, AWAIT_KILL_SCRIPT);
        });
        println!("{step:?}: {writes:#?}");
        missing.retain(|value| count_matching(&writes, value) == 0);
        if missing.is_empty() {
            break;
        }
    }
    assert_eq!(missing, [""; 0], "the agent was not killed before it wrote these values");
    wait_for_damon_sample(&rack);
    assert_eq!(rack.end_vm(OWNER_HOST, "sampled"), [0; 0], "the data of the VM was overwritten");
    rack.wait_all_slices_free();
}
