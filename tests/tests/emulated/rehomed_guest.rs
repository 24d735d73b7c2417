//! Tests of moves of pool memory to local memory on emulated hosts: with a stock Debian guest on
//! device-dax slices, and with a VMM that does not support moves on memory blocks.

use tests::{
    emulated_rack::{EmulatedRack, plan},
    rehomed_guests::{rehome, start_guest, start_rack, wait_for_rounds},
};

/// Data of the Debian guest in its slice, in MiB.
const DATA_MIB: u32 = 48;
/// Memory per slice that the VM on memory blocks writes, in MiB.
const TOUCH_MIB: u32 = 600;

#[test]
fn guest_on_dax_keeps_its_data_when_its_pool_memory_is_moved() {
    let rack = start_rack("dax", 1, DATA_MIB);
    start_guest(&rack, "v");
    assert_eq!(rack.nonzero_slices(0), [0]);
    println!("{:?}", rehome(&rack, "v"));
    rack.wait_all_slices_free();
    assert_eq!(rack.nonzero_slices(0), [0; 0], "a freed slice contains data");
    assert!(rack.kernel_slices(0).is_empty());
    wait_for_rounds(&rack, "v", 2);
}

fn rehome_state(rack: &EmulatedRack, vm: &str) -> String {
    rack.tarn_json(&format!("describe vm {vm}"))["rehome"]["state"].as_str().unwrap_or_default().to_owned()
}

/// The kernel moves the pages, so the VMM needs no control socket. The slices can then be removed,
/// although the process still maps its memory files.
#[test]
fn kernel_moves_the_memory_of_any_vmm_on_memory_blocks() {
    let mut plan = plan(1, &[2], "memory_block");
    plan.hosts.memory_gib = 5;
    let rack = EmulatedRack::start(plan);
    rack.reserve(0, "v", 2);
    assert_eq!(rack.start_vm(0, "v", TOUCH_MIB), [0; 0]);
    assert_ne!(rack.nonzero_slices(0), [0; 0]);
    rack.tarn("rehome v --wait --timeout 5m");
    assert_eq!(rehome_state(&rack, "v"), "done");
    rack.wait_all_slices_free();
    assert!(rack.kernel_slices(0).is_empty());
    assert_eq!(rack.nonzero_slices(0), [0; 0], "a freed slice contains data");
    assert_eq!(rack.end_vm(0, "v"), [0; 0], "the VM has lost data");
}
