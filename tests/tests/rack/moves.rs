//! Slices of real CXL memory that move between real hosts, in a rack in a box: with bytes of a VM's in them, by both ways in which a
//! kernel can have them.

use tests::real_rack::{RealRack, plan};

/// How many slices the device has.
const SLICES: u32 = 4;
/// What a VM writes into each slice that it maps, in MiB.
const TOUCH_MIB: u32 = 64;
/// What it writes into each file, in MiB, where the kernel chooses in which of the slices that is: more than fits into three.
const TOUCH_EVERY_SLICE_MIB: u32 = 800;

/// Moves every slice there and back, twice.
fn move_all(rack: &RealRack, driver: &str, blocks: u32, touch_mib: u32) {
    let mut found = Vec::new();
    for (round, host) in [0, 1, 0, 1].into_iter().enumerate() {
        let vm = format!("vm{round}");
        rack.reserve(host, &vm, SLICES);
        assert_eq!(rack.not_zero(0), [0; 0], "seen from outside");
        found.extend(rack.start_vm(host, &vm, touch_mib));
        let kernels = [rack.kernel(host), rack.kernel(1 - host)];
        assert_eq!((kernels[0].len(), kernels[1].len()), (SLICES as usize, 0), "{kernels:?}");
        assert!(
            kernels[0].values().all(|seen| seen.driver == driver && seen.blocks == blocks),
            "{kernels:?}"
        );
        assert_eq!(rack.not_zero(0).len(), SLICES as usize, "its bytes are in every slice");
        assert_eq!(rack.end_vm(host, &vm), [0; 0], "another's bytes over its own");
        rack.until_free();
    }
    assert_eq!(found, [0; 0], "bytes of the VM before");
}

#[test]
fn every_slice_moves_there_and_back_twice_as_device_dax_and_arrives_as_zeros() {
    let rack = RealRack::start(plan(2, &[SLICES], "dax"));
    let (looks, ()) = rack.watched(|| move_all(&rack, "device_dax", 0, TOUCH_MIB));
    println!("no slice was on two hosts in {looks} looks");
    assert!(looks > 10);
    assert!(rack.kernel(0).is_empty() && rack.kernel(1).is_empty());
}

#[test]
fn every_slice_moves_there_and_back_twice_as_memory_blocks_and_arrives_as_zeros() {
    let rack = RealRack::start(plan(2, &[SLICES], "memory_block"));
    let (looks, ()) = rack.watched(|| move_all(&rack, "kmem", 8, TOUCH_EVERY_SLICE_MIB));
    println!("no slice was on two hosts in {looks} looks");
    assert!(looks > 10);
    assert!(rack.kernel(0).is_empty() && rack.kernel(1).is_empty());
}
