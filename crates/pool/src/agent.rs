//! The agent's end of the protocol: turns events into effects, and performs no effect itself. The
//! agent applies desired states, records the process of each VM, and reports the observed state of
//! its host. It never decides which host owns a slice.
//!
//! ```text
//!   DesiredState ─┬▶ per slice: Online · Offline · Scrub ─▶ Done arrives as event ─┐
//!                 └▶ per VM: Kill when fenced, DeleteRecord of ended VMs           ├▶ SendReport
//!   Attach ─▶ Record ─▶ Recorded ─▶ Watch, PassMemory ─▶ ProcessGone ──────────────┘
//! ```
//!
//! The agent is level-triggered: it acts on the complete desired state of the host, which it
//! maintains from complete messages and messages with changes. Applying a message twice has no
//! further effect. A message with changes leaves all slices and VMs that it does not contain
//! unchanged.

mod orphans;
mod rehome;
mod slices;
mod vms;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use units::limits::{HEARTBEATS_PER_LEASE, LEASE_TTL_MIN, OBSERVED_STATE_BATCH_DELAY};
use units::{Bytes, DesiredVersion, InstanceId, Name, Ns, ReservationId, UserId};

use self::{
    orphans::OrphanedSlices,
    slices::{FailedAttempts, SliceOrder, SliceStatus},
    vms::Vm,
};
use crate::protocol::{
    DesiredState, DesiredVm, FailureReason, Handle, Holding, ObservedState, ObservedVm, ScrubReport,
    SliceFailure,
};

/// Identifies a process's request for the memory of its VM, until the agent has replied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Process on the host. The start time distinguishes processes with a reused process ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process ID on the host.
    pub pid: u32,
    /// Start time, in clock ticks since the boot of the machine.
    pub started: u64,
    /// Control group of the process, for diagnosis.
    pub cgroup: String,
}

impl Process {
    /// Returns whether both values identify the same process; the control groups may differ.
    pub fn is(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// Process that requests memory, and its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Process that sent the request.
    pub process: Process,
    /// User of the process when it connected. A VMM that drops its root privileges after it has
    /// connected counts as root.
    pub uid: UserId,
    /// Path of the socket on which the process can be controlled, if it has one.
    pub control_socket: Option<String>,
}

/// Record of a VM's process and of the memory that the process gets. The record is durable before
/// the process gets the first file descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRecord {
    /// ID of the VM's reservation.
    pub reservation: ReservationId,
    /// Name of the VM.
    pub vm: Name,
    /// Process of the VM.
    pub process: Process,
    /// Local memory that the process gets in addition to the slices.
    pub local: Bytes,
    /// Whether the VM's pages must not be migrated.
    pub pinned: bool,
    /// User who may access the VM's memory, in addition to root; `None` for the agent's user.
    pub uid: Option<UserId>,
    /// Slices that the process gets, each with its location.
    pub slices: BTreeMap<Holding, Handle>,
    /// Path of the socket on which the process can be controlled, as reported by the process.
    pub control_socket: Option<String>,
    /// Whether the pool memory was moved to local memory. The process then no longer uses the slices,
    /// and `local` contains the moved memory.
    pub is_rehomed: bool,
}

impl VmRecord {
    /// Returns the slices that the process uses.
    pub fn used_slices(&self) -> impl Iterator<Item = Holding> {
        let slices = (!self.is_rehomed).then_some(&self.slices);
        slices.into_iter().flat_map(BTreeMap::keys).copied()
    }

    /// Returns the size of the memory that the process uses.
    pub fn total(&self) -> Bytes {
        let pool = self.used_slices().map(|_| units::SLICE);
        pool.chain([self.local]).sum()
    }
}

/// Record of a VM that the agent found when it started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredVm {
    /// Recorded process and memory.
    pub record: VmRecord,
    /// Whether the recorded process is still running.
    pub is_alive: bool,
}

/// Result of a successful host call for a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceOutcome {
    /// The slice can be passed to its VM.
    Onlined,
    /// The slice is closed on this host.
    Offlined,
    /// The slice was zeroed and verified, and is closed on this host.
    Scrubbed(ScrubReport),
}

