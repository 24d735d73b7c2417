//! Timing model of the pipeline. Instructions issue in order, up to the size of the window. A load
//! completes when its line arrives. The window advances when its oldest load completes. Stall
//! cycles are attributed to their causes, as in top-down analysis.

use std::collections::VecDeque;

use super::{
    Core, Memory,
    cache::Level,
    stalls::Stalls,
    stream::{Access, Dependency, Program},
};

/// Result of one run of a program.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) cycles: f64,
    pub(super) stalls: Stalls,
    /// Integral of the number of outstanding misses over time, in cycles.
    pub(super) outstanding: f64,
    /// Number of cycles with at least one outstanding miss.
    pub(super) any_outstanding: f64,
    /// Simulated utilization of the memory channel, from 0 to 1.
    pub(super) channel: f64,
    /// Assumed utilization, from 0 to 1: the run used the memory latency at this utilization.
    pub(super) assumed: f64,
}

/// Upper bound on bisection steps to find the fixed point of the utilization.
const BISECTION_STEPS: usize = 6;
/// Largest difference between assumed and simulated utilization at which the bisection stops.
const CONVERGENCE_TOLERANCE: f64 = 0.01;
/// Upper bound on the utilization for which the latency is read from the curve. At higher
/// utilization, the simulated queue of the channel adds the delay; the curve would add it twice.
const CURVE_UTILIZATION_MAX: f64 = 0.8;

impl Run {
    /// Runs a program with the memory latency that corresponds to its own channel utilization.
    pub(super) fn simulate(core: &Core, program: &Program, levels: &[Level], memory: &Memory) -> Self {
        let latency = |used: f64| memory.latency_ns(used.min(CURVE_UTILIZATION_MAX));
        let at = |used: f64| {
            let line = 64.0 / memory.gb_per_s * core.ghz;
            let (idle, loaded) = (latency(0.0) * core.ghz, latency(used) * core.ghz);
            Pipeline::new(core, program, idle, loaded, line).run(&program.accesses[program.warm..], levels)
        };
        let mut run = at(0.0);
        if latency(run.channel) <= 1.01 * latency(0.0) {
            return run;
        }
        // A higher latency lowers the utilization, so there is exactly one fixed point.
        let (mut low, mut high) = (0.0, run.channel);
        for _ in 0..BISECTION_STEPS {
            let middle = f64::midpoint(low, high);
            run = Self { assumed: middle, ..at(middle) };
            if (run.channel - run.assumed).abs() < CONVERGENCE_TOLERANCE {
                break;
            }
            if run.channel > run.assumed { low = middle } else { high = middle }
        }
        run
    }
}

/// Load that has started and has not left the window.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    instruction: u64,
    ends: f64,
    level: Level,
    /// Time that the line waited for the memory channel, in cycles.
    queued: f64,
}

struct Pipeline<'a> {
    core: &'a Core,
    /// Cycles per instruction without memory stalls.
    cycles_per_instruction: f64,
    /// Latency of a line with an idle channel, in cycles.
    idle: f64,
    /// Latency of a line at the assumed utilization, in cycles.
    loaded: f64,
    /// Time that the channel needs to transfer one line, in cycles.
    line: f64,
    now: f64,
    instruction: u64,
    window: VecDeque<InFlight>,
    /// Completion times of outstanding misses, in ascending order.
    misses: VecDeque<f64>,
    /// Completion times of outstanding prefetches, in ascending order.
    prefetches: VecDeque<f64>,
    /// Completion times of the stores in the store buffer, in ascending order.
    stores: VecDeque<f64>,
    /// Issue time of each access so far.
    times: Vec<f64>,
    /// Completion time of the latest load.
    last_load: f64,
    /// Time at which the address of the latest access was available.
    last_address: f64,
    /// Completion time of the latest access with [`Dependency::Chain`].
    last_chained: f64,
    /// Time from which on the channel is free.
    channel_free: f64,
    /// Time up to which [`Run::any_outstanding`] has been counted.
    counted_until: f64,
    lines: u64,
    run: Run,
}

impl<'a> Pipeline<'a> {
    fn new(core: &'a Core, program: &Program, idle: f64, loaded: f64, line: f64) -> Self {
        let clear = program.mispredicted * REFILL + program.code_misses * CODE_MISS;
        Self {
            core,
            cycles_per_instruction: 1.0 / program.parallel.min(core.width) + clear / 1000.0,
            idle,
            loaded,
            line,
            now: 0.0,
            instruction: 0,
            window: VecDeque::new(),
            misses: VecDeque::new(),
            prefetches: VecDeque::new(),
            stores: VecDeque::new(),
            times: Vec::with_capacity(program.accesses.len() - program.warm),
            last_load: 0.0,
            last_address: 0.0,
            last_chained: 0.0,
            channel_free: 0.0,
            counted_until: 0.0,
            lines: 0,
            run: Run::default(),
        }
    }

