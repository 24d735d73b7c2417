//! Reading of labelled workloads from CSV, with a column for each counter, `program` and
//! `slowdown`. Runs with pool memory have columns for the pool loads and the latency, too. An operator
//! can train on measured labels in place of simulated labels.

use std::{borrow::Cow, io, ops::RangeInclusive};

use csv::StringRecord;
use units::LATENCY_RATIO_RANGE;

use crate::{
    qos::{LATENCY_RATIO_NAME, LabelledRun, POOL_LOADS_NAME},
    sensitivity::{COUNTER_NAMES, SLOWDOWN_RANGE, SLOWDOWN_RULE, Workload, counter_range},
    table::{InvalidValue, NewlineNormalizer, UnclosedQuote, check_quotes, line_number},
};

/// Error from reading labelled workloads.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// The input cannot be read or is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The header line does not contain this column.
    #[error("missing column {name:?}: must have {expected}")]
    MissingColumn {
        /// Name of the column.
        name: &'static str,
        /// Names of all columns.
        expected: String,
    },
    /// The header line contains this column more than once.
    #[error("duplicate column {0:?}: must occur once in the header line")]
    DuplicateColumn(&'static str),
    /// The header line contains a column with an unknown name.
    #[error("unknown column {name:?}: must be one of {expected}")]
    UnknownColumn {
        /// Name of the column.
        name: String,
        /// Names of all columns.
        expected: String,
    },
    /// A value contains a line break, usually because of an unclosed quote.
    #[error(transparent)]
    Quote(#[from] UnclosedQuote),
    /// A value is out of range.
    #[error(transparent)]
    Value(#[from] InvalidValue),
}

/// Reads labelled workloads from CSV. An empty value means that the counter was not measured.
///
/// # Errors
/// Returns [`LabelError`] if the input is not CSV, a column is missing, duplicated or unknown, or a
/// value is out of range.
pub fn read_labels(input: impl io::Read) -> Result<Vec<Workload>, LabelError> {
    read_rows(input, &[], |row| row.workload())
}

/// Reads labelled runs with pool memory from CSV. Their columns are those of [`read_labels`],
/// [`POOL_LOADS_NAME`] and [`LATENCY_RATIO_NAME`], which may be empty, too. All memory of a run with the
/// pool loads 1 is on the pool.
///
/// # Errors
/// Returns [`LabelError`] if the input is not CSV, a column is missing, duplicated or unknown, or a
/// value is out of range.
pub fn read_labelled_runs(input: impl io::Read) -> Result<Vec<LabelledRun>, LabelError> {
    read_rows(input, &[POOL_LOADS_NAME, LATENCY_RATIO_NAME], |row| {
        let pool_loads = row.measured(POOL_LOADS_NAME, 0.0..=1.0)?;
        let latency_ratio = row.measured(LATENCY_RATIO_NAME, LATENCY_RATIO_RANGE)?;
        Ok(LabelledRun::new(row.workload()?, pool_loads, latency_ratio))
    })
}

/// Columns of a table, and the current row.
struct Row<'a> {
    columns: &'a [(&'static str, usize)],
    record: StringRecord,
}

impl Row<'_> {
    fn text(&self, name: &'static str) -> &str {
        let column = self.columns.iter().find(|(other, _)| *other == name);
        &self.record[column.expect("all columns were found in the header line").1]
    }

    fn number(
        &self,
        field: &'static str,
        range: &RangeInclusive<f64>,
        rule: impl Into<Cow<'static, str>>,
    ) -> Result<f64, InvalidValue> {
        let number = self.text(field).trim().parse().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| self.invalid(field, rule))
    }

    /// Returns a number that may be empty, which means that it was not measured: NaN.
    fn measured(&self, field: &'static str, range: RangeInclusive<f64>) -> Result<f64, InvalidValue> {
        if self.text(field).trim().is_empty() {
            return Ok(f64::NAN);
        }
        let rule = || format!("must be empty or a number from {} to {}", range.start(), range.end());
        self.number(field, &range, rule())
    }

    fn invalid(&self, field: &'static str, rule: impl Into<Cow<'static, str>>) -> InvalidValue {
        let (line, value) = (line_number(&self.record), self.text(field).to_owned());
        InvalidValue { line, field, value, rule: rule.into() }
    }

    fn workload(&self) -> Result<Workload, InvalidValue> {
        let mut counters = [f64::NAN; COUNTER_NAMES.len()];
        for (index, name) in COUNTER_NAMES.into_iter().enumerate() {
            counters[index] = self.measured(name, counter_range(index))?;
        }
        if counters.iter().all(|counter| counter.is_nan()) {
            return Err(self.invalid(COUNTER_NAMES[0], "must not be empty if all other counters are empty"));
        }
        let slowdown = self.number("slowdown", &SLOWDOWN_RANGE, SLOWDOWN_RULE)?;
        let program = self.text("program").trim().to_owned();
        if program.is_empty() {
            return Err(self.invalid("program", "must not be empty"));
        }
        Ok(Workload { program, counters, slowdown })
    }
}