/// Error of a host call for a slice. A failed call to open or scrub the slice may have left it
/// open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFailure {
    /// Kind of the failure.
    pub reason: FailureReason,
    /// Description of the failure, with errno.
    pub message: String,
}

/// Input of the agent.
#[derive(Clone, Debug)]
pub enum Event {
    /// A manager accepted the connection.
    SessionUp {
        /// Unique ID of the manager's rack.
        rack: String,
        /// Time after the last message of the agent at which the host's lease expires.
        lease_ttl: Ns,
    },
    /// The connection to the manager was closed.
    SessionDown,
    /// The manager sent a desired state.
    DesiredState {
        /// Unique ID of the manager's rack.
        rack: String,
        /// Desired state of the host.
        desired: DesiredState,
    },
    /// The manager requested a complete report.
    ReportRequested,
    /// A host call to open, close or scrub a slice has ended.
    Done {
        /// Slice and epoch of the call.
        holding: Holding,
        /// Outcome of the call.
        result: Result<SliceOutcome, HostFailure>,
    },
    /// A call to close an orphaned slice has ended.
    OrphanClosed {
        /// Location of the orphaned slice; see [`Handle::place`].
        place: Arc<str>,
        /// Outcome of the call.
        result: Result<(), HostFailure>,
    },
    /// A process requested the memory of a VM.
    Attach {
        /// Identifies the request, so that the reply can refer to it.
        ticket: Ticket,
        /// Name of the VM.
        vm: Name,
        /// Process that sent the request, and its user.
        caller: Caller,
    },
    /// The write of a VM's record has ended.
    Recorded {
        /// ID of the VM's reservation.
        reservation: ReservationId,
        /// `Ok` if the record is durable; otherwise a description of the error.
        result: Result<(), String>,
    },
    /// A move of pool memory to local memory, or its cancellation, has ended.
    RehomeEnded {
        /// ID of the VM's reservation.
        reservation: ReservationId,
        /// `Ok` if the process uses only local memory; otherwise the reason why it does not.
        result: Result<(), String>,
    },
    /// A watched process has ended; its mappings no longer exist.
    ProcessGone {
        /// ID of the VM's reservation.
        reservation: ReservationId,
    },
    /// Time has passed; deadlines may be due.
    Tick,
}

/// Output of the agent. Effects must be performed in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Open a slice, so that it can be passed to a VM. Idempotent.
    Online {
        /// Slice and epoch.
        holding: Holding,
        /// Location of the slice on this host.
        handle: Handle,
        /// Whether to check that the slice is zeroed. Set until a process has received the slice
        /// under this epoch.
        check_zero: bool,
    },
    /// Close a slice. Idempotent.
    Offline {
        /// Slice and epoch.
        holding: Holding,
        /// Location of the slice on this host.
        handle: Handle,
        /// Whether to check that no process uses the slice any more. Set if a process received the
        /// slice, because a child of this process may still use it.
        verify: bool,
    },
    /// Zero, verify and close a slice. Idempotent.
    Scrub {
        /// Slice and epoch.
        holding: Holding,
        /// Location of the slice on this host.
        handle: Handle,
    },
    /// Close an orphaned slice, which an earlier instance or a failed call left open. Idempotent.
    CloseOrphan {
        /// Location of the orphaned slice; see [`Handle::place`].
        place: Arc<str>,
    },
    /// Write and sync this record, then report [`Event::Recorded`].
    Record(VmRecord),
    /// Delete the record of the VM with this reservation.
    DeleteRecord(ReservationId),
    /// Pass a VM's memory to the process that requested it.
    PassMemory {
        /// Request to which to reply.
        ticket: Ticket,
        /// Memory of the VM.
        record: VmRecord,
    },
    /// Reject a process's request for memory.
    Refuse {
        /// Request to which to reply.
        ticket: Ticket,
        /// Reason of the rejection.
        why: Refusal,
    },
    /// Report [`Event::ProcessGone`] when this process has ended.
    Watch {
        /// ID of the VM's reservation.
        reservation: ReservationId,
        /// Process to watch.
        process: Process,
    },
    /// Move the pool memory of a VM to local memory, then report [`Event::RehomeEnded`]. Idempotent.
    Rehome {
        /// ID of the VM's reservation.
        reservation: ReservationId,
        /// Whether an earlier agent may have started the move. The VM's process must then be asked for
        /// the result: without its reply, the move has not failed.
        is_resumed: bool,
    },
    /// Cancel the move of a VM's pool memory to local memory, if one is in progress, then report
    /// [`Event::RehomeEnded`]. If [`Effect::Rehome`] has not ended, both effects cause one event.
    CancelRehome {
        /// ID of the VM's reservation.
        reservation: ReservationId,
        /// Whether an earlier agent may have started the move, as in [`Effect::Rehome`].
        is_resumed: bool,
    },
    /// Kill the process of the VM with this reservation.
    Kill(ReservationId),
    /// Release the local memory of a VM whose process has ended.
    FreeLocal(ReservationId),
    /// Send a report to the manager.
    SendReport(ObservedState),
    /// Record durably that this host serves this rack.
    RecordRack {
        /// Unique ID of the rack.
        rack: String,
    },
    /// Close the connection, because the manager belongs to another rack.
    Disconnect(OtherRack),
    /// Log the rejection of a desired state. Occasional rejections are normal, for example after a
    /// reconnection.
    CommandRejection(DesiredVersion, CommandRejection),
}

