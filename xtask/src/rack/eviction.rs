//! `cargo xtask rack eviction`: compares early eviction with the kernel alone on one emulated host.
//! Unmodified Debian programs need more memory than their cgroup may use, and swap to a slow network drive:
//! memcached is filled, and sort sorts lines in memory. Each program runs with three settings in turn:
//! without early eviction, with a fixed threshold, and with an adaptive one.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use emulated_host::{
    Artifacts,
    rack::{Device, Drive, Plan, Programs, Rack, RackHost, RackPlan, TENANT_SETUP_SCRIPT},
};

use super::commands::{run_checked, unexpected_output, wait};
use crate::{artifacts, failure::Failure, step::build_programs, wait::Interrupt};

/// Directory of the tenants' cgroups.
const CGROUPS: &str = "/sys/fs/cgroup/tenants";
/// Size and bandwidth of the swap drive, in MiB and MB/s. The limits on writes of the cgroups are smaller. Reads are
/// not limited: fetched memory uses the other direction of a network.
const DRIVE: Drive = Drive { mib: 1024, mb_s: 400, is_remote: true };
/// Number of keys in memcached, and size of their values in bytes.
const KEYS: u32 = 40_000;
const VALUE_BYTES: u32 = 3900;
/// Pause of the client after each value, in microseconds. Without it, memcached and its client use all CPUs of
/// the emulated host, so that no CPU is left for evictions.
const CLIENT_PAUSE_US: u32 = 500;
/// Number of parts of the lines to sort, and number of random bytes from which each part is made. The program
/// that makes them pauses for 0.1 s after each part.
const SORT_PARTS: u32 = 96;
const SORT_PART_BYTES: u32 = 512 << 10;
/// Distance of the largest threshold from the limit, in MiB. The default of 8 MiB would be a large part of the limits here.
const RESERVE_MIB: u32 = 2;
/// Address of the metrics of the agent, on its host.
const METRICS_ADDRESS: &str = "127.0.0.1:9751";
/// Number of seconds in which the agent must begin early eviction.
const AGENT_START_S: u64 = 60;

/// Time limit of a run.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

/// Options of `rack eviction`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of runs of each program with each setting, 1 to 20
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=20))]
    rounds: u64,
    /// Growth rate of a program without a limit, divided by the rate of its writes to the swap drive
    #[arg(long, value_name = "RATIO", default_value_t = 2.0, value_parser = parse_ratio)]
    ratio: f64,
    /// Compare only this program
    #[arg(long, value_enum)]
    program: Option<Program>,
    /// Also write all measurements to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Parses the ratio of the growth rate and the rate of writes.
fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio| (0.1..=100.0).contains(ratio));
    ratio.ok_or_else(|| "must be a number from 0.1 to 100".to_owned())
}

/// Program that needs more memory than it may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    /// memcached, which is filled with values that are not read
    Memcached,
    /// sort, which reads all lines, and then accesses them in random order
    Sort,
}

/// Setting of early eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    Kernel,
    Fixed,
    Adaptive,
}

/// Resources of a program.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Limits {
    memory_mib: u64,
    written_bytes_per_s: u64,
}

/// Measurements of one program with one setting.
#[derive(Clone, Debug, serde::Serialize)]
struct Comparison {
    program: &'static str,
    setting: &'static str,
    limits: Limits,
    runs: Vec<Run>,
    /// Median of the run times, divided by that of the kernel alone.
    time_ratio: f64,
    /// The same for the time in which the program could not run because of memory; absent if this was 0.
    memory_stalled_ratio: Option<f64>,
}

/// Measurements of one run.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Run {
    seconds: f64,
    /// Time in which the program could not run because of memory.
    memory_stalled_s: f64,
    /// Time in which the program could not run because of I/O.
    io_stalled_s: f64,
    /// Largest usage, in MiB.
    peak_mib: f64,
    major_faults: f64,
    /// Growth rate until 90 % of the largest usage, in bytes per second.
    growth: f64,
}

