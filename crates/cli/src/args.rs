//! The words people type, checked as far as words can be. What they do is in the file named like the command.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use proto::v1;
use units::{Bytes, Name, RequestId, ReservationId};

use cli_runtime::options::span;
use evaluate::replay;

use crate::{Global, models, shares, telemetry};

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    error, or something is wrong (doctor)
  2    usage, or a value the manager does not accept
  3    not found
  4    conflict: it exists already, or its state does not allow this
  5    exhausted: out of slices, memory or cores
  6    unavailable: the manager cannot be reached or is not ready
  124  timed out
  130  interrupted by Ctrl-C (SIGINT, as shells report it)";

const GLOBAL_OPTIONS: &str = "Global options such as --endpoint, --timeout and --output: `tarn --help`";

const COUNTERS: &str = "\
Counters of --counter, after Intel's top-down method, any of them:
  retiring frontend_bound bad_speculation core_bound memory_bound l1_bound l2_bound l3_bound
  dram_latency_bound dram_bandwidth_bound store_bound dram_bound
                             shares of slots or cycles, 0 to 1
  ipc l1_mpki l2_mpki l3_mpki memory_level_parallelism
                             instructions a cycle; misses of a thousand instructions; misses at a time";

/// Looks at a rack that lends memory, and asks things of its pool manager
#[derive(Debug, Parser)]
#[command(name = "tarn", version, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    /// Where to ask and how to answer.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Returns the commands with global options in the help of `tarn` alone. Every other command takes them, too.
pub(crate) fn brief(command: clap::Command) -> clap::Command {
    let global: Vec<_> = command.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    command.mut_subcommands(|sub| {
        let hidden = global.iter().map(|arg| arg.clone().hide(true));
        with_pointer(sub.args(hidden))
    })
}

/// Adds where global options are explained, unless a command has another text there.
fn with_pointer(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_pointer);
    if command.get_after_help().is_some() { command } else { command.after_help(GLOBAL_OPTIONS) }
}

/// What `tarn` can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Over a connection to a manager.
    #[command(flatten)]
    Ask(Ask),
    /// Play a trace of VMs on the rack, and report what came of it
    Replay(replay::Args),
    /// Do with a VM's slices what a VMM would; started by replay
    #[command(hide = true)]
    StandInVm(replay::StandIn),
    /// How good forecasts would have been for VMs that have ended; needs no manager
    #[command(subcommand)]
    Evaluate(evaluate::Subject),
    /// What is wrong, and the command that mends it: with the rack, and with this machine if it is a host
    Doctor(Doctor),
    /// Completions for a shell, on stdout
    Completions(Completions),
    /// Manual pages, into a folder
    #[command(hide = true)]
    Man(Man),
}

/// What is asked of a manager.
#[derive(Debug, Subcommand)]
pub enum Ask {
    /// List things, or one of them
    #[command(subcommand)]
    Get(Kind),
    /// Everything about one thing
    #[command(subcommand)]
    Describe(Subject),
    /// Why things are as they are: every decision about one thing, newest last
    #[command(subcommand)]
    Explain(Explained),
    /// How a VM's memory would be split and which hosts fit; reserves nothing
    #[command(after_help = COUNTERS)]
    PlanVm(PlanVm),
    /// Make a host the owner of memory for a VM
    Reserve(Reserve),
    /// Wait until every slice of a reservation is online
    WaitReady(Which),
    /// The VM was started: keep its memory until it ends
    Commit(Which),
    /// Give a VM's memory back
    Release(Release),
    /// Accept no new reservations on a host or from an EMC
    #[command(subcommand)]
    Cordon(Place),
    /// Take a cordon or drain back, or clean a quarantined slice
    #[command(subcommand)]
    Uncordon(Mended),
    /// Cordon, and ask the scheduler to move every VM away
    #[command(subcommand)]
    Drain(Place),
    /// Cut a silent host off its slices
    Fence(Fence),
    /// Copy the manager's store into a file, while the manager goes on; `pool-manager restore` makes a store of it
    Backup(Backup),
    /// Changes as they happen
    Watch(Watch),
    /// Answer requests to move a VM
    #[command(subcommand)]
    Migration(Migration),
    /// Say how much tenants of a host may have of it relative to each other
    Weigh(shares::Weigh),
    /// Make a model of what VMs did; it serves once it is promoted
    #[command(subcommand)]
    Train(models::Train),
    /// Have a model serve from now on, shown against the one that does
    Promote(models::Promote),
    /// Have the model serve again that served before
    Rollback(models::OfKind),
    /// Take in a model: one that was exported, or one that LightGBM or scikit-learn trained; it serves once it is promoted
    #[command(after_help = evaluate::LABEL_COLUMNS)]
    ImportModel(models::Import),
    /// A model as a file, on stdout
    ExportModel(models::Export),
    /// Outcomes of VMs, which models learn from: into the manager and out of it
    #[command(subcommand)]
    Telemetry(telemetry::Telemetry),
    /// The rack, live: hosts, EMCs and every slice
    Top,
}

