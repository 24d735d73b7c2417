//! Simulated sysfs of a machine with CXL memory, as of kernel 6.12, for tests.

use super::BUS;
use crate::host::sysfs::made_up::MadeUp;

/// Folder of all ports.
pub(crate) const ROOT: &str = "devices/platform/root0";

/// Machine with one host bridge, one window and one device of 4 GiB with a region over all of it.
pub(crate) fn machine() -> MadeUp {
    let made_up = MadeUp::new(&[]);
    made_up.link(&format!("{ROOT}/dport12"), "devices/pci0000:0c");
    made_up.link(&format!("{ROOT}/port1/uport"), "devices/pci0000:0c");
    let window = [("start", "0xac0000000"), ("size", "0x100000000"), ("target_list", "12")];
    made_up.files(&format!("{ROOT}/decoder0.1"), &window);
    made_up
        .files(&format!("{ROOT}/decoder0.1"), &[("create_ram_region", "region7"), ("interleave_ways", "1")]);
    device(&made_up, 0, "0x1", "region7");
    region(&made_up);
    made_up
}

/// Device of 4 GiB with one decoder, with or without a region.
pub(crate) fn device(made_up: &MadeUp, number: u32, serial: &str, region: &str) {
    let (memdev, endpoint) = (format!("devices/mem{number}"), format!("{ROOT}/port1/endpoint{}", number + 2));
    made_up.files(&memdev, &[("serial", serial), ("ram/size", "0x100000000")]);
    made_up.link(&format!("{BUS}/mem{number}"), &memdev);
    made_up.link(&format!("{BUS}/endpoint{}", number + 2), &endpoint);
    made_up.link(&format!("{endpoint}/uport"), &memdev);
    let taken = if region.is_empty() { "0xffffffffffffffff" } else { "0x0" };
    let decoder = [("region", region), ("dpa_resource", taken), ("dpa_size", "0x0")];
    made_up.files(&format!("{endpoint}/decoder{}.0", number + 2), &decoder);
}

fn region(made_up: &MadeUp) {
    let folder = format!("{ROOT}/decoder0.1/region7");
    made_up.files(&folder, &[("interleave_ways", "1"), ("mode", "ram"), ("commit", "1")]);
    made_up
        .files(&folder, &[("resource", "0xac0000000"), ("size", "0x100000000"), ("target0", "decoder2.0")]);
    made_up.link(&format!("{BUS}/region7"), &folder);
    made_up.link(&format!("{folder}/driver"), "bus/cxl/drivers/cxl_region");
    made_up.files(&format!("{folder}/dax_region7"), &[("dax_region/create", ""), ("dax7.0/size", "0")]);
    made_up.files(
        &format!("{folder}/dax_region7/dax7.0"),
        &[("dev", "253:0"), ("align", "2097152"), ("target_node", "5")],
    );
}
