//! Tests of the emulated EMC: its files, and random calls compared with a model.

use std::{collections::BTreeMap, os::unix::fs::FileExt as _};

use proptest::prelude::*;

use super::*;
use crate::device::model::{DeviceOp, Model, device_op};

const HOST: HostId = HostId(3);
const OTHER_HOST: HostId = HostId(4);

fn open_device(directory: &tempfile::TempDir) -> Emulated {
    Emulated::open(directory.path(), 8, None).unwrap()
}

fn open_file(handle: &Handle) -> File {
    fs::OpenOptions::new().read(true).write(true).open(handle.as_ref()).unwrap()
}

fn first_byte(file: &File) -> Option<u8> {
    let mut byte = [0];
    (file.read_at(&mut byte, 0).unwrap() == 1).then_some(byte[0])
}

#[test]
fn revoked_owner_cannot_read_its_open_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    let file = open_file(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(b"secret", 0).unwrap();
    assert_eq!(first_byte(&file), Some(b's'));
    device.revoke(1, Epoch(1)).unwrap();
    assert_eq!(first_byte(&file), None, "the revoked owner can still read");
    assert_eq!(fs::read_dir(directory.path().join("slices")).unwrap().count(), 0);
}

#[test]
fn symbolic_link_in_place_of_a_file_is_not_followed() {
    for name in ["lock", "epochs"] {
        let directory = tempfile::tempdir().unwrap();
        let (link, target) = (directory.path().join(name), directory.path().join("target"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let error = units::chain(&Emulated::open(directory.path(), 8, None).unwrap_err());
        assert!(error.ends_with(&format!("{name}: must be a regular file")), "{error}");
        assert!(!target.exists(), "{name}: the target of the link was created");
    }
}

#[test]
fn next_owner_gets_a_zeroed_private_slice() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    let file = open_file(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(&[7; 4096], 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    let file = open_file(&device.grant(1, Epoch(2), OTHER_HOST).unwrap());
    assert_eq!(first_byte(&file), Some(0));
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), SLICE.get());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
}

#[test]
fn handle_is_a_path_with_slice_epoch_and_host() {
    let directory = tempfile::tempdir().unwrap();
    let handle = open_device(&directory).grant(7, Epoch(42), HOST).unwrap();
    assert_eq!(Path::new(handle.as_ref()), directory.path().join("slices/00007.42.h3"));
}

#[test]
fn grants_and_epochs_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = open_device(&directory);
    first.grant(1, Epoch(5), HOST).unwrap();
    first.grant(2, Epoch(6), OTHER_HOST).unwrap();
    first.revoke(2, Epoch(6)).unwrap();
    let before = first.contents().unwrap();
    drop(first);
    let mut second = open_device(&directory);
    assert_eq!(second.contents().unwrap(), before);
    assert!(matches!(second.grant(2, Epoch(6), OTHER_HOST), Err(DeviceError::StaleEpoch { .. })));
    second.grant(1, Epoch(5), HOST).unwrap();
}

#[test]
fn held_slice_is_not_granted_to_another_owner() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    device.grant(1, Epoch(1), HOST).unwrap();
    for (epoch, host) in [(Epoch(2), OTHER_HOST), (Epoch(2), HOST), (Epoch(1), OTHER_HOST)] {
        let error = device.grant(1, epoch, host).unwrap_err().to_string();
        assert_eq!(error, "slice 1 is held by host#3 with epoch 1: it must be revoked first");
    }
}

#[test]
fn revocation_ends_this_and_earlier_epochs() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    device.grant(1, Epoch(3), HOST).unwrap();
    device.revoke(1, Epoch(2)).unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1, "the owner with a later epoch lost the slice");
    device.revoke(1, Epoch(5)).unwrap();
    assert_eq!(device.contents().unwrap().grants, []);
    assert!(device.grant(1, Epoch(4), OTHER_HOST).is_err(), "a revoked epoch was granted");
    device.grant(1, Epoch(6), OTHER_HOST).unwrap();
}

