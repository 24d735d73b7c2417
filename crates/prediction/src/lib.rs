//! Is the split right? Before a VM starts: how much of its memory it will never touch (frigid memory, Pond 4.6), and
//! whether all of it may come from the pool (latency sensitivity); and how much risk goes to which (Eq. 1). Models are
//! data, trained here from outcomes that the caller has; bytes and time are arguments, and nothing is kept.
#![forbid(unsafe_code)]

pub mod combination;
pub mod file;
pub mod frigid;
pub mod import;
pub mod sensitivity;
pub mod table;
pub mod trees;
