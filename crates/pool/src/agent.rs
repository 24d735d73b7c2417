//! The agent's end of the protocol: events in, effects out. It follows orders, remembers which process is which VM, and
//! reports the truth about its host; it performs nothing itself and never decides who owns a slice.
//!
//! ```text
//!   Want ──▶ newest order ─┬▶ per slice: Online · Offline · Scrub ──▶ Done comes back as an event ─┐
//!                          └▶ per VM: Kill when fenced, forget what has ended                     ├▶ SendHave
//!   Attach ─▶ Record ─▶ Recorded ─▶ Watch, HandOut ─▶ ProcessGone ────────────────────────────────┘
//! ```
//!
//! Everything is level-triggered: orders add up to the whole truth about the host, and acting on that twice, or on it and
//! then on a newer one, ends in the same place. What is not mentioned is kept: absence is no order.

mod leftovers;
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
    leftovers::Leftovers,
    slices::{Attempts, Order, Stand},
    vms::Vm,
};
use crate::protocol::{Failed, FailedReason, Handle, Have, Holding, Scrubbed, Want, WantVm};

/// Names one process that asked for the memory of its VM and waits for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One process of one machine. Two with the same pid differ in when they started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// As the host counts.
    pub pid: u32,
    /// When it started, in clock ticks since the machine did.
    pub started: u64,
    /// Its control group, for people who look.
    pub cgroup: String,
}

impl Process {
    /// Whether both are the same process, wherever its control group has been moved.
    pub fn is(&self, other: &Self) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// A process that asks for memory, and its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The process.
    pub process: Process,
    /// Its user when it connected. A VMM that has given up root since still counts as root.
    pub uid: UserId,
}

/// Which process has which memory. On disk before the process gets the first descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmRecord {
    /// Which life of which VM.
    pub reservation: ReservationId,
    /// The VM's name.
    pub vm: Name,
    /// The process that is this VM.
    pub process: Process,
    /// Local memory handed out with the slices.
    pub local: Bytes,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
    /// The user that its memory is for; `None` for the agent's own.
    pub uid: Option<UserId>,
    /// The slices it was handed.
    pub slices: BTreeMap<Holding, Handle>,
}

/// A record found at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// What it says.
    pub record: VmRecord,
    /// Whether exactly that process still runs.
    pub lives: bool,
}

/// What the host did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// The slice can be handed to its VM.
    Onlined,
    /// Nothing of the slice is left on this host.
    Offlined,
    /// The slice was zeroed and verified, and nothing of it is left on this host.
    Scrubbed(Scrubbed),
}

/// What the host could not do. It left nothing half done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFailure {
    /// Which kind.
    pub reason: FailedReason,
    /// In the host's words, errno included.
    pub message: String,
}

/// What happens to the agent.
#[derive(Clone, Debug)]
pub enum Event {
    /// A manager welcomed us.
    SessionUp {
        /// The rack it manages.
        rack: String,
        /// It must hear us at least this often.
        lease_ttl: Ns,
    },
    /// The connection is gone.
    SessionDown,
    /// An order.
    Want {
        /// Of which rack.
        rack: String,
        /// What it says.
        want: Want,
    },
    /// The manager requests a whole report.
    ReportRequested,
    /// The host finished what it was told to do with a slice.
    Done {
        /// Which one.
        holding: Holding,
        /// How it went.
        result: Result<Done, HostFailure>,
    },
    /// The host finished what it was told to do with something that a predecessor left.
    Cleared {
        /// Where that was.
        place: Arc<str>,
        /// How it went.
        result: Result<(), HostFailure>,
    },
    /// A process asks for the memory of a VM.
    Attach {
        /// To be named in the answer.
        ticket: Ticket,
        /// Of this VM.
        vm: Name,
        /// Who asks.
        caller: Caller,
    },
    /// A VM's record is on disk, or could not be written.
    Recorded {
        /// Whose.
        reservation: ReservationId,
        /// Or why not.
        result: Result<(), String>,
    },
    /// A watched process is gone, and with it all that it had mapped.
    ProcessGone {
        /// Which VM it was.
        reservation: ReservationId,
    },
    /// Time has passed.
    Tick,
}

