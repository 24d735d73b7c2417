//! Where the ledger's facts are kept: eleven tables of bytes, written in all-or-nothing batches. What the bytes mean is
//! the driver's business; nothing here knows who owns what.
//!
//! The traits ask for no more than any ordered key-value service with transactions can do, so that a store on another
//! machine can stand behind them.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use units::limits::STORE_FREE_BYTES_MIN;

pub mod backup;
pub mod disk;
pub mod faulty;
pub mod redb;

/// The format this version writes. A store of a higher one is left alone.
pub const FORMAT: u64 = 1;

/// Keys of [`Table::Meta`] that the store itself writes; each holds one [`number`]. All other keys are the driver's.
pub mod meta {
    /// The format of the store.
    pub const FORMAT: &[u8] = b"format";
    /// The least generation that the ledger may continue with. Present after a restore; see [`super::backup::Restore`].
    pub const GENERATION: &[u8] = b"generation";
    /// 1 after a restore: what this store says of a slice is not to be believed before its host has reported. Whoever
    /// acts on it deletes it in the same batch.
    pub const RESTORED: &[u8] = b"restored";
}

/// One kind of fact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Pool devices.
    Emcs,
    /// Hosts.
    Hosts,
    /// Slices.
    Slices,
    /// Requests to move a VM.
    Migrations,
    /// Decisions.
    Audit,
    /// What concerns the whole store.
    Meta,
    /// The memory of VMs.
    Reservations,
    /// VMs that have ended, for forecasts.
    Outcomes,
    /// What was known and forecast of VMs that run.
    Forecasts,
    /// Models, and which of them serve.
    Models,
    /// Weights of tenants, by host.
    Weights,
}

impl Table {
    /// All of them, in the order of their declaration.
    pub const ALL: [Self; 11] = [
        Self::Emcs,
        Self::Hosts,
        Self::Slices,
        Self::Migrations,
        Self::Audit,
        Self::Meta,
        Self::Reservations,
        Self::Outcomes,
        Self::Forecasts,
        Self::Models,
        Self::Weights,
    ];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emcs => "emcs",
            Self::Hosts => "hosts",
            Self::Slices => "slices",
            Self::Migrations => "migrations",
            Self::Reservations => "reservations",
            Self::Outcomes => "outcomes",
            Self::Forecasts => "forecasts",
            Self::Models => "models",
            Self::Weights => "weights",
            Self::Audit => "audit",
            Self::Meta => "meta",
        }
    }

    /// What its keys begin with where all tables share one; never changes.
    pub const fn tag(self) -> u8 {
        match self {
            Self::Emcs => 1,
            Self::Hosts => 2,
            Self::Slices => 3,
            Self::Migrations => 4,
            Self::Audit => 5,
            Self::Meta => 6,
            Self::Reservations => 7,
            Self::Outcomes => 8,
            Self::Forecasts => 9,
            Self::Models => 10,
            Self::Weights => 11,
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One change of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// The entry is this from now on.
    Put {
        /// Where.
        table: Table,
        /// Under which key.
        key: Vec<u8>,
        /// What.
        value: Vec<u8>,
    },
    /// There is no such entry from now on; none before is fine too.
    Delete {
        /// Where.
        table: Table,
        /// Under which key.
        key: Vec<u8>,
    },
}

impl Write {
    /// Puts a [`number`].
    pub fn number(table: Table, key: &[u8], number: u64) -> Self {
        Self::Put { table, key: key.to_vec(), value: number.to_le_bytes().to_vec() }
    }
}

/// Something that can be read from beginning to end.
pub trait Scan: Send {
    /// Shows every entry of a table, in the order of the keys.
    ///
    /// # Errors
    /// When it cannot be read, or the store failed before.
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError>;
}

/// The durable store.
pub trait Store: Scan {
    /// Makes every change of a batch or none, durably before it returns `Ok`. Of two changes of one entry the later
    /// counts.
    ///
    /// # Errors
    /// After any error nothing is known about this batch, and everything is refused until [`Store::reopen`].
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError>;

    /// Forgets what is in memory and opens again. What can be read afterwards is durable.
    ///
    /// # Errors
    /// As for opening; may be tried again.
    fn reopen(&mut self) -> Result<(), StoreError>;

    /// The store as it is now, to be read while others write.
    ///
    /// # Errors
    /// When the store failed before.
    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError>;

    /// How many bytes may still be written, or `None` if the store has no such notion.
    ///
    /// # Errors
    /// When the file system does not say.
    fn free_bytes(&self) -> Result<Option<u64>, StoreError>;
}

/// Why the store could not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has it open.
    #[error("store {} is in use by another pool-manager: stop that one first", place.display())]
    InUse {
        /// Which store.
        place: PathBuf,
    },
    /// There is none where one was expected.
    #[error("no store at {}: check manager.store in rack.toml", place.display())]
    Missing {
        /// Where.
        place: PathBuf,
    },
    /// A later version wrote it.
    #[error("store {} has format {found}: must be at most {FORMAT}; use the newer pool-manager that wrote it", place.display())]
    Newer {
        /// Which store.
        place: PathBuf,
        /// Its format.
        found: u64,
    },
    /// What is there was not written by a pool-manager, or no longer.
    #[error("store {} is corrupt ({what}): restore it with `pool-manager restore` from a backup", place.display())]
    Corrupt {
        /// Which store.
        place: PathBuf,
        /// In what way.
        what: String,
    },
    /// The operating system refused.
    #[error("{doing} store {}", place.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With which store.
        place: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// What is left of the disk is for the ledger.
    #[error("less than {STORE_FREE_BYTES_MIN} bytes are free for the store: what is left is for the ledger")]
    Full,
    /// An earlier write failed, so that nothing is known until the store is opened again.
    #[error("store {} failed before: it must be opened again", place.display())]
    Poisoned {
        /// Which store.
        place: PathBuf,
    },
}

