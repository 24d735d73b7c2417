//! Command-line arguments of `tarn`. They are parsed and checked without a manager. Each command is
//! implemented in the file with its name.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use proto::v1;
use units::{Bytes, MigrationId, Name, RequestId, ReservationId, limits::CORES_PER_HOST_MAX};

use cli_runtime::options::duration;
use evaluate::{plan, replay};

use crate::{Global, explain_tenant, models, shares, telemetry};

const EXIT_CODES_HELP: &str = "\
Exit codes:
  0    success
  1    error, or doctor found a problem
  2    usage error, or the manager rejected a value
  3    not found
  4    conflict: already exists, or not allowed in its current state
  5    exhausted: no free slices, memory or cores
  6    unavailable: the manager cannot be reached or is not ready
  124  timed out
  130  interrupted by Ctrl-C (SIGINT, as shells report it)";

const GLOBAL_OPTIONS_HINT: &str = "Global options such as --endpoint, --timeout and --output: `tarn --help`";

const COUNTERS_HELP: &str = "\
Counters for --counter, named after Intel's top-down method (any subset):
  retiring frontend_bound bad_speculation core_bound memory_bound l1_bound l2_bound l3_bound
  dram_latency_bound dram_bandwidth_bound store_bound dram_bound
                             fraction of pipeline slots or cycles, 0 to 1
  ipc                        instructions per cycle
  l1_mpki l2_mpki l3_mpki    cache misses per 1000 instructions
  memory_level_parallelism   outstanding cache misses";

/// Command-line client for the pool manager of a rack with pooled CXL memory
#[derive(Debug, Parser)]
#[command(name = "tarn", version, max_term_width = 100, after_help = EXIT_CODES_HELP)]
pub struct Cli {
    /// Options that every command accepts.
    #[command(flatten)]
    pub global: Global,
    /// Selected command.
    #[command(subcommand)]
    pub command: Command,
}

/// Hides the global options in the help of all subcommands. Every subcommand still accepts the
/// global options.
pub(crate) fn hide_global_options(command: clap::Command) -> clap::Command {
    let global: Vec<_> = command.get_arguments().filter(|arg| arg.is_global_set()).cloned().collect();
    command.mut_subcommands(|sub| {
        let hidden = global.iter().map(|arg| arg.clone().hide(true));
        with_global_options_hint(sub.args(hidden))
    })
}

/// Adds a hint about global options to the help of every subcommand without its own after-help
/// text.
fn with_global_options_hint(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(with_global_options_hint);
    if command.get_after_help().is_some() { command } else { command.after_help(GLOBAL_OPTIONS_HINT) }
}

/// Commands of `tarn`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Command that needs a connection to a manager.
    #[command(flatten)]
    Manager(ManagerCommand),
    /// Replay a trace of VM arrivals on a running rack and report the results
    Replay(replay::Args),
    /// Compute the DRAM that a rack would need with memory pools, from a trace of VM arrivals; needs no
    /// manager
    #[command(after_help = plan::OUTPUT_HELP)]
    Plan(plan::Args),
    /// Attach the memory of one VM as its VMM would, but without KVM and a guest: check that the
    /// slices are zero, write a pattern, and check it when stdin closes; for `tarn replay` and
    /// tests
    #[command(hide = true)]
    TestVmm(replay::TestVmmArgs),
    /// Evaluate predictions and fair shares offline, from recorded data; needs no manager
    #[command(subcommand)]
    Evaluate(evaluate::Subject),
    /// Diagnose the rack and, on a host, this machine, and show a fix for each problem
    Doctor(Doctor),
    /// Print shell completions
    Completions(Completions),
    /// Write manual pages into a directory
    #[command(hide = true)]
    Man(Man),
}