/// What is to be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Open a slice, so that it can be handed out. Idempotent.
    Online {
        /// Which one.
        holding: Holding,
        /// How this host finds it.
        handle: Handle,
        /// Nobody had it under this epoch yet: see that it holds only zeros.
        check_zero: bool,
    },
    /// Close a slice. Idempotent.
    Offline {
        /// Which one.
        holding: Holding,
        /// How this host finds it.
        handle: Handle,
        /// A process had it: see that none is left that has, a child of the VM's among them.
        verify: bool,
    },
    /// Zero a slice, see that it is zero, and close it. Idempotent.
    Scrub {
        /// Which one.
        holding: Holding,
        /// How this host finds it.
        handle: Handle,
    },
    /// Close what a predecessor left at this place, as nobody wants it any more. Idempotent.
    Clear {
        /// As in [`Handle::place`].
        place: Arc<str>,
    },
    /// Write this down, synced, and say so with [`Event::Recorded`].
    Record(VmRecord),
    /// Remove the record of this VM.
    Forget(ReservationId),
    /// Give a VM's memory to the process that asked.
    HandOut {
        /// Who asked.
        ticket: Ticket,
        /// What it gets.
        record: VmRecord,
    },
    /// Answer no.
    Refuse {
        /// Who asked.
        ticket: Ticket,
        /// Why not.
        why: Refusal,
    },
    /// Say [`Event::ProcessGone`] when this process is gone.
    Watch {
        /// Which VM it is.
        reservation: ReservationId,
        /// The process.
        process: Process,
    },
    /// End the process of this VM.
    Kill(ReservationId),
    /// The process of this VM is gone: give back its local memory.
    FreeLocal(ReservationId),
    /// Tell the manager.
    SendHave(Have),
    /// Remember, durably, which rack this host serves.
    Remember {
        /// Its uuid.
        rack: String,
    },
    /// End the connection: this manager is not ours.
    HangUp(OtherRack),
    /// An order was not followed. Harmless; for the log.
    Bounced(DesiredVersion, Bounce),
}

/// Why a process does not get the memory of a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The order names no such VM.
    #[error("no VM {0} on this host")]
    VmUnknown(Name),
    /// Its slices are on their way, or on their way back.
    #[error("{online} of {slices} slices of VM {vm} are online")]
    NotReady {
        /// Which VM.
        vm: Name,
        /// Slices that can be handed out now.
        online: usize,
        /// Slices it will have.
        slices: usize,
    },
    /// Another process has it.
    #[error("VM {vm} is process {pid}, which still runs")]
    Attached {
        /// Which VM.
        vm: Name,
        /// Whose it is.
        pid: u32,
    },
    /// Another process had it: what it left in memory is nobody else's business.
    #[error("VM {vm} was process {pid}, which is gone: reserve anew")]
    Ended {
        /// Which VM.
        vm: Name,
        /// Whose it was.
        pid: u32,
    },
    /// The caller is not the user of the VM's reservation.
    #[error("VM {vm} is user {user}'s: must be user {user} or root, not user {caller}{hint}")]
    OtherUser {
        /// Which VM.
        vm: Name,
        /// The user that may use it.
        user: UserId,
        /// The user that asked.
        caller: UserId,
        /// What to do if the reservation names no user.
        hint: &'static str,
    },
    /// The caller is the process of another VM already.
    #[error("process {pid} is VM {own} ({reservation}): must be another process for VM {vm}")]
    OtherVm {
        /// The VM that was asked for.
        vm: Name,
        /// The process that asked.
        pid: u32,
        /// The VM that it is.
        own: Name,
        /// That VM's reservation.
        reservation: ReservationId,
    },
    /// Nothing is handed out that is not on record.
    #[error("VM {vm} could not be recorded: {message}")]
    NotRecorded {
        /// Which VM.
        vm: Name,
        /// What the disk said.
        message: String,
    },
}

/// The manager speaks for another rack than the one this host serves.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this host serves rack {ours}, not {theirs}: empty its runtime directory if it was moved")]
pub struct OtherRack {
    /// The one remembered.
    pub ours: String,
    /// The one that called.
    pub theirs: String,
}

/// Why an order is not followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bounce {
    /// A newer one has been seen.
    #[error("older than order {newest}")]
    Old {
        /// The newest one.
        newest: DesiredVersion,
    },
    /// It changes an order that is not the one followed last.
    #[error("changes order {base}, the newest followed is {newest}")]
    OtherBase {
        /// What it changes.
        base: DesiredVersion,
        /// The newest one.
        newest: DesiredVersion,
    },
    /// It is for an earlier or later start of this agent.
    #[error("for instance {theirs}, this is {ours}")]
    OtherInstance {
        /// This start.
        ours: InstanceId,
        /// The start it is for.
        theirs: InstanceId,
    },
    /// It is another rack's.
    #[error(transparent)]
    OtherRack(#[from] OtherRack),
    /// No manager has welcomed us yet, so nobody may order anything.
    #[error("no rack has welcomed this host")]
    NoRack,
}