const fn missing_state_reason(is_connected: bool) -> &'static str {
    if is_connected {
        "has not received its desired state from the manager"
    } else {
        "is not connected to the manager"
    }
}

/// Reason why a process does not get the memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The desired state does not contain the VM.
    #[error("no VM {0} on this host")]
    VmUnknown(Name),
    /// The agent has applied no desired state since it started, so it cannot determine whether the
    /// VM is on this host. The caller may retry.
    #[error("cannot look up VM {vm}: the agent {} yet; retry later", missing_state_reason(*is_connected))]
    NoDesiredState {
        /// Name of the VM.
        vm: Name,
        /// Whether a manager is connected.
        is_connected: bool,
    },
    /// Some slices of the VM are not online: they are still being opened, or are being released.
    #[error("{online} of {slices} slices of VM {vm} are online")]
    NotReady {
        /// Name of the VM.
        vm: Name,
        /// Number of slices that are online.
        online: usize,
        /// Number of slices of the VM.
        slices: usize,
    },
    /// Another running process has the VM's memory.
    #[error("VM {vm} is attached to process {pid}, which still runs")]
    Attached {
        /// Name of the VM.
        vm: Name,
        /// ID of the other process.
        pid: u32,
    },
    /// Another process, which has ended, had the VM's memory; a new process must not get its data.
    #[error("VM {vm} was attached to process {pid}, which has ended: create a new reservation")]
    Ended {
        /// Name of the VM.
        vm: Name,
        /// ID of the ended process.
        pid: u32,
    },
    /// The caller is not a permitted user of the VM's memory.
    #[error(
        "VM {vm} belongs to user {user}: the caller must be user {user} or root, not user {caller}{hint}"
    )]
    OtherUser {
        /// Name of the VM.
        vm: Name,
        /// User of the VM's memory.
        user: UserId,
        /// User of the caller.
        caller: UserId,
        /// Hint that the reservation has no user; empty if it has one.
        hint: &'static str,
    },
    /// The caller is already the process of another VM.
    #[error("process {pid} is attached to VM {own} ({reservation}): VM {vm} requires another process")]
    OtherVm {
        /// Name of the requested VM.
        vm: Name,
        /// ID of the calling process.
        pid: u32,
        /// Name of the VM that the process belongs to.
        own: Name,
        /// Reservation of the VM that the process belongs to.
        reservation: ReservationId,
    },
    /// The VM's record could not be written, so the process gets no memory.
    #[error("VM {vm} could not be recorded: {message}")]
    NotRecorded {
        /// Name of the VM.
        vm: Name,
        /// Error of the write.
        message: String,
    },
}

