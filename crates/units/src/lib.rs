//! The words every room of Tarn speaks: sizes, times, names, numbers, and all limits by name.
//!
//! Nothing here decides anything, and nothing here touches the world.
#![forbid(unsafe_code)]

mod chain;
pub mod limits;
mod name;
mod number;
mod size;
mod time;
mod user;

pub use chain::chain;
pub use name::{Name, NameError, RequestId};
pub use number::{DesiredVersion, EmcId, Epoch, HostId, InstanceId, ReservationId, Revision, SliceId};
pub use size::{Bytes, Fraction, FractionError, SLICE};
pub use time::{Ns, UnixMs};
pub use user::{UserId, UserIdError};
