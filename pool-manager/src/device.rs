//! Drivers of pool devices. An external memory controller (EMC) enforces which host can access a
//! slice. The ledger decides on grants and revocations, and a driver performs and records them.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use ::etcd::election::Leadership;
use units::{Epoch, FencingToken, HostId, Name};

use crate::{
    folder_access::{self, FolderAccessError},
    rack_uuid_file::{self, RACK_UUID_FILE, RackUuidFile},
    store::{StoreError, etcd::Cluster},
};

pub mod emulated;
#[cfg(test)]
mod model;
pub mod presence;
pub mod shared_dax;

pub use emulated::Emulated;
pub use shared_dax::SharedDax;

/// Path or identifier that the driver assigns to a grant. The host uses it to open the slice.
pub type Handle = Arc<str>;

/// Driver of an EMC, selected by `emc.driver` in `rack.toml`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// EMC emulated by a directory; see [`emulated`].
    Emulated,
    /// Memory shared by several hosts that cannot revoke access; see [`shared_dax`].
    SharedDax,
}

impl Driver {
    /// All drivers, for parsing and for messages.
    pub const ALL: [Self; 2] = [Self::Emulated, Self::SharedDax];

    /// Returns the driver's name in `rack.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::SharedDax => "shared-dax",
        }
    }

    /// Returns whether devices of this driver can revoke access. Devices that cannot revoke access
    /// are attached to the hosts' buses, and hosts identify these devices by serial number.
    pub const fn can_revoke(self) -> bool {
        match self {
            Self::Emulated => true,
            Self::SharedDax => false,
        }
    }

    /// Returns the files that must exist unchanged while the device is open, relative to the
    /// device's directory.
    fn identifying_files(self, leader: Option<&DeviceLeader>) -> Vec<String> {
        match self {
            Self::Emulated => {
                let epochs = emulated::epochs::file_name(leader.map(|leader| leader.token));
                vec![RACK_UUID_FILE.to_owned(), epochs, emulated::SLICES_FOLDER.to_owned()]
            }
            Self::SharedDax if leader.is_some() => Vec::new(), // the record is in etcd
            Self::SharedDax => vec![RACK_UUID_FILE.to_owned(), shared_dax::GRANTS_FILE.to_owned()],
        }
    }

    /// Checks that a manager that was elected later has not removed one of the [`Self::identifying_files`], which is
    /// missing.
    fn check_superseded(self, missing: &Path) -> Result<(), DeviceError> {
        match self {
            Self::Emulated => emulated::epochs::check_latest(missing),
            Self::SharedDax => Ok(()),
        }
    }

    /// Returns the folders of the EMC at `path` in which only root and the manager's user may create
    /// or remove files.
    pub fn folders(self, path: &Path) -> Vec<PathBuf> {
        match self {
            Self::Emulated => vec![path.to_owned(), path.join(emulated::SLICES_FOLDER)],
            Self::SharedDax => vec![path.to_owned()],
        }
    }

    /// Checks the owner and mode of the folders of the EMC at `path`.
    ///
    /// # Errors
    /// [`FolderAccessError`] for the first folder that other users can change.
    pub fn check_folders(self, path: &Path) -> Result<(), FolderAccessError> {
        let own = rustix::process::geteuid().as_raw();
        self.folders(path).iter().try_for_each(|folder| folder_access::check(folder, own))
    }

    /// Returns the driver with this name in `rack.toml`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|driver| driver.name() == name)
    }

    /// Opens the EMC at `path`, which has `slices` slices. A directory that belongs to no EMC of the
    /// rack is assigned to the rack and, if it has no grants, to the EMC. `serial` is used only by
    /// drivers that cannot revoke access. `leader` is set if the manager was elected. The record of
    /// a device that cannot revoke access is then in etcd, and `path` is not used.
    ///
    /// # Errors
    /// [`DeviceError::LaterManager`] if another manager was elected later and has opened the device,
    /// [`DeviceError::FolderAccess`] if other users can change the EMC's folders,
    /// [`DeviceError::OtherRack`] or [`DeviceError::OtherEmc`] if the directory belongs to another
    /// rack or EMC, [`DeviceError::DamagedRackUuid`] if its rack UUID file is damaged,
    /// [`DeviceError::Io`], or an error of the driver. The first four errors occur before any change.
    pub fn open(
        self,
        path: &Path,
        slices: u32,
        serial: &str,
        owner: &EmcOwner,
        leader: Option<&DeviceLeader>,
    ) -> Result<Box<dyn Device>, DeviceError> {
        if let (Self::SharedDax, Some(leader)) = (self, leader) {
            return Ok(Box::new(SharedDax::open_in_etcd(leader, &owner.emc, slices, serial)?));
        }
        self.check_folders(path)?;
        let is_assigned = owner.check_assigned(path)?;
        let mut device: Box<dyn Device> = match self {
            Self::Emulated => Box::new(Emulated::open(path, slices, leader.map(|leader| leader.token))?),
            Self::SharedDax => Box::new(SharedDax::open(path, slices, serial)?),
        };
        if !is_assigned {
            // A directory with grants may be that of another EMC of the rack. The comparison with the
            // ledger finds this.
            let emc = device.contents()?.grants.is_empty().then_some(&owner.emc);
            rack_uuid_file::write(path, &owner.rack, emc).map_err(rack_uuid_error("write", path))?;
        }
        Ok(device)
    }
}

