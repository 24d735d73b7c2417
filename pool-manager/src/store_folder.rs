//! Folder of a rack's store: creation of a rack, and detection of a lost ledger.
//!
//! A folder holds a rack once its ledger has an entry for the whole rack. The
//! [`mod@rack_uuid_file`] and the hosts' tokens are written afterwards, so a folder that has them
//! without such a ledger has lost it: a new rack there would lose the owners of slices.

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

/// Reason why a folder cannot be used as the store of a rack.
#[derive(Debug, thiserror::Error)]
pub enum StoreFolderError {
    /// The folder has lost its ledger.
    #[error(
        "the ledger {} {defect}, but this folder holds a rack ({evidence}): restore it with `pool-manager restore` from a backup; \
         to abandon the rack, remove the folder and run `pool-manager init`",
        ledger.display()
    )]
    LedgerLost {
        /// File of the ledger.
        ledger: PathBuf,
        /// Defect.
        defect: &'static str,
        /// Evidence that the folder holds a rack.
        evidence: String,
    },
    /// The ledger belongs to another rack.
    #[error(
        "the ledger in {} is of rack {ledger}, but this folder is of rack {folder_rack}: restore a backup of rack {folder_rack}; \
         to use rack {ledger} here, remove the file {RACK_UUID_FILE}",
        folder.display()
    )]
    OtherRack {
        /// Folder of the store.
        folder: PathBuf,
        /// Rack of the ledger.
        ledger: String,
        /// Rack of the folder.
        folder_rack: String,
    },
    /// `init` in a folder that holds a rack.
    #[error("{} holds rack {rack_uuid} already: nothing changed", folder.display())]
    HoldsRack {
        /// Folder of the store.
        folder: PathBuf,
        /// Uuid of its rack.
        rack_uuid: String,
    },
    /// Error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Error in the store's contents.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The operating system rejected an operation.
    #[error("{doing} {}", path.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// File.
        path: PathBuf,
        /// Error.
        #[source]
        errno: io::Error,
    },
}

/// Open store of a rack.
pub struct OpenedStore {
    /// Store.
    pub store: RedbStore,
    /// Ledger records; `meta` exists.
    pub loaded: StoreContents,
    /// The rack was created just now.
    pub is_new: bool,
}

impl std::fmt::Debug for OpenedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("is_new", &self.is_new).finish_non_exhaustive()
    }
}

/// Opens the store in a folder. Creates a rack with `new_uuid` if the folder never held one.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] and [`StoreFolderError::OtherRack`]; the folder is unchanged.
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

/// Creates a rack with this uuid in a folder that never held one.
///
/// # Errors
/// [`StoreFolderError::HoldsRack`] if the folder holds a rack, and those of [`open`].
pub fn init(folder: &Path, new_uuid: &str) -> Result<(), StoreFolderError> {
    let opened = open(folder, new_uuid)?;
    match opened.loaded.meta {
        Some(Meta { rack_uuid, .. }) if !opened.is_new => {
            Err(StoreFolderError::HoldsRack { folder: folder.to_owned(), rack_uuid })
        }
        _ => Ok(()),
    }
}

/// Returns a new uuid from the kernel's random numbers.
pub fn uuid() -> String {
    let mut bytes = [0_u8; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .expect("the kernel has random numbers");
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Checks, before anything is opened or created, that a folder with evidence of a rack has a
/// ledger.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`].
pub fn check_file(folder: &Path) -> Result<(), StoreFolderError> {
    let ledger = folder.join(FILE);
    let defect = match redb::is_blank(&ledger)? {
        Some(false) => return Ok(()),
        Some(true) => "is empty",
        None => "is missing",
    };
    evidence(folder)?
        .map_or(Ok(()), |evidence| Err(StoreFolderError::LedgerLost { ledger, defect, evidence }))
}

/// Checks that the ledger's rack matches its folder.
///
/// # Errors
/// [`StoreFolderError::LedgerLost`] and [`StoreFolderError::OtherRack`].
pub fn check_rack(folder: &Path, meta: Option<&Meta>) -> Result<(), StoreFolderError> {
    let Some(meta) = meta else {
        let (ledger, defect) = (folder.join(FILE), "holds no rack");
        return evidence(folder)?
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

/// Returns evidence beside the ledger that a folder holds a rack.
fn evidence(folder: &Path) -> Result<Option<String>, StoreFolderError> {
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

    /// Returns a folder that holds a rack, with a token.
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
    fn empty_folder_becomes_a_new_rack() {
        let folder = tempfile::tempdir().unwrap();
        assert!(open(&folder.path().join("new"), UUID).unwrap().is_new);
        assert_eq!(uuid_of(&folder.path().join("new")), UUID);
        fs::write(folder.path().join(FILE), "").unwrap(); // as left by a crash during its creation
        assert!(open(folder.path(), UUID).unwrap().is_new);
    }

    #[test]
    fn init_rejects_a_folder_that_holds_a_rack() {
        let folder = rack_folder();
        let error = init(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains(&format!("holds rack {UUID} already")), "{error}");
        assert_eq!(uuid_of(folder.path()), UUID);
    }

    /// Each kind of evidence prevents a lost ledger from becoming a new rack, and nothing is
    /// created.
    #[test]
    fn lost_ledger_is_an_error_with_any_evidence_left() {
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
    fn ledger_without_a_rack_beside_tokens_is_an_error() {
        let folder = rack_folder();
        fs::remove_file(folder.path().join(FILE)).unwrap();
        drop(RedbStore::open_directory(folder.path()).unwrap());
        let error = open(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains("holds no rack"), "{error}");
    }

    #[test]
    fn ledger_of_another_rack_is_an_error_that_names_both() {
        let (folder, other) = (rack_folder(), tempfile::tempdir().unwrap());
        init(other.path(), OTHER).unwrap();
        fs::copy(other.path().join(FILE), folder.path().join(FILE)).unwrap();
        let error = open(folder.path(), UUID).unwrap_err().to_string();
        assert!(error.contains(UUID) && error.contains(OTHER), "{error}");
    }
}
