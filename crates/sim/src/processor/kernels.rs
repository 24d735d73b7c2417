//! A family of programs: what each of them touches, for several inputs. They stand for what runs in clouds, and are none of it.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::stream::{Access, Program, TIMED, WARM, Waits};

/// A program and its size.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// What it is called, parameters included.
    pub name: String,
    does: Does,
    /// Lines of memory that it works on.
    lines: u64,
    /// Instructions from one touch to the next.
    work: u32,
    /// See [`Program`].
    parallel: f64,
    mispredicted: f64,
    code_misses: f64,
}

/// How it goes through its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    /// Each address is what the load before brought.
    Chase,
    /// So many arrays from end to end, the last of them written or not.
    Stream { arrays: u64, writes: bool },
    /// A grid of rows, each point with its neighbours above and below.
    Stencil { row: u64 },
    /// Keys by popularity: a bucket, then the value it points to, of so many lines.
    KeyValue { skew: f64, value: u64 },
    /// A table is read in order, and another looked up by what was read.
    Join { writes: bool },
    /// Neighbours lie in order; what is known of each lies anywhere.
    Graph { degree: u64 },
    /// Anywhere, and nothing waits for it.
    Scatter,
    /// Down a tree from its root, for each key.
    Tree { fanout: u64 },
    /// Mostly a little memory; so many of a thousand touches chase through all of it.
    Phases { chase: u64 },
}

/// All programs.
pub fn family() -> Vec<Kernel> {
    let mut all = Vec::new();
    for (lines, work) in pairs(&[10, 14, 17, 20, 22], &[10, 60, 300, 1500]) {
        all.push(kernel(Does::Chase, lines, work));
    }
    for (arrays, writes) in [(1, false), (2, true), (3, true), (4, false)] {
        for (lines, work) in pairs(&[14, 20], &[8, 40, 200]) {
            all.push(kernel(Does::Stream { arrays, writes }, lines, work));
        }
    }
    for row in [64, 1024] {
        for (lines, work) in pairs(&[15, 20], &[20, 80, 300]) {
            all.push(kernel(Does::Stencil { row }, lines, work));
        }
    }
    for (skew, value) in [(0.6, 1), (0.99, 4), (1.2, 16)] {
        for (lines, work) in pairs(&[14, 18, 22], &[100, 500, 2000]) {
            all.push(Kernel {
                mispredicted: 4.0,
                code_misses: 6.0,
                ..kernel(Does::KeyValue { skew, value }, lines, work)
            });
        }
    }
    for writes in [false, true] {
        for (lines, work) in pairs(&[13, 17, 22], &[25, 100, 400]) {
            all.push(Kernel { mispredicted: 2.0, ..kernel(Does::Join { writes }, lines, work) });
        }
    }
    for degree in [4, 32] {
        for (lines, work) in pairs(&[14, 18, 22], &[10, 60, 300]) {
            all.push(Kernel { mispredicted: 6.0, ..kernel(Does::Graph { degree }, lines, work) });
        }
    }
    for (lines, work) in pairs(&[17, 22], &[15, 60, 250, 1000]) {
        all.push(kernel(Does::Scatter, lines, work));
    }
    for fanout in [4, 16] {
        for (lines, work) in pairs(&[16, 20, 22], &[60, 300, 1500]) {
            all.push(Kernel { mispredicted: 5.0, ..kernel(Does::Tree { fanout }, lines, work) });
        }
    }
    for chase in [1, 3, 10, 30] {
        for (lines, work) in pairs(&[18, 22], &[10, 40]) {
            all.push(kernel(Does::Phases { chase }, lines, work));
        }
    }
    for parallel in [1.2, 2.0, 3.0, 4.0] {
        for (lines, work) in pairs(&[6, 9, 13], &[5]) {
            all.push(Kernel { parallel, ..kernel(Does::Scatter, lines, work) });
        }
    }
    for code_misses in [10.0, 20.0, 35.0] {
        for (lines, work) in pairs(&[12, 17, 21], &[60]) {
            let does = Does::KeyValue { skew: 0.9, value: 2 };
            all.push(Kernel { code_misses, mispredicted: 8.0, parallel: 2.5, ..kernel(does, lines, work) });
        }
    }
    all.iter_mut().for_each(Kernel::christen);
    all
}

/// Each size, as a power of two of lines, with each amount of work.
fn pairs(lines: &[u32], work: &[u32]) -> impl Iterator<Item = (u64, u32)> {
    lines.iter().flat_map(move |lines| work.iter().map(move |work| (1 << lines, *work)))
}

fn kernel(does: Does, lines: u64, work: u32) -> Kernel {
    Kernel { name: String::new(), does, lines, work, parallel: 3.2, mispredicted: 0.5, code_misses: 0.2 }
}

impl Kernel {
    fn christen(&mut self) {
        let does = format!("{:?}", self.does).to_lowercase();
        let does: String =
            does.replace(',', "-").chars().filter(|c| !matches!(c, ' ' | '{' | '}' | ':')).collect();
        let kib = self.lines / 16;
        self.name = format!("{does}-{kib}KiB-{}i-{}p-{}c", self.work, self.parallel, self.code_misses);
    }

