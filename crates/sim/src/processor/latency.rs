//! Reader of loaded-latency curves from Intel's Memory Latency Checker. The input is CSV with the
//! columns `server`, `dst`, `threads`, `mlc_w`, `random`, `latency_ns` and `bandwidth_mb_s`. Only
//! rows with sequential reads by 16 threads to the first destination are used.

use std::{io, ops::RangeInclusive};

use csv::StringRecord;

use super::Memory;

/// Error while reading a latency curve.
#[derive(Debug, thiserror::Error)]
pub enum LatencyError {
    /// The input cannot be read or is not CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// The header lacks a required column.
    #[error("missing column {0:?}")]
    MissingColumn(&'static str),
    /// The header contains a required column twice.
    #[error("duplicate column {0:?}")]
    DuplicateColumn(&'static str),
    /// A value is not a number or is out of range.
    #[error("line {line}: {field} = {value:?}: {rule}")]
    InvalidValue {
        /// Line number of the invalid value, from 1.
        line: u64,
        /// Name of the column with the invalid value.
        field: &'static str,
        /// Text of the invalid value.
        value: String,
        /// Rule that the value violates: "must be ...".
        rule: &'static str,
    },
    /// The input has too few points of the selected server.
    #[error(
        "server {1:?}: {0} rows with sequential reads by {MEASUREMENT_THREADS} threads to d0, must be at least 3"
    )]
    TooFewPoints(usize, String),
}

/// Number of threads in the measurement. One core gets 1/16 of the measured bandwidth.
const MEASUREMENT_THREADS: u32 = 16;
/// Range of plausible latencies, and the rule for the error message.
const LATENCY_RANGE_NS: (RangeInclusive<f64>, &str) = (40.0..=1e5, "must be a number from 40 to 100000");
/// Range of plausible bandwidths, and the rule for the error message.
const BANDWIDTH_RANGE_MB_S: (RangeInclusive<f64>, &str) = (1.0..=1e7, "must be a number from 1 to 10000000");

/// Reads the latency curve of a server. The bandwidth is scaled to one core.
///
/// # Errors
/// Returns [`LatencyError`] if the input is not CSV, lacks a column, has a value out of range, or
/// has fewer than three points of the server.
pub fn read(input: impl io::Read, server: &str) -> Result<Memory, LatencyError> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find = |name: &'static str| {
        let mut positions = names.iter().enumerate().filter(|(_, other)| *other == name).map(|(at, _)| at);
        match (positions.next(), positions.next()) {
            (Some(at), None) => Ok(at),
            (None, _) => Err(LatencyError::MissingColumn(name)),
            (_, Some(_)) => Err(LatencyError::DuplicateColumn(name)),
        }
    };
    let [of, dst, threads, mix, random] = ["server", "dst", "threads", "mlc_w", "random"].map(find);
    let (of, dst, threads, mix, random) = (of?, dst?, threads?, mix?, random?);
    let (latency, bandwidth) = (find("latency_ns")?, find("bandwidth_mb_s")?);
    let is_selected = |row: &StringRecord| {
        let selectors = [&row[of], &row[dst], &row[threads], &row[mix], &row[random]];
        selectors == [server, "d0", &MEASUREMENT_THREADS.to_string(), "0", "0"]
    };
    let mut points = Vec::new();
    for row in table.records() {
        let row = row?;
        if is_selected(&row) {
            let mb = parse_in_range(&row, bandwidth, "bandwidth_mb_s", BANDWIDTH_RANGE_MB_S)?;
            points.push((mb, parse_in_range(&row, latency, "latency_ns", LATENCY_RANGE_NS)?));
        }
    }
    if points.len() < 3 {
        return Err(LatencyError::TooFewPoints(points.len(), server.to_owned()));
    }
    points.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
    let bandwidth_max = points[points.len() - 1].0;
    let mut curve = vec![(0.0, points[0].1)];
    for (mb, ns) in points {
        let (_, before) = curve[curve.len() - 1];
        // Latency never falls as utilization rises: a lower value is measurement noise.
        curve.push((mb / bandwidth_max, ns.max(before)));
    }
    Ok(Memory { gb_per_s: bandwidth_max / 1000.0 / f64::from(MEASUREMENT_THREADS), curve })
}

fn parse_in_range(
    row: &StringRecord,
    at: usize,
    field: &'static str,
    (range, rule): (RangeInclusive<f64>, &'static str),
) -> Result<f64, LatencyError> {
    let number = row[at].parse().ok().filter(|number| range.contains(number));
    let line = row.position().map_or(1, csv::Position::line);
    number.ok_or_else(|| LatencyError::InvalidValue { line, field, value: row[at].to_owned(), rule })
}
