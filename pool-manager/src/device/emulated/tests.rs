//! The emulated EMC: its files, and comparison with the model.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::device::model::{Model, Order, order};

const HOST: HostId = HostId(3);
const OTHER: HostId = HostId(4);

fn device(directory: &tempfile::TempDir) -> Emulated {
    Emulated::open(directory.path(), 8).unwrap()
}

fn open(handle: &Handle) -> File {
    OpenOptions::new().read(true).write(true).open(handle.as_ref()).unwrap()
}

fn first_byte(file: &File) -> Option<u8> {
    let mut byte = [0];
    (file.read_at(&mut byte, 0).unwrap() == 1).then_some(byte[0])
}

#[test]
fn a_revoked_owner_loses_the_memory_it_still_has_open() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    let file = open(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(b"secret", 0).unwrap();
    assert_eq!(first_byte(&file), Some(b's'));
    device.revoke(1, Epoch(1)).unwrap();
    assert_eq!(first_byte(&file), None, "the old owner still reads");
    assert_eq!(fs::read_dir(directory.path().join("slices")).unwrap().count(), 0);
}

#[test]
fn the_next_owner_finds_a_whole_slice_of_zeros_that_only_it_may_open() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    let file = open(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(&[7; 4096], 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    let file = open(&device.grant(1, Epoch(2), OTHER).unwrap());
    assert_eq!(first_byte(&file), Some(0));
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), SLICE.get());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}

#[test]
fn what_is_granted_is_in_the_handle() {
    let directory = tempfile::tempdir().unwrap();
    let handle = device(&directory).grant(7, Epoch(42), HOST).unwrap();
    assert_eq!(Path::new(handle.as_ref()), directory.path().join("slices/00007.42.h3"));
}

#[test]
fn grants_and_epochs_outlive_the_manager() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = device(&directory);
    first.grant(1, Epoch(5), HOST).unwrap();
    first.grant(2, Epoch(6), OTHER).unwrap();
    first.revoke(2, Epoch(6)).unwrap();
    let before = first.contents().unwrap();
    drop(first);
    let mut second = device(&directory);
    assert_eq!(second.contents().unwrap(), before);
    assert!(matches!(second.grant(2, Epoch(6), OTHER), Err(DeviceError::StaleEpoch { .. })));
    second.grant(1, Epoch(5), HOST).unwrap();
}

#[test]
fn a_slice_that_somebody_has_is_granted_to_nobody_else() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    device.grant(1, Epoch(1), HOST).unwrap();
    for (epoch, host) in [(Epoch(2), OTHER), (Epoch(2), HOST), (Epoch(1), OTHER)] {
        let error = device.grant(1, epoch, host).unwrap_err().to_string();
        assert_eq!(error, "slice 1 is host#3's with epoch 1: must be revoked first");
    }
}

#[test]
fn revoking_takes_a_slice_from_every_owner_up_to_that_number_and_from_no_later_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    device.grant(1, Epoch(3), HOST).unwrap();
    device.revoke(1, Epoch(2)).unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1, "a later owner keeps it");
    device.revoke(1, Epoch(5)).unwrap();
    assert_eq!(device.contents().unwrap().grants, []);
    assert!(device.grant(1, Epoch(4), OTHER).is_err(), "a number that was revoked comes back");
    device.grant(1, Epoch(6), OTHER).unwrap();
}

#[test]
fn a_revocation_that_failed_is_not_done_until_it_was_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    let name = device.grant(1, Epoch(3), HOST).unwrap();
    let aside = directory.path().join("aside");
    fs::rename(name.as_ref(), &aside).unwrap();
    fs::create_dir(name.as_ref()).unwrap();
    assert!(matches!(device.revoke(1, Epoch(5)), Err(DeviceError::Slice { .. })));
    assert!(device.grant(1, Epoch(6), OTHER).is_err(), "granted while another may reach it");
    assert!(device.grant(1, Epoch(3), HOST).is_err(), "granted again after it was to be revoked");
    fs::remove_dir(name.as_ref()).unwrap();
    fs::rename(&aside, name.as_ref()).unwrap();
    let file = open(&name);
    device.revoke(1, Epoch(3)).unwrap();
    assert_eq!(first_byte(&file), None);
    device.grant(1, Epoch(6), OTHER).unwrap();
}

