//! Tables on a terminal: columns of a type, its rows, and cells that several commands share. It
//! prints nothing.

use comfy_table::{ContentArrangement, Table, presets};
use units::{Bytes, UnixMs};

/// Column of a table with one row per `T`.
#[derive(Debug)]
pub struct Column<T> {
    head: &'static str,
    /// Shown in wide tables and descriptions only.
    wide: bool,
    cell: fn(&T) -> String,
}

/// Returns a column that is always shown.
pub const fn col<T>(head: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { head, wide: false, cell }
}

/// Returns a column that only wide tables and descriptions show.
pub const fn wide<T>(head: &'static str, cell: fn(&T) -> String) -> Column<T> {
    Column { head, wide: true, cell }
}

/// Type whose values are rows of a table.
pub trait Row: Sized + 'static {
    /// Columns from left to right.
    const COLUMNS: &'static [Column<Self>];
}

/// Returns a table without borders, which `cut` and `awk` can split. It ends with a newline.
pub fn rows<T: Row>(things: &[T], all_columns: bool) -> String {
    let columns: Vec<_> = T::COLUMNS.iter().filter(|c| all_columns || !c.wide).collect();
    let mut table = bare();
    table.set_header(columns.iter().map(|c| c.head));
    for thing in things {
        table.add_row(columns.iter().map(|c| (c.cell)(thing)));
    }
    flush_left(&table)
}

/// Returns every column of `thing`, one per line.
pub fn details<T: Row>(thing: &T) -> String {
    let mut table = bare();
    for column in T::COLUMNS {
        table.add_row([format!("{}:", column.head), (column.cell)(thing)]);
    }
    flush_left(&table)
}

fn bare() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn flush_left(table: &Table) -> String {
    table.lines().map(|line| format!("{}\n", line.strip_prefix(" ").unwrap_or(&line).trim_end())).collect()
}

/// Returns a Unix time as logs print it.
pub fn moment(unix_ms: u64) -> String {
    UnixMs(unix_ms).to_string()
}

/// Returns a size in bytes with its binary unit, such as 4GiB.
pub fn size(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

/// Returns a share of one in percent, with one decimal.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}
