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
const SECONDS_RULE: &str = "must be empty or a number of seconds from 0 to 100 years";

const _: () = assert!(
    CORES_PER_HOST_MAX == 4096 && LOCAL_MEMORY_MIB_PER_HOST_MAX == 64 << 20,
    "limits match the rule texts"
);
const _: () = assert!(TRACE_SECONDS_MAX == 100 * 366 * 24 * 3600, "limit matches the rule text");

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
        let value = || self.text.chars().take(SHOWN_VALUE_CHARS_MAX).collect();
        if is_valid {
            Ok(())
        } else {
            Err(MalformedRow { line: self.line, field: self.name, value: value(), rule })
        }
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
        let seconds = self.parse_number().filter(|s| (0.0..=TRACE_SECONDS_MAX as f64).contains(s));
        let span = seconds.and_then(|s| std::time::Duration::try_from_secs_f64(s).ok());
        self.require(span.map(|span| Some(Ns::from(span))), SECONDS_RULE)
    }

    pub(super) fn parse_cores(&self, bucket: Option<(&str, u32)>) -> Result<u32, MalformedRow> {
        let cores = self.bucket_value(bucket).or_else(|| self.text.parse().ok());
        self.require(cores.filter(|cores| (1..=CORES_PER_HOST_MAX).contains(cores)), CORES_RULE)
    }

    #[expect(clippy::cast_precision_loss, reason = "64 TiB in MiB is far below 2^53")]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "range checked above")]
    pub(super) fn parse_memory(&self, bucket: Option<(&str, u32)>) -> Result<Bytes, MalformedRow> {
        let gib = self.bucket_value(bucket).map(f64::from).or_else(|| self.parse_number());
        let mib = gib.map(|gib| (gib * MIB_PER_GIB).round());
        let mib = mib.filter(|mib| (1.0..=LOCAL_MEMORY_MIB_PER_HOST_MAX as f64).contains(mib));
        self.require(mib.map(|mib| Bytes::mib(mib as u64)), MEMORY_RULE)
    }

    fn bucket_value(&self, bucket: Option<(&str, u32)>) -> Option<u32> {
        bucket.filter(|(name, _)| *name == self.text).map(|(_, value)| value)
    }

    /// Parses a decimal number. Returns `None` for `inf`, `nan`, signs and exponents.
    fn parse_number(&self) -> Option<f64> {
        let plain = |c: char| c.is_ascii_digit() || c == '.';
        if self.text.chars().all(plain) { self.text.parse().ok() } else { None }
    }
}
