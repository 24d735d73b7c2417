//! What each layout's columns mean.

use csv::StringRecord;
use units::{
    Bytes, Fraction, UnixMs,
    limits::{CORES_PER_HOST_MAX, LOCAL_MIB_PER_HOST_MAX, TRACE_SECONDS_MAX},
};

use super::{Layout, OWN_COLUMNS, TableError, WrongValue, line};
use crate::frigid::{Ask, Groups, Outcome, Usage, trial::Stay};

const MEMORY: &str = "must be a number above 0 of at most 64 TiB";
const MEMORY_OR_NONE: &str = "must be a number from 0 to 64 TiB";
const CORES: &str = "must be a number from 0 to 4096";
const SECONDS: &str = "must be a number of seconds from 0 to 100 years";
const MILLISECONDS: &str = "must be a whole number of milliseconds since 1970, of at most a century";
const SHARE: &str = "must be a number of at most 1";
const PERCENT: &str = "must be a number from 0 to 1000000";
const FLAG: &str = "must be 0 or 1";
const ORDER: &str = "must not be before the VM began";

const _: () = assert!(CORES_PER_HOST_MAX == 4096 && LOCAL_MIB_PER_HOST_MAX == 64 << 20, "as the rules say");
const _: () = assert!(TRACE_SECONDS_MAX == 100 * 366 * 24 * 3600, "as the rule says");
const MEMORY_MAX: f64 = (LOCAL_MIB_PER_HOST_MAX << 20) as f64;
/// Of one processor, on a host of thousands.
const PERCENT_MAX: f64 = 1e6;
const MILLISECONDS_MAX: u64 = TRACE_SECONDS_MAX * 1000;
const GIB: f64 = (1_u64 << 30) as f64;
const KIB: f64 = 1024.0;
/// How much of a wrong value is shown.
const SHOWN_CHARS_MAX: usize = 60;
const WEEK_MS: u64 = 7 * 24 * 3600 * 1000;
/// Weeks of a century.
const WEEKS_MAX: u64 = 5200;

/// Where a layout's columns stand.
pub(super) struct Columns {
    layout: Layout,
    at: Vec<(&'static str, Option<usize>)>,
}

impl Columns {
    /// Looks for them in the first line.
    pub(super) fn find(layout: Layout, names: &StringRecord) -> Result<Self, TableError> {
        let wanted: Vec<(&str, bool)> = match layout {
            Layout::BitbrainsWeek => BITBRAINS.map(|name| (name, true)).to_vec(),
            Layout::NfcoreTasks => NFCORE.map(|name| (name, true)).to_vec(),
            Layout::Own => OWN_COLUMNS.map(|(name, must, _)| (name, must)).to_vec(),
        };
        let unknown = names.iter().find(|name| wanted.iter().all(|(known, _)| known != name));
        if let (Layout::Own, Some(unknown)) = (layout, unknown) {
            let known: Vec<&str> = wanted.iter().map(|(name, _)| *name).collect();
            return Err(TableError::Unknown(
                unknown.chars().take(SHOWN_CHARS_MAX).collect(),
                known.join(", "),
            ));
        }
        let find = |(name, must)| {
            let mut places = names.iter().enumerate().filter(|(_, other)| *other == name).map(|(at, _)| at);
            match (places.next(), places.next()) {
                (None, _) if must => Err(TableError::Missing(name)),
                (_, Some(_)) => Err(TableError::Twice(name)),
                (at, None) => Ok((name, at)),
            }
        };
        Ok(Self { layout, at: wanted.into_iter().map(find).collect::<Result<_, _>>()? })
    }

