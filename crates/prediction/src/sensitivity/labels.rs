//! Labelled workloads as CSV: a column for each counter, `program` and `slowdown`. An operator's own take the place of modelled ones.

use std::{io, ops::RangeInclusive};

use super::{COUNTERS, Workload};
use crate::table::{Breaks, OpenQuote, WrongValue, line, see_closed};

/// Why labels cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// The bytes do not come, or are no CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// A column is missing.
    #[error("there is no column {0:?}: must be program, slowdown, and each of {list}", list = COUNTERS.join(", "))]
    Missing(&'static str),
    /// A column is there twice.
    #[error("column {0:?} is there twice: must be once")]
    Twice(&'static str),
    /// A column is none of them.
    #[error("column {0:?}: must be program, slowdown, or one of {list}", list = COUNTERS.join(", "))]
    Unknown(String),
    /// A quote is not closed.
    #[error(transparent)]
    Quote(#[from] OpenQuote),
    /// A value breaks a rule.
    #[error(transparent)]
    Value(#[from] WrongValue),
}

const COUNTER: &str = "must be empty or a number from 0 to 1000000";
/// Slowdowns there may be.
pub const SLOWDOWNS: RangeInclusive<f64> = -0.9..=100.0;
/// The same in words.
pub const SLOWDOWN_RULE: &str = "must be a number from -0.9 to 100: 0.1 is a tenth longer";
/// The most that a counter may say.
pub const COUNTER_MAX: f64 = 1e6;

/// Reads all of them. A counter that was not measured is empty.
///
/// # Errors
/// [`LabelError`].
pub fn read(input: impl io::Read) -> Result<Vec<Workload>, LabelError> {
    let mut table = csv::Reader::from_reader(Breaks::new(input));
    let names = table.headers()?.clone();
    let known = |name: &str| name == "program" || name == "slowdown" || COUNTERS.contains(&name);
    if let Some(unknown) = names.iter().find(|name| !known(name)) {
        return Err(LabelError::Unknown(unknown.to_owned()));
    }
    let find = |name: &'static str| {
        let mut places = names.iter().enumerate().filter(|(_, other)| *other == name).map(|(at, _)| at);
        match (places.next(), places.next()) {
            (Some(at), None) => Ok(at),
            (None, _) => Err(LabelError::Missing(name)),
            (_, Some(_)) => Err(LabelError::Twice(name)),
        }
    };
    let (program, slowdown) = (find("program")?, find("slowdown")?);
    let counters = COUNTERS.iter().map(|name| find(name)).collect::<Result<Vec<usize>, _>>()?;
    let mut workloads = Vec::new();
    for record in table.records() {
        let record = record?;
        see_closed(&record)?;
        let number = |at: usize, field: &'static str, range: RangeInclusive<f64>, rule| {
            let number = record[at].trim().parse().ok().filter(|number| range.contains(number));
            number.ok_or_else(|| WrongValue {
                line: line(&record),
                field,
                value: record[at].to_owned(),
                rule,
            })
        };
        let mut measured = [f64::NAN; COUNTERS.len()];
        for ((number_of, at), name) in measured.iter_mut().zip(&counters).zip(COUNTERS) {
            if !record[*at].trim().is_empty() {
                *number_of = number(*at, name, 0.0..=COUNTER_MAX, COUNTER)?;
            }
        }
        let slowdown = number(slowdown, "slowdown", SLOWDOWNS, SLOWDOWN_RULE)?;
        workloads.push(Workload { program: record[program].to_owned(), counters: measured, slowdown });
    }
    Ok(workloads)
}
