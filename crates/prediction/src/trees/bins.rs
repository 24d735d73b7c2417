//! Numbers in few bins: a tree that is trained looks at bins, of which a column has at most 255, and never at numbers.

/// Columns of numbers, all of the same length. NaN is a missing number.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    columns: Vec<Vec<f64>>,
    rows: usize,
}

impl Columns {
    /// None yet, of so many columns.
    pub fn new(columns: usize) -> Self {
        Self { columns: vec![Vec::new(); columns], rows: 0 }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// The row has another length than there are columns.
    pub fn push(&mut self, row: &[f64]) {
        assert_eq!(row.len(), self.columns.len(), "a row has a number for each column");
        self.columns.iter_mut().zip(row).for_each(|(column, number)| column.push(*number));
        self.rows += 1;
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns there are.
    pub fn columns(&self) -> usize {
        self.columns.len()
    }
}

/// The bin of missing numbers.
pub(super) const MISSING: u8 = u8::MAX;
/// Bins of numbers that are there.
const BINS_MAX: usize = MISSING as usize;

/// Columns in bins.
#[derive(Clone, Debug)]
pub(super) struct Binned {
    columns: Vec<Column>,
}

#[derive(Clone, Debug)]
struct Column {
    /// Of each row.
    bins: Vec<u8>,
    /// The largest number of each bin but the last, and a bit more.
    borders: Vec<f64>,
}

impl Binned {
    /// Numbers into bins of about equal counts; few different numbers have a bin each.
    pub(super) fn of(columns: &Columns) -> Self {
        Self { columns: columns.columns.iter().map(|column| Column::of(column)).collect() }
    }

    /// How many columns there are.
    pub(super) fn columns(&self) -> usize {
        self.columns.len()
    }

    /// The bin of each row.
    pub(super) fn bins(&self, column: usize) -> &[u8] {
        &self.columns[column].bins
    }

    /// The borders between bins: of bin n and n + 1 at n.
    pub(super) fn borders(&self, column: usize) -> &[f64] {
        &self.columns[column].borders
    }
}

impl Column {
    fn of(numbers: &[f64]) -> Self {
        let borders = borders(numbers);
        let bin = |number: &f64| match number.is_nan() {
            true => MISSING,
            false => u8::try_from(borders.partition_point(|border| border < number)).expect("few bins"),
        };
        Self { bins: numbers.iter().map(bin).collect(), borders }
    }
}

/// Where bins meet: half way between two numbers that follow each other, every so many numbers.
fn borders(numbers: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = numbers.iter().copied().filter(|number| !number.is_nan()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let different = sorted.chunk_by(|a, b| a == b).count();
    let share = if different <= BINS_MAX { 0.0 } else { sorted.len() as f64 / BINS_MAX as f64 };
    let (mut borders, mut seen, mut next) = (Vec::new(), 0, share);
    let runs: Vec<&[f64]> = sorted.chunk_by(|a, b| a == b).collect();
    for pair in runs.windows(2) {
        seen += pair[0].len();
        if seen as f64 >= next && borders.len() + 1 < BINS_MAX {
            borders.push(between(pair[0][0], pair[1][0]));
            next = seen as f64 + share;
        }
    }
    borders
}

/// A number that is at least the lower and less than the upper of two.
fn between(lower: f64, upper: f64) -> f64 {
    let middle = lower / 2.0 + upper / 2.0;
    if lower <= middle && middle < upper { middle } else { lower }
}