/// Commands that need a connection to a manager.
#[derive(Debug, Subcommand)]
pub enum ManagerCommand {
    /// List resources, or show one resource
    #[command(subcommand)]
    Get(Resource),
    /// Set properties of resources
    #[command(subcommand)]
    Set(Set),
    /// Show all details of one resource
    #[command(subcommand)]
    Describe(Subject),
    /// Show every recorded decision about one resource with its inputs, oldest first
    #[command(subcommand)]
    Explain(ExplainSubject),
    /// Show how a VM's memory would be split into local and pool memory, and the hosts that fit;
    /// reserves nothing
    #[command(after_help = COUNTERS_HELP)]
    PlanVm(PlanVm),
    /// Reserve memory on a host for a VM
    Reserve(Reserve),
    /// Wait until every slice of a reservation is online
    WaitReady(Target),
    /// Confirm that the VM has started, so that its reservation does not expire
    Commit(Target),
    /// Release the memory of a VM
    Release(Release),
    /// Move the pool memory of a running VM to local memory of its host
    Rehome(Rehome),
    /// Mark a host or EMC as unschedulable: it accepts no new reservations
    #[command(subcommand)]
    Cordon(CordonTarget),
    /// Mark a host or EMC as schedulable again, or return a quarantined slice to service
    #[command(subcommand)]
    Uncordon(UncordonTarget),
    /// Cordon a host or EMC and request the migration of its VMs
    #[command(subcommand)]
    Drain(CordonTarget),
    /// Revoke a silent host's access to its slices
    Fence(Fence),
    /// Save a copy of the manager's store while the manager runs; `pool-manager restore` reads the
    /// copy
    Backup(Backup),
    /// Print changes of the rack as they happen
    Watch(Watch),
    /// Manage migration requests
    #[command(subcommand)]
    Migration(Migration),
    /// Train a model; the manager does not use the model until `tarn promote`
    #[command(subcommand)]
    Train(models::Train),
    /// Make a model the serving model, and compare it with the previous serving model
    Promote(models::Promote),
    /// Return to the model that served before the last promotion
    Rollback(models::Rollback),
    /// Import a model exported by Tarn or trained with LightGBM or scikit-learn; the manager does
    /// not use the model until `tarn promote`
    #[command(after_help = evaluate::LABEL_COLUMNS)]
    ImportModel(models::Import),
    /// Export a model to stdout
    ExportModel(models::Export),
    /// Import or export the recorded outcomes of VMs, the training data of models
    #[command(subcommand)]
    Telemetry(telemetry::Telemetry),
    /// Show a live view of hosts, EMCs, slices, alarms, and VMs that pool memory may slow down
    Top,
}

/// Resources that can be listed.
#[derive(Clone, Debug, Subcommand)]
pub enum Resource {
    /// Show a summary of the rack
    Rack,
    /// List EMCs (external memory controllers, the pool devices)
    #[command(visible_alias = "emc")]
    Emcs(NameFilter),
    /// List hosts
    #[command(visible_alias = "host")]
    Hosts(NameFilter),
    /// List slices of 1 GiB
    #[command(visible_alias = "slice")]
    Slices(SliceFilter),
    /// List reservations, each the memory of one VM
    #[command(visible_alias = "reservation")]
    Reservations(ReservationFilter),
    /// List the running managers of the rack: the leader and its standbys
    #[command(visible_alias = "manager")]
    Managers,
    /// List VMs with pool memory, and the verdict of the monitor: fine, watch (suspected slowdown),
    /// migrate (slowed down beyond the margin) or unknown (not sampled)
    #[command(visible_alias = "vm")]
    Vms(VmFilter),
    /// List migration requests and their states
    #[command(visible_alias = "migration")]
    Migrations(VmFilter),
    /// List models, and whether they serve
    #[command(visible_alias = "model")]
    Models,
    /// List the tenants of a host with their shares of local memory and of the link to remote
    /// memory
    #[command(visible_alias = "share")]
    Shares(shares::HostArg),
    /// List the tenants of a host with their local memory and slower memory
    #[command(visible_alias = "tenant")]
    Tenants(shares::HostArg),
    /// List the tenants of a host with the thresholds above which their memory is evicted early
    #[command(visible_alias = "eviction")]
    Evictions(shares::HostArg),
    /// Show the soft memory of a host, and list the processes that use it
    #[command(name = "soft", visible_alias = "soft-memory")]
    SoftMemory(shares::HostArg),
    /// List the weights set for tenants of a host
    #[command(visible_alias = "weight")]
    Weights(shares::HostArg),
    /// List active alarms
    #[command(visible_alias = "alarm")]
    Alarms(AlarmFilter),
}