#[test]
fn failed_revocation_blocks_grants_until_it_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    let name = device.grant(1, Epoch(3), HOST).unwrap();
    let aside = directory.path().join("aside");
    fs::rename(name.as_ref(), &aside).unwrap();
    fs::create_dir(name.as_ref()).unwrap();
    assert!(matches!(device.revoke(1, Epoch(5)), Err(DeviceError::Slice { .. })));
    assert!(
        device.grant(1, Epoch(6), OTHER_HOST).is_err(),
        "the slice was granted while another host can access it"
    );
    assert!(device.grant(1, Epoch(3), HOST).is_err(), "a revoked epoch was granted again");
    fs::remove_dir(name.as_ref()).unwrap();
    fs::rename(&aside, name.as_ref()).unwrap();
    let file = open_file(&name);
    device.revoke(1, Epoch(3)).unwrap();
    assert_eq!(first_byte(&file), None);
    device.grant(1, Epoch(6), OTHER_HOST).unwrap();
}

#[test]
fn fence_revokes_all_slices_of_one_host_only() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    for slice in 0..4 {
        device.grant(slice, Epoch(1), if slice % 2 == 0 { HOST } else { OTHER_HOST }).unwrap();
    }
    let revoked: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(revoked, [0, 2]);
    let remaining: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(remaining, [1, 3]);
    assert_eq!(device.fence(HOST).unwrap(), []);
}

/// Replaces a slice's file by a directory, so that it cannot be revoked. Returns the new path of
/// the file.
fn replace_with_directory(directory: &tempfile::TempDir, handle: &Handle) -> PathBuf {
    let aside = directory.path().join("aside");
    fs::rename(handle.as_ref(), &aside).unwrap();
    fs::create_dir(handle.as_ref()).unwrap();
    aside
}

#[test]
fn fence_leaves_unrevocable_slices_granted() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    let handles: Vec<Handle> = (0..3).map(|slice| device.grant(slice, Epoch(1), HOST).unwrap()).collect();
    let aside = replace_with_directory(&directory, &handles[1]);
    let revoked: Vec<u32> = device.fence(HOST).unwrap().iter().map(|grant| grant.slice).collect();
    assert_eq!(revoked, [0, 2]);
    let remaining: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(remaining, [1], "slice 1 must stay granted");
    fs::remove_dir(handles[1].as_ref()).unwrap();
    fs::rename(aside, handles[1].as_ref()).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    assert_eq!(device.contents().unwrap().grants, []);
}

#[test]
fn failed_slice_stays_granted_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut first = open_device(&directory);
    let handles: Vec<Handle> = (0..3).map(|slice| first.grant(slice, Epoch(1), HOST).unwrap()).collect();
    replace_with_directory(&directory, &handles[0]);
    assert!(first.revoke(0, Epoch(1)).is_err());
    fs::remove_file(handles[1].as_ref()).unwrap();
    fs::create_dir(handles[1].as_ref()).unwrap();
    drop(first);
    let mut second = open_device(&directory);
    let granted: Vec<u32> = second.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(granted, [0, 1, 2]);
    assert!(
        second.grant(0, Epoch(2), OTHER_HOST).is_err(),
        "the slice was granted while another host can access it"
    );
    second.grant(3, Epoch(1), OTHER_HOST).unwrap();
}

#[test]
fn device_in_use_is_not_opened_again() {
    let directory = tempfile::tempdir().unwrap();
    let _first = open_device(&directory);
    assert!(matches!(Emulated::open(directory.path(), 8, None), Err(DeviceError::InUse { .. })));
}

fn open_elected(directory: &tempfile::TempDir, election: u64) -> Result<Emulated, DeviceError> {
    Emulated::open(directory.path(), 8, Some(FencingToken { generation: 1, election }))
}

