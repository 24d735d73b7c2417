//! Reads the page accesses of a trace. The page is a key (column `key`), a block (`lbn`) or the
//! 64-byte line of a memory address (`addr`).

use std::io;

use rustc_hash::FxHashMap;

/// Error while reading an access trace.
#[derive(Debug, thiserror::Error)]
pub enum AccessTraceError {
    /// The input cannot be read or is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The header has none of the supported columns.
    #[error("missing column `key`, `lbn` or `addr`")]
    MissingColumn,
    /// A value is not a whole number.
    #[error("line {line}: {column} = {value:?}: must be a whole number, at least 0")]
    InvalidValue {
        /// Line number of the invalid value, from 1.
        line: u64,
        /// Name of the column with the invalid value.
        column: &'static str,
        /// Text of the invalid value.
        value: String,
    },
    /// The trace is too short or too long.
    #[error("{0} accesses: must be at least {TRACE_ACCESSES_MIN} and at most {TRACE_ACCESSES_MAX}")]
    InvalidLength(usize),
}

/// Minimum length of a trace, in accesses.
const TRACE_ACCESSES_MIN: usize = 10_000;
/// Maximum length of a trace, in accesses.
const TRACE_ACCESSES_MAX: usize = 64 << 20;
/// Size of a cache line, in bytes. Addresses within one line count as one page.
const LINE_BYTES: u64 = 64;

/// Reads the accessed pages in order. Pages are numbered from 0 in the order of their first access.
///
/// # Errors
/// Returns [`AccessTraceError`] if the input is not CSV, has no supported column, has an invalid
/// value, or is too short or too long.
pub fn read(input: impl io::Read) -> Result<Vec<u32>, AccessTraceError> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let columns = [("key", 1), ("lbn", 1), ("addr", LINE_BYTES)];
    let column = columns
        .into_iter()
        .find_map(|(name, unit)| Some((name, unit, names.iter().position(|other| other == name)?)));
    let (column, unit, at) = column.ok_or(AccessTraceError::MissingColumn)?;
    let mut numbers: FxHashMap<u64, u32> = FxHashMap::default();
    let mut touches = Vec::new();
    let mut row = csv::StringRecord::new();
    while table.read_record(&mut row)? {
        let invalid = || AccessTraceError::InvalidValue {
            line: row.position().map_or(0, csv::Position::line),
            column,
            value: row[at].to_owned(),
        };
        let address: u64 = row[at].parse().map_err(|_| invalid())?;
        let next =
            u32::try_from(numbers.len()).map_err(|_| AccessTraceError::InvalidLength(numbers.len()))?;
        touches.push(*numbers.entry(address / unit).or_insert(next));
        if touches.len() > TRACE_ACCESSES_MAX {
            return Err(AccessTraceError::InvalidLength(touches.len()));
        }
    }
    if touches.len() < TRACE_ACCESSES_MIN {
        Err(AccessTraceError::InvalidLength(touches.len()))
    } else {
        Ok(touches)
    }
}