/// Properties that can be set.
#[derive(Clone, Debug, Subcommand)]
pub enum Set {
    /// Set weights of a host's tenants, and print all weights set on the host
    Weights(shares::SetWeights),
}

/// Optional name of a host or EMC, to show only this resource.
#[derive(Clone, Debug, Args)]
pub struct NameFilter {
    /// Show only the resource with this name
    pub name: Option<Name>,
}

/// Optional number of a slice, to show only this slice.
#[derive(Clone, Debug, Args)]
pub struct SliceFilter {
    /// Show only this slice
    #[arg(value_name = "NUMBER")]
    pub slice: Option<u32>,
}

/// Selection of the reservations to list.
#[derive(Clone, Debug, Args)]
pub struct ReservationFilter {
    /// Show only this reservation, given by its VM or as r-N
    #[arg(value_name = "VM|r-N")]
    pub target: Option<VmOrReservation>,
    /// Include ended reservations that the manager still stores
    #[arg(long, conflicts_with = "target")]
    pub include_ended: bool,
}

/// Optional name of a VM, to show only this VM or its migration requests.
#[derive(Clone, Debug, Args)]
pub struct VmFilter {
    /// Show only this VM
    pub vm: Option<Name>,
}

/// Selection of the alarms to list.
#[derive(Clone, Debug, Args)]
pub struct AlarmFilter {
    /// Show only alarms about this subject, such as h1 or "host h1"
    pub subject: Option<String>,
}

/// Resource to describe or explain.
#[derive(Clone, Debug, Subcommand)]
pub enum Subject {
    /// The rack as a whole
    Rack,
    /// The memory of a VM
    Vm {
        /// VM, or its reservation as r-N
        #[arg(value_name = "VM|r-N")]
        target: VmOrReservation,
    },
    /// A host
    Host {
        /// Name of the host
        name: Name,
    },
    /// An EMC
    Emc {
        /// Name of the EMC
        name: Name,
    },
    /// A slice
    Slice {
        /// Number of the slice
        #[arg(value_name = "NUMBER")]
        slice: u32,
    },
}

/// Resource or shares to explain.
#[derive(Clone, Debug, Subcommand)]
pub enum ExplainSubject {
    /// Resource, explained by the recorded decisions about this resource.
    #[command(flatten)]
    Resource(Subject),
    /// The shares of a host's tenants, as computed in the last epoch
    Shares(shares::HostArg),
    /// The last decisions about a tenant: its memory in local memory and slower memory, the eviction
    /// of its memory, and its shares
    Tenant(explain_tenant::TenantArg),
}

/// VM whose placement is planned.
#[derive(Clone, Debug, Args)]
pub struct PlanVm {
    /// Name of the VM
    #[arg(long)]
    pub vm: Name,
    /// Number of cores
    #[arg(long, value_parser = parse_cores)]
    pub cores: u32,
    /// Memory, such as 16GiB
    #[arg(long, value_name = "SIZE")]
    pub memory: Bytes,
    /// The VM's pages cannot be migrated (device assignment, SR-IOV)
    #[arg(long)]
    pub pinned: bool,
    /// Customer or application of the VM; the strongest predictor of untouched memory
    #[arg(long, value_name = "NAME", default_value = "")]
    pub customer: String,
    /// VM type, such as m5.large
    #[arg(long, value_name = "NAME", default_value = "")]
    pub vm_type: String,
    /// Location, guest operating system, or both, such as eu-1/linux
    #[arg(long, value_name = "NAME", default_value = "")]
    pub location: String,
    /// Performance counter of the workload, measured on local memory; may be repeated or
    /// comma-separated
    #[arg(long, value_name = "NAME=NUMBER", value_parser = parse_counter, value_delimiter = ',')]
    pub counter: Vec<(String, f64)>,
}

