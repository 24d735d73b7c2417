//! Programs out of traces: of memory (`op`, `addr`, `insns_since_prev`) or of keys (`key`). What waits for what is in none of them: a trace
//! of memory is played as if nothing waited, and as if every load waited for the one before; a key is looked up by its bucket.

use std::io;

use super::stream::{Access, Program, TIMED, WARM, Waits};

/// Why a trace is none.
#[derive(Debug, thiserror::Error)]
pub enum NoTrace {
    /// The bytes do not come, or are no CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// A column is missing.
    #[error("there is neither a column `key` nor columns `op`, `addr` and `insns_since_prev`")]
    Layout,
    /// A value breaks a rule.
    #[error("line {0}: must be a whole number in each column but `op`, and l or s there")]
    Value(u64),
    /// It is too short to say anything.
    #[error("{0} touches of memory: must be at least {ENOUGH}")]
    Short(usize),
}

/// Touches of one program.
const ENOUGH: usize = WARM + TIMED;
/// Programs that are made of one trace at most: pieces of it, one after the other.
const PIECES_MAX: usize = 4;
/// Keys are numbers below this.
const KEYS_MAX: u64 = 1 << 56;
/// Instructions of looking up a key, and lines of what is found.
const LOOKUP: u32 = 400;
const VALUE_LINES: u64 = 4;

/// Programs out of a trace, by what is added to its name.
///
/// # Errors
/// [`NoTrace`].
pub fn read(input: impl io::Read) -> Result<Vec<(String, Vec<Program>)>, NoTrace> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find = |name: &str| names.iter().position(|other| other == name);
    let mut accesses = Vec::new();
    let most = PIECES_MAX * ENOUGH;
    if let Some(key) = find("key") {
        for row in table.records().take(most / 2) {
            let row = row?;
            let key = row[key]
                .parse()
                .ok()
                .filter(|key| *key < KEYS_MAX)
                .ok_or_else(|| NoTrace::Value(line(&row)))?;
            accesses.extend(look_up(key));
        }
        return Ok(vec![(String::new(), pieces(&accesses)?)]);
    }
    let (Some(op), Some(addr), Some(since)) = (find("op"), find("addr"), find("insns_since_prev")) else {
        return Err(NoTrace::Layout);
    };
    for row in table.records().take(most) {
        let row = row?;
        let numbers = row[addr].parse::<u64>().ok().zip(row[since].parse::<u32>().ok());
        let is_store = &row[op] == "s";
        let (address, instructions) =
            numbers.filter(|_| is_store || &row[op] == "l").ok_or(NoTrace::Value(line(&row)))?;
        accesses.push(Access {
            line: address / 64,
            instructions: instructions.max(1),
            is_store,
            waits: Waits::Nothing,
        });
    }
    let chained: Vec<Access> = accesses
        .iter()
        .map(|access| Access { waits: if access.is_store { Waits::Nothing } else { Waits::Last }, ..*access })
        .collect();
    Ok(vec![("-apart".to_owned(), pieces(&accesses)?), ("-chained".to_owned(), pieces(&chained)?)])
}

/// A key's bucket, then what it points to.
fn look_up(key: u64) -> impl Iterator<Item = Access> {
    const VALUES: u64 = 1 << 40;
    let touch = |line, instructions, waits| Access { line, instructions, is_store: false, waits };
    let value = (0..VALUE_LINES).map(move |at| {
        let waits = if at == 0 { Waits::Last } else { Waits::Same };
        touch(VALUES + key * VALUE_LINES + at, 20, waits)
    });
    std::iter::once(touch(key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40, LOOKUP, Waits::Nothing)).chain(value)
}

fn pieces(accesses: &[Access]) -> Result<Vec<Program>, NoTrace> {
    let ends = (1..=PIECES_MAX).map(|piece| piece * ENOUGH).take_while(|end| *end <= accesses.len());
    let program = |end: usize| Program {
        memory: Vec::new(),
        accesses: accesses[..end].to_vec(), // all that came before has filled the caches
        warm: end - TIMED,
        parallel: 2.5,
        mispredicted: 3.0,
        code_misses: 2.0,
    };
    let programs: Vec<Program> = ends.map(program).collect();
    if programs.is_empty() { Err(NoTrace::Short(accesses.len())) } else { Ok(programs) }
}

fn line(row: &csv::StringRecord) -> u64 {
    row.position().map_or(0, csv::Position::line)
}
