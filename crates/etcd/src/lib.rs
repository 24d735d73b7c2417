//! Client of etcd 3.4 and newer for programs that keep their state in etcd. [`client`] makes calls, and changes
//! to another member of the cluster after a failure. [`election`] elects one of several processes by a lease.
#![forbid(unsafe_code)]

pub mod client;
pub mod election;
pub mod messages;

mod error;

pub use client::Client;
pub use error::Error;
