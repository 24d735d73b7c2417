//! The record of a shared device, compared with the model on a failing disk.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::device::model::{Model, Order, order};
use crate::store::faulty::{Fault, FaultyDisk};

const HOST: HostId = HostId(3);
const OTHER: HostId = HostId(4);
const SERIAL: &str = "0xabc";
const EIO: i32 = 5;

fn device(directory: &tempfile::TempDir) -> SharedDax {
    SharedDax::open(directory.path(), 8, SERIAL).unwrap()
}

fn owners(device: &mut SharedDax) -> BTreeMap<u32, (Epoch, HostId)> {
    device.contents().unwrap().grants.into_iter().map(|g| (g.slice, (g.epoch, g.host))).collect()
}

#[test]
fn a_handle_names_the_device_by_its_serial_and_the_slice_by_its_place_on_it() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(device(&directory).grant(7, Epoch(42), HOST).unwrap().as_ref(), "cxl:0xabc:7");
}

#[test]
fn what_was_committed_outlives_the_manager_and_an_epoch_that_is_over_never_comes_back() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = device(&directory);
    first.grant(1, Epoch(5), HOST).unwrap();
    first.grant(2, Epoch(6), OTHER).unwrap();
    first.revoke(2, Epoch(6)).unwrap();
    first.commit().unwrap();
    let before = first.contents().unwrap();
    drop(first);
    let mut second = device(&directory);
    assert_eq!(second.contents().unwrap(), before);
    let stale = second.grant(2, Epoch(6), OTHER).unwrap_err().to_string();
    assert_eq!(stale, "slice 2: epoch 6 is over; the highest was 6");
    second.grant(1, Epoch(5), HOST).unwrap();
    let held = second.grant(1, Epoch(6), OTHER).unwrap_err().to_string();
    assert_eq!(held, "slice 1 is host#3's with epoch 5: must be revoked first");
}

#[test]
fn what_was_not_committed_did_not_happen() {
    let directory = tempfile::tempdir().unwrap();
    device(&directory).grant(1, Epoch(5), HOST).unwrap();
    assert_eq!(device(&directory).contents().unwrap().grants, []);
}

#[test]
fn fencing_strikes_out_everything_of_one_host_and_nothing_of_another() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    for slice in 0..4 {
        device.grant(slice, Epoch(1), if slice % 2 == 0 { HOST } else { OTHER }).unwrap();
    }
    let taken: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(taken, [0, 2]);
    assert_eq!(owners(&mut device).into_keys().collect::<Vec<_>>(), [1, 3]);
    assert!(matches!(device.grant(0, Epoch(1), HOST), Err(DeviceError::StaleEpoch { .. })));
}

#[test]
fn grant_of_an_earlier_epoch_names_the_later_owner() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    device.grant(1, Epoch(9), OTHER).unwrap();
    let refused = device.grant(1, Epoch(8), HOST);
    assert!(
        matches!(refused, Err(DeviceError::Held { slice: 1, epoch: Epoch(9), host: OTHER })),
        "{refused:?}"
    );
}

#[test]
fn two_managers_cannot_keep_one_record() {
    let directory = tempfile::tempdir().unwrap();
    let _first = device(&directory);
    assert!(matches!(SharedDax::open(directory.path(), 8, SERIAL), Err(DeviceError::InUse { .. })));
}

#[test]
fn a_record_is_of_one_device_which_may_grow_and_not_shrink() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = device(&directory);
    first.grant(7, Epoch(1), HOST).unwrap();
    first.commit().unwrap();
    drop(first);
    let refused = |slices, serial| SharedDax::open(directory.path(), slices, serial).unwrap_err().to_string();
    assert!(refused(4, SERIAL).ends_with("its record has slice 7: must be below 4"));
    assert!(refused(8, "0x1").ends_with("its record is of serial 0xabc: must be 0x1"));
    let mut grown = SharedDax::open(directory.path(), 16, SERIAL).unwrap();
    grown.grant(15, Epoch(1), HOST).unwrap();
    assert_eq!(grown.contents().unwrap().grants.len(), 2);
    let error = grown.grant(16, Epoch(1), HOST).unwrap_err().to_string();
    assert_eq!(error, "no slice 16 on this EMC: must be below 16");
}

fn on(disk: &FaultyDisk) -> SharedDax {
    let store = RedbStore::open(disk.clone()).unwrap();
    SharedDax::on(Box::new(store), Path::new("e"), 3, SERIAL).unwrap()
}

/// Returns whether a record equals the model, including its history.
fn agrees(device: &mut SharedDax, model: &Model) -> bool {
    let owners = owners(device);
    let highest = device.contents().unwrap().highest;
    let open_from = |slice: u32| {
        let highest = highest[slice as usize];
        if owners.contains_key(&slice) { highest } else { highest.next() }
    };
    owners == model.owners && (0..3).all(|slice| open_from(slice) == model.open_from(slice))
}

/// Orders between two commits, and after how many operations of the disk from then on one fails.
fn batches() -> impl Strategy<Value = Vec<(Vec<Order>, Option<u64>)>> {
    let fails = prop::option::weighted(0.3, 0..12_u64);
    prop::collection::vec((prop::collection::vec(order(), 0..5), fails), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_record_has_one_owner_per_slice_and_every_commit_whole_or_not_at_all(batches in batches()) {
        let disk = FaultyDisk::new(|n| n / 2);
        let (mut device, mut model) = (on(&disk), Model::default());
        for (orders, fails) in batches {
            let before = model.clone();
            for order in orders {
                prop_assert_eq!(order.make(&mut device), model.make(order), "{:?}", order);
            }
            if let Some(after) = fails {
                disk.fail_at(disk.operations() + after, Fault::Errno(EIO));
            }
            if device.commit().is_err() {
                disk.fail_no_more();
                drop(device);
                device = on(&disk);
                model = if agrees(&mut device, &model) { model } else { before };
            }
            disk.fail_no_more();
            drop(device);
            device = on(&disk);
            prop_assert!(agrees(&mut device, &model), "{:?} instead of {:?}", device.contents(), model);
        }
    }
}
