//! Which pages a trace touches: of keys or blocks (`key`, `lbn`) or of memory (`addr`, by lines of 64 bytes).

use std::io;

use rustc_hash::FxHashMap;

/// Why a trace is none.
#[derive(Debug, thiserror::Error)]
pub enum NoTouches {
    /// The bytes do not come, or are no CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// A column is missing.
    #[error("there is no column `key`, `lbn` or `addr`")]
    Layout,
    /// A value breaks a rule.
    #[error("line {line}: {column} {value:?} must be a whole number, 0 or more")]
    Value {
        /// Which.
        line: u64,
        /// Which column.
        column: &'static str,
        /// What it says.
        value: String,
    },
    /// There is nothing in it.
    #[error("{0} touches: must be at least {ENOUGH} and at most {TOUCHES_MAX}")]
    Number(usize),
}

/// Touches below which a trace tells nothing.
const ENOUGH: usize = 10_000;
/// Touches of a trace.
const TOUCHES_MAX: usize = 64 << 20;
/// Bytes that are touched together: a line of a processor's caches.
const LINE: u64 = 64;

/// Pages in the order in which they are touched, numbered from 0 as they turn up.
///
/// # Errors
/// [`NoTouches`].
pub fn read(input: impl io::Read) -> Result<Vec<u32>, NoTouches> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let columns = [("key", 1), ("lbn", 1), ("addr", LINE)];
    let found = columns
        .into_iter()
        .find_map(|(name, unit)| Some((name, unit, names.iter().position(|other| other == name)?)));
    let (column, unit, at) = found.ok_or(NoTouches::Layout)?;
    let mut numbers: FxHashMap<u64, u32> = FxHashMap::default();
    let mut touches = Vec::new();
    let mut row = csv::StringRecord::new();
    while table.read_record(&mut row)? {
        let wrong = || NoTouches::Value {
            line: row.position().map_or(0, csv::Position::line),
            column,
            value: row[at].to_owned(),
        };
        let place: u64 = row[at].parse().map_err(|_| wrong())?;
        let next = u32::try_from(numbers.len()).map_err(|_| NoTouches::Number(numbers.len()))?;
        touches.push(*numbers.entry(place / unit).or_insert(next));
        if touches.len() > TOUCHES_MAX {
            return Err(NoTouches::Number(touches.len()));
        }
    }
    if touches.len() < ENOUGH { Err(NoTouches::Number(touches.len())) } else { Ok(touches) }
}
