//! `tarn replay`: VMs of a trace come and go on a running rack, asked for through the Scheduler API as a best-fit scheduler
//! would, as fast as the rack answers; then what came of it, and whether the rack kept its promises. Where a VM goes is
//! decided in `sim::packing`; what becomes of its memory is the manager's.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use units::{
    Ns,
    limits::{
        REPLAY_CLIENTS_DEFAULT, REPLAY_CLIENTS_MAX, REPLAY_SETTLE_DEFAULT, REPLAY_SETTLE_MAX,
        STAND_IN_TOUCH_MIB_MAX, TRACE_ROWS_MAX,
    },
};

use crate::{Connection, Failure, Format, Global, lists, print};

mod calls;
mod capacity;
mod descriptors;
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

pub use stand_in::{StandIn, run as stand_in};

/// VMs to replay, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A trace of VM arrivals, plain or gzipped; or generated[:COUNT] for VMs grown from a seed
    #[arg(value_name = "FILE|generated[:COUNT]")]
    pub trace: input::Source,
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
    journal: Mutex<journal::Journal>,
    tally: Mutex<tally::Tally>,
    free: Mutex<capacity::Free>,
    news: watcher::News,
    stand_ins: stand_ins::StandIns,
    settle: Duration,
}

/// Replays a trace and prints the report.
///
/// # Errors
/// A trace that cannot be read, a manager that stays away, or a promise that was seen broken.
pub async fn run(args: Args, global: &Global) -> Result<(), Failure> {
    let arrivals = input::read(&args)?;
    let to = Connection::open(&input::endpoint(args.rack.as_deref(), global)?).await?;
    let (emcs, hosts) = (lists::emcs(&to).await?, lists::hosts(&to).await?);
    let journal = journal::Journal::open(args.log.as_deref())?;
    let (watching, news) = watcher::start(&to).await?;
    let rack = Arc::new(Rack {
        run: run_name()?,
        journal: Mutex::new(journal),
        tally: Mutex::default(),
        free: Mutex::new(capacity::Free::new(news.latest())),
        news,
        stand_ins: stand_ins::StandIns::new(&hosts, args.touch)?,
        settle: Ns::ms(args.settle).as_duration(),
        to: to.clone(),
    });
    let looking = reach::Looking::start(to, &emcs);
    let began = Instant::now();
    let played = play::play(&rack, &arrivals, args.max_clients).await;
    watching.abort();
    let stranded = play::Stranded::of(&hosts, &played);
    let audited = match &played {
        Ok(played) => Some((played.lost_facts, looking.end().await)),
        Err(_) => None,
    };
    let played = played?;
    let (lost, reach) = audited.expect("a replay that was played was audited");
    let report = report::Report::new(&rack, &emcs, &played, stranded, lost, &reach, began.elapsed());
    tell(&report, &args, global.output)
}
