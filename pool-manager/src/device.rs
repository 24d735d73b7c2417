//! The pool device: one external memory controller (EMC), the thing that decides at the hardware which host reaches
//! which slice. A driver does as it is told and remembers; whom to tell what is the ledger's business.

use std::{
    io,
    path::{Path, PathBuf},
};

use units::{Epoch, HostId};

use crate::{
    mark::{self, MARK},
    store::StoreError,
};

pub mod emulated;
#[cfg(test)]
mod model;
pub mod presence;
pub mod shared_dax;

pub use emulated::Emulated;
pub use shared_dax::SharedDax;

/// How a driver names one grant on a host.
pub type Handle = std::sync::Arc<str>;

/// Which kind of device an EMC is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A directory; see [`emulated`].
    Emulated,
    /// Memory that several hosts see and nothing fences; see [`shared_dax`].
    SharedDax,
}

impl Driver {
    /// All there are.
    pub const ALL: [Self; 2] = [Self::Emulated, Self::SharedDax];

    /// As `rack.toml` names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Emulated => "emulated",
            Self::SharedDax => "shared-dax",
        }
    }

    /// Whether its devices can cut a host off. What cannot is found by its serial number, on buses of the hosts' own.
    pub const fn cuts_off(self) -> bool {
        match self {
            Self::Emulated => true,
            Self::SharedDax => false,
        }
    }

    /// The files by which a device in use is recognized, relative to its directory.
    const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Emulated => &[MARK, "epochs", "slices"],
            Self::SharedDax => &[MARK, shared_dax::FILE],
        }
    }

    /// The driver of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|driver| driver.name() == name)
    }

    /// Takes the EMC at a path for a rack. It has so many slices, and a serial number if its driver asks for one. An EMC
    /// that has none yet is the rack's from then on.
    ///
    /// # Errors
    /// [`DeviceError::OtherRack`] before anything is changed, else as the driver's own `open`.
    pub fn open(
        self,
        path: &Path,
        slices: u32,
        serial: &str,
        rack: &str,
    ) -> Result<Box<dyn Device>, DeviceError> {
        let mark_error = |doing| move |errno| DeviceError::Io { doing, path: path.join(MARK), errno };
        let owner = mark::read(path).map_err(mark_error("read"))?;
        if let Some(owner) = owner.as_ref().filter(|owner| *owner != rack) {
            let (path, owner, rack) = (path.to_owned(), owner.clone(), rack.to_owned());
            return Err(DeviceError::OtherRack { path, owner, rack });
        }
        let device: Box<dyn Device> = match self {
            Self::Emulated => Box::new(Emulated::open(path, slices)?),
            Self::SharedDax => Box::new(SharedDax::open(path, slices, serial)?),
        };
        if owner.is_none() {
            mark::write(path, rack).map_err(mark_error("write"))?;
        }
        Ok(device)
    }
}

/// One EMC. Calls block, and are made from one thread of that EMC alone. Slices are counted from 0 on each EMC.
pub trait Device: Send {
    /// Lets a host reach a slice, which holds zeros if the last owner's memory did. Idempotent: the same owner gets the
    /// same handle.
    ///
    /// # Errors
    /// A refusal leaves everything as it was; after a failure the call may be made again.
    fn grant(&mut self, slice: u32, epoch: Epoch, host: HostId) -> Result<Handle, DeviceError>;

    /// Takes a slice from whoever got it under this epoch or an earlier one: once this returns, an access of that owner is
    /// a fatal memory error. Idempotent, and final: none of these epochs is granted again, even if it had not been yet.
    ///
    /// # Errors
    /// After a failure the owner may still reach the slice; the call is to be made again.
    fn revoke(&mut self, slice: u32, epoch: Epoch) -> Result<(), DeviceError>;

    /// Revokes every slice of a host and returns the grants that ended. Idempotent. A slice that cannot be revoked stays
    /// granted and does not fail the call; the manager revokes it separately.
    ///
    /// # Errors
    /// After a failure of the device the host may still reach some of it; the call is to be made again.
    fn fence(&mut self, host: HostId) -> Result<Vec<Grant>, DeviceError>;

