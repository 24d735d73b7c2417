//! Compares durable one-slice reservations of a manager whose ledger is in etcd with transactions of the same etcd.
//!
//! Goal: with 64 clients, at least 0.8 times the rate of a client library that collects records of the same size in
//! transactions, with one transaction at a time: the records of slice, reservation and decision. The manager writes these
//! records twice: to a log, before it replies, and later to the tables. It also writes two later states of the slice.
//!
//! Both sides use one member of etcd on one disk, and the same number of clients, in turns.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use benches::{
    disk::Disk,
    etcd::{BatchedWriter, Etcd, RecordSizes},
    failure::Failure,
    load::{self, LoadLimits},
    loopback::connect,
    programs::{Programs, target_folder},
    rack::{Plan, Rack, Reserver},
    report::{Rounds, format_ratio, format_table, run_and_print},
};
use clap::Parser;
use pool_manager::store::Table;
use proto::bearer::{Bearer, ClientChannel};
use units::limits::RESERVATIONS_PER_HOST_MAX;

/// Number of concurrent clients.
const CLIENT_COUNT: usize = 64;
/// Maximum fraction that one measurement uses of the permitted reservations and of the slices, in percent. It is below
/// 100 so that no call is rejected for lack of capacity.
const RACK_PERCENT: u64 = 75;
/// Duration of the first reservations, which are not part of the result, in seconds.
const WARM_UP_S: f64 = 0.3;
/// Prefix of the keys of the rack, the default of `manager.store`.
const PREFIX: &str = "/tarn";

/// Compare reservations in etcd with batched transactions of the same etcd
#[derive(Debug, Parser)]
struct Args {
    /// Number of rounds. The report shows medians of all rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Duration of a measurement in seconds
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Number of connections to each server
    #[arg(long, default_value_t = 8)]
    channels: usize,
    /// Folder of etcd's data, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Flag that cargo passes to benchmarks, without effect
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    run_and_print("reserve_in_etcd", measure(&args)).await
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = Programs::find_or_build()?;
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let mut etcd = Etcd::start(&disk.create_folder("etcd")?, disk.path()).await?;
    let folder = disk.create_folder("rack")?;
    let mut rack = Rack::start_in_etcd(args.plan, &programs, &folder, &etcd.uri).await?;
    let etcd_channels = connect(&etcd.uri, &Bearer::default(), args.channels).await?;
    let rack_channels = rack.connect(args.channels).await?;
    let [mut direct, mut tarn] = [Rounds::default(), Rounds::default()];
    let reservations = u64::from(args.plan.hosts) * RESERVATIONS_PER_HOST_MAX as u64;
    let writes_max = reservations.min(args.plan.slices().into()) * RACK_PERCENT / 100;
    let limits = |seconds| LoadLimits { duration_max: Duration::from_secs_f64(seconds), writes_max };
    let clients = |round| Clients { channels: &rack_channels, plan: args.plan, round };
    clients(0).reserve(&mut rack, limits(WARM_UP_S)).await?;
    let tables = [Table::Slices, Table::Reservations, Table::Audit].map(Table::tag);
    let sizes = RecordSizes::read(etcd_channels[0].clone(), PREFIX, tables).await?;
    for round in 1..=args.rounds {
        for turn in [round, round + 1] {
            if turn % 2 == 0 {
                let writers = BatchedWriter::start(etcd_channels[0].clone(), CLIENT_COUNT, round, sizes);
                let (outcome, _) = load::run(writers, limits(args.seconds)).await?;
                etcd.process.check_running()?;
                direct.add(outcome.writes_per_second());
            } else {
                tarn.add(clients(round).reserve(&mut rack, limits(args.seconds)).await?);
            }
        }
    }
    let rows = [("etcd, batched", &direct), ("tarn in etcd", &tarn)];
    let rows: Vec<_> = rows.map(|(name, rounds)| vec![name.to_owned(), rounds.summary()]).into();
    let ratio = format_ratio("reserve_in_etcd_64_throughput", tarn.median() / direct.median());
    let spread = tarn.ratio_to(&direct).spread(2);
    let sync = disk.sync_us.value_at_quantile(0.5);
    let table = format_table(&["min-median-max", "writes/s"], &rows);
    let head =
        format!("\n{}; disk {}: fdatasync p50 {sync} us; records: {sizes}\n\n", etcd.version, disk.kind);
    Ok(format!("{head}{table}\n{ratio}\nrounds reserve_in_etcd_64_throughput {spread}\n"))
}

/// Clients that reserve one slice per call, in one round of the measurement.
struct Clients<'a> {
    channels: &'a [ClientChannel],
    plan: Plan,
    round: u32,
}

impl Clients<'_> {
    /// Reserves slices, and releases them. Returns the rate of reservations per second.
    async fn reserve(&self, rack: &mut Rack, limits: LoadLimits) -> Result<f64, Failure> {
        let name = format!("r{}", self.round);
        let writer =
            |n: usize| Reserver::new(self.channels[n % self.channels.len()].clone(), self.plan, &name);
        let (outcome, writers) = load::run((0..CLIENT_COUNT).map(writer).collect(), limits).await?;
        rack.check_running()?;
        let reserved = writers.into_iter().flat_map(|writer| writer.reserved).collect();
        rack.release_all_and_wait(self.channels, reserved).await?;
        Ok(outcome.writes_per_second())
    }
}
