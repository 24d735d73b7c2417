//! `cargo xtask rack symbiosis`: measures Symbiosis with two unmodified Debian programs on one
//! emulated host. mbw copies memory sequentially. memcached serves Zipf-distributed keys. Memory
//! beyond the share of a program is swapped to a slow drive. The programs are measured twice: with
//! equal shares, and with shares set by the agent.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use emulated_host::{
    Artifacts,
    rack::{Device, Drive, Plan, Programs, Rack, RackHost, RackPlan, TENANT_SETUP_SCRIPT},
};

use super::commands::{run_checked, unexpected_output, wait};
use crate::{artifacts, failure::Failure, step::build_programs, wait::Interrupt};

/// Memory that both programs share, in MiB.
const MEMORY_MIB: u64 = 112;
/// Bandwidth of the link that both programs share, in MB/s.
const LINK_MB_S: u32 = 16;
/// Size of the swap drive, in MiB.
const DISK_MIB: u32 = 1024;
/// Size of each of the two arrays of mbw, in MiB.
const STREAM_ARRAY_MIB: u32 = 44;
/// Number of keys in memcached.
const KEY_COUNT: u32 = 22_000;
/// Size of a value in memcached, so that each key occupies about one page.
const VALUE_BYTES: u32 = 3900;
/// Time limit to fill memcached.
const FILL_TIMEOUT: Duration = Duration::from_secs(240);
/// Duration of the load on memcached, in seconds. It is longer than all measurements.
const LOAD_DURATION_S: u64 = 3600;

/// Options of `rack symbiosis`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Duration of an epoch in seconds, 2 to 60
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=60))]
    epoch: u64,
    /// Number of epochs before the second measurement, 3 to 60
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..=60))]
    epochs: u64,
    /// Duration of each measurement in seconds, 30 to 600; one copy of mbw takes about 10 s
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(30..=600))]
    seconds: u64,
}

/// Throughput of both programs.
#[derive(Clone, Copy, Debug)]
struct Throughput {
    /// Copy rate of mbw, in MiB per second.
    mib_per_s: f64,
    /// Request rate of memcached, in keys per second.
    keys_per_s: f64,
}

/// Returns the setup script of the host, which gives each of two tenants half of the memory and
/// half of the bandwidth.
fn setup_script() -> String {
    let (half_bytes, half_rate) = ((MEMORY_MIB / 2) << 20, u64::from(LINK_MB_S) / 2 * 1_000_000);
    format!(
        "{TENANT_SETUP_SCRIPT}
for tenant in stream cache; do
  mkdir /sys/fs/cgroup/tenants/$tenant
  echo {half_bytes} > /sys/fs/cgroup/tenants/$tenant/memory.high
  echo \"$(cat /sys/class/block/vda/dev) rbps={half_rate} wbps={half_rate}\" > /sys/fs/cgroup/tenants/$tenant/io.max
done
"
    )
}

/// Returns the section `[symbiosis]` of the agent configuration.
fn agent_config(epoch_s: u64) -> String {
    format!(
        "[symbiosis]\ncgroups = \"/sys/fs/cgroup/tenants\"\nmemory_mib = {MEMORY_MIB}\nbandwidth_mb_s = {LINK_MB_S}\n\
         epoch_s = {epoch_s}\nenforce = \"swap\"\nremote = \"/dev/vda\"\n"
    )
}

/// Runs both measurements and prints the results.
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
    start_programs(host, &interrupt)?;
    eprintln!("── measuring an equal split of {MEMORY_MIB} MiB and {LINK_MB_S} MB/s for {} s", args.seconds);
    let before = measure_throughput(host, args.seconds, &interrupt)?;
    eprintln!("── the agent sets the shares every {} s for {} epochs", args.epoch, args.epochs);
    run_checked(
        host,
        &format!(
            "cat >> /etc/tarn/h0.toml <<'END'\n{}END\nkill $(pidof host-agent)",
            agent_config(args.epoch)
        ),
    )?;
    // The agent measures one epoch before it sets shares for the first time.
    wait(Duration::from_secs(args.epoch * (args.epochs + 1)), &interrupt)?;
    let after = measure_throughput(host, args.seconds, &interrupt)?;
    print_results(host, &rack, before, after)
}