    /// One line; nothing if it is of a VM that had no memory.
    pub(super) fn row(&self, record: &StringRecord) -> Result<Option<Stay>, TableError> {
        let line = Line { columns: self, record };
        match self.layout {
            Layout::BitbrainsWeek => line.week(),
            Layout::NfcoreTasks => line.task().map(Some),
            Layout::Own => line.own().map(Some),
        }
    }
}

const BITBRAINS: [&str; 9] = [
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
const NFCORE: [&str; 9] = [
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

/// One line and what its columns are called.
struct Line<'a> {
    columns: &'a Columns,
    record: &'a StringRecord,
}

impl Line<'_> {
    /// A VM's week is a stay of its own: it begins anew, with what is known of its weeks before.
    fn week(&self) -> Result<Option<Stay>, TableError> {
        let capacity = self.memory_or_none("mem_cap_kb", KIB)?;
        if capacity == Bytes::new(0) {
            return Ok(None);
        }
        let week = self.whole("week", WEEKS_MAX, "must be a whole number of weeks of one century")?;
        let cores = self.number("cores", 0.0, f64::from(CORES_PER_HOST_MAX), CORES)?;
        let kind = format!("{cores} cores, {capacity}");
        let usage = Usage {
            p99: Some(self.memory_or_none("mem_p99_kb", KIB)?),
            mean: Some(self.memory_or_none("mem_mean_kb", KIB)?),
            busy_percent: Some(self.number("cpu_mean_pct", 0.0, PERCENT_MAX, PERCENT)?),
        };
        Ok(Some(Stay {
            ask: Ask {
                groups: Groups { vm: self.text("vm").to_owned(), kind, ..Groups::default() },
                requested: capacity,
                cores: Some(cores),
                begins: UnixMs(week * WEEK_MS),
            },
            outcome: Outcome {
                ended: UnixMs((week + 1) * WEEK_MS - 1), // before the next one begins
                untouched: self.share("untouched_frac")?,
                usage,
            },
            sound: !self.flag("suspect")?,
        }))
    }

    /// Tasks of one process are one customer's VMs; those of a sample, the same VM again.
    fn task(&self) -> Result<Stay, TableError> {
        let begins = self.whole("start_ms", MILLISECONDS_MAX, MILLISECONDS)?;
        let ended = self.whole("complete_ms", MILLISECONDS_MAX, MILLISECONDS)?;
        self.check(begins <= ended, "complete_ms", ORDER)?;
        let process = self.text("process");
        Ok(Stay {
            ask: Ask {
                groups: Groups {
                    vm: format!("{process} {}", self.text("sample_tag")),
                    key: format!("{process} attempt {}", self.text("attempt")),
                    kind: format!("{} {process}", self.text("workflow")),
                    place: self.text("workflow").to_owned(),
                },
                requested: self.memory("mem_requested_bytes", 1.0)?,
                cores: Some(self.number("cpus", 0.0, f64::from(CORES_PER_HOST_MAX), CORES)?),
                begins: UnixMs(begins),
            },
            outcome: Outcome {
                ended: UnixMs(ended),
                untouched: self.share("untouched_frac")?,
                usage: Usage::default(),
            },
            sound: true,
        })
    }

    fn own(&self) -> Result<Stay, TableError> {
        let requested = self.memory("requested_gib", GIB)?;
        let peak = self.memory_or_none("peak_gib", GIB)?;
        let [began, ended] = [self.moment("began_s")?, self.moment("ended_s")?];
        self.check(began <= ended, "ended_s", ORDER)?;
        let untouched = 1.0 - (peak.get() as f64 / requested.get() as f64).min(1.0);
        let group = |name| self.text(name).to_owned();
        let some = |name| !self.text(name).is_empty();
        let memory = |name| some(name).then(|| self.memory_or_none(name, GIB)).transpose();
        let number = |name, max, rule| some(name).then(|| self.number(name, 0.0, max, rule)).transpose();
        let (vm, key, kind, place) = (group("vm"), group("key"), group("kind"), group("place"));
        Ok(Stay {
            ask: Ask {
                groups: Groups { vm, key, kind, place },
                requested,
                cores: number("cores", f64::from(CORES_PER_HOST_MAX), CORES)?,
                begins: began,
            },
            outcome: Outcome {
                ended,
                untouched: Fraction::new(untouched).expect("one less a share"),
                usage: Usage {
                    p99: memory("p99_gib")?,
                    mean: memory("mean_gib")?,
                    busy_percent: number("busy_percent", PERCENT_MAX, PERCENT)?,
                },
            },
            sound: !(some("suspect") && self.flag("suspect")?),
        })
    }

    fn text(&self, name: &str) -> &str {
        let at = self.columns.at.iter().find(|(other, _)| *other == name).and_then(|(_, at)| *at);
        at.and_then(|at| self.record.get(at)).unwrap_or_default().trim()
    }

    fn number(&self, name: &'static str, min: f64, max: f64, rule: &'static str) -> Result<f64, TableError> {
        let number = self.text(name).parse().unwrap_or(f64::NAN);
        self.check((min..=max).contains(&number), name, rule)?;
        Ok(number)
    }

    fn whole(&self, name: &'static str, max: u64, rule: &'static str) -> Result<u64, TableError> {
        let whole = self.text(name).parse().ok().filter(|whole| *whole <= max);
        self.check(whole.is_some(), name, rule)?;
        Ok(whole.unwrap_or_default())
    }

    fn memory(&self, name: &'static str, unit: f64) -> Result<Bytes, TableError> {
        let memory = self.scaled(name, unit, MEMORY)?;
        self.check(memory > Bytes::new(0), name, MEMORY)?;
        Ok(memory)
    }

    fn memory_or_none(&self, name: &'static str, unit: f64) -> Result<Bytes, TableError> {
        self.scaled(name, unit, MEMORY_OR_NONE)
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    fn scaled(&self, name: &'static str, unit: f64, rule: &'static str) -> Result<Bytes, TableError> {
        Ok(Bytes::new((self.number(name, 0.0, MEMORY_MAX / unit, rule)? * unit) as u64))
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    fn moment(&self, name: &'static str) -> Result<UnixMs, TableError> {
        let seconds = self.number(name, 0.0, TRACE_SECONDS_MAX as f64, SECONDS)?;
        Ok(UnixMs((seconds * 1000.0) as u64))
    }

    /// Who used more than it asked for left nothing.
    fn share(&self, name: &'static str) -> Result<Fraction, TableError> {
        let share = self.number(name, f64::MIN, 1.0, SHARE)?;
        Ok(Fraction::new(share.max(0.0)).expect("it was checked"))
    }

    fn flag(&self, name: &'static str) -> Result<bool, TableError> {
        let text = self.text(name);
        self.check(matches!(text, "0" | "1"), name, FLAG)?;
        Ok(text == "1")
    }

    fn check(&self, kept: bool, field: &'static str, rule: &'static str) -> Result<(), TableError> {
        let value = || self.text(field).chars().take(SHOWN_CHARS_MAX).collect();
        let wrong = || WrongValue { line: line(self.record), field, value: value(), rule };
        if kept { Ok(()) } else { Err(wrong().into()) }
    }
}