fn names_of_epochs(directory: &tempfile::TempDir) -> Vec<String> {
    let entries = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
    entries.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("epochs")).collect()
}

/// The earlier manager continues with calls that it decided before the later one was elected.
#[test]
fn calls_of_an_earlier_manager_do_not_change_the_grants_of_a_later_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut earlier = open_elected(&directory, 5).unwrap();
    for slice in 0..4 {
        earlier.grant(slice, Epoch(1), HOST).unwrap();
    }
    let mut later = open_elected(&directory, 7).unwrap();
    assert_eq!(later.contents().unwrap().grants.len(), 4);
    for slice in 0..3 {
        later.revoke(slice, Epoch(1)).unwrap();
        later.grant(slice, Epoch(3), OTHER_HOST).unwrap();
    }
    earlier.revoke(0, Epoch(1)).unwrap();
    earlier.fence(HOST).unwrap();
    earlier.grant(1, Epoch(2), HOST).unwrap();
    earlier.grant(5, Epoch(9), HOST).unwrap();
    let expected: Vec<_> =
        (0..4).map(|slice| if slice < 3 { (slice, 3, OTHER_HOST) } else { (3, 1, HOST) }).collect();
    let grants = |device: &mut Emulated| -> Vec<_> {
        let grants = device.contents().unwrap().grants.into_iter();
        grants.map(|grant| (grant.slice, grant.epoch.0, grant.host)).collect()
    };
    assert_eq!(grants(&mut later), expected);
    drop(later);
    // The fence of the earlier manager removed the file of slice 3, which the ledger records as fenced.
    let mut reopened = open_elected(&directory, 8).unwrap();
    assert_eq!(grants(&mut reopened)[..3], expected[..3]);
    let highest = reopened.contents().unwrap().highest;
    assert_eq!((highest[0], highest[1]), (Epoch(3), Epoch(3)));
    assert!(matches!(reopened.grant(1, Epoch(2), HOST), Err(DeviceError::Held { .. })));
}

#[test]
fn device_is_not_opened_by_an_earlier_manager() {
    let directory = tempfile::tempdir().unwrap();
    drop(open_elected(&directory, 7).unwrap());
    let error = open_elected(&directory, 5).unwrap_err();
    assert!(matches!(error, DeviceError::LaterManager { .. }), "{error}");
    assert_eq!(names_of_epochs(&directory), ["epochs.1.7"]);
    let later_generation = FencingToken { generation: 2, election: 1 };
    drop(Emulated::open(directory.path(), 8, Some(later_generation)).unwrap());
    assert!(matches!(open_elected(&directory, 9), Err(DeviceError::LaterManager { .. })));
}

#[test]
fn paused_manager_finds_that_a_later_one_has_opened_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let _earlier = open_elected(&directory, 5).unwrap();
    let epochs = directory.path().join("epochs.1.5");
    epochs::check_latest(&epochs).unwrap();
    drop(open_elected(&directory, 7).unwrap());
    let error = epochs::check_latest(&epochs).unwrap_err();
    assert!(matches!(error, DeviceError::LaterManager { .. }), "{error}");
}

#[test]
fn only_manager_and_elected_managers_exclude_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let mut only = open_device(&directory);
    only.grant(2, Epoch(4), HOST).unwrap();
    assert!(matches!(open_elected(&directory, 1), Err(DeviceError::InUse { .. })));
    drop(only);
    let elected = [open_elected(&directory, 1).unwrap(), open_elected(&directory, 2).unwrap()];
    assert!(matches!(Emulated::open(directory.path(), 8, None), Err(DeviceError::InUse { .. })));
    drop(elected);
    let mut only = open_device(&directory);
    assert_eq!(names_of_epochs(&directory), ["epochs"]);
    assert_eq!(only.contents().unwrap().highest[2], Epoch(4));
    drop(only);
    // Another cluster of etcd starts with low tokens.
    assert_eq!(open_elected(&directory, 1).unwrap().contents().unwrap().highest[2], Epoch(4));
}