fn plan(artifacts: &Artifacts) -> Result<RackPlan, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host", "zipf-load"];
    let [manager, agent, tarn, power_off, load] = build_programs(names)?;
    let mut hosts = Plan::new(1, vec![Device { serial: 1, gib: 1, is_aligned: true }]);
    hosts.cpus = 2;
    hosts.drives = vec![Drive { mib: DISK_MIB, mb_s: LINK_MB_S, is_remote: false }];
    hosts.programs = vec![load, tarn.clone(), artifacts.tool_path("mbw"), artifacts.tool_path("memcached")];
    hosts.files = vec![(artifacts.tool_path("libstdbuf.so"), "lib/libstdbuf.so".to_owned())];
    hosts.cmdline_extra += " psi=1";
    hosts.script = setup_script();
    Ok(RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, "dax"))
}

/// Starts both programs, each in its cgroup, and the load on memcached outside of the cgroups.
/// Returns when memcached is filled.
fn start_programs(host: &RackHost, interrupt: &Interrupt) -> Result<(), Failure> {
    let in_cgroup = |tenant: &str, program: &str| {
        format!(
            "sh -c 'echo $$ > /sys/fs/cgroup/tenants/{tenant}/cgroup.procs; exec {program}' > /tmp/{tenant}.log 2>&1 &"
        )
    };
    let cache_mib = KEY_COUNT / 1024 * 5;
    run_checked(
        host,
        &in_cgroup("cache", &format!("memcached -u root -s /tmp/cache.sock -m {cache_mib} -t 1")),
    )?;
    run_checked(
        host,
        &format!(
            "while [ ! -e /tmp/cache.sock ]; do sleep 0.1; done; zipf-load --socket /tmp/cache.sock --keys {KEY_COUNT} --value-bytes {VALUE_BYTES} --seconds {LOAD_DURATION_S} > /tmp/load.log 2>&1 &"
        ),
    )?;
    eprintln!("── filling memcached with {KEY_COUNT} keys");
    let deadline = Instant::now() + FILL_TIMEOUT;
    loop {
        let output = run_checked(host, "cat /tmp/load.log /tmp/cache.log")?;
        if output.contains(" hits/s") {
            break;
        }
        if output.contains("rror") || output.contains("can't") {
            return Err(unexpected_output("memcached or its load", &output));
        }
        if Instant::now() > deadline {
            return Err(Failure::TimedOut { event: "memcached to be filled", limit: FILL_TIMEOUT });
        }
        wait(Duration::from_secs(1), interrupt)?;
    }
    // stdbuf makes mbw write each line of output immediately.
    let stream =
        format!("env LD_PRELOAD=/lib/libstdbuf.so _STDBUF_O=L mbw -n 1000000 -t 0 {STREAM_ARRAY_MIB}");
    run_checked(host, &in_cgroup("stream", &stream)).map(drop)
}

/// Measures the throughput of both programs for `seconds`. Before that, waits for a third of this
/// time, in which the programs fill their memory.
fn measure_throughput(host: &RackHost, seconds: u64, interrupt: &Interrupt) -> Result<Throughput, Failure> {
    wait(Duration::from_secs(seconds / 3), interrupt)?;
    let lines = |log: &str| -> Result<usize, Failure> {
        let count = run_checked(host, &format!("wc -l < /tmp/{log}.log"))?;
        count.trim().parse().map_err(|_| unexpected_output("wc", &count))
    };
    let (stream, load) = (lines("stream")?, lines("load")?);
    wait(Duration::from_secs(seconds), interrupt)?;
    let new_lines =
        |log: &str, from: usize| run_checked(host, &format!("tail -n +{} /tmp/{log}.log", from + 1));
    let (stream, load) = (new_lines("stream", stream)?, new_lines("load", load)?);
    Ok(Throughput {
        mib_per_s: parse_mib_per_s(&stream).ok_or_else(|| unexpected_output("mbw", &stream))?,
        keys_per_s: parse_keys_per_s(&load).ok_or_else(|| unexpected_output("zipf-load", &load))?,
    })
}

