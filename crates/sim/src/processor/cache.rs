//! Three levels of caches and a stream prefetcher: where each access finds its line. That does not depend on how slow the memory
//! behind them is.

use super::{Core, stream::Program};

/// Where a line was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    First,
    Second,
    Third,
    /// In memory; the prefetcher asked for it when the program made this timed access, counted from 0.
    Prefetched(u32),
    Memory,
}

/// Sets of a cache, each with its lines, the latest used first.
#[derive(Debug)]
struct Cache {
    sets: Vec<[u64; WAYS]>,
}

/// Lines of a set, at every level.
const WAYS: usize = 16;
/// No line.
const NONE: u64 = u64::MAX;

impl Cache {
    fn new(lines: usize) -> Self {
        Self { sets: vec![[NONE; WAYS]; (lines / WAYS).max(1)] }
    }

    fn set(&mut self, line: u64) -> &mut [u64; WAYS] {
        // Neighbours lie in different sets; the upper bits are mixed in, so that strides do not all meet in one.
        let mixed = line ^ (line >> 13) ^ (line >> 27);
        let sets = self.sets.len() as u64;
        &mut self.sets[usize::try_from(mixed % sets).expect("a set's number")]
    }

    /// Whether a line was there; now it is, and the line that had to go is told.
    fn touch(&mut self, line: u64) -> (bool, u64) {
        let set = self.set(line);
        let at = set.iter().position(|other| *other == line);
        let gone = if at.is_some() { NONE } else { set[WAYS - 1] };
        set[..=at.unwrap_or(WAYS - 1)].rotate_right(1);
        set[0] = line;
        (at.is_some(), gone)
    }

    /// Whether a line was there; now it is not.
    fn take(&mut self, line: u64) -> bool {
        let set = self.set(line);
        let at = set.iter().position(|other| *other == line);
        if let Some(at) = at {
            set[at..].rotate_left(1);
            set[WAYS - 1] = NONE;
        }
        at.is_some()
    }
}

/// Streams that the prefetcher follows.
const STREAMS: usize = 16;
/// Steps alike after which it believes a stream.
const CONFIRMED: u32 = 2;
/// How many lines of a stream it is ahead.
const AHEAD: usize = 16;

/// Lines that follow each other at the same distance.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    last: u64,
    stride: i64,
    seen: u32,
    used_at: u64,
    /// When it made its latest steps, the last of them at `seen`, modulo their number.
    steps: [u32; AHEAD],
}

/// Follows streams of misses.
#[derive(Debug, Default)]
struct Prefetcher {
    streams: [Stream; STREAMS],
    now: u64,
}

impl Prefetcher {
    /// When the line had been asked for that the program touches `now`, if it had been.
    fn follow(&mut self, line: u64, now: u32) -> Option<u32> {
        const NEAR: u64 = 64; // lines of a page
        self.now += 1;
        let distance = |stream: &Stream| line.wrapping_sub(stream.last).cast_signed();
        let is_near = |stream: &Stream| stream.used_at > 0 && distance(stream).unsigned_abs() <= NEAR;
        let Some(at) = self.streams.iter().position(is_near) else {
            let oldest =
                self.streams.iter_mut().min_by_key(|stream| stream.used_at).expect("there are streams");
            *oldest = Stream { last: line, used_at: self.now, ..Stream::default() };
            return None;
        };
        let stream = &mut self.streams[at];
        let stride = distance(stream);
        if stride == 0 {
            return None;
        }
        let seen = if stride == stream.stride { stream.seen + 1 } else { 0 };
        (stream.last, stream.stride, stream.seen, stream.used_at) = (line, stride, seen, self.now);
        // Asked for AHEAD steps ago, or when the stream was first believed.
        let asked = stream.steps[seen as usize % AHEAD];
        let first = stream.steps[CONFIRMED as usize % AHEAD];
        stream.steps[seen as usize % AHEAD] = now;
        let is_long = seen as usize >= AHEAD + CONFIRMED as usize;
        (seen > CONFIRMED).then_some(if is_long { asked } else { first })
    }
}

/// Memory that may be so many times the caches and is touched before a program begins: of more, nothing would stay.
const WARMED_MAX: u64 = 3;

/// A core's caches.
#[derive(Debug)]
pub(super) struct Hierarchy {
    levels: [Cache; 3],
    /// Of all levels.
    lines: usize,
    prefetcher: Prefetcher,
}

impl Hierarchy {
    pub(super) fn new(core: &Core) -> Self {
        Self {
            levels: core.levels.map(|(lines, _)| Cache::new(lines)),
            lines: core.levels.iter().map(|(lines, _)| lines).sum(),
            prefetcher: Prefetcher::default(),
        }
    }

    /// Where each access of a program finds its line, those that only warm left out.
    pub(super) fn look(mut self, program: &Program) -> Vec<Level> {
        let memory: u64 = program.memory.iter().map(|lines| lines.end - lines.start).sum();
        if memory <= WARMED_MAX * self.lines as u64 {
            for line in program.memory.iter().cloned().flatten() {
                self.touch(line, 0);
            }
        }
        let (warm, timed) = program.accesses.split_at(program.warm);
        for access in warm {
            self.touch(access.line, 0);
        }
        let now = |at: usize| u32::try_from(at).expect("a program is short");
        timed.iter().enumerate().map(|(at, access)| self.touch(access.line, now(at))).collect()
    }

    /// The last level has what the second had no room for, as those of servers do.
    fn touch(&mut self, line: u64, now: u32) -> Level {
        let [first, second, third] = &mut self.levels;
        if first.touch(line).0 {
            return Level::First;
        }
        let asked = self.prefetcher.follow(line, now);
        let (is_second, gone) = second.touch(line);
        if is_second {
            return Level::Second;
        }
        let is_third = third.take(line);
        if gone != NONE {
            third.touch(gone);
        }
        match (is_third, asked) {
            (true, _) => Level::Third,
            (false, Some(asked)) => Level::Prefetched(asked),
            (false, None) => Level::Memory,
        }
    }
}
