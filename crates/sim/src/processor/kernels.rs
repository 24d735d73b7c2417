//! Synthetic programs with the memory access patterns of typical cloud workloads, for several
//! inputs. These programs are models, not traces of real workloads.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::stream::{Access, Dependency, Program, TIMED_ACCESSES, WARMUP_ACCESSES};

/// Synthetic program: an access pattern, a working-set size and an amount of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// Unique name: the kind of access pattern up to the first `-`, then all parameters.
    pub name: String,
    pattern: KernelPattern,
    /// Size of the working set, in cache lines.
    lines: u64,
    /// Number of instructions per memory access.
    work: u32,
    /// Instructions per cycle without stalls, as in [`Program::ideal_ipc`].
    ideal_ipc: f64,
    mispredictions: f64,
    code_misses: f64,
}

/// Memory access pattern of a program.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KernelPattern {
    /// Pointer chase: each load returns the address of the next load.
    Chase,
    /// Sequential pass over `arrays` arrays. The last array is written if `writes` is set.
    Stream { arrays: u64, writes: bool },
    /// Stencil over a grid: each step reads a point and its neighbours above and below.
    Stencil { row: u64 },
    /// Lookups of Zipf-distributed keys: each reads a bucket, then a value of `value` lines.
    KeyValue { skew: f64, value: u64 },
    /// Hash join: a sequential scan of one table with random lookups in another table.
    Join { writes: bool },
    /// Graph traversal: reads edges sequentially and vertices at random.
    Graph { degree: u64 },
    /// Random accesses that do not depend on each other.
    Scatter,
    /// Lookups of random keys in a tree, each from the root to a leaf.
    Tree { fanout: u64 },
    /// Accesses to a small array. Of 1,000 accesses, `chase` follow pointers through the whole
    /// working set instead.
    Phases { chase: u64 },
}

/// Returns all synthetic programs.
pub fn kernel_family() -> Vec<Kernel> {
    let mut all = Vec::new();
    for (lines, work) in size_work_pairs(&[10, 14, 17, 20, 22], &[10, 60, 300, 1500]) {
        all.push(default_kernel(KernelPattern::Chase, lines, work));
    }
    for (arrays, writes) in [(1, false), (2, true), (3, true), (4, false)] {
        for (lines, work) in size_work_pairs(&[14, 20], &[8, 40, 200]) {
            all.push(default_kernel(KernelPattern::Stream { arrays, writes }, lines, work));
        }
    }
    for row in [64, 1024] {
        for (lines, work) in size_work_pairs(&[15, 20], &[20, 80, 300]) {
            all.push(default_kernel(KernelPattern::Stencil { row }, lines, work));
        }
    }
    for (skew, value) in [(0.6, 1), (0.99, 4), (1.2, 16)] {
        for (lines, work) in size_work_pairs(&[14, 18, 22], &[100, 500, 2000]) {
            all.push(Kernel {
                mispredictions: 4.0,
                code_misses: 6.0,
                ..default_kernel(KernelPattern::KeyValue { skew, value }, lines, work)
            });
        }
    }
    for writes in [false, true] {
        for (lines, work) in size_work_pairs(&[13, 17, 22], &[25, 100, 400]) {
            let base = default_kernel(KernelPattern::Join { writes }, lines, work);
            all.push(Kernel { mispredictions: 2.0, ..base });
        }
    }
    for degree in [4, 32] {
        for (lines, work) in size_work_pairs(&[14, 18, 22], &[10, 60, 300]) {
            let base = default_kernel(KernelPattern::Graph { degree }, lines, work);
            all.push(Kernel { mispredictions: 6.0, ..base });
        }
    }
    for (lines, work) in size_work_pairs(&[17, 22], &[15, 60, 250, 1000]) {
        all.push(default_kernel(KernelPattern::Scatter, lines, work));
    }
    for fanout in [4, 16] {
        for (lines, work) in size_work_pairs(&[16, 20, 22], &[60, 300, 1500]) {
            let base = default_kernel(KernelPattern::Tree { fanout }, lines, work);
            all.push(Kernel { mispredictions: 5.0, ..base });
        }
    }
    for chase in [1, 3, 10, 30] {
        for (lines, work) in size_work_pairs(&[18, 22], &[10, 40]) {
            all.push(default_kernel(KernelPattern::Phases { chase }, lines, work));
        }
    }
    for ideal_ipc in [1.2, 2.0, 3.0, 4.0] {
        for (lines, work) in size_work_pairs(&[6, 9, 13], &[5]) {
            all.push(Kernel { ideal_ipc, ..default_kernel(KernelPattern::Scatter, lines, work) });
        }
    }
    for code_misses in [10.0, 20.0, 35.0] {
        for (lines, work) in size_work_pairs(&[12, 17, 21], &[60]) {
            let pattern = KernelPattern::KeyValue { skew: 0.9, value: 2 };
            all.push(Kernel {
                code_misses,
                mispredictions: 8.0,
                ideal_ipc: 2.5,
                ..default_kernel(pattern, lines, work)
            });
        }
    }
    all.iter_mut().for_each(Kernel::set_name);
    all
}