/// Parses a number of cores.
fn parse_cores(text: &str) -> Result<u32, String> {
    let cores = text.parse().ok().filter(|cores| *cores <= CORES_PER_HOST_MAX);
    cores.ok_or_else(|| format!("must be a whole number from 0 to {CORES_PER_HOST_MAX}"))
}

/// Parses a performance counter as NAME=NUMBER. The manager checks the name.
fn parse_counter(text: &str) -> Result<(String, f64), String> {
    let pair = text.split_once('=').and_then(|(name, number)| Some((name.to_owned(), number.parse().ok()?)));
    pair.ok_or_else(|| "must be NAME=NUMBER, such as dram_bound=0.12".to_owned())
}

/// Reservation to make: memory and cores for a VM on a host.
#[derive(Clone, Debug, Args)]
pub struct Reserve {
    /// Host that will run the VM
    #[arg(long)]
    pub host: Name,
    /// Name of the VM
    #[arg(long)]
    pub vm: Name,
    /// Pool memory, a multiple of 1GiB, such as 4GiB
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub pool: Bytes,
    /// Local memory of the host, a multiple of 1MiB, such as 8GiB
    #[arg(long, value_name = "SIZE", default_value = "0")]
    pub local: Bytes,
    /// Number of cores
    #[arg(long, default_value_t = 0, value_parser = parse_cores)]
    pub cores: u32,
    /// The VM's pages cannot be migrated (device assignment, SR-IOV)
    #[arg(long)]
    pub pinned: bool,
    /// User ID on the host that may attach the VM's memory, besides root [default: the user of the
    /// host's agent]
    #[arg(long, value_name = "UID", value_parser = clap::value_parser!(u32).range(..i64::from(u32::MAX)))]
    pub uid: Option<u32>,
    /// Check whether the reservation is possible, and reserve nothing
    #[arg(long, conflicts_with = "wait_ready")]
    pub validate_only: bool,
    /// Wait until every slice is online
    #[arg(long)]
    pub wait_ready: bool,
    /// Time until the reservation expires unless committed, such as 5m [default: set in rack.toml]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub commit_within: Option<Duration>,
    /// Idempotency key: requests with the same ID are executed once [default: a random ID, printed
    /// on stderr]
    #[arg(long, value_name = "ID")]
    pub request_id: Option<RequestId>,
    /// Scheduler that makes the request; request IDs are unique per client
    #[arg(long, value_name = "NAME", default_value = "tarn")]
    pub client: Name,
}

/// Reservation to which a command applies.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// VM, or its reservation as r-N
    #[arg(value_name = "VM|r-N")]
    pub target: VmOrReservation,
}