impl Program {
    const fn name(self) -> &'static str {
        match self {
            Self::Memcached => "memcached",
            Self::Sort => "sort",
        }
    }

    /// Returns the part of the peak that is the memory limit, in percent. The pages of `sort` are all
    /// accessed again, so that it would only swap with less memory.
    const fn limit_percent(self) -> u64 {
        match self {
            Self::Memcached => 60,
            Self::Sort => 90,
        }
    }

    /// Returns the script that runs the program in the cgroup `$cg`.
    fn script(self) -> String {
        let in_cgroup = "sh -c 'echo $$ > '$cg'/cgroup.procs; exec ";
        match self {
            Self::Memcached => format!(
                "{in_cgroup}memcached -u root -s /tmp/cache.sock -m 1024 -t 1' > /tmp/run.log 2>&1 &
server=$!
while [ ! -e /tmp/cache.sock ]; do sleep 0.1; done
start=$(cut -d ' ' -f 1 /proc/uptime)
zipf-load --socket /tmp/cache.sock --keys {KEYS} --value-bytes {VALUE_BYTES} --fill-pause-us {CLIENT_PAUSE_US} --seconds 0 || exit 1
end=$(cut -d ' ' -f 1 /proc/uptime)
kill $server; wait $server; rm -f /tmp/cache.sock
"
            ),
            Self::Sort => format!(
                "start=$(cut -d ' ' -f 1 /proc/uptime)
set -o pipefail
for part in $(seq {SORT_PARTS}); do head -c {SORT_PART_BYTES} /dev/urandom | base64; sleep 0.1; done | {in_cgroup}env LC_ALL=C coreutils-sort --buffer-size=1G --parallel=1 --output=/dev/null' || exit 1
end=$(cut -d ' ' -f 1 /proc/uptime)
"
            ),
        }
    }
}

impl Setting {
    const ALL: [Self; 3] = [Self::Kernel, Self::Fixed, Self::Adaptive];

    const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Fixed => "fixed",
            Self::Adaptive => "adaptive",
        }
    }

    /// Returns the section of the agent's configuration; empty without early eviction.
    fn agent_config(self) -> String {
        match self {
            Self::Kernel => String::new(),
            Self::Fixed | Self::Adaptive => format!(
                "[early_eviction]\ncgroups = \"{CGROUPS}\"\ndevice = \"/dev/vda\"\nthreshold = \"{}\"\nreserve_mib = {RESERVE_MIB}\n",
                self.name()
            ),
        }
    }
}

/// Runs all programs with all settings, and prints the results.
///
/// # Errors
/// Returns an error if an artifact is missing or a program on the host fails.
pub fn run(args: &Args, folder: &Path) -> Result<(), Failure> {
    let artifacts = Artifacts::open(&artifacts::ensure_downloaded()?)?;
    let interrupt = Interrupt::new()?;
    let plan = plan(&artifacts)?;
    eprintln!("── booting a host; logs are in {}", folder.join("logs").display());
    let rack = Rack::start(&artifacts, plan, folder, || interrupt.should_continue())?;
    let host = &rack.hosts().as_slice()[0];
    run_checked(host, "cp /etc/tarn/h0.toml /tmp/base.toml")?;
    println!(
        "program    setting    time s  min-max      ratio  memory stall s  ratio  I/O stall s  faults  (median of {} runs)",
        args.rounds
    );
    let mut comparisons = Vec::new();
    for program in [Program::Memcached, Program::Sort] {
        if args.program.is_none_or(|only| only == program) {
            let compared = compare(host, program, args, &interrupt)?;
            compared.iter().for_each(print_comparison);
            comparisons.extend(compared);
        }
    }
    let Some(path) = &args.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(&comparisons).expect("numbers and names can be serialized");
    std::fs::write(path, text).map_err(Failure::file_error("write", path))
}

fn plan(artifacts: &Artifacts) -> Result<RackPlan, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host", "zipf-load"];
    let [manager, agent, tarn, power_off, load] = build_programs(names)?;
    let mut hosts = Plan::new(1, vec![Device { serial: 1, gib: 1, is_aligned: true }]);
    hosts.cpus = 2;
    hosts.drives = vec![DRIVE];
    hosts.programs = vec![load, artifacts.tool_path("memcached"), artifacts.tool_path("coreutils-sort")];
    hosts.cmdline_extra += " psi=1";
    hosts.script = TENANT_SETUP_SCRIPT.to_owned();
    let mut plan = RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, "dax");
    plan.agent_toml_extra = format!("metrics_listen = {METRICS_ADDRESS:?}\n");
    Ok(plan)
}

