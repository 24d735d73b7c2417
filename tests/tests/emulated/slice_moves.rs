//! Tests of slices of CXL memory that move between emulated hosts after a VM has written data to
//! them, with both backends.

use tests::emulated_rack::{EmulatedRack, SliceLocation, plan};

/// Number of slices on the device.
const SLICES_PER_DEVICE: u32 = 2;
/// Memory that a VM writes to each slice, in MiB.
const TOUCH_MIB: u32 = 64;
/// Memory per slice, in MiB, that makes a VM use both slices if the kernel chooses the pages. The
/// total for two slices does not fit into one.
const VM_FILL_MIB: u32 = 800;

/// Moves all slices between two hosts in each round. The VM of a round writes the given amount of
/// memory per slice.
fn move_all_slices(rack: &EmulatedRack, driver: &str, blocks: u32, touch_mib: &[u32]) {
    let mut dirty = Vec::new();
    for (round, touch_mib) in touch_mib.iter().copied().enumerate() {
        let host = round % 2;
        let vm = format!("vm{round}");
        rack.reserve(host, &vm, SLICES_PER_DEVICE);
        assert_eq!(rack.nonzero_slices(0), [0; 0], "the device must be zero");
        dirty.extend(rack.start_vm(host, &vm, touch_mib));
        let kernels = [rack.kernel_slices(host), rack.kernel_slices(1 - host)];
        assert_eq!((kernels[0].len(), kernels[1].len()), (SLICES_PER_DEVICE as usize, 0), "{kernels:?}");
        assert!(
            kernels[0].values().all(|slice| slice.driver == driver && slice.blocks == blocks),
            "{kernels:?}"
        );
        // With memory blocks, the kernel chooses the slices that a VM uses.
        let is_kernel_choice = blocks > 0 && touch_mib < VM_FILL_MIB;
        let (written, minimum) =
            (rack.nonzero_slices(0).len(), if is_kernel_choice { 1 } else { SLICES_PER_DEVICE as usize });
        assert!(written >= minimum, "{written} slices contain data: must be at least {minimum}");
        assert_eq!(rack.end_vm(host, &vm), [0; 0], "found data of another VM in the slices");
        rack.wait_all_slices_free();
    }
    assert_eq!(dirty, [0; 0], "found data of the previous VM");
}

#[test]
fn slices_move_between_hosts_zeroed_with_device_dax() {
    let rack = EmulatedRack::start(plan(2, &[SLICES_PER_DEVICE], "dax"));
    let (checks, ()) = rack.with_owner_watch(|| move_all_slices(&rack, "device_dax", 0, &[TOUCH_MIB; 3]));
    println!("no slice was on two hosts in {checks} checks");
    assert!(checks > 10);
    assert!(rack.kernel_slices(0).is_empty() && rack.kernel_slices(1).is_empty());
}

#[test]
fn slices_move_between_hosts_zeroed_with_memory_blocks() {
    let rack = EmulatedRack::start(plan(2, &[SLICES_PER_DEVICE], "memory_block"));
    let (checks, ()) =
        rack.with_owner_watch(|| move_all_slices(&rack, "kmem", 8, &[VM_FILL_MIB, VM_FILL_MIB, TOUCH_MIB]));
    println!("no slice was on two hosts in {checks} checks");
    assert!(checks > 10);
    assert!(rack.kernel_slices(0).is_empty() && rack.kernel_slices(1).is_empty());
}

/// The memory of a VM is on one device. The first device is too small, which is also necessary because
/// QEMU emulates each access to the first of two devices as MMIO, so that scrubbing a slice takes minutes.
#[test]
fn vm_uses_the_device_with_enough_slices() {
    let rack = EmulatedRack::start(plan(1, &[1, 2], "dax"));
    rack.reserve(0, "vm", 2);
    let slices: Vec<SliceLocation> = rack.kernel_slices(0).into_keys().collect();
    assert_eq!(slices, [("0x7a1".to_owned(), 0), ("0x7a1".to_owned(), 1)]);
    assert_eq!(rack.start_vm(0, "vm", TOUCH_MIB), [0; 0]);
    assert_eq!([rack.nonzero_slices(0), rack.nonzero_slices(1)], [vec![], vec![0, 1]]);
    assert_eq!(rack.end_vm(0, "vm"), [0; 0]);
    rack.wait_all_slices_free();
    rack.assert_devices_zeroed();
}

/// The kernel reserves the last pages of a node. The VM must then use local memory, and no process
/// may be killed.
#[test]
fn vm_on_memory_blocks_can_fill_all_memory() {
    let rack = EmulatedRack::start(plan(1, &[1], "memory_block"));
    rack.reserve(0, "full", 1);
    assert_eq!(rack.start_vm(0, "full", 1024), [0; 0]);
    assert_eq!(rack.end_vm(0, "full"), [0; 0]);
    rack.wait_all_slices_free();
}
