//! Creates the rack in the directory of a store, opens it, and detects a missing or lost ledger.
//!
//! Only [`init`] creates a rack. A missing or empty directory can be the mount point of a disk that
//! is not mounted, and a new rack there would take the slices of the rack on this disk.
//!
//! A directory contains a rack once the ledger has its metadata. The [`mod@rack_uuid_file`] and the
//! tokens of hosts and roles are written afterwards. A directory has lost its ledger if it has one
//! of these files, or a ledger of another name, but no ledger. Creating a new rack there would lose
//! the owners of slices.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use pool::record::{Meta, Record};
use rustix::fs::Access;

use crate::{
    rack_uuid_file::{self, RACK_UUID_FILE, RackUuidFile},
    records::{self, LoadError, StoreContents},
    store::{
        Store, StoreError,
        disk::DATABASE_FILE,
        redb::{self, FileContents, RedbStore},
    },
    token_paths,
};

/// Error for a directory that cannot be used as the store of a rack.
#[derive(Debug, thiserror::Error)]
pub enum StoreFolderError {
    /// The directory contained a rack, but its ledger is lost.
    #[error(
        "the ledger {} {defect}, but its directory belongs to a rack ({evidence}): restore a backup with \
         `pool-manager restore --config {1} --from BACKUP`; to abandon the rack, remove the directory and run \
         `pool-manager init --config {1}`",
        ledger.display(), rack_toml.display()
    )]
    LedgerLost {
        /// Database file of the ledger, or its location in etcd.
        ledger: PathBuf,
        /// Defect of the ledger, such as "is missing".
        defect: &'static str,
        /// File that proves that the directory belongs to a rack, and its contents.
        evidence: String,
        /// Configuration file that names the directory.
        rack_toml: PathBuf,
    },
    /// The directory contains no rack, and no evidence that it ever contained one.
    #[error(
        "no store at {}: {defect}: mount the file system of the existing store, or restore a backup with \
         `pool-manager restore --config {1} --from BACKUP`; only to create a new rack, run `pool-manager init --config {1}`",
        folder.display(), rack_toml.display()
    )]
    NoRack {
        /// Directory of the store.
        folder: PathBuf,
        /// Reason, such as "the folder does not exist".
        defect: String,
        /// Configuration file that names the directory.
        rack_toml: PathBuf,
    },
    /// The prefix in etcd contains no rack, and the folder of the manager shows no evidence that it ever did.
    #[error(
        "no store at {}: it contains no rack: correct manager.store, or restore a backup with \
         `pool-manager restore --config {1} --from BACKUP`; only to create a new rack, run `pool-manager init --config {1}`",
        ledger.display(), rack_toml.display()
    )]
    NoRackInEtcd {
        /// Location of the ledger in etcd.
        ledger: PathBuf,
        /// Configuration file that names the location.
        rack_toml: PathBuf,
    },
    /// The ledger belongs to another rack.
    #[error(
        "{}/{RACK_UUID_FILE} contains rack {folder_rack}, expected {ledger_rack}, the rack of {2}: if manager.store is wrong, correct it; \
         if the ledger is the wrong one, restore a backup of rack {folder_rack} with \
         `pool-manager restore --config {1} --from BACKUP --force`; \
         to continue with rack {ledger_rack}, remove the file {RACK_UUID_FILE}",
        folder.display(), rack_toml.display(), ledger.display()
    )]
    OtherRack {
        /// Directory with the file [`RACK_UUID_FILE`].
        folder: PathBuf,
        /// Database file of the ledger, or its location in etcd.
        ledger: Box<Path>,
        /// UUID of the rack in the ledger.
        ledger_rack: String,
        /// UUID of the rack in the file [`RACK_UUID_FILE`].
        folder_rack: String,
        /// Configuration file that names the directory.
        rack_toml: PathBuf,
    },
    /// The file [`RACK_UUID_FILE`] contains no UUID.
    #[error(
        "{}/{RACK_UUID_FILE} is damaged: contains {found:?}, expected {ledger_rack}, the rack of {2}: if this is the rack of the folder, \
         remove the file, and pool-manager writes it again; otherwise restore a backup with \
         `pool-manager restore --config {1} --from BACKUP --force`",
        folder.display(), rack_toml.display(), ledger.display()
    )]
    DamagedRackUuid {
        /// Directory with the file [`RACK_UUID_FILE`].
        folder: PathBuf,
        /// Database file of the ledger, or its location in etcd.
        ledger: Box<Path>,
        /// Beginning of the file.
        found: String,
        /// UUID of the rack in the ledger.
        ledger_rack: String,
        /// Configuration file that names the directory.
        rack_toml: PathBuf,
    },
    /// `pool-manager init` was run in a directory that contains a rack.
    #[error("{} already contains rack {rack_uuid}: the rack is unchanged", store.display())]
    RackExists {
        /// Directory of the store, or its location in etcd.
        store: PathBuf,
        /// UUID of the existing rack.
        rack_uuid: String,
    },
    /// The store cannot be opened, read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The contents of the store are invalid.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as "read".
        operation: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

