//! States of a slice on a simulated /sys. Tests with emulated hosts use a real kernel.

use rustix::fs::makedev;

use super::{super::sysfs::fake::FakeSysfs, *};

const GIB: u64 = 1 << 30;
const REGION_BASE: u64 = 43 * GIB;

/// Adds a region of four slices with an empty seed device.
fn region(fake: &FakeSysfs) -> Region {
    let files = [("dax_region/create", ""), ("dax_region/delete", ""), ("dax1.0/size", "0")];
    fake.files("region", &files);
    fake.files("region/dax1.0", &[("dev", "253:0"), ("align", "2097152"), ("target_node", "2")]);
    Region { name: "region1".into(), base: REGION_BASE, bytes: Bytes::gib(4), folder: fake.path("region") }
}

/// Adds a dax device with `gib` GiB of memory that begins `start` GiB after the start of the
/// region.
fn add_device(fake: &FakeSysfs, name: &str, start: u64, gib: u64, driver: Option<Driver>) {
    let (first, last) = (REGION_BASE + start * GIB, REGION_BASE + (start + gib) * GIB - 1);
    let device = format!("region/{name}");
    fake.files(&device, &[("size", &(gib * GIB).to_string()), ("align", "2097152"), ("mapping", "")]);
    fake.files(&device, &[("dev", "253:7")]);
    fake.files(&device, &[("resource", &format!("{first:#x}"))]);
    fake.files(&format!("{device}/mapping0"), &[("end", &format!("{last:#x}"))]);
    if let Some(driver) = driver {
        fake.link(&format!("{device}/driver"), driver.folder().to_str().unwrap());
    }
}

/// Adds memory blocks of 128 MiB with consecutive numbers; `first` is the address divided by 128
/// MiB.
fn add_128_mib_blocks(fake: &FakeSysfs, first: u64, count: u64, state: &str) {
    fake.files(blocks::MEMORY_BLOCKS_FOLDER, &[("block_size_bytes", "8000000")]);
    for number in first..first + count {
        fake.files(&format!("{}/memory{number}", blocks::MEMORY_BLOCKS_FOLDER), &[("state", state)]);
    }
}

#[test]
fn seed_device_over_whole_region_is_emptied() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    add_device(&fake, "dax1.0", 0, 4, None);
    Slices::open(&fake.sysfs, region).unwrap();
    assert!(fake.sysfs.text("region/dax1.0/size").unwrap().starts_with('0'));
}

#[test]
fn empty_device_of_killed_agent_is_removed() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    add_device(&fake, "dax1.2", 0, 1, None);
    fake.files("region/dax1.2", &[("size", "0")]);
    Slices::open(&fake.sysfs, region).unwrap();
    assert_eq!(fake.sysfs.text("region/dax_region/delete").unwrap(), "dax1.2");
}

#[test]
fn present_slices_are_listed_with_their_drivers() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    add_device(&fake, "dax1.1", 2, 1, Some(Driver::DeviceDax));
    add_device(&fake, "dax1.4", 0, 1, None);
    let slices = Slices::open(&fake.sysfs, region).unwrap();
    let slice =
        |device: &str, driver| PresentSlice { device: device.into(), number: makedev(253, 7), driver };
    let expected = [(0, slice("dax1.4", None)), (2, slice("dax1.1", Some(Driver::DeviceDax)))];
    assert_eq!(slices.present_slices().unwrap(), BTreeMap::from(expected));
    assert_eq!((slices.count(), slices.node(), slices.align()), (4, 2, Bytes::gib(1)));
}

#[test]
fn foreign_device_is_not_changed() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    add_device(&fake, "dax1.3", 1, 2, Some(Driver::DeviceDax));
    let error = Slices::open(&fake.sysfs, region).unwrap_err().to_string();
    assert!(
        error.starts_with("dax1.3 uses memory of the region, is bound to device_dax and is not a slice"),
        "{error}"
    );
}

