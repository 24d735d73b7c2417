//! Reader of VM traces: converts CSV rows into [`Arrival`]s and ordered [`Event`]s. Callers open
//! and decompress the input, and place the VMs.
//!
//! Four layouts are supported:
//!
//! - With a header, columns are matched by name: `vm_id`, `arrive_s`, `depart_s`, `cores`, `mem_gb`,
//!   and optionally an owner (`owner`, `app_name` or `batch_id`), `socket` and `touched_gb`. Other
//!   columns are ignored.
//! - Azure's public VM table, V1 or V2, has eleven columns, usually without a header.
//! - Alibaba's table of pods has the columns `name`, `cpu_milli`, `memory_mib`, `creation_time` and
//!   `deletion_time`.
//! - Huawei's table of events has the columns `vmid`, `cpu`, `memory`, `time` and `type`, with a row for each
//!   creation and each deletion. It is read as a whole before the first VM is returned.
//!
//! Times are in seconds since the start of the trace. Memory sizes in GB are read as GiB and rounded
//! to whole MiB.

use std::io::{self, BufRead};

use csv::ByteRecord;
use units::{Bytes, Ns, limits::TRACE_ROWS_MAX};

mod event_rows;
mod field;
mod layout;

use event_rows::JoinedRows;
use layout::{FirstRow, TraceColumns};
pub use layout::{Layout, TraceColumn, TraceRow};

/// VM of a trace: its size, and the times of its arrival and departure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Line number in the file, from 1. For generated VMs, the sequence number.
    pub line: u64,
    /// Identifier of the VM in the trace.
    pub id: String,
    /// Arrival time, or `None` if the VM was running at the start of the trace.
    pub arrive: Option<Ns>,
    /// Departure time, or `None` if the VM was running at the end of the trace.
    pub depart: Option<Ns>,
    /// Number of cores, at least 1.
    pub cores: u32,
    /// Memory in whole MiB, at least 1.
    pub memory: Bytes,
    /// Customer, application or batch of the VM, if the trace has such a column.
    pub owner: Option<String>,
}

/// Contents of a trace file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Detected layout of the file.
    pub layout: Layout,
    /// VMs of the trace, in file order.
    pub arrivals: Vec<Arrival>,
    /// Number of malformed rows that were skipped.
    pub skipped: u64,
    /// Error of the first skipped row, if any row was skipped.
    pub first_skipped: Option<MalformedRow>,
}

/// Policy for malformed rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// A malformed row is an error and ends the read.
    #[default]
    Strict,
    /// Malformed rows are counted and skipped.
    Lenient,
}

/// Error in one value of a row.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field} = {value:?}: {rule}")]
pub struct MalformedRow {
    /// Line number of the malformed row, from 1.
    pub line: u64,
    /// Name of the column with the invalid value.
    pub field: &'static str,
    /// Text of the invalid value, truncated.
    pub value: String,
    /// Rule that the value violates: "must be ...".
    pub rule: &'static str,
}

/// Error while reading a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The input cannot be read.
    #[error("cannot read after line {line}: {errno}")]
    Read {
        /// Number of the last line that was read.
        line: u64,
        /// Error returned by the reader.
        errno: io::Error,
    },
    /// The trace has no rows.
    #[error("no rows: must have a header and rows, or the rows of Azure's VM table")]
    Empty,
    /// The first row is neither a supported header nor a row of Azure's VM table.
    #[error(
        "line 1: {first:?}: must be a header with vm_id, arrive_s, depart_s, cores and mem_gb, \
         a row of Azure's VM table (11 columns), or a header with name, creation_time, deletion_time, \
         cpu_milli and memory_mib, or with vmid, cpu, memory, time and type"
    )]
    UnknownLayout {
        /// Text of the first row, truncated.
        first: String,
    },
    /// The header has the column `vm_id`, but not all others of [`Layout::Named`].
    #[error(
        "line 1: {first:?}: a header with vm_id must also have arrive_s, depart_s, cores and mem_gb: missing {}",
        missing.join(", ")
    )]
    MissingColumns {
        /// Text of the first row, truncated.
        first: String,
        /// Columns that are missing.
        missing: Vec<&'static str>,
    },
    /// The header has a column twice.
    #[error("line 1: {name:?}: a column must not be repeated")]
    RepeatedColumn {
        /// Name of the column.
        name: String,
    },
    /// A row is malformed, with [`Strictness::Strict`].
    #[error(transparent)]
    MalformedRow(#[from] MalformedRow),
    /// The trace has too many rows.
    #[error("more than {max} rows")]
    TooManyRows {
        /// Upper bound on the number of rows.
        max: usize,
    },
}

/// Reads a whole trace.
///
/// # Errors
/// Returns [`TraceError`] if the input cannot be read, has an unknown layout or has too many rows.
/// With [`Strictness::Strict`], a malformed row is also an error.
pub fn read(input: impl BufRead, strictness: Strictness) -> Result<Trace, TraceError> {
    let mut rows = TraceRows::new(input)?;
    let mut trace = Trace { layout: rows.layout(), arrivals: Vec::new(), skipped: 0, first_skipped: None };
    while let Some(row) = rows.next_row()? {
        if trace.arrivals.len() == TRACE_ROWS_MAX {
            return Err(TraceError::TooManyRows { max: TRACE_ROWS_MAX });
        }
        trace.add_row(row.map(Arrival::from), strictness)?;
    }
    Ok(trace)
}

