//! Compares a durable one-slice `Reserve` with two puts in one transaction of etcd.
//!
//! Goal: with one client, at least the throughput of etcd. With 64 clients, at least twice the
//! throughput and at most half of the 99th percentile.
//!
//! Both servers run on one disk with production settings. The same client code loads them in turns,
//! over the same number of connections. Also measures the time until a slice is online, rejected
//! calls, and the CPU time per call of each process. Reservations are also measured while few or
//! most slices are taken.

#[path = "reserve_vs_etcd/fill_level.rs"]
mod fill_level;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use benches::{
    disk::Disk,
    etcd::{Etcd, TwoPutWriter},
    failure::Failure,
    load::{self, LoadLimits, Outcome},
    loopback::connect,
    process,
    programs::{Programs, target_folder},
    rack::{InvalidReserver, Plan, Rack, Reserver},
    report::{Rounds, format_ratio, format_table, run_and_print},
};
use clap::{Parser, ValueEnum};
use proto::bearer::{Bearer, ClientChannel};
use units::limits::RESERVATIONS_PER_HOST_MAX;

/// Maximum fraction that one round uses of the rack's slices and of the permitted reservations. It
/// is below 1 so that no call is rejected for lack of capacity.
const ROUND_RACK_FRACTION: f64 = 0.75;
/// Maximum number of slices that a round reserves if each call waits until its slice is online.
const READY_WRITES_MAX: u64 = 4096;
/// Number of concurrent clients in the loads with many clients.
const MANY_CLIENT_COUNT: usize = 64;

/// Compare durable reservations with transactions of etcd
#[derive(Debug, Parser)]
struct Args {
    /// Number of rounds. The report shows medians of all rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Duration of a measurement in seconds
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Number of connections to each server. The clients of a server share the connections
    #[arg(long, default_value_t = 8)]
    channels: usize,
    /// Folder of the store and of etcd's data, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Numbers of taken slices at which reservations are measured
    #[arg(long, value_delimiter = ',', default_value = "1000,60000")]
    taken: Vec<u32>,
    /// Measure only this part, for profiling, without ratios in the report
    #[arg(long)]
    only: Option<BenchmarkPart>,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchmarkPart {
    Etcd,
    Tarn,
    Taken,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("reserve_vs_etcd", measure(&args)).await
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs =
        if args.only == Some(BenchmarkPart::Etcd) { None } else { Some(Programs::find_or_build()?) };
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let mut report = String::new();
    if args.only != Some(BenchmarkPart::Taken) {
        report += &compare_with_etcd(args, programs.as_ref(), &disk).await?;
    }
    if let Some(programs) = programs.filter(|_| args.only.is_none_or(|part| part == BenchmarkPart::Taken)) {
        report += &fill_level::measure(args, &programs, &disk).await?;
    }
    Ok(report)
}

/// Measures etcd and Tarn in turns, and returns the report.
async fn compare_with_etcd(args: &Args, programs: Option<&Programs>, disk: &Disk) -> Result<String, Failure> {
    let etcd = match args.only {
        Some(BenchmarkPart::Tarn) => None,
        _ => Some(Etcd::start(&disk.create_folder("etcd")?, disk.path()).await?),
    };
    let rack = match programs {
        Some(programs) => Some(Rack::start(args.plan, programs, &disk.create_folder("rack")?).await?),
        None => None,
    };
    let mut comparison = Comparison::new(args, etcd, rack).await?;
    comparison.warm_up().await?;
    for round in 0..args.rounds {
        comparison.measure_round(round).await?;
    }
    Ok(comparison.report(disk))
}

/// Throughput, latency and CPU time of one kind of load, in each round.
#[derive(Debug, Default)]
struct LoadSeries {
    writes_per_second: Rounds,
    p50_us: Rounds,
    p99_us: Rounds,
    server_cpu_us: Rounds,
    agents_cpu_us: Rounds,
    clients_cpu_us: Rounds,
}

/// CPU times of the server, of all agents, and of the clients, in this order.
type CpuTimes = [Duration; 3];

/// Headings of the columns of [`LoadSeries::row`]. CPU time is per write, and includes all threads of a
/// process.
const COLUMN_HEADINGS: [&str; 7] =
    ["min-median-max", "writes/s", "p50 us", "p99 us", "server cpu us", "agents cpu us", "clients cpu us"];

impl LoadSeries {
    fn add(&mut self, outcome: &Outcome, before: CpuTimes, after: CpuTimes) {
        self.writes_per_second.add(outcome.writes_per_second());
        self.p50_us.add(outcome.quantile_us(0.50));
        self.p99_us.add(outcome.quantile_us(0.99));
        let per_write = |part: usize| {
            after[part].saturating_sub(before[part]).as_secs_f64() * 1e6 / outcome.writes as f64
        };
        self.server_cpu_us.add(per_write(0));
        self.agents_cpu_us.add(per_write(1));
        self.clients_cpu_us.add(per_write(2));
    }

