//! Programs as sequences of memory accesses, with distances and dependencies.

use std::ops::Range;

/// Number of accesses that only warm the caches, and of those that are timed.
pub(super) const WARMUP_ACCESSES: usize = 40_000;
pub(super) const TIMED_ACCESSES: usize = 60_000;

/// One memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Address as a line of 64 bytes.
    pub line: u64,
    /// Instructions since the previous access, including this one.
    pub instructions: u32,
    /// Whether the access is a store.
    pub is_store: bool,
    /// Dependency of the address.
    pub dependency: Dependency,
}

/// Dependency of an address on earlier accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dependency {
    /// The address is known in advance.
    None,
    /// The address depends on the previous load.
    LastLoad,
    /// The address is known when that of the previous access is.
    SameAddress,
    /// The address depends on the previous access of the chain, regardless of accesses in between.
    Chain,
}

/// Memory accesses of a program, and its other core characteristics.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Lines of the working set, touched once before the program starts if they may stay cached.
    pub memory: Vec<Range<u64>>,
    /// Accesses in program order. The first `warm` only warm the caches.
    pub accesses: Vec<Access>,
    /// Number of warm-up accesses.
    pub warm: usize,
    /// Instructions per cycle without stalls, at most the core's width.
    pub parallel: f64,
    /// Mispredicted branches per thousand instructions.
    pub mispredicted: f64,
    /// Instruction-cache misses per thousand instructions.
    pub code_misses: f64,
}