/// Elected manager that controls devices.
#[derive(Clone, Debug)]
pub struct DeviceLeader {
    /// Fencing token of the manager.
    pub token: FencingToken,
    /// Cluster of etcd that stores the ledger.
    pub cluster: Cluster,
    /// Condition for writes in this cluster.
    pub leadership: Arc<Leadership>,
}

/// EMC to which a directory belongs.
#[derive(Clone, Debug)]
pub struct EmcOwner {
    /// UUID of the rack.
    pub rack: String,
    /// Name of the EMC.
    pub emc: Name,
    /// Names of the other EMCs of the rack. A directory of a removed EMC may get another name.
    pub others: BTreeSet<Name>,
}

impl EmcOwner {
    /// Returns whether the directory is assigned to this EMC; `false` if it is not assigned to any
    /// EMC of the rack.
    fn check_assigned(&self, path: &Path) -> Result<bool, DeviceError> {
        let path_buf = || path.to_owned();
        match rack_uuid_file::read(path).map_err(rack_uuid_error("read", path))? {
            None => Ok(false),
            Some(RackUuidFile::Owner { rack: owner, .. }) if owner != self.rack => {
                Err(DeviceError::OtherRack { path: path_buf(), owner, rack: self.rack.clone() })
            }
            Some(RackUuidFile::Owner { emc: Some(owner), .. }) if self.others.contains(&owner) => {
                Err(DeviceError::OtherEmc { path: path_buf(), owner, emc: self.emc.clone() })
            }
            Some(RackUuidFile::Owner { emc, .. }) => Ok(emc.as_ref() == Some(&self.emc)),
            Some(RackUuidFile::Damaged(found)) => {
                Err(DeviceError::DamagedRackUuid { path: path_buf(), found, rack: self.rack.clone() })
            }
        }
    }
}

fn rack_uuid_error(operation: &'static str, path: &Path) -> impl Fn(io::Error) -> DeviceError {
    move |errno| DeviceError::Io { operation, path: path.join(RACK_UUID_FILE), errno }
}

/// Operations of an EMC. Calls block, and only the thread of this EMC makes them. Slices are
/// numbered from 0 on each EMC.
pub trait Device: Send {
    /// Grants a host access to a slice. The slice contains zeros if its last owner zeroed it.
    /// Idempotent: a repeated call with the same owner and epoch returns the same handle.
    ///
    /// # Errors
    /// A rejection changes nothing; after a failure the call may be repeated.
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError>;

    /// Revokes access for `epoch` and all earlier epochs. After a successful return, a memory
    /// access by an owner with one of these epochs is a fatal memory error. Idempotent and final:
    /// the device never grants one of these epochs again.
    ///
    /// # Errors
    /// After a failure the owner may still access the slice; the caller must repeat the call.
    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError>;

    /// Revokes every slice of a host and returns the revoked grants. Idempotent. A slice that
    /// cannot be revoked stays granted and does not fail the call; the manager revokes it
    /// separately.
    ///
    /// # Errors
    /// After a failure of the device the host may still access some slices; the caller must repeat
    /// the call.
    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError>;

    /// Returns the grants and epochs of the device. The manager compares them with the ledger.
    ///
    /// # Errors
    /// [`DeviceError`] if the device cannot be read.
    fn contents(&mut self) -> Result<Contents, DeviceError>;

    /// Makes all calls since the last commit durable. The caller must not publish results of these
    /// calls before `commit` returns.
    ///
    /// # Errors
    /// After a failure the outcome of these calls is unknown. The caller must reopen the device,
    /// and may repeat the calls.
    fn commit(&mut self) -> Result<(), DeviceError>;
}

/// Access of one host to one slice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// Number of the slice on this EMC, from 0.
    pub slice: u32,
    /// Epoch of the slice, which increases with each new owner.
    pub epoch: Epoch,
    /// Host that owns the slice.
    pub host: HostId,
    /// Path or identifier with which the host opens the slice.
    pub handle: Handle,
}

/// Grants and epochs stored on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Current grants, sorted by slice.
    pub grants: Vec<Grant>,
    /// Highest epoch of each slice, granted or revoked; 0 if the slice has never been granted.
    pub highest: Vec<Epoch>,
    /// Handle of each slice, if the handle does not depend on the owner; otherwise empty.
    pub handles: Vec<Handle>,
}

