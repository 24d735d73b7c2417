//! Performance counters of a run, as in Intel's top-down method (Pond, sections 4.6 and 6.4).

use prediction::sensitivity::{CORE_BOUND_INDEX, COUNTER_NAMES, DRAM_BOUND_INDEX, MEMORY_BOUND_INDEX};

use super::{
    CoreModel,
    cache::Level,
    stream::Program,
    timing::{INSTRUCTION_MISS_CYCLES, PIPELINE_REFILL_CYCLES, Run},
};

/// Values of all counters of the sensitivity model, in the order of [`COUNTER_NAMES`]. All values except
/// the last five are fractions of slots or cycles, from 0 to 1.
pub type Counters = [f64; COUNTER_NAMES.len()];

impl Run {
    /// Computes the performance counters of the run.
    pub(super) fn counters(&self, core: &CoreModel, program: &Program, levels: &[Level]) -> Counters {
        let accesses = &program.accesses[program.warmup..];
        let instructions: f64 = accesses.iter().map(|access| f64::from(access.instructions)).sum();
        let cycle_fraction = |cycles: f64| cycles / self.cycles;
        let per_thousand = |n: f64| n / 1000.0 * instructions;
        let mpki =
            |from: Level| levels.iter().filter(|level| **level > from).count() as f64 / instructions * 1000.0;
        add_derived_counters([
            cycle_fraction(instructions / core.width),
            cycle_fraction(per_thousand(program.code_misses) * INSTRUCTION_MISS_CYCLES),
            cycle_fraction(per_thousand(program.mispredictions) * PIPELINE_REFILL_CYCLES),
            0.0,
            0.0,
            cycle_fraction(self.stalls.l1),
            cycle_fraction(self.stalls.l2),
            cycle_fraction(self.stalls.l3),
            cycle_fraction(self.stalls.latency),
            cycle_fraction(self.stalls.bandwidth),
            cycle_fraction(self.stalls.store),
            0.0,
            instructions / self.cycles,
            mpki(Level::L1),
            mpki(Level::L2),
            mpki(Level::L3),
            if self.miss_cycles > 0.0 { self.outstanding_cycles / self.miss_cycles } else { 0.0 },
        ])
    }
}

/// Computes the derived counters [`CORE_BOUND_INDEX`], [`MEMORY_BOUND_INDEX`] and [`DRAM_BOUND_INDEX`] from the other
/// counters.
pub(super) fn add_derived_counters(counted: Counters) -> Counters {
    let [retiring, frontend, speculation, _, _, l1, l2, l3, latency, bandwidth, store, ..] = counted;
    let dram = latency + bandwidth;
    let memory = l1 + l2 + l3 + dram + store;
    let mut all = counted;
    all[CORE_BOUND_INDEX] = (1.0 - retiring - frontend - speculation - memory).max(0.0);
    all[MEMORY_BOUND_INDEX] = memory;
    all[DRAM_BOUND_INDEX] = dram;
    all
}
