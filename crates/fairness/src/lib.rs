//! Who gets how much of a host's local memory and of its link to remote memory (Spirit's Symbiosis): the market, and what
//! it must know of a tenant. Numbers in, numbers out: nothing is measured here, and no limit is set.
#![forbid(unsafe_code)]

pub mod curve;
pub mod epoch;
pub mod market;
pub mod profile;
