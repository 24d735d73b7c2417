//! Errors before a device is accessed. Tests with emulated hosts use real dax devices.

use pool::protocol::FailureReason;
use units::{Epoch, SliceId};

use std::num::NonZeroU64;

use super::{
    super::{cxl::CxlMemory, sysfs::fake::FakeSysfs},
    *,
};

const SLICE_1: Holding = Holding { slice: SliceId(1), epoch: Epoch(1) };

#[test]
fn slice_of_missing_or_unusable_device_is_rejected() {
    let fake = FakeSysfs::new(&[("devices/mem0/serial", "0x1"), ("devices/mem0/ram/size", "0x10000000")]);
    fake.link("bus/cxl/devices/mem0", "devices/mem0");
    let cxl = CxlMemory::discover_devices(&fake.sysfs).unwrap();
    let host = Dax::new(CxlSlices::new(cxl, NonZeroU64::MAX), None);
    let cases = [
        ("cxl:0x2:0", "this machine has no CXL memory device with serial 0x2"),
        (
            "cxl:0x1:0",
            "CXL memory device 0x1: volatile capacity 256MiB is too small: must be at least 1GiB, the size of a slice",
        ),
        ("/dev/shm/00001.1.h0", "invalid slice name \"/dev/shm/00001.1.h0\": must be cxl:SERIAL:INDEX"),
    ];
    for (place, message) in cases {
        let handle = Handle::new("emc", place);
        let errors = [
            host.online(SLICE_1, &handle, true).unwrap_err(),
            host.offline(SLICE_1, &handle, false).unwrap_err(),
            host.scrub(SLICE_1, &handle).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(
                (error.to_string(), error.to_failure().reason),
                (message.to_owned(), FailureReason::Host)
            );
        }
    }
}

#[test]
fn usage_of_device_memory_is_not_measured() {
    let fake = FakeSysfs::new(&[("devices/mem0/serial", "0x1"), ("devices/mem0/ram/size", "0x10000000")]);
    fake.link("bus/cxl/devices/mem0", "devices/mem0");
    let host =
        Dax::new(CxlSlices::new(CxlMemory::discover_devices(&fake.sysfs).unwrap(), NonZeroU64::MAX), None);
    let device = std::fs::File::open("/dev/zero").unwrap();
    host.open.insert(SLICE_1, device, "/dev/zero".into());
    let vm = |slices| {
        let vm = units::Name::new("a").unwrap();
        ObservedVm {
            vm,
            pid: 1,
            slices,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: pool::protocol::ObservedRehome::None,
        }
    };
    let pool = |slices| host.usage(ReservationId(1), &vm(slices)).pool;
    assert_eq!((pool(vec![SLICE_1]), pool(Vec::new())), (None, Some(Bytes::ZERO)));
}
