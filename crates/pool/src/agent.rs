//! The agent's end of the protocol, from events to effects. It applies desired states, records the
//! process of each VM, and reports the observed state of its host. It performs nothing itself and
//! never decides ownership.
//!
//! ```text
//!   DesiredState ─┬▶ per slice: Online · Offline · Scrub ─▶ Done arrives as event ─┐
//!                 └▶ per VM: Kill when fenced, DeleteRecord of ended VMs           ├▶ SendReport
//!   Attach ─▶ Record ─▶ Recorded ─▶ Watch, PassMemory ─▶ ProcessGone ──────────────┘
//! ```
//!
//! The machine is level-triggered: messages add up to the complete desired state of the host, and
//! applying that twice, or applying a newer one afterwards, has the same result. Objects that are
//! not mentioned are kept.

mod orphans;
mod slices;
mod vms;

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use units::limits::{HEARTBEATS_PER_LEASE, LEASE_TTL_MIN, OBSERVED_STATE_LINGER};
use units::{Bytes, DesiredVersion, InstanceId, Name, Ns, ReservationId, UserId};

use self::{
    orphans::OrphanedSlices,
    slices::{Attempts, Order, SliceStatus},
    vms::Vm,
};
use crate::protocol::{
    DesiredState, DesiredVm, FailureReason, Handle, Holding, ObservedState, ObservedVm, ScrubReport,
    SliceFailure,
};

/// Identifies a process that requested the memory of its VM and waits for the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A process of a machine. The start time distinguishes processes with the same pid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id on the host.
    pub pid: u32,
    /// Start time, in clock ticks since the machine booted.
    pub started: u64,
    /// Control group, for diagnosis.
    pub cgroup: String,
}

impl Process {
    /// Returns whether both are the same process, in any control group.
    pub fn is(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// Process that requests memory, with its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Process.
    pub process: Process,
    /// User at the time of the connection. A VMM that has given up root since still counts as root.
    pub uid: UserId,
}

/// Record of the memory of a process. It is durable before the process gets the first descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRecord {
    /// Reservation.
    pub reservation: ReservationId,
    /// Name of the VM.
    pub vm: Name,
    /// Process of the VM.
    pub process: Process,
    /// Local memory passed with the slices.
    pub local: Bytes,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// User of its memory; `None` for the agent's user.
    pub uid: Option<UserId>,
    /// Slices passed to it.
    pub slices: BTreeMap<Holding, Handle>,
}

/// Record found at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredVm {
    /// Record.
    pub record: VmRecord,
    /// Whether exactly that process still runs.
    pub is_alive: bool,
}

/// Successful host call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceOutcome {
    /// The slice can be passed to its VM.
    Onlined,
    /// The slice is closed on this host.
    Offlined,
    /// The slice was zeroed and verified, and is closed on this host.
    Scrubbed(ScrubReport),
}

/// Error of a host call, which left nothing half done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFailure {
    /// Kind.
    pub reason: FailureReason,
    /// Description by the host, with errno.
    pub message: String,
}

/// Event for the agent.
#[derive(Clone, Debug)]
pub enum Event {
    /// A manager accepted the connection.
    SessionUp {
        /// Rack of the manager.
        rack: String,
        /// Longest time between two messages before the lease expires.
        lease_ttl: Ns,
    },
    /// The connection closed.
    SessionDown,
    /// A desired state.
    DesiredState {
        /// Rack.
        rack: String,
        /// Contents.
        desired: DesiredState,
    },
    /// The manager requests a complete report.
    ReportRequested,
    /// A call about a slice has completed.
    Done {
        /// Slice.
        holding: Holding,
        /// Result.
        result: Result<SliceOutcome, HostFailure>,
    },
    /// A call about the remains of an earlier instance has completed.
    OrphanClosed {
        /// Location.
        place: Arc<str>,
        /// Result.
        result: Result<(), HostFailure>,
    },
    /// A process requests the memory of a VM.
    Attach {
        /// Identifies the reply.
        ticket: Ticket,
        /// VM.
        vm: Name,
        /// Process and user.
        caller: Caller,
    },
    /// A VM's record is durable, or could not be written.
    Recorded {
        /// Reservation.
        reservation: ReservationId,
        /// Error.
        result: Result<(), String>,
    },
    /// A watched process has ended, and with it all its mappings.
    ProcessGone {
        /// Reservation of its VM.
        reservation: ReservationId,
    },
    /// Time has passed.
    Tick,
}

