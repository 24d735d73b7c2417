//! `tarn replay`: replays the VMs of a trace on a running rack through the Scheduler API, like a
//! best-fit scheduler, as fast as the rack responds. Then it reports the results and audits the
//! rack. `sim::packing` selects hosts, and the manager selects slices.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use cli_runtime::{Connection, Failure, Global, lists};
use units::{
    Ns,
    limits::{
        REPLAY_CLIENTS_DEFAULT, REPLAY_CLIENTS_MAX, REPLAY_SETTLE_TIME_DEFAULT, REPLAY_SETTLE_TIME_MAX,
        TEST_VMM_TOUCHED_MIB_MAX, TRACE_ROWS_MAX,
    },
};

mod calls;
mod capacity;
mod dirty_slices;
mod input;
mod journal;
mod lost_reservations;
mod player;
mod reachability;
mod report;
mod tally;
mod test_vmm;
mod test_vmms;
mod vm_lifecycle;
mod watcher;

pub use input::Source;
pub use test_vmm::{TestVmmArgs, run as test_vmm};

use capacity::FreeCapacity;
use journal::Journal;
use player::TracePlayer;
use report::Report;
use tally::ReplayTally;
use test_vmms::TestVmmLauncher;
use watcher::SnapshotReceiver;

/// Options of `tarn replay`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Trace of VM arrivals, plain or gzip-compressed; or `generated:COUNT` for VMs generated from
    /// a seed
    #[arg(value_name = "FILE|generated[:COUNT]")]
    pub trace: Source,
    /// rack.toml with the manager's address; --endpoint takes precedence
    #[arg(long, value_name = "FILE")]
    pub rack: Option<PathBuf>,
    /// Replay only the first N VMs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=TRACE_ROWS_MAX as u64))]
    pub limit: Option<u64>,
    /// Skip malformed rows instead of failing, and print their number
    #[arg(long)]
    pub lenient: bool,
    /// Seed of generated VMs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Also write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Memory that the test VMM of a VM writes in each slice
    #[arg(long, value_name = "MIB", default_value_t = 1, value_parser = clap::value_parser!(u64).range(0..=TEST_VMM_TOUCHED_MIB_MAX))]
    pub touch: u64,
    /// Write every acknowledged reply to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Maximum number of concurrent calls
    #[arg(long, value_name = "N", default_value_t = REPLAY_CLIENTS_DEFAULT as u64, value_parser = clap::value_parser!(u64).range(1..=REPLAY_CLIENTS_MAX as u64))]
    pub max_clients: u64,
    /// Time to wait for draining slices before a VM counts as rejected; 0 means no waiting
    #[arg(long, value_name = "MS", default_value_t = REPLAY_SETTLE_TIME_DEFAULT.as_ms(), value_parser = clap::value_parser!(u64).range(0..=REPLAY_SETTLE_TIME_MAX.as_ms()))]
    pub settle: u64,
}

/// State of a replay, shared by the tasks of its VMs.
#[derive(Debug)]
struct ReplayState {
    manager: Connection,
    /// Random part of the names of VMs and requests. It distinguishes them from those of other
    /// replays.
    run_name: String,
    journal: Mutex<Journal>,
    tally: Mutex<ReplayTally>,
    free: Arc<Mutex<FreeCapacity>>,
    snapshots: SnapshotReceiver,
    test_vmms: TestVmmLauncher,
    settle: Duration,
}

/// Replays a trace and prints the report. All VMs of the replay are released at the end.
///
/// # Errors
/// [`Failure`] if the trace cannot be read, the manager is unavailable for too long, the replay is
/// interrupted, or the rack violated a guarantee.
pub async fn run(args: Args, global: &Global) -> Result<(), Failure> {
    let arrivals = input::read(&args)?;
    let manager = Connection::open(&input::endpoint(args.rack.as_deref(), global)?).await?;
    let (emcs, hosts) = (lists::emcs(&manager).await?, lists::hosts(&manager).await?);
    let dirty_before = dirty_slices::find_quarantined(&manager).await?;
    let free = Arc::default();
    let (watcher_task, snapshots) = watcher::start(&manager, &free).await?;
    let scanner = reachability::ReachabilityScanner::start(manager.clone(), &emcs);
    let rack = Arc::new(ReplayState {
        manager,
        run_name: random_run_name()?,
        journal: Mutex::new(Journal::open(args.log.as_deref())?),
        tally: Mutex::default(),
        free,
        snapshots,
        test_vmms: TestVmmLauncher::new(&hosts, args.touch)?,
        settle: Ns::ms(args.settle).as_duration(),
    });
    let clients = u32::try_from(args.max_clients).expect("the option is at most 1024");
    let mut player = TracePlayer::new(Arc::clone(&rack), &arrivals, clients);
    let started = Instant::now();
    let interrupted = tokio::select! {
        finished = player.play_all(&arrivals) => finished.map(|()| false)?,
        signal = tokio::signal::ctrl_c() => signal.map(|()| true).map_err(Failure::Output)?,
    };
    let results = report::ReplayResults {
        requested: arrivals.len(),
        duration: started.elapsed(),
        lost_reservations: player.find_lost_reservations().await?,
        dirty: dirty_slices::find_quarantined(&rack.manager).await?.difference(&dirty_before).count(),
        stranded_mean: player.stranded_mean(),
        reachability: scanner.stop().await,
    };
    player.release_all().await?;
    watcher_task.abort();
    Report::new(&rack, &emcs, &hosts, &results).print(&args, global.output)?;
    if interrupted {
        Err(Failure::Problem("interrupted: the report covers only part of the trace".to_owned()))
    } else {
        Ok(())
    }
}

/// Returns a random name for this replay, which is part of the names of its VMs and requests.
fn random_run_name() -> Result<String, Failure> {
    let mut random = [0_u8; 4];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::Protocol(format!("cannot read random numbers: {errno}")))?;
    Ok(format!("{:08x}", u32::from_be_bytes(random)))
}