    /// What the device believes, to be compared with what the ledger believes.
    ///
    /// # Errors
    /// When the device cannot tell.
    fn contents(&mut self) -> Result<Contents, DeviceError>;

    /// Makes durable what the calls since the last time have changed; before it returns nobody may learn what they
    /// answered.
    ///
    /// # Errors
    /// Nobody knows which of the calls happened: the device is to be opened again, and all of them may be made again.
    fn commit(&mut self) -> Result<(), DeviceError>;
}

/// One slice in the hands of one host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// Which slice of this EMC.
    pub slice: u32,
    /// Which of its owners.
    pub epoch: Epoch,
    /// Who that is.
    pub host: HostId,
    /// How the host opens it.
    pub handle: Handle,
}

/// All a device remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// Who has what, by slice.
    pub grants: Vec<Grant>,
    /// The highest epoch each slice ever had, revoked ones included; 0 for never.
    pub highest: Vec<Epoch>,
    /// How a host opens each slice, if that is the same for every owner; else nothing.
    pub places: Vec<Handle>,
}

/// Why the device did not.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It belongs to another rack.
    #[error(
        "{} is an EMC of rack {owner}, this is rack {rack}: if rack {owner} is gone and none of its VMs runs, remove the folder",
        path.display()
    )]
    OtherRack {
        /// The EMC's folder.
        path: PathBuf,
        /// The uuid of the rack it belongs to.
        owner: String,
        /// The uuid of this rack.
        rack: String,
    },
    /// A file of a device that was in use is missing, or another one is in its place.
    #[error(
        "{} {what}: restore the EMC's directory; if it is lost for good, restart pool-manager to begin an empty one",
        path.display()
    )]
    Vanished {
        /// The file.
        path: PathBuf,
        /// In what way it differs.
        what: &'static str,
    },
    /// A refusal: the call is of before it was opened. It may be another device than the one that was meant.
    #[error("EMC {} was opened again: must be compared with the ledger before it is used", path.display())]
    NotCompared {
        /// Where it is.
        path: PathBuf,
    },
    /// A refusal: it has no such slice.
    #[error("no slice {slice} on this EMC: must be below {slices}")]
    NoSuchSlice {
        /// What was asked for.
        slice: u32,
        /// How many it has.
        slices: u32,
    },
    /// A refusal: the order is older than what the device has seen, or of an epoch that was revoked.
    #[error("slice {slice}: epoch {epoch} is over; the highest was {highest}")]
    StaleEpoch {
        /// Which slice.
        slice: u32,
        /// What was asked for.
        epoch: Epoch,
        /// What it has seen.
        highest: Epoch,
    },
    /// A refusal: somebody has it, and must lose it first.
    #[error("slice {slice} is {host}'s with epoch {epoch}: must be revoked first")]
    Held {
        /// Which slice.
        slice: u32,
        /// The owner's epoch.
        epoch: Epoch,
        /// The owner.
        host: HostId,
    },
    /// A refusal: the memory behind the device is nearly used up.
    #[error("{} has {free} bytes free: must be at least {min} for another slice", path.display())]
    NoSpace {
        /// Where the memory comes from.
        path: PathBuf,
        /// What is left of it.
        free: u64,
        /// What must be left of it.
        min: u64,
    },
    /// Another process drives it.
    #[error("EMC {} is in use by another pool-manager: stop that one first", path.display())]
    InUse {
        /// Where it is.
        path: PathBuf,
    },
    /// It is not the device that the configuration describes.
    #[error("EMC {}: {what}", path.display())]
    Unfit {
        /// Where it is.
        path: PathBuf,
        /// In what way.
        what: String,
    },
    /// A refusal: it has no fence of its own.
    #[error("it cannot cut {host} off: the machine must be stopped first")]
    NotStopped {
        /// Which host.
        host: HostId,
    },
    /// A failure: its record could not be read or written.
    #[error("keep the record of EMC {}", path.display())]
    Record {
        /// Where it is.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: StoreError,
    },
    /// A failure of one slice: the operating system refused its file. The device works.
    #[error("{doing} {}", path.display())]
    Slice {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
    /// A failure of the device: the operating system refused.
    #[error("{doing} {}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        #[source]
        errno: io::Error,
    },
}