/// Effect to be performed, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Open a slice, so that it can be passed to a VM. Idempotent.
    Online {
        /// Slice.
        holding: Holding,
        /// Location on this host.
        handle: Handle,
        /// It has no owner under this epoch yet: verify that it is zeroed.
        check_zero: bool,
    },
    /// Close a slice. Idempotent.
    Offline {
        /// Slice.
        holding: Holding,
        /// Location on this host.
        handle: Handle,
        /// A process had it: verify that no process has it any more, also no child of the VM's
        /// process.
        verify: bool,
    },
    /// Zero, verify and close a slice. Idempotent.
    Scrub {
        /// Slice.
        holding: Holding,
        /// Location on this host.
        handle: Handle,
    },
    /// Close the unused remains of an earlier instance at a location. Idempotent.
    CloseOrphan {
        /// Location, as in [`Handle::place`].
        place: Arc<str>,
    },
    /// Write this record, synced, and confirm with [`Event::Recorded`].
    Record(VmRecord),
    /// Delete the record of this VM.
    DeleteRecord(ReservationId),
    /// Pass a VM's memory to the process that requested it.
    PassMemory {
        /// Request.
        ticket: Ticket,
        /// Memory.
        record: VmRecord,
    },
    /// Reject a request.
    Refuse {
        /// Request.
        ticket: Ticket,
        /// Reason.
        why: Refusal,
    },
    /// Report [`Event::ProcessGone`] when this process has ended.
    Watch {
        /// Reservation of its VM.
        reservation: ReservationId,
        /// Process.
        process: Process,
    },
    /// Kill the process of this VM.
    Kill(ReservationId),
    /// The process of this VM has ended: release its local memory.
    FreeLocal(ReservationId),
    /// Send a report to the manager.
    SendReport(ObservedState),
    /// Record durably which rack this host serves.
    RecordRack {
        /// Unique id of the rack.
        rack: String,
    },
    /// Close the connection: the manager is of another rack.
    Disconnect(OtherRack),
    /// A desired state was rejected. Harmless; for the log.
    CommandRejected(DesiredVersion, CommandRejected),
}

/// Reason why a process does not get the memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The desired state does not contain the VM.
    #[error("no VM {0} on this host")]
    VmUnknown(Name),
    /// Its slices are coming online or being released.
    #[error("{online} of {slices} slices of VM {vm} are online")]
    NotReady {
        /// VM.
        vm: Name,
        /// Slices ready now.
        online: usize,
        /// Slices expected.
        slices: usize,
    },
    /// Another process has it.
    #[error("VM {vm} is process {pid}, which still runs")]
    Attached {
        /// VM.
        vm: Name,
        /// Process.
        pid: u32,
    },
    /// Another process had it: its data must not reach a new process.
    #[error("VM {vm} was process {pid}, which has ended: create a new reservation")]
    Ended {
        /// VM.
        vm: Name,
        /// Process.
        pid: u32,
    },
    /// The caller is not the user of the VM's reservation.
    #[error("VM {vm} is user {user}'s: must be user {user} or root, not user {caller}{hint}")]
    OtherUser {
        /// VM.
        vm: Name,
        /// Permitted user.
        user: UserId,
        /// User of the caller.
        caller: UserId,
        /// Hint for a reservation without a user.
        hint: &'static str,
    },
    /// The caller is the process of another VM.
    #[error("process {pid} is VM {own} ({reservation}): must be another process for VM {vm}")]
    OtherVm {
        /// Requested VM.
        vm: Name,
        /// Process of the caller.
        pid: u32,
        /// VM of the caller.
        own: Name,
        /// Reservation of that VM.
        reservation: ReservationId,
    },
    /// The record could not be written, so nothing is passed.
    #[error("VM {vm} could not be recorded: {message}")]
    NotRecorded {
        /// VM.
        vm: Name,
        /// Error of the disk.
        message: String,
    },
}

/// Error: the manager is of another rack than the one that this host serves.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this host serves rack {ours}, not {theirs}: empty its runtime directory if it was moved")]
pub struct OtherRack {
    /// Recorded rack.
    pub ours: String,
    /// Rack of the manager.
    pub theirs: String,
}

