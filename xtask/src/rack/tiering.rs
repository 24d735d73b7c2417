//! `cargo xtask rack tiering`: compares fair tiering with the tiering of the kernel, and with none, on
//! one emulated host. The tenants are unmodified Debian programs that copy memory (mbw). The scenarios
//! are those of Equilibria, section V, scaled from GB to MiB. The host is emulated and its tiers are
//! equally fast, so that only placement and page moves are compared.

mod figure;
mod scenario;

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::ValueEnum as _;
use emulated_host::{
    Artifacts,
    rack::{Device, Plan, Programs, Rack, RackHost, RackPlan, TIERED_TENANTS_SETUP_SCRIPT},
};
use serde::Serialize;

use self::scenario::{Scenario, Tenant};
use super::commands::{run_checked, unexpected_output, wait};
use crate::{artifacts, failure::Failure, step::build_programs, wait::Interrupt};

/// Settings of the kernel's free memory: a smaller minimum than for huge pages, a larger distance between the
/// watermarks, and short lists of free pages per processor. Slower memory cannot contain objects of the kernel,
/// so that the kernel would otherwise kill a tenant when tenants fill the small local memory.
const FREE_MEMORY_SCRIPT: &str = "cd /proc/sys/vm; echo 8192 > min_free_kbytes; echo 50 > watermark_scale_factor; \
                                  echo 1000 > percpu_pagelist_high_fraction; ";
/// Local memory that is free besides the memory of the tenants, in MiB: most of it is the kernel's watermark for
/// demotion, the rest is for other programs of the host.
const SPARE_MIB: u64 = 23;
/// Largest difference from the expected local memory, as a fraction.
const TOLERANCE: f64 = 0.05;
/// Interval between samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(2);
/// Time at the end of a run over which the results are averaged, in seconds.
const MEAN_OVER_S: f64 = 20.0;
/// Directory of the tenants' cgroups.
const CGROUPS: &str = "/sys/fs/cgroup/tenants";
/// Log level of the agent, whose log then shows every order.
const LOG_SCRIPT: &str = "export RUST_LOG=info,host_agent::fair_tiering=debug\n";

/// Options of `rack tiering`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Duration of each scenario in seconds, after all tenants have started, 30 to 600
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u64).range(30..=600))]
    seconds: u64,
    /// Run the scenario of this file instead of those of the paper, with GB scaled to MiB; see `cargo xtask sim tiering`
    #[arg(long, value_name = "FILE")]
    scenario: Option<PathBuf>,
    /// Compare only this mode
    #[arg(long, value_enum)]
    mode: Option<Mode>,
    /// Write the results and the timelines to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw a timeline of each scenario and mode into this directory, as SVG with its numbers as JSON
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Mechanism that moves pages between the tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// Nothing: allocations that do not fit into local memory stay in slower memory
    NoControl,
    /// The kernel: demotion, and NUMA balancing with promotion (TPP)
    Kernel,
    /// Fair tiering of the agent
    Equilibria,
}

/// Memory of the tenants at one time.
#[derive(Clone, Debug, Serialize)]
struct Sample {
    /// Time since the start of the last tenant, in seconds.
    second: f64,
    local_mib: Vec<f64>,
    /// Pages that the kernel has migrated, demoted and promoted since its start, for all processes.
    migrated_pages: u64,
    demoted_pages: u64,
    promoted_pages: u64,
}

/// Result of one scenario in one mode.
#[derive(Debug, Serialize)]
struct Run {
    mode: Mode,
    scenario: String,
    /// Names of the tenants, in the order of the starts. All lists have this order.
    tenants: Vec<String>,
    /// Local memory of each tenant with fair tiering.
    expected_mib: Vec<f64>,
    /// Mean at the end of the run.
    local_mib: Vec<f64>,
    /// Largest local memory beyond the bound of each tenant, after its start; `None` without a bound.
    bound_excess_mib: Vec<Option<f64>>,
    /// Time after which all tenants have the expected local memory until the end, in seconds.
    converged_s: Option<f64>,
    migrated_pages_per_s: f64,
    /// Whether NUMA balancing promoted pages, so that the mode `kernel` is TPP.
    has_kernel_promotions: bool,
    timeline: Vec<Sample>,
}

