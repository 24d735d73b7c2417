//! Report of a replay, printed as JSON, YAML or a table. A number that could not be determined is
//! null instead of 0, and the reason is printed.
//!
//! `stranded` is free local memory that cannot be used. A host has stranded memory if it accepts
//! VMs but a VM of median shape does not fit, because cores or memory are short. The median shape
//! has the lower median of the cores and of the memory of all VMs. `stranded` is a mean over the
//! time of the trace, computed from the scheduler's view at each event. Its share refers to the
//! local memory of all hosts.

use std::{fs, io, io::Write as _, time::Duration};

use cli_runtime::{
    Failure, Format, print,
    table::{self, Column, Row, col},
};
use hdrhistogram::Histogram;
use proto::v1;
use serde::Serialize;

use super::{Args, ReplayState, reachability::Reachability};

/// Report of a replay.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    vms: Vms,
    slices: SliceCounts,
    stranded: StrandedMemory,
    reserve_ms: LatencyQuantiles,
    ready_ms: LatencyQuantiles,
    audit: AuditCounts,
    duration_s: f64,
    #[serde(skip)]
    missing_checks: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Vms {
    requested: u64,
    placed: u64,
    rejected: u64,
    /// Placed VMs that died before their departure.
    lost: u64,
}

#[derive(Debug, Serialize)]
struct SliceCounts {
    capacity: u64,
    moved_between_hosts: u64,
    peak_in_use: u64,
}

#[derive(Debug, Serialize)]
struct StrandedMemory {
    local_bytes_mean: u64,
    share_mean: Option<f64>,
}

#[derive(Debug, Serialize)]
struct LatencyQuantiles {
    p50: Option<f64>,
    p99: Option<f64>,
}

/// Violations of guarantees. A number is `None` if it could not be determined.
#[derive(Debug, Serialize)]
struct AuditCounts {
    double_owned: Option<u64>,
    granted_dirty: Option<u64>,
    acknowledged_lost: Option<u64>,
    /// Number of slices that a test VMM read before using them.
    slices_read: u64,
}

/// Results of a replay that are not in the tally or the journal.
#[derive(Debug)]
pub(super) struct ReplayResults {
    pub(super) requested: usize,
    pub(super) stranded_mean: f64,
    pub(super) lost_reservations: usize,
    /// Number of slices that agents rejected because they were not zeroed.
    pub(super) dirty: usize,
    pub(super) reachability: Reachability,
    pub(super) duration: Duration,
}

impl Report {
    pub(super) fn new(
        rack: &ReplayState,
        emcs: &[v1::Emc],
        hosts: &[v1::Host],
        results: &ReplayResults,
    ) -> Self {
        let (tally, movement) = (rack.tally(), rack.journal().slice_movement());
        let dirty = tally.dirty + results.dirty as u64;
        // A slice that was never granted cannot be dirty.
        let is_zeroing_checked = tally.read > 0 || dirty > 0 || movement.peak == 0;
        let local: u64 = hosts.iter().map(|host| host.local_bytes).sum();
        Self {
            vms: Vms {
                requested: results.requested as u64,
                placed: tally.placed,
                rejected: tally.rejected,
                lost: tally.lost,
            },
            slices: SliceCounts {
                capacity: emcs.iter().map(|emc| u64::from(emc.slices)).sum(),
                moved_between_hosts: movement.moved,
                peak_in_use: movement.peak,
            },
            stranded: StrandedMemory::new(results.stranded_mean, local),
            reserve_ms: LatencyQuantiles::from_histogram(&tally.reserve),
            ready_ms: LatencyQuantiles::from_histogram(&tally.ready),
            audit: AuditCounts {
                double_owned: count_double_owned_slices(&results.reachability, &tally.overwritten),
                granted_dirty: is_zeroing_checked.then_some(dirty),
                acknowledged_lost: Some(results.lost_reservations as u64),
                slices_read: tally.read,
            },
            duration_s: results.duration.as_secs_f64(),
            missing_checks: describe_missing_checks(&results.reachability, &tally, is_zeroing_checked),
        }
    }