#[test]
fn slice_with_online_block_is_not_unbound() {
    let fake = FakeSysfs::new(&[("bus/dax/drivers/kmem/unbind", "")]);
    let region = region(&fake);
    add_device(&fake, "dax1.1", 1, 1, Some(Driver::Kmem));
    add_128_mib_blocks(&fake, 44 * 8, 8, "offline");
    fake.files(&format!("{}/memory357", blocks::MEMORY_BLOCKS_FOLDER), &[("state", "going-offline")]);
    let slices = Slices::open(&fake.sysfs, region).unwrap();
    let error = slices.remove(1).unwrap_err();
    assert!(matches!(&error, SliceError::BlocksOnline { online, .. } if *online == ["memory357"]), "{error}");
    assert_eq!(fake.sysfs.text("bus/dax/drivers/kmem/unbind").unwrap(), "", "the device was unbound");
    assert_eq!(slices.blocks(1).unwrap().len(), 8);
}

#[test]
fn misaligned_region_is_rejected() {
    assert_eq!(alignment(43 * GIB).unwrap(), Bytes::gib(1));
    assert_eq!(alignment(43 * GIB + (256 << 20)).unwrap(), Bytes::mib(2));
    let error = alignment(43 * GIB + (1 << 20)).unwrap_err().to_string();
    assert!(error.contains("0xac0100000") && error.contains("2MiB"), "{error}");
}

#[test]
fn slice_index_out_of_range_is_rejected() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    let slices = Slices::open(&fake.sysfs, region).unwrap();
    assert_eq!(slices.range(3).unwrap(), REGION_BASE + 3 * GIB..REGION_BASE + 4 * GIB);
    let error = slices.remove(4).unwrap_err().to_string();
    assert_eq!(error, "slice index 4 is out of range: region1 has 4 slices");
}

#[test]
fn auto_online_policy_or_large_block_prevents_hotplug() {
    let fake = FakeSysfs::new(&[]);
    let region = region(&fake);
    add_128_mib_blocks(&fake, 0, 1, "online");
    fake.files(blocks::MEMORY_BLOCKS_FOLDER, &[("auto_online_blocks", "online_movable")]);
    let slices = Slices::open(&fake.sysfs, region.clone()).unwrap();
    let error = slices.ensure_kmem(0).unwrap_err().to_string();
    assert!(error.contains("is online_movable") && error.contains("memhp_default_state=offline"), "{error}");
    fake.files(
        blocks::MEMORY_BLOCKS_FOLDER,
        &[("block_size_bytes", "80000000"), ("auto_online_blocks", "offline")],
    );
    let error = slices.ensure_kmem(0).unwrap_err().to_string();
    assert!(error.starts_with("a slice of 1GiB at 0x"), "{error}");
    assert!(error.ends_with("is not a whole number of memory blocks of 2GiB"), "{error}");
}

/// Checks the next step from every state in which a killed agent can leave a device.
#[test]
fn every_partial_state_has_a_next_step_to_every_target() {
    let device = |driver, align: Bytes| Device {
        name: "dax1.1".into(),
        extent: DeviceExtent::At(REGION_BASE..REGION_BASE + GIB),
        align: align.get(),
        number: 0,
        driver,
    };
    let (dax, kmem) = (Some(Driver::DeviceDax), Some(Driver::Kmem));
    let (large, small) = (Bytes::gib(1), Bytes::mib(2));
    let step = |device: Option<Device>, target| next_step(device.as_ref(), target, large, false);
    let created = |device: Device, target| next_step(Some(&device), target, large, true);
    for target in [dax, kmem] {
        assert_eq!(step(None, target), Some(Step::Create));
        assert_eq!(step(Some(device(target, large)), target), None);
    }
    assert_eq!(step(None, None), None);
    assert_eq!(created(device(None, small), dax), Some(Step::Align));
    assert_eq!(created(device(None, large), dax), Some(Step::Bind(Driver::DeviceDax)));
    assert_eq!(created(device(None, small), kmem), Some(Step::Bind(Driver::Kmem)));
    for target in [dax, kmem] {
        assert_eq!(step(Some(device(None, large)), target), Some(Step::Delete), "a process may still map it");
    }
    assert_eq!(step(Some(device(kmem, small)), dax), Some(Step::Unbind(Driver::Kmem)));
    assert_eq!(step(Some(device(dax, large)), kmem), Some(Step::Unbind(Driver::DeviceDax)));
    assert_eq!(step(Some(device(kmem, small)), None), Some(Step::Unbind(Driver::Kmem)));
    assert_eq!(step(Some(device(None, small)), None), Some(Step::Delete));
}