/// The agent's end of the protocol.
#[derive(Debug)]
pub struct Agent {
    instance: InstanceId,
    /// The agent's own user, whose VMs are those whose reservation names none.
    user: UserId,
    rack: Option<String>,
    now: Ns,
    /// How often to speak, while there is somebody to speak to.
    heartbeat: Option<Ns>,
    spoke: Ns,
    /// The number of the latest report of this session.
    sequence: u64,
    /// Something is to be told, and whether that is everything.
    dirty: bool,
    tell_all: bool,
    /// Brought online since the last report.
    untold: BTreeSet<Holding>,
    newest: DesiredVersion,
    fenced: bool,
    /// What the newest order says, by VM and by slice.
    wanted: BTreeMap<ReservationId, WantVm>,
    orders: BTreeMap<Holding, Order>,
    slices: BTreeMap<Holding, Stand>,
    /// Answers to orders, kept until the order no longer asks.
    released: BTreeSet<Holding>,
    scrubbed: BTreeMap<Holding, Scrubbed>,
    attempts: BTreeMap<Holding, Attempts>,
    scrubs_waiting: BTreeSet<Holding>,
    scrubs_running: usize,
    leftovers: Leftovers,
    /// There may be slices on this machine that the agent cannot see.
    is_blind: bool,
    /// Calls under way that open or close a slice: short ones, unlike scrubs.
    calls: usize,
    vms: BTreeMap<ReservationId, Vm>,
    /// Which of them has or had a slice.
    handed: BTreeMap<Holding, ReservationId>,
    effects: VecDeque<Effect>,
}

impl Agent {
    /// An agent that starts with the VMs it finds. Their slices are opened again, their processes watched; those whose
    /// process is gone are reported as ended. `rack` is the one this host has served before; `places` are the slices that a
    /// predecessor left on the machine, by [`Handle::place`].
    pub fn new(
        now: Ns,
        instance: InstanceId,
        rack: Option<String>,
        found: Vec<Adopted>,
        places: Vec<Arc<str>>,
    ) -> Self {
        let mut agent = Self {
            instance,
            user: UserId::ROOT,
            rack,
            now,
            heartbeat: None,
            spoke: now,
            sequence: 0,
            dirty: false,
            tell_all: true,
            untold: BTreeSet::new(),
            newest: DesiredVersion::default(),
            fenced: false,
            orders: BTreeMap::new(),
            wanted: BTreeMap::new(),
            slices: BTreeMap::new(),
            released: BTreeSet::new(),
            scrubbed: BTreeMap::new(),
            attempts: BTreeMap::new(),
            scrubs_waiting: BTreeSet::new(),
            scrubs_running: 0,
            leftovers: Leftovers::new(places),
            is_blind: false,
            calls: 0,
            vms: BTreeMap::new(),
            handed: BTreeMap::new(),
            effects: VecDeque::new(),
        };
        found.into_iter().for_each(|adopted| agent.adopt(adopted));
        agent
    }

    /// Something keeps the agent from seeing all that a predecessor may have left: this host never says that nothing is.
    pub fn note_blindness(&mut self) {
        self.is_blind = true;
    }

    /// Sets the user that the agent runs as, which is root otherwise: the user of VMs whose reservation names none.
    pub fn set_user(&mut self, user: UserId) {
        self.user = user;
    }

    /// Takes one event in. What is to be done about it waits in [`Agent::poll_effect`].
    pub fn handle(&mut self, now: Ns, event: Event) {
        self.now = self.now.max(now);
        match event {
            Event::SessionUp { rack, lease_ttl } => self.on_session_up(rack, lease_ttl),
            Event::SessionDown => self.heartbeat = None,
            Event::Want { rack, want } => self.on_want(&rack, want),
            Event::ReportRequested => (self.dirty, self.tell_all) = (true, true),
            Event::Done { holding, result } => self.on_done(holding, result),
            Event::Cleared { place, result } => self.on_cleared(&place, result),
            Event::Attach { ticket, vm, caller } => self.on_attach(ticket, &vm, caller),
            Event::Recorded { reservation, result } => self.on_recorded(reservation, result),
            Event::ProcessGone { reservation } => self.on_process_gone(reservation),
            Event::Tick => {}
        }
        self.retry();
        self.clear_leftovers();
        self.forget_ended();
        if self.heartbeat.is_some_and(|every| self.now >= self.spoke.after(every)) {
            self.dirty = true;
        }
    }