/// Error: the manager belongs to another rack than this host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this host serves rack {ours}, not rack {theirs}: if the host was moved, empty its runtime directory"
)]
pub struct OtherRack {
    /// Unique ID of the rack that this host serves.
    pub ours: String,
    /// Unique ID of the manager's rack.
    pub theirs: String,
}

/// Reason why the agent rejected a desired state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandRejection {
    /// The agent has already applied a newer version.
    #[error("desired state is older than version {newest}")]
    Old {
        /// Latest applied version.
        newest: DesiredVersion,
    },
    /// The base version of the message is not the latest applied version.
    #[error("desired state changes version {base}, but the latest applied version is {newest}")]
    OtherBase {
        /// Base version of the message.
        base: DesiredVersion,
        /// Latest applied version.
        newest: DesiredVersion,
    },
    /// The message is for another instance of this host's agent.
    #[error("desired state is for instance {theirs}, but this is instance {ours}")]
    OtherInstance {
        /// Instance of this agent.
        ours: InstanceId,
        /// Instance that the message is for.
        theirs: InstanceId,
    },
    /// The message is from the manager of another rack.
    #[error(transparent)]
    OtherRack(#[from] OtherRack),
    /// No manager has accepted the connection of this agent yet.
    #[error("no manager has accepted this host yet")]
    NoRack,
}

/// State machine of the agent; see the module documentation.
#[derive(Debug)]
pub struct Agent {
    instance: InstanceId,
    /// User who may access the memory of VMs whose reservation has no user.
    user: UserId,
    rack: Option<String>,
    now: Ns,
    /// Interval of heartbeats; `None` while no manager is connected.
    heartbeat: Option<Ns>,
    reported_at: Ns,
    /// Sequence number of the latest report in this session.
    sequence: u64,
    /// Whether the next report must be sent as soon as possible.
    dirty: bool,
    /// Whether the next report must be complete.
    full_report_due: bool,
    /// Slices that came online since the last report.
    newly_online: BTreeSet<Holding>,
    /// VMs whose process was recorded, or whose move to local memory ended, since the last report.
    changed_vms: BTreeSet<ReservationId>,
    newest: DesiredVersion,
    fenced: bool,
    /// VMs of the latest desired state.
    desired_vms: BTreeMap<ReservationId, DesiredVm>,
    orders: BTreeMap<Holding, SliceOrder>,
    slices: BTreeMap<Holding, SliceStatus>,
    /// Released slices, each until the desired state no longer contains its release.
    released: BTreeSet<Holding>,
    scrubbed: BTreeMap<Holding, ScrubReport>,
    attempts: BTreeMap<Holding, FailedAttempts>,
    scrubs_waiting: BTreeSet<Holding>,
    scrubs_running: usize,
    orphans: OrphanedSlices,
    /// Whether this machine may have orphaned slices that the agent cannot detect.
    may_have_undetected_orphans: bool,
    /// Number of calls in progress that open or close a slice. Excludes scrubs, because they take
    /// longer.
    calls: usize,
    vms: BTreeMap<ReservationId, Vm>,
    /// VM that has or had each slice.
    slice_vms: BTreeMap<Holding, ReservationId>,
    effects: VecDeque<Effect>,
}

impl Agent {
    /// Creates an agent. The agent reopens the slices of the VMs in `recovered` and watches their
    /// processes; it reports the VMs whose process has ended. `rack` is the unique ID of the rack
    /// that this host served before. `places` are the locations of slices that an earlier instance
    /// may have left open; see [`Handle::place`].
    pub fn new(
        now: Ns,
        instance: InstanceId,
        rack: Option<String>,
        recovered: Vec<RecoveredVm>,
        places: Vec<Arc<str>>,
    ) -> Self {
        let mut agent = Self {
            instance,
            user: UserId::ROOT,
            rack,
            now,
            heartbeat: None,
            reported_at: now,
            sequence: 0,
            dirty: false,
            full_report_due: true,
            newly_online: BTreeSet::new(),
            changed_vms: BTreeSet::new(),
            newest: DesiredVersion::default(),
            fenced: false,
            orders: BTreeMap::new(),
            desired_vms: BTreeMap::new(),
            slices: BTreeMap::new(),
            released: BTreeSet::new(),
            scrubbed: BTreeMap::new(),
            attempts: BTreeMap::new(),
            scrubs_waiting: BTreeSet::new(),
            scrubs_running: 0,
            orphans: OrphanedSlices::new(places),
            may_have_undetected_orphans: false,
            calls: 0,
            vms: BTreeMap::new(),
            slice_vms: BTreeMap::new(),
            effects: VecDeque::new(),
        };
        recovered.into_iter().for_each(|vm| agent.adopt_recovered_vm(vm));
        agent
    }