/// Runs a program without limits to choose its limits, and then with all settings in turn.
fn compare(
    host: &RackHost,
    program: Program,
    args: &Args,
    interrupt: &Interrupt,
) -> Result<Vec<Comparison>, Failure> {
    set(host, Setting::Kernel, interrupt)?;
    let unlimited = measure(host, program, None)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "both are positive")]
    let limits = Limits {
        memory_mib: unlimited.peak_mib as u64 * program.limit_percent() / 100,
        written_bytes_per_s: (unlimited.growth / args.ratio) as u64,
    };
    eprintln!(
        "── {} needs {:.0} MiB and grows by {:.1} MB/s; the limits are {} MiB and {:.1} MB/s of writes",
        program.name(),
        unlimited.peak_mib,
        unlimited.growth / 1e6,
        limits.memory_mib,
        unlimited.growth / args.ratio / 1e6
    );
    let mut runs = Setting::ALL.map(|_| Vec::new());
    for _ in 0..args.rounds {
        for (setting, runs) in Setting::ALL.into_iter().zip(&mut runs) {
            set(host, setting, interrupt)?;
            let run = measure(host, program, Some(limits))?;
            eprintln!(
                "── {} {}: {:.1} s, {:.1} s stalled on memory, {:.1} s on I/O",
                program.name(),
                setting.name(),
                run.seconds,
                run.memory_stalled_s,
                run.io_stalled_s
            );
            runs.push(run);
        }
    }
    let [kernel, ..] = &runs;
    let seconds = median(kernel, |run| run.seconds);
    let stalled = median(kernel, |run| run.memory_stalled_s);
    let comparison = |(setting, runs): (Setting, Vec<Run>)| {
        let stalled_ratio = median(&runs, |run| run.memory_stalled_s) / stalled;
        Comparison {
            program: program.name(),
            setting: setting.name(),
            limits,
            time_ratio: median(&runs, |run| run.seconds) / seconds,
            memory_stalled_ratio: Some(stalled_ratio).filter(|ratio| ratio.is_finite()),
            runs,
        }
    };
    Ok(Setting::ALL.into_iter().zip(runs).map(comparison).collect())
}

fn print_comparison(comparison: &Comparison) {
    let Comparison { program, setting, runs, time_ratio, memory_stalled_ratio, .. } = comparison;
    let seconds = |run: &Run| run.seconds;
    let smallest = runs.iter().map(seconds).fold(f64::INFINITY, f64::min);
    let largest = runs.iter().map(seconds).fold(0.0, f64::max);
    println!(
        "{program:<10} {setting:<9} {:>7.1}  {smallest:.1}-{largest:.1} {time_ratio:>9.3} {:>15.1} {:>6} {:>12.1} {:>7.0}",
        median(runs, seconds),
        median(runs, |run| run.memory_stalled_s),
        memory_stalled_ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")),
        median(runs, |run| run.io_stalled_s),
        median(runs, |run| run.major_faults),
    );
}

/// Restarts the agent with a setting, and waits until it is effective.
fn set(host: &RackHost, setting: Setting, interrupt: &Interrupt) -> Result<(), Failure> {
    let mut script = "cp /tmp/base.toml /etc/tarn/h0.toml; old=$(pidof host-agent)\n".to_owned();
    let _ = write!(script, "cat >> /etc/tarn/h0.toml <<'END'\n{}END\nkill $old\n", setting.agent_config());
    let _ = writeln!(
        script,
        "while [ \"$(pidof host-agent)\" = \"$old\" ] || [ -z \"$(pidof host-agent)\" ]; do sleep 0.1; done"
    );
    run_checked(host, &script)?;
    if setting == Setting::Kernel {
        return Ok(());
    }
    for _ in 0..AGENT_START_S {
        let metrics = run_checked(host, &format!("wget -qO- http://{METRICS_ADDRESS}/metrics; true"))?;
        if metrics
            .lines()
            .any(|line| line.starts_with("tarn_eviction_cycles_total") && line.contains("decided"))
        {
            return Ok(());
        }
        wait(Duration::from_secs(1), interrupt)?;
    }
    Err(Failure::TimedOut { event: "early eviction to begin", limit: Duration::from_secs(AGENT_START_S) })
}