    fn run(mut self, accesses: &[Access], levels: &[Level]) -> Run {
        for (access, level) in accesses.iter().zip(levels) {
            self.instruction += u64::from(access.instructions);
            self.now += f64::from(access.instructions) * self.cycles_per_instruction;
            self.retire();
            self.start(access, *level);
        }
        let end = self.window.iter().map(|in_flight| in_flight.ends).fold(self.now, f64::max);
        self.run.channel = (self.lines as f64 * self.line / end).min(1.0);
        Run { cycles: end, ..self.run }
    }

    /// Waits until the oldest loads complete and the window has space for the next instruction.
    fn retire(&mut self) {
        while let Some(oldest) = self.window.front().copied() {
            if oldest.instruction + self.core.window > self.instruction {
                break;
            }
            self.window.pop_front();
            if oldest.ends > self.now {
                self.run.stalls.add(oldest.level, oldest.ends - self.now, oldest.queued);
                self.now = oldest.ends;
            }
        }
    }

    fn start(&mut self, access: &Access, level: Level) {
        self.times.push(self.now);
        let address_ready = match access.dependency {
            Dependency::None => self.now,
            Dependency::LastLoad => self.now.max(self.last_load),
            Dependency::SameAddress => self.now.max(self.last_address),
            Dependency::Chain => self.now.max(self.last_chained),
        };
        self.last_address = address_ready;
        let (ends, queued) = self.ends(address_ready, level);
        if access.dependency == Dependency::Chain {
            self.last_chained = ends;
        }
        if access.is_store {
            self.store(ends, level);
        } else {
            self.last_load = ends;
            self.window.push_back(InFlight { instruction: self.instruction, ends, level, queued });
        }
    }

    /// Returns the completion time of an access, and the time that its line waited for the channel.
    fn ends(&mut self, address_ready: f64, level: Level) -> (f64, f64) {
        let level_latency = |at: usize| self.core.levels[at].1;
        match level {
            Level::L1 => (address_ready + level_latency(0), 0.0),
            Level::L2 => (address_ready + level_latency(1), 0.0),
            Level::L3 => (address_ready + level_latency(2), 0.0),
            Level::Memory => {
                let starts = start_when_free(&mut self.misses, self.core.misses_max, self.now, address_ready);
                let (ends, queued) = self.fetch(starts);
                self.count(address_ready, ends);
                insert_sorted(&mut self.misses, ends);
                (ends, queued)
            }
            Level::Prefetched(requested_at) => {
                let requested_at = self.times.get(requested_at as usize).copied().unwrap_or(address_ready);
                let starts = start_when_free(
                    &mut self.prefetches,
                    self.core.prefetches_max,
                    requested_at,
                    requested_at,
                );
                let (line_ready, queued) = self.fetch(starts);
                insert_sorted(&mut self.prefetches, line_ready);
                let ends = line_ready.max(address_ready + level_latency(1));
                self.count(address_ready, ends);
                (ends, queued.min(ends - address_ready))
            }
        }
    }

    /// Fetches a line from memory. Returns its arrival time and the part of the latency above an
    /// idle channel, in cycles.
    fn fetch(&mut self, requested_at: f64) -> (f64, f64) {
        let starts = requested_at.max(self.channel_free);
        self.channel_free = starts + self.line;
        self.lines += 1;
        (starts + self.loaded, starts - requested_at + self.loaded - self.idle)
    }

    fn count(&mut self, address_ready: f64, ends: f64) {
        self.run.outstanding += ends - address_ready;
        self.run.any_outstanding += (ends - self.counted_until.max(address_ready)).max(0.0);
        self.counted_until = self.counted_until.max(ends);
    }

    /// Adds a store to the store buffer. Stalls only if the buffer is full. A store that misses all
    /// caches also uses the channel for the later write-back of the line.
    fn store(&mut self, ends: f64, level: Level) {
        if level > Level::L3 {
            self.channel_free += self.line;
            self.lines += 1;
        }
        while self.stores.front().is_some_and(|ends| *ends <= self.now) {
            self.stores.pop_front();
        }
        if self.stores.len() >= self.core.stores_max
            && let Some(first) = self.stores.pop_front()
        {
            self.run.stalls.store += (first - self.now).max(0.0);
            self.now = self.now.max(first);
        }
        self.stores.push_back(ends.max(self.stores.back().copied().unwrap_or(0.0)));
    }
}

/// Returns the time at which one more access can start, with at most `max` outstanding accesses.
/// Removes completed accesses from the list.
fn start_when_free(outstanding: &mut VecDeque<f64>, max: usize, now: f64, earliest: f64) -> f64 {
    while outstanding.front().is_some_and(|ends| *ends <= now) {
        outstanding.pop_front();
    }
    if outstanding.len() < max {
        earliest
    } else {
        outstanding.pop_front().map_or(earliest, |ends| earliest.max(ends))
    }
}

/// Inserts a completion time into a list in ascending order.
fn insert_sorted(ends: &mut VecDeque<f64>, end: f64) {
    let at = ends.partition_point(|other| *other <= end);
    ends.insert(at, end);
}

/// Time to refill the pipeline after a mispredicted branch, in cycles.
pub(super) const REFILL: f64 = 17.0;
/// Penalty of an instruction-cache miss, in cycles.
pub(super) const CODE_MISS: f64 = 25.0;
