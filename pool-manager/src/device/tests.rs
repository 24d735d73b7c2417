//! Assignment of an EMC's directory to a rack.

use std::fs;

use super::*;

const RACK_UUID: &str = "11111111-2222-3333-4444-555555555555";
const OTHER_RACK_UUID: &str = "99999999-2222-3333-4444-555555555555";

/// Opens an EMC of [`RACK_UUID`] whose rack UUID file has `contents`. Returns the error, and checks that
/// nothing was changed.
fn failed_open_error(contents: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(RACK_UUID_FILE);
    fs::write(&file, contents).unwrap();
    let error = Driver::Emulated.open(folder.path(), 1, "", RACK_UUID).map(drop).unwrap_err();
    assert_eq!(fs::read(&file).unwrap(), contents);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the EMC was changed");
    units::chain(&error).replace(&folder.path().display().to_string(), "EMC")
}

#[test]
fn emc_of_another_rack_is_rejected_with_both_uuids() {
    let error = failed_open_error(format!("{OTHER_RACK_UUID}\n").as_bytes());
    let found = format!("EMC/rack-uuid contains rack {OTHER_RACK_UUID}, expected {RACK_UUID}: ");
    assert!(error.starts_with(&found), "{error}");
    let (restore, remove) = (
        error.find(&format!("mount or restore the store of rack {OTHER_RACK_UUID}")),
        error.find("remove EMC"),
    );
    assert!(restore.is_some() && restore < remove, "a wrong store must be named before removal: {error}");
    assert!(error.contains("if emc.path is wrong, remove the EMC and add it under another name"), "{error}");
}

#[test]
fn damaged_rack_uuid_file_of_an_emc_is_not_another_rack() {
    for (contents, found) in [
        (&b""[..], "\"\""),
        (b"\0\0\0\0", "\"\\0\\0\\0\\0\""),
        (b"\xff\xfe", "\"\u{fffd}\u{fffd}\""),
        (&RACK_UUID.as_bytes()[..20], "\"11111111-2222-3333-4\""),
    ] {
        let error = failed_open_error(contents);
        let expected = format!("EMC/rack-uuid is damaged: contains {found}, expected {RACK_UUID}: ");
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.contains("remove the file") && !error.contains("remove EMC"), "{error}");
    }
}

#[test]
fn emc_without_rack_uuid_is_assigned_to_the_rack() {
    let folder = tempfile::tempdir().unwrap();
    drop(Driver::Emulated.open(folder.path(), 1, "", RACK_UUID).unwrap());
    drop(Driver::Emulated.open(folder.path(), 1, "", RACK_UUID).unwrap());
    let file = fs::read_to_string(folder.path().join(RACK_UUID_FILE)).unwrap();
    assert_eq!(file.trim_end(), RACK_UUID);
}