/// Opened store of a rack, with its contents.
pub struct OpenedStore {
    /// Open store.
    pub store: Box<dyn Store>,
    /// Metadata of the ledger.
    pub meta: Meta,
    /// Records of the ledger.
    pub records: Vec<Record>,
    /// Whether the store was restored from a backup since the last start.
    pub restored: bool,
}

impl std::fmt::Debug for OpenedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenedStore").field("meta", &self.meta).finish_non_exhaustive()
    }
}

/// Opens the store of an existing rack. `rack_toml` is the configuration file, for messages.
///
/// # Errors
/// [`StoreFolderError`] if the directory contains no rack, lost its ledger, contains the ledger of
/// another rack, or cannot be used. None of these errors creates a directory or a ledger.
pub fn open(folder: &Path, rack_toml: &Path) -> Result<OpenedStore, StoreFolderError> {
    check_file(folder, rack_toml)?;
    let mut store = RedbStore::open_existing(folder)?;
    let StoreContents { meta, records, restored } = records::load(&mut store)?;
    let meta = check_rack(folder, meta, rack_toml)?;
    write_missing_uuid(folder, &meta)?;
    Ok(OpenedStore { store: Box::new(store), meta, records, restored })
}

/// Manager whose ledger is in etcd.
#[derive(Clone, Copy, Debug)]
pub struct EtcdManager<'a> {
    /// Location of the ledger in etcd.
    pub ledger: &'a Path,
    /// Folder of the manager.
    pub folder: &'a Path,
    /// Configuration file, for messages.
    pub rack_toml: &'a Path,
}

impl EtcdManager<'_> {
    /// Loads the ledger of an existing rack from the store, of which this manager is the leader.
    ///
    /// # Errors
    /// [`StoreFolderError`] if the store contains no rack, or that of another folder, or cannot be read.
    pub fn load(self, store: Box<dyn Store>) -> Result<OpenedStore, StoreFolderError> {
        let StoreContents { meta, records, restored } = records::load(store.snapshot()?.as_mut())?;
        Ok(OpenedStore { store, meta: self.prepare_folder(meta)?, records, restored })
    }

    /// Checks that the store contains a rack, and that the folder of the manager belongs to no other rack. Returns the
    /// metadata of the ledger. Changes nothing.
    ///
    /// # Errors
    /// [`StoreFolderError`].
    pub fn check_rack(self, meta: Option<Meta>) -> Result<Meta, StoreFolderError> {
        let Self { ledger, folder, rack_toml } = self;
        verify_rack(folder, ledger, meta, rack_toml)?.ok_or_else(|| {
            let (ledger, rack_toml) = (ledger.to_owned(), rack_toml.to_owned());
            StoreFolderError::NoRackInEtcd { ledger, rack_toml }
        })
    }

    /// Checks the rack, and that this manager can write to its folder, which it creates if it is missing. Returns the
    /// metadata of the ledger.
    ///
    /// # Errors
    /// [`StoreFolderError`].
    pub fn prepare_folder(self, meta: Option<Meta>) -> Result<Meta, StoreFolderError> {
        let meta = self.check_rack(meta)?;
        write_missing_uuid(self.folder, &meta)?;
        let permitted = rustix::fs::access(self.folder, Access::WRITE_OK | Access::EXEC_OK);
        permitted.map_err(|errno| io_error("write to", self.folder)(errno.into()))?;
        Ok(meta)
    }
}

