//! Formatting of tables as text: columns, rows, and cell formats that several commands share.

use comfy_table::{ContentArrangement, Table, presets};
use units::{Bytes, UnixMs};

/// Column of a table with one row per `T`.
#[derive(Debug)]
pub struct Column<T> {
    head: &'static str,
    /// Whether the column is shown only in wide tables and descriptions.
    wide: bool,
    cell: fn(&T) -> String,
}

/// Returns a column that is always shown.
pub const fn col<T>(head: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { head, wide: false, cell }
}

/// Returns a column that is shown only in wide tables and descriptions.
pub const fn wide<T>(head: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { head, wide: true, cell }
}

/// Type whose values are printed as rows of a table.
pub trait Row: Sized + 'static {
    /// Columns from left to right.
    const COLUMNS: &'static [Column<Self>];
}

/// Formats a table without borders, with one row per item. Tools such as `awk` can split the rows.
pub fn rows<T: Row>(items: &[T], all_columns: bool) -> String {
    let columns: Vec<_> = T::COLUMNS.iter().filter(|c| all_columns || !c.wide).collect();
    let mut table = borderless_table();
    table.set_header(columns.iter().map(|c| c.head));
    for item in items {
        table.add_row(columns.iter().map(|c| (c.cell)(item)));
    }
    to_left_aligned_text(&table)
}

/// Formats all columns of one item, one column per line.
pub fn details<T: Row>(item: &T) -> String {
    let mut table = borderless_table();
    for column in T::COLUMNS {
        table.add_row([format!("{}:", column.head), (column.cell)(item)]);
    }
    to_left_aligned_text(&table)
}

fn borderless_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn to_left_aligned_text(table: &Table) -> String {
    table.lines().map(|line| format!("{}\n", line.strip_prefix(" ").unwrap_or(&line).trim_end())).collect()
}

/// Formats a Unix time in milliseconds as RFC 3339.
pub fn format_timestamp(unix_ms: u64) -> String {
    UnixMs(unix_ms).to_string()
}

/// Formats a size in bytes with a binary unit, such as 4GiB.
pub fn size(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

/// Common unit for several sizes that are shown together.
#[derive(Clone, Copy, Debug)]
pub struct SizeUnit {
    name: &'static str,
    shift: u32,
}

impl SizeUnit {
    /// Returns the largest unit in which all sizes are whole numbers.
    pub fn largest_common_unit(sizes: impl IntoIterator<Item = u64>) -> Self {
        let zeros = sizes.into_iter().map(u64::trailing_zeros).min().unwrap_or(u64::BITS);
        let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        let (name, shift) = units.into_iter().find(|(_, shift)| *shift <= zeros).unwrap_or(("B", 0));
        Self { name, shift }
    }

    /// Formats a size in this unit. The size must be a multiple of the unit.
    pub fn format(self, bytes: u64) -> String {
        format!("{}{}", bytes >> self.shift, self.name)
    }
}

/// Formats a fraction as a percentage with one decimal.
pub fn percent(fraction: f64) -> String {
    format!("{:.1} %", fraction * 100.0)
}
