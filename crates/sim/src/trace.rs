//! Arrivals and departures of VMs as public traces have them: rows in, [`Arrival`]s and ordered [`Event`]s out. Where the
//! bytes come from, and what unpacks them, is the caller's business; nothing is placed or played here.
//!
//! Two layouts are understood. With a header, columns are found by name: `vm_id`, `arrive_s`, `depart_s`, `cores` and
//! `mem_gb`, and `app_name` if it is there; others are ignored. Without one, rows have the eleven columns of Azure's public
//! VM table. Seconds count from the start of the trace. GB is read as GiB and rounded to whole MiB.

use std::io::{self, BufRead};

use csv::ByteRecord;
use units::{Bytes, Ns, limits::TRACE_ROWS_MAX};

mod field;
mod layout;

pub use layout::Layout;

/// One VM of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Where it stands in the file, counted from 1; a generated VM's number.
    pub line: u64,
    /// Its name in the trace.
    pub id: String,
    /// When it came; `None` if it was there at the start.
    pub arrive: Option<Ns>,
    /// When it left; `None` if it stayed.
    pub depart: Option<Ns>,
    /// Its cores, at least 1.
    pub cores: u32,
    /// Its memory, in whole MiB, at least 1.
    pub memory: Bytes,
    /// What it is an instance of, where the trace says so.
    pub app: Option<String>,
}

/// Everything a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// How it was laid out.
    pub layout: Layout,
    /// Its VMs, by row.
    pub arrivals: Vec<Arrival>,
    /// Rows that were left out because they are malformed, and the first of them.
    pub skipped: u64,
    /// Why the first row that was left out is malformed.
    pub first_skipped: Option<Malformed>,
}

/// What to do with a malformed row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rigour {
    /// It ends the reading.
    #[default]
    Strict,
    /// It is counted and left out.
    Lenient,
}

/// A row that breaks a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {field} = {value:?}: {rule}")]
pub struct Malformed {
    /// Counted from 1.
    pub line: u64,
    /// Which column.
    pub field: &'static str,
    /// As written; its beginning if it is long.
    pub value: String,
    /// "must be ...".
    pub rule: &'static str,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The bytes do not come.
    #[error("read after line {line}")]
    Read {
        /// The last line that came.
        line: u64,
        /// What the system said.
        #[source]
        errno: io::Error,
    },
    /// There is no row.
    #[error("no rows: must have a header and rows, or the rows of Azure's VM table")]
    Empty,
    /// The first row is neither a known header nor a row of Azure's VM table.
    #[error(
        "line 1: {first:?}: must be a header with vm_id, arrive_s, depart_s, cores and mem_gb, \
         or a row of Azure's VM table (11 columns)"
    )]
    UnknownLayout {
        /// The beginning of the first row.
        first: String,
    },
    /// A row breaks a rule.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// More rows than anybody means to replay.
    #[error("more than {max} rows")]
    TooManyRows {
        /// How many are read at most.
        max: usize,
    },
}

/// Reads a whole trace.
///
/// # Errors
/// [`TraceError`]; malformed rows only with [`Rigour::Strict`].
pub fn read(input: impl BufRead, rigour: Rigour) -> Result<Trace, TraceError> {
    let mut rows = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(input);
    let mut row = ByteRecord::new();
    if !next(&mut rows, &mut row)? {
        return Err(TraceError::Empty);
    }
    let (layout, columns) = layout::detect(&row)?;
    let mut trace = Trace { layout, arrivals: Vec::new(), skipped: 0, first_skipped: None };
    let mut more = layout == Layout::AzureVmTable || next(&mut rows, &mut row)?;
    while more {
        if trace.arrivals.len() == TRACE_ROWS_MAX {
            return Err(TraceError::TooManyRows { max: TRACE_ROWS_MAX });
        }
        trace.add(columns.arrival(&row), rigour)?;
        more = next(&mut rows, &mut row)?;
    }
    Ok(trace)
}

fn next<R: io::Read>(rows: &mut csv::Reader<R>, row: &mut ByteRecord) -> Result<bool, TraceError> {
    let line = rows.position().line();
    rows.read_byte_record(row).map_err(|error| TraceError::Read { line, errno: error.into() })
}

impl Trace {
    fn add(&mut self, row: Result<Arrival, Malformed>, rigour: Rigour) -> Result<(), TraceError> {
        match (row, rigour) {
            (Ok(arrival), _) => self.arrivals.push(arrival),
            (Err(malformed), Rigour::Strict) => return Err(malformed.into()),
            (Err(malformed), Rigour::Lenient) => {
                self.skipped += 1;
                self.first_skipped.get_or_insert(malformed);
            }
        }
        Ok(())
    }
}

/// What happens to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It comes.
    Arrive,
    /// It goes.
    Depart,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, from the start of the trace.
    pub at: Ns,
    /// What.
    pub what: What,
    /// To which VM: its place among the arrivals.
    pub index: usize,
}

/// Everything that happens, in order: by time; those that were there at the start first; then departures, so that their
/// room is there for arrivals; then by row. A VM that leaves the moment it comes leaves after all arrivals of that moment.
pub fn events(arrivals: &[Arrival]) -> Vec<Event> {
    let mut ranked: Vec<(Rank, Event)> = arrivals.iter().enumerate().flat_map(|(i, a)| both(i, a)).collect();
    ranked.sort_by_key(|(rank, event)| (event.at, *rank, event.index));
    ranked.into_iter().map(|(_, event)| event).collect()
}

/// Order within one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    ThereAtTheStart,
    Leaving,
    Coming,
    LeavingAtOnce,
}

fn both(index: usize, vm: &Arrival) -> impl Iterator<Item = (Rank, Event)> {
    let at = vm.arrive.unwrap_or(Ns::ZERO);
    let rank = if vm.arrive.is_some() { Rank::Coming } else { Rank::ThereAtTheStart };
    let comes = (rank, Event { at, what: What::Arrive, index });
    let goes = vm.depart.map(|leaves| {
        let rank = if vm.arrive == Some(leaves) { Rank::LeavingAtOnce } else { Rank::Leaving };
        (rank, Event { at: leaves, what: What::Depart, index })
    });
    std::iter::once(comes).chain(goes)
}

/// The first so many VMs in the order in which they come.
pub fn first(mut arrivals: Vec<Arrival>, most: usize) -> Vec<Arrival> {
    arrivals.sort_by_key(|vm| (vm.arrive, vm.line));
    arrivals.truncate(most);
    arrivals
}

#[cfg(test)]
mod tests;
