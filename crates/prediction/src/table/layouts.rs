//! Columns of each table layout, and the conversion of rows into samples.

use csv::StringRecord;
use units::{
    Bytes, Fraction, UnixMs,
    limits::{CORES_PER_HOST_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, TRACE_SECONDS_MAX},
};

use super::{CUSTOM_COLUMNS, InvalidValue, Layout, TableError, line_number};
use crate::frigid::{Groups, Outcome, VmRequest, VmUsage, backtest::VmSample};

const MEMORY_RULE: &str = "must be a number above 0 and at most 64 TiB";
const MEMORY_OR_ZERO_RULE: &str = "must be a number from 0 to 64 TiB";
const CORES_RULE: &str = "must be a number from 0 to 4096";
const SECONDS_RULE: &str = "must be a number of seconds from 0 to 100 years";
const MILLISECONDS_RULE: &str =
    "must be a whole number of milliseconds since the start of 1970, at most 100 years";
const WEEK_RULE: &str = "must be a whole number from 0 to 5200";
const SHARE_RULE: &str = "must be a number of at most 1";
const PERCENT_RULE: &str = "must be a number from 0 to 1000000";
const FLAG_RULE: &str = "must be 0 or 1";
const END_TIME_RULE: &str = "must not be before the start of the VM";

const _: () = assert!(
    CORES_PER_HOST_MAX == 4096 && LOCAL_MEMORY_MIB_PER_HOST_MAX == 64 << 20 && WEEKS_MAX == 5200,
    "the limits must match the texts of the rules"
);
const _: () = assert!(
    TRACE_SECONDS_MAX == 100 * 366 * 24 * 3600,
    "the limit must match the texts of the rules for seconds and milliseconds"
);
/// Largest memory size, in bytes.
const MEMORY_BYTES_MAX: f64 = (LOCAL_MEMORY_MIB_PER_HOST_MAX << 20) as f64;
/// Largest CPU utilization, in percent of one core. It allows for hosts with thousands of cores.
const PERCENT_MAX: f64 = 1e6;
const TIMESTAMP_MS_MAX: u64 = TRACE_SECONDS_MAX * 1000;
const GIB: f64 = (1_u64 << 30) as f64;
const KIB: f64 = 1024.0;
/// Largest length of a value in an error message, in characters. A longer value is truncated.
const SHOWN_CHARS_MAX: usize = 60;
const WEEK_MS: u64 = 7 * 24 * 3600 * 1000;
/// Largest week number, about 100 years.
const WEEKS_MAX: u64 = 5200;

/// Positions of the columns of a layout in a table.
pub(super) struct Columns {
    layout: Layout,
    /// Name of each column, and its index in a record. `None` for a missing optional column.
    at: Vec<(&'static str, Option<usize>)>,
}

impl Columns {
    /// Finds the columns of a layout in the header line.
    pub(super) fn find(layout: Layout, names: &StringRecord) -> Result<Self, TableError> {
        let expected: Vec<(&str, bool)> = match layout {
            Layout::BitbrainsWeek => BITBRAINS_COLUMNS.map(|name| (name, true)).to_vec(),
            Layout::NfcoreTasks => NFCORE_COLUMNS.map(|name| (name, true)).to_vec(),
            Layout::Custom => CUSTOM_COLUMNS.map(|(name, required, _)| (name, required)).to_vec(),
        };
        let unknown = names.iter().find(|name| expected.iter().all(|(expected, _)| expected != name));
        if let (Layout::Custom, Some(unknown)) = (layout, unknown) {
            let expected: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
            return Err(TableError::UnknownColumn(
                unknown.chars().take(SHOWN_CHARS_MAX).collect(),
                expected.join(", "),
            ));
        }
        let find = |(name, required)| {
            let mut positions =
                names.iter().enumerate().filter(|(_, other)| *other == name).map(|(at, _)| at);
            match (positions.next(), positions.next()) {
                (None, _) if required => Err(TableError::MissingColumn(name)),
                (_, Some(_)) => Err(TableError::DuplicateColumn(name)),
                (at, None) => Ok((name, at)),
            }
        };
        Ok(Self { layout, at: expected.into_iter().map(find).collect::<Result<_, _>>()? })
    }

