//! Histogram bins: training replaces each column by at most 255 bins plus one for missing values.

/// Training columns of equal length. NaN is a missing value.
#[derive(Clone, Debug, Default)]
pub struct Columns {
    columns: Vec<Vec<f64>>,
    rows: usize,
}

impl Columns {
    /// Creates an empty table with this number of columns.
    pub fn new(columns: usize) -> Self {
        Self { columns: vec![Vec::new(); columns], rows: 0 }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// Panics if the row does not have one number per column.
    pub fn push(&mut self, row: &[f64]) {
        assert_eq!(row.len(), self.columns.len(), "row length equals the number of columns");
        self.columns.iter_mut().zip(row).for_each(|(column, number)| column.push(*number));
        self.rows += 1;
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns.len()
    }
}

/// Bin of missing values.
pub(super) const MISSING: u8 = u8::MAX;
/// Upper bound on the bins of present values.
const BINS_MAX: usize = MISSING as usize;

/// Columns replaced by bins.
#[derive(Clone, Debug)]
pub(super) struct BinnedColumns {
    columns: Vec<Column>,
}

#[derive(Clone, Debug)]
struct Column {
    /// Bin of each row.
    bins: Vec<u8>,
    /// Upper border of each bin but the last.
    borders: Vec<f64>,
}

impl BinnedColumns {
    /// Bins each column into about equal counts; a column with few distinct values gets one bin for
    /// each.
    pub(super) fn of(columns: &Columns) -> Self {
        Self { columns: columns.columns.iter().map(|column| Column::of(column)).collect() }
    }

    /// Returns the number of columns.
    pub(super) fn columns(&self) -> usize {
        self.columns.len()
    }

    /// Returns the bin of each row.
    pub(super) fn bins(&self, column: usize) -> &[u8] {
        &self.columns[column].bins
    }

    /// Returns the borders: the one between bins n and n + 1 is at index n.
    pub(super) fn borders(&self, column: usize) -> &[f64] {
        &self.columns[column].borders
    }
}

impl Column {
    fn of(numbers: &[f64]) -> Self {
        let borders = borders(numbers);
        let bin = |number: &f64| match number.is_nan() {
            true => MISSING,
            false => {
                u8::try_from(borders.partition_point(|border| border < number)).expect("at most 255 bins")
            }
        };
        Self { bins: numbers.iter().map(bin).collect(), borders }
    }
}

/// Computes the borders, midway between two successive distinct values.
fn borders(numbers: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = numbers.iter().copied().filter(|number| !number.is_nan()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let distinct = sorted.chunk_by(|a, b| a == b).count();
    let bin_size = if distinct <= BINS_MAX { 0.0 } else { sorted.len() as f64 / BINS_MAX as f64 };
    let (mut borders, mut count, mut next) = (Vec::new(), 0, bin_size);
    let runs: Vec<&[f64]> = sorted.chunk_by(|a, b| a == b).collect();
    for pair in runs.windows(2) {
        count += pair[0].len();
        if count as f64 >= next && borders.len() + 1 < BINS_MAX {
            borders.push(between(pair[0][0], pair[1][0]));
            next = count as f64 + bin_size;
        }
    }
    borders
}

/// Returns a number that is at least `lower` and less than `upper`.
fn between(lower: f64, upper: f64) -> f64 {
    let middle = lower / 2.0 + upper / 2.0;
    if lower <= middle && middle < upper { middle } else { lower }
}
