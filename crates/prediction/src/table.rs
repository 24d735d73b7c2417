//! Reading of CSV tables of ended VMs. The result is a list of validated samples in file order. The
//! caller opens and decompresses the input.

mod layouts;
mod newlines;

use std::{borrow::Cow, io};

use csv::StringRecord;
use units::limits::TRACE_ROWS_MAX;

pub(crate) use newlines::NewlineNormalizer;

use crate::frigid::backtest::VmSample;

/// Layout of a table: its columns and their meaning. Columns are found by their names in the header
/// line, in any order.
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
    /// Custom table of an operator, with [`CUSTOM_COLUMNS`] and no other columns.
    Custom,
}

/// Columns of a custom table: name, whether the column is required, and description.
pub const CUSTOM_COLUMNS: [(&str, bool, &str); 13] = [
    ("began_s", true, "start of the VM, in seconds since a common origin"),
    ("ended_s", true, "end of the VM, in seconds since the same origin"),
    ("requested_gib", true, "requested memory, in GiB"),
    ("peak_gib", true, "peak memory touched, in GiB"),
    ("vm", false, "VM name; a VM that is started again has the same name"),
    ("key", false, "customer or application"),
    ("kind", false, "instance type"),
    ("place", false, "location, operating system, or both"),
    ("cores", false, "number of cores"),
    ("p99_gib", false, "99th percentile over time of the memory in use, in GiB"),
    ("mean_gib", false, "mean over time of the memory in use, in GiB"),
    ("busy_percent", false, "CPU utilization, in percent"),
    ("suspect", false, "1 if the outcome is unreliable, or else 0"),
];

/// Error from reading a table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// The input cannot be read.
    #[error("cannot read the table: {0}")]
    Io(io::Error),
    /// A line is not valid CSV.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line in the file, from 1.
        line: u64,
        /// Reason why the line is invalid.
        reason: String,
    },
    /// The header line does not contain this required column.
    #[error("missing column {0:?}: must be in the header line")]
    MissingColumn(&'static str),
    /// The header line contains this column more than once.
    #[error("duplicate column {0:?}: must occur once in the header line")]
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
    #[error("the table has no rows: must have a header line and at least one row")]
    Empty,
    /// The table has more than [`TRACE_ROWS_MAX`] rows.
    #[error("the table has too many rows: must be at most {TRACE_ROWS_MAX}")]
    TooManyRows,
}

/// Error for an invalid value in a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field} = {value:?}: {rule}")]
pub struct InvalidValue {
    /// Number of the line in the file, from 1.
    pub line: u64,
    /// Name of the column.
    pub field: &'static str,
    /// Invalid value as written in the file, truncated.
    pub value: String,
    /// Rule that the value violates, such as "must be 0 or 1".
    pub rule: Cow<'static, str>,
}

/// Error for a value that contains a line break, usually because of an unclosed quote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: a value contains a line break: a quote may be unclosed")]
pub struct UnclosedQuote {
    /// Number of the first line of the row, from 1.
    pub line: u64,
}

/// Reads a whole table.
///
/// # Errors
/// Returns a [`TableError`] if the input cannot be read, the header line does not match `layout`, a
/// row is invalid, or there are no or too many rows.
pub fn read(input: impl io::Read, layout: Layout) -> Result<Vec<VmSample>, TableError> {
    let mut table = csv::Reader::from_reader(NewlineNormalizer::new(input));
    let names = table.headers().map_err(to_table_error)?.clone();
    let columns = layouts::Columns::find(layout, &names)?;
    let (mut rows, mut record) = (Vec::new(), StringRecord::new());
    while table.read_record(&mut record).map_err(to_table_error)? {
        if rows.len() == TRACE_ROWS_MAX {
            return Err(TableError::TooManyRows);
        }
        check_quotes(&record)?;
        rows.extend(columns.to_sample(&record)?);
    }
    if rows.is_empty() { Err(TableError::Empty) } else { Ok(rows) }
}

/// Checks that no value contains a line break.
pub(crate) fn check_quotes(record: &StringRecord) -> Result<(), UnclosedQuote> {
    let is_closed = !record.iter().any(|value| value.contains('\n'));
    if is_closed { Ok(()) } else { Err(UnclosedQuote { line: line_number(record) }) }
}

/// Returns the line number of a record, from 1.
pub(crate) fn line_number(record: &StringRecord) -> u64 {
    record.position().map_or(1, csv::Position::line)
}

/// Converts an error of the CSV reader.
fn to_table_error(error: csv::Error) -> TableError {
    let line = error.position().map_or(1, csv::Position::line);
    let reason = match error.kind() {
        csv::ErrorKind::Utf8 { .. } => "must be UTF-8".to_owned(),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            format!("{len} values: must be {expected_len}, as in the header line")
        }
        _ => error.to_string(),
    };
    match error.into_kind() {
        csv::ErrorKind::Io(errno) => TableError::Io(errno),
        _ => TableError::Line { line, reason },
    }
}

#[cfg(test)]
mod tests;
