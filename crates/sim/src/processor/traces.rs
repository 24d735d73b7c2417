//! Programs from traces of memory accesses (`op`, `addr`, `insns_since_prev`) or keys (`key`).
//! Traces have no dependencies: a memory trace is run once with independent accesses and once with
//! each load dependent on the previous one; a key is looked up through a hash bucket.

use std::io;

use super::stream::{Access, Dependency, Program, TIMED_ACCESSES, WARMUP_ACCESSES};

/// Error reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The bytes cannot be read or are not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The columns are missing.
    #[error("missing columns: must have `key`, or `op`, `addr` and `insns_since_prev`")]
    MissingColumns,
    /// A value is invalid.
    #[error("line {0}: must be a whole number in each column, and l or s in `op`")]
    InvalidValue(u64),
    /// The trace is too short.
    #[error("{0} memory accesses: must be at least {ACCESSES_MIN}")]
    TooShort(usize),
}

/// Accesses per program.
const ACCESSES_MIN: usize = WARMUP_ACCESSES + TIMED_ACCESSES;
/// Upper bound on the programs from one trace, which are successive pieces of it.
const PIECES_MAX: usize = 4;
/// Upper bound on keys, exclusive.
const KEYS_MAX: u64 = 1 << 56;
/// Instructions per key lookup, and lines per value.
const LOOKUP_INSTRUCTIONS: u32 = 400;
const VALUE_LINES: u64 = 4;

/// Reads the programs of a trace, each with a suffix for its name.
///
/// # Errors
/// [`TraceError`] when the input is not CSV, lacks the columns, has an invalid value, or is too
/// short.
pub fn read(input: impl io::Read) -> Result<Vec<(String, Vec<Program>)>, TraceError> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find = |name: &str| names.iter().position(|other| other == name);
    let mut accesses = Vec::new();
    let accesses_max = PIECES_MAX * ACCESSES_MIN;
    if let Some(key) = find("key") {
        for row in table.records().take(accesses_max / 2) {
            let row = row?;
            let key = row[key]
                .parse()
                .ok()
                .filter(|key| *key < KEYS_MAX)
                .ok_or_else(|| TraceError::InvalidValue(line(&row)))?;
            accesses.extend(look_up(key));
        }
        return Ok(vec![(String::new(), pieces(&accesses)?)]);
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
        let (address, instructions) =
            numbers.filter(|_| is_store || &row[op] == "l").ok_or(TraceError::InvalidValue(line(&row)))?;
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
    Ok(vec![("-apart".to_owned(), pieces(&accesses)?), ("-chained".to_owned(), pieces(&chained)?)])
}

/// Accesses of a key lookup: the bucket, then the value.
fn look_up(key: u64) -> impl Iterator<Item = Access> {
    const VALUES: u64 = 1 << 40;
    let access = |line, instructions, dependency| Access { line, instructions, is_store: false, dependency };
    let value = (0..VALUE_LINES).map(move |at| {
        let dependency = if at == 0 { Dependency::LastLoad } else { Dependency::SameAddress };
        access(VALUES + key * VALUE_LINES + at, 20, dependency)
    });
    std::iter::once(access(
        key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40,
        LOOKUP_INSTRUCTIONS,
        Dependency::None,
    ))
    .chain(value)
}

fn pieces(accesses: &[Access]) -> Result<Vec<Program>, TraceError> {
    let ends = (1..=PIECES_MAX).map(|piece| piece * ACCESSES_MIN).take_while(|end| *end <= accesses.len());
    let program = |end: usize| Program {
        memory: Vec::new(),
        accesses: accesses[..end].to_vec(), // everything before the timed part is warm-up
        warm: end - TIMED_ACCESSES,
        parallel: 2.5,
        mispredicted: 3.0,
        code_misses: 2.0,
    };
    let programs: Vec<Program> = ends.map(program).collect();
    if programs.is_empty() { Err(TraceError::TooShort(accesses.len())) } else { Ok(programs) }
}

fn line(row: &csv::StringRecord) -> u64 {
    row.position().map_or(0, csv::Position::line)
}
