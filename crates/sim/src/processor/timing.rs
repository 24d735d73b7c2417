//! How long it takes: instructions start in order, as many at once as the window holds; a load ends when its line is there; the window moves
//! on when its oldest load has ended. What it waited for, and for how long, is what top-down analysis asks.

use std::collections::VecDeque;

use super::{
    Core, Memory,
    cache::Level,
    counters::Stalls,
    stream::{Access, Program, Waits},
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
    /// And that for which latency was paid.
    pub(super) paid: f64,
}

/// Halvings in which latency and load of the channel are brought into line.
const HALVINGS: usize = 6;
/// How near they are when they agree.
const AGREED: f64 = 0.01;
/// The channel's share in use up to which its curve tells what waiting costs; above it, the queue does that is simulated here. Both
/// together would count the same waiting twice.
const CURVE_UP_TO: f64 = 0.8;

impl Run {
    /// Runs a program at the latency of the load that it makes.
    pub(super) fn of(core: &Core, program: &Program, seen: &[Level], memory: &Memory) -> Self {
        let latency = |used: f64| memory.latency_ns(used.min(CURVE_UP_TO));
        let at = |used: f64| {
            let line = 64.0 / memory.gb_per_s * core.ghz;
            let (idle, loaded) = (latency(0.0) * core.ghz, latency(used) * core.ghz);
            Pipeline::new(core, program, idle, loaded, line).run(&program.accesses[program.warm..], seen)
        };
        let mut run = at(0.0);
        if latency(run.channel) <= 1.01 * latency(0.0) {
            return run;
        }
        // The slower memory is, the less of its channel is used: there is one share at which both agree.
        let (mut low, mut high) = (0.0, run.channel);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            run = Self { paid: middle, ..at(middle) };
            if (run.channel - run.paid).abs() < AGREED {
                break;
            }
            if run.channel > run.paid { low = middle } else { high = middle }
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
    /// Cycles of it that an idle channel would have spared.
    queued: f64,
}

struct Pipeline<'a> {
    core: &'a Core,
    /// Cycles that an instruction takes where no memory is in the way.
    each: f64,
    /// Cycles until a line is there, with an idle channel and with this one.
    idle: f64,
    loaded: f64,
    /// Cycles that the channel takes for a line.
    line: f64,
    now: f64,
    instruction: u64,
    window: VecDeque<Started>,
    /// Ends of misses under way, of lines that were asked for ahead, and of stores that are not written yet.
    misses: VecDeque<f64>,
    ahead: VecDeque<f64>,
    stores: VecDeque<f64>,
    /// When each access was made.
    times: Vec<f64>,
    /// When the last load brought its line, when the last address was known, and when the last of the chain was there.
    last_load: f64,
    last_known: f64,
    last_of_chain: f64,
    channel_free: f64,
    /// Until when misses under way are counted.
    counted_to: f64,
    lines: u64,
    run: Run,
}

impl<'a> Pipeline<'a> {
    fn new(core: &'a Core, program: &Program, idle: f64, loaded: f64, line: f64) -> Self {
        let clear = program.mispredicted * REFILL + program.code_misses * CODE_MISS;
        Self {
            core,
            each: 1.0 / program.parallel.min(core.width) + clear / 1000.0,
            idle,
            loaded,
            line,
            now: 0.0,
            instruction: 0,
            window: VecDeque::new(),
            misses: VecDeque::new(),
            ahead: VecDeque::new(),
            stores: VecDeque::new(),
            times: Vec::with_capacity(program.accesses.len() - program.warm),
            last_load: 0.0,
            last_known: 0.0,
            last_of_chain: 0.0,
            channel_free: 0.0,
            counted_to: 0.0,
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
        self.times.push(self.now);
        let known = match access.waits {
            Waits::Nothing => self.now,
            Waits::Last => self.now.max(self.last_load),
            Waits::Same => self.now.max(self.last_known),
            Waits::Chain => self.now.max(self.last_of_chain),
        };
        self.last_known = known;
        let (ends, queued) = self.ends(known, level);
        if access.waits == Waits::Chain {
            self.last_of_chain = ends;
        }
        if access.is_store {
            self.store(ends, level);
        } else {
            self.last_load = ends;
            self.window.push_back(Started { instruction: self.instruction, ends, level, queued });
        }
    }

    /// When a line is there, and how much of that is the channel's load.
    fn ends(&mut self, known: f64, level: Level) -> (f64, f64) {
        let near = |at: usize| self.core.levels[at].1;
        match level {
            Level::First => (known + near(0), 0.0),
            Level::Second => (known + near(1), 0.0),
            Level::Third => (known + near(2), 0.0),
            Level::Memory => {
                let begins = room(&mut self.misses, self.core.misses_max, self.now, known);
                let (ends, queued) = self.fetch(begins);
                self.count(known, ends);
                sorted_in(&mut self.misses, ends);
                (ends, queued)
            }
            Level::Prefetched(asked) => {
                let asked = self.times.get(asked as usize).copied().unwrap_or(known);
                let begins = room(&mut self.ahead, self.core.ahead_max, asked, asked);
                let (there, queued) = self.fetch(begins);
                sorted_in(&mut self.ahead, there);
                let ends = there.max(known + near(1));
                self.count(known, ends);
                (ends, queued.min(ends - known))
            }
        }
    }

    /// Brings a line from memory, asked for at a moment.
    fn fetch(&mut self, asked: f64) -> (f64, f64) {
        let begins = asked.max(self.channel_free);
        self.channel_free = begins + self.line;
        self.lines += 1;
        (begins + self.loaded, begins - asked + self.loaded - self.idle)
    }

    fn count(&mut self, known: f64, ends: f64) {
        self.run.under_way += ends - known;
        self.run.any_under_way += (ends - self.counted_to.max(known)).max(0.0);
        self.counted_to = self.counted_to.max(ends);
    }

    /// Stores wait for nobody, but there is room for so many. What they write goes back to memory one day.
    fn store(&mut self, ends: f64, level: Level) {
        if level > Level::Third {
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

/// When there is room for one more among so many that are under way: those that have ended by now are gone.
fn room(under_way: &mut VecDeque<f64>, max: usize, now: f64, wanted: f64) -> f64 {
    while under_way.front().is_some_and(|ends| *ends <= now) {
        under_way.pop_front();
    }
    if under_way.len() < max { wanted } else { under_way.pop_front().map_or(wanted, |ends| wanted.max(ends)) }
}

/// The earliest end first.
fn sorted_in(ends: &mut VecDeque<f64>, end: f64) {
    let at = ends.partition_point(|other| *other <= end);
    ends.insert(at, end);
}

/// Cycles to fill the pipeline again after a branch that was guessed wrong.
pub(super) const REFILL: f64 = 17.0;
/// Cycles that a line of code takes that was not near.
pub(super) const CODE_MISS: f64 = 25.0;
