//! Durable key-value store with a fixed set of tables, written in atomic batches. Keys and values
//! are bytes; `records` encodes them.
//!
//! Any ordered key-value service with transactions, also on another machine, can implement the
//! traits.

use std::{
    fmt, io,
    path::{Path, PathBuf},
};

use units::limits::STORE_FREE_BYTES_MIN;

pub mod backup;
pub mod disk;
pub mod etcd;
pub mod faulty;
pub mod read_only;
pub mod redb;
mod redb_header;

/// Format version of stores that this version writes. Stores with a higher version are rejected.
pub const FORMAT: u64 = 1;

/// Keys of [`Table::Meta`] that the store itself writes. Each contains one [`number`]. Other keys
/// of this table belong to the ledger.
pub mod meta {
    /// Format version of the store.
    pub const FORMAT: &[u8] = b"format";
    /// Lowest generation with which the ledger may continue after a restore, see
    /// [`super::backup::Restore`].
    pub const GENERATION_KEY: &[u8] = b"generation";
    /// Mark of a restored store, with value 1. The owners of slices are not reliable until their
    /// hosts have reported. The ledger deletes the mark in its first batch.
    pub const RESTORED_KEY: &[u8] = b"restored";
}

/// Table of the store, one for each kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// EMCs, by number.
    Emcs,
    /// Hosts, by number.
    Hosts,
    /// Slices with their owners and states, by number.
    Slices,
    /// Migration requests, by reservation.
    Migrations,
    /// Recorded decisions, by sequence number.
    Audit,
    /// Metadata of the ledger and of the store.
    Meta,
    /// Reservations, newest first.
    Reservations,
    /// Outcomes of ended VMs, by number.
    Outcomes,
    /// Properties and predictions of running VMs, by reservation.
    Forecasts,
    /// Model files, and the versions of each kind of model.
    Models,
    /// Weights of tenants, by host name.
    Weights,
    /// Losses of VMs that were measured by moves to local memory, by number.
    MeasuredMoves,
}

impl Table {
    /// All tables, in the order of their declaration.
    pub const ALL: [Self; 12] = [
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
        Self::MeasuredMoves,
    ];

    /// Returns the table's name in the database and in messages.
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
            Self::MeasuredMoves => "measured_moves",
            Self::Audit => "audit",
            Self::Meta => "meta",
        }
    }

    /// Returns the prefix of the table's keys if all tables share one key space. The values are
    /// stored and must never change.
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
            Self::MeasuredMoves => 12,
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Write or deletion of one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Write {
    /// Adds the entry, or replaces its value.
    Put {
        /// Table of the entry.
        table: Table,
        /// Key of the entry.
        key: Vec<u8>,
        /// New value of the entry.
        value: Vec<u8>,
    },
    /// Deletes the entry, if it exists.
    Delete {
        /// Table of the entry.
        table: Table,
        /// Key of the entry.
        key: Vec<u8>,
    },
}

impl Write {
    /// Returns the write that sets an entry to a [`number`].
    pub fn number(table: Table, key: &[u8], number: u64) -> Self {
        Self::Put { table, key: key.to_vec(), value: number.to_le_bytes().to_vec() }
    }
}

/// Read access to a store or a snapshot.
pub trait Scan: Send {
    /// Calls `each` with key and value of every entry of a table, in ascending order of keys.
    ///
    /// # Errors
    /// [`StoreError`] if the table cannot be read, or an earlier write failed.
    fn scan(&mut self, table: Table, each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError>;
}

/// Durable store with atomic batches.
pub trait Store: Scan {
    /// Writes a batch atomically. The batch is durable when `commit` returns `Ok`. If a batch
    /// changes an entry twice, the later change applies.
    ///
    /// # Errors
    /// After an error the batch may or may not be durable, and every call fails until
    /// [`Store::reopen`].
    fn commit(&mut self, batch: &[Write]) -> Result<(), StoreError>;

    /// Discards the state in memory and opens the store again. All entries that are readable
    /// afterwards are durable.
    ///
    /// # Errors
    /// [`StoreError`] if the store cannot be opened. The caller may try again.
    fn reopen(&mut self) -> Result<(), StoreError>;

    /// Returns a consistent snapshot that can be read while the store is written.
    ///
    /// # Errors
    /// [`StoreError`] if an earlier write failed.
    fn snapshot(&self) -> Result<Box<dyn Scan>, StoreError>;

