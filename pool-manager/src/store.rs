//! Store of records: eleven tables of bytes, written in atomic batches. The driver interprets the
//! bytes.
//!
//! The traits require no more than an ordered key-value service with transactions provides, so that
//! a store on another machine can implement them.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use units::limits::STORE_FREE_BYTES_MIN;

pub mod backup;
pub mod disk;
pub mod faulty;
pub mod redb;

/// Format version. A store of a higher version is rejected.
pub const FORMAT: u64 = 1;

/// Keys of [`Table::Meta`] written by the store itself; each holds one [`number`]. All other keys
/// are the driver's.
pub mod meta {
    /// Format of the store.
    pub const FORMAT: &[u8] = b"format";
    /// Lowest generation with which the ledger may continue. Present after a restore; see
    /// [`super::backup::Restore`].
    pub const GENERATION: &[u8] = b"generation";
    /// 1 after a restore: the slices in this store are not reliable before their hosts have
    /// reported. The ledger deletes it in the batch that acts on it.
    pub const RESTORED: &[u8] = b"restored";
}

/// Kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// EMCs.
    Emcs,
    /// Hosts.
    Hosts,
    /// Slices.
    Slices,
    /// Migration requests.
    Migrations,
    /// Decisions.
    Audit,
    /// State of the whole store.
    Meta,
    /// Reservations.
    Reservations,
    /// Outcomes of ended VMs.
    Outcomes,
    /// Known properties and predictions of running VMs.
    Forecasts,
    /// Models, and the serving ones.
    Models,
    /// Weights of tenants, by host.
    Weights,
}

impl Table {
    /// All tables, in the order of their declaration.
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

    /// Returns the name.
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

    /// Returns the key prefix where all tables share one; never changes.
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

/// Change of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Sets the entry.
    Put {
        /// Table.
        table: Table,
        /// Key.
        key: Vec<u8>,
        /// Value.
        value: Vec<u8>,
    },
    /// Deletes the entry, if it exists.
    Delete {
        /// Table.
        table: Table,
        /// Key.
        key: Vec<u8>,
    },
}

impl Write {
    /// Returns the change that sets a [`number`].
    pub fn number(table: Table, key: &[u8], number: u64) -> Self {
        Self::Put { table, key: key.to_vec(), value: number.to_le_bytes().to_vec() }
    }
}

/// Source of entries.
pub trait Scan: Send {
    /// Passes every entry of a table to a function, in the order of the keys.
    ///
    /// # Errors
    /// The table cannot be read, or the store failed before.
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError>;
}

/// Durable store.
pub trait Store: Scan {
    /// Makes all changes of a batch or none, durably before it returns `Ok`. Of two changes of one
    /// entry the later one counts.
    ///
    /// # Errors
    /// After an error the outcome of this batch is unknown, and every call fails until
    /// [`Store::reopen`].
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError>;

    /// Drops its state in memory and reopens. Everything readable afterwards is durable.
    ///
    /// # Errors
    /// As for opening; may be repeated.
    fn reopen(&mut self) -> Result<(), StoreError>;

    /// Returns a snapshot, to be read during writes.
    ///
    /// # Errors
    /// The store failed before.
    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError>;

    /// Returns the number of bytes that may still be written, or `None` if the store has no limit.
    ///
    /// # Errors
    /// The file system does not report it.
    fn free_bytes(&self) -> Result<Option<u64>, StoreError>;
}

/// Error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has opened it.
    #[error("store {} is in use by another pool-manager: stop that one first", place.display())]
    InUse {
        /// Store.
        place: PathBuf,
    },
    /// There is no store.
    #[error("no store at {}: check manager.store in rack.toml", place.display())]
    Missing {
        /// Path.
        place: PathBuf,
    },
    /// It was written by a later version.
    #[error("store {} has format {found}: must be at most {FORMAT}; use the newer pool-manager that wrote it", place.display())]
    Newer {
        /// Store.
        place: PathBuf,
        /// Its format.
        found: u64,
    },
    /// It was not written by a pool-manager, or is damaged.
    #[error("store {} is corrupt ({what}): restore it with `pool-manager restore` from a backup", place.display())]
    Corrupt {
        /// Store.
        place: PathBuf,
        /// Defect.
        what: String,
    },
    /// The operating system rejected an operation.
    #[error("{doing} store {}", place.display())]
    Io {
        /// Operation.
        doing: &'static str,
        /// Store.
        place: PathBuf,
        /// Error.
        #[source]
        errno: io::Error,
    },
    /// The remaining space of the disk is reserved for the ledger.
    #[error(
        "less than {STORE_FREE_BYTES_MIN} bytes are free for the store: the rest is reserved for the ledger"
    )]
    Full,
    /// An earlier write failed, so the state is unknown until the store is reopened.
    #[error("store {} failed before: it must be reopened", place.display())]
    Poisoned {
        /// Store.
        place: PathBuf,
    },
}

impl StoreError {
    fn io(doing: &'static str, place: &Path) -> impl Fn(io::Error) -> Self {
        move |errno| Self::Io { doing, place: place.to_owned(), errno }
    }

    /// Returns whether there was no space.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { errno, .. } if matches!(errno.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }
}

/// Decodes a number of the store: eight bytes, little-endian. `None` for anything else.
pub fn number(value: &[u8]) -> Option<u64> {
    value.try_into().ok().map(u64::from_le_bytes)
}

/// Returns the number under a key of [`Table::Meta`].
///
/// # Errors
/// As [`Scan::scan`]; [`StoreError::Corrupt`] if the value is no number.
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

/// Rejects a store of another format; sets this version's format in an empty one.
fn check_format(store: &mut dyn Store, place: &Path) -> Result<(), StoreError> {
    match meta_number(store, place, meta::FORMAT)? {
        Some(FORMAT) => Ok(()),
        Some(found) if found > FORMAT => Err(StoreError::Newer { place: place.to_owned(), found }),
        Some(found) => Err(StoreError::Corrupt {
            place: place.to_owned(),
            what: format!("format {found} never existed"),
        }),
        None if is_empty(store)? => store.commit(&[Write::number(Table::Meta, meta::FORMAT, FORMAT)]),
        None => {
            Err(StoreError::Corrupt { place: place.to_owned(), what: "entries without a format".to_owned() })
        }
    }
}

/// Returns whether all tables are empty except for entries of the store itself.
fn is_empty(store: &mut dyn Scan) -> Result<bool, StoreError> {
    let mut entries = 0_u64;
    for table in Table::ALL {
        store.scan(table, &mut |key, _| entries += u64::from((table, key) != (Table::Meta, meta::FORMAT)))?;
    }
    Ok(entries == 0)
}

#[cfg(test)]
mod tests;
