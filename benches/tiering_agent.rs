//! Measures the processor time that fair tiering adds to the agent of a host with 100 tenants, all of
//! which have pages in slower memory.
//!
//! Goal: less than 1 % of a core.
//!
//! The host is emulated, so that all programs are slower than on hardware. The report therefore also
//! contains the processor time of another program, here and on the emulated host.

use std::process::ExitCode;

use benches::report::{Rounds, format_table, run_and_print};
use clap::Parser;
use tests::{
    emulated_rack::EmulatedRack,
    rack::programs_dir,
    tiered_tenants::{CGROUPS, start_rack, start_tenant},
};

/// Number of tenants.
const TENANTS: u64 = 100;
/// Number of tenants that copy memory all the time. The others are stopped.
const RUNNING: u64 = 4;
/// Memory and protection of each tenant, in MiB.
const DEMAND_MIB: u64 = 4;
const PROTECTION_MIB: u64 = 1;
/// Local memory that the tenants share, in MiB.
const LOCAL_MIB: u64 = 250;
/// Ticks per second of the processor times in procfs.
const TICKS_PER_S: f64 = 100.0;
/// Scenario of the program whose speed is compared.
const SCENARIO: &str =
    r#"{"name": "speed", "capacity_gb": 40, "seconds": 600, "tenants": [{"name": "a", "demand_gb": 80}]}"#;

/// Measure the processor time of fair tiering
#[derive(Debug, Parser)]
struct Args {
    /// Duration of each measurement in seconds. The report shows medians
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=600))]
    seconds: u64,
    /// Number of measurements
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=50))]
    rounds: u32,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("tiering_agent", async {
        Ok(tokio::task::spawn_blocking(move || measure(&args)).await.expect("the rack works"))
    })
    .await
}

fn measure(args: &Args) -> String {
    let protections: Vec<_> = (0..TENANTS).map(|at| (name(at), PROTECTION_MIB)).collect();
    let rack = start_rack(LOCAL_MIB, &protections);
    for at in 0..TENANTS {
        start_tenant(&rack, &name(at), DEMAND_MIB);
    }
    rack.wait_until("all tenants have memory and are listed", |rack| {
        let tenants = rack.tarn_json("get tenants h0");
        let sizes = tenants.as_array().into_iter().flatten().map(|tenant| {
            tenant["local_bytes"].as_u64().unwrap_or(0) + tenant["slow_bytes"].as_u64().unwrap_or(0)
        });
        sizes.filter(|size| *size >= DEMAND_MIB << 20).count() as u64 == TENANTS
    });
    for at in RUNNING..TENANTS {
        rack.run(0, &format!("kill -STOP $(cat {CGROUPS}/{}/cgroup.procs)", name(at)));
    }
    // Puts pages of each tenant into slower memory.
    for at in 0..TENANTS {
        rack.run(0, &format!("echo 1M > {CGROUPS}/{}/memory.reclaim || true", name(at)));
    }
    let (mut with, mut without) = (Rounds::default(), Rounds::default());
    for _ in 0..args.rounds {
        with.add(agent_share(&rack, args.seconds));
    }
    rack.run(
        0,
        "sed -i '/^\\[tiering/,$d' /etc/tarn/h0.toml; pid=$(pidof host-agent); kill $pid; \
         while [ -e /proc/$pid ]; do sleep 0.1; done; until pidof host-agent; do sleep 0.1; done",
    );
    for _ in 0..args.rounds {
        without.add(agent_share(&rack, args.seconds));
    }
    report(&with, &without, slowdown(&rack))
}

fn report(with: &Rounds, without: &Rounds, slowdown: f64) -> String {
    let rows = vec![
        vec!["with fair tiering".to_owned(), with.spread(2)],
        vec!["without".to_owned(), without.spread(2)],
    ];
    let table = format_table(&["100 tenants", "% of an emulated core: min median max"], &rows);
    let added = with.median() - without.median();
    format!(
        "{table}time tiering_agent_100 {added:.2} % of an emulated core\n\
         time tiering_agent_100_slowdown_of_emulation {slowdown:.1} x\n"
    )
}

fn name(at: u64) -> String {
    format!("t{at}")
}

/// Returns the processor time of the agent in a period, in percent of a core.
fn agent_share(rack: &EmulatedRack, seconds: u64) -> f64 {
    let output = rack.run(
        0,
        &format!(
            "pid=$(pidof host-agent); cat /proc/uptime /proc/$pid/stat; sleep {seconds}; \
             cat /proc/uptime /proc/$pid/stat"
        ),
    );
    let lines: Vec<&str> = output.lines().collect();
    let uptime = |line: &str| line.split(' ').next().and_then(|text| text.parse::<f64>().ok());
    let [before, after] = [[0, 1], [2, 3]]
        .map(|[time, stat]| (uptime(lines[time]).expect("an uptime"), cpu_seconds(lines[stat], 11)));
    100.0 * (after.1 - before.1) / (after.0 - before.0)
}

/// Returns the sum of two neighbouring fields of `/proc/PID/stat`, in seconds. `field` is the number of
/// fields between the name of the program and the first one.
fn cpu_seconds(stat: &str, field: usize) -> f64 {
    let (_, fields) = stat.rsplit_once(") ").expect("the line contains the name of the program");
    let fields: Vec<&str> = fields.split(' ').collect();
    let ticks = fields[field..field + 2].iter().map(|text| text.parse::<f64>().expect("a number"));
    ticks.sum::<f64>() / TICKS_PER_S
}

/// Returns the processor time of a program on the emulated host, divided by its time on this machine.
fn slowdown(rack: &EmulatedRack) -> f64 {
    let script = |tarn: &str, folder: &str| {
        format!(
            "echo '{SCENARIO}' > {folder}/speed.json; {tarn} evaluate tiering --scenario {folder}/speed.json \
             > /dev/null; cat /proc/$$/stat"
        )
    };
    let folder = tempfile::tempdir().expect("a temporary folder is created");
    let tarn = programs_dir().join("tarn").display().to_string();
    let here = std::process::Command::new("sh")
        .args(["-c", &script(&tarn, &folder.path().display().to_string())])
        .output()
        .expect("sh runs");
    let emulated = rack
        .run(0, &format!("cat > /tmp/speed.sh <<'END'\n{}\nEND\nsh /tmp/speed.sh", script("tarn", "/tmp")));
    cpu_seconds(emulated.trim(), 13) / cpu_seconds(String::from_utf8_lossy(&here.stdout).trim(), 13)
}