/// Error of an EMC or its driver.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The EMC belongs to another rack.
    #[error(
        "{0}/{RACK_UUID_FILE} contains rack {owner}, expected {rack}: if the manager runs with the wrong store, mount or restore the store \
         of rack {owner}; if emc.path is wrong, remove the EMC and add it under another name; remove {0} only if rack {owner} no longer exists and none of its VMs runs",
        path.display()
    )]
    OtherRack {
        /// Directory of the EMC.
        path: PathBuf,
        /// UUID of the rack to which the EMC belongs.
        owner: String,
        /// UUID of this rack.
        rack: String,
    },
    /// The directory belongs to another EMC of this rack, for example because two paths were exchanged.
    #[error(
        "{0}/{RACK_UUID_FILE} contains EMC {owner}, expected {emc}: stop pool-manager, and move the directories of both EMCs to their paths in rack.toml",
        path.display()
    )]
    OtherEmc {
        /// Directory of the EMC.
        path: PathBuf,
        /// EMC to which the directory belongs.
        owner: Name,
        /// EMC with this path in `rack.toml`.
        emc: Name,
    },
    /// The rack UUID file of the EMC contains no UUID.
    #[error(
        "{0}/{RACK_UUID_FILE} is damaged: contains {found:?}, expected {rack}: if {0} is the directory of this EMC of rack {rack}, remove \
         the file, and pool-manager writes it again; otherwise remove the EMC and add it under another name with the right path",
        path.display()
    )]
    DamagedRackUuid {
        /// Directory of the EMC.
        path: PathBuf,
        /// Beginning of the file.
        found: String,
        /// UUID of this rack.
        rack: String,
    },
    /// Other users can change the files of the EMC.
    #[error(transparent)]
    FolderAccess(#[from] FolderAccessError),
    /// A file of an open device is missing or was replaced.
    #[error(
        "{} {what}: restore the EMC's directory; if it is lost, restart pool-manager to create an empty one",
        path.display()
    )]
    Vanished {
        /// Missing or replaced file.
        path: PathBuf,
        /// Change of the file: "is missing" or "was replaced".
        what: &'static str,
    },
    /// Rejection: the device was reopened after the call was queued, and may now be another device.
    #[error("EMC {} was reopened: it must be compared with the ledger before it is used", path.display())]
    NotCompared {
        /// Directory of the EMC.
        path: PathBuf,
    },
    /// Rejection: the slice does not exist.
    #[error("no slice {slice} on this EMC: must be below {slices}")]
    NoSuchSlice {
        /// Number of the requested slice.
        slice: u32,
        /// Number of slices of the EMC.
        slices: u32,
    },
    /// Rejection: the requested epoch was revoked, or is below the highest epoch of the slice.
    #[error("slice {slice}: epoch {epoch} has ended; the highest epoch is {highest}")]
    StaleEpoch {
        /// Number of the slice on this EMC.
        slice: u32,
        /// Requested epoch.
        epoch: Epoch,
        /// Highest epoch of the slice on the device.
        highest: Epoch,
    },
    /// Rejection: the slice is granted to another owner. This owner's access must be revoked first.
    #[error("slice {slice} is held by {host} with epoch {epoch}: it must be revoked first")]
    Held {
        /// Number of the slice on this EMC.
        slice: u32,
        /// Epoch of the current owner.
        epoch: Epoch,
        /// Host that currently owns the slice.
        host: HostId,
    },
    /// Rejection: the file system that backs the EMC is nearly full.
    #[error("{} has {free} bytes free: must be at least {min} for another slice", path.display())]
    NoSpace {
        /// Directory on this file system.
        path: PathBuf,
        /// Free space, in bytes.
        free: u64,
        /// Required free space, in bytes.
        min: u64,
    },
    /// A manager that was elected later has opened the EMC.
    #[error("EMC {}: manager {later} was elected after this manager ({token}), and controls the EMC", path.display())]
    LaterManager {
        /// Directory of the EMC.
        path: PathBuf,
        /// Fencing token of this manager.
        token: FencingToken,
        /// Fencing token of the other manager.
        later: FencingToken,
    },
    /// Another process has opened the EMC.
    #[error("EMC {} is in use by another pool-manager: stop the other one first", path.display())]
    InUse {
        /// Directory of the EMC.
        path: PathBuf,
    },
    /// The EMC differs from the configuration.
    #[error("EMC {}: {what}", path.display())]
    Mismatch {
        /// Directory of the EMC.
        path: PathBuf,
        /// Description of the difference, for the operator.
        what: String,
    },
    /// Rejection: the EMC cannot revoke access, and the host is not known to be powered off.
    #[error("the EMC cannot revoke the access of {host}: power off the host first")]
    NotPoweredOff {
        /// Host whose access should be revoked.
        host: HostId,
    },
    /// Failure: the driver cannot read or write its record of grants.
    #[error("cannot access the record of EMC {}", path.display())]
    Record {
        /// Directory of the EMC.
        path: PathBuf,
        /// Error returned by the store that holds the driver's record of grants.
        #[source]
        cause: StoreError,
    },
    /// Failure of one slice: the operating system rejected an operation on the slice's file.
    /// Other slices of the device work.
    #[error("cannot {operation} {}", path.display())]
    Slice {
        /// Operation, such as "truncate".
        operation: &'static str,
        /// File of the slice.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
    /// Failure of the whole device: the operating system rejected an operation.
    #[error("cannot {operation} {}", path.display())]
    Io {
        /// Operation, such as "open".
        operation: &'static str,
        /// File or directory of the EMC.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        errno: io::Error,
    },
}

#[cfg(test)]
mod tests;
