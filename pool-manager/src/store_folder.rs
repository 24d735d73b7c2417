//! Creates the rack in the directory of a store, and detects a lost ledger.
//!
//! A directory contains a rack once the ledger has its metadata. The [`mod@rack_uuid_file`] and the
//! hosts' tokens are written afterwards. A directory that has one of these files but no ledger has
//! lost its ledger. Creating a new rack there would lose the owners of slices.

use std::{
    io,
    path::{Path, PathBuf},
};

use pool::record::{Meta, Record};

use crate::{
    rack_uuid_file::{self, RACK_UUID_FILE},
    records::{self, LoadError, StoreContents},
    store::{
        Store, StoreError,
        disk::FILE,
        redb::{self, RedbStore},
    },
    tokens,
};

/// Error for a directory that cannot be used as the store of a rack.
#[derive(Debug, thiserror::Error)]
pub enum StoreFolderError {
    /// The directory contained a rack, but its ledger is lost.
    #[error(
         "the ledger {} {defect}, but its directory belongs to a rack ({evidence}): restore a backup with `pool-manager restore`; \
         to abandon the rack, remove the directory and run `pool-manager init`",
        ledger.display()
    )]
    LedgerLost {
        /// Database file of the ledger.
        ledger: PathBuf,
        /// Defect of the ledger, such as "is missing".
        defect: &'static str,
        /// File that proves that the directory belongs to a rack.
        evidence: String,
    },
    /// The ledger belongs to another rack.
    #[error(
        "the ledger in {} belongs to rack {ledger}, but the directory belongs to rack {folder_rack}: restore a backup of rack {folder_rack}; \
         to use rack {ledger} here, remove the file {RACK_UUID_FILE}",
        folder.display()
    )]
    OtherRack {
        /// Directory of the store.
        folder: PathBuf,
        /// UUID of the rack in the ledger.
        ledger: String,
        /// UUID of the rack in the file [`RACK_UUID_FILE`].
        folder_rack: String,
    },
    /// `pool-manager init` was run in a directory that contains a rack.
    #[error("{} already contains rack {rack_uuid}: nothing was changed", folder.display())]
    RackExists {
        /// Directory of the store.
        folder: PathBuf,
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
    #[error("cannot {doing} {}", path.display())]
    Io {
        /// Operation, such as "read".
        doing: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

/// Opened store of a rack, with its contents.
pub struct OpenedStore {
    /// Open store of the directory.
    pub store: RedbStore,
    /// Ledger in the store; `meta` is always present.
    pub loaded: StoreContents,
    /// Whether this call created the rack.
    pub is_new: bool,
}

impl std::fmt::Debug for OpenedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenedStore").field("is_new", &self.is_new).finish_non_exhaustive()
    }
}

/// Opens the store in a directory. Creates a rack with UUID `new_uuid` if the directory never
/// contained one.
///
/// # Errors
/// [`StoreFolderError`] if the directory lost its ledger, contains the ledger of another rack, or
/// cannot be used. The first two leave the directory unchanged.
pub fn open(folder: &Path, new_uuid: &str) -> Result<OpenedStore, StoreFolderError> {
    check_file(folder)?;
    let mut store = RedbStore::open_directory(folder)?;
    let mut loaded = records::load(&mut store)?;
    check_rack(folder, loaded.meta.as_ref())?;
    let is_new = loaded.meta.is_none();
    if is_new {
        let meta = Meta::new(new_uuid.to_owned());
        store.commit(&[records::write(&Record::Meta(meta.clone()))])?;
        loaded.meta = Some(meta);
    }
    if let (None, Some(meta)) = (rack_of_folder(folder)?, &loaded.meta) {
        rack_uuid_file::write(folder, &meta.rack_uuid).map_err(io_error("write", folder))?;
    }
    Ok(OpenedStore { store, loaded, is_new })
}

/// Creates a rack with UUID `new_uuid` in a directory that never contained one.
///
/// # Errors
/// [`StoreFolderError::RackExists`] if the directory contains a rack, or an error of [`open`].
pub fn init(folder: &Path, new_uuid: &str) -> Result<(), StoreFolderError> {
    let opened = open(folder, new_uuid)?;
    match opened.loaded.meta {
        Some(Meta { rack_uuid, .. }) if !opened.is_new => {
            Err(StoreFolderError::RackExists { folder: folder.to_owned(), rack_uuid })
        }
        _ => Ok(()),
    }
}