/// All results.
#[derive(Debug, Serialize)]
struct Results {
    runs: Vec<Run>,
}

/// Runs all scenarios in all modes, and prints the results.
///
/// # Errors
/// Returns an error if an artifact is missing or a program on the host fails.
pub fn run(args: &Args, folder: &Path) -> Result<(), Failure> {
    [Some(folder), args.figures.as_deref()].into_iter().flatten().try_for_each(create_folder)?;
    let artifacts = Artifacts::open(&artifacts::ensure_downloaded()?)?;
    let interrupt = Interrupt::new()?;
    let names = ["pool-manager", "host-agent", "tarn", "power-off-host"];
    let programs = build_programs(names)?;
    let scenarios = match &args.scenario {
        Some(file) => vec![scenario::read(file, &programs[2], folder)?],
        None => scenario::of_paper(Duration::from_secs(args.seconds)),
    };
    let plan = plan(&artifacts, programs);
    eprintln!("── booting a host; logs are in {}", folder.join("logs").display());
    let rack = Rack::start(&artifacts, plan, folder, || interrupt.should_continue())?;
    let host = &rack.hosts().as_slice()[0];
    prepare(&rack, host, scenarios[0].local_mib())?;
    let mut results = Results { runs: Vec::new() };
    println!(
        "{:<12} {:<20} {:>20} {:>20} {:>11} {:>12}",
        "mode", "scenario", "expected MiB", "local MiB", "converged", "pages/s"
    );
    for mode in Mode::value_variants().iter().filter(|mode| args.mode.is_none_or(|only| only == **mode)) {
        for scenario in &scenarios {
            let run = run_scenario(host, *mode, scenario, &interrupt)?;
            print_run(&run);
            args.figures.as_deref().map_or(Ok(()), |folder| figure::write(folder, &run))?;
            results.runs.push(run);
        }
    }
    let Some(path) = &args.json else { return Ok(()) };
    let text = serde_json::to_string_pretty(&results).expect("numbers and names can be serialized");
    std::fs::write(path, text).map_err(Failure::file_error("write", path))
}

/// Creates a directory for output before the run, so that an error is reported early.
fn create_folder(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder).map_err(Failure::file_error("create directory", folder))
}

fn plan(artifacts: &Artifacts, programs: [PathBuf; 4]) -> RackPlan {
    let [manager, agent, tarn, power_off] = programs;
    let mut hosts = Plan::new(1, vec![Device { serial: 1, gib: 1, is_aligned: true }]);
    hosts.cpus = 2;
    hosts.programs = vec![tarn.clone(), artifacts.tool_path("mbw")];
    hosts.script = format!("{LOG_SCRIPT}{TIERED_TENANTS_SETUP_SCRIPT}");
    RackPlan::new(hosts, Programs { manager, agent, tarn, power_off }, "memory_block")
}

/// Puts the slice online, and makes local memory as small as the tenants' share by huge pages, which the
/// kernel cannot move.
fn prepare(rack: &Rack, host: &RackHost, local_mib: u64) -> Result<(), Failure> {
    for arguments in [
        ["reserve", "--host", "h0", "--vm", "slow", "--pool", "1GiB", "--cores", "1", "--wait-ready"]
            .as_slice(),
        &["commit", "slow"],
    ] {
        let output = rack.tarn_command(arguments).output().map_err(Failure::start_error("tarn"))?;
        if !output.status.success() {
            return Err(unexpected_output("tarn", &String::from_utf8_lossy(&output.stderr)));
        }
    }
    let free = local_mib + SPARE_MIB;
    let script = format!(
        "cp /etc/tarn/h0.toml /etc/tarn/without-tiering.toml; echo 3 > /proc/sys/vm/drop_caches; \
         free=$(($(awk '/MemFree/ {{ print $4 }}' /sys/devices/system/node/node0/meminfo) / 1024)); \
         {FREE_MEMORY_SCRIPT} pages=$(((free - {free}) / 2)); echo $pages > /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages; \
         cat /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
    );
    let pages = run_checked(host, &script)?;
    eprintln!("── {} huge pages of 2 MiB leave {free} MiB of local memory", pages.trim());
    Ok(())
}

