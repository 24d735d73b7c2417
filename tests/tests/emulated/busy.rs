//! A memory block with a page that the kernel cannot move, in a rack in a box: the agent reports
//! it, nothing is lost, and everything else continues.

use tests::real_rack::{RealRack, Seen, plan};

/// Memory that a VM writes into its slice, in MiB.
const TOUCH_MIB: u32 = 16;
/// Memory blocks of a slice.
const BLOCKS: u32 = 8;
/// Puts a page of the pool's node into a pipe, where it stays in the memory that it is in.
const HOLD: &str = "
node=$(tr ',-' '\\n' < /sys/devices/system/node/has_memory | tail -n 1)
mkdir /busy
mount -t tmpfs -o size=1m,mpol=bind:$node busy /busy
head -c 4096 /dev/urandom > /busy/page
mkfifo /run/pipe
sleep 100000 <> /run/pipe > /dev/null 2>&1 &
echo $! > /run/holder
cat /busy/page > /run/pipe
";

/// The slice that is busy: the only one that is draining.
fn busy(rack: &RealRack) -> Seen {
    let number = rack.states().iter().position(|state| state == "draining").unwrap();
    let number = u32::try_from(number).unwrap();
    let seen = rack.kernel(0).into_iter().find(|((_, index), _)| *index == number);
    seen.unwrap_or_else(|| panic!("its device is gone: {}", rack.logs())).1
}

/// Returns the agent's message about the block, such as `memory350 does not go offline, 1 of its
/// pages are in use; 7 of 8 ...`.
fn refusals(rack: &RealRack) -> Vec<String> {
    let log = rack.host(0).agent_log();
    log.lines().filter(|line| line.contains("does not go offline")).map(str::to_owned).collect()
}

#[test]
fn a_busy_block_is_named_and_its_slice_stays_whole_until_it_is_let_go_while_others_come_and_go() {
    let rack = RealRack::start(plan(1, &[3], "memory_block"));
    rack.reserve(0, "busy", 1);
    rack.run(0, HOLD);
    rack.reserve(0, "stays", 1);
    rack.start_vm(0, "stays", TOUCH_MIB);

    rack.tarn("release busy");
    rack.until("the agent says which block is busy", |rack| !refusals(rack).is_empty());
    let said = refusals(&rack)[0].clone();
    println!("{said}");
    assert!(
        said.contains(", 1 of its pages are in use; 7 of 8 blocks had gone offline, put back: memory")
            && said.contains("given up after 20 s"),
        "{said}"
    );
    rack.until("its blocks are all back", |rack| busy(rack).blocks == BLOCKS);
    assert_eq!(busy(&rack).driver, "kmem");

    rack.reserve(0, "comes", 1);
    assert_eq!(rack.start_vm(0, "comes", TOUCH_MIB), [0; 0]);
    assert_eq!(rack.end_vm(0, "comes"), [0; 0]);
    rack.until("the slice beside it is free", |rack| rack.states().contains(&"free".to_owned()));
    assert_eq!(busy(&rack).driver, "kmem");

    rack.run(0, "kill $(cat /run/holder)");
    rack.until("the busy slice is free", |rack| {
        rack.states().iter().filter(|state| *state == "free").count() == 2
    });
    assert_eq!(rack.end_vm(0, "stays"), [0; 0], "its bytes");
    rack.until_free();
    assert!(rack.kernel(0).is_empty());
}
