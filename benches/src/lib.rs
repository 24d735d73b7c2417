//! Common parts of the benchmarks: processes of the programs under test, clients that send requests
//! to the programs, and reports. The file of each benchmark states its goal and method.
#![forbid(unsafe_code)]

pub mod cache_client;
pub mod cache_servers;
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
