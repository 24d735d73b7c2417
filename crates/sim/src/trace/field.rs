//! Parsing and validation of one value in a row of a trace.

use units::{
    Bytes, Ns,
    limits::{CORES_PER_HOST_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, TRACE_SECONDS_MAX},
};

use super::MalformedRow;

/// Bucket `>24` in Azure's column of cores, and the number of cores used for this bucket.
pub(super) const CORES_OVER_24: (&str, u32) = (">24", 30);
/// Bucket `>64` in Azure's column of memory, and the number of GiB used for this bucket.
pub(super) const GIB_OVER_64: (&str, u32) = (">64", 70);
/// Maximum length of an invalid value in an error message, in characters.
const SHOWN_VALUE_CHARS_MAX: usize = 80;
const MIB_PER_GIB: f64 = 1024.0;

const CORES_RULE: &str = "must be a whole number of cores from 1 to 4096";
const MEMORY_RULE: &str = "must be a number of GB that is at least 1 MiB and at most 64 TiB";
const MILLICORES_RULE: &str = "must be a whole number of thousandths of a core, from 1 to 4096 cores";
const MEMORY_MIB_RULE: &str = "must be a number of MiB that is at least 1 and at most 64 TiB";
const TOUCHED_RULE: &str = "must be empty or a number of GB that is at most the VM's memory";
const SECONDS_RULE: &str = "must be empty or a number of seconds from 0 to 100 years";

const _: () = assert!(
    CORES_PER_HOST_MAX == 4096 && LOCAL_MEMORY_MIB_PER_HOST_MAX == 64 << 20,
    "limits match the rule texts"
);
const _: () = assert!(TRACE_SECONDS_MAX == 100 * 366 * 24 * 3600, "limit matches the rule text");

/// Unit of the column with the cores of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CoresUnit {
    Cores,
    /// Cores, or the bucket [`CORES_OVER_24`].
    CoresOrBucket,
    /// Thousandths of a core. They are rounded up to whole cores.
    Millicores,
}

/// Unit of the column with the memory of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemoryUnit {
    Gb,
    /// GB, or the bucket [`GIB_OVER_64`].
    GbOrBucket,
    Mib,
}

/// Text of one value with its line number and column name, for error messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    line: u64,
    name: &'static str,
    text: &'a str,
}

