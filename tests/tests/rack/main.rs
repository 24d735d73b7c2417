//! A rack in a box: real hosts with real CXL memory between them, agents inside and a manager outside. One program, so that two of its
//! tests run at a time.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

mod agent;
mod busy;
mod faults;
mod guest;
mod hosts;
mod moves;
mod random_faults;
mod symbiosis;