/// Returns all pairs of a working-set size, given as log2 of the lines, and an amount of work.
fn size_work_pairs(lines: &[u32], work: &[u32]) -> impl Iterator<Item = (u64, u32)> {
    lines.iter().flat_map(move |lines| work.iter().map(move |work| (1 << lines, *work)))
}

fn default_kernel(pattern: KernelPattern, lines: u64, work: u32) -> Kernel {
    Kernel {
        name: String::new(),
        pattern,
        lines,
        work,
        ideal_ipc: 3.2,
        mispredictions: 0.5,
        code_misses: 0.2,
    }
}

impl Kernel {
    fn set_name(&mut self) {
        let pattern = format!("{:?}", self.pattern).to_lowercase();
        let pattern: String =
            pattern.replace([',', '{'], "-").chars().filter(|c| !matches!(c, ' ' | '}' | ':')).collect();
        let kib = self.lines / 16;
        self.name = format!("{pattern}-{kib}KiB-{}i-{}p-{}c", self.work, self.ideal_ipc, self.code_misses);
    }

    /// Generates the program for an input. The input number seeds the random accesses and selects
    /// one of four input sizes.
    pub fn program(&self, input: u64) -> Program {
        // (working-set size in quarters of `lines`, factor of the work) for each input size.
        const INPUT_SIZES: [(u64, f64); 4] = [(4, 1.0), (3, 1.4), (6, 0.8), (5, 0.6)];
        let (quarters, work) = INPUT_SIZES[usize::try_from(input % 4).expect("the index is below 4")];
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "the scaled work is a small positive number"
        )]
        let work = ((f64::from(self.work) * work) as u32).max(1);
        let mut generator = AccessGenerator {
            rng: Pcg64Mcg::seed_from_u64(input),
            accesses: Vec::with_capacity(WARMUP_ACCESSES + TIMED_ACCESSES),
            lines: (self.lines * quarters / 4).max(16),
            edges: 0,
            work,
        };
        let memory = self.pattern.working_set(generator.lines);
        while generator.accesses.len() < WARMUP_ACCESSES + TIMED_ACCESSES {
            generator.emit_iteration(self.pattern);
        }
        generator.accesses.truncate(WARMUP_ACCESSES + TIMED_ACCESSES);
        Program {
            memory,
            accesses: generator.accesses,
            warmup: WARMUP_ACCESSES,
            ideal_ipc: self.ideal_ipc,
            mispredictions: self.mispredictions,
            code_misses: self.code_misses,
        }
    }
}

impl KernelPattern {
    /// Returns the ranges of lines that the pattern accesses repeatedly.
    fn working_set(self, lines: u64) -> Vec<Range<u64>> {
        let array = |n: u64| n * ARRAY_STRIDE_LINES..n * ARRAY_STRIDE_LINES + lines;
        match self {
            Self::Chase | Self::Join { .. } | Self::Graph { .. } | Self::Scatter => vec![array(0)],
            Self::Stream { arrays, .. } => (0..arrays).map(array).collect(),
            Self::Stencil { row } => vec![0..lines + 2 * row, array(1)],
            Self::KeyValue { .. } => vec![array(0), array(1)],
            Self::Tree { .. } => std::iter::once(0..2 * lines).collect(),
            Self::Phases { .. } => vec![array(0), ARRAY_STRIDE_LINES..ARRAY_STRIDE_LINES + PHASE_ARRAY_LINES],
        }
    }
}

/// Size of the small array in [`KernelPattern::Phases`], in cache lines.
const PHASE_ARRAY_LINES: u64 = 256;

/// Generator of the accesses of a program.
struct AccessGenerator {
    rng: Pcg64Mcg,
    accesses: Vec<Access>,
    lines: u64,
    /// Number of graph edges traversed.
    edges: u64,
    work: u32,
}

/// Distance between the arrays of a program, in lines. Larger than every array, so that arrays do
/// not overlap.
const ARRAY_STRIDE_LINES: u64 = 1 << 32;

