//! Tests of the record of a shared device, and comparison with a model while disk operations fail.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::device::model::{DeviceOp, Model, device_op};
use crate::store::faulty::{Fault, FaultyDisk};

const HOST: HostId = HostId(3);
const OTHER_HOST: HostId = HostId(4);
const EMC_SERIAL: &str = "0xabc";
const EIO: i32 = 5;

fn open_device(directory: &tempfile::TempDir) -> SharedDax {
    SharedDax::open(directory.path(), 8, EMC_SERIAL).unwrap()
}

fn owners(device: &mut SharedDax) -> BTreeMap<u32, (Epoch, HostId)> {
    device.contents().unwrap().grants.into_iter().map(|g| (g.slice, (g.epoch, g.host))).collect()
}

#[test]
fn handle_is_serial_number_and_slice_index() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(open_device(&directory).grant(7, Epoch(42), HOST).unwrap().as_ref(), "cxl:0xabc:7");
}

#[test]
fn committed_grants_and_revoked_epochs_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = open_device(&directory);
    first.grant(1, Epoch(5), HOST).unwrap();
    first.grant(2, Epoch(6), OTHER_HOST).unwrap();
    first.revoke(2, Epoch(6)).unwrap();
    first.commit().unwrap();
    let before = first.contents().unwrap();
    drop(first);
    let mut second = open_device(&directory);
    assert_eq!(second.contents().unwrap(), before);
    let stale = second.grant(2, Epoch(6), OTHER_HOST).unwrap_err().to_string();
    assert_eq!(stale, "slice 2: epoch 6 has ended; the highest epoch is 6");
    second.grant(1, Epoch(5), HOST).unwrap();
    let held = second.grant(1, Epoch(6), OTHER_HOST).unwrap_err().to_string();
    assert_eq!(held, "slice 1 is held by host#3 with epoch 5: it must be revoked first");
}

#[test]
fn uncommitted_grant_does_not_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    open_device(&directory).grant(1, Epoch(5), HOST).unwrap();
    assert_eq!(open_device(&directory).contents().unwrap().grants, []);
}

#[test]
fn fence_ends_all_grants_of_one_host_only() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    for slice in 0..4 {
        device.grant(slice, Epoch(1), if slice % 2 == 0 { HOST } else { OTHER_HOST }).unwrap();
    }
    let revoked: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(revoked, [0, 2]);
    assert_eq!(owners(&mut device).into_keys().collect::<Vec<_>>(), [1, 3]);
    assert!(matches!(device.grant(0, Epoch(1), HOST), Err(DeviceError::StaleEpoch { .. })));
}

#[test]
fn grant_with_an_earlier_epoch_reports_the_current_owner() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    device.grant(1, Epoch(9), OTHER_HOST).unwrap();
    let error = device.grant(1, Epoch(8), HOST);
    assert!(
        matches!(error, Err(DeviceError::Held { slice: 1, epoch: Epoch(9), host: OTHER_HOST })),
        "{error:?}"
    );
}

#[test]
fn record_in_use_is_not_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let _first = open_device(&directory);
    assert!(matches!(SharedDax::open(directory.path(), 8, EMC_SERIAL), Err(DeviceError::InUse { .. })));
}

#[test]
fn record_rejects_another_serial_number_or_fewer_slices() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = open_device(&directory);
    first.grant(7, Epoch(1), HOST).unwrap();
    first.commit().unwrap();
    drop(first);
    let error = |slices, serial| SharedDax::open(directory.path(), slices, serial).unwrap_err().to_string();
    assert!(error(4, EMC_SERIAL).ends_with("its record has slice 7: must be below 4"));
    assert!(error(8, "0x1").ends_with("its record belongs to serial number 0xabc: must be 0x1"));
    let mut grown = SharedDax::open(directory.path(), 16, EMC_SERIAL).unwrap();
    grown.grant(15, Epoch(1), HOST).unwrap();
    assert_eq!(grown.contents().unwrap().grants.len(), 2);
    let error = grown.grant(16, Epoch(1), HOST).unwrap_err().to_string();
    assert_eq!(error, "no slice 16 on this EMC: must be below 16");
}

fn open_on_disk(disk: &FaultyDisk) -> SharedDax {
    let store = RedbStore::open(disk.clone()).unwrap();
    SharedDax::open_in_store(Box::new(store), Path::new("e"), 3, EMC_SERIAL).unwrap()
}

/// Returns whether the owners and epochs of a device equal those of the model.
fn matches_model(device: &mut SharedDax, model: &Model) -> bool {
    let owners = owners(device);
    let highest = device.contents().unwrap().highest;
    let lowest_epoch = |slice: u32| {
        let highest = highest[slice as usize];
        if owners.contains_key(&slice) { highest } else { highest.next() }
    };
    owners == model.owners && (0..3).all(|slice| lowest_epoch(slice) == model.lowest_epoch(slice))
}

/// Returns batches. Each batch has the calls before a commit, and optionally the number of disk
/// operations after which an operation fails.
fn batches() -> impl Strategy<Value = Vec<(Vec<DeviceOp>, Option<u64>)>> {
    let fails_after = prop::option::weighted(0.3, 0..12_u64);
    prop::collection::vec((prop::collection::vec(device_op(), 0..5), fails_after), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn record_matches_the_model_with_atomic_commits(batches in batches()) {
        let disk = FaultyDisk::new(|n| n / 2);
        let (mut device, mut model) = (open_on_disk(&disk), Model::default());
        for (ops, fails_after) in batches {
            let before = model.clone();
            for op in ops {
                prop_assert_eq!(op.apply(&mut device), model.apply(op), "{:?}", op);
            }
            if let Some(after) = fails_after {
                disk.fail_at(disk.operations() + after, Fault::Errno(EIO));
            }
            if device.commit().is_err() {
                disk.clear_faults();
                drop(device);
                device = open_on_disk(&disk);
                model = if matches_model(&mut device, &model) { model } else { before };
            }
            disk.clear_faults();
            drop(device);
            device = open_on_disk(&disk);
            prop_assert!(matches_model(&mut device, &model), "{:?} instead of {:?}", device.contents(), model);
        }
    }
}
