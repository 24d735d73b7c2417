//! Concurrent use of soft memory while pages are revoked. Also runs under the thread sanitizer and the address
//! sanitizer; see CONTRIBUTING.md.
//!
//! `TARN_STRESS_THREADS` sets the number of threads of each test. `TARN_STRESS_SECONDS` sets the duration of each test;
//! without it, each thread performs a constant number of operations.
#![allow(clippy::unwrap_used, reason = "test code: a failed unwrap fails the test")]
#![allow(clippy::cast_possible_truncation, reason = "an operation depends on some bits of a number")]
#![expect(clippy::disallowed_methods, reason = "the duration of the tests can be set")]

#[cfg(not(miri))]
mod clients;
#[cfg(not(miri))]
mod daemon;
#[cfg(not(miri))]
#[path = "../../src/resident.rs"]
mod resident;
mod structures;

use std::{
    env,
    time::{Duration, Instant},
};

#[cfg(not(miri))]
pub(crate) use soft::{PAGE_BYTES, Pool};

/// Number of operations between two looks at the clock.
const CLOCK_INTERVAL: u64 = 64;

/// Threads and operations of a test.
#[derive(Clone, Copy, Debug)]
struct Load {
    threads: u64,
    /// Number of operations of each thread. Without a limit, the threads end at `until`.
    operations: u64,
    until: Instant,
}

impl Load {
    /// Returns the load that the environment sets. The default has this number of operations of each of 8 threads.
    fn from_environment(operations: u64) -> Self {
        let threads = setting("TARN_STRESS_THREADS").unwrap_or(if cfg!(miri) { 3 } else { 8 });
        let seconds = setting("TARN_STRESS_SECONDS");
        let operations = if seconds.is_some() { u64::MAX } else { operations };
        Self { threads, operations, until: Instant::now() + Duration::from_secs(seconds.unwrap_or(86_400)) }
    }

    /// Passes the number of each operation of a thread to a closure, mixed with the number of the thread.
    fn run(self, thread: u64, mut operate: impl FnMut(u64)) {
        for number in 0..self.operations {
            if number.is_multiple_of(CLOCK_INTERVAL) && Instant::now() >= self.until {
                return;
            }
            operate(mix((thread << 40) | number));
        }
    }
}

/// Returns the number of an environment variable.
fn setting(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}: must be a number")))
}

/// Returns 32 bits that depend on all bits of a number.
fn mix(number: u64) -> u64 {
    let mixed = (number ^ (number >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32
}
