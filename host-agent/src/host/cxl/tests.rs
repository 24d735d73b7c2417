//! Discovery of CXL devices on a simulated /sys of kernel 6.12. Tests with emulated hosts use a
//! real kernel.

use super::{
    fake::{ROOT, device, machine},
    *,
};
use crate::host::sysfs::fake::FakeSysfs;

/// Returns the message of the problem of the first device.
fn problem(fake: &FakeSysfs) -> String {
    let cxl = CxlMemory::discover_devices(&fake.sysfs).unwrap();
    units::chain(cxl.devices[0].slices.as_ref().unwrap_err())
}

#[test]
fn existing_region_with_any_number_is_used() {
    let cxl = CxlMemory::discover_devices(&machine().sysfs).unwrap();
    let slices = cxl.slices("0x1").unwrap();
    assert_eq!((slices.count(), slices.node(), slices.region().base), (4, 5, 43 << 30));
    assert_eq!((&*cxl.devices[0].name, &*slices.region().name), ("mem0", "region7"));
}

#[test]
fn missing_bus_or_device_error_names_modules() {
    let empty = FakeSysfs::new(&[]);
    let error = CxlMemory::discover_devices(&empty.sysfs).unwrap_err().to_string();
    assert!(error.contains("no CXL bus") && error.contains("modprobe cxl_acpi"), "{error}");
    empty.files(BUS, &[("root0", "")]);
    let error = CxlMemory::discover_devices(&empty.sysfs).unwrap_err().to_string();
    assert!(error.contains("no memory device") && error.contains("cxl_mem"), "{error}");
}

#[test]
fn faulty_device_does_not_affect_other_devices() {
    let fake = machine();
    device(&fake, 1, "0x2", "");
    let cxl = CxlMemory::discover_devices(&fake.sysfs).unwrap();
    assert_eq!(cxl.slices("0x1").unwrap().count(), 4);
    assert!(matches!(cxl.devices[1].slices, Err(Problem::NoWindow { .. })), "{cxl:?}");
    let error = cxl.slices("0x2").unwrap_err().to_string();
    assert!(error.starts_with("CXL memory device 0x2: no CXL memory window"), "{error}");
    let error = cxl.slices("0x3").unwrap_err().to_string();
    assert_eq!(error, "this machine has no CXL memory device with serial 0x3");
}

#[test]
fn devices_with_duplicate_serial_are_not_used() {
    let fake = machine();
    device(&fake, 1, "0x1", "");
    let cxl = CxlMemory::discover_devices(&fake.sysfs).unwrap();
    assert!(
        cxl.devices.iter().all(|device| matches!(device.slices, Err(Problem::DuplicateSerial))),
        "{cxl:?}"
    );
}

#[test]
fn interleaved_region_is_rejected_by_name() {
    let fake = machine();
    fake.files(&format!("{ROOT}/decoder0.1/region7"), &[("interleave_ways", "2"), ("target1", "decoder3.0")]);
    let problem = problem(&fake);
    assert!(problem.starts_with("region7 interleaves 2 devices"), "{problem}");
}

#[test]
fn region_not_at_device_start_is_rejected() {
    let fake = machine();
    fake.files(&format!("{ROOT}/port1/endpoint2/decoder2.0"), &[("dpa_resource", "0x40000000")]);
    let problem = problem(&fake);
    assert!(
        problem.starts_with("region7 begins at byte 0x40000000 of the device, must begin at 0"),
        "{problem}"
    );
}

#[test]
fn region_without_dax_region_error_names_boot_option() {
    let fake = machine();
    let folder = fake.path(&format!("{ROOT}/decoder0.1/region7/dax_region7"));
    std::fs::remove_dir_all(folder).unwrap();
    let problem = problem(&fake);
    assert!(problem.contains("no dax region") && problem.contains("efi=softreserve"), "{problem}");
}

/// Discovers devices while region7 is not committed and has these targets. Returns the name of the
/// deleted region, or an empty string if no region was deleted.
fn find_deleted_region(targets: &[(&str, &str)]) -> String {
    let fake = machine();
    fake.files(&format!("{ROOT}/decoder0.1"), &[("delete_region", "")]);
    fake.files(&format!("{ROOT}/decoder0.1/region7"), &[("commit", "0")]);
    fake.files(&format!("{ROOT}/decoder0.1/region7"), targets);
    CxlMemory::discover_devices(&fake.sysfs).unwrap();
    fake.sysfs.text(format!("{ROOT}/decoder0.1/delete_region")).unwrap()
}

#[test]
fn incomplete_region_without_other_devices_is_deleted() {
    assert_eq!(find_deleted_region(&[]), "region7", "the region contains its device");
    assert_eq!(find_deleted_region(&[("target0", "")]), "region7", "the region contains no device");
    assert_eq!(find_deleted_region(&[("target1", "decoder3.0")]), "", "the region contains another device");
}

#[test]
fn failed_region_creation_error_names_window_and_file() {
    let fake = machine();
    fake.files(&format!("{ROOT}/decoder0.1"), &[("size", "0x200000000")]);
    fake.files(&format!("{ROOT}/port1/endpoint2/decoder2.0"), &[("region", "")]);
    let problem = problem(&fake);
    assert!(
        problem.contains("decoder0.1: cannot read ") && problem.contains("interleave_granularity"),
        "{problem}"
    );
}

#[test]
fn region_is_not_created_with_auto_online_policy() {
    let fake = machine();
    fake.files(&format!("{ROOT}/port1/endpoint2/decoder2.0"), &[("region", "")]);
    fake.files("devices/system/memory", &[("auto_online_blocks", "online")]);
    let problem = problem(&fake);
    assert!(problem.contains("memhp_default_state=offline"), "{problem}");
}

#[test]
fn slice_name_is_serial_and_index() {
    let name: SliceName = "cxl:0x1:3".parse().unwrap();
    assert_eq!((&*name.serial, name.index, &*name.to_string()), ("0x1", 3, "cxl:0x1:3"));
    for bad in ["", "cxl:0x1", "cxl::3", "cxl:0x1:", "cxl:0x1:-1", "cxl:0x1:3 ", "dax:0x1:3", "/dev/dax0.0"] {
        let error = bad.parse::<SliceName>().unwrap_err().to_string();
        assert_eq!(error, format!("invalid slice name {bad:?}: must be cxl:SERIAL:INDEX"));
    }
}
