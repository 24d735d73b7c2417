//! Detection of the columns of a trace: named by a header, or fixed as in Azure's VM table.
//! `field.rs` validates the values.

use csv::ByteRecord;
use rustc_hash::FxHashSet;

use super::{
    MalformedRow, TraceError,
    field::{CoresUnit, Field, MemoryUnit},
};

/// Layout of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The first row is a header with the names of the columns `vm_id`, `arrive_s`, `depart_s`,
    /// `cores` and `mem_gb`.
    Named,
    /// Azure's public VM table, V1 or V2: eleven columns, with or without a header. Sizes are
    /// numbers or buckets such as `>24`.
    AzureVmTable,
    /// Alibaba's table of pods (`openb_pod_list`), with a header. Sizes are in thousandths of a core
    /// and in MiB.
    AlibabaPods,
    /// Huawei's table of events (Huawei-East-1), with a header: a row for each creation and each deletion of a VM.
    HuaweiEvents,
}

/// Columns of [`Layout::Named`] that a header must have.
const NAMED_COLUMNS: [&str; 5] = ["vm_id", "arrive_s", "depart_s", "cores", "mem_gb"];
/// Columns of Huawei's table of events.
pub(super) const EVENT_COLUMNS: [&str; 5] = ["vmid", "cpu", "memory", "time", "type"];

/// Columns of the rows to which [events](super::event_rows) are joined.
#[derive(Clone, Copy, Debug)]
pub(super) enum JoinedColumn {
    Id,
    Arrive,
    Depart,
    Cores,
    Memory,
}

/// Number of columns in Azure's VM table.
const AZURE_COLUMNS: usize = 11;
/// Names of the columns for the sizes in the headers of Azure's tables V1 and V2.
const AZURE_SIZE_COLUMNS: [[&str; 2]; 2] =
    [["vmcorecount", "vmmemory"], ["vmcorecountbucket", "vmmemorybucket"]];
/// Names of the columns with the owner of a VM, in order of preference.
const OWNER_COLUMNS: [&str; 3] = ["owner", "app_name", BATCH_COLUMN];
/// Name of the column with the batch in which a VM was requested.
const BATCH_COLUMN: &str = "batch_id";
/// Maximum length of an unknown first row in an error message, in characters.
const SHOWN_ROW_CHARS_MAX: usize = 120;

/// Column of a trace that describes a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceColumn {
    /// Identifier of the VM.
    Id,
    /// Time of the arrival.
    Arrive,
    /// Time of the departure.
    Depart,
    /// Number of cores.
    Cores,
    /// Memory.
    Memory,
    /// Customer, application or batch of the VM.
    Owner,
    /// Socket on which the VM ran.
    Socket,
    /// Memory that the VM touched.
    Touched,
}

/// Indexes and names of the columns that the reader uses, and their units.
#[derive(Clone, Debug)]
pub(super) struct TraceColumns {
    count: usize,
    id: Column,
    arrive: Column,
    depart: Column,
    cores: Column,
    memory: Column,
    owner: Option<Column>,
    socket: Option<Column>,
    touched: Option<Column>,
    cores_unit: CoresUnit,
    memory_unit: MemoryUnit,
}

#[derive(Clone, Copy, Debug)]
struct Column {
    name: &'static str,
    index: usize,
}

/// Whether the first row of a file contains the names of the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstRow {
    Header,
    Vm,
}

/// Detects the layout and the columns from the first row.
pub(super) fn detect_layout(first: &ByteRecord) -> Result<(Layout, TraceColumns, FirstRow), TraceError> {
    let (layout, columns, kind) = find_layout(first)?;
    if kind == FirstRow::Header {
        check_distinct(first)?;
    }
    Ok((layout, columns, kind))
}

fn check_distinct(header: &ByteRecord) -> Result<(), TraceError> {
    let mut names = FxHashSet::default();
    let repeated =
        header.iter().map(<[u8]>::trim_ascii).find(|name| !name.is_empty() && !names.insert(*name));
    match repeated {
        None => Ok(()),
        Some(name) => Err(TraceError::RepeatedColumn { name: shown(&String::from_utf8_lossy(name)) }),
    }
}

/// Returns the start of a text, for an error message.
fn shown(text: &str) -> String {
    text.chars().take(SHOWN_ROW_CHARS_MAX).collect()
}

