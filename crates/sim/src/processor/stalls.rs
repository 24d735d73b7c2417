//! Stall cycles of a run, split by their cause.

use super::cache::Level;

/// Stall cycles of a run by cause: cache level, memory latency, memory bandwidth or store buffer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stalls {
    pub(super) l1: f64,
    pub(super) l2: f64,
    pub(super) l3: f64,
    pub(super) latency: f64,
    pub(super) bandwidth: f64,
    pub(super) store: f64,
}

impl Stalls {
    /// Adds stall cycles of an access that hits at `level`. `queued` is the number of cycles that
    /// the line waited for the memory channel; they count as bandwidth stalls.
    pub(super) fn add(&mut self, level: Level, cycles: f64, queued: f64) {
        match level {
            Level::L1 => self.l1 += cycles,
            Level::L2 => self.l2 += cycles,
            Level::L3 => self.l3 += cycles,
            Level::Memory | Level::Prefetched(_) => {
                let queued = queued.min(cycles);
                self.bandwidth += queued;
                self.latency += cycles - queued;
            }
        }
    }
}