/// Reservation to release, with options.
#[derive(Clone, Debug, Args)]
pub struct Release {
    /// VM, or its reservation as r-N
    #[arg(value_name = "VM|r-N")]
    pub target: VmOrReservation,
    /// Release the slices even if the VM still uses them, which kills the VM. A VM without slices continues.
    /// Requires --reason
    #[arg(long, requires = "reason")]
    pub force: bool,
    /// Reason, stored with the decision
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// VM whose pool memory is moved, with options.
#[derive(Clone, Debug, Args)]
pub struct Rehome {
    /// VM, or its reservation as r-N
    #[arg(value_name = "VM|r-N")]
    pub target: VmOrReservation,
    /// Wait until the memory is moved; exit with an error if the move fails
    #[arg(long)]
    pub wait: bool,
    /// Cancel the move in progress, if any. Both memories stay reserved until the host reports the result.
    /// A move by the kernel (backend memory_block) cannot be cancelled
    #[arg(long, conflicts_with = "wait")]
    pub cancel: bool,
}

/// Resource that can be cordoned or drained.
#[derive(Clone, Debug, Subcommand)]
pub enum CordonTarget {
    /// A host
    Host(NameAndReason),
    /// An EMC
    Emc(NameAndReason),
}

/// Resource that can be returned to service.
#[derive(Clone, Debug, Subcommand)]
pub enum UncordonTarget {
    /// A host
    Host(NameAndReason),
    /// An EMC
    Emc(NameAndReason),
    /// A quarantined slice, which is revoked, scrubbed, verified and then freed
    Slice {
        /// Number of the slice
        #[arg(value_name = "NUMBER")]
        slice: u32,
        /// Reason, stored with the decision
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

/// Name of a host or EMC, and the reason for the command.
#[derive(Clone, Debug, Args)]
pub struct NameAndReason {
    /// Name of the host or EMC
    pub name: Name,
    /// Reason, stored with the decision
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Host to fence, and confirmation that it is powered off.
#[derive(Clone, Debug, Args)]
pub struct Fence {
    /// Host to fence
    pub host: Name,
    /// Confirm that the host is powered off; its slices are then scrubbed and reused
    #[arg(long)]
    pub confirm_powered_off: bool,
    /// Reason, stored with the decision
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

/// Options of `tarn backup`.
#[derive(Clone, Debug, Args)]
pub struct Backup {
    /// Destination file, which must not exist yet
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// Options of `tarn watch`.
#[derive(Clone, Debug, Args)]
pub struct Watch {
    /// Stream to print
    #[arg(value_enum, default_value_t)]
    pub stream: WatchStream,
}

/// Stream of changes that `tarn watch` prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WatchStream {
    /// Free cores, local memory and slices of each host
    Capacity,
    /// Every durable change of a slice, reservation, host, EMC or alarm
    #[default]
    Events,
    /// Migration requests
    Migrations,
}

/// Commands for migration requests.
#[derive(Clone, Debug, Subcommand)]
pub enum Migration {
    /// Set the state of a migration request
    Resolve {
        /// Name of the VM
        vm: Name,
        /// New state of the request
        #[arg(value_enum)]
        state: Resolution,
        /// ID of the request; required if the VM has several requests
        #[arg(long, value_name = "m-N")]
        id: Option<MigrationId>,
        /// Reason, stored with the decision
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

/// State that a scheduler can set for a migration request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Resolution {
    /// The VM will be migrated
    Accepted,
    /// The VM will not be migrated; the manager repeats the request after ten minutes
    Declined,
    /// The VM has been migrated or has ended
    Done,
}

/// Options of `tarn doctor`.
#[derive(Clone, Debug, Args)]
pub struct Doctor {
    /// Also check this machine as the host configured in FILE, using the `host-agent` next to tarn
    /// or in PATH [default: /etc/tarn/host.toml, if it exists]
    #[arg(long, env = "TARN_HOST_CONFIG", value_name = "FILE")]
    pub host_config: Option<PathBuf>,
}

/// Options of `tarn completions`.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// Shell to generate completions for
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Options of `tarn man`.
#[derive(Clone, Debug, Args)]
pub struct Man {
    /// Destination directory; created if missing
    pub dir: PathBuf,
}

/// Reference to a reservation by its ID or its VM. Text of the form `r-7` is an ID, and any other
/// text is the name of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmOrReservation {
    /// Reservation with this ID.
    Reservation(ReservationId),
    /// Reservation of this VM.
    Vm(Name),
}

impl std::str::FromStr for VmOrReservation {
    type Err = units::NameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map_or_else(|_| text.parse().map(Self::Vm), |id| Ok(Self::Reservation(id)))
    }
}

impl From<VmOrReservation> for v1::ReservationRef {
    fn from(target: VmOrReservation) -> Self {
        match target {
            VmOrReservation::Reservation(id) => Self { reservation: id.to_string(), vm: String::new() },
            VmOrReservation::Vm(name) => Self { reservation: String::new(), vm: name.into() },
        }
    }
}

/// Returns whether the arguments contain `--output json` in any notation. Does not parse the other
/// arguments, so that a parse error can be printed as JSON.
pub(crate) fn is_json_requested(arguments: &[OsString]) -> bool {
    let joined = ["-ojson", "-o=json", "--output=json"];
    let separate = |pair: &[OsString]| (pair[0] == "-o" || pair[0] == "--output") && pair[1] == "json";
    arguments.iter().any(|argument| joined.iter().any(|j| argument == j))
        || arguments.windows(2).any(separate)
}
