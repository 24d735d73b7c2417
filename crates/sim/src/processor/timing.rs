//! Timing model of the pipeline. Instructions issue in order, up to the size of the window. A load
//! completes when its line arrives. The window advances when its oldest load completes. Stall
//! cycles are attributed to their causes, as in top-down analysis.

use std::collections::VecDeque;

use super::{
    CoreModel, Memory,
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
    pub(super) outstanding_cycles: f64,
    /// Number of cycles with at least one outstanding miss.
    pub(super) miss_cycles: f64,
    /// Simulated utilization of the memory channel, from 0 to 1.
    pub(super) utilization: f64,
    /// Assumed utilization, from 0 to 1: the run used the memory latency at this utilization.
    pub(super) assumed_utilization: f64,
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
    pub(super) fn simulate(core: &CoreModel, program: &Program, levels: &[Level], memory: &Memory) -> Self {
        let latency = |used: f64| memory.latency_ns(used.min(CURVE_UTILIZATION_MAX));
        let at = |used: f64| {
            let line = 64.0 / memory.gb_per_s * core.ghz;
            let (idle, loaded) = (latency(0.0) * core.ghz, latency(used) * core.ghz);
            Pipeline::new(core, program, idle, loaded, line).run(&program.accesses[program.warmup..], levels)
        };
        let mut run = at(0.0);
        if latency(run.utilization) <= 1.01 * latency(0.0) {
            return run;
        }
        // A higher latency lowers the utilization, so there is exactly one fixed point.
        let (mut low, mut high) = (0.0, run.utilization);
        for _ in 0..BISECTION_STEPS {
            let middle = f64::midpoint(low, high);
            run = Self { assumed_utilization: middle, ..at(middle) };
            if (run.utilization - run.assumed_utilization).abs() < CONVERGENCE_TOLERANCE {
                break;
            }
            if run.utilization > run.assumed_utilization { low = middle } else { high = middle }
        }
        run
    }
}

/// Load that has started but has not left the window.
#[derive(Clone, Copy, Debug)]
struct InFlightLoad {
    instruction: u64,
    ends: f64,
    level: Level,
    /// Time that the line waited for the memory channel, in cycles.
    queued: f64,
}

struct Pipeline<'a> {
    core: &'a CoreModel,
    /// Cycles per instruction without memory stalls.
    cycles_per_instruction: f64,
    /// Latency of a line with an idle channel, in cycles.
    idle_latency: f64,
    /// Latency of a line at the assumed utilization, in cycles.
    loaded_latency: f64,
    /// Time that the channel needs to transfer one line, in cycles.
    line_transfer: f64,
    now: f64,
    instruction: u64,
    window: VecDeque<InFlightLoad>,
    /// Completion times of outstanding misses, in ascending order.
    misses: VecDeque<f64>,
    /// Completion times of outstanding prefetches, in ascending order.
    prefetches: VecDeque<f64>,
    /// Completion times of the stores in the store buffer, in ascending order.
    stores: VecDeque<f64>,
    /// Issue time of each access so far.
    issue_times: Vec<f64>,
    /// Completion time of the latest load.
    last_load: f64,
    /// Time at which the address of the latest access was available.
    last_address: f64,
    /// Completion time of the latest access with [`Dependency::Chain`].
    last_chained: f64,
    /// Time at which the channel becomes free.
    channel_free: f64,
    /// End of the period that [`Run::miss_cycles`] already covers.
    counted_until: f64,
    lines: u64,
    run: Run,
}

impl<'a> Pipeline<'a> {
    fn new(
        core: &'a CoreModel,
        program: &Program,
        idle_latency: f64,
        loaded_latency: f64,
        line_transfer: f64,
    ) -> Self {
        let clear =
            program.mispredictions * PIPELINE_REFILL_CYCLES + program.code_misses * INSTRUCTION_MISS_CYCLES;
        Self {
            core,
            cycles_per_instruction: 1.0 / program.ideal_ipc.min(core.width) + clear / 1000.0,
            idle_latency,
            loaded_latency,
            line_transfer,
            now: 0.0,
            instruction: 0,
            window: VecDeque::new(),
            misses: VecDeque::new(),
            prefetches: VecDeque::new(),
            stores: VecDeque::new(),
            issue_times: Vec::with_capacity(program.accesses.len() - program.warmup),
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
            self.retire_oldest_loads();
            self.start_access(access, *level);
        }
        let end = self.window.iter().map(|in_flight| in_flight.ends).fold(self.now, f64::max);
        self.run.utilization = (self.lines as f64 * self.line_transfer / end).min(1.0);
        Run { cycles: end, ..self.run }
    }

