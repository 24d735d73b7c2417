//! `tarn replay`: VMs of a trace come and go on a running rack, asked for through the Scheduler API as a best-fit scheduler
//! would, as fast as the rack answers; then what came of it, and whether the rack kept its promises. Where a VM goes is
//! decided in `sim::packing`; what becomes of its memory is the manager's.

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

/// VMs to replay, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A trace of VM arrivals, plain or gzipped; or `generated:COUNT` for VMs grown from a seed
    #[arg(value_name = "FILE|generated[:COUNT]")]
    pub trace: Source,
    /// The rack's rack.toml, for where its manager listens; --endpoint goes before it
    #[arg(long, value_name = "FILE")]
    pub rack: Option<PathBuf>,
    /// Only the first so many VMs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=TRACE_ROWS_MAX as u64))]
    pub limit: Option<u64>,
    /// Leave malformed rows out and count them
    #[arg(long)]
    pub lenient: bool,
    /// What generated VMs grow from
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Also write the report there, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// How much of each slice a stand-in for a VM writes
    #[arg(long, value_name = "MIB", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=STAND_IN_TOUCH_MIB_MAX))]
    pub touch: u64,
    /// Write every acknowledged reply there, a JSON object a line
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Keep at most so many calls under way
    #[arg(long, value_name = "N", default_value_t = REPLAY_CLIENTS_DEFAULT as u64, value_parser = clap::value_parser!(u64).range(1..=REPLAY_CLIENTS_MAX as u64))]
    pub max_clients: u64,
    /// Wait so long for slices that are draining before a VM is turned away; 0 for never
    #[arg(long, value_name = "MS", default_value_t = REPLAY_SETTLE_DEFAULT.as_ms(), value_parser = clap::value_parser!(u64).range(0..=REPLAY_SETTLE_MAX.as_ms()))]
    pub settle: u64,
}

/// Everything one replay is about, shared by the lives of its VMs.
#[derive(Debug)]
struct Rack {
    to: Connection,
    /// Distinguishes this replay's VMs and requests from those of any other.
    run: String,
    journal: Mutex<Journal>,
    tally: Mutex<Tally>,
    free: Arc<Mutex<Free>>,
    news: News,
    stand_ins: StandIns,
    settle: Duration,
}

/// Replays a trace and prints the report. What is on the rack afterwards is what was there before.
///
/// # Errors
/// A trace that cannot be read, a manager that stays away, or a promise that was seen broken.
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

/// What tells this replay's VMs and requests from those of any other.
fn run_name() -> Result<String, Failure> {
    let mut random = [0_u8; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::Protocol(format!("no random numbers from the system: {errno}")))?;
    Ok(format!("{:08x}", u32::from_be_bytes(random)))
}
