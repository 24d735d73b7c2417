//! Detection of the columns of a trace: named by a header, or fixed as in Azure's VM table.
//! `field.rs` validates the values.

use csv::ByteRecord;

use super::{
    Arrival, MalformedRow, TraceError,
    field::{self, Field},
};

/// Layout of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The first row is a header with the names of the columns.
    Named,
    /// Azure's public VM table, V1 or V2: eleven columns without a header. Sizes are numbers or
    /// buckets such as `>24`.
    AzureVmTable,
}

/// Number of columns in Azure's VM table.
const AZURE_COLUMNS: usize = 11;
/// Maximum length of an unknown first row in an error message, in characters.
const SHOWN_ROW_CHARS_MAX: usize = 120;

/// Indexes and names of the columns that the reader uses.
#[derive(Clone, Debug)]
pub(super) struct TraceColumns {
    count: usize,
    id: Column,
    arrive: Column,
    depart: Column,
    cores: Column,
    memory: Column,
    app: Option<Column>,
    has_buckets: bool,
}

#[derive(Clone, Copy, Debug)]
struct Column {
    name: &'static str,
    index: usize,
}

/// Detects the layout and the columns from the first row.
pub(super) fn detect_layout(first: &ByteRecord) -> Result<(Layout, TraceColumns), TraceError> {
    if let Some(columns) = TraceColumns::from_header(first) {
        return Ok((Layout::Named, columns));
    }
    let azure = TraceColumns::for_azure_table();
    let is_word = |column: Column| {
        first.get(column.index).is_some_and(|f| f.first().is_some_and(u8::is_ascii_alphabetic))
    };
    if first.len() == AZURE_COLUMNS && !(is_word(azure.arrive) && is_word(azure.depart)) {
        return Ok((Layout::AzureVmTable, azure));
    }
    let shown = first.iter().map(String::from_utf8_lossy).collect::<Vec<_>>().join(",");
    Err(TraceError::UnknownLayout { first: shown.chars().take(SHOWN_ROW_CHARS_MAX).collect() })
}

impl TraceColumns {
    fn from_header(header: &ByteRecord) -> Option<Self> {
        let find = |name: &'static str| {
            let index = header.iter().position(|field| field.trim_ascii() == name.as_bytes())?;
            Some(Column { name, index })
        };
        Some(Self {
            count: header.len(),
            id: find("vm_id")?,
            arrive: find("arrive_s")?,
            depart: find("depart_s")?,
            cores: find("cores")?,
            memory: find("mem_gb")?,
            app: find("app_name"),
            has_buckets: false,
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
            app: None,
            has_buckets: true,
        }
    }

    /// Converts one row into the arrival of a VM.
    pub(super) fn parse_arrival(&self, row: &ByteRecord) -> Result<Arrival, MalformedRow> {
        let line = row.position().map_or(0, csv::Position::line);
        if row.len() != self.count {
            let rule = "must have as many columns as the first row";
            return Err(MalformedRow { line, field: "row", value: format!("{} columns", row.len()), rule });
        }
        let take = |column: Column| Field::new(line, column.name, &row[column.index]);
        let arrive = take(self.arrive)?.parse_seconds()?;
        let depart = take(self.depart)?;
        let (departure, cores, memory) = (depart.parse_seconds()?, take(self.cores)?, take(self.memory)?);
        depart.check_rule(departure.is_none() || departure >= arrive, "must not be before the arrival")?;
        Ok(Arrival {
            line,
            id: take(self.id)?.non_empty_text()?.to_owned(),
            arrive,
            depart: departure,
            cores: cores.parse_cores(self.has_buckets.then_some(field::CORES_OVER_24))?,
            memory: memory.parse_memory(self.has_buckets.then_some(field::GIB_OVER_64))?,
            app: self.app.map(|app| take(app).map(|field| field.text().to_owned())).transpose()?,
        })
    }
}