/// Runs a program in a new cgroup.
fn measure(host: &RackHost, program: Program, limits: Option<Limits>) -> Result<Run, Failure> {
    let mut script = format!("cg={CGROUPS}/{}\nmkdir $cg\n", program.name());
    if let Some(Limits { memory_mib, written_bytes_per_s }) = limits {
        let _ = writeln!(script, "echo {memory_mib}M > $cg/memory.max || exit 1");
        let _ = writeln!(
            script,
            "echo \"$(cat /sys/class/block/vda/dev) wbps={written_bytes_per_s}\" > $cg/io.max || exit 1"
        );
    }
    script += "(while :; do echo $(cut -d ' ' -f 1 /proc/uptime) $(cat $cg/memory.current); sleep 0.1; done) > /tmp/usage 2> /dev/null &
sampler=$!
";
    script += &program.script();
    script += "kill $sampler
echo run $start $end
echo peak $(cat $cg/memory.peak)
echo faults $(sed -n 's/^pgmajfault //p' $cg/memory.stat)
sed -n 's/^full.*total=/memory /p' $cg/memory.pressure
sed -n 's/^full.*total=/io /p' $cg/io.pressure
while ! rmdir $cg; do sleep 0.1; done
cat /tmp/usage
";
    let output = host.run_with_timeout(&script, RUN_TIMEOUT)?;
    let run = if output.status == 0 { parse_run(&output.text) } else { None };
    run.ok_or_else(|| unexpected_output(program.name(), &output.text))
}

/// Parses the output of the script of a run.
fn parse_run(output: &str) -> Option<Run> {
    let numbers = |name: &str| -> Option<Vec<f64>> {
        let line = output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        line.split_whitespace().map(|word| word.parse().ok()).collect()
    };
    let [start, end] = numbers("run")?[..] else { return None };
    let peak = *numbers("peak")?.first()?;
    let mut usage = output.lines().filter_map(|line| {
        let (at, bytes) = line.split_once(' ')?;
        Some((at.parse::<f64>().ok()?, bytes.parse::<f64>().ok()?))
    });
    let (reached, bytes) =
        usage.find(|(at, bytes)| *at > start && *bytes >= 0.9 * peak).unwrap_or((end, peak));
    Some(Run {
        seconds: end - start,
        memory_stalled_s: numbers("memory")?.first()? / 1e6,
        io_stalled_s: numbers("io")?.first()? / 1e6,
        peak_mib: peak / f64::from(1 << 20),
        major_faults: *numbers("faults")?.first()?,
        growth: bytes / (reached - start).max(0.1),
    })
}

/// Returns the median of a measurement of at least one run.
fn median(runs: &[Run], of: impl Fn(&Run) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { f64::midpoint(values[middle - 1], values[middle]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_a_run_is_parsed() {
        let output = "filled with 3 keys of 4 bytes\nrun 10.5 20.5\npeak 104857600\nfaults 7\nmemory 2500000\nio 1500000\n\
            10.2 0\n10.6 1048576\n12.5 99614720\n20.0 104857600\n";
        let run = parse_run(output).unwrap();
        assert_eq!((run.seconds, run.memory_stalled_s, run.io_stalled_s), (10.0, 2.5, 1.5));
        assert_eq!((run.peak_mib, run.major_faults), (100.0, 7.0));
        assert_eq!(run.growth, 99_614_720.0 / 2.0);
        assert!(parse_run("run 1 2\npeak 5\nfaults x\nmemory 1\nio 1\n").is_none());
    }

    #[test]
    fn median_of_an_even_number_is_the_mean_of_the_middle_values() {
        let run = |seconds| Run {
            seconds,
            memory_stalled_s: 0.0,
            io_stalled_s: 0.0,
            peak_mib: 0.0,
            major_faults: 0.0,
            growth: 0.0,
        };
        let seconds = |run: &Run| run.seconds;
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0].map(run), seconds), 2.5);
        assert_eq!(median(&[4.0, 1.0, 3.0].map(run), seconds), 3.0);
    }
}
