//! Creation of racks, and distinction between a new folder and a rack with a lost ledger.
//!
//! A folder holds a rack once its ledger has an entry for the whole rack. The [`mod@mark`] and the
//! hosts' tokens are written afterwards, so a folder that has them without such a ledger has lost
//! it: a new rack there would lose the owners of slices.

use std::{
    io,
    path::{Path, PathBuf},
};

use pool::record::{Meta, Record};

use crate::{
    mark::{self, MARK},
    records::{self, LoadError, Loaded},
    store::{
        Store, StoreError,
        disk::FILE,
        redb::{self, RedbStore},
    },
    tokens,
};

/// Reason why a folder cannot be used as the store of a rack.
#[derive(Debug, thiserror::Error)]
pub enum FoundingError {
    /// The folder has lost its ledger.
    #[error(
        "the ledger {} {what}, but this folder holds a rack ({sign}): restore it with `pool-manager restore` from a backup; \
         to give the rack up, remove the folder and run `pool-manager init`",
        ledger.display()
    )]
    LedgerLost {
        /// File of the ledger.
        ledger: PathBuf,
        /// Defect.
        what: &'static str,
        /// Evidence that the folder holds a rack.
        sign: String,
    },
    /// The ledger belongs to another rack.
    #[error(
        "the ledger in {} is of rack {ledger}, but this folder is of rack {marked}: restore a backup of rack {marked}; \
         if rack {ledger} is to move here, remove the file {MARK}",
        folder.display()
    )]
    Foreign {
        /// Folder of the store.
        folder: PathBuf,
        /// Rack of the ledger.
        ledger: String,
        /// Rack of the folder.
        marked: String,
    },
    /// `init` in a folder that holds a rack.
    #[error("{} holds rack {rack_uuid} already: nothing changed", folder.display())]
    Founded {
        /// Folder of the store.
        folder: PathBuf,
        /// Its rack.
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
pub struct Opened {
    /// Store.
    pub store: RedbStore,
    /// Ledger records; `meta` exists.
    pub loaded: Loaded,
    /// The rack was created just now.
    pub is_new: bool,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("is_new", &self.is_new).finish_non_exhaustive()
    }
}

/// Opens the store of a rack in a folder. A folder that never held a rack becomes a new one with
/// this uuid.
///
/// # Errors
/// [`FoundingError::LedgerLost`] and [`FoundingError::Foreign`]; nothing is changed then.
pub fn open(folder: &Path, new_uuid: &str) -> Result<Opened, FoundingError> {
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
    if let (None, Some(meta)) = (mark(folder)?, &loaded.meta) {
        mark::write(folder, &meta.rack_uuid).map_err(io_error("write", folder))?;
    }
    Ok(Opened { store, loaded, is_new })
}

