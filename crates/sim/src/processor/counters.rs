//! Performance counters of a run, as in Intel's top-down method (Pond, sections 4.6 and 6.4).

use prediction::sensitivity::{CORE_BOUND, COUNTERS, DRAM_BOUND, MEMORY_BOUND};

use super::{
    Core,
    cache::Level,
    stream::Program,
    timing::{CODE_MISS, REFILL, Run},
};

/// Values of all counters of the sensitivity model, in the order of [`COUNTERS`]. All values except
/// the last five are fractions of slots or cycles, from 0 to 1.
pub type Counters = [f64; COUNTERS.len()];

impl Run {
    /// Computes the performance counters of the run.
    pub(super) fn counters(&self, core: &Core, program: &Program, levels: &[Level]) -> Counters {
        let accesses = &program.accesses[program.warm..];
        let instructions: f64 = accesses.iter().map(|access| f64::from(access.instructions)).sum();
        let share = |cycles: f64| cycles / self.cycles;
        let of_thousand = |n: f64| n / 1000.0 * instructions;
        let mpki =
            |from: Level| levels.iter().filter(|level| **level > from).count() as f64 / instructions * 1000.0;
        with_derived([
            share(instructions / core.width),
            share(of_thousand(program.code_misses) * CODE_MISS),
            share(of_thousand(program.mispredicted) * REFILL),
            0.0,
            0.0,
            share(self.stalls.l1),
            share(self.stalls.l2),
            share(self.stalls.l3),
            share(self.stalls.latency),
            share(self.stalls.bandwidth),
            share(self.stalls.store),
            0.0,
            instructions / self.cycles,
            mpki(Level::L1),
            mpki(Level::L2),
            mpki(Level::L3),
            if self.any_outstanding > 0.0 { self.outstanding / self.any_outstanding } else { 0.0 },
        ])
    }
}

/// Computes the derived counters [`CORE_BOUND`], [`MEMORY_BOUND`] and [`DRAM_BOUND`] from the other
/// counters.
pub(super) fn with_derived(counted: Counters) -> Counters {
    let [retiring, frontend, speculation, _, _, l1, l2, l3, latency, bandwidth, store, ..] = counted;
    let dram = latency + bandwidth;
    let memory = l1 + l2 + l3 + dram + store;
    let mut all = counted;
    all[CORE_BOUND] = (1.0 - retiring - frontend - speculation - memory).max(0.0);
    all[MEMORY_BOUND] = memory;
    all[DRAM_BOUND] = dram;
    all
}