#[test]
fn device_can_grow_but_not_shrink() {
    let directory = tempfile::tempdir().unwrap();
    open_device(&directory).grant(7, Epoch(1), HOST).unwrap();
    let error = Emulated::open(directory.path(), 4, None).unwrap_err().to_string();
    assert!(error.contains("64 bytes: must be a multiple of 8, at most 32 for 4 slices"), "{error}");
    let mut grown = Emulated::open(directory.path(), 16, None).unwrap();
    assert_eq!(grown.contents().unwrap().grants.len(), 1);
    grown.grant(15, Epoch(1), HOST).unwrap();
    let error = grown.grant(16, Epoch(1), HOST).unwrap_err().to_string();
    assert_eq!(error, "no slice 16 on this EMC: must be below 16");
}

/// Creates the files that a manager leaves if it is killed between two steps of a grant or a
/// revocation.
#[test]
fn interrupted_grants_are_completed_and_revocations_reported() {
    let directory = tempfile::tempdir().unwrap();
    open_device(&directory);
    let slices = directory.path().join("slices");
    let epochs = File::options().write(true).open(directory.path().join("epochs")).unwrap();
    let entry = |slice: u64, entry: u64| epochs.write_all_at(&entry.to_le_bytes(), slice * 8).unwrap();
    // Slice 0: a grant without a file. Slice 1: a grant whose file is still empty.
    entry(0, 5 << 1);
    entry(1, 5 << 1);
    File::create(slices.join("00001.5.h3")).unwrap();
    // Slice 2: a revocation that was only recorded. Slice 3: one that has also truncated the file.
    entry(2, 5 << 1 | 1);
    File::create(slices.join("00002.5.h3")).unwrap().set_len(SLICE.get()).unwrap();
    entry(3, 5 << 1 | 1);
    File::create(slices.join("00003.5.h3")).unwrap();

    let mut device = open_device(&directory);
    let granted: Vec<u32> = device.contents().unwrap().grants.iter().map(|grant| grant.slice).collect();
    assert_eq!(granted, [1, 2, 3]);
    assert_eq!(fs::metadata(slices.join("00001.5.h3")).unwrap().len(), SLICE.get());
    device.grant(0, Epoch(5), HOST).unwrap();
    for slice in [2, 3] {
        let repeated = device.grant(slice, Epoch(5), HOST);
        assert!(matches!(repeated, Err(DeviceError::StaleEpoch { .. })), "{repeated:?}");
        device.revoke(slice, Epoch(5)).unwrap();
    }
    assert_eq!(fs::read_dir(&slices).unwrap().count(), 2);
}

#[test]
fn earlier_epoch_is_rejected_after_loss_of_the_epochs_file() {
    let directory = tempfile::tempdir().unwrap();
    open_device(&directory).grant(1, Epoch(9), HOST).unwrap();
    fs::remove_file(directory.path().join("epochs")).unwrap();
    let mut device = open_device(&directory);
    assert_eq!(device.contents().unwrap().highest[1], Epoch(9));
    let error = device.grant(1, Epoch(8), OTHER_HOST);
    assert!(matches!(error, Err(DeviceError::Held { epoch: Epoch(9), host: HOST, .. })), "{error:?}");
}

#[test]
fn full_device_rejects_grants_and_accepts_revocations() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_device(&directory);
    device.grant(1, Epoch(1), HOST).unwrap();
    device.commit().unwrap();
    device.free_bytes_min = u64::MAX;
    assert!(matches!(device.grant(2, Epoch(1), HOST), Err(DeviceError::NoSpace { .. })));
    assert_eq!(device.contents().unwrap().highest[2], Epoch(0), "the rejected grant changed the epoch");
    device.grant(1, Epoch(1), HOST).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
}

fn open_with_fault(directory: &tempfile::TempDir, word: &str) -> Emulated {
    let device = open_device(directory);
    fs::write(directory.path().join("fault"), word).unwrap();
    device
}

