//! Tables of VMs that have ended, as CSV: rows in, checked, in the order of the file. Where the bytes come from, and what
//! unpacks them, is the caller's business.

mod breaks;
mod layouts;

use std::io;

use csv::StringRecord;
use units::limits::TRACE_ROWS_MAX;

pub(crate) use breaks::Breaks;

use crate::frigid::trial::Stay;

/// How a table is laid out. Columns are found by the names in its first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Weeks of business VMs (Bitbrains): `vm`, `week`, `cores`, `mem_cap_kb`, `mem_p99_kb`, `mem_mean_kb`, `cpu_mean_pct`, `untouched_frac`,
    /// `suspect`. Others are ignored. Weeks without memory are left out.
    BitbrainsWeek,
    /// Tasks of workflows (nf-core): `workflow`, `process`, `sample_tag`, `cpus`, `attempt`, `start_ms`, `complete_ms`,
    /// `mem_requested_bytes`, `untouched_frac`. Others are ignored.
    NfcoreTasks,
    /// An operator's own: [`OWN_COLUMNS`], and no others.
    Own,
}

/// Columns of a table of one's own: name, whether it must be there, and what it is.
pub const OWN_COLUMNS: [(&str, bool, &str); 13] = [
    ("began_s", true, "when the VM started, in seconds from any moment that is the same for all"),
    ("ended_s", true, "when it ended"),
    ("requested_gib", true, "memory asked for, in GiB"),
    ("peak_gib", true, "memory touched at most, in GiB"),
    ("vm", false, "its name: VMs of one name are the same VM, started again"),
    ("key", false, "its customer or application"),
    ("kind", false, "its type"),
    ("place", false, "its location, operating system, or both"),
    ("cores", false, "its cores"),
    ("p99_gib", false, "memory in use for all but 1 % of the time"),
    ("mean_gib", false, "memory in use on average"),
    ("busy_percent", false, "time that its processors were in use"),
    ("suspect", false, "1 if its outcome cannot be trusted, else 0"),
];

/// Why a table cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The bytes do not come.
    #[error("the bytes end before their end: {0}")]
    Io(io::Error),
    /// They are no CSV.
    #[error("line {line}: {why}")]
    Line {
        /// Which line.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
    /// A column is missing.
    #[error("there is no column {0:?}: must be one of the first line's names")]
    Missing(&'static str),
    /// A column is there twice.
    #[error("column {0:?} is there twice: must be once")]
    Twice(&'static str),
    /// A column is none of the layout's.
    #[error("column {0:?}: must be one of {1}")]
    Unknown(String, String),
    /// A quote is not closed.
    #[error(transparent)]
    Quote(#[from] OpenQuote),
    /// A value breaks a rule.
    #[error(transparent)]
    Value(#[from] WrongValue),
    /// There is no row.
    #[error("no rows: must have a line of names and rows")]
    Empty,
    /// More than anybody means to read.
    #[error("more than {TRACE_ROWS_MAX} rows")]
    TooManyRows,
}

/// A value that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field} = {value:?}: {rule}")]
pub struct WrongValue {
    /// Counted from 1.
    pub line: u64,
    /// Which column.
    pub field: &'static str,
    /// As written; its beginning if it is long.
    pub value: String,
    /// "must be ...".
    pub rule: &'static str,
}

/// A quote that is not closed: it makes one value of all that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: a value has a line break: is a quote not closed?")]
pub struct OpenQuote {
    /// Where the row begins, counted from 1.
    pub line: u64,
}

/// Reads a whole table.
///
/// # Errors
/// [`TableError`]; a table is read whole or not at all.
pub fn read(input: impl io::Read, layout: Layout) -> Result<Vec<Stay>, TableError> {
    let mut table = csv::Reader::from_reader(Breaks::new(input));
    let names = table.headers().map_err(broken)?.clone();
    let columns = layouts::Columns::find(layout, &names)?;
    let (mut rows, mut record) = (Vec::new(), StringRecord::new());
    while table.read_record(&mut record).map_err(broken)? {
        if rows.len() == TRACE_ROWS_MAX {
            return Err(TableError::TooManyRows);
        }
        see_closed(&record)?;
        rows.extend(columns.row(&record)?);
    }
    if rows.is_empty() { Err(TableError::Empty) } else { Ok(rows) }
}

/// No value is more than a line.
pub(crate) fn see_closed(record: &StringRecord) -> Result<(), OpenQuote> {
    let is_closed = !record.iter().any(|value| value.contains('\n'));
    if is_closed { Ok(()) } else { Err(OpenQuote { line: line(record) }) }
}

/// Where a row stands, counted from 1.
pub(crate) fn line(record: &StringRecord) -> u64 {
    record.position().map_or(1, csv::Position::line)
}

fn broken(error: csv::Error) -> TableError {
    let line = error.position().map_or(1, csv::Position::line);
    let why = match error.kind() {
        csv::ErrorKind::Utf8 { .. } => "must be UTF-8".to_owned(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("{len} values: must be {expected_len}, as the first line has names")
        }
        _ => error.to_string(),
    };
    match error.into_kind() {
        csv::ErrorKind::Io(errno) => TableError::Io(errno),
        _ => TableError::Line { line, why },
    }
}

#[cfg(test)]
mod tests;