    /// Prints the report and the reasons for missing checks, and writes the report to a file if
    /// requested. Returns an error if guarantees were violated.
    pub(super) fn print(&self, args: &Args, format: Format) -> Result<(), Failure> {
        for line in &self.missing_checks {
            writeln!(io::stderr().lock(), "{line}").map_err(Failure::Output)?;
        }
        if let Some(path) = &args.json {
            let text =
                serde_json::to_string_pretty(self).expect("texts and numbers serialize to JSON") + "\n";
            fs::write(path, text).map_err(|errno| Failure::File {
                operation: "write",
                path: path.clone(),
                errno,
            })?;
        }
        print::value(format, self, |_| table::details(self))?;
        match self.violations() {
            0 => Ok(()),
            violations => Err(Failure::Problem(format!(
                "{violations} violations of guarantees were found: see AUDIT in the report"
            ))),
        }
    }

    fn violations(&self) -> u64 {
        let AuditCounts { double_owned, granted_dirty, acknowledged_lost, .. } = self.audit;
        [double_owned, granted_dirty, acknowledged_lost].into_iter().flatten().sum()
    }
}

/// Returns the number of slices with two owners. An overwritten slice counts, too, even if the
/// reachability check is incomplete.
fn count_double_owned_slices(
    reachability: &Reachability,
    overwritten: &std::collections::BTreeSet<u32>,
) -> Option<u64> {
    let count = reachability.double_owned.union(overwritten).count() as u64;
    if reachability.incomplete_reason().is_some() && count == 0 { None } else { Some(count) }
}

fn describe_missing_checks(
    reachability: &Reachability,
    tally: &super::tally::ReplayTally,
    is_zeroing_checked: bool,
) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(reachability.incomplete_reason().map(|reason| format!("double_owned is unknown: {reason}")));
    if !is_zeroing_checked {
        lines.push("granted_dirty is unknown: no test VMM read a slice".to_owned());
    }
    let unread = tally.unread.iter();
    lines.extend(unread.map(|(reason, vms)| format!("slices of {vms} VMs were not read: {reason}")));
    lines
}

impl StrandedMemory {
    #[expect(clippy::cast_precision_loss, reason = "shares need no more than 52 bits")]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of sizes is a size")]
    fn new(mean: f64, local: u64) -> Self {
        let share_mean = (local > 0).then(|| mean / local as f64);
        Self { local_bytes_mean: mean.round() as u64, share_mean }
    }
}

impl LatencyQuantiles {
    #[expect(clippy::cast_precision_loss, reason = "durations of calls are below 2^52 microseconds")]
    fn from_histogram(micros: &Histogram<u64>) -> Self {
        let at = |q| (!micros.is_empty()).then(|| micros.value_at_quantile(q) as f64 / 1000.0);
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

impl Row for Report {
    const COLUMNS: &'static [Column<Self>] = &[
        col("VMS REQUESTED", |r| r.vms.requested.to_string()),
        col("VMS PLACED", |r| r.vms.placed.to_string()),
        col("VMS REJECTED", |r| r.vms.rejected.to_string()),
        col("VMS LOST", |r| r.vms.lost.to_string()),
        col("SLICES", |r| r.slices.capacity.to_string()),
        col("SLICES MOVED BETWEEN HOSTS", |r| r.slices.moved_between_hosts.to_string()),
        col("PEAK SLICES IN USE", |r| r.slices.peak_in_use.to_string()),
        col("LOCAL MEMORY STRANDED", |r| format_stranded(&r.stranded)),
        col("RESERVE P50, P99", |r| format_quantiles(&r.reserve_ms)),
        col("READY P50, P99", |r| format_quantiles(&r.ready_ms)),
        col("AUDIT: DOUBLE OWNED", |r| count_or_unknown(r.audit.double_owned)),
        col("AUDIT: GRANTED DIRTY", |r| count_or_unknown(r.audit.granted_dirty)),
        col("AUDIT: ACKNOWLEDGED LOST", |r| count_or_unknown(r.audit.acknowledged_lost)),
        col("SLICES READ BEFORE USE", |r| r.audit.slices_read.to_string()),
        col("DURATION", |r| format!("{:.1} s", r.duration_s)),
    ];
}

fn count_or_unknown(number: Option<u64>) -> String {
    number.map_or("unknown".to_owned(), |number| number.to_string())
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
fn format_stranded(stranded: &StrandedMemory) -> String {
    let share = stranded.share_mean.map(|share| format!(" ({:.1} %)", share * 100.0));
    format!("{:.1} GiB{}", stranded.local_bytes_mean as f64 / (1 << 30) as f64, share.unwrap_or_default())
}

fn format_quantiles(quantiles: &LatencyQuantiles) -> String {
    match (quantiles.p50, quantiles.p99) {
        (Some(p50), Some(p99)) => format!("{p50:.2} ms, {p99:.2} ms"),
        _ => "none".to_owned(),
    }
}
