//! Converts traces into programs: traces of memory accesses (columns `op`, `addr` and
//! `insns_since_prev`) or of keys (column `key`).
//!
//! Traces do not record dependencies. A memory trace is converted twice: into programs with
//! independent accesses, and into programs whose loads each depend on the previous load. A key is
//! looked up through a hash bucket.

use std::io;

use super::stream::{Access, Dependency, Program, TIMED_ACCESSES, WARMUP_ACCESSES};

/// Error while reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The input cannot be read or is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The header lacks required columns.
    #[error("missing columns: must have `key`, or `op`, `addr` and `insns_since_prev`")]
    MissingColumns,
    /// A value of this line is invalid.
    #[error("line {0}: must be a whole number in each column, and l or s in `op`")]
    InvalidValue(u64),
    /// The trace has too few memory accesses for one program.
    #[error("{0} memory accesses: must be at least {PROGRAM_ACCESSES_MIN}")]
    TooShort(usize),
}

/// Number of accesses of one program, including warm-up.
const PROGRAM_ACCESSES_MIN: usize = WARMUP_ACCESSES + TIMED_ACCESSES;
/// Maximum number of programs from one trace. Each program times the next part of the trace.
const TRACE_PROGRAMS_MAX: usize = 4;
/// Exclusive upper bound on keys, so that addresses do not overflow.
const KEY_LIMIT: u64 = 1 << 56;
/// Number of instructions before the first access of a key lookup.
const INSTRUCTIONS_PER_LOOKUP: u32 = 400;
/// Size of a value, in lines.
const CACHE_LINES_PER_VALUE: u64 = 4;

/// Reads a trace and converts it into groups of programs. Each group has a suffix for the names of
/// its programs.
///
/// # Errors
/// Returns [`TraceError`] if the input is not CSV, lacks columns, has an invalid value, or is too
/// short.
pub fn read(input: impl io::Read) -> Result<Vec<(String, Vec<Program>)>, TraceError> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find = |name: &str| names.iter().position(|other| other == name);
    let mut accesses = Vec::new();
    let accesses_max = TRACE_PROGRAMS_MAX * PROGRAM_ACCESSES_MIN;
    if let Some(key) = find("key") {
        for row in table.records().take(accesses_max / 2) {
            let row = row?;
            let key = row[key]
                .parse()
                .ok()
                .filter(|key| *key < KEY_LIMIT)
                .ok_or_else(|| TraceError::InvalidValue(line_number(&row)))?;
            accesses.extend(lookup_accesses(key));
        }
        return Ok(vec![(String::new(), to_programs(&accesses)?)]);
    }
    let (Some(op), Some(addr), Some(instructions_since)) =
        (find("op"), find("addr"), find("insns_since_prev"))
    else {
        return Err(TraceError::MissingColumns);
    };
    for row in table.records().take(accesses_max) {
        let row = row?;
        let numbers = row[addr].parse::<u64>().ok().zip(row[instructions_since].parse::<u32>().ok());
        let is_store = &row[op] == "s";
        let (address, instructions) = numbers
            .filter(|_| is_store || &row[op] == "l")
            .ok_or(TraceError::InvalidValue(line_number(&row)))?;
        accesses.push(Access {
            line: address / 64,
            instructions: instructions.max(1),
            is_store,
            dependency: Dependency::None,
        });
    }
    let chained: Vec<Access> = accesses
        .iter()
        .map(|access| Access {
            dependency: if access.is_store { Dependency::None } else { Dependency::LastLoad },
            ..*access
        })
        .collect();
    Ok(vec![("-apart".to_owned(), to_programs(&accesses)?), ("-chained".to_owned(), to_programs(&chained)?)])
}

/// Returns the accesses of a key lookup: first the hash bucket, then the value.
fn lookup_accesses(key: u64) -> impl Iterator<Item = Access> {
    const VALUE_ARRAY_START_LINE: u64 = 1 << 40;
    let access = |line, instructions, dependency| Access { line, instructions, is_store: false, dependency };
    let value = (0..CACHE_LINES_PER_VALUE).map(move |at| {
        let dependency = if at == 0 { Dependency::LastLoad } else { Dependency::SameAddress };
        access(VALUE_ARRAY_START_LINE + key * CACHE_LINES_PER_VALUE + at, 20, dependency)
    });
    std::iter::once(access(
        key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40,
        INSTRUCTIONS_PER_LOOKUP,
        Dependency::None,
    ))
    .chain(value)
}

fn to_programs(accesses: &[Access]) -> Result<Vec<Program>, TraceError> {
    let ends = (1..=TRACE_PROGRAMS_MAX)
        .map(|count| count * PROGRAM_ACCESSES_MIN)
        .take_while(|end| *end <= accesses.len());
    let program = |end: usize| Program {
        memory: Vec::new(),
        accesses: accesses[..end].to_vec(), // all accesses before the timed part are warm-up
        warmup: end - TIMED_ACCESSES,
        ideal_ipc: 2.5,
        mispredictions: 3.0,
        code_misses: 2.0,
    };
    let programs: Vec<Program> = ends.map(program).collect();
    if programs.is_empty() { Err(TraceError::TooShort(accesses.len())) } else { Ok(programs) }
}

fn line_number(row: &csv::StringRecord) -> u64 {
    row.position().map_or(0, csv::Position::line)
}
