//! Three levels of caches and a stream prefetcher: where each access finds its line. That does not depend on how slow the memory
//! behind them is.

use super::{Core, stream::Program};

/// Where a line was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    First,
    Second,
    Third,
    /// In memory; the prefetcher had asked for it so many accesses before.
    Prefetched(u16),
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

    /// Whether a line was there; now it is.
    fn touch(&mut self, line: u64) -> bool {
        // Neighbours lie in different sets; the upper bits are mixed in, so that strides do not all meet in one.
        let mixed = line ^ (line >> 13) ^ (line >> 27);
        let sets = self.sets.len() as u64;
        let set = &mut self.sets[usize::try_from(mixed % sets).expect("a set's number")];
        let at = set.iter().position(|other| *other == line);
        set[..=at.unwrap_or(WAYS - 1)].rotate_right(1);
        set[0] = line;
        at.is_some()
    }
}

/// Streams that the prefetcher follows.
const STREAMS: usize = 16;
/// Steps alike after which it believes a stream.
const CONFIRMED: u32 = 2;
/// How many accesses of a stream it is ahead.
const AHEAD: u16 = 16;

/// Lines that follow each other at the same distance.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    last: u64,
    stride: i64,
    seen: u32,
    used_at: u64,
}

/// Follows streams of misses.
#[derive(Debug, Default)]
struct Prefetcher {
    streams: [Stream; STREAMS],
    now: u64,
}

impl Prefetcher {
    /// Whether the line had been asked for when the program touched it, and how many touches of its stream before.
    fn follow(&mut self, line: u64) -> Option<u16> {
        const NEAR: i64 = 64; // lines of a page
        self.now += 1;
        let distance = |stream: &Stream| line.wrapping_sub(stream.last).cast_signed();
        let found =
            self.streams.iter().position(|stream| distance(stream).abs() <= NEAR && stream.used_at > 0);
        let Some(at) = found else {
            let oldest =
                self.streams.iter_mut().min_by_key(|stream| stream.used_at).expect("there are streams");
            *oldest = Stream { last: line, stride: 0, seen: 0, used_at: self.now };
            return None;
        };
        let stream = &mut self.streams[at];
        let stride = distance(stream);
        if stride == 0 {
            return None;
        }
        let was_seen = if stride == stream.stride { stream.seen } else { 0 };
        *stream = Stream { last: line, stride, seen: was_seen + 1, used_at: self.now };
        (was_seen >= CONFIRMED).then(|| AHEAD.min(u16::try_from(was_seen).unwrap_or(AHEAD)))
    }
}

/// A core's caches.
#[derive(Debug)]
pub(super) struct Hierarchy {
    levels: [Cache; 3],
    prefetcher: Prefetcher,
}

impl Hierarchy {
    pub(super) fn new(core: &Core) -> Self {
        Self { levels: core.levels.map(|(lines, _)| Cache::new(lines)), prefetcher: Prefetcher::default() }
    }

    /// Where each access of a program finds its line, those that only warm left out.
    pub(super) fn look(mut self, program: &Program) -> Vec<Level> {
        let levels = program.accesses.iter().map(|access| self.touch(access.line));
        levels.skip(program.warm).collect()
    }

    fn touch(&mut self, line: u64) -> Level {
        let [first, second, third] = &mut self.levels;
        if first.touch(line) {
            return Level::First;
        }
        let ahead = self.prefetcher.follow(line);
        if second.touch(line) {
            Level::Second
        } else if third.touch(line) {
            Level::Third
        } else {
            ahead.map_or(Level::Memory, Level::Prefetched)
        }
    }
}
