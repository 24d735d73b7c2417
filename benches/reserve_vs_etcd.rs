//! The aim: a durable one-slice `Reserve` is at least as fast as two puts in one transaction of etcd with one client,
//! and at least twice as fast, in throughput and in the 99th percentile, with 64. Both servers run as they would in
//! production, on one disk, loaded by one loop over as many connections, in turns. Also measures the time until a host can
//! use its slice, calls that are refused at once, the processor time of each process per call, and reservations while few
//! and most slices are taken.

#[path = "reserve_vs_etcd/taken.rs"]
mod taken;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use benches::{
    child::own_cpu,
    disk::Disk,
    etcd::{Etcd, Pair},
    failure::Failure,
    load::{self, Ends, Outcome},
    loopback::connect,
    programs::{Programs, target_folder},
    rack::{Plan, Rack, Refused, Reserver},
    report::{Rounds, ratio, table, tell},
};
use clap::{Parser, ValueEnum};
use proto::bearer::{Bearer, ClientChannel};
use units::limits::RESERVATIONS_PER_HOST_MAX;

/// Of the rack's slices and of the reservations that its hosts may have, how many a round may take: neither runs out, and
/// the last picks are as good as the first.
const ROUND_SHARE_OF_RACK: f64 = 0.75;
/// Slices a round that waits until they are ready may take.
const READY_WRITES_MAX: u64 = 4096;
/// The many clients.
const MANY: usize = 64;

/// Durable reservations against etcd's transactions
#[derive(Debug, Parser)]
struct Args {
    /// How often everything is measured; the report shows medians
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// How long one measurement lasts
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Connections to each server, shared by its clients
    #[arg(long, default_value_t = 8)]
    channels: usize,
    /// Where the store and etcd's data go, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Slices that are taken for as long as reservations are measured beside them
    #[arg(long, value_delimiter = ',', default_value = "1000,60000")]
    taken: Vec<u32>,
    /// Measure one part alone, for profiling; prints no ratio
    #[arg(long)]
    only: Option<Part>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Etcd,
    Tarn,
    Taken,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    tell("reserve_vs_etcd", measure(&args)).await
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = if args.only == Some(Part::Etcd) { None } else { Some(Programs::ready()?) };
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let mut report = String::new();
    if args.only != Some(Part::Taken) {
        report += &compare(args, programs.as_ref(), &disk).await?;
    }
    if let Some(programs) = programs.filter(|_| args.only.is_none_or(|part| part == Part::Taken)) {
        report += &taken::measure(args, &programs, &disk).await?;
    }
    Ok(report)
}

/// Measures both servers in turns.
async fn compare(args: &Args, programs: Option<&Programs>, disk: &Disk) -> Result<String, Failure> {
    let etcd = match args.only {
        Some(Part::Tarn) => None,
        _ => Some(Etcd::start(&disk.folder("etcd")?, disk.path()).await?),
    };
    let rack = match programs {
        Some(programs) => Some(Rack::start(args.plan, programs, &disk.folder("rack")?).await?),
        None => None,
    };
    let mut arena = Arena::new(args, etcd, rack).await?;
    arena.warm_up().await?;
    for round in 0..args.rounds {
        arena.round(round).await?;
    }
    Ok(arena.report(disk))
}

/// Everything about one kind of measurement, over all rounds.
#[derive(Debug, Default)]
struct Series {
    per_second: Rounds,
    p50_us: Rounds,
    p99_us: Rounds,
    server_cpu_us: Rounds,
    agents_cpu_us: Rounds,
    clients_cpu_us: Rounds,
}

/// Processor time so far: the server, its agents, the clients.
type Cpu = [Duration; 3];

/// The columns of [`Series::row`]. Processor time is per write, that of a server is of all its threads.
const HEAD: [&str; 7] =
    ["least-median-most", "writes/s", "p50 us", "p99 us", "server cpu us", "agents cpu us", "clients cpu us"];

