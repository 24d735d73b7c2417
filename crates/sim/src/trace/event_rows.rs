//! Traces with a row for each creation and each deletion of a VM, as Huawei's: the rows are joined to one
//! row per VM.

use std::{collections::VecDeque, io};

use csv::ByteRecord;
use rustc_hash::FxHashMap;
use units::limits::PLAN_TRACE_ROWS_MAX;

use super::{
    MalformedRow, TraceError,
    field::Field,
    layout::{EVENT_COLUMNS, JoinedColumn, check_column_count, line_of},
    read_row,
};

/// Values of the column `type`.
const CREATION: &[u8] = b"0";
const DELETION: &[u8] = b"1";

/// Joined rows, in the order of the creations, and errors of malformed rows.
pub(super) type JoinedRows = VecDeque<Result<ByteRecord, MalformedRow>>;

/// Reads all rows, and joins the creation and the deletion of each VM. `columns` are the indexes of
/// [`EVENT_COLUMNS`] in a row with `count` columns.
///
/// # Errors
/// Returns [`TraceError`] if the input cannot be read, or has too many rows.
pub(super) fn join<R: io::Read>(
    rows: &mut csv::Reader<R>,
    columns: [usize; EVENT_COLUMNS.len()],
    count: usize,
) -> Result<JoinedRows, TraceError> {
    let (mut joined, mut running) = (JoinedRows::new(), FxHashMap::default());
    let mut row = ByteRecord::new();
    while read_row(rows, &mut row)? {
        if joined.len() == PLAN_TRACE_ROWS_MAX {
            return Err(TraceError::TooManyRows { max: PLAN_TRACE_ROWS_MAX });
        }
        if let Err(malformed) = add_event(&mut joined, &mut running, &row, columns, count) {
            joined.push_back(Err(malformed));
        }
    }
    Ok(joined)
}

/// Adds a creation, or the time of a deletion to the row of its VM. `running` contains the rows of the VMs that
/// are not deleted, by ID.
fn add_event(
    joined: &mut JoinedRows,
    running: &mut FxHashMap<Box<[u8]>, usize>,
    row: &ByteRecord,
    columns: [usize; EVENT_COLUMNS.len()],
    count: usize,
) -> Result<(), MalformedRow> {
    check_column_count(row, count)?;
    let malformed = |field, value, rule| match Field::new(line_of(row), field, value) {
        Ok(field) => field.error(rule),
        Err(not_utf8) => not_utf8,
    };
    let [id, cpu, memory, time, kind] = columns.map(|column| row[column].trim_ascii());
    match kind {
        CREATION if running.contains_key(id) => {
            Err(malformed("vmid", id, "must not be the ID of a VM that was not deleted"))
        }
        CREATION => {
            running.insert(id.into(), joined.len());
            joined.push_back(Ok(joined_row(row, id, time, b"", cpu, memory)));
            Ok(())
        }
        DELETION => {
            let at = running.remove(id).ok_or_else(|| {
                malformed("vmid", id, "must be the ID of a VM that was created and not deleted")
            })?;
            if let Ok(created) = &mut joined[at] {
                // Checked here, because the joined row has the line of the creation.
                if let (Some(from), Some(to)) =
                    (number(&created[JoinedColumn::Arrive as usize]), number(time))
                    && to < from
                {
                    return Err(malformed("time", time, "must not be before the arrival"));
                }
                let [arrive, cores, memory] =
                    [JoinedColumn::Arrive, JoinedColumn::Cores, JoinedColumn::Memory]
                        .map(|column| created[column as usize].to_vec());
                *created = joined_row(created, id, &arrive, time, &cores, &memory);
            }
            Ok(())
        }
        other => Err(malformed("type", other, "must be 0 (creation) or 1 (deletion)")),
    }
}

fn number(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Creates a row with the columns of [`JoinedColumn`], at the position of another row.
fn joined_row(
    at: &ByteRecord,
    id: &[u8],
    arrive: &[u8],
    depart: &[u8],
    cores: &[u8],
    memory: &[u8],
) -> ByteRecord {
    let mut row = ByteRecord::from(vec![id, arrive, depart, cores, memory]);
    row.set_position(at.position().cloned());
    row
}