fn find_layout(first: &ByteRecord) -> Result<(Layout, TraceColumns, FirstRow), TraceError> {
    if let Some(columns) = TraceColumns::from_header(first) {
        return Ok((Layout::Named, columns, FirstRow::Header));
    }
    if let Some(columns) = TraceColumns::from_pods_header(first) {
        return Ok((Layout::AlibabaPods, columns, FirstRow::Header));
    }
    if event_columns(first).is_some() {
        return Ok((Layout::HuaweiEvents, TraceColumns::for_joined_events(), FirstRow::Header));
    }
    let mut headers = AZURE_SIZE_COLUMNS.into_iter();
    if let Some(columns) = headers.find_map(|sizes| TraceColumns::from_azure_header(first, sizes)) {
        return Ok((Layout::AzureVmTable, columns, FirstRow::Header));
    }
    let azure = TraceColumns::for_azure_table();
    let is_word = |column: Column| {
        first.get(column.index).is_some_and(|f| f.first().is_some_and(u8::is_ascii_alphabetic))
    };
    if first.len() == AZURE_COLUMNS && !(is_word(azure.arrive) && is_word(azure.depart)) {
        return Ok((Layout::AzureVmTable, azure, FirstRow::Vm));
    }
    let shown = shown(&first.iter().map(String::from_utf8_lossy).collect::<Vec<_>>().join(","));
    if find(first, NAMED_COLUMNS[0]).is_some() {
        let missing = NAMED_COLUMNS.into_iter().filter(|name| find(first, name).is_none()).collect();
        return Err(TraceError::MissingColumns { first: shown, missing });
    }
    Err(TraceError::UnknownLayout { first: shown })
}

/// Returns the indexes of [`EVENT_COLUMNS`] in a header, if it has all.
pub(super) fn event_columns(header: &ByteRecord) -> Option<[usize; EVENT_COLUMNS.len()]> {
    let mut indexes = [0; EVENT_COLUMNS.len()];
    for (index, name) in indexes.iter_mut().zip(EVENT_COLUMNS) {
        *index = find(header, name)?.index;
    }
    Some(indexes)
}

/// Returns the line number of a row.
pub(super) fn line_of(record: &ByteRecord) -> u64 {
    record.position().map_or(0, csv::Position::line)
}

/// Checks that a row has as many columns as the first one.
pub(super) fn check_column_count(record: &ByteRecord, count: usize) -> Result<(), MalformedRow> {
    if record.len() == count {
        return Ok(());
    }
    let rule = "must have as many columns as the first row";
    let value = format!("{} columns", record.len());
    Err(MalformedRow { line: line_of(record), field: "row", value, rule })
}

fn find(header: &ByteRecord, name: &'static str) -> Option<Column> {
    let index = header.iter().position(|field| field.trim_ascii() == name.as_bytes())?;
    Some(Column { name, index })
}

impl TraceColumns {
    fn from_header(header: &ByteRecord) -> Option<Self> {
        let [id, arrive, depart, cores, memory] = NAMED_COLUMNS;
        Some(Self {
            count: header.len(),
            id: find(header, id)?,
            arrive: find(header, arrive)?,
            depart: find(header, depart)?,
            cores: find(header, cores)?,
            memory: find(header, memory)?,
            owner: OWNER_COLUMNS.into_iter().find_map(|name| find(header, name)),
            socket: find(header, "socket"),
            touched: find(header, "touched_gb"),
            cores_unit: CoresUnit::Cores,
            memory_unit: MemoryUnit::Gb,
        })
    }

    fn from_pods_header(header: &ByteRecord) -> Option<Self> {
        Some(Self {
            count: header.len(),
            id: find(header, "name")?,
            arrive: find(header, "creation_time")?,
            depart: find(header, "deletion_time")?,
            cores: find(header, "cpu_milli")?,
            memory: find(header, "memory_mib")?,
            owner: None,
            socket: None,
            touched: None,
            cores_unit: CoresUnit::Millicores,
            memory_unit: MemoryUnit::Mib,
        })
    }

    fn for_joined_events() -> Self {
        let column = |at: JoinedColumn, name| Column { name, index: at as usize };
        Self {
            count: JoinedColumn::Memory as usize + 1,
            id: column(JoinedColumn::Id, "vmid"),
            arrive: column(JoinedColumn::Arrive, "time"),
            depart: column(JoinedColumn::Depart, "time"),
            cores: column(JoinedColumn::Cores, "cpu"),
            memory: column(JoinedColumn::Memory, "memory"),
            owner: None,
            socket: None,
            touched: None,
            cores_unit: CoresUnit::Cores,
            memory_unit: MemoryUnit::Gb,
        }
    }

