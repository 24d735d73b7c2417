//! Reading of labelled workloads from CSV, with a column for each counter, `program` and
//! `slowdown`. An operator can train on measured labels in place of simulated labels.

use std::{io, ops::RangeInclusive};

use super::{COUNTER_NAMES, Workload};
use crate::table::{InvalidValue, NewlineNormalizer, UnclosedQuote, check_quotes, line_number};

/// Error from reading labelled workloads.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// The input cannot be read or is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The header line does not contain this column.
    #[error("missing column {0:?}: must have program, slowdown, and each of {list}", list = COUNTER_NAMES.join(", "))]
    MissingColumn(&'static str),
    /// The header line contains this column more than once.
    #[error("duplicate column {0:?}: must occur once in the header line")]
    DuplicateColumn(&'static str),
    /// The header line contains a column with this unknown name.
    #[error("unknown column {0:?}: must be program, slowdown, or one of {list}", list = COUNTER_NAMES.join(", "))]
    UnknownColumn(String),
    /// A value contains a line break, usually because of an unclosed quote.
    #[error(transparent)]
    Quote(#[from] UnclosedQuote),
    /// A value is out of range.
    #[error(transparent)]
    Value(#[from] InvalidValue),
}

const COUNTER_RULE: &str = "must be empty or a number from 0 to 1000000";
/// Valid range of slowdowns, as relative increases of the run time.
pub const SLOWDOWN_RANGE: RangeInclusive<f64> = -0.9..=100.0;
/// Description of [`SLOWDOWN_RANGE`] in error messages.
pub const SLOWDOWN_RULE: &str =
    "must be a number from -0.9 to 100, the relative increase of the run time (0.1 is 10 % longer)";
/// Largest valid value of a counter.
pub const COUNTER_VALUE_MAX: f64 = 1e6;

/// Reads labelled workloads from CSV. An empty value means that the counter was not measured.
///
/// # Errors
/// Returns [`LabelError`] if the input is not CSV, a column is missing, duplicated or unknown, or a
/// value is out of range.
pub fn read_labels(input: impl io::Read) -> Result<Vec<Workload>, LabelError> {
    let mut table = csv::Reader::from_reader(NewlineNormalizer::new(input));
    let names = table.headers()?.clone();
    let is_expected = |name: &str| name == "program" || name == "slowdown" || COUNTER_NAMES.contains(&name);
    if let Some(unknown) = names.iter().find(|name| !is_expected(name)) {
        return Err(LabelError::UnknownColumn(unknown.to_owned()));
    }
    let find = |name: &'static str| {
        let mut positions =
            names.iter().enumerate().filter(|(_, other)| *other == name).map(|(column, _)| column);
        match (positions.next(), positions.next()) {
            (Some(column), None) => Ok(column),
            (None, _) => Err(LabelError::MissingColumn(name)),
            (_, Some(_)) => Err(LabelError::DuplicateColumn(name)),
        }
    };
    let (program, slowdown) = (find("program")?, find("slowdown")?);
    let counters = COUNTER_NAMES.iter().map(|name| find(name)).collect::<Result<Vec<usize>, _>>()?;
    let mut workloads = Vec::new();
    for record in table.records() {
        let record = record?;
        check_quotes(&record)?;
        let number = |column: usize, field: &'static str, range: RangeInclusive<f64>, rule| {
            let number = record[column].trim().parse().ok().filter(|number| range.contains(number));
            number.ok_or_else(|| InvalidValue {
                line: line_number(&record),
                field,
                value: record[column].to_owned(),
                rule,
            })
        };
        let mut measured = [f64::NAN; COUNTER_NAMES.len()];
        for ((counter, column), name) in measured.iter_mut().zip(&counters).zip(COUNTER_NAMES) {
            if !record[*column].trim().is_empty() {
                *counter = number(*column, name, 0.0..=COUNTER_VALUE_MAX, COUNTER_RULE)?;
            }
        }
        let slowdown = number(slowdown, "slowdown", SLOWDOWN_RANGE, SLOWDOWN_RULE)?;
        workloads.push(Workload { program: record[program].to_owned(), counters: measured, slowdown });
    }
    Ok(workloads)
}
