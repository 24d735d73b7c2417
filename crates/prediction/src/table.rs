//! CSV tables of VMs that have ended: validated samples in file order. The caller opens and
//! decompresses the input.

mod layouts;
mod newlines;

use std::io;

use csv::StringRecord;
use units::limits::TRACE_ROWS_MAX;

pub(crate) use newlines::NewlineNormalizer;

use crate::frigid::backtest::VmSample;

/// Layout of a table. Columns are matched by the names in the header line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Weekly aggregates of business VMs (Bitbrains): `vm`, `week`, `cores`, `mem_cap_kb`,
    /// `mem_p99_kb`, `mem_mean_kb`, `cpu_mean_pct`, `untouched_frac`, `suspect`. Other columns are
    /// ignored. Weeks without memory are skipped.
    BitbrainsWeek,
    /// Workflow tasks (nf-core): `workflow`, `process`, `sample_tag`, `cpus`, `attempt`,
    /// `start_ms`, `complete_ms`, `mem_requested_bytes`, `untouched_frac`. Other columns are
    /// ignored.
    NfcoreTasks,
    /// Custom table of an operator: exactly [`CUSTOM_COLUMNS`].
    Custom,
}

/// Columns of a custom table: name, whether it is required, and description.
pub const CUSTOM_COLUMNS: [(&str, bool, &str); 13] = [
    ("began_s", true, "start of the VM, in seconds since a common origin"),
    ("ended_s", true, "end of the VM"),
    ("requested_gib", true, "requested memory, in GiB"),
    ("peak_gib", true, "peak memory touched, in GiB"),
    ("vm", false, "VM name: the same VM, started again, has the same name"),
    ("key", false, "customer or application"),
    ("kind", false, "instance type"),
    ("place", false, "location, operating system, or both"),
    ("cores", false, "number of cores"),
    ("p99_gib", false, "99th percentile over time of the memory in use"),
    ("mean_gib", false, "mean memory in use"),
    ("busy_percent", false, "CPU utilization, in percent"),
    ("suspect", false, "1 if the outcome is unreliable, else 0"),
];

/// Error reading a table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The input cannot be read.
    #[error("cannot read the table: {0}")]
    Io(io::Error),
    /// A line is not valid CSV.
    #[error("line {line}: {why}")]
    Line {
        /// Line number, from 1.
        line: u64,
        /// Reason.
        why: String,
    },
    /// A column is missing.
    #[error("missing column {0:?}: must be in the header line")]
    MissingColumn(&'static str),
    /// A column is duplicated.
    #[error("duplicate column {0:?}")]
    DuplicateColumn(&'static str),
    /// A column is not part of the layout.
    #[error("unknown column {0:?}: must be one of {1}")]
    UnknownColumn(String, String),
    /// A quote is not closed.
    #[error(transparent)]
    Quote(#[from] UnclosedQuote),
    /// A value is out of range.
    #[error(transparent)]
    Value(#[from] InvalidValue),
    /// The table has no rows.
    #[error("no rows: must have a header line and rows")]
    Empty,
    /// The table has more than [`TRACE_ROWS_MAX`] rows.
    #[error("more than {TRACE_ROWS_MAX} rows")]
    TooManyRows,
}

/// Error: a value is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field} = {value:?}: {rule}")]
pub struct InvalidValue {
    /// Line number, from 1.
    pub line: u64,
    /// Name of the column.
    pub field: &'static str,
    /// Value as written, truncated.
    pub value: String,
    /// Rule that the value breaks: "must be ...".
    pub rule: &'static str,
}

/// Error: a quote is not closed, so that the following lines are read as one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: value contains a line break: unclosed quote?")]
pub struct UnclosedQuote {
    /// First line of the row, from 1.
    pub line: u64,
}

/// Reads a whole table.
///
/// # Errors
/// [`TableError`] when any row is invalid; no rows are returned then.
pub fn read(input: impl io::Read, layout: Layout) -> Result<Vec<VmSample>, TableError> {
    let mut table = csv::Reader::from_reader(NewlineNormalizer::new(input));
    let names = table.headers().map_err(csv_error)?.clone();
    let columns = layouts::Columns::find(layout, &names)?;
    let (mut rows, mut record) = (Vec::new(), StringRecord::new());
    while table.read_record(&mut record).map_err(csv_error)? {
        if rows.len() == TRACE_ROWS_MAX {
            return Err(TableError::TooManyRows);
        }
        check_quotes(&record)?;
        rows.extend(columns.row(&record)?);
    }
    if rows.is_empty() { Err(TableError::Empty) } else { Ok(rows) }
}

/// Checks that no value contains a line break.
pub(crate) fn check_quotes(record: &StringRecord) -> Result<(), UnclosedQuote> {
    let is_closed = !record.iter().any(|value| value.contains('\n'));
    if is_closed { Ok(()) } else { Err(UnclosedQuote { line: line(record) }) }
}

/// Returns the line number of a record, from 1.
pub(crate) fn line(record: &StringRecord) -> u64 {
    record.position().map_or(1, csv::Position::line)
}

fn csv_error(error: csv::Error) -> TableError {
    let line = error.position().map_or(1, csv::Position::line);
    let why = match error.kind() {
        csv::ErrorKind::Utf8 { .. } => "must be UTF-8".to_owned(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("{len} values: must be {expected_len}, as in the header line")
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