#[test]
fn slice_with_target_driver_is_not_bound_again() {
    let fake = FakeSysfs::new(&[("bus/dax/drivers/device_dax/new_id", "")]);
    let region = region(&fake);
    add_device(&fake, "dax1.1", 1, 1, Some(Driver::DeviceDax));
    let slices = Slices::open(&fake.sysfs, region).unwrap();
    assert_eq!(slices.ensure_devdax(1).unwrap().device, "dax1.1");
    assert_eq!(
        fake.sysfs.text("bus/dax/drivers/device_dax/new_id").unwrap(),
        "",
        "the device was bound again"
    );
}

/// Simulates pinned pages: `unbind` is a pipe without a reader, so opening it for writing blocks.
#[test]
fn stuck_slice_does_not_block_other_slices() {
    let drivers = ["device_dax/remove_id", "kmem/unbind"].map(|file| format!("bus/dax/drivers/{file}"));
    let fake = FakeSysfs::new(&drivers.each_ref().map(|file| (file.as_str(), "")));
    let region = region(&fake);
    add_device(&fake, "dax1.1", 1, 1, Some(Driver::DeviceDax));
    add_device(&fake, "dax1.2", 2, 1, Some(Driver::Kmem));
    add_128_mib_blocks(&fake, 45 * 8, 8, "offline");
    let pipe = fake.path("bus/dax/drivers/device_dax/unbind");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut slices = Slices::open(&fake.sysfs, region).unwrap();
    slices.steps = DetachedSteps::with_timeout(std::time::Duration::from_millis(50));
    let stuck = |slices: &Slices| {
        let error = slices.remove(1).unwrap_err();
        assert!(matches!(&error, SliceError::Stuck { device, .. } if device == "dax1.1"), "{error}");
    };
    stuck(&slices);
    assert!(slices.ensure_devdax(1).is_err(), "a device with a pending unbind was used");
    // While the kernel waits, sysfs already shows no driver; deleting the device would wait for the
    // same pages.
    std::fs::remove_file(fake.path("region/dax1.1/driver")).unwrap();
    stuck(&slices);
    assert_ne!(fake.sysfs.text("region/dax1.1/size").unwrap(), "0");
    assert!(slices.ensure_devdax(1).is_err(), "the device was bound again");
    slices.remove(2).unwrap_err(); // the fake sysfs never unbinds the device
    assert_eq!(fake.sysfs.text("bus/dax/drivers/kmem/unbind").unwrap(), "dax1.2");
    assert_eq!(slices.changing_slice_count(), 1);
    drop(std::fs::File::open(pipe).unwrap()); // a reader ends the wait, like unpinned pages
    while slices.changing_slice_count() > 0 {
        std::thread::yield_now();
    }
    let _ = slices.remove(1); // fails, because the fake sysfs never deletes the device
    assert_eq!(fake.sysfs.text("region/dax_region/delete").unwrap(), "dax1.1");
}

/// Creates a device with 1 GiB of memory that begins `offset` GiB after the start of the region, or
/// without memory.
fn device(name: &str, offset: Option<u64>) -> Device {
    let extent = offset.map_or(DeviceExtent::Empty, |gib| {
        DeviceExtent::At(REGION_BASE + gib * GIB..REGION_BASE + (gib + 1) * GIB)
    });
    Device { name: name.into(), extent, align: 2 << 20, number: makedev(253, 7), driver: None }
}

/// Regression test: an abandoned step deleted its device while another device was created. The new
/// device got the same name, was not recognized as new, and remained without memory.
#[test]
fn new_device_with_reused_name_is_recognized() {
    let before = [device("dax1.1", Some(1)), device("dax1.2", None)];
    let ended = BTreeSet::from(["dax1.2".to_owned()]);
    let after = || before.to_vec();
    let found = |ended: &BTreeSet<String>, after: Vec<Device>| {
        new_device(&before, ended, after).map(|device| device.name)
    };
    assert_eq!(found(&ended, after()), Some("dax1.2".into()));
    assert_eq!(found(&BTreeSet::new(), after()), None, "the step did not end");
    let with_memory = BTreeSet::from(["dax1.1".to_owned()]);
    assert_eq!(found(&with_memory, after()), None, "a device with memory is not new");
    let with_new = [after(), vec![device("dax1.3", None)]].concat();
    assert_eq!(found(&ended, with_new), Some("dax1.3".into()), "a new name has precedence");
}
