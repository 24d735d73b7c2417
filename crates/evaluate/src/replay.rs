//! `tarn replay`: replays VMs of a trace on a running rack through the Scheduler API, as a best-fit
//! scheduler would, as fast as the rack responds; then reports results and audits the rack.
//! `sim::packing` chooses the hosts, the manager the slices.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use cli_runtime::{Connection, Failure, Global, lists};
use units::{
    Ns,
    limits::{
        REPLAY_CLIENTS_DEFAULT, REPLAY_CLIENTS_MAX, REPLAY_SETTLE_DEFAULT, REPLAY_SETTLE_MAX,
        STAND_IN_TOUCH_MIB_MAX, TRACE_ROWS_MAX,
    },
};

mod calls;
mod capacity;
mod dirt;
mod input;
mod journal;
mod life;
mod losses;
mod play;
mod reach;
mod report;
mod stand_in;
mod stand_ins;
mod tally;
mod watcher;

pub use input::Source;
pub use stand_in::{StandIn, run as stand_in};

use capacity::Free;
use journal::Journal;
use play::Play;
use report::Report;
use stand_ins::StandIns;
use tally::Tally;
use watcher::News;

/// VMs to replay, and options.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Trace of VM arrivals, plain or gzipped; or `generated:COUNT` for VMs generated from a seed
    #[arg(value_name = "FILE|generated[:COUNT]")]
    pub trace: Source,
    /// The rack's rack.toml, for the manager's address; --endpoint has precedence
    #[arg(long, value_name = "FILE")]
    pub rack: Option<PathBuf>,
    /// Replay only the first VMs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=TRACE_ROWS_MAX as u64))]
    pub limit: Option<u64>,
    /// Skip malformed rows and count them
    #[arg(long)]
    pub lenient: bool,
    /// Seed of generated VMs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Also write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Memory that a stand-in for a VM writes in each slice
    #[arg(long, value_name = "MIB", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=STAND_IN_TOUCH_MIB_MAX))]
    pub touch: u64,
    /// Write every acknowledged reply to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Maximum number of concurrent calls
    #[arg(long, value_name = "N", default_value_t = REPLAY_CLIENTS_DEFAULT as u64, value_parser = clap::value_parser!(u64).range(1..=REPLAY_CLIENTS_MAX as u64))]
    pub max_clients: u64,
    /// Time to wait for draining slices before a VM is rejected; 0 for none
    #[arg(long, value_name = "MS", default_value_t = REPLAY_SETTLE_DEFAULT.as_ms(), value_parser = clap::value_parser!(u64).range(0..=REPLAY_SETTLE_MAX.as_ms()))]
    pub settle: u64,
}

/// State of one replay, shared by its VMs.
#[derive(Debug)]
struct Rack {
    to: Connection,
    /// Distinguishes this replay's VMs and requests from those of others.
    run: String,
    journal: Mutex<Journal>,
    tally: Mutex<Tally>,
    free: Arc<Mutex<Free>>,
    news: News,
    stand_ins: StandIns,
    settle: Duration,
}

/// Replays a trace and prints the report. The rack's state afterwards is as before.
///
/// # Errors
/// The trace cannot be read, the manager is unavailable for too long, or a guarantee was violated.
pub async fn run(args: Args, global: &Global) -> Result<(), Failure> {
    let arrivals = input::read(&args)?;
    let to = Connection::open(&input::endpoint(args.rack.as_deref(), global)?).await?;
    let (emcs, hosts) = (lists::emcs(&to).await?, lists::hosts(&to).await?);
    let dirty = dirt::found(&to).await?;
    let free = Arc::default();
    let (watching, news) = watcher::start(&to, &free).await?;
    let looking = reach::Looking::start(to.clone(), &emcs);
    let rack = Arc::new(Rack {
        to,
        run: run_name()?,
        journal: Mutex::new(Journal::open(args.log.as_deref())?),
        tally: Mutex::default(),
        free,
        news,
        stand_ins: StandIns::new(&hosts, args.touch)?,
        settle: Ns::ms(args.settle).as_duration(),
    });
    let clients = u32::try_from(args.max_clients).expect("checked to be few");
    let mut play = Play::new(Arc::clone(&rack), &arrivals, clients);
    let began = Instant::now();
    let interrupted = tokio::select! {
        played = play.through(&arrivals) => played.map(|()| false)?,
        asked = tokio::signal::ctrl_c() => asked.map(|()| true).map_err(Failure::Output)?,
    };
    let found = report::Found {
        requested: arrivals.len(),
        took: began.elapsed(),
        lost_facts: play.losses().await?,
        dirty: dirt::found(&rack.to).await?.difference(&dirty).count(),
        stranded_mean: play.stranded_mean(),
        reach: looking.end().await,
    };
    play.everybody_leaves().await?;
    watching.abort();
    Report::new(&rack, &emcs, &hosts, &found).tell(&args, global.output)?;
    if interrupted {
        Err(Failure::Problem("interrupted: the report is about a part".to_owned()))
    } else {
        Ok(())
    }
}

/// Returns a name that distinguishes this replay's VMs and requests.
fn run_name() -> Result<String, Failure> {
    let mut random = [0_u8; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::Protocol(format!("no random numbers from the system: {errno}")))?;
    Ok(format!("{:08x}", u32::from_be_bytes(random)))
}
