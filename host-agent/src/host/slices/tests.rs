//! States of a slice on a simulated /sys. Real kernels are tested in the rack in a box.

use rustix::fs::makedev;

use super::{super::sysfs::made_up::MadeUp, *};

const GIB: u64 = 1 << 30;
const BASE: u64 = 43 * GIB;

/// A region of four slices, with the device over all of it emptied.
fn region(made_up: &MadeUp) -> Region {
    let files = [("dax_region/create", ""), ("dax_region/delete", ""), ("dax1.0/size", "0")];
    made_up.files("region", &files);
    made_up.files("region/dax1.0", &[("dev", "253:0"), ("align", "2097152"), ("target_node", "2")]);
    Region { name: "region1".into(), base: BASE, bytes: Bytes::gib(4), folder: made_up.path("region") }
}

/// A device over a stretch, counted in GiB from the start of the region.
fn add(made_up: &MadeUp, name: &str, start: u64, gib: u64, driver: Option<Driver>) {
    let (first, last) = (BASE + start * GIB, BASE + (start + gib) * GIB - 1);
    let device = format!("region/{name}");
    made_up.files(&device, &[("size", &(gib * GIB).to_string()), ("align", "2097152"), ("mapping", "")]);
    made_up.files(&device, &[("dev", "253:7")]);
    made_up.files(&device, &[("resource", &format!("{first:#x}"))]);
    made_up.files(&format!("{device}/mapping0"), &[("end", &format!("{last:#x}"))]);
    if let Some(driver) = driver {
        made_up.link(&format!("{device}/driver"), driver.folder().to_str().unwrap());
    }
}

fn blocks_of_128_mib(made_up: &MadeUp, first: u64, count: u64, state: &str) {
    made_up.files(blocks::FOLDER, &[("block_size_bytes", "8000000")]);
    for number in first..first + count {
        made_up.files(&format!("{}/memory{number}", blocks::FOLDER), &[("state", state)]);
    }
}

#[test]
fn seed_device_over_whole_region_is_emptied() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    add(&made_up, "dax1.0", 0, 4, None);
    Slices::open(&made_up.sysfs, region).unwrap();
    assert!(made_up.sysfs.text("region/dax1.0/size").unwrap().starts_with('0'));
}

#[test]
fn empty_device_of_killed_agent_is_removed() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    add(&made_up, "dax1.2", 0, 1, None);
    made_up.files("region/dax1.2", &[("size", "0")]);
    Slices::open(&made_up.sysfs, region).unwrap();
    assert_eq!(made_up.sysfs.text("region/dax_region/delete").unwrap(), "dax1.2");
}

#[test]
fn present_slices_are_found_with_their_driver() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    add(&made_up, "dax1.1", 2, 1, Some(Driver::DeviceDax));
    add(&made_up, "dax1.4", 0, 1, None);
    let slices = Slices::open(&made_up.sysfs, region).unwrap();
    let found = |device: &str, driver| Found { device: device.into(), number: makedev(253, 7), driver };
    let expected = [(0, found("dax1.4", None)), (2, found("dax1.1", Some(Driver::DeviceDax)))];
    assert_eq!(slices.found().unwrap(), BTreeMap::from(expected));
    assert_eq!((slices.count(), slices.node(), slices.align()), (4, 2, Bytes::gib(1)));
}

#[test]
fn foreign_device_is_not_changed() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    add(&made_up, "dax1.3", 1, 2, Some(Driver::DeviceDax));
    let error = Slices::open(&made_up.sysfs, region).unwrap_err().to_string();
    assert!(
        error.starts_with("dax1.3 has memory of the region, is bound to device_dax and no slice"),
        "{error}"
    );
}

#[test]
fn memory_with_online_block_is_never_unbound() {
    let made_up = MadeUp::new(&[("bus/dax/drivers/kmem/unbind", "")]);
    let region = region(&made_up);
    add(&made_up, "dax1.1", 1, 1, Some(Driver::Kmem));
    blocks_of_128_mib(&made_up, 44 * 8, 8, "offline");
    made_up.files(&format!("{}/memory357", blocks::FOLDER), &[("state", "going-offline")]);
    let slices = Slices::open(&made_up.sysfs, region).unwrap();
    let error = slices.remove(1).unwrap_err();
    assert!(matches!(&error, SliceError::Online { online, .. } if *online == ["memory357"]), "{error}");
    assert_eq!(made_up.sysfs.text("bus/dax/drivers/kmem/unbind").unwrap(), "", "it was unbound");
    assert_eq!(slices.blocks(1).unwrap().len(), 8);
}

#[test]
fn misaligned_region_is_rejected_with_numbers() {
    assert_eq!(alignment(43 * GIB).unwrap(), Bytes::gib(1));
    assert_eq!(alignment(43 * GIB + (256 << 20)).unwrap(), Bytes::mib(2));
    let error = alignment(43 * GIB + (1 << 20)).unwrap_err().to_string();
    assert!(error.contains("0xac0100000") && error.contains("2MiB"), "{error}");
}

#[test]
fn slice_index_out_of_range_is_rejected() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    let slices = Slices::open(&made_up.sysfs, region).unwrap();
    assert_eq!(slices.range(3).unwrap(), BASE + 3 * GIB..BASE + 4 * GIB);
    let error = slices.remove(4).unwrap_err().to_string();
    assert_eq!(error, "slice index 4 is beyond region1, which has 4 slices");
}

