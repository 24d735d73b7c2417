//! `cargo xtask rack symbiosis`: two unmodified Debian programs share one emulated host. mbw copies
//! memory sequentially, memcached serves keys by Zipf's law. Memory beyond their shares is on a
//! slow drive. First each has half of everything, then the agent decides; the results of both are
//! printed.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use emulated_host::{
    Artifacts, HostError,
    rack::{Device, Drive, Plan, Programs, Rack, RackHost, RackPlan, TENANT_SETUP_SCRIPT},
};

use crate::{bed, failure::Failure, step::build, wait::Patience};

/// Shared resources, in MiB and MB/s.
const MEMORY_MIB: u64 = 112;
const LINK_MB_S: u32 = 16;
/// The swap drive, in MiB.
const DRIVE_MIB: u32 = 1024;
/// An array of the two that are copied; memcached's keys, of a page each.
const ARRAY_MIB: u32 = 44;
const KEYS: u32 = 22_000;
const VALUE_BYTES: u32 = 3900;
/// How long a command in the host may take.
const COMMAND_WITHIN: Duration = Duration::from_secs(120);
/// How long memcached may take to be filled.
const FILLED_WITHIN: Duration = Duration::from_secs(240);
/// How long the load may go on.
const LOAD_S: u64 = 3600;

/// For how long.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seconds of an epoch, 2 to 60
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=60))]
    epoch: u64,
    /// Epochs before the second measurement, 3 to 60
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(3..=60))]
    epochs: u64,
    /// Duration of each measurement in seconds, 30 to 600: a copy takes ten
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(30..=600))]
    seconds: u64,
}

/// Results of a measurement.
#[derive(Clone, Copy, Debug)]
struct Did {
    /// MiB per second that were copied.
    copied: f64,
    /// Keys per second that were got.
    got: f64,
}

/// Setup script of the host: two tenants get half of everything each.
fn prepare() -> String {
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

/// Settings of the agent.
fn settings(epoch_s: u64) -> String {
    format!(
        "[symbiosis]\ncgroups = \"/sys/fs/cgroup/tenants\"\nmemory_mib = {MEMORY_MIB}\nbandwidth_mb_s = {LINK_MB_S}\n\
         epoch_s = {epoch_s}\nenforce = \"swap\"\nremote = \"/dev/vda\"\n"
    )
}

/// Runs both measurements and prints the results.
///
/// # Errors
/// A requirement is missing, or a program on the host fails.
pub fn run(args: &Args, folder: &Path) -> Result<(), Failure> {
    let bed = Artifacts::open(&bed::ensure()?)?;
    let patience = Patience::new()?;
    let plan = plan(&bed)?;
    eprintln!("── a host boots; logs are in {}", folder.join("logs").display());
    let rack = Rack::start(&bed, plan, folder, || patience.lasts()).map_err(|error| match error {
        HostError::Interrupted => Failure::Interrupted,
        other => other.into(),
    })?;
    let host = &rack.hosts().all()[0];
    begin(host, &patience)?;
    eprintln!("── each has half of {MEMORY_MIB} MiB and of {LINK_MB_S} MB/s, for {} s", args.seconds);
    let before = measure(host, args.seconds, &patience)?;
    eprintln!("── the agent decides, every {} s, {} times", args.epoch, args.epochs);
    command(
        host,
        &format!("cat >> /etc/tarn/h0.toml <<'END'\n{}END\nkill $(pidof host-agent)", settings(args.epoch)),
    )?;
    // It starts, measures one epoch, and then decides.
    wait(args.epoch * (args.epochs + 1), &patience)?;
    let after = measure(host, args.seconds, &patience)?;
    say(host, &rack, before, after)
}

fn plan(bed: &Artifacts) -> Result<RackPlan, Failure> {
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host", "zipf-load"];
    let [manager, agent, tarn, power_off, load] = build(names)?;
    let mut hosts = Plan::new(1, vec![Device { serial: 1, gib: 1, is_aligned: true }]);
    hosts.cpus = 2;
    hosts.drives = vec![Drive { mib: DRIVE_MIB, mb_s: LINK_MB_S }];
    hosts.programs = vec![load, tarn.clone(), bed.tool("mbw"), bed.tool("memcached")];
    hosts.files = vec![(bed.tool("libstdbuf.so"), "lib/libstdbuf.so".to_owned())];
    hosts.append += " psi=1";
    hosts.script = prepare();
    Ok(RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, "dax"))
}

