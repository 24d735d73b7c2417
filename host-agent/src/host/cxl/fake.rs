//! Simulated sysfs of a machine with CXL memory for tests, with the files of kernel 6.12.

use super::BUS;
use crate::host::sysfs::fake::FakeSysfs;

/// Directory of the CXL root, which contains all ports.
pub(crate) const ROOT: &str = "devices/platform/root0";

/// Creates a machine with one host bridge, one window, and one device of 4 GiB with a region over
/// its whole memory.
pub(crate) fn machine() -> FakeSysfs {
    let fake = FakeSysfs::new(&[]);
    fake.link(&format!("{ROOT}/dport12"), "devices/pci0000:0c");
    fake.link(&format!("{ROOT}/port1/uport"), "devices/pci0000:0c");
    let window = [("start", "0xac0000000"), ("size", "0x100000000"), ("target_list", "12")];
    fake.files(&format!("{ROOT}/decoder0.1"), &window);
    fake.files(&format!("{ROOT}/decoder0.1"), &[("create_ram_region", "region7"), ("interleave_ways", "1")]);
    device(&fake, 0, "0x1", "region7");
    region(&fake);
    fake
}

/// Adds a device of 4 GiB with one decoder. If `region` is empty, the device has no region.
pub(crate) fn device(fake: &FakeSysfs, number: u32, serial: &str, region: &str) {
    let (memdev, endpoint) = (format!("devices/mem{number}"), format!("{ROOT}/port1/endpoint{}", number + 2));
    fake.files(&memdev, &[("serial", serial), ("ram/size", "0x100000000")]);
    fake.link(&format!("{BUS}/mem{number}"), &memdev);
    fake.link(&format!("{BUS}/endpoint{}", number + 2), &endpoint);
    fake.link(&format!("{endpoint}/uport"), &memdev);
    let dpa_resource = if region.is_empty() { "0xffffffffffffffff" } else { "0x0" };
    let decoder = [("region", region), ("dpa_resource", dpa_resource), ("dpa_size", "0x0")];
    fake.files(&format!("{endpoint}/decoder{}.0", number + 2), &decoder);
}

fn region(fake: &FakeSysfs) {
    let folder = format!("{ROOT}/decoder0.1/region7");
    fake.files(&folder, &[("interleave_ways", "1"), ("mode", "ram"), ("commit", "1")]);
    fake.files(&folder, &[("resource", "0xac0000000"), ("size", "0x100000000"), ("target0", "decoder2.0")]);
    fake.link(&format!("{BUS}/region7"), &folder);
    fake.link(&format!("{folder}/driver"), "bus/cxl/drivers/cxl_region");
    fake.files(&format!("{folder}/dax_region7"), &[("dax_region/create", ""), ("dax7.0/size", "0")]);
    fake.files(
        &format!("{folder}/dax_region7/dax7.0"),
        &[("dev", "253:0"), ("align", "2097152"), ("target_node", "5")],
    );
}
