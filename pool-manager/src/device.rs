//! Pool devices: an external memory controller (EMC) enforces which host can access a slice. A
//! driver performs and records calls; the ledger decides on them.

use std::{
    io,
    path::{Path, PathBuf},
};

use units::{Epoch, HostId};

use crate::{
    rack_uuid_file::{self, RACK_UUID_FILE},
    store::StoreError,
};

pub mod emulated;
#[cfg(test)]
mod model;
pub mod presence;
pub mod shared_dax;

pub use emulated::Emulated;
pub use shared_dax::SharedDax;

/// Name of a grant on a host, as the driver gives it.
pub type Handle = std::sync::Arc<str>;

/// Kind of EMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A directory; see [`emulated`].
    Emulated,
    /// Memory that several hosts see, without a fence; see [`shared_dax`].
    SharedDax,
}

impl Driver {
    /// All drivers.
    pub const ALL: [Self; 2] = [Self::Emulated, Self::SharedDax];

    /// Returns the name in `rack.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::SharedDax => "shared-dax",
        }
    }

    /// Returns whether its devices can revoke access. Others are attached to the hosts' buses and
    /// identified by serial number.
    pub const fn can_revoke(self) -> bool {
        match self {
            Self::Emulated => true,
            Self::SharedDax => false,
        }
    }

    /// Returns the files that identify an open device, relative to its directory.
    const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Emulated => &[RACK_UUID_FILE, "epochs", "slices"],
            Self::SharedDax => &[RACK_UUID_FILE, shared_dax::FILE],
        }
    }

    /// Returns the driver of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|driver| driver.name() == name)
    }

    /// Opens the EMC at a path for a rack, with a number of slices and, if its driver requires one,
    /// a serial number. An EMC without a rack becomes the rack's.
    ///
    /// # Errors
    /// [`DeviceError::OtherRack`] before any change, otherwise those of the driver's `open`.
    pub fn open(
        self,
        path: &Path,
        slices: u32,
        serial: &str,
        rack: &str,
    ) -> Result<Box<dyn Device>, DeviceError> {
        let io_error = |doing| move |errno| DeviceError::Io { doing, path: path.join(RACK_UUID_FILE), errno };
        let owner = rack_uuid_file::read(path).map_err(io_error("read"))?;
        if let Some(owner) = owner.as_ref().filter(|owner| *owner != rack) {
            let (path, owner, rack) = (path.to_owned(), owner.clone(), rack.to_owned());
            return Err(DeviceError::OtherRack { path, owner, rack });
        }
        let device: Box<dyn Device> = match self {
            Self::Emulated => Box::new(Emulated::open(path, slices)?),
            Self::SharedDax => Box::new(SharedDax::open(path, slices, serial)?),
        };
        if owner.is_none() {
            rack_uuid_file::write(path, rack).map_err(io_error("write"))?;
        }
        Ok(device)
    }
}

/// EMC. Calls block, and come from the thread of this EMC only. Slices are counted from 0 on
/// each EMC.
pub trait Device: Send {
    /// Grants a host access to a slice, which is zeroed if the last owner's memory was. Idempotent:
    /// the same owner gets the same handle.
    ///
    /// # Errors
    /// A rejection changes nothing; after a failure the call may be repeated.
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError>;

    /// Revokes access under this epoch and earlier ones: after it returns, an access by such an
    /// owner is a fatal memory error. Idempotent and final: none of these epochs is granted again,
    /// even if it was not granted before.
    ///
    /// # Errors
    /// After a failure the owner may still reach the slice; the call is to be repeated.
    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError>;

    /// Revokes every slice of a host and returns the grants that ended. Idempotent. A slice that
    /// cannot be revoked stays granted and does not fail the call; the manager revokes it
    /// separately.
    ///
    /// # Errors
    /// After a failure of the device the host may still reach some slices; the call is to be
    /// repeated.
    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError>;

    /// Returns the contents, to be compared with the ledger.
    ///
    /// # Errors
    /// The device cannot be read.
    fn contents(&mut self) -> Result<Contents, DeviceError>;

