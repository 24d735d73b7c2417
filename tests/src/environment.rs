//! Environment variables that change a test run.

use std::hash::{BuildHasher as _, RandomState};

/// Returns the number in an environment variable, or `None` if it is not set.
///
/// # Panics
/// Panics if the variable is not a number.
pub fn number_from_env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} = {text}: must be a number")))
}

/// Returns the seed in `TARN_SEED`, or a random one, and prints it.
///
/// # Panics
/// Panics if the variable is not a number.
pub fn seed() -> u64 {
    let seed = number_from_env("TARN_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("seed {seed} (TARN_SEED={seed} repeats the choices)");
    seed
}