impl AccessGenerator {
    /// Emits one iteration of the pattern.
    fn emit_iteration(&mut self, pattern: KernelPattern) {
        match pattern {
            KernelPattern::Chase => self.emit_pointer_chase(),
            KernelPattern::Stream { arrays, writes } => self.emit_stream(arrays, writes),
            KernelPattern::Stencil { row } => self.emit_stencil(row),
            KernelPattern::KeyValue { skew, value } => self.emit_key_value(skew, value),
            KernelPattern::Join { writes } => self.emit_join(writes),
            KernelPattern::Graph { degree } => self.emit_graph(degree),
            KernelPattern::Scatter => {
                let line = self.random_line();
                self.load(line, Dependency::None);
            }
            KernelPattern::Tree { fanout } => self.emit_tree(fanout),
            KernelPattern::Phases { chase } => self.emit_phase(chase),
        }
    }

    fn random_line(&mut self) -> u64 {
        self.rng.random_range(0..self.lines)
    }

    fn push(&mut self, line: u64, is_store: bool, dependency: Dependency) {
        self.accesses.push(Access { line, instructions: self.work, is_store, dependency });
    }

    fn load(&mut self, line: u64, dependency: Dependency) {
        self.push(line, false, dependency);
    }

    fn store(&mut self, line: u64) {
        self.push(line, true, Dependency::None);
    }

    fn emit_pointer_chase(&mut self) {
        let line = self.random_line();
        self.load(line, Dependency::Chain);
    }

    /// Emits the next line of each array. A line is accessed once for the eight numbers in it.
    fn emit_stream(&mut self, arrays: u64, writes: bool) {
        let at = self.accesses.len() as u64 / arrays % self.lines;
        for array in 0..arrays {
            self.push(array * ARRAY_STRIDE_LINES + at, writes && array + 1 == arrays, Dependency::None);
        }
    }

    fn emit_stencil(&mut self, row: u64) {
        let at = row + self.accesses.len() as u64 / 4 % self.lines;
        for line in [at - row, at, at + row] {
            self.load(line, Dependency::None);
        }
        self.store(ARRAY_STRIDE_LINES + at);
    }

    fn emit_key_value(&mut self, skew: f64, value: u64) {
        let key = self.sample_zipf_key(skew);
        self.load(hash_below(key, self.lines / value), Dependency::None);
        let first_line = ARRAY_STRIDE_LINES + hash_below(key, self.lines / value) * value;
        self.load(first_line, Dependency::LastLoad);
        for line in 1..value {
            self.load(first_line + line, Dependency::SameAddress);
        }
    }

    /// Draws a key from an approximate Zipf distribution with exponent `skew`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the key is below the number of lines"
    )]
    fn sample_zipf_key(&mut self, skew: f64) -> u64 {
        let (uniform, n) = (self.rng.random::<f64>(), self.lines as f64);
        let power = 1.0 - skew;
        let key = (uniform * (n.powf(power) - 1.0) + 1.0).powf(1.0 / power);
        (key as u64).min(self.lines - 1)
    }

    fn emit_join(&mut self, writes: bool) {
        let at = self.accesses.len() as u64;
        self.load(2 * ARRAY_STRIDE_LINES + at / 16, Dependency::None);
        let line = self.random_line();
        self.load(line, Dependency::None);
        if writes {
            self.store(3 * ARRAY_STRIDE_LINES + at / 16);
        }
    }

    fn emit_graph(&mut self, degree: u64) {
        for _ in 0..degree {
            self.load(ARRAY_STRIDE_LINES + self.edges / 8, Dependency::None);
            let line = self.random_line();
            self.load(line, Dependency::None);
            self.edges += 1;
        }
        self.store(2 * ARRAY_STRIDE_LINES + self.edges / degree / 8);
    }

    fn emit_tree(&mut self, fanout: u64) {
        let mut width = 1;
        let key = self.rng.random::<u64>();
        let mut dependency = Dependency::None;
        while width < self.lines {
            self.load(width + hash_below(key, width), dependency);
            (width, dependency) = (width * fanout, Dependency::LastLoad);
        }
    }

    fn emit_phase(&mut self, chase: u64) {
        if self.rng.random_range(0..1000) < chase {
            self.emit_pointer_chase();
        } else {
            let line = ARRAY_STRIDE_LINES + self.rng.random_range(0..PHASE_ARRAY_LINES);
            self.load(line, Dependency::None);
        }
    }
}

/// Hashes a key to a number below `limit`.
fn hash_below(key: u64, limit: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) % limit.max(1)
}
