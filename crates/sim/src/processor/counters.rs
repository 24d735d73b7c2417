//! What a performance unit tells of a run, after Intel's top-down method (Pond 4.6 and 6.4 ask for these).

use prediction::sensitivity::{CORE_BOUND, COUNTERS, DRAM_BOUND, MEMORY_BOUND};

use super::{
    Core,
    cache::Level,
    stream::Program,
    timing::{CODE_MISS, REFILL, Run},
};

/// One number for each of the counters that the forest knows; shares of all slots or cycles, 0 to 1, but for the last five.
pub type Counters = [f64; COUNTERS.len()];

/// Cycles in which nothing could start, by what was waited for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stalls {
    first: f64,
    second: f64,
    third: f64,
    latency: f64,
    bandwidth: f64,
    pub(super) store: f64,
}

impl Stalls {
    /// So many cycles for a line of that level, of which the line itself had waited some for the channel.
    pub(super) fn add(&mut self, level: Level, cycles: f64, queued: f64) {
        match level {
            Level::First => self.first += cycles,
            Level::Second => self.second += cycles,
            Level::Third => self.third += cycles,
            Level::Memory | Level::Prefetched(_) => {
                let queued = queued.min(cycles);
                self.bandwidth += queued;
                self.latency += cycles - queued;
            }
        }
    }
}

impl Run {
    /// As the counters tell it.
    pub(super) fn counters(&self, core: &Core, program: &Program, seen: &[Level]) -> Counters {
        let accesses = &program.accesses[program.warm..];
        let instructions: f64 = accesses.iter().map(|access| f64::from(access.instructions)).sum();
        let share = |cycles: f64| cycles / self.cycles;
        let of_thousand = |n: f64| n / 1000.0 * instructions;
        let mpki =
            |from: Level| seen.iter().filter(|level| **level > from).count() as f64 / instructions * 1000.0;
        reckoned([
            share(instructions / core.width),
            share(of_thousand(program.code_misses) * CODE_MISS),
            share(of_thousand(program.mispredicted) * REFILL),
            0.0,
            0.0,
            share(self.stalls.first),
            share(self.stalls.second),
            share(self.stalls.third),
            share(self.stalls.latency),
            share(self.stalls.bandwidth),
            share(self.stalls.store),
            0.0,
            instructions / self.cycles,
            mpki(Level::First),
            mpki(Level::Second),
            mpki(Level::Third),
            if self.any_under_way > 0.0 { self.under_way / self.any_under_way } else { 0.0 },
        ])
    }
}

/// With those that follow from others, which stand at [`CORE_BOUND`], [`MEMORY_BOUND`] and [`DRAM_BOUND`] whatever was there.
pub(super) fn reckoned(counted: Counters) -> Counters {
    let [retiring, frontend, speculation, _, _, first, second, third, latency, bandwidth, store, ..] =
        counted;
    let dram = latency + bandwidth;
    let memory = first + second + third + dram + store;
    let mut all = counted;
    all[CORE_BOUND] = (1.0 - retiring - frontend - speculation - memory).max(0.0);
    all[MEMORY_BOUND] = memory;
    all[DRAM_BOUND] = dram;
    all
}
