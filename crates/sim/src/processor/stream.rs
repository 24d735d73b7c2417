//! Programs, represented as sequences of memory accesses with dependencies.

use std::ops::Range;

/// Number of accesses before the timed part, which only fill the caches.
pub(super) const WARMUP_ACCESSES: usize = 40_000;
/// Number of timed accesses.
pub(super) const TIMED_ACCESSES: usize = 60_000;

/// One memory access of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Line number: the address divided by 64 bytes.
    pub line: u64,
    /// Number of instructions since the previous access, including this access.
    pub instructions: u32,
    /// Whether the access is a store.
    pub is_store: bool,
    /// Dependency of the address on earlier accesses.
    pub dependency: Dependency,
}

/// Dependency of an address on earlier accesses: it determines when the access can start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dependency {
    /// The address does not depend on earlier accesses.
    None,
    /// The address depends on the value of the previous load.
    LastLoad,
    /// The address is available at the same time as the address of the previous access.
    SameAddress,
    /// The address depends on the latest access marked `Chain`, regardless of accesses in between.
    Chain,
}

/// Program for the core model: its memory accesses and its other pipeline characteristics.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Lines of the working set. If they fit into the caches, they are loaded before the program
    /// starts.
    pub memory: Vec<Range<u64>>,
    /// Accesses in program order. The first `warmup` accesses only fill the caches.
    pub accesses: Vec<Access>,
    /// Number of accesses before the timed part.
    pub warmup: usize,
    /// Instructions per cycle without stalls, at most the core's width.
    pub ideal_ipc: f64,
    /// Mispredicted branches per thousand instructions.
    pub mispredictions: f64,
    /// Instruction-cache misses per thousand instructions.
    pub code_misses: f64,
}