/// Kinds of things that can be listed.
#[derive(Clone, Debug, Subcommand)]
pub enum Kind {
    /// The rack as a whole
    Rack,
    /// EMCs, the pool devices
    #[command(visible_alias = "emc")]
    Emcs(Named),
    /// Hosts
    #[command(visible_alias = "host")]
    Hosts(Named),
    /// Slices, 1 GiB each
    #[command(visible_alias = "slice")]
    Slices(Numbered),
    /// Reservations, the memory of VMs
    #[command(visible_alias = "reservation")]
    Reservations(Reservations),
    /// Requests to move a VM, and what the scheduler said
    #[command(visible_alias = "migration")]
    Migrations(OfVm),
    /// Models, and which of them serve
    #[command(visible_alias = "model")]
    Models,
    /// How the tenants of a host share its memory and its link to remote memory
    #[command(visible_alias = "share")]
    Shares(shares::OfHost),
    /// What the manager warns of
    #[command(visible_alias = "alarm")]
    Alarms(About),
}

/// Perhaps one of them, by name.
#[derive(Clone, Debug, Args)]
pub struct Named {
    /// Only this one
    pub name: Option<Name>,
}

/// Perhaps one of them, by number.
#[derive(Clone, Debug, Args)]
pub struct Numbered {
    /// Only this one
    #[arg(value_name = "NUMBER")]
    pub slice: Option<u32>,
}

/// Which reservations.
#[derive(Clone, Debug, Args)]
pub struct Reservations {
    /// Only this one, by its VM or as r-N
    #[arg(value_name = "VM|r-N")]
    pub which: Option<Ref>,
    /// Also those that ended and are still remembered
    #[arg(long, conflicts_with = "which")]
    pub ended: bool,
}

/// Perhaps of one VM.
#[derive(Clone, Debug, Args)]
pub struct OfVm {
    /// Only this VM's
    pub vm: Option<Name>,
}

/// Which alarms.
#[derive(Clone, Debug, Args)]
pub struct About {
    /// Only those about this subject
    pub subject: Option<String>,
}

/// One thing.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// The rack as a whole
    Rack,
    /// A VM's memory
    Vm {
        /// The VM, or its reservation as r-N
        #[arg(value_name = "VM|r-N")]
        which: Ref,
    },
    /// A host
    Host {
        /// Its name
        name: Name,
    },
    /// An EMC
    Emc {
        /// Its name
        name: Name,
    },
    /// A slice
    Slice {
        /// Its number
        #[arg(value_name = "NUMBER")]
        slice: u32,
    },
}

/// What can be explained.
#[derive(Clone, Debug, Subcommand)]
pub enum Explained {
    /// One thing, by the decisions about it.
    #[command(flatten)]
    Subject(Subject),
    /// How the tenants of a host share it, by its last epoch
    Shares(shares::OfHost),
}

/// A VM to plan for.
#[derive(Clone, Debug, Args)]
pub struct PlanVm {
    /// Its name
    #[arg(long)]
    pub vm: Name,
    /// Its cores
    #[arg(long)]
    pub cores: u32,
    /// Its memory, such as 16GiB
    #[arg(long, value_name = "SIZE")]
    pub memory: Bytes,
    /// Its pages must stay where they are (device assignment, SR-IOV)
    #[arg(long)]
    pub pinned: bool,
    /// Its customer or application: what came of their VMs tells most
    #[arg(long, value_name = "NAME", default_value = "")]
    pub customer: String,
    /// Its type
    #[arg(long, value_name = "NAME", default_value = "")]
    pub kind: String,
    /// Its location, operating system, or both
    #[arg(long, value_name = "NAME", default_value = "")]
    pub place: String,
    /// A counter of its workload with local memory; may be repeated, or several parted by commas
    #[arg(long, value_name = "NAME=NUMBER", value_parser = counter, value_delimiter = ',')]
    pub counter: Vec<(String, f64)>,
}

/// A counter and what it said; which counters there are is the manager's to say.
fn counter(text: &str) -> Result<(String, f64), String> {
    let said = text.split_once('=').and_then(|(name, number)| Some((name.to_owned(), number.parse().ok()?)));
    said.ok_or_else(|| "must be NAME=NUMBER, such as dram_bound=0.12".to_owned())
}

/// Memory for a VM.
#[derive(Clone, Debug, Args)]
pub struct Reserve {
    /// The host that runs the VM
    #[arg(long)]
    pub host: Name,
    /// The VM
    #[arg(long)]
    pub vm: Name,
    /// Memory from the pool in whole slices of 1GiB, such as 4GiB
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub pool: Bytes,
    /// Memory of the host itself in whole MiB, such as 8GiB
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub local: Bytes,
    /// Cores
    #[arg(long, default_value_t = 0)]
    pub cores: u32,
    /// Its pages must stay where they are (device assignment, SR-IOV)
    #[arg(long)]
    pub pinned: bool,
    /// The user of the host that may use the VM's memory beside root, by number [default: the user of the host's agent]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    pub uid: Option<u32>,
    /// Answer what would happen, change nothing
    #[arg(long, conflicts_with = "wait_ready")]
    pub validate_only: bool,
    /// Answer when every slice is online
    #[arg(long)]
    pub wait_ready: bool,
    /// It ends by itself unless committed within this time [default: the rack's]
    #[arg(long, value_name = "TIME", value_parser = span)]
    pub commit_within: Option<Duration>,
    /// Repeat a request with the same id and it is done once [default: a random one, printed on stderr]
    #[arg(long, value_name = "ID")]
    pub request_id: Option<RequestId>,
    /// The scheduler on whose behalf; request ids are remembered for each
    #[arg(long, value_name = "NAME", default_value = "tarn")]
    pub client: Name,
}