impl StoreError {
    fn io(doing: &'static str, place: &Path) -> impl Fn(io::Error) -> Self {
        move |errno| Self::Io { doing, place: place.to_owned(), errno }
    }

    /// Whether there was no room.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { errno, .. } if matches!(errno.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }
}

/// A number as the store writes it: eight bytes, least significant first. `None` for anything else.
pub fn number(value: &[u8]) -> Option<u64> {
    value.try_into().ok().map(u64::from_le_bytes)
}

/// The number under a key of [`Table::Meta`].
///
/// # Errors
/// As [`Scan::scan`]; [`StoreError::Corrupt`] if something else is under that key.
pub fn meta_number(store: &mut dyn Scan, place: &Path, wanted: &[u8]) -> Result<Option<u64>, StoreError> {
    let mut found = None;
    store.scan(Table::Meta, &mut |key, value| {
        if key == wanted {
            found = Some(number(value));
        }
    })?;
    let what = || format!("meta {:?} is not a number", String::from_utf8_lossy(wanted));
    found.map(|n| n.ok_or_else(|| StoreError::Corrupt { place: place.to_owned(), what: what() })).transpose()
}

/// Refuses a store of another format; gives an empty one this version's.
fn settle_format(store: &mut dyn Store, place: &Path) -> Result<(), StoreError> {
    match meta_number(store, place, meta::FORMAT)? {
        Some(FORMAT) => Ok(()),
        Some(found) if found > FORMAT => Err(StoreError::Newer { place: place.to_owned(), found }),
        Some(found) => {
            Err(StoreError::Corrupt { place: place.to_owned(), what: format!("format {found} never was") })
        }
        None if is_empty(store)? => store.commit(&[Write::number(Table::Meta, meta::FORMAT, FORMAT)]),
        None => {
            Err(StoreError::Corrupt { place: place.to_owned(), what: "entries without a format".to_owned() })
        }
    }
}

/// Whether no table holds anything but what the store itself wrote.
fn is_empty(store: &mut dyn Scan) -> Result<bool, StoreError> {
    let mut entries = 0_u64;
    for table in Table::ALL {
        store.scan(table, &mut |key, _| entries += u64::from((table, key) != (Table::Meta, meta::FORMAT)))?;
    }
    Ok(entries == 0)
}

#[cfg(test)]
mod tests;