    fn row(&self, name: &str) -> Vec<String> {
        let cells = [
            &self.writes_per_second,
            &self.p50_us,
            &self.p99_us,
            &self.server_cpu_us,
            &self.agents_cpu_us,
            &self.clients_cpu_us,
        ];
        std::iter::once(name.to_owned()).chain(cells.map(Rounds::summary)).collect()
    }
}

/// The compared servers with their connections, and the results of all loads.
struct Comparison<'a> {
    args: &'a Args,
    etcd: Option<(Etcd, Vec<ClientChannel>)>,
    rack: Option<(Rack, Vec<ClientChannel>)>,
    etcd_1: LoadSeries,
    etcd_64: LoadSeries,
    tarn_1: LoadSeries,
    tarn_64: LoadSeries,
    ready_1: LoadSeries,
    ready_64: LoadSeries,
    rejected_1: LoadSeries,
    rejected_64: LoadSeries,
}

impl<'a> Comparison<'a> {
    async fn new(args: &'a Args, etcd: Option<Etcd>, rack: Option<Rack>) -> Result<Self, Failure> {
        let etcd = match etcd {
            Some(etcd) => {
                let channels = connect(&etcd.uri, &Bearer::default(), args.channels).await?;
                Some((etcd, channels))
            }
            None => None,
        };
        let rack = match rack {
            Some(rack) => {
                let channels = rack.connect(args.channels).await?;
                Some((rack, channels))
            }
            None => None,
        };
        let [etcd_1, etcd_64, tarn_1, tarn_64] = Default::default();
        let [ready_1, ready_64, rejected_1, rejected_64] = Default::default();
        Ok(Self {
            args,
            etcd,
            rack,
            etcd_1,
            etcd_64,
            tarn_1,
            tarn_64,
            ready_1,
            ready_64,
            rejected_1,
            rejected_64,
        })
    }

    /// Runs a short load that is not measured, to warm up connections, caches and page tables.
    async fn warm_up(&mut self) -> Result<(), Failure> {
        let limits = LoadLimits { duration_max: Duration::from_millis(300), writes_max: READY_WRITES_MAX };
        self.measure_etcd(MANY_CLIENT_COUNT, "warm", limits, |_| None).await?;
        self.measure_tarn(MANY_CLIENT_COUNT, "warm", limits, false, |_| None).await
    }

