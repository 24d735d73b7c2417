//! Code shared by the commands of `tarn`: global options, the connection to the pool manager,
//! errors with exit codes and hints, and output as tables, JSON or YAML. The commands are in the
//! crates `cli` and `evaluate`.
#![forbid(unsafe_code)]

pub mod connect;
pub mod failure;
pub mod hint;
mod leader;
pub mod lists;
pub mod open;
pub mod options;
pub mod print;
pub mod table;
mod target;

pub use connect::Connection;
pub use failure::{Exit, Failure};
pub use options::{Format, Global};
