//! A program as a core sees it: which memory it touches, how far apart, and what waits for what.

use std::ops::Range;

/// Touches of a program that only fill the caches, and those that are timed.
pub(super) const WARM: usize = 40_000;
pub(super) const TIMED: usize = 60_000;

/// One touch of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Which line of 64 bytes.
    pub line: u64,
    /// Instructions since the one before, this one included.
    pub instructions: u32,
    /// Whether it writes.
    pub is_store: bool,
    /// What its address comes of.
    pub waits: Waits,
}

/// What the address of a touch comes of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// It was known long before.
    Nothing,
    /// What the load before brought.
    Last,
    /// The same as that of the touch before.
    Same,
    /// What the last touch of its kind brought, whatever came between.
    Chain,
}

/// A program's touches, and what it does to the rest of the core.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Lines that it works on: touched once before anything else, if they might stay in the caches.
    pub memory: Vec<Range<u64>>,
    /// In order. The first part only fills the caches.
    pub accesses: Vec<Access>,
    /// How many only fill the caches.
    pub warm: usize,
    /// Instructions that could start in a cycle if nothing else were in the way, at most the core's width.
    pub parallel: f64,
    /// Branches of a thousand instructions that were guessed wrong.
    pub mispredicted: f64,
    /// Lines of code, of a thousand instructions, that were not near.
    pub code_misses: f64,
}
