//! Formats and prints the report of a benchmark: a table for people, and `ratio NAME VALUE` lines
//! for programs.

use std::{fmt::Write as _, process::ExitCode};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Runs a measurement and prints its report or its error. SIGINT and SIGTERM cancel the
/// measurement, which ends the processes under test.
pub async fn run_and_print(name: &str, measure: impl Future<Output = Result<String, Failure>>) -> ExitCode {
    let result = tokio::select! {
        report = measure => report,
        () = wait_for_interrupt() => Err(Failure::Interrupted),
    };
    match result {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{name}: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

async fn wait_for_interrupt() {
    let mut terminate = signal(SignalKind::terminate()).expect("a SIGTERM handler can be registered");
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// Measurements of one quantity, one per round.
#[derive(Clone, Debug, Default)]
pub struct Rounds(Vec<f64>);

impl Rounds {
    /// Adds a measurement.
    pub fn add(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Returns the median, or NaN if there are no measurements.
    pub fn median(&self) -> f64 {
        let sorted = self.sorted();
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        }
    }

    /// Formats the minimum, median and maximum, rounded to integers.
    pub fn summary(&self) -> String {
        self.spread(0)
    }

    /// Formats the minimum, median and maximum, with this number of decimals.
    pub fn spread(&self, decimals: usize) -> String {
        let sorted = self.sorted();
        match (sorted.first(), sorted.last()) {
            (Some(minimum), Some(maximum)) => {
                let median = self.median();
                format!("{minimum:.decimals$}-{median:.decimals$}-{maximum:.decimals$}")
            }
            _ => "none".to_owned(),
        }
    }

    /// Divides each measurement by the measurement of `other` in the same round.
    #[must_use]
    pub fn ratio_to(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(value, other)| value / other).collect())
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

/// Formats a ratio as a line that programs can parse. A higher ratio is better for Tarn.
pub fn format_ratio(name: &str, value: f64) -> String {
    format!("ratio {name} {value:.2}")
}

/// Formats a table with a line of column headings. The first column is left-aligned, and all other
/// columns are right-aligned.
pub fn format_table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(String::len);
        cells.chain(head.get(column).map(|cell| cell.len())).max().unwrap_or(0)
    };
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&head).chain(rows) {
        for (column, cell) in row.iter().enumerate() {
            let cell_width = width(column);
            let cell =
                if column == 0 { format!("{cell:<cell_width$}") } else { format!("  {cell:>cell_width$}") };
            let _ = write!(text, "{cell}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(value: &[f64]) -> Rounds {
        Rounds(value.to_vec())
    }

    #[test]
    fn median_ignores_outliers() {
        assert_eq!(rounds(&[3.0, 1000.0, 1.0]).median(), 3.0);
        assert_eq!(rounds(&[4.0, 1.0, 2.0, 900.0]).median(), 3.0);
        assert!(rounds(&[]).median().is_nan());
    }

    #[test]
    fn spread_has_minimum_median_and_maximum() {
        let value = rounds(&[3.0, 1.5, 9.0]);
        assert_eq!((value.summary(), value.spread(1)), ("2-3-9".to_owned(), "1.5-3.0-9.0".to_owned()));
        assert_eq!(value.ratio_to(&rounds(&[2.0, 1.0, 3.0])).spread(1), "1.5-1.5-3.0");
        assert_eq!(rounds(&[]).summary(), "none");
    }

    #[test]
    fn ratio_is_a_line_of_three_words() {
        assert_eq!(format_ratio("reserve_64_p99", 2.345), "ratio reserve_64_p99 2.35");
    }

    #[test]
    fn columns_have_width_of_widest_cell() {
        let rows = vec![vec!["etcd".to_owned(), "12345".to_owned()]];
        assert_eq!(format_table(&["", "a/s"], &rows), "        a/s\netcd  12345\n");
    }
}