/// Reads a table with the columns of a workload and `more` columns. `convert` converts each row.
fn read_rows<T>(
    input: impl io::Read,
    more: &[&'static str],
    convert: impl Fn(&Row<'_>) -> Result<T, InvalidValue>,
) -> Result<Vec<T>, LabelError> {
    let mut table = csv::Reader::from_reader(NewlineNormalizer::new(input));
    let names = table.headers()?.clone();
    let expected: Vec<&'static str> =
        ["program", "slowdown"].into_iter().chain(more.iter().copied()).chain(COUNTER_NAMES).collect();
    let list = || expected.join(", ");
    if let Some(unknown) = names.iter().find(|name| !expected.contains(name)) {
        return Err(LabelError::UnknownColumn { name: unknown.to_owned(), expected: list() });
    }
    let find = |name: &'static str| {
        let mut positions =
            names.iter().enumerate().filter(|(_, other)| *other == name).map(|(column, _)| column);
        match (positions.next(), positions.next()) {
            (Some(column), None) => Ok((name, column)),
            (None, _) => Err(LabelError::MissingColumn { name, expected: list() }),
            (_, Some(_)) => Err(LabelError::DuplicateColumn(name)),
        }
    };
    let columns = expected.iter().map(|name| find(name)).collect::<Result<Vec<_>, _>>()?;
    let mut rows = Vec::new();
    for record in table.records() {
        let row = Row { columns: &columns, record: record? };
        check_quotes(&row.record)?;
        rows.push(convert(&row)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qos::Placement;

    #[test]
    fn label_columns_are_found_by_name_and_counters_may_be_empty() {
        let header = format!("slowdown,{},program", COUNTER_NAMES.join(","));
        let table =
            |first: &str| format!("{header}\n0.25,{first}{},mcf\n", ",0.5".repeat(COUNTER_NAMES.len() - 1));
        let workload = &read_labels(table("").as_bytes()).unwrap()[0];
        assert_eq!((workload.program.as_str(), workload.slowdown, workload.counters[1]), ("mcf", 0.25, 0.5));
        assert!(workload.counters[0].is_nan());
        let error_of = |text: &str| read_labels(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(
            error_of(&table("NaN")),
            "line 2: retiring = \"NaN\": must be empty or a number from 0 to 1.2"
        );
        assert!(
            error_of(&table("0").replace("0.25", "-1"))
                .starts_with("line 2: slowdown = \"-1\": must be a number")
        );
        assert_eq!(
            error_of(&format!("{header},dram_bound\n")),
            "duplicate column \"dram_bound\": must occur once in the header line"
        );
        assert!(error_of(&table("NaN").replace('\n', "\r\n")).starts_with("line 2: retiring"));
        assert_eq!(error_of(&table("").replace("mcf", " ")), "line 2: program = \" \": must not be empty");
        let without_counters = table("").replace("0.5", "");
        assert!(error_of(&without_counters).starts_with("line 2: retiring = \"\": must not be empty if all"));
        assert!(error_of("program,slowdown\n").starts_with("missing column \"retiring\""));
        assert!(
            error_of(&header.replace("program", "name"))
                .starts_with("unknown column \"name\": must be one of program, slowdown, retiring")
        );
    }

    #[test]
    fn labelled_run_has_the_pool_loads_and_the_latency() {
        let header = format!("program,slowdown,{},pool_load_share,latency_ratio", COUNTER_NAMES.join(","));
        let counters = ["0.5"; COUNTER_NAMES.len()].join(",");
        let table = |pool: &str| format!("{header}\nmcf,0.25,{counters},{pool}\n");
        for (pool, placement, loads) in
            [("1,2.5", Placement::EntirelyOnPool, 1.0), ("0.25,2.5", Placement::Split, 0.25)]
        {
            let run = &read_labelled_runs(table(pool).as_bytes()).unwrap()[0];
            assert_eq!((run.placement, run.pool_loads, run.latency_ratio), (placement, loads, 2.5));
            assert_eq!((run.workload.program.as_str(), run.workload.slowdown), ("mcf", 0.25));
        }
        let error_of = |text: &str| read_labelled_runs(text.as_bytes()).unwrap_err().to_string();
        assert!(
            error_of(&table("1.5,2"))
                .starts_with("line 2: pool_load_share = \"1.5\": must be empty or a number")
        );
        let unknown = &read_labelled_runs(table(",").as_bytes()).unwrap()[0];
        assert!(unknown.pool_loads.is_nan() && unknown.latency_ratio.is_nan());
        assert_eq!(unknown.placement, Placement::Split);
        assert!(
            error_of(&table("1,0")).starts_with("line 2: latency_ratio = \"0\": must be empty or a number")
        );
        let without = table("1,2").replace("latency_ratio", "ratio");
        assert!(
            error_of(&without)
                .starts_with("unknown column \"ratio\": must be one of program, slowdown, pool")
        );
    }
}