/// Creates a rack with UUID `new_uuid` in an empty store in etcd.
///
/// # Errors
/// [`StoreFolderError::RackExists`] if the store contains a rack, or another [`StoreFolderError`] if the folder of the
/// manager belongs to a rack, or the store cannot be written.
pub fn init_in_etcd(
    store: &mut dyn Store,
    ledger: &Path,
    folder: &Path,
    new_uuid: &str,
    rack_toml: &Path,
) -> Result<(), StoreFolderError> {
    let found = records::load(store.snapshot()?.as_mut())?.meta;
    if let Some(meta) = verify_rack(folder, ledger, found, rack_toml)? {
        write_missing_uuid(folder, &meta)?;
        return Err(StoreFolderError::RackExists { store: ledger.to_owned(), rack_uuid: meta.rack_uuid });
    }
    let meta = Meta::new(new_uuid.to_owned());
    store.commit(&[records::write(&Record::Meta(meta.clone()))])?;
    write_missing_uuid(folder, &meta)
}

/// Creates a rack with UUID `new_uuid` in a directory that never contained one. `rack_toml` is the
/// configuration file, for messages.
///
/// # Errors
/// [`StoreFolderError::RackExists`] if the directory contains a rack, or another
/// [`StoreFolderError`] if it lost its ledger, contains the ledger of another rack, or cannot be
/// used.
pub fn init(folder: &Path, new_uuid: &str, rack_toml: &Path) -> Result<(), StoreFolderError> {
    find_file_defect(folder, rack_toml)?;
    let mut store = RedbStore::open_directory(folder)?;
    let meta = verify_rack(folder, &folder.join(DATABASE_FILE), records::load(&mut store)?.meta, rack_toml)?;
    if let Some(meta) = meta {
        write_missing_uuid(folder, &meta)?;
        return Err(StoreFolderError::RackExists { store: folder.to_owned(), rack_uuid: meta.rack_uuid });
    }
    let meta = Meta::new(new_uuid.to_owned());
    store.commit(&[records::write(&Record::Meta(meta.clone()))])?;
    write_missing_uuid(folder, &meta)
}

/// Writes the rack UUID file, unless it exists. A crash during [`init`] can leave a rack without
/// this file.
fn write_missing_uuid(folder: &Path, meta: &Meta) -> Result<(), StoreFolderError> {
    if read_rack_uuid(folder)?.is_none() {
        fs::create_dir_all(folder).map_err(io_error("create", folder))?;
        rack_uuid_file::write(folder, &meta.rack_uuid, None)
            .map_err(io_error("write", &folder.join(RACK_UUID_FILE)))?;
    }
    Ok(())
}

