//! Is the split right? Before a VM starts: how much of its memory it will never touch (frigid memory, Pond 4.6). Models are
//! data, trained here from rows that the caller has; nothing is read, kept or asked for.
#![forbid(unsafe_code)]

pub mod frigid;
pub mod import;
pub mod table;
pub mod trees;