impl Series {
    fn add(&mut self, outcome: &Outcome, before: Cpu, after: Cpu) {
        self.per_second.add(outcome.per_second());
        self.p50_us.add(outcome.within_us(0.50));
        self.p99_us.add(outcome.within_us(0.99));
        let each = |part: usize| {
            after[part].saturating_sub(before[part]).as_secs_f64() * 1e6 / outcome.writes as f64
        };
        self.server_cpu_us.add(each(0));
        self.agents_cpu_us.add(each(1));
        self.clients_cpu_us.add(each(2));
    }

    fn row(&self, name: &str) -> Vec<String> {
        let cells = [
            &self.per_second,
            &self.p50_us,
            &self.p99_us,
            &self.server_cpu_us,
            &self.agents_cpu_us,
            &self.clients_cpu_us,
        ];
        std::iter::once(name.to_owned()).chain(cells.map(Rounds::show)).collect()
    }
}

/// Both servers, with their measurements.
struct Arena<'a> {
    args: &'a Args,
    etcd: Option<(Etcd, Vec<ClientChannel>)>,
    rack: Option<(Rack, Vec<ClientChannel>)>,
    etcd_1: Series,
    etcd_64: Series,
    tarn_1: Series,
    tarn_64: Series,
    ready_1: Series,
    ready_64: Series,
    refused_1: Series,
    refused_64: Series,
}

impl<'a> Arena<'a> {
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
        let [ready_1, ready_64, refused_1, refused_64] = Default::default();
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
            refused_1,
            refused_64,
        })
    }

    /// One short turn of everything that counts for nothing: connections, caches, page tables.
    async fn warm_up(&mut self) -> Result<(), Failure> {
        let ends = Ends { after: Duration::from_millis(300), writes_max: READY_WRITES_MAX };
        self.etcd(MANY, "warm", ends, |_| None).await?;
        self.tarn(MANY, "warm", ends, false, |_| None).await
    }

    /// Measures everything once; odd rounds begin with Tarn, even ones with etcd.
    async fn round(&mut self, round: u32) -> Result<(), Failure> {
        let name = format!("r{round}");
        let ends = self.ends();
        for turn in [round, round + 1] {
            if turn % 2 == 0 {
                self.etcd(1, &name, ends, |arena| Some(&mut arena.etcd_1)).await?;
                self.etcd(MANY, &name, ends, |arena| Some(&mut arena.etcd_64)).await?;
            } else {
                self.tarn(1, &name, ends, false, |arena| Some(&mut arena.tarn_1)).await?;
                self.tarn(MANY, &name, ends, false, |arena| Some(&mut arena.tarn_64)).await?;
            }
        }
        let ends = Ends { writes_max: READY_WRITES_MAX, ..ends };
        self.tarn(1, &name, ends, true, |arena| Some(&mut arena.ready_1)).await?;
        self.tarn(MANY, &name, ends, true, |arena| Some(&mut arena.ready_64)).await?;
        self.refused(1, ends.after, |arena| &mut arena.refused_1).await?;
        self.refused(MANY, ends.after, |arena| &mut arena.refused_64).await
    }

    /// Measures the cost of a call without ledger and disk.
    async fn refused(
        &mut self,
        clients: usize,
        after: Duration,
        series: impl Fn(&mut Self) -> &mut Series,
    ) -> Result<(), Failure> {
        let Some((rack, channels)) = &self.rack else { return Ok(()) };
        let writers = (0..clients).map(|n| Refused::new(channels[n % channels.len()].clone())).collect();
        let before = tarn_cpu(rack);
        let (outcome, _) = load::run(writers, Ends { after, writes_max: u64::MAX }).await?;
        let after = tarn_cpu(rack);
        note("tarn, refused", clients, &outcome);
        series(self).add(&outcome, before, after);
        Ok(())
    }

    fn ends(&self) -> Ends {
        let plan = self.args.plan;
        let reservations = f64::from(plan.hosts) * RESERVATIONS_PER_HOST_MAX as f64;
        let writes_max = (f64::from(plan.slices()).min(reservations) * ROUND_SHARE_OF_RACK).floor();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a u32")]
        Ends { after: Duration::from_secs_f64(self.args.seconds), writes_max: writes_max as u64 }
    }

    async fn etcd(
        &mut self,
        clients: usize,
        round: &str,
        ends: Ends,
        series: impl Fn(&mut Self) -> Option<&mut Series>,
    ) -> Result<(), Failure> {
        let Some((etcd, channels)) = &mut self.etcd else { return Ok(()) };
        let round = format!("{round}-{clients}");
        let writers = (0..clients).map(|n| Pair::new(channels[n % channels.len()].clone(), &round)).collect();
        let before = [etcd.child.cpu(), Duration::ZERO, own_cpu()];
        let (outcome, _) = load::run(writers, ends).await?;
        etcd.child.still_runs()?;
        let after = [etcd.child.cpu(), Duration::ZERO, own_cpu()];
        note("etcd", clients, &outcome);
        if let Some(series) = series(self) {
            series.add(&outcome, before, after);
        }
        Ok(())
    }

    async fn tarn(
        &mut self,
        clients: usize,
        round: &str,
        ends: Ends,
        ready: bool,
        series: impl Fn(&mut Self) -> Option<&mut Series>,
    ) -> Result<(), Failure> {
        let Some((rack, channels)) = &mut self.rack else { return Ok(()) };
        let round = format!("{round}-{clients}-{}", if ready { "ready" } else { "assigned" });
        let writer = |n: usize| {
            let reserver = Reserver::new(channels[n % channels.len()].clone(), self.args.plan, &round);
            if ready { reserver.waiting_until_ready() } else { reserver }
        };
        let writers = (0..clients).map(writer).collect();
        let measured = reserve(rack, channels, writers, ends).await?;
        note(if ready { "tarn, ready" } else { "tarn" }, clients, &measured.outcome);
        if let Some(series) = series(self) {
            series.add(&measured.outcome, measured.before, measured.after);
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
            self.refused_1.row("tarn, refused, 1 client"),
            self.refused_64.row("tarn, refused, 64 clients"),
        ]);
        format!("{}{}\n{}", self.setting(disk), table(&HEAD, &rows), self.ratios())
    }

    fn setting(&self, disk: &Disk) -> String {
        let (plan, args) = (self.args.plan, self.args);
        let sync = |part| disk.sync_us.value_at_quantile(part);
        let against = self.etcd.as_ref().map_or("nothing", |(etcd, _)| etcd.version.as_str());
        format!(
            "\n{} rounds of {} s against {against}; {} connections each; {} hosts, {} EMCs, {} slices\n\
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
            ratios("reserve_64_throughput", &self.tarn_64.per_second, &self.etcd_64.per_second),
            ratios("reserve_64_p99", &self.etcd_64.p99_us, &self.tarn_64.p99_us),
            ratios("reserve_1_throughput", &self.tarn_1.per_second, &self.etcd_1.per_second),
        ]
        .concat()
    }
}