    /// Waits until the oldest loads complete and the window has space for the next instruction.
    fn retire_oldest_loads(&mut self) {
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

    fn start_access(&mut self, access: &Access, level: Level) {
        self.issue_times.push(self.now);
        let address_ready = match access.dependency {
            Dependency::None => self.now,
            Dependency::LastLoad => self.now.max(self.last_load),
            Dependency::SameAddress => self.now.max(self.last_address),
            Dependency::Chain => self.now.max(self.last_chained),
        };
        self.last_address = address_ready;
        let (ends, queued) = self.completion_time(address_ready, level);
        if access.dependency == Dependency::Chain {
            self.last_chained = ends;
        }
        if access.is_store {
            self.add_store(ends, level);
        } else {
            self.last_load = ends;
            self.window.push_back(InFlightLoad { instruction: self.instruction, ends, level, queued });
        }
    }

    /// Returns the completion time of an access, and the time that its line waited for the channel.
    fn completion_time(&mut self, address_ready: f64, level: Level) -> (f64, f64) {
        let level_latency = |at: usize| self.core.levels[at].1;
        match level {
            Level::L1 => (address_ready + level_latency(0), 0.0),
            Level::L2 => (address_ready + level_latency(1), 0.0),
            Level::L3 => (address_ready + level_latency(2), 0.0),
            Level::Memory => {
                let starts =
                    earliest_start_time(&mut self.misses, self.core.misses_max, self.now, address_ready);
                let (ends, queued) = self.fetch_line(starts);
                self.count_outstanding_load(address_ready, ends);
                insert_sorted(&mut self.misses, ends);
                (ends, queued)
            }
            Level::Prefetched(requested_at) => {
                let requested_at =
                    self.issue_times.get(requested_at as usize).copied().unwrap_or(address_ready);
                let starts = earliest_start_time(
                    &mut self.prefetches,
                    self.core.prefetches_max,
                    requested_at,
                    requested_at,
                );
                let (line_ready, queued) = self.fetch_line(starts);
                insert_sorted(&mut self.prefetches, line_ready);
                let ends = line_ready.max(address_ready + level_latency(1));
                self.count_outstanding_load(address_ready, ends);
                (ends, queued.min(ends - address_ready))
            }
        }
    }

    /// Fetches a line from memory. Returns the arrival time of the line, and the latency in excess
    /// of an idle channel, in cycles.
    fn fetch_line(&mut self, requested_at: f64) -> (f64, f64) {
        let starts = requested_at.max(self.channel_free);
        self.channel_free = starts + self.line_transfer;
        self.lines += 1;
        (starts + self.loaded_latency, starts - requested_at + self.loaded_latency - self.idle_latency)
    }

    fn count_outstanding_load(&mut self, address_ready: f64, ends: f64) {
        self.run.outstanding_cycles += ends - address_ready;
        self.run.miss_cycles += (ends - self.counted_until.max(address_ready)).max(0.0);
        self.counted_until = self.counted_until.max(ends);
    }

    /// Adds a store to the store buffer. Stalls only if the buffer is full. A store that misses all
    /// caches also uses the channel for the later write-back of the line.
    fn add_store(&mut self, ends: f64, level: Level) {
        if level > Level::L3 {
            self.channel_free += self.line_transfer;
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

/// Returns the time from `earliest` on at which another access can start, with at most `max`
/// outstanding accesses. Removes completed accesses from the list.
fn earliest_start_time(outstanding: &mut VecDeque<f64>, max: usize, now: f64, earliest: f64) -> f64 {
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

/// Time to refill the pipeline after a mispredictions branch, in cycles.
pub(super) const PIPELINE_REFILL_CYCLES: f64 = 17.0;
/// Penalty of an instruction-cache miss, in cycles.
pub(super) const INSTRUCTION_MISS_CYCLES: f64 = 25.0;