/// Starts both programs, each in its cgroup, and the load outside; waits until memcached is full.
fn begin(host: &RackHost, patience: &Patience) -> Result<(), Failure> {
    let inside = |tenant: &str, program: &str| {
        format!(
            "sh -c 'echo $$ > /sys/fs/cgroup/tenants/{tenant}/cgroup.procs; exec {program}' > /tmp/{tenant}.log 2>&1 &"
        )
    };
    let cache_mib = KEYS / 1024 * 5;
    command(host, &inside("cache", &format!("memcached -u root -s /tmp/cache.sock -m {cache_mib} -t 1")))?;
    command(
        host,
        &format!(
            "while [ ! -e /tmp/cache.sock ]; do sleep 0.1; done; zipf-load --socket /tmp/cache.sock --keys {KEYS} --value-bytes {VALUE_BYTES} --seconds {LOAD_S} > /tmp/load.log 2>&1 &"
        ),
    )?;
    eprintln!("── memcached is filled with {KEYS} keys");
    let give_up = Instant::now() + FILLED_WITHIN;
    loop {
        let said = command(host, "cat /tmp/load.log /tmp/cache.log")?;
        if said.contains(" a second") {
            break;
        }
        if said.contains("rror") || said.contains("can't") {
            return Err(answer("memcached or its load", &said));
        }
        if Instant::now() > give_up {
            return Err(Failure::Late { what: "memcached's last key", within: FILLED_WITHIN });
        }
        wait(1, patience)?;
    }
    // Its output to a file is buffered by default.
    let stream = format!("env LD_PRELOAD=/lib/libstdbuf.so _STDBUF_O=L mbw -n 1000000 -t 0 {ARRAY_MIB}");
    command(host, &inside("stream", &stream)).map(drop)
}

/// Measures both programs for a time, after a few seconds to fill their memory.
fn measure(host: &RackHost, seconds: u64, patience: &Patience) -> Result<Did, Failure> {
    wait(seconds / 3, patience)?;
    let lines = |log: &str| -> Result<usize, Failure> {
        let count = command(host, &format!("wc -l < /tmp/{log}.log"))?;
        count.trim().parse().map_err(|_| answer("wc", &count))
    };
    let (stream, load) = (lines("stream")?, lines("load")?);
    wait(seconds, patience)?;
    let new = |log: &str, from: usize| command(host, &format!("tail -n +{} /tmp/{log}.log", from + 1));
    let (stream, load) = (new("stream", stream)?, new("load", load)?);
    Ok(Did {
        copied: copied(&stream).ok_or_else(|| answer("mbw", &stream))?,
        got: got(&load).ok_or_else(|| answer("zipf-load", &load))?,
    })
}

/// MiB per second over all copies, each a line with `MiB: 72.0` and `Elapsed: 0.5` between tabs.
fn copied(log: &str) -> Option<f64> {
    let number = |line: &str, name: &str| -> Option<f64> {
        line.split('\t').find_map(|part| part.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
    };
    let all: Vec<(f64, f64)> = log
        .lines()
        .filter(|line| !line.starts_with("AVG"))
        .filter_map(|line| Some((number(line, "MiB: ")?, number(line, "Elapsed: ")?)))
        .collect();
    let (mib, seconds) = all.iter().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    (seconds > 0.0).then(|| mib / seconds)
}

/// The mean of lines as `1234 a second, 0 absent`.
fn got(log: &str) -> Option<f64> {
    let all: Vec<f64> = log.lines().filter_map(|line| line.split_once(" a second")?.0.parse().ok()).collect();
    (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
}

fn say(host: &RackHost, rack: &Rack, before: Did, after: Did) -> Result<(), Failure> {
    let line = |name: &str, unit: &str, before: f64, after: f64| {
        println!("{name:<22} {before:>9.1} {after:>9.1} {unit:<8} {:>6.2} times", after / before);
    };
    println!("{:<22} {:>9} {:>9}", "", "half each", "symbiosis");
    line("stream (mbw)", "MiB/s", before.copied, after.copied);
    line("cache (memcached)", "keys/s", before.got, after.got);
    let mean = (after.copied / before.copied * after.got / before.got).sqrt();
    println!("geometric mean: {mean:.2} times");
    for tenant in ["stream", "cache"] {
        let limits = format!(
            "cd /sys/fs/cgroup/tenants/{tenant}; echo $(($(cat memory.high) >> 20)) MiB, $(cat io.max)"
        );
        print!("{tenant}: {}", command(host, &limits)?);
    }
    let shares = rack.tarn(&["explain", "shares", "h0"]).output().map_err(Failure::start("tarn"))?;
    print!("\n{}", String::from_utf8_lossy(&shares.stdout));
    Ok(())
}

fn command(host: &RackHost, text: &str) -> Result<String, Failure> {
    let said = host.run_within(text, COMMAND_WITHIN)?;
    match said.status {
        0 => Ok(said.text),
        _ => Err(answer(text, &said.text)),
    }
}

fn answer(program: &str, said: &str) -> Failure {
    let why = said.chars().take(500).collect();
    Failure::Answer { program: program.chars().take(60).collect(), why }
}

fn wait(seconds: u64, patience: &Patience) -> Result<(), Failure> {
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        patience.pause()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_say_is_understood() {
        let log = "0\tMethod: MEMCPY\tElapsed: 1.50000\tMiB: 72.00000\tCopy: 48.000 MiB/s\n\
            1\tMethod: MEMCPY\tElapsed: 0.50000\tMiB: 72.00000\tCopy: 144.000 MiB/s\n\
            AVG\tMethod: MEMCPY\tElapsed: 1.00000\tMiB: 72.00000\tCopy: 72.000 MiB/s\n";
        assert_eq!(copied(log), Some(72.0));
        assert_eq!(
            got("filled with 3 keys of 4 bytes\n100 a second, 0 absent\n300 a second, 2 absent\n"),
            Some(200.0)
        );
        assert_eq!((copied(""), got("")), (None, None));
    }
}
