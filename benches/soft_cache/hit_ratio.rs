//! Hit ratio on public traces with equal resident memory.
//!
//! The memory of a server is the increase of its resident memory from its start to the end of the trace. It includes
//! the index and fragmentation. The budget of soft-cache is reduced until it uses at most as much memory as Redis.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
};

use benches::{
    cache_client::{Client, Reply},
    cache_servers::{Kind, Programs, name},
    failure::Failure,
    report::{format_ratio, format_table},
};
use flate2::read::MultiGzDecoder;

/// Traces: name of the file, and budget of Redis in bytes beyond that of an empty server.
const TRACES: [(&str, u64); 3] =
    [("arc-OLTP", 8 << 20), ("arc-P3", 32 << 20), ("cloudphysics-w106", 8 << 20)];
/// Memory of an empty server, which Redis counts as used.
const REDIS_EMPTY_BYTES: u64 = 1 << 20;
/// Number of keys that are requested together. A key that is requested twice in a batch is missed twice.
const BATCH: usize = 32;
/// Maximum number of runs of soft-cache until its memory is at most that of Redis.
const RUNS_MAX: usize = 5;
/// First budget of soft-cache, as a fraction of the memory of Redis. Its index needs further memory.
const FIRST_BUDGET: f64 = 0.85;
/// Value lengths: 32 to 511 bytes, by key.
const VALUE_BYTES_MIN: usize = 32;
const VALUE: [u8; 512] = [b'v'; 512];

/// Result of a run.
#[derive(Clone, Copy, Debug)]
struct Run {
    kind: Kind,
    budget_bytes: u64,
    memory_bytes: u64,
    hits: u64,
    requests: u64,
    errors: u64,
}

impl Run {
    fn hit_ratio(&self) -> f64 {
        self.hits as f64 / self.requests as f64
    }
}

/// Measures the hit ratios, and returns the report.
///
/// # Errors
/// [`Failure`] if a server fails.
pub fn measure(programs: &Programs) -> Result<String, Failure> {
    let folder = std::env::var_os("TARN_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"), PathBuf::from);
    let (mut rows, mut ratios) = (Vec::new(), String::new());
    for (trace, budget) in TRACES {
        let path = folder.join("cache-traces").join(format!("{trace}.csv.gz"));
        let Ok(file) = File::open(&path) else {
            eprintln!("SKIPPED: cannot open {}: set TARN_DATA to the folder of public data", path.display());
            continue;
        };
        let keys = read_keys(file).map_err(Failure::file_error("read", &path))?;
        let redis = replay(programs, Kind::Redis, budget + REDIS_EMPTY_BYTES, &keys)?;
        let ours = replay_within(programs, redis.memory_bytes, &keys)?;
        rows.extend([ours, redis].map(|run| format_run(trace, &run)));
        let name = format!("soft_cache_hits_{}", trace.to_lowercase().replace('-', "_"));
        ratios += &(format_ratio(&name, ours.hit_ratio() / redis.hit_ratio()) + "\n");
    }
    Ok(format_table(&["trace", "budget KiB", "memory KiB", "requests", "hits %", "errors"], &rows) + &ratios)
}

fn format_run(trace: &str, run: &Run) -> Vec<String> {
    vec![
        format!("{trace}, {}", name(run.kind)),
        (run.budget_bytes >> 10).to_string(),
        (run.memory_bytes >> 10).to_string(),
        run.requests.to_string(),
        format!("{:.2}", run.hit_ratio() * 100.0),
        run.errors.to_string(),
    ]
}

/// Reads the column `key` of a trace.
fn read_keys(file: File) -> std::io::Result<Vec<u64>> {
    let mut lines = BufReader::new(MultiGzDecoder::new(BufReader::new(file))).lines();
    let head = lines.next().transpose()?.unwrap_or_default();
    let column = head.split(',').position(|column| column == "key");
    let column = column.ok_or_else(|| std::io::Error::other("no column key"))?;
    let key = |line: std::io::Result<String>| {
        let line = line?;
        line.split(',')
            .nth(column)
            .and_then(|key| key.parse().ok())
            .ok_or_else(|| std::io::Error::other(line.clone()))
    };
    lines.map(key).collect()
}

/// Replays a trace with soft-cache and the largest tried budget with which its memory is at most `memory_bytes`.
fn replay_within(programs: &Programs, memory_bytes: u64, keys: &[u64]) -> Result<Run, Failure> {
    let mut budget = memory_bytes as f64 * FIRST_BUDGET;
    for _ in 0..RUNS_MAX {
        let run = replay(programs, Kind::SoftCache, round_to_pages(budget), keys)?;
        if run.memory_bytes <= memory_bytes {
            return Ok(run);
        }
        budget *= 0.995 * memory_bytes as f64 / run.memory_bytes as f64;
    }
    Err(Failure::UnexpectedReply {
        subject: "soft-cache".to_owned(),
        reply: format!("more than {memory_bytes} bytes of memory in {RUNS_MAX} runs"),
    })
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "budgets are positive and below 2^53"
)]
fn round_to_pages(bytes: f64) -> u64 {
    bytes as u64 / 4096 * 4096
}

/// Requests each key of a trace, and stores a value for each missing key.
fn replay(programs: &Programs, kind: Kind, budget_bytes: u64, keys: &[u64]) -> Result<Run, Failure> {
    let server = programs.start(kind, budget_bytes)?;
    let mut client = server.connect()?;
    client.execute(&[b"PING"])?;
    let before = server.resident_bytes()?;
    let mut run =
        Run { kind, budget_bytes, memory_bytes: 0, hits: 0, requests: keys.len() as u64, errors: 0 };
    for batch in keys.chunks(BATCH) {
        replay_batch(&mut client, batch, &mut run)?;
    }
    run.memory_bytes = server.resident_bytes()?.saturating_sub(before);
    Ok(run)
}

fn replay_batch(client: &mut Client, batch: &[u64], run: &mut Run) -> Result<(), Failure> {
    batch.iter().for_each(|key| client.add(&[b"GET", key_name(*key).as_bytes()]));
    client.send()?;
    let mut missing = Vec::new();
    for key in batch {
        match client.receive()? {
            Reply::Success => run.hits += 1,
            Reply::Missing => missing.push(*key),
            Reply::Error(_) => run.errors += 1,
        }
    }
    for key in &missing {
        let bytes = VALUE_BYTES_MIN
            + (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % (512 - VALUE_BYTES_MIN);
        client.add(&[b"SET", key_name(*key).as_bytes(), &VALUE[..bytes]]);
    }
    client.send()?;
    for _ in missing {
        run.errors += u64::from(matches!(client.receive()?, Reply::Error(_)));
    }
    Ok(())
}

fn key_name(key: u64) -> String {
    format!("block:{key}")
}
