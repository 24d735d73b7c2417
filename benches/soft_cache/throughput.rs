//! Throughput of GET and SET with 50 clients of redis-benchmark. The rounds of both servers alternate.

use std::process::Command;

use benches::{
    cache_servers::{Kind, Programs, Server, name},
    failure::Failure,
    process::cpu_time,
    report::{Rounds, format_ratio, format_table},
};

const ROUND_COUNT: usize = 15;
/// Number of requests of each test in a round.
const REQUESTS: u32 = 60_000;
/// Budget of both servers in bytes.
const BUDGET_BYTES: u64 = 64 << 20;
/// Kinds in the order of the results.
const KINDS: [Kind; 2] = [Kind::SoftCache, Kind::Redis];

/// Measurement: name, arguments of redis-benchmark.
const MEASUREMENTS: [(&str, &[&str]); 2] = [("", &["-P", "1"]), ("_pipelined", &["-P", "16"])];
/// Tests of redis-benchmark: name of the test, and name of the result.
const TESTS: [(&str, &str); 2] = [("SET", "set"), ("GET", "get")];

/// Results of one server and one test.
#[derive(Clone, Debug, Default)]
struct Results {
    per_second: Rounds,
    /// Processor time of the server in microseconds per request.
    cpu_us: Rounds,
}

/// Measures the throughput, and returns the report.
///
/// # Errors
/// [`Failure`] if a program fails.
pub fn measure(programs: &Programs) -> Result<String, Failure> {
    let servers = [programs.start(KINDS[0], BUDGET_BYTES)?, programs.start(KINDS[1], BUDGET_BYTES)?];
    let mut report = String::new();
    for (suffix, options) in MEASUREMENTS {
        let mut results: [[Results; 2]; 2] = Default::default();
        for round in 0..ROUND_COUNT {
            for server in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                for (test, (name, _)) in TESTS.iter().enumerate() {
                    let result = &mut results[server][test];
                    run_test(programs, &servers[server], name, options, result)?;
                }
            }
        }
        report.push_str(&format_results(suffix, &results));
    }
    Ok(report)
}

fn run_test(
    programs: &Programs,
    server: &Server,
    test: &str,
    options: &[&str],
    results: &mut Results,
) -> Result<(), Failure> {
    let before = cpu_time(&server.process);
    let program = programs.redis_benchmark();
    let mut command = Command::new(&program);
    command.args(["-c", "50", "-r", "100000", "-d", "100", "--csv", "-h", "127.0.0.1", "-p"]);
    command
        .arg(server.address.port().to_string())
        .args(["-n", &REQUESTS.to_string(), "-t", test])
        .args(options);
    let output = command.output().map_err(|source| Failure::Start { program, source })?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Format of a line: "GET","123456.78","0.2", and further times.
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("\"{test}\",\"")));
    let per_second = line.and_then(|line| line.split('"').next()?.parse().ok());
    let unexpected =
        || Failure::UnexpectedReply { subject: "redis-benchmark".to_owned(), reply: text.clone() };
    results.per_second.add(per_second.ok_or_else(unexpected)?);
    let cpu = cpu_time(&server.process) - before;
    results.cpu_us.add(cpu.as_secs_f64() * 1e6 / f64::from(REQUESTS));
    Ok(())
}

fn format_results(suffix: &str, results: &[[Results; 2]; 2]) -> String {
    let mut rows = Vec::new();
    let mut ratios = String::new();
    for (test, (test_name, result_name)) in TESTS.iter().enumerate() {
        for (kind, results) in KINDS.iter().zip(results) {
            let results = &results[test];
            rows.push(vec![
                format!("{} {test_name}{suffix}", name(*kind)),
                results.per_second.summary(),
                results.cpu_us.spread(2),
            ]);
        }
        let [ours, redis] = [&results[0][test], &results[1][test]];
        let ratio = ours.per_second.ratio_to(&redis.per_second).median();
        let cpu_ratio = redis.cpu_us.ratio_to(&ours.cpu_us).median();
        ratios += &(format_ratio(&format!("soft_cache_{result_name}{suffix}"), ratio) + "\n");
        ratios += &(format_ratio(&format!("soft_cache_{result_name}{suffix}_cpu"), cpu_ratio) + "\n");
    }
    format_table(&["50 clients", "requests/s", "server CPU us/request"], &rows) + &ratios
}
