//! Loaded latencies as Intel's Memory Latency Checker measures them, as a table: `server`, `dst`, `threads`, `mlc_w`, `random`,
//! `latency_ns`, `bandwidth_mb_s`. Reads in order, by so many threads, to the first destination; others are left out.

use std::{io, ops::RangeInclusive};

use csv::StringRecord;

use super::Memory;

/// Why there is no curve.
#[derive(Debug, thiserror::Error)]
pub enum NoCurve {
    /// The bytes do not come, or are no CSV.
    #[error(transparent)]
    Csv(#[from] csv::Error),
    /// A column is missing.
    #[error("there is no column {0:?}")]
    Missing(&'static str),
    /// A column is there twice.
    #[error("column {0:?} is there twice: must be once")]
    Twice(&'static str),
    /// A point cannot have been measured.
    #[error("line {line}: {field} = {value:?}: {rule}")]
    Impossible {
        /// Counted from 1.
        line: u64,
        /// Which column.
        field: &'static str,
        /// As written.
        value: String,
        /// "must be ...".
        rule: &'static str,
    },
    /// There are too few points.
    #[error("{0} points of server {1:?} read in order by {THREADS} threads to d0: must be at least 3")]
    Few(usize, String),
}

/// Threads that share what was measured: a server's bandwidth is then that of as many cores.
const THREADS: u32 = 16;
/// No memory answers faster or slower, or carries more.
const LATENCY_NS: (RangeInclusive<f64>, &str) = (40.0..=1e5, "must be a number from 40 to 100000");
const BANDWIDTH_MB_S: (RangeInclusive<f64>, &str) = (1.0..=1e7, "must be a number from 1 to 10000000");

/// The curve of a server, as one of its cores sees it.
///
/// # Errors
/// [`NoCurve`].
pub fn read(input: impl io::Read, server: &str) -> Result<Memory, NoCurve> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find = |name: &'static str| {
        let mut places = names.iter().enumerate().filter(|(_, other)| *other == name).map(|(at, _)| at);
        match (places.next(), places.next()) {
            (Some(at), None) => Ok(at),
            (None, _) => Err(NoCurve::Missing(name)),
            (_, Some(_)) => Err(NoCurve::Twice(name)),
        }
    };
    let [of, dst, threads, mix, random] = ["server", "dst", "threads", "mlc_w", "random"].map(find);
    let (of, dst, threads, mix, random) = (of?, dst?, threads?, mix?, random?);
    let (latency, bandwidth) = (find("latency_ns")?, find("bandwidth_mb_s")?);
    let is_ours = |row: &StringRecord| {
        let shown = [&row[of], &row[dst], &row[threads], &row[mix], &row[random]];
        shown == [server, "d0", &THREADS.to_string(), "0", "0"]
    };
    let mut points = Vec::new();
    for row in table.records() {
        let row = row?;
        if is_ours(&row) {
            let mb = measured(&row, bandwidth, "bandwidth_mb_s", BANDWIDTH_MB_S)?;
            points.push((mb, measured(&row, latency, "latency_ns", LATENCY_NS)?));
        }
    }
    if points.len() < 3 {
        return Err(NoCurve::Few(points.len(), server.to_owned()));
    }
    points.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
    let most = points[points.len() - 1].0;
    let mut curve = vec![(0.0, points[0].1)];
    for (mb, ns) in points {
        let (_, before) = curve[curve.len() - 1];
        curve.push((mb / most, ns.max(before))); // a busier channel is not a faster one
    }
    Ok(Memory { gb_per_s: most / 1000.0 / f64::from(THREADS), curve })
}

fn measured(
    row: &StringRecord,
    at: usize,
    field: &'static str,
    (range, rule): (RangeInclusive<f64>, &'static str),
) -> Result<f64, NoCurve> {
    let number = row[at].parse().ok().filter(|number| range.contains(number));
    let line = row.position().map_or(1, csv::Position::line);
    number.ok_or_else(|| NoCurve::Impossible { line, field, value: row[at].to_owned(), rule })
}