/// Returns a new UUID from random numbers of the kernel.
pub fn random_uuid() -> String {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random numbers");
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Checks that the directory has a ledger file. Must be called before the store is opened, because
/// opening an empty file would write to it. `rack_toml` is the configuration file, for messages.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] or [`StoreFolderError::NoRack`] if the file is missing or
/// empty.
pub fn check_file(folder: &Path, rack_toml: &Path) -> Result<(), StoreFolderError> {
    let defect = find_file_defect(folder, rack_toml)?;
    defect.map_or(Ok(()), |defect| Err(missing_rack_error(folder, defect, rack_toml)))
}

/// Checks that the ledger contains a rack, and that its directory belongs to the same rack. Returns
/// the metadata of the ledger. `rack_toml` is the configuration file, for messages.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] or [`StoreFolderError::NoRack`] if the ledger has no rack,
/// [`StoreFolderError::OtherRack`] or [`StoreFolderError::DamagedRackUuid`] if the directory does
/// not belong to the rack of the ledger.
pub fn check_rack(folder: &Path, meta: Option<Meta>, rack_toml: &Path) -> Result<Meta, StoreFolderError> {
    let defect = || format!("{DATABASE_FILE} contains no rack");
    let ledger = folder.join(DATABASE_FILE);
    verify_rack(folder, &ledger, meta, rack_toml)?
        .ok_or_else(|| missing_rack_error(folder, defect(), rack_toml))
}

fn missing_rack_error(folder: &Path, defect: String, rack_toml: &Path) -> StoreFolderError {
    StoreFolderError::NoRack { folder: folder.to_owned(), defect, rack_toml: rack_toml.to_owned() }
}

/// Returns the defect of a ledger file that is missing or blank, or `None` if the file has
/// contents.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] if the file has a defect, but the directory belongs to a rack,
/// or if the file contains only zeros.
fn find_file_defect(folder: &Path, rack_toml: &Path) -> Result<Option<String>, StoreFolderError> {
    let ledger = folder.join(DATABASE_FILE);
    let contents = redb::inspect_file(&ledger)?;
    let defect = match contents {
        FileContents::Other => return Ok(None),
        FileContents::Missing => "is missing",
        FileContents::Blank => "is empty",
        FileContents::Zeros => "contains only zeros",
    };
    let zeros = "only a lost ledger or an interrupted `pool-manager init` leaves such a file";
    let zeros = (contents == FileContents::Zeros).then(|| zeros.to_owned());
    match find_rack_evidence(folder)?.or(zeros) {
        Some(evidence) => {
            let rack_toml = rack_toml.to_owned();
            Err(StoreFolderError::LedgerLost { ledger, defect, evidence, rack_toml })
        }
        None if contents == FileContents::Missing => missing_store_defect(folder).map(Some),
        None => Ok(Some(format!("{DATABASE_FILE} {defect}"))),
    }
}

/// Returns the reason for a missing ledger file.
fn missing_store_defect(folder: &Path) -> Result<String, StoreFolderError> {
    match fs::read_dir(folder) {
        Ok(mut entries) => Ok(match entries.next() {
            None => "the folder is empty".to_owned(),
            Some(_) => format!("{DATABASE_FILE} is missing"),
        }),
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => Ok("the folder does not exist".to_owned()),
        Err(errno) => Err(io_error("list", folder)(errno)),
    }
}

/// Checks that the ledger and the folder belong to the same rack. Returns the metadata of the
/// ledger, or `None` if neither belongs to a rack.
///
/// # Errors
/// [`StoreFolderError`] if only one of them belongs to a rack, or the racks differ.
fn verify_rack(
    folder: &Path,
    ledger: &Path,
    meta: Option<Meta>,
    rack_toml: &Path,
) -> Result<Option<Meta>, StoreFolderError> {
    let (ledger, rack_toml) = (ledger.to_owned(), rack_toml.to_owned());
    let Some(meta) = meta else {
        let defect = "contains no rack";
        return find_rack_evidence(folder)?.map_or(Ok(None), |evidence| {
            Err(StoreFolderError::LedgerLost { ledger, defect, evidence, rack_toml })
        });
    };
    let (folder, ledger_rack) = (folder.to_owned(), meta.rack_uuid.clone());
    match read_rack_uuid(&folder)? {
        Some(RackUuidFile::Owner { rack: folder_rack, .. }) if folder_rack != meta.rack_uuid => {
            Err(StoreFolderError::OtherRack {
                folder,
                ledger: ledger.into(),
                ledger_rack,
                folder_rack,
                rack_toml,
            })
        }
        Some(RackUuidFile::Damaged(found)) => Err(StoreFolderError::DamagedRackUuid {
            folder,
            ledger: ledger.into(),
            found,
            ledger_rack,
            rack_toml,
        }),
        _ => Ok(Some(meta)),
    }
}

/// Returns a description of the file or directory that proves that `folder` belongs to a rack.
/// Returns `None` if there is no such file or directory. Does not consider the ledger.
///
/// # Errors
/// [`StoreFolderError::Io`] if the operating system does not report whether the files exist. This
/// is no proof that the directory belongs to no rack.
fn find_rack_evidence(folder: &Path) -> Result<Option<String>, StoreFolderError> {
    let file = folder.join(RACK_UUID_FILE);
    if let Some(other) = find_other_ledger(folder)? {
        return Ok(Some(format!(
            "{} contains a ledger or a backup, which `restore --from` accepts",
            other.display()
        )));
    }
    Ok(match read_rack_uuid(folder)? {
        Some(RackUuidFile::Owner { rack, .. }) => Some(format!("{} contains rack {rack}", file.display())),
        Some(RackUuidFile::Damaged(found)) => Some(format!("{} contains {found:?}", file.display())),
        None => find_token_directory(folder)?.map(|tokens| format!("{} exists", tokens.display())),
    })
}

/// Returns the path of a ledger or backup with another name than the ledger's, for example of a
/// renamed ledger.
fn find_other_ledger(folder: &Path) -> Result<Option<PathBuf>, StoreFolderError> {
    let entries = match fs::read_dir(folder) {
        Err(errno) if errno.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(io_error("list", folder))?,
    };
    for entry in entries {
        let entry = entry.map_err(io_error("list", folder))?;
        let (path, kind) = (entry.path(), entry.file_type());
        let is_file = kind.map_err(io_error("inspect", &path))?.is_file();
        if is_file && entry.file_name() != DATABASE_FILE {
            let is_store = redb::is_store_file(&path).map_err(io_error("read", &path))?;
            if is_store {
                return Ok(Some(path));
            }
        }
    }
    Ok(None)
}

/// Returns the path of the first directory with tokens, of hosts or roles, that exists.
fn find_token_directory(folder: &Path) -> Result<Option<PathBuf>, StoreFolderError> {
    for tokens in [token_paths::host_token_directory(folder), token_paths::role_token_directory(folder)] {
        if tokens.try_exists().map_err(io_error("find", &tokens))? {
            return Ok(Some(tokens));
        }
    }
    Ok(None)
}

fn read_rack_uuid(folder: &Path) -> Result<Option<RackUuidFile>, StoreFolderError> {
    rack_uuid_file::read(folder).map_err(io_error("read", &folder.join(RACK_UUID_FILE)))
}

fn io_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreFolderError {
    move |errno| StoreFolderError::Io { operation, path: path.to_owned(), errno }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::test_files::write_private_file;

    const UUID: &str = "11111111-2222-3333-4444-555555555555";
    const RACK_TOML: &str = "/etc/tarn/rack.toml";
    const OTHER_UUID: &str = "99999999-2222-3333-4444-555555555555";

    /// Creates a directory with a rack and the directory of its tokens.
    fn rack_folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        init_rack(folder.path(), UUID).unwrap();
        fs::create_dir(token_paths::host_token_directory(folder.path())).unwrap();
        folder
    }

    fn stored_uuid(folder: &Path) -> String {
        open(folder, RACK_TOML.as_ref()).unwrap().meta.rack_uuid
    }

    fn failed_open_error(folder: &Path) -> String {
        open(folder, RACK_TOML.as_ref()).unwrap_err().to_string()
    }

    fn init_rack(folder: &Path, new_uuid: &str) -> Result<(), StoreFolderError> {
        init(folder, new_uuid, RACK_TOML.as_ref())
    }

    fn failed_init_error(folder: &Path) -> String {
        init_rack(folder, OTHER_UUID).unwrap_err().to_string()
    }

    #[test]
    fn init_creates_a_rack_in_an_empty_directory() {
        let folder = tempfile::tempdir().unwrap();
        init_rack(&folder.path().join("new"), UUID).unwrap();
        assert_eq!(stored_uuid(&folder.path().join("new")), UUID);
        write_private_file(&folder.path().join(DATABASE_FILE), ""); // a crash during the creation of the store leaves an empty file
        init_rack(folder.path(), UUID).unwrap();
        assert_eq!(stored_uuid(folder.path()), UUID);
    }

    #[test]
    fn init_is_rejected_if_only_role_tokens_are_left() {
        let folder = tempfile::tempdir().unwrap();
        let roles = token_paths::role_token_directory(folder.path());
        fs::create_dir(&roles).unwrap();
        let error = failed_init_error(folder.path());
        let ledger = folder.path().join(DATABASE_FILE);
        let expected = format!("the ledger {} is missing, but its directory", ledger.display());
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.contains(&format!("({} exists)", roles.display())), "{error}");
        assert!(!ledger.exists());
    }

    #[test]
    fn open_without_a_rack_fails_and_names_the_remedies() {
        let folder = tempfile::tempdir().unwrap();
        drop(RedbStore::open_directory(folder.path()).unwrap()); // a crash during init leaves such a ledger
        let error = failed_open_error(folder.path());
        let expected = format!(
            "no store at {}: ledger.redb contains no rack: mount the file system of the existing store, or restore a backup with \
             `pool-manager restore --config {RACK_TOML} --from BACKUP`; only to create a new rack, run `pool-manager init --config {RACK_TOML}`",
            folder.path().display()
        );
        assert_eq!(error, expected);
        init_rack(folder.path(), UUID).unwrap();
        assert_eq!(stored_uuid(folder.path()), UUID);
    }

    #[test]
    fn missing_rack_uuid_file_is_written_by_open() {
        let folder = rack_folder();
        fs::remove_file(folder.path().join(RACK_UUID_FILE)).unwrap();
        assert_eq!(stored_uuid(folder.path()), UUID);
        let file = fs::read_to_string(folder.path().join(RACK_UUID_FILE)).unwrap();
        assert_eq!(file.trim_end(), UUID);
    }

    #[test]
    fn damaged_rack_uuid_file_is_not_another_rack() {
        for (contents, found) in [
            (&b""[..], "\"\""),
            (b"\xff", "\"\u{fffd}\""),
            (&UUID.as_bytes()[1..], &format!("{:?}", &UUID[1..])),
        ] {
            let folder = rack_folder();
            let file = folder.path().join(RACK_UUID_FILE);
            fs::write(&file, contents).unwrap();
            for error in [failed_open_error(folder.path()), failed_init_error(folder.path())] {
                let expected = format!(
                    "{} is damaged: contains {found}, expected {UUID}, the rack of {}: ",
                    file.display(),
                    folder.path().join(DATABASE_FILE).display()
                );
                assert!(error.starts_with(&expected) && error.contains("remove the file"), "{error}");
                let remedy = format!("`pool-manager restore --config {RACK_TOML} --from BACKUP --force`");
                assert!(error.ends_with(&remedy), "{error}");
            }
            assert_eq!(fs::read(&file).unwrap(), contents);
            fs::remove_file(folder.path().join(DATABASE_FILE)).unwrap();
            let lost = failed_open_error(folder.path());
            assert!(lost.contains(&format!("{} contains {found}", file.display())), "{lost}");
            assert!(lost.contains("pool-manager restore"), "{lost}");
        }
    }

    #[test]
    fn init_rejects_a_directory_with_a_rack() {
        let folder = rack_folder();
        let error = failed_init_error(folder.path());
        assert!(error.contains(&format!("already contains rack {UUID}")), "{error}");
        assert_eq!(stored_uuid(folder.path()), UUID);
    }

    /// Removes the ledger and either the rack UUID file or the tokens. The remaining one must
    /// prevent the creation of a new rack.
    #[test]
    fn lost_ledger_is_detected_by_rack_uuid_or_tokens() {
        for (defect, remaining) in
            [("is missing", None), ("is empty", Some(0)), ("contains only zeros", Some(8192))]
        {
            for lost in [RACK_UUID_FILE, "tokens"] {
                let folder = rack_folder();
                let (ledger, evidence) = (folder.path().join(DATABASE_FILE), folder.path().join(lost));
                if evidence.is_dir() { fs::remove_dir(evidence) } else { fs::remove_file(evidence) }.unwrap();
                match remaining {
                    None => fs::remove_file(&ledger).unwrap(),
                    Some(zeros) => fs::write(&ledger, vec![0; zeros]).unwrap(),
                }
                let before = fs::read(&ledger).ok();
                for error in [failed_open_error(folder.path()), failed_init_error(folder.path())] {
                    assert!(error.contains(defect), "{error}");
                    for command in [
                        "restore --config /etc/tarn/rack.toml --from BACKUP`",
                        "init --config /etc/tarn/rack.toml`",
                    ] {
                        assert!(error.contains(&format!("`pool-manager {command}")), "{error}");
                    }
                }
                assert_eq!(fs::read(&ledger).ok(), before);
            }
        }
    }

    #[test]
    fn ledger_of_zeros_is_not_replaced_by_a_new_rack() {
        let folder = rack_folder();
        let ledger = folder.path().join(DATABASE_FILE);
        let zeros = vec![0; fs::read(&ledger).unwrap().len()];
        let empty = tempfile::tempdir().unwrap();
        write_private_file(&empty.path().join(DATABASE_FILE), &zeros);
        for error in [failed_open_error(empty.path()), failed_init_error(empty.path())] {
            let expected = format!("{} contains only zeros", empty.path().join(DATABASE_FILE).display());
            assert!(error.contains(&expected), "{error}");
            assert!(error.contains("pool-manager restore") && error.contains("pool-manager init"), "{error}");
        }
        assert_eq!(fs::read(empty.path().join(DATABASE_FILE)).unwrap(), zeros);
    }

    #[test]
    fn renamed_ledger_is_not_replaced_by_a_new_rack() {
        for name in ["ledger.redb.bak", "ledger.redb.old", "backup-of-may"] {
            for is_blank in [false, true] {
                let folder = tempfile::tempdir().unwrap();
                init_rack(folder.path(), UUID).unwrap();
                let (ledger, renamed) = (folder.path().join(DATABASE_FILE), folder.path().join(name));
                fs::rename(&ledger, &renamed).unwrap();
                fs::remove_file(folder.path().join(RACK_UUID_FILE)).unwrap();
                if is_blank {
                    write_private_file(&ledger, "");
                }
                for error in [failed_open_error(folder.path()), failed_init_error(folder.path())] {
                    let evidence = format!(
                        "({} contains a ledger or a backup, which `restore --from` accepts)",
                        renamed.display()
                    );
                    assert!(error.contains(&evidence), "{error}");
                    assert!(error.contains("`pool-manager restore --config "), "{error}");
                }
                assert_eq!(fs::metadata(&ledger).map_or(0, |file| file.len()), 0);
            }
        }
    }

    #[test]
    fn renamed_ledger_is_named_before_other_evidence() {
        let folder = rack_folder();
        let renamed = folder.path().join("ledger.redb.old");
        fs::rename(folder.path().join(DATABASE_FILE), &renamed).unwrap();
        for error in [failed_open_error(folder.path()), failed_init_error(folder.path())] {
            assert!(error.contains(&format!("({} contains", renamed.display())), "{error}");
        }
    }

    #[test]
    fn other_files_in_the_folder_do_not_prevent_a_new_rack() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("lost+found")).unwrap();
        fs::write(folder.path().join("README"), "redb").unwrap();
        crate::test_files::create_fifo(&folder.path().join("fifo"));
        init_rack(folder.path(), UUID).unwrap();
        assert_eq!(stored_uuid(folder.path()), UUID);
    }

    /// The error ELOOP stands for EACCES and EIO, which tests cannot cause as root.
    #[test]
    fn unreadable_token_directory_prevents_a_new_rack() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = token_paths::host_token_directory(folder.path());
        std::os::unix::fs::symlink(&tokens, &tokens).unwrap();
        for error in [failed_open_error(folder.path()), failed_init_error(folder.path())] {
            assert_eq!(error, format!("cannot find {}", tokens.display()));
        }
        assert!(!folder.path().join(DATABASE_FILE).exists());
    }

    #[test]
    fn ledger_without_a_rack_is_rejected_if_tokens_exist() {
        let folder = rack_folder();
        fs::remove_file(folder.path().join(DATABASE_FILE)).unwrap();
        drop(RedbStore::open_directory(folder.path()).unwrap());
        let error = failed_open_error(folder.path());
        assert!(error.contains("contains no rack"), "{error}");
    }

    #[test]
    fn ledger_of_another_rack_is_rejected_with_both_uuids() {
        let (folder, other) = (rack_folder(), tempfile::tempdir().unwrap());
        init_rack(other.path(), OTHER_UUID).unwrap();
        fs::copy(other.path().join(DATABASE_FILE), folder.path().join(DATABASE_FILE)).unwrap();
        let error = failed_open_error(folder.path());
        let file = folder.path().join(RACK_UUID_FILE);
        let expected = format!(
            "{} contains rack {UUID}, expected {OTHER_UUID}, the rack of {}: ",
            file.display(),
            folder.path().join(DATABASE_FILE).display()
        );
        assert!(error.starts_with(&expected), "{error}");
        let remedy = format!(
            "restore a backup of rack {UUID} with `pool-manager restore --config {RACK_TOML} --from BACKUP --force`"
        );
        assert!(error.contains(&remedy), "{error}");
    }
}
