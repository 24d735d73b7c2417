//! Slices of real CXL memory that move between real hosts, in a rack in a box: with bytes of a VM's in them, by both ways in which a
//! kernel can have them.

use tests::real_rack::{RealRack, plan};

/// How many slices the device has.
const SLICES: u32 = 4;
/// Memory that a VM writes into each slice, in MiB.
const TOUCH_MIB: u32 = 64;
/// Memory that a VM writes to use every slice where the kernel chooses pages: more than fits into
/// three.
const FILL_MIB: u32 = 800;

/// Moves every slice from host to host in turn, with VMs that write an amount of memory.
fn move_all(rack: &RealRack, driver: &str, blocks: u32, touch_mib: &[u32]) {
    let mut found = Vec::new();
    for (round, touch_mib) in touch_mib.iter().copied().enumerate() {
        let host = round % 2;
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
        let chosen = blocks > 0 && touch_mib < FILL_MIB; // by the kernel
        let (written, least) = (rack.not_zero(0).len(), if chosen { 1 } else { SLICES as usize });
        assert!(written >= least, "its bytes are in {written} slices");
        assert_eq!(rack.end_vm(host, &vm), [0; 0], "another's bytes over its own");
        rack.until_free();
    }
    assert_eq!(found, [0; 0], "bytes of the VM before");
}

#[test]
fn every_slice_moves_there_and_back_twice_as_device_dax_and_arrives_as_zeros() {
    let rack = RealRack::start(plan(2, &[SLICES], "dax"));
    let (looks, ()) = rack.watched(|| move_all(&rack, "device_dax", 0, &[TOUCH_MIB; 4]));
    println!("no slice was on two hosts in {looks} looks");
    assert!(looks > 10);
    assert!(rack.kernel(0).is_empty() && rack.kernel(1).is_empty());
}

#[test]
fn every_slice_moves_there_and_back_as_memory_blocks_and_arrives_as_zeros() {
    let rack = RealRack::start(plan(2, &[SLICES], "memory_block"));
    let (looks, ()) = rack.watched(|| move_all(&rack, "kmem", 8, &[FILL_MIB, FILL_MIB, TOUCH_MIB]));
    println!("no slice was on two hosts in {looks} looks");
    assert!(looks > 10);
    assert!(rack.kernel(0).is_empty() && rack.kernel(1).is_empty());
}

/// A node reserves its last pages: further memory of a VM is on local memory, and no process is
/// killed.
#[test]
fn a_vm_on_memory_blocks_may_fill_all_of_its_memory() {
    let rack = RealRack::start(plan(1, &[1], "memory_block"));
    rack.reserve(0, "full", 1);
    assert_eq!(rack.start_vm(0, "full", 1024), [0; 0]);
    assert_eq!(rack.end_vm(0, "full"), [0; 0]);
    rack.until_free();
}
