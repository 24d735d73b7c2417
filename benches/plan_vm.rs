//! Measures the cost of `PlanVm` calls through gRPC with 64 clients, where every decision is
//! durable. Compares a manager that predicts frigid memory by a model with a manager that uses a
//! fixed fraction.
//!
//! Also measures the time to train the model. The training data come from public tables. If no
//! table is available, the data are generated.

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
    load::{self, LoadLimits, Outcome, Writer},
    programs::{Programs, target_folder},
    rack::{Plan, Rack},
    report::{Rounds, format_ratio, format_table, run_and_print},
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

const CLIENT_COUNT: usize = 64;
const CONNECTION_COUNT: usize = 8;
const GIB: u64 = 1 << 30;
/// Public tables: path in the folder of public data, and layout.
const SAMPLE_TABLES: [(&str, Layout); 2] = [
    ("vm-memory/bitbrains-rnd/vm_week.csv.gz", Layout::BitbrainsWeek),
    ("task-memory/nfcore-sizey/tasks.csv.gz", Layout::NfcoreTasks),
];
/// Factor by which the time span of a table is compressed, so that no outcome is too old to be
/// stored.
const TIME_COMPRESSION: u64 = 10;
/// Number of outcomes that are generated if no public table is available.
const GENERATED_SAMPLES: u64 = 15_000;

/// Measure the throughput and latency of PlanVm calls
#[derive(Debug, Parser)]
struct Args {
    /// Number of rounds. The report shows medians of all rounds
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Folder of the store, on a disk [default: cargo's target folder]
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
    run_and_print("plan_vm", measure(&args)).await
}

/// Throughput and latency of one kind of load, in each round.
#[derive(Debug, Default)]
struct PlanSeries {
    writes_per_second: Rounds,
    p50_us: Rounds,
    p99_us: Rounds,
}

impl PlanSeries {
    fn add(&mut self, outcome: &Outcome) {
        self.writes_per_second.add(outcome.writes_per_second());
        self.p50_us.add(outcome.quantile_us(0.5));
        self.p99_us.add(outcome.quantile_us(0.99));
    }

    fn row(&self, name: &str) -> Vec<String> {
        vec![name.to_owned(), self.writes_per_second.summary(), self.p50_us.summary(), self.p99_us.summary()]
    }
}

async fn measure(args: &Args) -> Result<String, Failure> {
    let programs = Programs::find_or_build()?;
    let disk = Disk::new(&args.dir.clone().map_or_else(target_folder, Ok)?)?;
    let rack = Rack::start(args.plan, &programs, disk.path()).await?;
    let channels = rack.connect(CONNECTION_COUNT).await?;
    let samples = load_samples();
    let mut models = ModelsClient::new(channels[0].clone());
    for page in samples.chunks(OUTCOMES_PER_REQUEST_MAX) {
        let outcomes = page.iter().map(to_outcome).collect();
        let added = models.add_outcomes(wire::AddOutcomesRequest { outcomes }).await;
        added.map_err(Failure::rejection("add outcomes"))?;
    }
    let (kind, start) = (wire::ModelKind::Frigid.into(), Instant::now());
    let model = models.train_model(wire::TrainModelRequest { kind, ..Default::default() }).await;
    let model = model.map_err(Failure::rejection("train a model"))?.into_inner();
    let training = start.elapsed();
    let requests: Vec<wire::PlanVmRequest> = samples.iter().map(plan_request).collect();
    let (mut fixed, mut by_model) = (PlanSeries::default(), PlanSeries::default());
    for round in 0..=args.rounds {
        let without = measure_plans(&channels, &requests, args).await?;
        let request = wire::PromoteModelRequest { kind, version: model.version, validate_only: false };
        models.promote_model(request).await.map_err(Failure::rejection("promote a model"))?;
        let with = measure_plans(&channels, &requests, args).await?;
        let request = wire::RollbackModelRequest { kind };
        models.rollback_model(request).await.map_err(Failure::rejection("roll a model back"))?;
        if round > 0 {
            fixed.add(&without); // round 0 only warms up
            by_model.add(&with);
        }
    }
    Ok(format_report(args, &disk, (model.rows, training), &fixed, &by_model))
}

/// Runs `PlanVm` calls of all clients for the duration in `args`.
async fn measure_plans(
    channels: &[ClientChannel],
    requests: &[wire::PlanVmRequest],
    args: &Args,
) -> Result<Outcome, Failure> {
    let planner = |n: usize| Planner {
        scheduler: SchedulerClient::new(channels[n % channels.len()].clone()),
        requests: requests.iter().skip(n).step_by(CLIENT_COUNT).cloned().collect(),
    };
    let limits = LoadLimits { duration_max: Duration::from_secs(args.seconds), writes_max: u64::MAX };
    Ok(load::run((0..CLIENT_COUNT).map(planner).collect(), limits).await?.0)
}

/// Client that sends `PlanVm` calls one after another.
struct Planner {
    scheduler: SchedulerClient<ClientChannel>,
    requests: Vec<wire::PlanVmRequest>,
}

impl Writer for Planner {
    async fn write(&mut self, number: u64) -> Result<(), Failure> {
        let at = usize::try_from(number).expect("usize has 64 bits") % self.requests.len();
        let reply = self.scheduler.plan_vm(self.requests[at].clone()).await;
        reply.map(drop).map_err(Failure::rejection("plan a VM"))
    }
}

/// Returns samples of ended VMs from the public tables. Returns generated samples if no table is
/// available.
fn load_samples() -> Vec<VmSample> {
    let folder = std::env::var_os("TARN_DATA")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data"), PathBuf::from);
    let table = |(name, layout): (&str, Layout)| {
        let path = folder.join(name);
        let Ok(file) = File::open(&path) else {
            eprintln!("SKIPPED: cannot open {}: set TARN_DATA to the folder of public data", path.display());
            return Vec::new();
        };
        shift_to_now(
            read(MultiGzDecoder::new(BufReader::new(file)), layout).expect("public tables are valid"),
        )
    };
    let public: Vec<VmSample> =
        SAMPLE_TABLES.into_iter().flat_map(table).filter(|sample| sample.is_trusted).collect();
    if public.is_empty() { shift_to_now(generate_samples()) } else { public }
}

/// Shifts and compresses times so that the last VM ends now and all outcomes are recent enough to
/// be stored.
fn shift_to_now(mut samples: Vec<VmSample>) -> Vec<VmSample> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is after 1970").as_millis();
    let now = u64::try_from(now).expect("milliseconds fit u64");
    let last = samples.iter().map(|sample| sample.outcome.ended.0).max().unwrap_or(now);
    let shift = |at: UnixMs| UnixMs(now - (last - at.0) / TIME_COMPRESSION);
    for sample in &mut samples {
        sample.request.begins = shift(sample.request.begins);
        sample.outcome.ended = shift(sample.outcome.ended);
    }
    samples
}