    /// Records that the agent cannot detect all orphaned slices of an earlier instance. The host
    /// then never reports that it is clean.
    pub fn assume_undetected_orphans(&mut self) {
        self.may_have_undetected_orphans = true;
    }

    /// Sets the user who may access the memory of VMs whose reservation has no user. Initially
    /// root.
    pub fn set_default_user(&mut self, user: UserId) {
        self.user = user;
    }

    /// Applies one event. The caller then takes the effects from [`Agent::poll_effect`].
    pub fn handle(&mut self, now: Ns, event: Event) {
        self.now = self.now.max(now);
        match event {
            Event::SessionUp { rack, lease_ttl } => self.on_session_up(rack, lease_ttl),
            Event::SessionDown => self.heartbeat = None,
            Event::DesiredState { rack, desired } => self.on_desired_state(&rack, desired),
            Event::ReportRequested => (self.dirty, self.full_report_due) = (true, true),
            Event::Done { holding, result } => self.on_call_done(holding, result),
            Event::OrphanClosed { place, result } => self.on_orphan_closed(&place, result),
            Event::Attach { ticket, vm, caller } => self.on_attach(ticket, &vm, caller),
            Event::Recorded { reservation, result } => self.on_recorded(reservation, result),
            Event::RehomeEnded { reservation, result } => self.on_rehome_ended(reservation, result),
            Event::ProcessGone { reservation } => self.on_process_gone(reservation),
            Event::Tick => {}
        }
        self.retry_failed_calls();
        self.retry_record_writes();
        self.close_orphans();
        self.drop_ended_vms();
        if self.heartbeat.is_some_and(|every| self.now >= self.reported_at.after(every)) {
            self.dirty = true;
        }
    }