    /// The next thing to do, oldest first. A report comes last, so that many events handled between two calls share one.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front().or_else(|| {
            self.report_due().is_some_and(|due| due <= self.now).then(|| Effect::SendHave(self.report()))
        })
    }

    /// When to report what is new. Calls under way share a report, unless they take long.
    fn report_due(&self) -> Option<Ns> {
        let due = if self.calls == 0 { Ns::ZERO } else { self.spoke.after(OBSERVED_STATE_LINGER) };
        (self.heartbeat.is_some() && self.dirty).then_some(due)
    }

    /// Returns a whole report at the start of a session and on request, else what is new: the manager has received the rest.
    fn report(&mut self) -> Have {
        (self.dirty, self.spoke) = (false, self.now);
        let untold = std::mem::take(&mut self.untold);
        let have = if std::mem::take(&mut self.tell_all) {
            self.have()
        } else {
            let online = untold.into_iter().filter(|holding| self.is_online(*holding)).collect();
            self.have_with(false, online)
        };
        let after = self.sequence;
        self.sequence += 1;
        Have { sequence: self.sequence, after, ..have }
    }

    /// When to call [`Agent::handle`] with [`Event::Tick`], if nothing else happens first.
    pub fn next_wakeup(&self) -> Option<Ns> {
        let heartbeat = self.heartbeat.map(|every| self.spoke.after(every));
        let retry = self.attempts.values().filter_map(|attempts| attempts.next).min();
        let report = self.report_due().filter(|due| *due > self.now); // one that is due is an effect
        let wakeups = [heartbeat, retry, self.next_forget(), self.leftovers.next_wakeup(), report];
        wakeups.into_iter().flatten().min()
    }

    /// The whole truth about this host.
    pub fn have(&self) -> Have {
        let online = self.slices.iter().filter(|(_, stand)| matches!(stand, Stand::Online(_)));
        self.have_with(true, online.map(|(holding, _)| *holding).collect())
    }

    fn have_with(&self, whole: bool, online: Vec<Holding>) -> Have {
        let failed = self.attempts.iter().filter(|(holding, _)| !self.leaves_something(holding));
        let failed = failed.filter_map(|(holding, attempts)| {
            let HostFailure { reason, message } = attempts.told()?.clone();
            Some(Failed { holding: *holding, reason, message })
        });
        Have {
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
            vms: if whole { self.live_vms() } else { BTreeMap::new() },
            ended: self.ended_vms(),
            clean: self.slices.is_empty()
                && self.handed.is_empty()
                && self.leftovers.is_empty()
                && !self.is_blind
                && !self.vms.values().any(Vm::lives),
        }
    }

    /// The rack this host serves, once it has been welcomed.
    pub fn rack(&self) -> Option<&str> {
        self.rack.as_deref()
    }

    /// Whether a manager of our rack is listening.
    pub fn is_heard(&self) -> bool {
        self.heartbeat.is_some()
    }

    fn on_session_up(&mut self, rack: String, lease_ttl: Ns) {
        match &self.rack {
            Some(ours) if *ours != rack => {
                let other = OtherRack { ours: ours.clone(), theirs: rack };
                return self.effects.push_back(Effect::HangUp(other));
            }
            Some(_) => {}
            None => {
                self.effects.push_back(Effect::Remember { rack: rack.clone() });
                self.rack = Some(rack);
            }
        }
        self.heartbeat = Some(Ns(lease_ttl.max(LEASE_TTL_MIN).0 / HEARTBEATS_PER_LEASE));
        self.sequence = 0;
        (self.dirty, self.tell_all) = (true, true);
    }

    fn on_want(&mut self, rack: &str, want: Want) {
        if let Err(why) = self.admit(rack, &want) {
            return self.effects.push_back(Effect::Bounced(want.number, why));
        }
        self.newest = want.number;
        self.dirty = true;
        self.tell_all |= want.base.is_none();
        self.follow(want);
        self.note_unnamed();
        if self.fenced {
            self.end_strangers();
        }
    }

    /// Old orders bounce, and those for others.
    fn admit(&self, rack: &str, want: &Want) -> Result<(), Bounce> {
        let ours = self.rack.as_deref().ok_or(Bounce::NoRack)?;
        if ours != rack {
            return Err(OtherRack { ours: ours.to_owned(), theirs: rack.to_owned() }.into());
        }
        if want.instance != self.instance {
            return Err(Bounce::OtherInstance { ours: self.instance, theirs: want.instance });
        }
        match want.base {
            _ if want.number < self.newest => Err(Bounce::Old { newest: self.newest }),
            Some(base) if base != self.newest => Err(Bounce::OtherBase { base, newest: self.newest }),
            _ => Ok(()),
        }
    }
}