/// Returns generated samples of VMs of several customers with different memory use.
fn generate_samples() -> Vec<VmSample> {
    let row = |n: u64| {
        let (customer, peak) = (n % 97, n * 7919 % 13);
        format!("{},{},{},{},customer {customer},type {}\n", n * 60, n * 60 + 3000, 16, peak, n % 7)
    };
    let rows: String = (0..GENERATED_SAMPLES).map(row).collect();
    let text = format!("began_s,ended_s,requested_gib,peak_gib,key,kind\n{rows}");
    read(text.as_bytes(), Layout::Custom).expect("generated rows are valid")
}

fn to_profile(groups: &Groups) -> Option<wire::VmProfile> {
    let Groups { key, kind, place, .. } = groups.clone();
    Some(wire::VmProfile { key, kind, place, ..Default::default() })
}

fn to_outcome(sample: &VmSample) -> wire::Outcome {
    let (request, outcome) = (&sample.request, &sample.outcome);
    wire::Outcome {
        vm: request.groups.vm.clone(),
        profile: to_profile(&request.groups),
        requested_bytes: request.requested.get(),
        cores: request.cores.unwrap_or_default(),
        started_unix_ms: request.begins.0,
        ended_unix_ms: outcome.ended.0,
        peak_bytes: outcome.peak(request.requested).get(),
        ..Default::default()
    }
}

/// Returns a request to plan the VM of a sample. Rounds the memory of the VM up to a multiple of 1
/// GiB. Replaces names that are invalid in requests.
fn plan_request(sample: &VmSample) -> wire::PlanVmRequest {
    let is_name = sample.request.groups.vm.bytes().all(|byte| byte.is_ascii_alphanumeric());
    wire::PlanVmRequest {
        vm: if is_name && !sample.request.groups.vm.is_empty() {
            sample.request.groups.vm.clone()
        } else {
            "vm".to_owned()
        },
        cores: 4,
        memory_bytes: sample.request.requested.get().div_ceil(GIB) * GIB,
        pinned: false,
        profile: to_profile(&sample.request.groups),
    }
}

fn format_report(
    args: &Args,
    disk: &Disk,
    (rows, training): (u64, Duration),
    fixed: &PlanSeries,
    by_model: &PlanSeries,
) -> String {
    let rows_of_table = [fixed.row("fixed share"), by_model.row("model")];
    let ratio_of_medians = |ours: &Rounds, theirs: &Rounds| ours.median() / theirs.median();
    format!(
        "\nPlanVm, {CLIENT_COUNT} clients, decisions durable on {}; {} rounds of {} s\n\n{}\ntime train_frigid_{rows} {:.1} s\n{}\n{}\n",
        disk.kind,
        args.rounds,
        args.seconds,
        format_table(&["", "plans/s", "p50 us", "p99 us"], &rows_of_table),
        training.as_secs_f64(),
        format_ratio(
            "plan_64_throughput_vs_fixed_share",
            ratio_of_medians(&by_model.writes_per_second, &fixed.writes_per_second)
        ),
        format_ratio("plan_64_p99_vs_fixed_share", ratio_of_medians(&fixed.p99_us, &by_model.p99_us)),
    )
}