#[test]
fn fencing_takes_everything_from_one_host_and_nothing_from_another() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    for slice in 0..4 {
        device.grant(slice, Epoch(1), if slice % 2 == 0 { HOST } else { OTHER }).unwrap();
    }
    let taken: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(taken, [0, 2]);
    let left: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(left, [1, 3]);
    assert_eq!(device.fence(HOST).unwrap(), []);
}

/// Puts a directory where a slice's file is, and returns where the file is now.
fn replace_by_directory(directory: &tempfile::TempDir, handle: &Handle) -> PathBuf {
    let aside = directory.path().join("aside");
    fs::rename(handle.as_ref(), &aside).unwrap();
    fs::create_dir(handle.as_ref()).unwrap();
    aside
}

#[test]
fn fence_takes_every_slice_that_works_and_leaves_the_others_granted() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    let handles: Vec<Handle> = (0..3).map(|slice| device.grant(slice, Epoch(1), HOST).unwrap()).collect();
    let aside = replace_by_directory(&directory, &handles[1]);
    let taken: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(taken, [0, 2]);
    let left: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(left, [1], "the host may still reach it");
    fs::remove_dir(handles[1].as_ref()).unwrap();
    fs::rename(aside, handles[1].as_ref()).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    assert_eq!(device.contents().unwrap().grants, []);
}

#[test]
fn device_with_a_slice_that_fails_starts_and_still_counts_it_as_granted() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = device(&directory);
    let handles: Vec<Handle> = (0..3).map(|slice| first.grant(slice, Epoch(1), HOST).unwrap()).collect();
    replace_by_directory(&directory, &handles[0]);
    assert!(first.revoke(0, Epoch(1)).is_err());
    fs::remove_file(handles[1].as_ref()).unwrap();
    fs::create_dir(handles[1].as_ref()).unwrap();
    drop(first);
    let mut second = device(&directory);
    let granted: Vec<u32> = second.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(granted, [0, 1, 2]);
    assert!(second.grant(0, Epoch(2), OTHER).is_err(), "granted while another may reach it");
    second.grant(3, Epoch(1), OTHER).unwrap();
}

#[test]
fn two_managers_cannot_drive_one_device() {
    let directory = tempfile::tempdir().unwrap();
    let _first = device(&directory);
    assert!(matches!(Emulated::open(directory.path(), 8), Err(DeviceError::InUse { .. })));
}

#[test]
fn a_device_may_grow_and_not_shrink() {
    let directory = tempfile::tempdir().unwrap();
    device(&directory).grant(7, Epoch(1), HOST).unwrap();
    let error = Emulated::open(directory.path(), 4).unwrap_err().to_string();
    assert!(error.contains("64 bytes: must be whole entries of 8, at most 32 for 4 slices"), "{error}");
    let mut grown = Emulated::open(directory.path(), 16).unwrap();
    assert_eq!(grown.contents().unwrap().grants.len(), 1);
    grown.grant(15, Epoch(1), HOST).unwrap();
    let error = grown.grant(16, Epoch(1), HOST).unwrap_err().to_string();
    assert_eq!(error, "no slice 16 on this EMC: must be below 16");
}

/// The manager may die between any two steps of a grant or a revocation; these are the files it can leave.
#[test]
fn what_was_interrupted_is_finished_at_the_next_start() {
    let directory = tempfile::tempdir().unwrap();
    device(&directory);
    let slices = directory.path().join("slices");
    let epochs = File::options().write(true).open(directory.path().join("epochs")).unwrap();
    let entry = |slice: u64, entry: u64| epochs.write_all_at(&entry.to_le_bytes(), slice * 8).unwrap();
    // A grant whose epoch was written and whose file was not; one whose file has no size yet.
    entry(0, 5 << 1);
    entry(1, 5 << 1);
    File::create(slices.join("00001.5.h3")).unwrap();
    // A revocation that was written down only; one that truncated too.
    entry(2, 5 << 1 | 1);
    File::create(slices.join("00002.5.h3")).unwrap().set_len(SLICE.get()).unwrap();
    entry(3, 5 << 1 | 1);
    File::create(slices.join("00003.5.h3")).unwrap();

    let mut device = device(&directory);
    let granted: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(granted, [1]);
    assert_eq!(fs::metadata(slices.join("00001.5.h3")).unwrap().len(), SLICE.get());
    assert_eq!(fs::read_dir(&slices).unwrap().count(), 1);
    device.grant(0, Epoch(5), HOST).unwrap();
    assert!(matches!(device.grant(2, Epoch(5), HOST), Err(DeviceError::StaleEpoch { .. })));
}

