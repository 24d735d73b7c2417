//! Report of the replay: checks and formatting. `tarn replay` produces it.

use std::{fmt, fs, path::Path};

use serde_json::{Value, json};

use super::{guest::GuestTold, write};
use crate::failure::Failure;

/// Counts that must be 0.
const AUDITS: &[(&str, &str)] = &[
    ("/audit/double_owned", "slices with two owners"),
    ("/audit/granted_dirty", "slices granted without a scrub"),
    ("/audit/acknowledged_lost", "acknowledged requests lost"),
];
/// Further counts.
const LINES: &[(&str, &str)] = &[
    ("/vms/requested", "VMs requested"),
    ("/vms/placed", "VMs placed"),
    ("/vms/rejected", "VMs rejected"),
    ("/vms/lost", "VMs lost with their host"),
    ("/slices/capacity", "slices in the rack"),
    ("/slices/peak_in_use", "slices in use, peak"),
    ("/slices/moved_between_hosts", "slices moved between hosts"),
    ("/reserve_ms/p50", "reservation p50, ms"),
    ("/reserve_ms/p99", "reservation p99, ms"),
    ("/duration_s", "duration, s"),
];

/// A replay's report.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    report: Value,
}

impl Verdict {
    /// Reads it.
    ///
    /// # Errors
    /// There is none, or it is not JSON.
    pub fn read(file: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(file).map_err(Failure::file("read", file))?;
        let report = serde_json::from_str(&text)
            .map_err(|wrong| Failure::Answer { program: "tarn replay".to_owned(), why: wrong.to_string() })?;
        Ok(Self { report })
    }

    /// Adds the report of a guest, or its absence.
    #[must_use]
    pub fn with_guest(mut self, guest: Option<&GuestTold>) -> Self {
        let told = guest.map(|guest| serde_json::to_value(guest).expect("it has only texts and numbers"));
        self.report["guest"] = told.unwrap_or_else(|| json!({ "booted": false }));
        self
    }

    /// Writes it where it was asked for.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, file: Option<&Path>) -> Result<(), Failure> {
        file.map_or(Ok(()), |file| write(file, &format!("{:#}\n", self.report)))
    }

    /// Good if everything was audited and found to be 0. Where no slice was ever lent there was nothing to look at.
    ///
    /// # Errors
    /// It is not.
    pub fn judge(&self) -> Result<(), Failure> {
        let none = Value::from(0);
        let idle = self.at("/slices/peak_in_use") == Some(&none);
        let wrong = AUDITS.iter().filter(|(at, _)| self.at(at).map_or(!idle, |found| *found != none));
        let wrong: Vec<String> = wrong.map(|(at, what)| format!("{}: {what}", self.word(at))).collect();
        if wrong.is_empty() { Ok(()) } else { Err(Failure::Result(format!("audit: {}", wrong.join(", ")))) }
    }

    fn at(&self, pointer: &str) -> Option<&Value> {
        self.report.pointer(pointer).filter(|value| !value.is_null())
    }

    fn word(&self, pointer: &str) -> String {
        match self.at(pointer) {
            None => "not known".to_owned(),
            Some(value) => {
                value.as_f64().filter(|_| value.is_f64()).map_or(value.to_string(), |x| format!("{x:.2}"))
            }
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n● the result")?;
        for (at, what) in LINES.iter().chain(AUDITS) {
            writeln!(f, "  {:>10}  {what}", self.word(at))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(double_owned: Value) -> Verdict {
        let audit = json!({"double_owned": double_owned, "granted_dirty": 0, "acknowledged_lost": 0});
        Verdict { report: json!({"vms": {"placed": 7}, "reserve_ms": {"p50": 1.234}, "audit": audit}) }
    }

    #[test]
    fn a_clean_audit_is_good() {
        assert!(verdict(json!(0)).judge().is_ok());
    }

    #[test]
    fn anything_found_is_not_good_and_neither_is_not_having_looked() {
        assert_eq!(verdict(json!(3)).judge().unwrap_err().to_string(), "audit: 3: slices with two owners");
        let blind = verdict(Value::Null).judge().unwrap_err();
        assert_eq!(blind.to_string(), "audit: not known: slices with two owners");
    }

    #[test]
    fn a_rack_that_lent_nothing_cannot_have_lent_it_dirty() {
        let mut idle = verdict(Value::Null);
        idle.report["slices"] = json!({"peak_in_use": 0});
        assert!(idle.judge().is_ok());
    }

    #[test]
    fn people_read_short_numbers() {
        let text = verdict(json!(0)).to_string();
        assert!(text.contains("         7  VMs placed\n"), "{text}");
        assert!(text.contains("      1.23  reservation p50, ms\n"), "{text}");
    }
}