    /// Makes the calls since the last commit durable; their results must not be published before it
    /// returns.
    ///
    /// # Errors
    /// The outcome of the calls is unknown: the device has to be reopened, and all calls may be
    /// repeated.
    fn commit(&mut self) -> Result<(), DeviceError>;
}

/// Grant of a slice to a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// Slice of this EMC.
    pub slice: u32,
    /// Epoch.
    pub epoch: Epoch,
    /// Host.
    pub host: HostId,
    /// Handle on the host.
    pub handle: Handle,
}

/// Contents of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Grants, by slice.
    pub grants: Vec<Grant>,
    /// Highest epoch of each slice, also of revoked ones; 0 for none.
    pub highest: Vec<Epoch>,
    /// Handle of each slice, if it is the same for every owner; otherwise empty.
    pub handles: Vec<Handle>,
}

/// Error of a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It belongs to another rack.
    #[error(
        "{} is an EMC of rack {owner}, not of this rack {rack}: if rack {owner} no longer exists and none of its VMs runs, remove the folder",
        path.display()
    )]
    OtherRack {
        /// Folder of the EMC.
        path: PathBuf,
        /// Rack to which it belongs.
        owner: String,
        /// This rack.
        rack: String,
    },
    /// A file of an open device is missing or was replaced.
    #[error(
        "{} {what}: restore the EMC's directory; if it is lost, restart pool-manager to create an empty one",
        path.display()
    )]
    Vanished {
        /// File.
        path: PathBuf,
        /// Difference.
        what: &'static str,
    },
    /// Rejection: the call precedes the opening of the device, which may be another one than
    /// intended.
    #[error("EMC {} was reopened: it must be compared with the ledger before it is used", path.display())]
    NotCompared {
        /// Path.
        path: PathBuf,
    },
    /// Rejection: the slice does not exist.
    #[error("no slice {slice} on this EMC: must be below {slices}")]
    NoSuchSlice {
        /// Requested slice.
        slice: u32,
        /// Number of slices.
        slices: u32,
    },
    /// Rejection: the epoch is below the device's highest one, or was revoked.
    #[error("slice {slice}: epoch {epoch} has ended; the highest epoch is {highest}")]
    StaleEpoch {
        /// Slice.
        slice: u32,
        /// Requested epoch.
        epoch: Epoch,
        /// Highest epoch.
        highest: Epoch,
    },
    /// Rejection: another owner has the slice, and must be revoked first.
    #[error("slice {slice} is held by {host} with epoch {epoch}: it must be revoked first")]
    Held {
        /// Slice.
        slice: u32,
        /// Epoch of the owner.
        epoch: Epoch,
        /// Owner.
        host: HostId,
    },
    /// Rejection: the memory behind the device is nearly used up.
    #[error("{} has {free} bytes free: must be at least {min} for another slice", path.display())]
    NoSpace {
        /// Source of the memory.
        path: PathBuf,
        /// Free bytes.
        free: u64,
        /// Required free bytes.
        min: u64,
    },
    /// Another process has opened it.
    #[error("EMC {} is in use by another pool-manager: stop that one first", path.display())]
    InUse {
        /// Path.
        path: PathBuf,
    },
    /// It differs from the configuration.
    #[error("EMC {}: {what}", path.display())]
    Mismatch {
        /// Path.
        path: PathBuf,
        /// Difference.
        what: String,
    },
    /// Rejection: it cannot revoke access by itself.
    #[error("the EMC cannot revoke the access of {host}: its machine must be powered off first")]
    NotPoweredOff {
        /// Host.
        host: HostId,
    },
    /// Failure: its record could not be read or written.
    #[error("access the record of EMC {}", path.display())]
    Record {
        /// Path.
        path: PathBuf,
        /// Error.
        #[source]
        cause: StoreError,
    },
    /// Failure of one slice: the operating system rejected an operation on its file. The device
    /// works.
    #[error("{doing} {}", path.display())]
    Slice {
        /// Operation.
        doing: &'static str,
        /// File.
        path: PathBuf,
        /// Error.
        #[source]
        errno: io::Error,
    },
    /// Failure of the device: the operating system rejected an operation.
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