/// Returns the section `[tiering]` of the agent's configuration.
fn agent_config(scenario: &Scenario) -> String {
    let mut config = format!(
        "[tiering]\ncgroups = \"{CGROUPS}\"\nlocal_mib = {}\nreservation = \"slow\"\nstep_s = 2\npromotion_mib_s = 32\n",
        scenario.local_mib()
    );
    for Tenant { name, protection_mib, bound_mib, .. } in &scenario.tenants {
        let _ = writeln!(config, "[tiering.tenants.{name}]\nprotection_mib = {protection_mib}");
        if let Some(bound) = bound_mib {
            let _ = writeln!(config, "bound_mib = {bound}");
        }
    }
    config
}

fn run_scenario(
    host: &RackHost,
    mode: Mode,
    scenario: &Scenario,
    interrupt: &Interrupt,
) -> Result<Run, Failure> {
    let (demotion, balancing) = match mode {
        Mode::NoControl => (0, 0),
        Mode::Kernel => (1, 2),
        Mode::Equilibria => (1, 0),
    };
    let config = if mode == Mode::Equilibria { agent_config(scenario) } else { String::new() };
    let script = format!(
        "cp /etc/tarn/without-tiering.toml /etc/tarn/h0.toml; cat >> /etc/tarn/h0.toml <<'END'\n{config}END\n\
         kill $(pidof host-agent); echo {demotion} > /sys/kernel/mm/numa/demotion_enabled; \
         echo {balancing} > /proc/sys/kernel/numa_balancing"
    );
    run_checked(host, &script)?;
    // With an invalid configuration, the agent ends and is started again.
    run_checked(host, "sleep 1; pid=$(pidof host-agent); sleep 2; [ \"$pid\" = \"$(pidof host-agent)\" ]")?;
    let started = Instant::now();
    for tenant in &scenario.tenants {
        wait(tenant.start.saturating_sub(started.elapsed()), interrupt)?;
        start_tenant(host, tenant)?;
    }
    let timeline = observe(host, scenario, interrupt)?;
    for Tenant { name, .. } in &scenario.tenants {
        run_checked(
            host,
            &format!(
                "kill -9 $(cat {CGROUPS}/{name}/cgroup.procs); until rmdir {CGROUPS}/{name} 2> /dev/null; do sleep 0.1; done"
            ),
        )?;
    }
    Ok(evaluate(mode, scenario, timeline))
}

/// Starts a program that copies memory all the time, in two arrays of half of this size.
fn start_tenant(host: &RackHost, Tenant { name, demand_mib, .. }: &Tenant) -> Result<(), Failure> {
    let script = format!(
        "mkdir {CGROUPS}/{name}; \
         sh -c 'echo $$ > {CGROUPS}/{name}/cgroup.procs; exec mbw -n 1000000 -t 0 {}' > /tmp/{name}.log 2>&1 &",
        demand_mib / 2
    );
    run_checked(host, &script).map(drop)
}

fn observe(host: &RackHost, scenario: &Scenario, interrupt: &Interrupt) -> Result<Vec<Sample>, Failure> {
    let started = Instant::now();
    let mut timeline = Vec::new();
    while started.elapsed() < scenario.duration {
        timeline.push(sample(host, scenario, started.elapsed().as_secs_f64())?);
        wait(SAMPLE_INTERVAL, interrupt)?;
    }
    Ok(timeline)
}