/// Returns the mean rate of all copies in the log of mbw, in MiB per second. A line has fields such
/// as `MiB: 72.0` and `Elapsed: 0.5`, separated by tabs.
fn parse_mib_per_s(log: &str) -> Option<f64> {
    let number = |line: &str, name: &str| -> Option<f64> {
        line.split('\t').find_map(|part| part.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
    };
    let copies: Vec<(f64, f64)> = log
        .lines()
        .filter(|line| !line.starts_with("AVG"))
        .filter_map(|line| Some((number(line, "MiB: ")?, number(line, "Elapsed: ")?)))
        .collect();
    let (mib, seconds) = copies.iter().fold((0.0, 0.0), |sum, copy| (sum.0 + copy.0, sum.1 + copy.1));
    (seconds > 0.0).then(|| mib / seconds)
}

/// Returns the mean rate in the log of the load, in keys per second. A line has the format `1234
/// hits/s, 0 misses`.
fn parse_keys_per_s(log: &str) -> Option<f64> {
    let rates: Vec<f64> = log.lines().filter_map(|line| line.split_once(" hits/s")?.0.parse().ok()).collect();
    (!rates.is_empty()).then(|| rates.iter().sum::<f64>() / rates.len() as f64)
}

fn print_results(host: &RackHost, rack: &Rack, before: Throughput, after: Throughput) -> Result<(), Failure> {
    let line = |name: &str, unit: &str, before: f64, after: f64| {
        println!("{name:<22} {before:>9.1} {after:>9.1} {unit:<8} {:>6.2} times", after / before);
    };
    println!("{:<22} {:>9} {:>9}", "", "equal", "symbiosis");
    line("stream (mbw)", "MiB/s", before.mib_per_s, after.mib_per_s);
    line("cache (memcached)", "keys/s", before.keys_per_s, after.keys_per_s);
    let mean = (after.mib_per_s / before.mib_per_s * after.keys_per_s / before.keys_per_s).sqrt();
    println!("geometric mean: {mean:.2} times");
    for tenant in ["stream", "cache"] {
        let limits = format!(
            "cd /sys/fs/cgroup/tenants/{tenant}; echo $(($(cat memory.high) >> 20)) MiB, $(cat io.max)"
        );
        print!("{tenant}: {}", run_checked(host, &limits)?);
    }
    let shares =
        rack.tarn_command(&["explain", "shares", "h0"]).output().map_err(Failure::start_error("tarn"))?;
    print!("\n{}", String::from_utf8_lossy(&shares.stdout));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_output_is_parsed() {
        let log = "0\tMethod: MEMCPY\tElapsed: 1.50000\tMiB: 72.00000\tCopy: 48.000 MiB/s\n\
            1\tMethod: MEMCPY\tElapsed: 0.50000\tMiB: 72.00000\tCopy: 144.000 MiB/s\n\
            AVG\tMethod: MEMCPY\tElapsed: 1.00000\tMiB: 72.00000\tCopy: 72.000 MiB/s\n";
        assert_eq!(parse_mib_per_s(log), Some(72.0));
        assert_eq!(
            parse_keys_per_s("filled with 3 keys of 4 bytes\n100 hits/s, 0 misses\n300 hits/s, 2 misses\n"),
            Some(200.0)
        );
        assert_eq!((parse_mib_per_s(""), parse_keys_per_s("")), (None, None));
    }
}
