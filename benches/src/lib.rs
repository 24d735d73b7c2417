//! Common parts of the benchmarks: real programs in temporary folders, clients that load them, and
//! the report. Each benchmark's own file states its goal and method.
#![forbid(unsafe_code)]

pub mod disk;
pub mod etcd;
pub mod failure;
pub mod guests;
pub mod load;
pub mod loopback;
pub mod process;
pub mod programs;
pub mod rack;
pub mod report;

/// Part of etcd's protocol, generated from `proto/etcd.proto`.
#[allow(missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic)]
pub mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}