#[test]
fn fault_ignore_revoke_leaves_the_old_owner_access() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_with_fault(&directory, "ignore-revoke");
    let file = open_file(&device.grant(1, Epoch(1), HOST).unwrap());
    file.write_all_at(b"secret", 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    device.grant(1, Epoch(2), OTHER_HOST).unwrap();
    assert_eq!(first_byte(&file), Some(b's'), "the revocation was not ignored");
}

#[test]
fn fault_keep_bytes_exposes_old_bytes_after_a_scrub() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_with_fault(&directory, "keep-bytes\n");
    open_file(&device.grant(1, Epoch(1), HOST).unwrap()).write_all_at(b"secret", 0).unwrap();
    device.revoke(1, Epoch(1)).unwrap();
    open_file(&device.grant(1, Epoch(2), OTHER_HOST).unwrap()).write_all_at(&[0; 4096], 0).unwrap();
    device.revoke(1, Epoch(2)).unwrap();
    let file = open_file(&device.grant(1, Epoch(3), OTHER_HOST).unwrap());
    assert_eq!(first_byte(&file), Some(b's'));
}

#[test]
fn fault_forget_grant_omits_a_grant_until_removed() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = open_with_fault(&directory, "forget-grant");
    device.grant(1, Epoch(1), HOST).unwrap();
    device.grant(2, Epoch(1), HOST).unwrap();
    device.commit().unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1);
    device.commit().unwrap();
    fs::remove_file(directory.path().join("fault")).unwrap();
    assert_eq!(device.contents().unwrap().grants.len(), 1);
}

#[test]
fn unknown_fault_is_rejected_at_start() {
    let directory = tempfile::tempdir().unwrap();
    drop(open_with_fault(&directory, "no-such-fault"));
    let error = Emulated::open(directory.path(), 8, None).unwrap_err().to_string();
    assert!(
        error.ends_with(
            "its fault file contains \"no-such-fault\": must be ignore-revoke, keep-bytes or forget-grant"
        ),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// VMs may use the files, and only the ledger knows whether they do.
    #[test]
    fn open_keeps_the_files_of_grants_if_epochs_is_damaged(
        grants in prop::collection::btree_map(0..8_u32, 1..20_u64, 1..8),
        damage in prop::collection::vec((0..8_u64, prop_oneof![any::<u64>(), 0..50_u64]), 1..8),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut device = open_device(&directory);
        for (slice, epoch) in &grants {
            device.grant(*slice, Epoch(*epoch), HOST).unwrap();
        }
        let before = device.contents().unwrap().grants;
        drop(device);
        let epochs = File::options().write(true).open(directory.path().join("epochs")).unwrap();
        for (slice, entry) in damage {
            epochs.write_all_at(&entry.to_le_bytes(), slice * EPOCH_ENTRY_BYTES).unwrap();
        }
        prop_assert_eq!(&open_device(&directory).contents().unwrap().grants, &before);
        for grant in before {
            prop_assert_eq!(fs::metadata(&*grant.handle).unwrap().len(), SLICE.get());
        }
    }

    #[test]
    fn device_matches_the_model(ops in prop::collection::vec(device_op(), 1..40)) {
        let directory = tempfile::tempdir().unwrap();
        let (mut device, mut model) = (open_device(&directory), Model::default());
        for op in ops {
            match op {
                DeviceOp::Restart => {
                    drop(device);
                    device = self::open_device(&directory);
                }
                call => prop_assert_eq!(call.apply(&mut device), model.apply(call), "{:?}", op),
            }
            let owners = device.contents().unwrap().grants.into_iter().map(|g| (g.slice, (g.epoch, g.host)));
            prop_assert_eq!(owners.collect::<BTreeMap<_, _>>(), model.owners.clone());
            prop_assert_eq!(fs::read_dir(directory.path().join("slices")).unwrap().count(), model.owners.len());
        }
    }
}