/// Returns a new UUID from random numbers of the kernel.
pub fn uuid() -> String {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random numbers");
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Checks that a directory that belongs to a rack has a ledger file. Must be called before the
/// store is opened, because opening it would create a missing file.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] if the file is missing or empty.
pub fn check_file(folder: &Path) -> Result<(), StoreFolderError> {
    let ledger = folder.join(FILE);
    let defect = match redb::is_blank(&ledger)? {
        Some(false) => return Ok(()),
        Some(true) => "is empty",
        None => "is missing",
    };
    find_evidence(folder)?
        .map_or(Ok(()), |evidence| Err(StoreFolderError::LedgerLost { ledger, defect, evidence }))
}

/// Checks that the ledger and its directory belong to the same rack.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] if the ledger has no rack, [`StoreFolderError::OtherRack`] if
/// the racks differ.
pub fn check_rack(folder: &Path, meta: Option<&Meta>) -> Result<(), StoreFolderError> {
    let Some(meta) = meta else {
        let (ledger, defect) = (folder.join(FILE), "contains no rack");
        return find_evidence(folder)?
            .map_or(Ok(()), |evidence| Err(StoreFolderError::LedgerLost { ledger, defect, evidence }));
    };
    match rack_of_folder(folder)? {
        Some(folder_rack) if folder_rack != meta.rack_uuid => {
            let (folder, ledger) = (folder.to_owned(), meta.rack_uuid.clone());
            Err(StoreFolderError::OtherRack { folder, ledger, folder_rack })
        }
        _ => Ok(()),
    }
}

/// Returns a description of the file or directory that proves that `folder` belongs to a rack. Does
/// not consider the ledger.
fn find_evidence(folder: &Path) -> Result<Option<String>, StoreFolderError> {
    if let Some(folder_rack) = rack_of_folder(folder)? {
        return Ok(Some(format!("{RACK_UUID_FILE} {folder_rack}")));
    }
    let tokens = tokens::directory(folder);
    Ok(tokens.exists().then(|| tokens.display().to_string()))
}

fn rack_of_folder(folder: &Path) -> Result<Option<String>, StoreFolderError> {
    rack_uuid_file::read(folder).map_err(io_error("read", folder))
}

fn io_error(doing: &'static str, folder: &Path) -> impl Fn(io::Error) -> StoreFolderError {
    let path = folder.join(RACK_UUID_FILE);
    move |errno| StoreFolderError::Io { doing, path: path.clone(), errno }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const UUID: &str = "11111111-2222-3333-4444-555555555555";
    const OTHER: &str = "99999999-2222-3333-4444-555555555555";

    /// Creates a directory with a rack and the directory of its tokens.
    fn rack_folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        init(folder.path(), UUID).unwrap();
        fs::create_dir(tokens::directory(folder.path())).unwrap();
        folder
    }

    fn uuid_of(folder: &Path) -> String {
        open(folder, OTHER).unwrap().loaded.meta.unwrap().rack_uuid
    }

    #[test]
    fn rack_is_created_in_an_empty_directory() {
        let folder = tempfile::tempdir().unwrap();
        assert!(open(&folder.path().join("new"), UUID).unwrap().is_new);
        assert_eq!(uuid_of(&folder.path().join("new")), UUID);
        fs::write(folder.path().join(FILE), "").unwrap(); // a crash during the creation of the store leaves an empty file
        assert!(open(folder.path(), UUID).unwrap().is_new);
    }

    #[test]
    fn init_rejects_a_directory_with_a_rack() {
        let folder = rack_folder();
        let error = init(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains(&format!("already contains rack {UUID}")), "{error}");
        assert_eq!(uuid_of(folder.path()), UUID);
    }

    /// Removes the ledger and either the rack UUID file or the tokens. The remaining one must
    /// prevent the creation of a new rack.
    #[test]
    fn lost_ledger_is_detected_by_rack_uuid_or_tokens() {
        for (defect, remaining) in [("is missing", None), ("is empty", Some(0)), ("is empty", Some(8192))] {
            for lost in [RACK_UUID_FILE, "tokens"] {
                let folder = rack_folder();
                let (ledger, evidence) = (folder.path().join(FILE), folder.path().join(lost));
                if evidence.is_dir() { fs::remove_dir(evidence) } else { fs::remove_file(evidence) }.unwrap();
                match remaining {
                    None => fs::remove_file(&ledger).unwrap(),
                    Some(zeros) => fs::write(&ledger, vec![0; zeros]).unwrap(),
                }
                let before = fs::read(&ledger).ok();
                for error in [open(folder.path(), OTHER).map(drop), init(folder.path(), OTHER)] {
                    let error = error.unwrap_err().to_string();
                    assert!(error.contains(defect) && error.contains("pool-manager restore"), "{error}");
                }
                assert_eq!(fs::read(&ledger).ok(), before);
            }
        }
    }

    #[test]
    fn ledger_without_a_rack_is_rejected_if_tokens_exist() {
        let folder = rack_folder();
        fs::remove_file(folder.path().join(FILE)).unwrap();
        drop(RedbStore::open_directory(folder.path()).unwrap());
        let error = open(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains("contains no rack"), "{error}");
    }

    #[test]
    fn ledger_of_another_rack_is_rejected_with_both_uuids() {
        let (folder, other) = (rack_folder(), tempfile::tempdir().unwrap());
        init(other.path(), OTHER).unwrap();
        fs::copy(other.path().join(FILE), folder.path().join(FILE)).unwrap();
        let error = open(folder.path(), UUID).unwrap_err().to_string();
        assert!(error.contains(UUID) && error.contains(OTHER), "{error}");
    }
}