    /// Returns the next effect. A report is returned after all other effects, so that several
    /// events share one report.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front().or_else(|| {
            self.next_report_time()
                .is_some_and(|due| due <= self.now)
                .then(|| Effect::SendReport(self.report()))
        })
    }

    /// Returns the time of the next report of changes, if any. While calls are in progress, the
    /// report is delayed, so that the results of several calls share it.
    fn next_report_time(&self) -> Option<Ns> {
        let due = if self.calls == 0 { Ns::ZERO } else { self.reported_at.after(OBSERVED_STATE_BATCH_DELAY) };
        (self.heartbeat.is_some() && self.dirty).then_some(due)
    }

    /// Returns the next report: complete at the start of a session and on request, otherwise only
    /// the changes since the previous report.
    fn report(&mut self) -> ObservedState {
        (self.dirty, self.reported_at) = (false, self.now);
        let newly_online = std::mem::take(&mut self.newly_online);
        let changed_vms = std::mem::take(&mut self.changed_vms);
        let report = if std::mem::take(&mut self.full_report_due) {
            self.observed_state()
        } else {
            let online = newly_online.into_iter().filter(|holding| self.is_online(*holding)).collect();
            let vms = changed_vms.into_iter().filter_map(|id| Some((id, self.live_vm(id)?)));
            self.observed_state_with(false, online, vms.collect())
        };
        let after = self.sequence;
        self.sequence += 1;
        ObservedState { sequence: self.sequence, after, ..report }
    }

    /// Returns the time at which the agent needs [`Event::Tick`] if no other event arrives before.
    pub fn next_wakeup(&self) -> Option<Ns> {
        let heartbeat = self.heartbeat.map(|every| self.reported_at.after(every));
        let retry = self.attempts.values().filter_map(|attempts| attempts.next).min();
        // A report that is already due is returned as an effect.
        let report = self.next_report_time().filter(|due| *due > self.now);
        let record = self.next_record_write();
        let wakeups = [heartbeat, retry, record, self.next_vm_removal(), self.orphans.next_wakeup(), report];
        wakeups.into_iter().flatten().min()
    }

    /// Returns the complete observed state of this host.
    pub fn observed_state(&self) -> ObservedState {
        let online = self.slices.iter().filter(|(_, status)| matches!(status, SliceStatus::Online(_)));
        self.observed_state_with(true, online.map(|(holding, _)| *holding).collect(), self.live_vms())
    }

    fn observed_state_with(
        &self,
        whole: bool,
        online: Vec<Holding>,
        vms: BTreeMap<ReservationId, ObservedVm>,
    ) -> ObservedState {
        let failed = self.attempts.iter().filter(|(holding, _)| !self.may_leave_orphan(holding));
        let failed = failed.filter_map(|(holding, attempts)| {
            let HostFailure { reason, message } = attempts.reportable_failure()?.clone();
            Some(SliceFailure { holding: *holding, reason, message })
        });
        ObservedState {
            sequence: 0,
            after: 0,
            part: 0,
            is_continued: false,
            number: self.newest,
            whole,
            online,
            released: self.released.iter().copied().collect(),
            scrubbed: self.scrubbed.values().copied().collect(),
            failed: failed.collect(),
            vms,
            ended: self.ended_vms(),
            clean: self.slices.is_empty()
                && self.slice_vms.is_empty()
                && self.orphans.is_empty()
                && !self.may_have_undetected_orphans
                && !self.vms.values().any(Vm::is_alive),
        }
    }

    /// Returns the unique ID of the rack that this host serves, after a manager has accepted it.
    pub fn rack(&self) -> Option<&str> {
        self.rack.as_deref()
    }

    /// Returns whether the agent has applied a desired state since it started.
    pub fn has_desired_state(&self) -> bool {
        self.newest != DesiredVersion::default()
    }

    /// Returns whether a manager of this host's rack is connected.
    pub fn is_connected(&self) -> bool {
        self.heartbeat.is_some()
    }

    fn on_session_up(&mut self, rack: String, lease_ttl: Ns) {
        match &self.rack {
            Some(ours) if *ours != rack => {
                let other = OtherRack { ours: ours.clone(), theirs: rack };
                return self.effects.push_back(Effect::Disconnect(other));
            }
            Some(_) => {}
            None => {
                self.effects.push_back(Effect::RecordRack { rack: rack.clone() });
                self.rack = Some(rack);
            }
        }
        self.heartbeat = Some(Ns(lease_ttl.max(LEASE_TTL_MIN).0 / HEARTBEATS_PER_LEASE));
        self.sequence = 0;
        (self.dirty, self.full_report_due) = (true, true);
    }

    fn on_desired_state(&mut self, rack: &str, desired: DesiredState) {
        if let Err(why) = self.validate_desired_state(rack, &desired) {
            return self.effects.push_back(Effect::CommandRejection(desired.number, why));
        }
        self.newest = desired.number;
        self.dirty = true;
        self.full_report_due |= desired.base.is_none();
        self.apply_desired_state(desired);
        self.reconcile_rehomes();
        self.update_absence_times();
        if self.fenced {
            self.kill_undesired_vms();
        }
    }

    /// Checks that the agent can apply a desired state: it is for this rack and agent instance, is
    /// not older than the latest applied version, and has this version as its base, if any.
    fn validate_desired_state(&self, rack: &str, desired: &DesiredState) -> Result<(), CommandRejection> {
        let ours = self.rack.as_deref().ok_or(CommandRejection::NoRack)?;
        if ours != rack {
            return Err(OtherRack { ours: ours.to_owned(), theirs: rack.to_owned() }.into());
        }
        if desired.instance != self.instance {
            return Err(CommandRejection::OtherInstance { ours: self.instance, theirs: desired.instance });
        }
        match desired.base {
            _ if desired.number < self.newest => Err(CommandRejection::Old { newest: self.newest }),
            Some(base) if base != self.newest => {
                Err(CommandRejection::OtherBase { base, newest: self.newest })
            }
            _ => Ok(()),
        }
    }
}