#[test]
fn blocks_with_auto_online_policy_are_not_added() {
    let made_up = MadeUp::new(&[]);
    let region = region(&made_up);
    blocks_of_128_mib(&made_up, 0, 1, "online");
    made_up.files(blocks::FOLDER, &[("auto_online_blocks", "online_movable")]);
    let slices = Slices::open(&made_up.sysfs, region.clone()).unwrap();
    let error = slices.ensure_kmem(0).unwrap_err().to_string();
    assert!(error.contains("is online_movable") && error.contains("memhp_default_state=offline"), "{error}");
    made_up.files(blocks::FOLDER, &[("block_size_bytes", "80000000"), ("auto_online_blocks", "offline")]);
    let error = slices.ensure_kmem(0).unwrap_err().to_string();
    assert!(error.starts_with("memory blocks have 2GiB, which does not divide a slice of 1GiB"), "{error}");
}

/// Every state that a killed agent can leave, and each wish.
#[test]
fn next_step_progresses_from_any_partial_state() {
    let device = |driver, align: Bytes| Device {
        name: "dax1.1".into(),
        extent: Extent::At(BASE..BASE + GIB),
        align: align.get(),
        number: 0,
        driver,
    };
    let (dax, kmem) = (Some(Driver::DeviceDax), Some(Driver::Kmem));
    let (large, small) = (Bytes::gib(1), Bytes::mib(2));
    let step = |device: Option<Device>, wanted| next(device.as_ref(), wanted, large, false);
    let made = |device: Device, wanted| next(Some(&device), wanted, large, true);
    for wanted in [dax, kmem] {
        assert_eq!(step(None, wanted), Some(Step::Create));
        assert_eq!(step(Some(device(wanted, large)), wanted), None);
    }
    assert_eq!(step(None, None), None);
    assert_eq!(made(device(None, small), dax), Some(Step::Align));
    assert_eq!(made(device(None, large), dax), Some(Step::Bind(Driver::DeviceDax)));
    assert_eq!(made(device(None, small), kmem), Some(Step::Bind(Driver::Kmem)));
    for wanted in [dax, kmem] {
        assert_eq!(step(Some(device(None, large)), wanted), Some(Step::Delete), "somebody may map it still");
    }
    assert_eq!(step(Some(device(kmem, small)), dax), Some(Step::Unbind(Driver::Kmem)));
    assert_eq!(step(Some(device(dax, large)), kmem), Some(Step::Unbind(Driver::DeviceDax)));
    assert_eq!(step(Some(device(kmem, small)), None), Some(Step::Unbind(Driver::Kmem)));
    assert_eq!(step(Some(device(None, small)), None), Some(Step::Delete));
}

#[test]
fn bound_slice_is_not_bound_again() {
    let made_up = MadeUp::new(&[("bus/dax/drivers/device_dax/new_id", "")]);
    let region = region(&made_up);
    add(&made_up, "dax1.1", 1, 1, Some(Driver::DeviceDax));
    let slices = Slices::open(&made_up.sysfs, region).unwrap();
    assert_eq!(slices.ensure_devdax(1).unwrap().device, "dax1.1");
    assert_eq!(made_up.sysfs.text("bus/dax/drivers/device_dax/new_id").unwrap(), "", "it was bound again");
}

/// The pipe has no reader: opening it for writing blocks, like pinned pages.
#[test]
fn stuck_slice_does_not_block_others() {
    let drivers = ["device_dax/remove_id", "kmem/unbind"].map(|file| format!("bus/dax/drivers/{file}"));
    let made_up = MadeUp::new(&drivers.each_ref().map(|file| (file.as_str(), "")));
    let region = region(&made_up);
    add(&made_up, "dax1.1", 1, 1, Some(Driver::DeviceDax));
    add(&made_up, "dax1.2", 2, 1, Some(Driver::Kmem));
    blocks_of_128_mib(&made_up, 45 * 8, 8, "offline");
    let pipe = made_up.path("bus/dax/drivers/device_dax/unbind");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut slices = Slices::open(&made_up.sysfs, region).unwrap();
    slices.steps = DetachedSteps::within(std::time::Duration::from_millis(50));
    let stuck = |slices: &Slices| {
        let error = slices.remove(1).unwrap_err();
        assert!(matches!(&error, SliceError::Stuck { device, .. } if device == "dax1.1"), "{error}");
    };
    stuck(&slices);
    assert!(slices.ensure_devdax(1).is_err(), "it is bound, but not for long");
    // As the kernel shows it while it waits: there is no driver any more, and deleting would wait for the same pages.
    std::fs::remove_file(made_up.path("region/dax1.1/driver")).unwrap();
    stuck(&slices);
    assert_ne!(made_up.sysfs.text("region/dax1.1/size").unwrap(), "0");
    assert!(slices.ensure_devdax(1).is_err(), "it was bound again");
    slices.remove(2).unwrap_err(); // this tree does not do what is written
    assert_eq!(made_up.sysfs.text("bus/dax/drivers/kmem/unbind").unwrap(), "dax1.2");
    assert_eq!(slices.changing(), 1);
    drop(std::fs::File::open(pipe).unwrap()); // the pages are not pinned any more
    while slices.changing() > 0 {
        std::thread::yield_now();
    }
    let _ = slices.remove(1); // this tree deletes nothing
    assert_eq!(made_up.sysfs.text("region/dax_region/delete").unwrap(), "dax1.1");
}