/// Reason why a desired state is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandRejected {
    /// A newer version was received.
    #[error("older than version {newest}")]
    Old {
        /// Newest version.
        newest: DesiredVersion,
    },
    /// It changes another version than the latest one.
    #[error("changes version {base}, but the latest applied version is {newest}")]
    OtherBase {
        /// Version that it changes.
        base: DesiredVersion,
        /// Newest version.
        newest: DesiredVersion,
    },
    /// It is for another run of this agent.
    #[error("for instance {theirs}, this is {ours}")]
    OtherInstance {
        /// This run.
        ours: InstanceId,
        /// Run that it is for.
        theirs: InstanceId,
    },
    /// It is of another rack.
    #[error(transparent)]
    OtherRack(#[from] OtherRack),
    /// No manager has accepted the connection yet.
    #[error("no manager has accepted this host yet")]
    NoRack,
}

/// State of the agent.
#[derive(Debug)]
pub struct Agent {
    instance: InstanceId,
    /// User of the agent, who owns VMs whose reservation names none.
    user: UserId,
    rack: Option<String>,
    now: Ns,
    /// Interval of heartbeats while connected.
    heartbeat: Option<Ns>,
    reported_at: Ns,
    /// Number of the latest report of this session.
    sequence: u64,
    /// A report is due, and whether it must be complete.
    dirty: bool,
    full_report_due: bool,
    /// Slices brought online since the last report.
    newly_online: BTreeSet<Holding>,
    /// VMs whose process has started since the last report.
    newly_running: BTreeSet<ReservationId>,
    newest: DesiredVersion,
    fenced: bool,
    /// Latest desired state, by VM and by slice.
    desired_vms: BTreeMap<ReservationId, DesiredVm>,
    orders: BTreeMap<Holding, Order>,
    slices: BTreeMap<Holding, SliceStatus>,
    /// Results, kept until the desired state no longer contains them.
    released: BTreeSet<Holding>,
    scrubbed: BTreeMap<Holding, ScrubReport>,
    attempts: BTreeMap<Holding, Attempts>,
    scrubs_waiting: BTreeSet<Holding>,
    scrubs_running: usize,
    orphans: OrphanedSlices,
    /// There may be slices on this machine that the agent cannot see.
    has_hidden_remains: bool,
    /// Calls in progress that open or close a slice: short ones, unlike scrubs.
    calls: usize,
    vms: BTreeMap<ReservationId, Vm>,
    /// VM that has or had each slice.
    slice_vms: BTreeMap<Holding, ReservationId>,
    effects: VecDeque<Effect>,
}

