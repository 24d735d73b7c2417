//! Latency while the memory is halved under load.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use benches::{
    cache_client::Reply,
    cache_servers::{Kind, Programs, Server},
    failure::Failure,
    report::format_ratio,
};
use hdrhistogram::Histogram;

/// Budget before the halving, in bytes.
const BUDGET_BYTES: u64 = 64 << 20;
/// Number of keys. All values together exceed the budget.
const KEYS: u64 = 200_000;
const VALUE: [u8; 500] = [b'v'; 500];
/// Number of clients, each of which sends one command at a time.
const CLIENTS: u64 = 8;
/// Phases before, during and after the halving, and the duration of each. The halving begins with the second phase.
const PHASES: [(&str, Duration); 3] = [
    ("before", Duration::from_secs(4)),
    ("during", Duration::from_secs(1)),
    ("after", Duration::from_secs(4)),
];
/// Largest recorded latency in nanoseconds. A longer one counts as this latency.
const LATENCY_NS_MAX: u64 = 60_000_000_000;
/// Goal of the latency during the halving, relative to the latency before.
const LATENCY_GOAL: f64 = 2.0;

/// Latencies in nanoseconds by phase, and number of error replies.
struct Measured {
    latencies: Vec<Histogram<u64>>,
    errors: u64,
}

impl Measured {
    fn new() -> Self {
        let histogram =
            || Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("three digits are supported");
        Self { latencies: PHASES.iter().map(|_| histogram()).collect(), errors: 0 }
    }
}

/// Measures the latencies, and returns the report.
///
/// # Errors
/// [`Failure`] if the server fails.
pub fn measure(programs: &Programs) -> Result<String, Failure> {
    let server = programs.start(Kind::SoftCache, BUDGET_BYTES)?;
    server.connect()?.set_all((0..KEYS).map(key_name), &VALUE)?;
    let (phase, is_done) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (halving, measured) = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (server, phase, is_done) = (&server, &phase, &is_done);
                scope.spawn(move || run_client(server, client, phase, is_done))
            })
            .collect();
        let halving = run_phases(&server, &phase);
        is_done.store(true, Ordering::Relaxed);
        let measured: Vec<_> =
            clients.into_iter().map(|client| client.join().expect("clients do not panic")).collect();
        (halving, measured)
    });
    let mut sum = Measured::new();
    for measured in measured {
        let measured = measured?;
        sum.errors += measured.errors;
        for (sum, latencies) in sum.latencies.iter_mut().zip(measured.latencies) {
            sum.add(latencies).expect("both histograms have the same range");
        }
    }
    Ok(format_report(&sum, halving?))
}

fn key_name(key: u64) -> String {
    format!("key:{key}")
}

/// Returns the time in which the server freed half of its memory.
fn run_phases(server: &Server, phase: &AtomicUsize) -> Result<Duration, Failure> {
    thread::sleep(PHASES[0].1);
    let before = server.resident_bytes()?;
    phase.store(1, Ordering::Relaxed);
    let start = Instant::now();
    let half = (BUDGET_BYTES / 2).to_string();
    let reply = server.connect()?.execute(&[b"CONFIG", b"SET", b"maxmemory", half.as_bytes()])?;
    if reply != Reply::Success {
        return Err(Failure::UnexpectedReply {
            subject: "CONFIG SET".to_owned(),
            reply: format!("{reply:?}"),
        });
    }
    // The index and the buffers stay, and pages are freed in batches.
    while server.resident_bytes()? > before - BUDGET_BYTES * 7 / 16 && start.elapsed() < PHASES[1].1 {
        thread::sleep(Duration::from_millis(1));
    }
    let halving = start.elapsed();
    thread::sleep(PHASES[1].1.saturating_sub(start.elapsed()));
    phase.store(2, Ordering::Relaxed);
    thread::sleep(PHASES[2].1);
    Ok(halving)
}

/// Sends GET and SET in turn until the end.
fn run_client(
    server: &Server,
    client: u64,
    phase: &AtomicUsize,
    is_done: &AtomicBool,
) -> Result<Measured, Failure> {
    let mut connection = server.connect()?;
    let mut measured = Measured::new();
    let mut number = client * 0x9E37_79B9;
    while !is_done.load(Ordering::Relaxed) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = key_name((number >> 33) % KEYS);
        let start = Instant::now();
        let reply = match number >> 32 & 1 {
            0 => connection.execute(&[b"GET", key.as_bytes()])?,
            _ => connection.execute(&[b"SET", key.as_bytes(), &VALUE])?,
        };
        let latency = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        measured.latencies[phase.load(Ordering::Relaxed)].saturating_record(latency);
        measured.errors += u64::from(matches!(reply, Reply::Error(_)));
    }
    Ok(measured)
}

fn format_report(measured: &Measured, halving: Duration) -> String {
    let us = |phase: usize, quantile: f64| measured.latencies[phase].value_at_quantile(quantile) as f64 / 1e3;
    let mut report = String::new();
    for (phase, (name, _)) in PHASES.iter().enumerate() {
        let requests = measured.latencies[phase].len();
        report += &format!(
            "time soft_cache_halving_p99_{name} {:.0} us (median {:.0}, 99.9 % {:.0}, {requests} requests)\n",
            us(phase, 0.99),
            us(phase, 0.5),
            us(phase, 0.999)
        );
    }
    report += &format!("time soft_cache_halving {:.0} ms\n", halving.as_secs_f64() * 1e3);
    report += &format!("soft_cache_halving: {} errors\n", measured.errors);
    report + &format_ratio("soft_cache_halving_p99", LATENCY_GOAL * us(0, 0.99) / us(1, 0.99)) + "\n"
}