/// Creates a rack with this uuid in a folder that never held one.
///
/// # Errors
/// [`FoundingError::Founded`] if the folder holds a rack, and those of [`open`].
pub fn init(folder: &Path, new_uuid: &str) -> Result<(), FoundingError> {
    let opened = open(folder, new_uuid)?;
    match opened.loaded.meta {
        Some(Meta { rack_uuid, .. }) if !opened.is_new => {
            Err(FoundingError::Founded { folder: folder.to_owned(), rack_uuid })
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
/// [`FoundingError::LedgerLost`].
pub fn check_file(folder: &Path) -> Result<(), FoundingError> {
    let ledger = folder.join(FILE);
    let what = match redb::is_blank(&ledger)? {
        Some(false) => return Ok(()),
        Some(true) => "is empty",
        None => "is missing",
    };
    sign(folder)?.map_or(Ok(()), |sign| Err(FoundingError::LedgerLost { ledger, what, sign }))
}

/// Checks that the ledger's rack matches its folder.
///
/// # Errors
/// [`FoundingError::LedgerLost`] and [`FoundingError::Foreign`].
pub fn check_rack(folder: &Path, meta: Option<&Meta>) -> Result<(), FoundingError> {
    let Some(meta) = meta else {
        let (ledger, what) = (folder.join(FILE), "holds no rack");
        return sign(folder)?.map_or(Ok(()), |sign| Err(FoundingError::LedgerLost { ledger, what, sign }));
    };
    match mark(folder)? {
        Some(marked) if marked != meta.rack_uuid => {
            let (folder, ledger) = (folder.to_owned(), meta.rack_uuid.clone());
            Err(FoundingError::Foreign { folder, ledger, marked })
        }
        _ => Ok(()),
    }
}

/// Returns evidence beside the ledger that a folder holds a rack.
fn sign(folder: &Path) -> Result<Option<String>, FoundingError> {
    if let Some(marked) = mark(folder)? {
        return Ok(Some(format!("{MARK} {marked}")));
    }
    let tokens = tokens::directory(folder);
    Ok(tokens.exists().then(|| tokens.display().to_string()))
}

fn mark(folder: &Path) -> Result<Option<String>, FoundingError> {
    mark::read(folder).map_err(io_error("read", folder))
}

fn io_error(doing: &'static str, folder: &Path) -> impl Fn(io::Error) -> FoundingError {
    let path = folder.join(MARK);
    move |errno| FoundingError::Io { doing, path: path.clone(), errno }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const UUID: &str = "11111111-2222-3333-4444-555555555555";
    const OTHER: &str = "99999999-2222-3333-4444-555555555555";

    /// Returns a folder that holds a rack, with a token.
    fn founded() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        init(folder.path(), UUID).unwrap();
        fs::create_dir(tokens::directory(folder.path())).unwrap();
        folder
    }

    fn uuid_of(folder: &Path) -> String {
        open(folder, OTHER).unwrap().loaded.meta.unwrap().rack_uuid
    }

    #[test]
    fn folder_that_never_held_a_rack_becomes_one() {
        let folder = tempfile::tempdir().unwrap();
        assert!(open(&folder.path().join("new"), UUID).unwrap().is_new);
        assert_eq!(uuid_of(&folder.path().join("new")), UUID);
        fs::write(folder.path().join(FILE), "").unwrap(); // as left by a crash during its creation
        assert!(open(folder.path(), UUID).unwrap().is_new);
    }

    #[test]
    fn init_refuses_a_folder_that_holds_a_rack() {
        let folder = founded();
        let error = init(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains(&format!("holds rack {UUID} already")), "{error}");
        assert_eq!(uuid_of(folder.path()), UUID);
    }

    /// Each kind of evidence prevents a lost ledger from becoming a new rack, and nothing is
    /// created.
    #[test]
    fn lost_ledger_is_an_error_whichever_sign_is_left() {
        for (what, left) in [("is missing", None), ("is empty", Some(0)), ("is empty", Some(8192))] {
            for lost_sign in [MARK, "tokens"] {
                let folder = founded();
                let (ledger, sign) = (folder.path().join(FILE), folder.path().join(lost_sign));
                if sign.is_dir() { fs::remove_dir(sign) } else { fs::remove_file(sign) }.unwrap();
                match left {
                    None => fs::remove_file(&ledger).unwrap(),
                    Some(zeros) => fs::write(&ledger, vec![0; zeros]).unwrap(),
                }
                let before = fs::read(&ledger).ok();
                for error in [open(folder.path(), OTHER).map(drop), init(folder.path(), OTHER)] {
                    let error = error.unwrap_err().to_string();
                    assert!(error.contains(what) && error.contains("pool-manager restore"), "{error}");
                }
                assert_eq!(fs::read(&ledger).ok(), before);
            }
        }
    }

    #[test]
    fn ledger_without_a_rack_beside_tokens_is_an_error() {
        let folder = founded();
        fs::remove_file(folder.path().join(FILE)).unwrap();
        drop(RedbStore::open_directory(folder.path()).unwrap());
        let error = open(folder.path(), OTHER).unwrap_err().to_string();
        assert!(error.contains("holds no rack"), "{error}");
    }

    #[test]
    fn ledger_of_another_rack_is_an_error_that_names_both() {
        let (folder, other) = (founded(), tempfile::tempdir().unwrap());
        init(other.path(), OTHER).unwrap();
        fs::copy(other.path().join(FILE), folder.path().join(FILE)).unwrap();
        let error = open(folder.path(), UUID).unwrap_err().to_string();
        assert!(error.contains(UUID) && error.contains(OTHER), "{error}");
    }
}
