//! How long it takes: instructions start in order, as many at once as the window holds; a load ends when its line is there; the window moves
//! on when its oldest load has ended. What it waited for, and for how long, is what top-down analysis asks.

use std::collections::VecDeque;

use super::{
    Core, Memory,
    cache::Level,
    counters::Stalls,
    stream::{Access, Program},
};

/// One run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) cycles: f64,
    pub(super) stalls: Stalls,
    /// Misses under way, times cycles.
    pub(super) under_way: f64,
    /// Cycles with any.
    pub(super) any_under_way: f64,
    /// Share of the channel in use.
    pub(super) channel: f64,
}

/// Rounds in which latency and load of the channel are brought into line.
const ROUNDS: usize = 3;

impl Run {
    /// Runs a program until the latency is that of the load it makes.
    pub(super) fn of(core: &Core, program: &Program, seen: &[Level], memory: &Memory) -> Self {
        let mut run = Self::default();
        for _ in 0..ROUNDS {
            let latency = memory.latency_ns(run.channel) * core.ghz;
            let line = 64.0 / memory.gb_per_s * core.ghz;
            run = Pipeline::new(core, program, latency, line).run(&program.accesses[program.warm..], seen);
        }
        run
    }
}

/// A load or store that has started.
#[derive(Clone, Copy, Debug)]
struct Started {
    instruction: u64,
    ends: f64,
    level: Level,
    /// Cycles that it waited for the channel.
    queued: f64,
}

struct Pipeline<'a> {
    core: &'a Core,
    /// Cycles that an instruction takes where no memory is in the way.
    each: f64,
    latency: f64,
    /// Cycles that the channel takes for a line.
    line: f64,
    now: f64,
    instruction: u64,
    window: VecDeque<Started>,
    /// Ends of misses under way, and of stores that are not written yet.
    misses: VecDeque<f64>,
    stores: VecDeque<f64>,
    last_load: f64,
    channel_free: f64,
    lines: u64,
    run: Run,
}

impl<'a> Pipeline<'a> {
    fn new(core: &'a Core, program: &Program, latency: f64, line: f64) -> Self {
        let clear = program.mispredicted * REFILL + program.code_misses * CODE_MISS;
        Self {
            core,
            each: 1.0 / program.parallel.min(core.width) + clear / 1000.0,
            latency,
            line,
            now: 0.0,
            instruction: 0,
            window: VecDeque::new(),
            misses: VecDeque::new(),
            stores: VecDeque::new(),
            last_load: 0.0,
            channel_free: 0.0,
            lines: 0,
            run: Run::default(),
        }
    }

    fn run(mut self, accesses: &[Access], seen: &[Level]) -> Run {
        for (access, level) in accesses.iter().zip(seen) {
            self.instruction += u64::from(access.instructions);
            self.now += f64::from(access.instructions) * self.each;
            self.retire();
            self.start(access, *level);
        }
        let end = self.window.iter().map(|started| started.ends).fold(self.now, f64::max);
        self.run.channel = (self.lines as f64 * self.line / end).min(1.0);
        Run { cycles: end, ..self.run }
    }

    /// What is older than the window allows must have ended before anything else starts.
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
        let ready = if access.depends { self.now.max(self.last_load) } else { self.now };
        let (ends, queued) = self.ends(ready, level);
        if access.is_store {
            self.store(ends);
        } else {
            self.last_load = ends;
            self.window.push_back(Started { instruction: self.instruction, ends, level, queued });
        }
    }

    /// When a line is there, and how long of that it waited for the channel.
    fn ends(&mut self, ready: f64, level: Level) -> (f64, f64) {
        let near = |at: usize| self.core.levels[at].1;
        match level {
            Level::First => (ready + near(0), 0.0),
            Level::Second => (ready + near(1), 0.0),
            Level::Third => (ready + near(2), 0.0),
            Level::Memory => self.fetch(ready, 0.0),
            // Asked for so many accesses of its stream ago: about as many times what the program takes for one.
            Level::Prefetched(ahead) => {
                let pace = self.now / f64::from(u32::try_from(self.lines + 1).unwrap_or(u32::MAX));
                let (ends, queued) = self.fetch(ready, f64::from(ahead) * pace);
                (ends.max(ready + near(1)), queued)
            }
        }
    }

    /// Brings a line from memory; `head_start` cycles before it was asked for by the program, if the prefetcher was right.
    fn fetch(&mut self, ready: f64, head_start: f64) -> (f64, f64) {
        while self.misses.front().is_some_and(|ends| *ends <= ready) {
            self.misses.pop_front();
        }
        let full = self.misses.len() >= self.core.misses_max;
        let ready = if full { self.misses.pop_front().map_or(ready, |ends| ready.max(ends)) } else { ready };
        let begins = (ready - head_start).max(self.channel_free);
        self.channel_free = begins + self.line;
        self.lines += 1;
        let ends = (begins + self.latency).max(ready);
        let after = self.misses.back().map_or(ready, |last| last.max(ready));
        self.run.under_way += ends - ready;
        self.run.any_under_way += (ends - after).max(0.0);
        self.misses.push_back(ends.max(self.misses.back().copied().unwrap_or(0.0)));
        (ends, (begins - (ready - head_start)).max(0.0))
    }

    /// Stores wait for nobody, but there is room for so many.
    fn store(&mut self, ends: f64) {
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

/// Cycles to fill the pipeline again after a branch that was guessed wrong.
pub(super) const REFILL: f64 = 17.0;
/// Cycles that a line of code takes that was not near.
pub(super) const CODE_MISS: f64 = 25.0;
