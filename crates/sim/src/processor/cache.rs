//! Simulation of three cache levels and a stream prefetcher. It computes the level at which each
//! access hits, which does not depend on the latency of memory.

use super::{CoreModel, stream::Program};

/// Level of the memory hierarchy at which an access hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    L1,
    L2,
    L3,
    /// Memory, but an earlier prefetch requested the line. It started at the timed access with this
    /// index.
    Prefetched(u32),
    Memory,
}

/// Set-associative cache. The lines of a set are in LRU order, most recent first.
#[derive(Debug)]
struct Cache {
    sets: Vec<[u64; CACHE_WAYS]>,
}

/// Associativity of each cache level, in ways.
const CACHE_WAYS: usize = 16;
/// Marker of an empty way.
const EMPTY_WAY: u64 = u64::MAX;

impl Cache {
    fn new(lines: usize) -> Self {
        Self { sets: vec![[EMPTY_WAY; CACHE_WAYS]; (lines / CACHE_WAYS).max(1)] }
    }

    fn set_of(&mut self, line: u64) -> &mut [u64; CACHE_WAYS] {
        // Mixing in the upper bits keeps accesses with a constant stride from mapping to one set.
        let mixed = line ^ (line >> 13) ^ (line >> 27);
        let sets = self.sets.len() as u64;
        &mut self.sets[usize::try_from(mixed % sets).expect("a set index fits usize")]
    }

    /// Inserts a line as the most recently used. Returns whether the cache contained this line, and
    /// the evicted line or [`EMPTY_WAY`].
    fn touch(&mut self, line: u64) -> (bool, u64) {
        let set = self.set_of(line);
        let at = set.iter().position(|other| *other == line);
        let evicted = if at.is_some() { EMPTY_WAY } else { set[CACHE_WAYS - 1] };
        set[..=at.unwrap_or(CACHE_WAYS - 1)].rotate_right(1);
        set[0] = line;
        (at.is_some(), evicted)
    }

    /// Removes a line. Returns whether the cache contained this line.
    fn remove(&mut self, line: u64) -> bool {
        let set = self.set_of(line);
        let at = set.iter().position(|other| *other == line);
        if let Some(at) = at {
            set[at..].rotate_left(1);
            set[CACHE_WAYS - 1] = EMPTY_WAY;
        }
        at.is_some()
    }
}

/// Maximum number of streams that the prefetcher tracks at the same time.
const STREAMS_MAX: usize = 16;
/// Number of equal strides before the prefetcher starts to prefetch a stream.
const STRIDES_TO_CONFIRM_STREAM: u32 = 2;
/// Prefetch distance: number of lines of a stream that are prefetched ahead.
const PREFETCH_DISTANCE: usize = 16;

/// Sequence of accesses with a constant stride.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    last: u64,
    stride: i64,
    steps_seen: u32,
    used_at: u64,
    /// Times of the latest steps, as a ring buffer indexed by `steps_seen`.
    steps: [u32; PREFETCH_DISTANCE],
}

/// Stream prefetcher, trained on misses of the L1 cache.
#[derive(Debug, Default)]
struct Prefetcher {
    streams: [Stream; STREAMS_MAX],
    now: u64,
}

impl Prefetcher {
    /// Trains on an access at time `now`. Returns the time at which the prefetch of this line
    /// started, or `None` if the line was not prefetched.
    fn train(&mut self, line: u64, now: u32) -> Option<u32> {
        // An access belongs to a stream if its distance is at most one page, in cache lines.
        const STREAM_DISTANCE_MAX: u64 = 64;
        self.now += 1;
        let distance = |stream: &Stream| line.wrapping_sub(stream.last).cast_signed();
        let is_near =
            |stream: &Stream| stream.used_at > 0 && distance(stream).unsigned_abs() <= STREAM_DISTANCE_MAX;
        let Some(at) = self.streams.iter().position(is_near) else {
            let oldest =
                self.streams.iter_mut().min_by_key(|stream| stream.used_at).expect("STREAMS_MAX is above 0");
            *oldest = Stream { last: line, used_at: self.now, ..Stream::default() };
            return None;
        };
        let stream = &mut self.streams[at];
        let stride = distance(stream);
        if stride == 0 {
            return None;
        }
        let steps_seen = if stride == stream.stride { stream.steps_seen + 1 } else { 0 };
        (stream.last, stream.stride, stream.steps_seen, stream.used_at) =
            (line, stride, steps_seen, self.now);
        // The prefetch of this line started PREFETCH_DISTANCE steps ago or when the stream was
        // confirmed, whichever is later.
        let requested_at = stream.steps[steps_seen as usize % PREFETCH_DISTANCE];
        let confirmed_at = stream.steps[STRIDES_TO_CONFIRM_STREAM as usize % PREFETCH_DISTANCE];
        stream.steps[steps_seen as usize % PREFETCH_DISTANCE] = now;
        let is_long = steps_seen as usize >= PREFETCH_DISTANCE + STRIDES_TO_CONFIRM_STREAM as usize;
        (steps_seen > STRIDES_TO_CONFIRM_STREAM).then_some(if is_long { requested_at } else { confirmed_at })
    }
}

/// Largest working set that is loaded into the caches before a program starts, as a multiple of the
/// cache capacity. Lines of a larger working set would be evicted before their first use.
const PRELOADED_WORKING_SET_MAX: u64 = 3;

/// Cache hierarchy of a core.
#[derive(Debug)]
pub(super) struct CacheHierarchy {
    levels: [Cache; 3],
    /// Capacity of all levels together, in lines.
    capacity: usize,
    prefetcher: Prefetcher,
}

impl CacheHierarchy {
    pub(super) fn new(core: &CoreModel) -> Self {
        Self {
            levels: core.levels.map(|(lines, _)| Cache::new(lines)),
            capacity: core.levels.iter().map(|(lines, _)| lines).sum(),
            prefetcher: Prefetcher::default(),
        }
    }

    /// Returns the level at which each timed access hits.
    pub(super) fn simulate(mut self, program: &Program) -> Vec<Level> {
        let memory: u64 = program.memory.iter().map(|lines| lines.end - lines.start).sum();
        if memory <= PRELOADED_WORKING_SET_MAX * self.capacity as u64 {
            for line in program.memory.iter().cloned().flatten() {
                self.touch(line, 0);
            }
        }
        let (warmup, timed) = program.accesses.split_at(program.warmup);
        for access in warmup {
            self.touch(access.line, 0);
        }
        let now = |at: usize| u32::try_from(at).expect("the number of accesses fits u32");
        timed.iter().enumerate().map(|(at, access)| self.touch(access.line, now(at))).collect()
    }

    /// Accesses a line and returns the level at which the access hits. The L3 cache is a victim
    /// cache of the L2 cache, as in current servers.
    fn touch(&mut self, line: u64, now: u32) -> Level {
        let [l1, l2, l3] = &mut self.levels;
        if l1.touch(line).0 {
            return Level::L1;
        }
        let requested_at = self.prefetcher.train(line, now);
        let (is_l2_hit, evicted) = l2.touch(line);
        if is_l2_hit {
            return Level::L2;
        }
        let is_l3_hit = l3.remove(line);
        if evicted != EMPTY_WAY {
            l3.touch(evicted);
        }
        match (is_l3_hit, requested_at) {
            (true, _) => Level::L3,
            (false, Some(requested_at)) => Level::Prefetched(requested_at),
            (false, None) => Level::Memory,
        }
    }
}