    /// What it does with one of its inputs: another seed, and a bit larger or smaller. There are four sizes.
    pub fn program(&self, input: u64) -> Program {
        const SIZES: [(u64, f64); 4] = [(4, 1.0), (3, 1.4), (6, 0.8), (5, 0.6)]; // quarters of the lines, and of the work
        let (quarters, work) = SIZES[usize::try_from(input % 4).expect("one of four")];
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a bit more or less work"
        )]
        let work = ((f64::from(self.work) * work) as u32).max(1);
        let mut writer = Writer {
            rng: Pcg64Mcg::seed_from_u64(input),
            accesses: Vec::with_capacity(WARM + TIMED),
            lines: (self.lines * quarters / 4).max(16),
            edges: 0,
            work,
        };
        let memory = self.does.memory(writer.lines);
        while writer.accesses.len() < WARM + TIMED {
            writer.go(self.does);
        }
        writer.accesses.truncate(WARM + TIMED);
        Program {
            memory,
            accesses: writer.accesses,
            warm: WARM,
            parallel: self.parallel,
            mispredicted: self.mispredicted,
            code_misses: self.code_misses,
        }
    }
}

impl Does {
    /// The lines that it comes back to.
    fn memory(self, lines: u64) -> Vec<Range<u64>> {
        let array = |n: u64| n * APART..n * APART + lines;
        match self {
            Self::Chase | Self::Join { .. } | Self::Graph { .. } | Self::Scatter => vec![array(0)],
            Self::Stream { arrays, .. } => (0..arrays).map(array).collect(),
            Self::Stencil { row } => vec![0..lines + 2 * row, array(1)],
            Self::KeyValue { .. } => vec![array(0), array(1)],
            Self::Tree { .. } => std::iter::once(0..2 * lines).collect(),
            Self::Phases { .. } => vec![array(0), APART..APART + LITTLE],
        }
    }
}

/// Lines that phases without a chase work on.
const LITTLE: u64 = 256;

/// Writes down what a program touches.
struct Writer {
    rng: Pcg64Mcg,
    accesses: Vec<Access>,
    lines: u64,
    /// Edges of a graph that have been gone along.
    edges: u64,
    work: u32,
}

/// Lines between one array of a program and the next.
const APART: u64 = 1 << 32;

impl Writer {
    /// A piece of the program: so long that its parts come in their proportions.
    fn go(&mut self, does: Does) {
        match does {
            Does::Chase => self.chase(),
            Does::Stream { arrays, writes } => self.stream(arrays, writes),
            Does::Stencil { row } => self.stencil(row),
            Does::KeyValue { skew, value } => self.key_value(skew, value),
            Does::Join { writes } => self.join(writes),
            Does::Graph { degree } => self.graph(degree),
            Does::Scatter => {
                let line = self.any();
                self.load(line, Waits::Nothing);
            }
            Does::Tree { fanout } => self.tree(fanout),
            Does::Phases { chase } => self.phase(chase),
        }
    }

    fn any(&mut self) -> u64 {
        self.rng.random_range(0..self.lines)
    }

    fn push(&mut self, line: u64, is_store: bool, waits: Waits) {
        self.accesses.push(Access { line, instructions: self.work, is_store, waits });
    }

    fn load(&mut self, line: u64, waits: Waits) {
        self.push(line, false, waits);
    }

    fn store(&mut self, line: u64) {
        self.push(line, true, Waits::Nothing);
    }

    fn chase(&mut self) {
        let line = self.any();
        self.load(line, Waits::Chain);
    }

    /// Eight numbers of a line: it is touched once, and they are worked on.
    fn stream(&mut self, arrays: u64, writes: bool) {
        let at = self.accesses.len() as u64 / arrays % self.lines;
        for array in 0..arrays {
            self.push(array * APART + at, writes && array + 1 == arrays, Waits::Nothing);
        }
    }

    fn stencil(&mut self, row: u64) {
        let at = row + self.accesses.len() as u64 / 4 % self.lines;
        for line in [at - row, at, at + row] {
            self.load(line, Waits::Nothing);
        }
        self.store(APART + at);
    }

    fn key_value(&mut self, skew: f64, value: u64) {
        let key = self.popular(skew);
        self.load(scatter(key, self.lines / value), Waits::Nothing);
        let begins = APART + scatter(key, self.lines / value) * value;
        self.load(begins, Waits::Last);
        for line in 1..value {
            self.load(begins + line, Waits::Same);
        }
    }

    /// A key by popularity, about as Zipf has it.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a key among the lines")]
    fn popular(&mut self, skew: f64) -> u64 {
        let (luck, n) = (self.rng.random::<f64>(), self.lines as f64);
        let power = 1.0 - skew;
        let key = (luck * (n.powf(power) - 1.0) + 1.0).powf(1.0 / power);
        (key as u64).min(self.lines - 1)
    }

    fn join(&mut self, writes: bool) {
        let at = self.accesses.len() as u64;
        self.load(2 * APART + at / 16, Waits::Nothing);
        let line = self.any();
        self.load(line, Waits::Nothing);
        if writes {
            self.store(3 * APART + at / 16);
        }
    }

    fn graph(&mut self, degree: u64) {
        for _ in 0..degree {
            self.load(APART + self.edges / 8, Waits::Nothing);
            let line = self.any();
            self.load(line, Waits::Nothing);
            self.edges += 1;
        }
        self.store(2 * APART + self.edges / degree / 8);
    }

    fn tree(&mut self, fanout: u64) {
        let mut width = 1;
        let key = self.rng.random::<u64>();
        let mut waits = Waits::Nothing;
        while width < self.lines {
            self.load(width + scatter(key, width), waits);
            (width, waits) = (width * fanout, Waits::Last);
        }
    }

    fn phase(&mut self, chase: u64) {
        if self.rng.random_range(0..1000) < chase {
            self.chase();
        } else {
            let line = APART + self.rng.random_range(0..LITTLE);
            self.load(line, Waits::Nothing);
        }
    }
}

/// A place among so many, always the same for one key.
fn scatter(key: u64, places: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) % places.max(1)
}