    /// Returns the free space on the store's disk, in bytes, or `None` if the store has no limit.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the file system does not report its free space.
    fn free_bytes(&self) -> Result<Option<u64>, StoreError>;
}

/// Error from opening, reading or writing a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Another process has opened the store.
    #[error("store {} is in use by another pool-manager: stop the other one first", path.display())]
    InUse {
        /// Path of the store.
        path: PathBuf,
    },
    /// The store does not exist.
    #[error("no store at {}: check manager.store in rack.toml", path.display())]
    Missing {
        /// Path where the store is expected.
        path: PathBuf,
    },
    /// The store was written by a later version of pool-manager.
    #[error("store {} has format {found}: must be at most {FORMAT}; use the newer pool-manager that wrote it", path.display())]
    Newer {
        /// Path of the store.
        path: PathBuf,
        /// Format version of the store.
        found: u64,
    },
    /// The store is damaged, or is another kind of file.
    #[error("store {} is corrupt ({what}): restore a backup with `pool-manager restore`", path.display())]
    Corrupt {
        /// Path of the store.
        path: PathBuf,
        /// Description of the defect.
        what: String,
    },
    /// The operating system rejected an operation.
    #[error("cannot {operation} store {}", path.display())]
    Io {
        /// Operation, such as "open".
        operation: &'static str,
        /// Path of the store.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// The disk is nearly full, and its remaining space is reserved for the ledger.
    #[error(
        "the disk of the store has less than {STORE_FREE_BYTES_MIN} bytes free, which are reserved for the ledger"
    )]
    Full,
    /// A call to etcd failed.
    #[error("cannot {operation} store {}", path.display())]
    Etcd {
        /// Operation, such as "write".
        operation: &'static str,
        /// Prefix of the store's keys.
        path: PathBuf,
        /// Error of the call.
        #[source]
        cause: ::etcd::Error,
    },
    /// Keys with the prefix of the store belong to another program or rack.
    #[error("the prefix of store {} is in use: key {} belongs to another rack or program", path.display(), key.display())]
    PrefixInUse {
        /// Prefix of the store's keys.
        path: PathBuf,
        /// Key that does not belong to the store.
        key: PathBuf,
    },
    /// Another manager was elected, and only this one may write.
    #[error("another pool-manager is now the leader of store {}", path.display())]
    NotLeader {
        /// Prefix of the store's keys.
        path: PathBuf,
    },
    /// Another transfer of the leadership has not ended.
    #[error("another transfer of the leadership of store {} is in progress: try again later", path.display())]
    TransferInProgress {
        /// Prefix of the store's keys.
        path: PathBuf,
    },
    /// The log in etcd was written by another transaction than the last one of this manager.
    #[error("store {} was changed by another program, or by an earlier write of this manager", path.display())]
    Changed {
        /// Prefix of the store's keys.
        path: PathBuf,
    },
    /// The log in etcd is too large, because its batches cannot be applied fast enough.
    #[error("the log of store {} is too large: etcd is too slow", path.display())]
    Behind {
        /// Prefix of the store's keys.
        path: PathBuf,
    },
    /// An earlier write failed, and the store was not reopened since.
    #[error("an earlier write to store {} failed: it must be reopened", path.display())]
    Poisoned {
        /// Path of the store.
        path: PathBuf,
    },
}

impl StoreError {
    fn io_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |errno| Self::Io { operation, path: path.to_owned(), errno }
    }

    fn etcd_error(operation: &'static str, prefix: &str, cause: ::etcd::Error) -> Self {
        Self::Etcd { operation, path: PathBuf::from(format!("etcd:{prefix}")), cause }
    }

    /// Returns whether no member of etcd answered.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Etcd { cause: ::etcd::Error::Unavailable { .. }, .. })
    }

    /// Returns whether the disk or its quota, or etcd is full.
    pub fn is_full(&self) -> bool {
        match self {
            Self::Io { errno, .. } => {
                matches!(errno.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            Self::Etcd { cause, .. } => matches!(cause, ::etcd::Error::NoSpace),
            _ => false,
        }
    }
}

/// Decodes a number from eight little-endian bytes. Returns `None` for any other length.
pub fn number(value: &[u8]) -> Option<u64> {
    value.try_into().ok().map(u64::from_le_bytes)
}

/// Returns the number under `name` in [`Table::Meta`], or `None` if there is no such entry. `path`
/// is the store's path, for messages.
///
/// # Errors
/// [`StoreError::Corrupt`] if the value is not a number, or an error of [`Scan::scan`].
pub fn read_meta_number(store: &mut dyn Scan, path: &Path, name: &[u8]) -> Result<Option<u64>, StoreError> {
    let mut found = None;
    store.scan(Table::Meta, &mut |key, value| {
        if key == name {
            found = Some(number(value));
        }
    })?;
    let what = || format!("entry {:?} of table meta is not a number", String::from_utf8_lossy(name));
    found.map(|n| n.ok_or_else(|| StoreError::Corrupt { path: path.to_owned(), what: what() })).transpose()
}

/// Rejects a store with another format version. Writes the format version to an empty store.
fn check_format(store: &mut dyn Store, path: &Path) -> Result<(), StoreError> {
    match read_format(store, path)? {
        Some(_) => Ok(()),
        None => store.commit(&[Write::number(Table::Meta, meta::FORMAT, FORMAT)]),
    }
}

/// Returns the format version of a store, or `None` for an empty store. Rejects a store with another version.
fn read_format(store: &mut dyn Scan, path: &Path) -> Result<Option<u64>, StoreError> {
    let corrupt = |what| StoreError::Corrupt { path: path.to_owned(), what };
    match read_meta_number(store, path, meta::FORMAT)? {
        Some(FORMAT) => Ok(Some(FORMAT)),
        Some(found) if found > FORMAT => Err(StoreError::Newer { path: path.to_owned(), found }),
        Some(found) => Err(corrupt(format!("its format version {found} does not exist"))),
        None if is_empty(store)? => Ok(None),
        None => Err(corrupt(
            "it has entries but no format version, for example after an interrupted restore".to_owned(),
        )),
    }
}

/// Returns whether the store has no entries except for its format version.
///
/// # Errors
/// [`StoreError`] if the store cannot be read.
pub fn is_empty(store: &mut dyn Scan) -> Result<bool, StoreError> {
    for table in Table::ALL {
        let mut is_empty = true;
        store.scan(table, &mut |key, _| is_empty &= (table, key) == (Table::Meta, meta::FORMAT))?;
        if !is_empty {
            return Ok(false); // the first tables are small
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
