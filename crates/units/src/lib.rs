//! Common types of all crates (sizes, times, names and identifiers) and all limits as constants.
//!
//! The crate performs no I/O and contains no policy.
#![forbid(unsafe_code)]

mod chain;
mod counters;
mod limited_read;
pub mod limits;
mod name;
mod number;
mod quoted;
mod size;
mod time;
mod user;

pub use chain::chain;
pub use counters::{COUNTER_NAMES, LATENCY_RATIO_RANGE, LATENCY_RATIO_RULE};
pub use limited_read::read_limited;
pub use name::{Name, NameError, RequestId};
pub use number::{
    DesiredVersion, EmcId, Epoch, FencingToken, HostId, InstanceId, MigrationId, ReservationId, Revision,
    SliceId,
};
pub use quoted::{QuotedText, escaped, shortened, single_line, truncated};
pub use size::{Bytes, Fraction, FractionError, SLICE, SizeError};
pub use time::{Ns, UnixMs};
pub use user::{UserId, UserIdError};
