//! Report of a benchmark: a table, and `ratio NAME VALUE` lines for programs; or an error.

use std::{fmt::Write as _, process::ExitCode};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Prints what was measured, or why it was not. On SIGINT and SIGTERM measuring is dropped, and with it everything it
/// started.
pub async fn tell(name: &str, measure: impl Future<Output = Result<String, Failure>>) -> ExitCode {
    let told = tokio::select! {
        report = measure => report,
        () = interrupted() => Err(Failure::Interrupted),
    };
    match told {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{name}: {}", failure.story());
            ExitCode::FAILURE
        }
    }
}

async fn interrupted() {
    let mut terminate = signal(SignalKind::terminate()).expect("SIGTERM can be handled in a new process");
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

/// Several measurements of one thing.
#[derive(Clone, Debug, Default)]
pub struct Rounds(Vec<f64>);

impl Rounds {
    /// Adds one.
    pub fn add(&mut self, measured: f64) {
        self.0.push(measured);
    }

    /// The one in the middle; of an even number, the mean of the two in the middle. Not a number if there is none.
    pub fn median(&self) -> f64 {
        let sorted = self.sorted();
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[n / 2],
            n => f64::midpoint(sorted[n / 2 - 1], sorted[n / 2]),
        }
    }

    /// The least, the median and the greatest, without decimals.
    pub fn show(&self) -> String {
        self.spread(0)
    }

    /// The least, the median and the greatest, with so many decimals.
    pub fn spread(&self, decimals: usize) -> String {
        let sorted = self.sorted();
        match (sorted.first(), sorted.last()) {
            (Some(least), Some(most)) => {
                let median = self.median();
                format!("{least:.decimals$}-{median:.decimals$}-{most:.decimals$}")
            }
            _ => "none".to_owned(),
        }
    }

    /// Each measurement over the one of the same round.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, other)| one / other).collect())
    }

    fn sorted(&self) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted
    }
}

/// A line that programs read; above 1, we are ahead.
pub fn ratio(name: &str, value: f64) -> String {
    format!("ratio {name} {value:.2}")
}

/// Rows under a head, in columns as wide as their widest cell, the first to the left, the others to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(String::len);
        cells.chain(head.get(column).map(|cell| cell.len())).max().unwrap_or(0)
    };
    let head: Vec<String> = head.iter().map(|&cell| cell.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&head).chain(rows) {
        for (column, cell) in row.iter().enumerate() {
            let wide = width(column);
            let cell = if column == 0 { format!("{cell:<wide$}") } else { format!("  {cell:>wide$}") };
            let _ = write!(text, "{cell}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(measured: &[f64]) -> Rounds {
        Rounds(measured.to_vec())
    }

    #[test]
    fn one_bad_round_does_not_move_the_median() {
        assert_eq!(rounds(&[3.0, 1000.0, 1.0]).median(), 3.0);
        assert_eq!(rounds(&[4.0, 1.0, 2.0, 900.0]).median(), 3.0);
        assert!(rounds(&[]).median().is_nan());
    }

    #[test]
    fn spread_is_least_median_and_greatest() {
        let measured = rounds(&[3.0, 1.5, 9.0]);
        assert_eq!((measured.show(), measured.spread(1)), ("2-3-9".to_owned(), "1.5-3.0-9.0".to_owned()));
        assert_eq!(measured.over(&rounds(&[2.0, 1.0, 3.0])).spread(1), "1.5-1.5-3.0");
        assert_eq!(rounds(&[]).show(), "none");
    }

    #[test]
    fn a_ratio_is_one_line_of_three_words() {
        assert_eq!(ratio("reserve_64_p99", 2.345), "ratio reserve_64_p99 2.35");
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["etcd".to_owned(), "12345".to_owned()]];
        assert_eq!(table(&["", "a/s"], &rows), "        a/s\netcd  12345\n");
    }
}