/// One reservation.
#[derive(Clone, Debug, Args)]
pub struct Which {
    /// The VM, or its reservation as r-N
    #[arg(value_name = "VM|r-N")]
    pub which: Ref,
}

/// A reservation that ends.
#[derive(Clone, Debug, Args)]
pub struct Release {
    /// The VM, or its reservation as r-N
    #[arg(value_name = "VM|r-N")]
    pub which: Ref,
    /// Take the memory away even if the VM's process still runs: it dies of it. Needs --reason
    #[arg(long, requires = "reason")]
    pub force: bool,
    /// Why, for the record
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// What can be closed to new reservations.
#[derive(Clone, Debug, Subcommand)]
pub enum Place {
    /// A host
    Host(NamedWhy),
    /// An EMC
    Emc(NamedWhy),
}

/// What can be opened again.
#[derive(Clone, Debug, Subcommand)]
pub enum Mended {
    /// A host
    Host(NamedWhy),
    /// An EMC
    Emc(NamedWhy),
    /// A quarantined slice: it is revoked, scrubbed, verified, then free
    Slice {
        /// Its number
        #[arg(value_name = "NUMBER")]
        slice: u32,
        /// Why, for the record
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

/// A name, and why.
#[derive(Clone, Debug, Args)]
pub struct NamedWhy {
    /// Its name
    pub name: Name,
    /// Why, for the record
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// A host to cut off.
#[derive(Clone, Debug, Args)]
pub struct Fence {
    /// The host
    pub host: Name,
    /// You vouch that the machine is off
    #[arg(long)]
    pub confirm_powered_off: bool,
    /// Why, for the record
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Where a backup goes.
#[derive(Clone, Debug, Args)]
pub struct Backup {
    /// The file; must not exist
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// What to watch.
#[derive(Clone, Debug, Args)]
pub struct Watch {
    /// Of what
    #[arg(value_enum, default_value_t)]
    pub stream: Stream,
}

/// What can be watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Stream {
    /// Free cores, memory and slices.
    Capacity,
    /// Every durable change.
    #[default]
    Events,
    /// VMs that ought to move.
    Migrations,
}

/// What can be said about migrations.
#[derive(Clone, Debug, Subcommand)]
pub enum Migration {
    /// Answer a request to move a VM
    Resolve {
        /// The VM
        vm: Name,
        /// The answer
        #[arg(value_enum)]
        state: Resolution,
        /// Why, for the record
        #[arg(long, value_name = "TEXT")]
        answer: Option<String>,
    },
}

/// Answers to a request to move a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Resolution {
    /// It will be moved.
    Accepted,
    /// It will not; the rack asks again after a while.
    Declined,
    /// It was moved, or has ended.
    Done,
}

/// What else a doctor looks at.
#[derive(Clone, Debug, Args)]
pub struct Doctor {
    /// This machine is the host of this host.toml: look at it, too, by the `host-agent` beside tarn or in PATH [default:
    /// /etc/tarn/host.toml, if it is there]
    #[arg(long, env = "TARN_HOST_CONFIG", value_name = "FILE")]
    pub host_config: Option<PathBuf>,
}

/// For which shell.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Where manual pages go.
#[derive(Clone, Debug, Args)]
pub struct Man {
    /// The folder
    pub dir: PathBuf,
}

/// Names a reservation: `r-7` is the reservation of that number, anything else a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ref {
    /// By its own number.
    Reservation(ReservationId),
    /// By the VM it is for.
    Vm(Name),
}

impl std::str::FromStr for Ref {
    type Err = units::NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map_or_else(|_| text.parse().map(Self::Vm), |id| Ok(Self::Reservation(id)))
    }
}

impl From<Ref> for v1::ReservationRef {
    fn from(which: Ref) -> Self {
        match which {
            Ref::Reservation(id) => Self { reservation: id.to_string(), vm: String::new() },
            Ref::Vm(name) => Self { reservation: String::new(), vm: name.into() },
        }
    }
}

/// Whether words that are no command ask for JSON all the same, so that a program can read what is wrong with them.
pub(crate) fn asks_for_json(words: &[OsString]) -> bool {
    let joined = ["-ojson", "-o=json", "--output=json"];
    let apart = |pair: &[OsString]| (pair[0] == "-o" || pair[0] == "--output") && pair[1] == "json";
    words.iter().any(|word| joined.iter().any(|j| word == j)) || words.windows(2).any(apart)
}
