//! Measures the replay of `tarn plan` with 768 sockets, on one thread and with reading of the trace. A
//! plain replay in Python of the same rules runs with the first VMs of the same trace, and must have the
//! same rejections and the same pool peak.
//!
//! Goals: 50 times as many events per second as the replay in Python, and less than 60 s for 10 million
//! events.

use std::{
    fmt::Write as _,
    fs,
    process::{Command, ExitCode},
    time::Instant,
};

use benches::{
    failure::Failure,
    report::{Rounds, format_ratio, format_table},
};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;
use sim::plan::{
    Cluster,
    input::VmStream,
    replay::{PlacedMemory, PlacementRule, Replay, ReplayReport, SampleTimes},
};
use units::{Bytes, Ns, limits::PLAN_CHUNK_VMS};

const CLUSTER: Cluster = Cluster { sockets: 768, cores_per_socket: 48, memory_per_socket: Bytes::gib(144) };
const POOL_SOCKETS: u32 = 16;
const TIMES: SampleTimes = SampleTimes { first: Ns::secs(3600), interval: Ns::secs(300) };
/// Numbers of VMs, each with an arrival and a departure.
const VM_COUNTS: [usize; 3] = [50_000, 500_000, 5_000_000];
/// Number of VMs of the comparison with Python: enough that the cluster is full and VMs are rejected.
const COMPARED_VMS: usize = 200_000;
const ROUNDS: usize = 3;
const SEED: u64 = 20_261_128;
/// Program of the replay in Python.
const PYTHON_REPLAY: &str = include_str!("plan/replay.py");

fn main() -> ExitCode {
    match measure() {
        Ok(report) => {
            print!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("plan: {}", failure.error_chain());
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<String, Failure> {
    let trace = generate(VM_COUNTS[VM_COUNTS.len() - 1]);
    let compared = first_rows(&trace, COMPARED_VMS);
    let (mut tarn_s, mut python_s) = (Rounds::default(), Rounds::default());
    for _ in 0..ROUNDS {
        let (seconds, report) = replay(compared);
        let (python_seconds, rejected, peak_mib) = replay_in_python(compared)?;
        let expected = (report.counts.rejected, report.pools[0].sampled_mib);
        if expected.0 == 0 {
            let reply = "no rejected VM, so that the comparison is weak".to_owned();
            return Err(Failure::UnexpectedReply { subject: "replay".to_owned(), reply });
        }
        if (rejected, peak_mib) != expected {
            let reply =
                format!("{rejected} rejected VMs and a peak of {peak_mib} MiB instead of {expected:?}");
            return Err(Failure::UnexpectedReply { subject: "replay in Python".to_owned(), reply });
        }
        tarn_s.add(seconds);
        python_s.add(python_seconds);
    }
    let ratios = python_s.ratio_to(&tarn_s);
    let mut lines = String::new();
    let mut times = Vec::new();
    for count in VM_COUNTS {
        let (seconds, report) = replay(first_rows(&trace, count));
        times.push((count as f64, seconds));
        let _ = writeln!(lines, "time plan_events_{} {seconds:.2} s", 2 * count);
        let running = report.running_max;
        let _ = writeln!(lines, "{count} VMs: {} rejected, at most {running} run", report.counts.rejected);
    }
    let ((fewest, first), (most, last)) = (times[0], times[times.len() - 1]);
    let row = |name: &str, seconds: &Rounds| vec![name.to_owned(), seconds.spread(3)];
    let rows = [row("Tarn", &tarn_s), row("Python", &python_s)];
    let head = format!("s for {COMPARED_VMS} VMs");
    Ok(format!(
        "\n{}\n{lines}growth plan_events {:.2}\n{}\n",
        format_table(&[&head, "min-median-max"], &rows),
        (last / first).ln() / (most / fewest).ln(),
        format_ratio("plan_vs_python", ratios.median())
    ))
}

/// Generates the rows of a trace that uses most of the cores. The lifetimes are exponential with
/// means of 10 minutes to 10 hours.
fn generate(count: usize) -> String {
    let mut rng = Pcg64Mcg::seed_from_u64(SEED);
    let mut text = String::from("vm_id,arrive_s,depart_s,cores,mem_gb\n");
    let mut now = 0.0_f64;
    let exponential = |rng: &mut Pcg64Mcg, mean: f64| -mean * (1.0 - rng.random::<f64>()).ln();
    for id in 0..count {
        now += exponential(&mut rng, 0.75);
        let cores = [1, 1, 1, 2, 2, 4, 4, 8][rng.random_range(0..8)];
        let gb_per_core = [1.75, 1.75, 1.75, 3.5, 3.5, 7.0][rng.random_range(0..6)];
        let mean = [600.0, 600.0, 7200.0, 36_000.0][rng.random_range(0..4)];
        let life = exponential(&mut rng, mean).ceil().max(1.0);
        let _ = writeln!(
            text,
            "{id},{:.0},{:.0},{cores},{}",
            now.floor(),
            now.floor() + life,
            f64::from(cores) * gb_per_core
        );
    }
    text
}

/// Returns the header and the first rows of a trace.
fn first_rows(trace: &str, count: usize) -> &str {
    let end = trace.match_indices('\n').nth(count).map_or(trace.len(), |(at, _)| at + 1);
    &trace[..end]
}

/// Returns the seconds to read and replay a trace, and the result.
fn replay(trace: &str) -> (f64, ReplayReport) {
    let started = Instant::now();
    let mut stream = VmStream::new(trace.as_bytes(), CLUSTER).expect("the trace has a header");
    let mut replay = Replay::new(&CLUSTER, &[POOL_SOCKETS], PlacementRule::BestFit, TIMES);
    let (mut chunk, mut last) = (Vec::new(), Ns::ZERO);
    loop {
        stream.read_chunk(&mut chunk, PLAN_CHUNK_VMS).expect("the generated rows are valid");
        let Some(vm) = chunk.last() else { break };
        last = vm.arrive;
        for vm in &chunk {
            replay.arrive(&PlacedMemory::whole(vm));
        }
    }
    let report = replay.finish(last);
    (started.elapsed().as_secs_f64(), report)
}

/// Returns the seconds that Python takes to read and replay a trace, the number of rejected VMs and
/// the largest pool peak in MiB.
fn replay_in_python(trace: &str) -> Result<(f64, u64, u64), Failure> {
    let folder = tempfile::tempdir().map_err(Failure::file_error("create", std::env::temp_dir()))?;
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).map_err(Failure::file_error("write", path.clone())).map(|()| path)
    };
    let files = [write("replay.py", PYTHON_REPLAY)?, write("trace.csv", trace)?];
    let Cluster { sockets, cores_per_socket, memory_per_socket } = CLUSTER;
    let mib = memory_per_socket.get() >> 20;
    let numbers = [u64::from(sockets), cores_per_socket.into(), mib, POOL_SOCKETS.into()];
    let output = Command::new("python3")
        .args(files)
        .args(numbers.map(|number| number.to_string()))
        .output()
        .map_err(|source| Failure::Start { program: "python3".into(), source })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words: Vec<&str> = text.split_whitespace().collect();
    let parsed = match words[..] {
        [seconds, rejected, peak] => seconds.parse().ok().zip(rejected.parse().ok()).zip(peak.parse().ok()),
        _ => None,
    };
    let ((seconds, rejected), peak) = parsed.ok_or_else(|| Failure::UnexpectedReply {
        subject: "replay in Python".to_owned(),
        reply: String::from_utf8_lossy(&output.stderr).into_owned(),
    })?;
    Ok((seconds, rejected, peak))
}