/// Reader that returns the rows of a trace one after the other, in file order.
#[derive(Debug)]
pub struct TraceRows<R> {
    rows: csv::Reader<R>,
    record: ByteRecord,
    layout: Layout,
    columns: TraceColumns,
    /// Whether `record` contains a row that was not returned yet.
    has_row: bool,
    /// Remaining rows of a table of events.
    joined: Option<JoinedRows>,
}

impl<R: BufRead> TraceRows<R> {
    /// Starts to read a trace, and detects its layout.
    ///
    /// # Errors
    /// Returns [`TraceError`] if the input cannot be read, is empty or has an unknown layout.
    pub fn new(input: R) -> Result<Self, TraceError> {
        let mut rows = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(input);
        let mut record = ByteRecord::new();
        if !read_row(&mut rows, &mut record)? {
            return Err(TraceError::Empty);
        }
        let (layout, columns, first) = layout::detect_layout(&record)?;
        let joined = match layout::event_columns(&record) {
            Some(events) if layout == Layout::HuaweiEvents => {
                Some(event_rows::join(&mut rows, events, record.len())?)
            }
            _ => None,
        };
        Ok(Self { rows, record, layout, columns, has_row: first == FirstRow::Vm, joined })
    }

    /// Returns the detected layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns whether the trace has a column.
    pub fn has(&self, column: TraceColumn) -> bool {
        self.columns.has(column)
    }

    /// Returns whether the trace has owners that are customers or applications. The owner in the column
    /// `batch_id` is only the batch in which the VM was requested.
    pub fn has_stable_owners(&self) -> bool {
        self.columns.has_stable_owners()
    }

    /// Reads the next row. Returns `None` at the end, and an inner error for a malformed row.
    ///
    /// # Errors
    /// Returns [`TraceError::Read`] if the input cannot be read.
    pub fn next_row(&mut self) -> Result<Option<Result<TraceRow<'_>, MalformedRow>>, TraceError> {
        if let Some(joined) = &mut self.joined {
            match joined.pop_front() {
                None => return Ok(None),
                Some(Err(malformed)) => return Ok(Some(Err(malformed))),
                Some(Ok(row)) => (self.record, self.has_row) = (row, true),
            }
        }
        if !std::mem::take(&mut self.has_row) && !read_row(&mut self.rows, &mut self.record)? {
            return Ok(None);
        }
        Ok(Some(self.columns.parse_row(&self.record)))
    }
}

impl From<TraceRow<'_>> for Arrival {
    fn from(row: TraceRow<'_>) -> Self {
        Self {
            line: row.line,
            id: row.id.to_owned(),
            arrive: row.arrive,
            depart: row.depart,
            cores: row.cores,
            memory: row.memory,
            owner: row.owner.map(str::to_owned),
        }
    }
}

fn read_row<R: io::Read>(rows: &mut csv::Reader<R>, row: &mut ByteRecord) -> Result<bool, TraceError> {
    let line = rows.position().line();
    rows.read_byte_record(row).map_err(|error| TraceError::Read { line, errno: error.into() })
}

impl Trace {
    fn add_row(
        &mut self,
        row: Result<Arrival, MalformedRow>,
        strictness: Strictness,
    ) -> Result<(), TraceError> {
        match (row, strictness) {
            (Ok(arrival), _) => self.arrivals.push(arrival),
            (Err(malformed), Strictness::Strict) => return Err(malformed.into()),
            (Err(malformed), Strictness::Lenient) => {
                self.skipped += 1;
                self.first_skipped.get_or_insert(malformed);
            }
        }
        Ok(())
    }
}

/// Kind of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The VM arrives.
    Arrive,
    /// The VM departs.
    Depart,
}

/// Arrival or departure of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time since the start of the trace.
    pub at: Ns,
    /// Whether the VM arrives or departs.
    pub kind: EventKind,
    /// Index of the VM in [`Trace::arrivals`].
    pub index: usize,
}

/// Returns all events in order of time. Events at the same time are ordered: first VMs that run at
/// the start, then departures, then arrivals, then departures of VMs that arrive at this time.
/// Departures precede arrivals because they free resources. Remaining ties are resolved by row.
pub fn events(arrivals: &[Arrival]) -> Vec<Event> {
    let mut ranked: Vec<(EventOrder, Event)> =
        arrivals.iter().enumerate().flat_map(|(i, a)| vm_events(i, a)).collect();
    ranked.sort_by_key(|(rank, event)| (event.at, *rank, event.index));
    ranked.into_iter().map(|(_, event)| event).collect()
}

/// Order of events that occur at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EventOrder {
    Initial,
    Departure,
    Arrival,
    ImmediateDeparture,
}

fn vm_events(index: usize, vm: &Arrival) -> impl Iterator<Item = (EventOrder, Event)> {
    let at = vm.arrive.unwrap_or(Ns::ZERO);
    let rank = if vm.arrive.is_some() { EventOrder::Arrival } else { EventOrder::Initial };
    let arrival = (rank, Event { at, kind: EventKind::Arrive, index });
    let departure = vm.depart.map(|leaves| {
        let rank =
            if vm.arrive == Some(leaves) { EventOrder::ImmediateDeparture } else { EventOrder::Departure };
        (rank, Event { at: leaves, kind: EventKind::Depart, index })
    });
    std::iter::once(arrival).chain(departure)
}

/// Sorts the VMs by arrival and returns the first `count`.
pub fn first(mut arrivals: Vec<Arrival>, count: usize) -> Vec<Arrival> {
    arrivals.sort_by_key(|vm| (vm.arrive, vm.line));
    arrivals.truncate(count);
    arrivals
}

#[cfg(test)]
mod tests;