#[test]
fn a_lost_epochs_file_does_not_let_an_old_owner_back() {
    let directory = tempfile::tempdir().unwrap();
    device(&directory).grant(1, Epoch(9), HOST).unwrap();
    fs::remove_file(directory.path().join("epochs")).unwrap();
    let mut device = device(&directory);
    assert_eq!(device.contents().unwrap().highest[1], Epoch(9));
    let refused = device.grant(1, Epoch(8), OTHER);
    assert!(matches!(refused, Err(DeviceError::Held { epoch: Epoch(9), host: HOST, .. })), "{refused:?}");
}

#[test]
fn a_device_without_memory_behind_it_grants_nothing_and_still_takes_back() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = device(&directory);
    device.grant(1, Epoch(1), HOST).unwrap();
    device.commit().unwrap();
    device.free_min = u64::MAX;
    assert!(matches!(device.grant(2, Epoch(1), HOST), Err(DeviceError::NoSpace { .. })));
    assert_eq!(device.contents().unwrap().highest[2], Epoch(0), "a refusal left a trace");
    device.grant(1, Epoch(1), HOST).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
}

fn lying(directory: &tempfile::TempDir, word: &str) -> Emulated {
    let device = device(directory);
    fs::write(directory.path().join("fault"), word).unwrap();
    device
}

#[test]
fn a_lying_device_can_ignore_a_revocation() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = lying(&directory, "ignore-revoke");
    let file = open(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(b"secret", 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    device.grant(1, Epoch(2), OTHER).unwrap();
    assert_eq!(first_byte(&file), Some(b's'), "the old owner was cut off");
}

#[test]
fn a_lying_device_can_keep_old_bytes_even_past_a_scrub() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = lying(&directory, "keep-bytes\n");
    open(&device.grant(1, Epoch(1), HOST).unwrap()).write_all_at(b"secret", 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    open(&device.grant(1, Epoch(2), OTHER).unwrap()).write_all_at(&[0; 4096], 0).unwrap();
    device.revoke(1, Epoch(2)).unwrap();
    let file = open(&device.grant(1, Epoch(3), OTHER).unwrap());
    assert_eq!(first_byte(&file), Some(b's'));
}

#[test]
fn a_lying_device_can_forget_a_grant_and_be_healed() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = lying(&directory, "forget-grant");
    device.grant(1, Epoch(1), HOST).unwrap();
    device.grant(2, Epoch(1), HOST).unwrap();
    device.commit().unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1);
    device.commit().unwrap();
    fs::remove_file(directory.path().join("fault")).unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1);
}

#[test]
fn an_unknown_fault_is_refused_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    drop(lying(&directory, "be-nice"));
    let error = Emulated::open(directory.path(), 8).unwrap_err().to_string();
    assert!(
        error.ends_with("its fault is \"be-nice\": must be ignore-revoke, keep-bytes or forget-grant"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn the_device_has_one_owner_per_slice_and_never_an_old_epoch(orders in prop::collection::vec(order(), 1..40)) {
        let directory = tempfile::tempdir().unwrap();
        let (mut device, mut model) = (device(&directory), Model::default());
        for order in orders {
            match order {
                Order::Restart => {
                    drop(device);
                    device = self::device(&directory);
                }
                call => prop_assert_eq!(call.make(&mut device), model.make(call), "{:?}", order),
            }
            let owners = device.contents().unwrap().grants.into_iter().map(|g| (g.slice, (g.epoch, g.host)));
            prop_assert_eq!(owners.collect::<BTreeMap<_, _>>(), model.owners.clone());
            prop_assert_eq!(fs::read_dir(directory.path().join("slices")).unwrap().count(), model.owners.len());
        }
    }
}
