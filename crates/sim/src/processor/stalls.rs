//! Stall cycles of a run, by cause.

use super::cache::Level;

/// Stall cycles, by cause.
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
    /// Adds stall cycles for a line of this level; `queued` of the line's latency was queueing at
    /// the channel.
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