fn sample(host: &RackHost, scenario: &Scenario, second: f64) -> Result<Sample, Failure> {
    let names: Vec<&str> = scenario.tenants.iter().map(|tenant| &*tenant.name).collect();
    let script = format!(
        "cd {CGROUPS}; for t in {}; do echo tenant; \
         grep -q 'populated 1' $t/cgroup.events || {{ echo $t has ended; dmesg | grep -i 'oom' | tail -n 2; exit 1; }}; \
         cat $t/memory.numa_stat; done; echo vmstat; cat /proc/vmstat",
        names.join(" ")
    );
    let output = run_checked(host, &script)?;
    parse_sample(&output, second).ok_or_else(|| unexpected_output("memory.numa_stat", &output))
}

fn parse_sample(output: &str, second: f64) -> Option<Sample> {
    let (tenants, vmstat) = output.split_once("vmstat\n")?;
    let local_mib = |stat: &str| -> Option<f64> {
        let of = |kind: &str| -> Option<u64> {
            let line = stat.lines().find(|line| line.split(' ').next() == Some(kind))?;
            line.split(' ').find_map(|word| word.strip_prefix("N0=")?.parse().ok())
        };
        Some((of("anon")? + of("file")?) as f64 / f64::from(1 << 20))
    };
    let local_mib: Option<Vec<f64>> = tenants.split("tenant\n").skip(1).map(local_mib).collect();
    let local_mib = local_mib?;
    let count = |prefix: &str| {
        let lines = vmstat.lines().filter(|line| line.starts_with(prefix));
        lines.filter_map(|line| line.split(' ').nth(1)?.parse::<u64>().ok()).sum()
    };
    Some(Sample {
        second,
        local_mib,
        migrated_pages: count("pgmigrate_success"),
        demoted_pages: count("pgdemote_"),
        promoted_pages: count("pgpromote_success"),
    })
}

fn evaluate(mode: Mode, scenario: &Scenario, timeline: Vec<Sample>) -> Run {
    let end = timeline.last().map_or(0.0, |last| last.second);
    let at_end: Vec<&Sample> = timeline.iter().filter(|sample| sample.second >= end - MEAN_OVER_S).collect();
    let mean = |at: usize| {
        at_end.iter().map(|sample| sample.local_mib[at]).sum::<f64>() / at_end.len().max(1) as f64
    };
    let local_mib = (0..scenario.tenants.len()).map(mean).collect();
    let bound_excess = |(at, tenant): (usize, &Tenant)| {
        let largest = timeline.iter().map(|sample| sample.local_mib[at]).fold(0.0, f64::max);
        tenant.bound_mib.map(|bound| (largest - bound as f64).max(0.0))
    };
    let is_expected = |sample: &Sample| {
        let difference = |(local, tenant): (&f64, &Tenant)| (local / tenant.expected_mib - 1.0).abs();
        sample.local_mib.iter().zip(&scenario.tenants).all(|pair| difference(pair) <= TOLERANCE)
    };
    let late = timeline.iter().rposition(|sample| !is_expected(sample)).map_or(0, |last| last + 1);
    let of = |count: fn(&Sample) -> u64| {
        let (first, last) =
            (at_end.first().map_or(0, |first| count(first)), at_end.last().map_or(0, |last| count(last)));
        last.saturating_sub(first)
    };
    let covered = at_end.first().map_or(0.0, |first| end - first.second).max(f64::EPSILON);
    let promoted = timeline.last().map_or(0, |last| last.promoted_pages)
        > timeline.first().map_or(0, |first| first.promoted_pages);
    Run {
        mode,
        scenario: scenario.name.clone(),
        tenants: scenario.tenants.iter().map(|tenant| tenant.name.clone()).collect(),
        expected_mib: scenario.tenants.iter().map(|tenant| tenant.expected_mib).collect(),
        local_mib,
        bound_excess_mib: scenario.tenants.iter().enumerate().map(bound_excess).collect(),
        converged_s: timeline.get(late).map(|sample| sample.second),
        migrated_pages_per_s: of(|sample| sample.migrated_pages) as f64 / covered,
        has_kernel_promotions: promoted,
        timeline,
    }
}

