//! Test of a memory block with a page that the kernel cannot move, on an emulated host. The agent
//! must report this block, no data may be lost, and other VMs must not be affected.

use tests::emulated_rack::{EmulatedRack, KernelSlice, plan};

/// Memory that a VM writes to its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Number of memory blocks per slice.
const BLOCKS_PER_SLICE: u32 = 8;
/// Script that puts a page of the pool node into a pipe, which pins the page.
const PIN_PAGE_SCRIPT: &str = "
node=$(tr ',-' '\\n' < /sys/devices/system/node/has_memory | tail -n 1)
mkdir /busy
mount -t tmpfs -o size=1m,mpol=bind:$node busy /busy
head -c 4096 /dev/urandom > /busy/page
mkfifo /run/pipe
sleep 100000 <> /run/pipe > /dev/null 2>&1 &
echo $! > /run/holder
cat /busy/page > /run/pipe
";

/// Returns the busy slice, which is the only draining slice.
fn busy_slice(rack: &EmulatedRack) -> KernelSlice {
    let number = rack.slice_states().iter().position(|state| state == "draining").unwrap();
    let number = u32::try_from(number).unwrap();
    let slice = rack.kernel_slices(0).into_iter().find(|((_, index), _)| *index == number);
    slice.unwrap_or_else(|| panic!("the device is missing: {}", rack.logs())).1
}

/// Returns the log messages of the agent about the busy block, such as `cannot offline memory350,
/// 1 of its pages are in use; 7 of 8 ...`.
fn busy_messages(rack: &EmulatedRack) -> Vec<String> {
    let log = rack.host(0).agent_log();
    log.lines().filter(|line| line.contains("cannot offline memory")).map(str::to_owned).collect()
}

#[test]
fn busy_block_is_reported_and_its_slice_stays_online() {
    let rack = EmulatedRack::start(plan(1, &[3], "memory_block"));
    rack.reserve(0, "busy", 1);
    rack.run(0, PIN_PAGE_SCRIPT);
    rack.reserve(0, "stays", 1);
    rack.start_vm(0, "stays", TOUCH_MIB);

    rack.tarn("release busy");
    rack.wait_until("the agent reports the busy block", |rack| !busy_messages(rack).is_empty());
    let message = busy_messages(&rack)[0].clone();
    println!("{message}");
    assert!(
        message.contains(", 1 of its pages are in use; 7 of 8 blocks were offlined, restored: memory")
            && message.contains("timed out after 20 s"),
        "{message}"
    );
    rack.wait_until("all blocks of the slice are online", |rack| busy_slice(rack).blocks == BLOCKS_PER_SLICE);
    assert_eq!(busy_slice(&rack).driver, "kmem");

    rack.reserve(0, "comes", 1);
    assert_eq!(rack.start_vm(0, "comes", TOUCH_MIB), [0; 0]);
    assert_eq!(rack.end_vm(0, "comes"), [0; 0]);
    rack.wait_until("the other slice is free", |rack| rack.slice_states().contains(&"free".to_owned()));
    assert_eq!(busy_slice(&rack).driver, "kmem");

    rack.run(0, "kill $(cat /run/holder)");
    rack.wait_until("the busy slice is free", |rack| {
        rack.slice_states().iter().filter(|state| *state == "free").count() == 2
    });
    assert_eq!(rack.end_vm(0, "stays"), [0; 0], "the data of the other VM was overwritten");
    rack.wait_all_slices_free();
    assert!(rack.kernel_slices(0).is_empty());
}
