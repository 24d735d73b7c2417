//! Histogram bins: for training, the values of each column are replaced by the indexes of at most
//! 255 bins, plus one bin for missing values.

/// Table of training data by column. NaN is a missing value.
#[derive(Clone, Debug, Default)]
pub struct FeatureColumns {
    columns: Vec<Vec<f64>>,
    rows: usize,
}

impl FeatureColumns {
    /// Creates a table of `columns` columns without rows.
    pub fn new(columns: usize) -> Self {
        Self { columns: vec![Vec::new(); columns], rows: 0 }
    }

    /// Adds a row with one number per column.
    ///
    /// # Panics
    /// Panics if the length of `row` is not the number of columns.
    pub fn push(&mut self, row: &[f64]) {
        assert_eq!(row.len(), self.columns.len(), "the row must have one value per column");
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

/// Index of the bin for missing values.
pub(super) const MISSING_BIN: u8 = u8::MAX;
/// Largest number of bins for values that are not missing.
const BINS_MAX: usize = MISSING_BIN as usize;

/// Table of training data with values replaced by bins.
#[derive(Clone, Debug)]
pub(super) struct BinnedColumns {
    columns: Vec<Column>,
}

/// Column with values replaced by bins.
#[derive(Clone, Debug)]
struct Column {
    /// Index of the bin of each row.
    bins: Vec<u8>,
    /// Upper border of each bin except the last, ascending.
    borders: Vec<f64>,
}

impl BinnedColumns {
    /// Divides the values of each column into bins of about equal counts. If a column has at most
    /// 255 distinct values, each distinct value gets its own bin.
    pub(super) fn new(columns: &FeatureColumns) -> Self {
        Self { columns: columns.columns.iter().map(|column| Column::new(column)).collect() }
    }

    /// Returns the number of columns.
    pub(super) fn columns(&self) -> usize {
        self.columns.len()
    }

    /// Returns the index of the bin of each row in a column.
    pub(super) fn bins(&self, column: usize) -> &[u8] {
        &self.columns[column].bins
    }

    /// Returns the borders between the bins of a column, ascending. Entry n is the border between
    /// bins n and n + 1.
    pub(super) fn borders(&self, column: usize) -> &[f64] {
        &self.columns[column].borders
    }
}

impl Column {
    fn new(numbers: &[f64]) -> Self {
        let borders = compute_borders(numbers);
        let bin = |number: &f64| match number.is_nan() {
            true => MISSING_BIN,
            false => {
                u8::try_from(borders.partition_point(|border| border < number)).expect("at most 255 bins")
            }
        };
        Self { bins: numbers.iter().map(bin).collect(), borders }
    }
}

/// Computes the borders between bins. Each border is midway between two successive distinct values.
fn compute_borders(numbers: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = numbers.iter().copied().filter(|number| !number.is_nan()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let distinct = sorted.chunk_by(|a, b| a == b).count();
    let bin_size = if distinct <= BINS_MAX { 0.0 } else { sorted.len() as f64 / BINS_MAX as f64 };
    let (mut borders, mut count, mut next) = (Vec::new(), 0, bin_size);
    let runs: Vec<&[f64]> = sorted.chunk_by(|a, b| a == b).collect();
    for pair in runs.windows(2) {
        count += pair[0].len();
        if count as f64 >= next && borders.len() + 1 < BINS_MAX {
            borders.push(midpoint_below(pair[0][0], pair[1][0]));
            next = count as f64 + bin_size;
        }
    }
    borders
}

/// Returns the midpoint of two numbers, or `lower` if rounding makes the midpoint equal to `upper`.
/// The result is at least `lower` and less than `upper`.
fn midpoint_below(lower: f64, upper: f64) -> f64 {
    let middle = lower / 2.0 + upper / 2.0;
    if lower <= middle && middle < upper { middle } else { lower }
}
