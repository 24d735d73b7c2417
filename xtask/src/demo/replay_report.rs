//! Report of the replay: checks and formatting. `tarn replay` produces it.

use std::{fmt, fs, path::Path};

use serde_json::{Value, json};

use super::{guest::GuestReport, write};
use crate::failure::Failure;

/// Counts that must be 0.
const AUDITS: &[(&str, &str)] = &[
    ("/audit/double_owned", "slices with two owners"),
    ("/audit/granted_dirty", "slices granted without a scrub"),
    ("/audit/acknowledged_lost", "acknowledged requests lost"),
];
/// Further counts.
const COUNTS: &[(&str, &str)] = &[
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

/// Report of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    report: Value,
}

impl ReplayReport {
    /// Reads a report.
    ///
    /// # Errors
    /// The file cannot be read, or is not JSON.
    pub fn read(file: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(file).map_err(Failure::file("read", file))?;
        let report = serde_json::from_str(&text).map_err(|error| Failure::UnexpectedOutput {
            program: "tarn replay".to_owned(),
            why: error.to_string(),
        })?;
        Ok(Self { report })
    }

    /// Adds the report of a guest, or its absence.
    #[must_use]
    pub fn with_guest(mut self, guest: Option<&GuestReport>) -> Self {
        let value =
            guest.map(|guest| serde_json::to_value(guest).expect("a report has only strings and numbers"));
        self.report["guest"] = value.unwrap_or_else(|| json!({ "booted": false }));
        self
    }

    /// Writes the report to a file, if one is given.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, file: Option<&Path>) -> Result<(), Failure> {
        file.map_or(Ok(()), |file| write(file, &format!("{:#}\n", self.report)))
    }

    /// Checks that all audited counts are present and 0. A rack that never had a slice in use needs
    /// no audit.
    ///
    /// # Errors
    /// [`Failure::Result`] with the counts that are missing or not 0.
    pub fn check(&self) -> Result<(), Failure> {
        let zero = Value::from(0);
        let is_idle = self.value("/slices/peak_in_use") == Some(&zero);
        let failed =
            AUDITS.iter().filter(|(path, _)| self.value(path).map_or(!is_idle, |count| *count != zero));
        let failed: Vec<String> =
            failed.map(|(path, what)| format!("{}: {what}", self.format_value(path))).collect();
        if failed.is_empty() { Ok(()) } else { Err(Failure::Result(format!("audit: {}", failed.join(", ")))) }
    }

    fn value(&self, pointer: &str) -> Option<&Value> {
        self.report.pointer(pointer).filter(|value| !value.is_null())
    }

    fn format_value(&self, pointer: &str) -> String {
        match self.value(pointer) {
            None => "unknown".to_owned(),
            Some(value) => {
                value.as_f64().filter(|_| value.is_f64()).map_or(value.to_string(), |x| format!("{x:.2}"))
            }
        }
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n● result")?;
        for (path, what) in COUNTS.iter().chain(AUDITS) {
            writeln!(f, "  {:>10}  {what}", self.format_value(path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report_with(double_owned: Value) -> ReplayReport {
        let audit = json!({"double_owned": double_owned, "granted_dirty": 0, "acknowledged_lost": 0});
        ReplayReport { report: json!({"vms": {"placed": 7}, "reserve_ms": {"p50": 1.234}, "audit": audit}) }
    }

    #[test]
    fn clean_audit_passes() {
        assert!(report_with(json!(0)).check().is_ok());
    }

    #[test]
    fn audit_with_findings_or_without_result_fails() {
        assert_eq!(
            report_with(json!(3)).check().unwrap_err().to_string(),
            "audit: 3: slices with two owners"
        );
        let unaudited = report_with(Value::Null).check().unwrap_err();
        assert_eq!(unaudited.to_string(), "audit: unknown: slices with two owners");
    }

    #[test]
    fn idle_rack_passes_without_audit() {
        let mut is_idle = report_with(Value::Null);
        is_idle.report["slices"] = json!({"peak_in_use": 0});
        assert!(is_idle.check().is_ok());
    }

    #[test]
    fn floats_have_two_decimals() {
        let text = report_with(json!(0)).to_string();
        assert!(text.contains("         7  VMs placed\n"), "{text}");
        assert!(text.contains("      1.23  reservation p50, ms\n"), "{text}");
    }
}