impl<'a> Field<'a> {
    pub(super) fn new(line: u64, name: &'static str, bytes: &'a [u8]) -> Result<Self, MalformedRow> {
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Self { line, name, text: text.trim() }),
            Err(_) => {
                let value = String::from_utf8_lossy(bytes).chars().take(SHOWN_VALUE_CHARS_MAX).collect();
                Err(MalformedRow { line, field: name, value, rule: "must be UTF-8" })
            }
        }
    }

    pub(super) fn check_rule(&self, is_valid: bool, rule: &'static str) -> Result<(), MalformedRow> {
        if is_valid { Ok(()) } else { Err(self.error(rule)) }
    }

    /// Returns the error for a value that violates a rule.
    pub(super) fn error(&self, rule: &'static str) -> MalformedRow {
        let value = self.text.chars().take(SHOWN_VALUE_CHARS_MAX).collect();
        MalformedRow { line: self.line, field: self.name, value, rule }
    }

    fn require<T>(&self, value: Option<T>, rule: &'static str) -> Result<T, MalformedRow> {
        self.check_rule(value.is_some(), rule)?;
        Ok(value.expect("checked above"))
    }

    pub(super) fn text(&self) -> &'a str {
        self.text
    }

    pub(super) fn non_empty_text(&self) -> Result<&'a str, MalformedRow> {
        self.check_rule(!self.text.is_empty(), "must not be empty")?;
        Ok(self.text)
    }

    /// Parses a time in seconds. Returns `None` for an empty value.
    #[expect(clippy::cast_precision_loss, reason = "a century of seconds is far below 2^53")]
    pub(super) fn parse_seconds(&self) -> Result<Option<Ns>, MalformedRow> {
        if self.text.is_empty() {
            return Ok(None);
        }
        if let Some(seconds) = self.parse_whole_number().filter(|seconds| *seconds <= TRACE_SECONDS_MAX) {
            return Ok(Some(Ns::secs(seconds)));
        }
        let seconds = self.parse_number().filter(|s| (0.0..=TRACE_SECONDS_MAX as f64).contains(s));
        let span = seconds.and_then(|s| std::time::Duration::try_from_secs_f64(s).ok());
        self.require(span.map(|span| Some(Ns::from(span))), SECONDS_RULE)
    }

    pub(super) fn parse_cores(&self, unit: CoresUnit) -> Result<u32, MalformedRow> {
        let (cores, rule) = match unit {
            CoresUnit::Cores => (self.text.parse().ok(), CORES_RULE),
            CoresUnit::CoresOrBucket => {
                (bucket_value(self.text, CORES_OVER_24).or_else(|| self.text.parse().ok()), CORES_RULE)
            }
            CoresUnit::Millicores => {
                (self.text.parse().ok().map(|thousandths: u32| thousandths.div_ceil(1000)), MILLICORES_RULE)
            }
        };
        self.require(cores.filter(|cores| (1..=CORES_PER_HOST_MAX).contains(cores)), rule)
    }

    /// Parses a size, and rounds it to whole MiB.
    pub(super) fn parse_memory(&self, unit: MemoryUnit) -> Result<Bytes, MalformedRow> {
        let gib = match unit {
            MemoryUnit::Gb => self.parse_number(),
            MemoryUnit::GbOrBucket => {
                bucket_value(self.text, GIB_OVER_64).map(f64::from).or_else(|| self.parse_number())
            }
            MemoryUnit::Mib => self.parse_number().map(|mib| mib / MIB_PER_GIB),
        };
        let rule = if unit == MemoryUnit::Mib { MEMORY_MIB_RULE } else { MEMORY_RULE };
        self.require(gib.and_then(|gib| to_whole_mib(gib, 1)), rule)
    }

    /// Parses the touched part of a VM's memory. Returns `None` for an empty value.
    pub(super) fn parse_touched(&self, memory: Bytes) -> Result<Option<Bytes>, MalformedRow> {
        if self.text.is_empty() {
            return Ok(None);
        }
        let touched = self.parse_number().and_then(|gib| to_whole_mib(gib, 0));
        self.require(touched.filter(|touched| *touched <= memory).map(Some), TOUCHED_RULE)
    }

    /// Parses the number of a socket. Returns `None` for an empty value.
    pub(super) fn parse_socket(&self) -> Result<Option<u32>, MalformedRow> {
        if self.text.is_empty() {
            return Ok(None);
        }
        self.require(
            self.text.parse().ok().map(Some),
            "must be empty or the whole number of a socket, from 0",
        )
    }

    /// Parses digits, which are faster to parse than a decimal number.
    fn parse_whole_number(&self) -> Option<u64> {
        if self.text.bytes().all(|c| c.is_ascii_digit()) { self.text.parse().ok() } else { None }
    }

    /// Parses a decimal number. Returns `None` for `inf`, `nan`, signs and exponents.
    fn parse_number(&self) -> Option<f64> {
        let plain = |c: u8| c.is_ascii_digit() || c == b'.';
        if self.text.bytes().all(plain) { self.text.parse().ok() } else { None }
    }
}

fn bucket_value(text: &str, (name, value): (&str, u32)) -> Option<u32> {
    (name == text).then_some(value)
}

/// Rounds a size in GiB to whole MiB. Returns `None` for less than `mib_min` and more than the
/// memory of the largest host.
#[expect(clippy::cast_precision_loss, reason = "64 TiB in MiB is far below 2^53")]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked above")]
fn to_whole_mib(gib: f64, mib_min: u64) -> Option<Bytes> {
    let mib = (gib * MIB_PER_GIB).round();
    let range = mib_min as f64..=LOCAL_MEMORY_MIB_PER_HOST_MAX as f64;
    range.contains(&mib).then(|| Bytes::mib(mib as u64))
}