impl Agent {
    /// Creates an agent with the VMs found at start. Their slices are opened again, their processes
    /// watched; VMs whose process has ended are reported. `rack` is the rack that this host served
    /// before; `places` are slices left on the machine, by [`Handle::place`].
    pub fn new(
        now: Ns,
        instance: InstanceId,
        rack: Option<String>,
        found: Vec<RecoveredVm>,
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
            newly_running: BTreeSet::new(),
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
            has_hidden_remains: false,
            calls: 0,
            vms: BTreeMap::new(),
            slice_vms: BTreeMap::new(),
            effects: VecDeque::new(),
        };
        found.into_iter().for_each(|adopted| agent.adopt(adopted));
        agent
    }

    /// Records that the agent cannot see all remains of an earlier instance: this host never
    /// reports clean.
    pub fn set_hidden_remains(&mut self) {
        self.has_hidden_remains = true;
    }

    /// Sets the agent's user, by default root, who owns VMs whose reservation names none.
    pub fn set_user(&mut self, user: UserId) {
        self.user = user;
    }

    /// Applies one event. Effects are then available from [`Agent::poll_effect`].
    pub fn handle(&mut self, now: Ns, event: Event) {
        self.now = self.now.max(now);
        match event {
            Event::SessionUp { rack, lease_ttl } => self.on_session_up(rack, lease_ttl),
            Event::SessionDown => self.heartbeat = None,
            Event::DesiredState { rack, desired } => self.on_desired_state(&rack, desired),
            Event::ReportRequested => (self.dirty, self.full_report_due) = (true, true),
            Event::Done { holding, result } => self.on_done(holding, result),
            Event::OrphanClosed { place, result } => self.on_orphan_closed(&place, result),
            Event::Attach { ticket, vm, caller } => self.on_attach(ticket, &vm, caller),
            Event::Recorded { reservation, result } => self.on_recorded(reservation, result),
            Event::ProcessGone { reservation } => self.on_process_gone(reservation),
            Event::Tick => {}
        }
        self.retry();
        self.close_orphans();
        self.drop_ended_vms();
        if self.heartbeat.is_some_and(|every| self.now >= self.reported_at.after(every)) {
            self.dirty = true;
        }
    }

    /// Returns the oldest effect. Reports come last, so that events handled between two calls share
    /// one.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front().or_else(|| {
            self.report_due().is_some_and(|due| due <= self.now).then(|| Effect::SendReport(self.report()))
        })
    }

    /// Returns the time of the next report of changes. Calls in progress share a report, unless
    /// they take long.
    fn report_due(&self) -> Option<Ns> {
        let due = if self.calls == 0 { Ns::ZERO } else { self.reported_at.after(OBSERVED_STATE_LINGER) };
        (self.heartbeat.is_some() && self.dirty).then_some(due)
    }

    /// Returns a complete report at the start of a session and on request, otherwise the changes:
    /// the manager has received the rest.
    fn report(&mut self) -> ObservedState {
        (self.dirty, self.reported_at) = (false, self.now);
        let newly_online = std::mem::take(&mut self.newly_online);
        let newly_running = std::mem::take(&mut self.newly_running);
        let report = if std::mem::take(&mut self.full_report_due) {
            self.observed_state()
        } else {
            let online = newly_online.into_iter().filter(|holding| self.is_online(*holding)).collect();
            let vms = newly_running.into_iter().filter_map(|id| Some((id, self.live_vm(id)?)));
            self.observed_state_with(false, online, vms.collect())
        };
        let after = self.sequence;
        self.sequence += 1;
        ObservedState { sequence: self.sequence, after, ..report }
    }

    /// Returns the time of the next [`Event::Tick`], if no other event arrives before.
    pub fn next_wakeup(&self) -> Option<Ns> {
        let heartbeat = self.heartbeat.map(|every| self.reported_at.after(every));
        let retry = self.attempts.values().filter_map(|attempts| attempts.next).min();
        let report = self.report_due().filter(|due| *due > self.now); // a due report is an effect
        let wakeups = [heartbeat, retry, self.next_forget(), self.orphans.next_wakeup(), report];
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
        let failed = self.attempts.iter().filter(|(holding, _)| !self.may_leave_remains(holding));
        let failed = failed.filter_map(|(holding, attempts)| {
            let HostFailure { reason, message } = attempts.reportable()?.clone();
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
                && !self.has_hidden_remains
                && !self.vms.values().any(Vm::is_alive),
        }
    }

    /// Returns the rack that this host serves, once a manager has accepted it.
    pub fn rack(&self) -> Option<&str> {
        self.rack.as_deref()
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
        if let Err(why) = self.validate(rack, &desired) {
            return self.effects.push_back(Effect::CommandRejected(desired.number, why));
        }
        self.newest = desired.number;
        self.dirty = true;
        self.full_report_due |= desired.base.is_none();
        self.apply_desired_state(desired);
        self.update_absence();
        if self.fenced {
            self.kill_undesired_vms();
        }
    }

    /// Returns the reason to reject a desired state, if it is old or for another agent.
    fn validate(&self, rack: &str, desired: &DesiredState) -> Result<(), CommandRejected> {
        let ours = self.rack.as_deref().ok_or(CommandRejected::NoRack)?;
        if ours != rack {
            return Err(OtherRack { ours: ours.to_owned(), theirs: rack.to_owned() }.into());
        }
        if desired.instance != self.instance {
            return Err(CommandRejected::OtherInstance { ours: self.instance, theirs: desired.instance });
        }
        match desired.base {
            _ if desired.number < self.newest => Err(CommandRejected::Old { newest: self.newest }),
            Some(base) if base != self.newest => {
                Err(CommandRejected::OtherBase { base, newest: self.newest })
            }
            _ => Ok(()),
        }
    }
}
