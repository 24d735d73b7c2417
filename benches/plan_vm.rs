//! Cost of a plan: PlanVm through gRPC under 64 clients, with a durable decision, by a model of
//! frigid memory against the fixed fraction of a manager without one; and the time to train the
//! model. Outcomes come from the public tables if they exist, otherwise synthetic.

use std::{
    fs::File,
    io::BufReader,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use benches::{
    disk::Disk,
    failure::Failure,
    load::{self, Ends, Outcome, Writer},
    programs::{Programs, target_folder},
    rack::{Plan, Rack},
    report::{Rounds, ratio, table, tell},
};
use clap::Parser;
use flate2::read::MultiGzDecoder;
use prediction::{
    frigid::{Groups, backtest::VmSample},
    table::{Layout, read},
};
use proto::bearer::ClientChannel;
use proto::v1::{self as wire, models_client::ModelsClient, scheduler_client::SchedulerClient};
use units::{UnixMs, limits::OUTCOMES_PER_REQUEST_MAX};

const CLIENTS: usize = 64;
const CONNECTIONS: usize = 8;
const GIB: u64 = 1 << 30;
/// Public tables, in the folder of public data.
const TABLES: [(&str, Layout); 2] = [
    ("vm-memory/bitbrains-rnd/vm_week.csv.gz", Layout::BitbrainsWeek),
    ("task-memory/nfcore-sizey/tasks.csv.gz", Layout::NfcoreTasks),
];
/// Years of a table become so many times fewer.
const DRAWN_TOGETHER: u64 = 10;
/// Made outcomes, where there are no public ones.
const MADE: u64 = 15_000;

/// Cost of a plan
#[derive(Debug, Parser)]
struct Args {
    /// How often each side is measured; the report shows medians
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Where the store goes, on a disk [default: cargo's target folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    plan: Plan,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    tell("plan_vm", measure(&args)).await
}

/// One kind of measurement, over all rounds.
#[derive(Debug, Default)]
struct Series {
    per_second: Rounds,
    p50_us: Rounds,
    p99_us: Rounds,
}

impl Series {
    fn add(&mut self, outcome: &Outcome) {
        self.per_second.add(outcome.per_second());
        self.p50_us.add(outcome.within_us(0.5));
        self.p99_us.add(outcome.within_us(0.99));
    }

    fn row(&self, name: &str) -> Vec<String> {
        vec![name.to_owned(), self.per_second.show(), self.p50_us.show(), self.p99_us.show()]
    }
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = Programs::ready()?;
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let rack = Rack::start(args.plan, &programs, disk.path()).await?;
    let channels = rack.connect(CONNECTIONS).await?;
    let stays = stays();
    let mut models = ModelsClient::new(channels[0].clone());
    for page in stays.chunks(OUTCOMES_PER_REQUEST_MAX) {
        let outcomes = page.iter().map(outcome).collect();
        let added = models.add_outcomes(wire::AddOutcomesRequest { outcomes }).await;
        added.map_err(Failure::refused("add outcomes"))?;
    }
    let (kind, start) = (wire::ModelKind::Frigid.into(), Instant::now());
    let trained = models.train_model(wire::TrainModelRequest { kind, labels: None }).await;
    let trained = trained.map_err(Failure::refused("train a model"))?.into_inner();
    let training = start.elapsed();
    let asks: Vec<wire::PlanVmRequest> = stays.iter().map(ask).collect();
    let (mut fixed, mut by_model) = (Series::default(), Series::default());
    for round in 0..=args.rounds {
        let without = plan(&channels, &asks, args).await?;
        let request = wire::PromoteModelRequest { kind, version: trained.version, validate_only: false };
        models.promote_model(request).await.map_err(Failure::refused("promote a model"))?;
        let with = plan(&channels, &asks, args).await?;
        let request = wire::RollbackModelRequest { kind };
        models.rollback_model(request).await.map_err(Failure::refused("roll a model back"))?;
        if round > 0 {
            fixed.add(&without); // the first round warms up
            by_model.add(&with);
        }
    }
    Ok(report(args, &disk, (trained.rows, training), &fixed, &by_model))
}

/// Lets all clients plan at once.
async fn plan(
    channels: &[ClientChannel],
    asks: &[wire::PlanVmRequest],
    args: &Args,
) -> Result<Outcome, Failure> {
    let planner = |n: usize| Planner {
        scheduler: SchedulerClient::new(channels[n % channels.len()].clone()),
        asks: asks.iter().skip(n).step_by(CLIENTS).cloned().collect(),
    };
    let ends = Ends { after: Duration::from_secs(args.seconds), writes_max: u64::MAX };
    Ok(load::run((0..CLIENTS).map(planner).collect(), ends).await?.0)
}

/// Plans one VM after the other.
struct Planner {
    scheduler: SchedulerClient<ClientChannel>,
    asks: Vec<wire::PlanVmRequest>,
}

impl Writer for Planner {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let at = usize::try_from(number).expect("64 bits") % self.asks.len();
        let answer = self.scheduler.plan_vm(self.asks[at].clone()).await;
        answer.map(drop).map_err(Failure::refused("plan a VM"))
    }
}

/// VMs that have ended: the public ones, or as many made ones.
fn stays() -> Vec<VmSample> {
    let folder = std::env::var_os("TARN_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"), PathBuf::from);
    let table = |(name, layout): (&str, Layout)| {
        let path = folder.join(name);
        let Ok(file) = File::open(&path) else {
            eprintln!("SKIPPED: no {}: set TARN_DATA to the folder of public data", path.display());
            return Vec::new();
        };
        until_now(read(MultiGzDecoder::new(BufReader::new(file)), layout).expect("public tables are sound"))
    };
    let public: Vec<VmSample> = TABLES.into_iter().flat_map(table).filter(|stay| stay.is_trusted).collect();
    if public.is_empty() { until_now(made()) } else { public }
}