    fn from_azure_header(header: &ByteRecord, [cores, memory]: [&'static str; 2]) -> Option<Self> {
        Some(Self {
            count: header.len(),
            id: find(header, "vmid")?,
            arrive: find(header, "vmcreated")?,
            depart: find(header, "vmdeleted")?,
            cores: find(header, cores)?,
            memory: find(header, memory)?,
            owner: find(header, "subscriptionid"),
            ..Self::for_azure_table()
        })
    }

    fn for_azure_table() -> Self {
        let column = |index, name| Column { name, index };
        Self {
            count: AZURE_COLUMNS,
            id: column(0, "vmid"),
            arrive: column(3, "vmcreated"),
            depart: column(4, "vmdeleted"),
            cores: column(9, "vmcorecountbucket"),
            memory: column(10, "vmmemorybucket"),
            owner: Some(column(1, "subscriptionid")),
            socket: None,
            touched: None,
            cores_unit: CoresUnit::CoresOrBucket,
            memory_unit: MemoryUnit::GbOrBucket,
        }
    }

    /// Returns whether the trace has a column.
    pub(super) fn has(&self, column: TraceColumn) -> bool {
        self.position(column).is_some()
    }

    /// Returns whether the owners are customers or applications instead of batches.
    pub(super) fn has_stable_owners(&self) -> bool {
        self.owner.is_some_and(|owner| owner.name != BATCH_COLUMN)
    }

    fn position(&self, column: TraceColumn) -> Option<Column> {
        match column {
            TraceColumn::Id => Some(self.id),
            TraceColumn::Arrive => Some(self.arrive),
            TraceColumn::Depart => Some(self.depart),
            TraceColumn::Cores => Some(self.cores),
            TraceColumn::Memory => Some(self.memory),
            TraceColumn::Owner => self.owner,
            TraceColumn::Socket => self.socket,
            TraceColumn::Touched => self.touched,
        }
    }

    /// Converts one row into a VM.
    pub(super) fn parse_row<'a>(&'a self, record: &'a ByteRecord) -> Result<TraceRow<'a>, MalformedRow> {
        let line = line_of(record);
        check_column_count(record, self.count)?;
        let take = |column: Column| Field::new(line, column.name, &record[column.index]);
        let arrive = take(self.arrive)?.parse_seconds()?;
        let depart = take(self.depart)?;
        let (departure, cores, memory) = (depart.parse_seconds()?, take(self.cores)?, take(self.memory)?);
        depart.check_rule(departure.is_none() || departure >= arrive, "must not be before the arrival")?;
        let memory = memory.parse_memory(self.memory_unit)?;
        Ok(TraceRow {
            line,
            id: take(self.id)?.non_empty_text()?,
            arrive,
            depart: departure,
            cores: cores.parse_cores(self.cores_unit)?,
            memory,
            owner: self.owner.map(|owner| take(owner).map(|field| field.text())).transpose()?,
            socket: self.socket.map(|socket| take(socket)?.parse_socket()).transpose()?.flatten(),
            touched: self.touched.map(|touched| take(touched)?.parse_touched(memory)).transpose()?.flatten(),
            columns: self,
            record,
        })
    }
}

/// VM of a trace, borrowed from the reader. [`Arrival`](super::Arrival) is the owned form.
#[derive(Clone, Copy, Debug)]
pub struct TraceRow<'a> {
    /// Line number in the file, from 1.
    pub line: u64,
    /// Identifier of the VM, not empty.
    pub id: &'a str,
    /// Arrival time, or `None` if the VM was running at the start of the trace.
    pub arrive: Option<units::Ns>,
    /// Departure time, or `None` if the VM was running at the end of the trace; not before the
    /// arrival.
    pub depart: Option<units::Ns>,
    /// Number of cores, at least 1.
    pub cores: u32,
    /// Memory in whole MiB, at least 1.
    pub memory: units::Bytes,
    /// Customer, application or batch of the VM, if the trace has such a column.
    pub owner: Option<&'a str>,
    /// Socket on which the VM ran, from 0, if the trace has this column and the value is not empty.
    pub socket: Option<u32>,
    /// Memory that the VM touched, at most its memory, if the trace has this column and the value
    /// is not empty.
    pub touched: Option<units::Bytes>,
    columns: &'a TraceColumns,
    record: &'a ByteRecord,
}

impl TraceRow<'_> {
    /// Returns an error for the value of a column that violates a rule of the caller.
    pub fn violation(&self, column: TraceColumn, rule: &'static str) -> MalformedRow {
        let Some(Column { name, index }) = self.columns.position(column) else {
            return MalformedRow { line: self.line, field: "row", value: String::new(), rule };
        };
        let error = Field::new(self.line, name, &self.record[index]).map(|field| field.error(rule));
        error.unwrap_or_else(|not_utf8| not_utf8)
    }
}