fn print_run(run: &Run) {
    let mode = match run.mode {
        Mode::NoControl => "no control",
        Mode::Kernel if run.has_kernel_promotions => "kernel (TPP)",
        Mode::Kernel => "demotion only",
        Mode::Equilibria => "equilibria",
    };
    let joined = |values: &[f64]| values.iter().map(|mib| format!("{mib:.1}")).collect::<Vec<_>>().join("/");
    let (expected, local) = (joined(&run.expected_mib), joined(&run.local_mib));
    let converged = run.converged_s.map_or_else(|| "no".to_owned(), |second| format!("{second:.0} s"));
    println!(
        "{mode:<12} {:<20} {expected:>20} {local:>20} {converged:>11} {:>12.0}",
        run.scenario, run.migrated_pages_per_s
    );
    let excesses = run.tenants.iter().zip(&run.bound_excess_mib);
    for (tenant, mib) in excesses.filter_map(|(tenant, mib)| Some((tenant, (*mib)?))) {
        println!("{:<12} tenant {tenant} exceeds its bound by at most {mib:.1} MiB in a sample", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u32, local_mib: [f64; 3]) -> Sample {
        Sample {
            second: f64::from(second),
            local_mib: local_mib.to_vec(),
            migrated_pages: 100 * u64::from(second),
            demoted_pages: 0,
            promoted_pages: 0,
        }
    }

    #[test]
    fn sample_contains_memory_of_each_tenant_on_local_nodes() {
        let tenant =
            |anon: u64| format!("tenant\nanon N0={} N2=7\nanon_thp N0=9\nfile N0=1048576 N2=0\n", anon << 20);
        let output = format!(
            "{}{}{}vmstat\npgmigrate_success 17\npgdemote_kswapd 1\npgdemote_direct 2\npgpromote_success 5\n",
            tenant(9),
            tenant(8),
            tenant(7)
        );
        let sample = parse_sample(&output, 3.0).unwrap();
        assert_eq!(sample.local_mib, [10.0, 9.0, 8.0]);
        assert_eq!((sample.migrated_pages, sample.demoted_pages, sample.promoted_pages), (17, 3, 5));
        assert!(parse_sample("tenant\nvmstat\n", 3.0).is_none());
    }

    #[test]
    fn run_converges_when_it_stays_at_the_expected_memory() {
        let right = [80.0, 81.0, 79.0];
        let timeline = vec![
            at(0, [120.0, 0.0, 0.0]),
            at(10, right),
            at(20, [90.0, 80.0, 80.0]),
            at(30, right),
            at(50, right),
        ];
        let scenario = &scenario::of_paper(Duration::ZERO)[1];
        let run = evaluate(Mode::Equilibria, scenario, timeline.clone());
        assert_eq!((run.converged_s, run.local_mib), (Some(30.0), right.to_vec()));
        assert_eq!(run.bound_excess_mib, [None; 3]);
        assert!((run.migrated_pages_per_s - 100.0).abs() < 1e-9);
        let run = evaluate(Mode::Equilibria, scenario, timeline[..3].to_vec());
        assert_eq!(run.converged_s, None);
        let bounded = &scenario::of_paper(Duration::ZERO)[3];
        let run = evaluate(Mode::Equilibria, bounded, vec![at(0, [120.0, 0.0, 0.0]), at(10, right)]);
        assert_eq!(run.bound_excess_mib, [Some(40.0), None, None]);
    }
}
