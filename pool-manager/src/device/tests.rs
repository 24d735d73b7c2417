//! Assignment of an EMC's directory to a rack.

use std::fs;

use super::*;

const RACK_UUID: &str = "11111111-2222-3333-4444-555555555555";
const OTHER_RACK_UUID: &str = "99999999-2222-3333-4444-555555555555";

/// Opens an EMC of a rack with the EMCs e1 and e2.
fn open_emc(folder: &Path, name: &str) -> Result<(), DeviceError> {
    let others = ["e1", "e2"].into_iter().filter(|other| *other != name);
    let owner = EmcOwner {
        rack: RACK_UUID.to_owned(),
        emc: Name::new(name).unwrap(),
        others: others.map(|other| Name::new(other).unwrap()).collect(),
    };
    Driver::Emulated.open(folder, 1, "", &owner, None).map(drop)
}

/// Opens an EMC of [`RACK_UUID`] whose rack UUID file has `contents`. Returns the error, and checks that
/// nothing was changed.
fn failed_open_error(contents: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(RACK_UUID_FILE);
    fs::write(&file, contents).unwrap();
    let error = open_emc(folder.path(), "e1").unwrap_err();
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
        (format!("{RACK_UUID}\ne 1\n").as_bytes(), &format!("\"{RACK_UUID}\\ne 1\"")),
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
    open_emc(folder.path(), "e1").unwrap();
    open_emc(folder.path(), "e1").unwrap();
    let file = fs::read_to_string(folder.path().join(RACK_UUID_FILE)).unwrap();
    assert_eq!(file, format!("{RACK_UUID}\ne1\n"));
}

/// Regression test: with the paths of two EMCs exchanged, each had the grants of the other.
#[test]
fn directory_of_another_emc_of_the_rack_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    open_emc(folder.path(), "e1").unwrap();
    let error = units::chain(&open_emc(folder.path(), "e2").unwrap_err());
    assert!(error.contains("/rack-uuid contains EMC e1, expected e2: stop pool-manager"), "{error}");
    open_emc(folder.path(), "e1").unwrap();
}

#[test]
fn directory_of_a_removed_emc_is_assigned_to_its_successor() {
    let folder = tempfile::tempdir().unwrap();
    open_emc(folder.path(), "removed").unwrap();
    open_emc(folder.path(), "e2").unwrap();
    let error = units::chain(&open_emc(folder.path(), "e1").unwrap_err());
    assert!(error.contains("contains EMC e2, expected e1"), "{error}");
}

/// The directory may be that of another EMC. If its name were written, the directories of two
/// exchanged EMCs could not be moved back.
#[test]
fn directory_with_grants_gets_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(RACK_UUID_FILE);
    open_emc(folder.path(), "e1").unwrap();
    fs::write(&file, format!("{RACK_UUID}\n")).unwrap();
    fs::write(folder.path().join("slices/00000.1.h0"), "").unwrap();
    open_emc(folder.path(), "e2").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{RACK_UUID}\n"));
    fs::remove_file(&file).unwrap();
    open_emc(folder.path(), "e2").unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{RACK_UUID}\n"), "the rack is written");
}

#[test]
fn rack_uuid_file_of_an_earlier_version_gets_the_name_of_the_emc() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(RACK_UUID_FILE);
    fs::write(&file, format!("{RACK_UUID}\n")).unwrap();
    open_emc(folder.path(), "e1").unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), format!("{RACK_UUID}\ne1\n"));
}