    /// Converts one record to a sample. Returns `None` for a week in which the VM had no memory.
    pub(super) fn to_sample(&self, record: &StringRecord) -> Result<Option<VmSample>, TableError> {
        let row = RowReader { columns: self, record };
        match self.layout {
            Layout::BitbrainsWeek => row.to_bitbrains_sample(),
            Layout::NfcoreTasks => row.to_nfcore_sample().map(Some),
            Layout::Custom => row.to_custom_sample().map(Some),
        }
    }
}

const BITBRAINS_COLUMNS: [&str; 9] = [
    "vm",
    "week",
    "cores",
    "mem_cap_kb",
    "mem_p99_kb",
    "mem_mean_kb",
    "cpu_mean_pct",
    "untouched_frac",
    "suspect",
];
const NFCORE_COLUMNS: [&str; 9] = [
    "workflow",
    "process",
    "sample_tag",
    "cpus",
    "attempt",
    "start_ms",
    "complete_ms",
    "mem_requested_bytes",
    "untouched_frac",
];

/// Reader of the values of one record by column name.
struct RowReader<'a> {
    columns: &'a Columns,
    record: &'a StringRecord,
}

impl RowReader<'_> {
    /// Converts one week of a VM to a sample. Earlier weeks of the same VM are its history, because
    /// they have the same VM name.
    fn to_bitbrains_sample(&self) -> Result<Option<VmSample>, TableError> {
        let capacity = self.memory_or_zero("mem_cap_kb", KIB)?;
        if capacity == Bytes::new(0) {
            return Ok(None);
        }
        let week = self.integer("week", WEEKS_MAX, WEEK_RULE)?;
        let cores = self.number("cores", 0.0, f64::from(CORES_PER_HOST_MAX), CORES_RULE)?;
        let kind = format!("{cores} cores, {capacity}");
        let usage = VmUsage {
            p99: Some(self.memory_or_zero("mem_p99_kb", KIB)?),
            mean: Some(self.memory_or_zero("mem_mean_kb", KIB)?),
            busy_percent: Some(self.number("cpu_mean_pct", 0.0, PERCENT_MAX, PERCENT_RULE)?),
        };
        Ok(Some(VmSample {
            request: VmRequest {
                groups: Groups { vm: self.text("vm").to_owned(), kind, ..Groups::default() },
                requested: capacity,
                cores: Some(cores),
                begins: UnixMs(week * WEEK_MS),
            },
            outcome: Outcome {
                // The sample ends before the next week of the same VM starts.
                ended: UnixMs((week + 1) * WEEK_MS - 1),
                untouched: self.untouched_fraction("untouched_frac")?,
                usage,
            },
            is_trusted: !self.flag("suspect")?,
        }))
    }

    /// Converts a workflow task to a sample. Tasks of the same process and attempt have the same
    /// owner. Tasks of the same process and input sample count as the same VM.
    fn to_nfcore_sample(&self) -> Result<VmSample, TableError> {
        let begins = self.integer("start_ms", TIMESTAMP_MS_MAX, MILLISECONDS_RULE)?;
        let ended = self.integer("complete_ms", TIMESTAMP_MS_MAX, MILLISECONDS_RULE)?;
        self.check(begins <= ended, "complete_ms", END_TIME_RULE)?;
        let process = self.text("process");
        Ok(VmSample {
            request: VmRequest {
                groups: Groups {
                    vm: format!("{process} {}", self.text("sample_tag")),
                    key: format!("{process} attempt {}", self.text("attempt")),
                    kind: format!("{} {process}", self.text("workflow")),
                    place: self.text("workflow").to_owned(),
                },
                requested: self.memory("mem_requested_bytes", 1.0)?,
                cores: Some(self.number("cpus", 0.0, f64::from(CORES_PER_HOST_MAX), CORES_RULE)?),
                begins: UnixMs(begins),
            },
            outcome: Outcome {
                ended: UnixMs(ended),
                untouched: self.untouched_fraction("untouched_frac")?,
                usage: VmUsage::default(),
            },
            is_trusted: true,
        })
    }

    /// Converts a row of a custom table to a sample.
    fn to_custom_sample(&self) -> Result<VmSample, TableError> {
        let requested = self.memory("requested_gib", GIB)?;
        let peak = self.memory_or_zero("peak_gib", GIB)?;
        let [began, ended] = [self.timestamp("began_s")?, self.timestamp("ended_s")?];
        self.check(began <= ended, "ended_s", END_TIME_RULE)?;
        let untouched = 1.0 - (peak.get() as f64 / requested.get() as f64).min(1.0);
        let group = |name| self.text(name).to_owned();
        let is_present = |name| !self.text(name).is_empty();
        let memory = |name| is_present(name).then(|| self.memory_or_zero(name, GIB)).transpose();
        let number =
            |name, max, rule| is_present(name).then(|| self.number(name, 0.0, max, rule)).transpose();
        let (vm, key, kind, place) = (group("vm"), group("key"), group("kind"), group("place"));
        Ok(VmSample {
            request: VmRequest {
                groups: Groups { vm, key, kind, place },
                requested,
                cores: number("cores", f64::from(CORES_PER_HOST_MAX), CORES_RULE)?,
                begins: began,
            },
            outcome: Outcome {
                ended,
                untouched: Fraction::new(untouched).expect("1 minus a fraction is a fraction"),
                usage: VmUsage {
                    p99: memory("p99_gib")?,
                    mean: memory("mean_gib")?,
                    busy_percent: number("busy_percent", PERCENT_MAX, PERCENT_RULE)?,
                },
            },
            is_trusted: !(is_present("suspect") && self.flag("suspect")?),
        })
    }

    /// Returns the trimmed value of a column, or an empty text if the table has no such column.
    fn text(&self, name: &str) -> &str {
        let at = self.columns.at.iter().find(|(other, _)| *other == name).and_then(|(_, at)| *at);
        at.and_then(|at| self.record.get(at)).unwrap_or_default().trim()
    }

    fn number(&self, name: &'static str, min: f64, max: f64, rule: &'static str) -> Result<f64, TableError> {
        let number = self.text(name).parse().unwrap_or(f64::NAN);
        self.check((min..=max).contains(&number), name, rule)?;
        Ok(number)
    }

    fn integer(&self, name: &'static str, max: u64, rule: &'static str) -> Result<u64, TableError> {
        let integer = self.text(name).parse().ok().filter(|integer| *integer <= max);
        self.check(integer.is_some(), name, rule)?;
        Ok(integer.unwrap_or_default())
    }

    /// Reads a memory size above 0. `unit` is the number of bytes per unit of the column.
    fn memory(&self, name: &'static str, unit: f64) -> Result<Bytes, TableError> {
        let memory = self.memory_in_unit(name, unit, MEMORY_RULE)?;
        self.check(memory > Bytes::new(0), name, MEMORY_RULE)?;
        Ok(memory)
    }

    fn memory_or_zero(&self, name: &'static str, unit: f64) -> Result<Bytes, TableError> {
        self.memory_in_unit(name, unit, MEMORY_OR_ZERO_RULE)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    fn memory_in_unit(&self, name: &'static str, unit: f64, rule: &'static str) -> Result<Bytes, TableError> {
        Ok(Bytes::new((self.number(name, 0.0, MEMORY_BYTES_MAX / unit, rule)? * unit) as u64))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    fn timestamp(&self, name: &'static str) -> Result<UnixMs, TableError> {
        let seconds = self.number(name, 0.0, TRACE_SECONDS_MAX as f64, SECONDS_RULE)?;
        Ok(UnixMs((seconds * 1000.0) as u64))
    }

    /// Reads an untouched fraction. A negative fraction, for a VM that used more memory than it
    /// requested, counts as 0.
    fn untouched_fraction(&self, name: &'static str) -> Result<Fraction, TableError> {
        let share = self.number(name, f64::MIN, 1.0, SHARE_RULE)?;
        Ok(Fraction::new(share.max(0.0)).expect("`number` has checked the range"))
    }

    fn flag(&self, name: &'static str) -> Result<bool, TableError> {
        let text = self.text(name);
        self.check(matches!(text, "0" | "1"), name, FLAG_RULE)?;
        Ok(text == "1")
    }

    fn check(&self, is_valid: bool, field: &'static str, rule: &'static str) -> Result<(), TableError> {
        let value = || self.text(field).chars().take(SHOWN_CHARS_MAX).collect();
        let error =
            || InvalidValue { line: line_number(self.record), field, value: value(), rule: rule.into() };
        if is_valid { Ok(()) } else { Err(error().into()) }
    }
}