    /// Measures all loads once. Even rounds start with etcd, odd rounds start with Tarn.
    async fn measure_round(&mut self, round: u32) -> Result<(), Failure> {
        let name = format!("r{round}");
        let limits = self.limits();
        for turn in [round, round + 1] {
            if turn % 2 == 0 {
                self.measure_etcd(1, &name, limits, |comparison| Some(&mut comparison.etcd_1)).await?;
                self.measure_etcd(MANY_CLIENT_COUNT, &name, limits, |comparison| {
                    Some(&mut comparison.etcd_64)
                })
                .await?;
            } else {
                self.measure_tarn(1, &name, limits, false, |comparison| Some(&mut comparison.tarn_1)).await?;
                self.measure_tarn(MANY_CLIENT_COUNT, &name, limits, false, |comparison| {
                    Some(&mut comparison.tarn_64)
                })
                .await?;
            }
        }
        let limits = LoadLimits { writes_max: READY_WRITES_MAX, ..limits };
        self.measure_tarn(1, &name, limits, true, |comparison| Some(&mut comparison.ready_1)).await?;
        self.measure_tarn(MANY_CLIENT_COUNT, &name, limits, true, |comparison| {
            Some(&mut comparison.ready_64)
        })
        .await?;
        self.measure_rejected_requests(1, limits.duration_max, |comparison| &mut comparison.rejected_1)
            .await?;
        self.measure_rejected_requests(MANY_CLIENT_COUNT, limits.duration_max, |comparison| {
            &mut comparison.rejected_64
        })
        .await
    }

    /// Measures calls that the manager rejects as invalid, before the calls reach the ledger or the
    /// disk.
    async fn measure_rejected_requests(
        &mut self,
        clients: usize,
        after: Duration,
        series: impl Fn(&mut Self) -> &mut LoadSeries,
    ) -> Result<(), Failure> {
        let Some((rack, channels)) = &self.rack else { return Ok(()) };
        let writers =
            (0..clients).map(|n| InvalidReserver::new(channels[n % channels.len()].clone())).collect();
        let before = rack_cpu_times(rack);
        let (outcome, _) =
            load::run(writers, LoadLimits { duration_max: after, writes_max: u64::MAX }).await?;
        let after = rack_cpu_times(rack);
        print_progress("tarn, rejected", clients, &outcome);
        series(self).add(&outcome, before, after);
        Ok(())
    }

    fn limits(&self) -> LoadLimits {
        let plan = self.args.plan;
        let reservations = f64::from(plan.hosts) * RESERVATIONS_PER_HOST_MAX as f64;
        let writes_max = (f64::from(plan.slices()).min(reservations) * ROUND_RACK_FRACTION).floor();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a fraction of a u32")]
        LoadLimits { duration_max: Duration::from_secs_f64(self.args.seconds), writes_max: writes_max as u64 }
    }

    async fn measure_etcd(
        &mut self,
        clients: usize,
        round: &str,
        limits: LoadLimits,
        series: impl Fn(&mut Self) -> Option<&mut LoadSeries>,
    ) -> Result<(), Failure> {
        let Some((etcd, channels)) = &mut self.etcd else { return Ok(()) };
        let round = format!("{round}-{clients}");
        let writers =
            (0..clients).map(|n| TwoPutWriter::new(channels[n % channels.len()].clone(), &round)).collect();
        let before = [process::cpu_time(&etcd.process), Duration::ZERO, process::own_cpu_time()];
        let (outcome, _) = load::run(writers, limits).await?;
        etcd.process.check_running()?;
        let after = [process::cpu_time(&etcd.process), Duration::ZERO, process::own_cpu_time()];
        print_progress("etcd", clients, &outcome);
        if let Some(series) = series(self) {
            series.add(&outcome, before, after);
        }
        Ok(())
    }

    async fn measure_tarn(
        &mut self,
        clients: usize,
        round: &str,
        limits: LoadLimits,
        is_ready: bool,
        series: impl Fn(&mut Self) -> Option<&mut LoadSeries>,
    ) -> Result<(), Failure> {
        let Some((rack, channels)) = &mut self.rack else { return Ok(()) };
        let round = format!("{round}-{clients}-{}", if is_ready { "ready" } else { "assigned" });
        let writer = |n: usize| {
            let reserver = Reserver::new(channels[n % channels.len()].clone(), self.args.plan, &round);
            if is_ready { reserver.wait_ready() } else { reserver }
        };
        let writers = (0..clients).map(writer).collect();
        let load_result = reserve(rack, channels, writers, limits).await?;
        print_progress(if is_ready { "tarn, ready" } else { "tarn" }, clients, &load_result.outcome);
        if let Some(series) = series(self) {
            series.add(&load_result.outcome, load_result.before, load_result.after);
        }
        Ok(())
    }