/// The last VM ends now, and the others so much earlier that all are young enough to be kept.
fn until_now(mut stays: Vec<VmSample>) -> Vec<VmSample> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970").as_millis();
    let now = u64::try_from(now).expect("it is not the end of time");
    let last = stays.iter().map(|stay| stay.outcome.ended.0).max().unwrap_or(now);
    let moved = |at: UnixMs| UnixMs(now - (last - at.0) / DRAWN_TOGETHER);
    for stay in &mut stays {
        stay.request.begins = moved(stay.request.begins);
        stay.outcome.ended = moved(stay.outcome.ended);
    }
    stays
}

/// Customers with habits of their own.
fn made() -> Vec<VmSample> {
    let row = |n: u64| {
        let (customer, peak) = (n % 97, n * 7919 % 13);
        format!("{},{},{},{},customer {customer},type {}\n", n * 60, n * 60 + 3000, 16, peak, n % 7)
    };
    let rows: String = (0..MADE).map(row).collect();
    let text = format!("began_s,ended_s,requested_gib,peak_gib,key,kind\n{rows}");
    read(text.as_bytes(), Layout::Custom).expect("what was made is sound")
}

fn profile(groups: &Groups) -> Option<wire::VmProfile> {
    let Groups { key, kind, place, .. } = groups.clone();
    Some(wire::VmProfile { key, kind, place, ..Default::default() })
}

fn outcome(stay: &VmSample) -> wire::Outcome {
    let (ask, outcome) = (&stay.request, &stay.outcome);
    wire::Outcome {
        vm: ask.groups.vm.clone(),
        profile: profile(&ask.groups),
        requested_bytes: ask.requested.get(),
        cores: ask.cores.unwrap_or_default(),
        started_unix_ms: ask.begins.0,
        ended_unix_ms: outcome.ended.0,
        peak_bytes: outcome.peak(ask.requested).get(),
        ..Default::default()
    }
}

/// The same VM again, in whole GiB. Names of the wire are narrower than those of tables.
fn ask(stay: &VmSample) -> wire::PlanVmRequest {
    let is_name = stay.request.groups.vm.bytes().all(|byte| byte.is_ascii_alphanumeric());
    wire::PlanVmRequest {
        vm: if is_name && !stay.request.groups.vm.is_empty() {
            stay.request.groups.vm.clone()
        } else {
            "vm".to_owned()
        },
        cores: 4,
        memory_bytes: stay.request.requested.get().div_ceil(GIB) * GIB,
        pinned: false,
        profile: profile(&stay.request.groups),
    }
}

fn report(
    args: &Args,
    disk: &Disk,
    (rows, training): (u64, Duration),
    fixed: &Series,
    by_model: &Series,
) -> String {
    let rows_of_table = [fixed.row("by the fixed share"), by_model.row("by a model")];
    let over = |ours: &Rounds, theirs: &Rounds| ours.median() / theirs.median();
    format!(
        "\nPlanVm, {CLIENTS} clients, decisions durable on {}; {} rounds of {} s\n\n{}\ntime train_frigid_{rows} {:.1} s\n{}\n{}\n",
        disk.kind,
        args.rounds,
        args.seconds,
        table(&["", "plans a second", "p50 us", "p99 us"], &rows_of_table),
        training.as_secs_f64(),
        ratio("plan_64_throughput_vs_fixed_share", over(&by_model.per_second, &fixed.per_second)),
        ratio("plan_64_p99_vs_fixed_share", over(&fixed.p99_us, &by_model.p99_us)),
    )
}
