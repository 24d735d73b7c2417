//! Loaded latencies as Intel's Memory Latency Checker measures them, as a table: `server`, `dst`, `threads`, `mlc_w`, `random`,
//! `latency_ns`, `bandwidth_mb_s`. Reads in order, by so many threads, to the first destination; others are left out.

use std::io;

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
    /// There are too few points.
    #[error(
        "{0} points of server {1:?} read in order by {THREADS} threads to d0, of 40 ns to 100 us: must be at least 3"
    )]
    Few(usize, String),
}

/// Threads that share what was measured: a server's bandwidth is then that of as many cores.
const THREADS: u32 = 16;
/// No memory answers faster or slower, or carries more: such a point is a mistake, and left out.
const LATENCY_MIN_NS: f64 = 40.0;
const LATENCY_MAX_NS: f64 = 1e5;
const BANDWIDTH_MAX_MB_S: f64 = 1e7;

/// The curve of a server, as one of its cores sees it.
///
/// # Errors
/// [`NoCurve`].
pub fn read(input: impl io::Read, server: &str) -> Result<Memory, NoCurve> {
    let mut table = csv::Reader::from_reader(input);
    let names = table.headers()?.clone();
    let find =
        |name: &'static str| names.iter().position(|other| other == name).ok_or(NoCurve::Missing(name));
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
        let point = row[bandwidth].parse::<f64>().ok().zip(row[latency].parse::<f64>().ok());
        let (bandwidths, latencies) = (1.0..=BANDWIDTH_MAX_MB_S, LATENCY_MIN_NS..=LATENCY_MAX_NS);
        points.extend(
            point.filter(|(mb, ns)| is_ours(&row) && bandwidths.contains(mb) && latencies.contains(ns)),
        );
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
