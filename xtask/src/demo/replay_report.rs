//! Reads, checks and formats the report that `tarn replay` writes.

use std::{fmt, fs, path::Path};

use serde_json::{Value, json};

use super::{guest::GuestReport, write_file};
use crate::failure::Failure;

/// Audit counts that must be 0: JSON pointer and label.
const AUDIT_COUNTS: &[(&str, &str)] = &[
    ("/audit/double_owned", "slices with two owners"),
    ("/audit/granted_dirty", "slices granted without a scrub"),
    ("/audit/acknowledged_lost", "acknowledged requests lost"),
];
/// Other counts and times in the report: JSON pointer and label.
const REPORTED_VALUES: &[(&str, &str)] = &[
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

/// Report of a replay, as JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayReport {
    report: Value,
}

impl ReplayReport {
    /// Reads a report from a file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not JSON.
    pub fn read(file: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(file).map_err(Failure::file_error("read", file))?;
        let report = serde_json::from_str(&text).map_err(|error| Failure::UnexpectedOutput {
            program: "tarn replay".to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self { report })
    }

    /// Adds the report of the guest. Without a report, adds that the guest did not boot.
    #[must_use]
    pub fn with_guest(mut self, guest: Option<&GuestReport>) -> Self {
        let value =
            guest.map(|guest| serde_json::to_value(guest).expect("a report has only strings and numbers"));
        self.report["guest"] = value.unwrap_or_else(|| json!({ "booted": false }));
        self
    }

    /// Writes the report to a file, if a path is given.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn save_report(&self, file: Option<&Path>) -> Result<(), Failure> {
        file.map_or(Ok(()), |file| write_file(file, &format!("{:#}\n", self.report)))
    }

    /// Checks that all audit counts are present and 0. Missing counts are allowed if no slice was
    /// ever in use.
    ///
    /// # Errors
    /// Returns [`Failure::BadResult`] with the counts that are missing or not 0.
    pub fn check(&self) -> Result<(), Failure> {
        let zero = Value::from(0);
        let is_idle = self.value("/slices/peak_in_use") == Some(&zero);
        let failed =
            AUDIT_COUNTS.iter().filter(|(path, _)| self.value(path).map_or(!is_idle, |count| *count != zero));
        let failed: Vec<String> =
            failed.map(|(path, label)| format!("{}: {label}", self.format_value(path))).collect();
        if failed.is_empty() {
            Ok(())
        } else {
            Err(Failure::BadResult(format!("audit: {}", failed.join(", "))))
        }
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
        for (path, label) in REPORTED_VALUES.iter().chain(AUDIT_COUNTS) {
            writeln!(f, "  {:>10}  {label}", self.format_value(path))?;
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
    fn audit_with_nonzero_or_missing_count_fails() {
        assert_eq!(
            report_with(json!(3)).check().unwrap_err().to_string(),
            "audit: 3: slices with two owners"
        );
        let unaudited = report_with(Value::Null).check().unwrap_err();
        assert_eq!(unaudited.to_string(), "audit: unknown: slices with two owners");
    }

    #[test]
    fn idle_rack_passes_without_audit() {
        let mut idle = report_with(Value::Null);
        idle.report["slices"] = json!({"peak_in_use": 0});
        assert!(idle.check().is_ok());
    }

    #[test]
    fn floats_are_printed_with_two_decimals() {
        let text = report_with(json!(0)).to_string();
        assert!(text.contains("         7  VMs placed\n"), "{text}");
        assert!(text.contains("      1.23  reservation p50, ms\n"), "{text}");
    }
}