/// One load of reservations, with the processor time before and after it.
struct Measured {
    outcome: Outcome,
    before: Cpu,
    after: Cpu,
}

/// Lets these clients reserve, then releases their reservations.
async fn reserve(
    rack: &mut Rack,
    channels: &[ClientChannel],
    writers: Vec<Reserver>,
    ends: Ends,
) -> Result<Measured, Failure> {
    let before = tarn_cpu(rack);
    let (outcome, writers) = load::run(writers, ends).await?;
    let after = tarn_cpu(rack);
    rack.still_runs()?;
    let reserved = writers.into_iter().flat_map(|writer| writer.reserved).collect();
    rack.give_back(channels, reserved).await?;
    Ok(Measured { outcome, before, after })
}

/// The ratio of two medians, and the ratios round by round.
fn ratios(name: &str, ahead: &Rounds, behind: &Rounds) -> String {
    let by_round = ahead.over(behind).spread(2);
    let ratio = ratio(name, ahead.median() / behind.median());
    format!("{ratio}\nrounds {name} {by_round}\n")
}

fn tarn_cpu(rack: &Rack) -> Cpu {
    let (manager, agents) = rack.cpu();
    [manager, agents, own_cpu()]
}

/// Prints progress.
fn note(who: &str, clients: usize, outcome: &Outcome) {
    let (per_second, p99) = (outcome.per_second(), outcome.within_us(0.99));
    eprintln!("  {who}, {clients} client(s): {} writes, {per_second:.0}/s, p99 {p99:.0} us", outcome.writes);
}