    fn report(&self, disk: &Disk) -> String {
        let mut rows = Vec::new();
        if self.etcd.is_some() {
            rows.extend([
                self.etcd_1.row("etcd, two puts, 1 client"),
                self.etcd_64.row("etcd, two puts, 64 clients"),
            ]);
        }
        rows.extend([
            self.tarn_1.row("tarn, Reserve, 1 client"),
            self.tarn_64.row("tarn, Reserve, 64 clients"),
        ]);
        rows.extend([
            self.ready_1.row("tarn, ready, 1 client"),
            self.ready_64.row("tarn, ready, 64 clients"),
            self.rejected_1.row("tarn, rejected, 1 client"),
            self.rejected_64.row("tarn, rejected, 64 clients"),
        ]);
        format!("{}{}\n{}", self.description(disk), format_table(&COLUMN_HEADINGS, &rows), self.ratios())
    }

    fn description(&self, disk: &Disk) -> String {
        let (plan, args) = (self.args.plan, self.args);
        let sync = |part| disk.sync_us.value_at_quantile(part);
        let version = self.etcd.as_ref().map_or("nothing", |(etcd, _)| etcd.version.as_str());
        format!(
            "\n{} rounds of {} s against {version}; {} connections each; {} hosts, {} EMCs, {} slices\n\
             disk: {}; append 4 KiB and fdatasync: p50 {} us, p99 {} us\n\n",
            args.rounds,
            args.seconds,
            args.channels,
            plan.hosts,
            plan.emcs,
            plan.slices(),
            disk.kind,
            sync(0.50),
            sync(0.99),
        )
    }

    fn ratios(&self) -> String {
        if self.args.only.is_some() {
            return String::new();
        }
        [
            ratios("reserve_64_throughput", &self.tarn_64.writes_per_second, &self.etcd_64.writes_per_second),
            ratios("reserve_64_p99", &self.etcd_64.p99_us, &self.tarn_64.p99_us),
            ratios("reserve_1_throughput", &self.tarn_1.writes_per_second, &self.etcd_1.writes_per_second),
        ]
        .concat()
    }
}

/// Result of a load of reservations, with the CPU times before and after the load.
struct MeasuredLoad {
    outcome: Outcome,
    before: CpuTimes,
    after: CpuTimes,
}

/// Runs a load of reservations, measures it, and releases all reservations.
async fn reserve(
    rack: &mut Rack,
    channels: &[ClientChannel],
    writers: Vec<Reserver>,
    limits: LoadLimits,
) -> Result<MeasuredLoad, Failure> {
    let before = rack_cpu_times(rack);
    let (outcome, writers) = load::run(writers, limits).await?;
    let after = rack_cpu_times(rack);
    rack.check_running()?;
    let reserved = writers.into_iter().flat_map(|writer| writer.reserved).collect();
    rack.release_all_and_wait(channels, reserved).await?;
    Ok(MeasuredLoad { outcome, before, after })
}

/// Formats the ratio of two medians, and the spread of the ratios of the rounds.
fn ratios(name: &str, numerator: &Rounds, denominator: &Rounds) -> String {
    let by_round = numerator.ratio_to(denominator).spread(2);
    let ratio = format_ratio(name, numerator.median() / denominator.median());
    format!("{ratio}\nrounds {name} {by_round}\n")
}

fn rack_cpu_times(rack: &Rack) -> CpuTimes {
    let (manager, agents) = rack.cpu_times();
    [manager, agents, process::own_cpu_time()]
}

/// Prints the result of one load to standard error while the benchmark runs.
fn print_progress(name: &str, clients: usize, outcome: &Outcome) {
    let (writes_per_second, p99) = (outcome.writes_per_second(), outcome.quantile_us(0.99));
    eprintln!(
        "  {name}, {clients} client(s): {} writes, {writes_per_second:.0}/s, p99 {p99:.0} us",
        outcome.writes
    );
}
