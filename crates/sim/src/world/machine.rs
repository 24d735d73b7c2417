//! State of one host. Some state survives a power-off (name), some survives a crash of the agent
//! (processes, records). The rest is the running agent. [`hosts`](super::hosts) handles the events.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use pool::{
    agent::{Agent, Process, Ticket, VmRecord},
    manager::SessionId,
    protocol::Holding,
};
use units::{HostId, Name, Ns, ReservationId, UnixMs};

use super::device::DataPattern;

/// Process id on a host. Ids are reused after a reboot.
pub(super) type Pid = u32;

/// Operation that the agent requests from its host.
#[derive(Debug)]
pub(super) enum HostCall {
    Online {
        holding: Holding,
        check_zero: bool,
    },
    Offline {
        holding: Holding,
        verify: bool,
    },
    Scrub {
        holding: Holding,
        started: UnixMs,
    },
    Clear(Arc<str>),
    Record(VmRecord),
    /// Poll of a process that moves its pool memory.
    PollRehome(ReservationId),
}

/// State of a process's move of its pool memory to local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum GuestRehome {
    #[default]
    None,
    Copying,
    Failed,
    Done,
}

#[derive(Debug)]
pub(super) struct Machine {
    pub(super) id: HostId,
    pub(super) name: Name,
    pub(super) is_up: bool,
    pub(super) boot: u64,
    pub(super) running: Option<RunningAgent>,
    /// Records of VMs in the runtime directory of the agent.
    pub(super) records: BTreeMap<ReservationId, VmRecord>,
    pub(super) rack: Option<String>,
    pub(super) instances: u64,
    /// Slices of shared devices that the kernel may use, completely or partly.
    pub(super) kernel: BTreeSet<Holding>,
    pub(super) processes: BTreeMap<Pid, Guest>,
    pub(super) next_pid: Pid,
    /// Time until which the agent is frozen. Processes are not affected.
    pub(super) frozen_until: Ns,
    pub(super) is_network_down: bool,
    /// Highest fencing token of a manager that the agent has accepted.
    pub(super) manager_token: u64,
}

/// Running agent of a host: one run, from its start to its crash.
#[derive(Debug)]
pub(super) struct RunningAgent {
    pub(super) agent: Agent,
    pub(super) instance: u64,
    pub(super) session: Option<SessionId>,
    pub(super) wake: Option<Ns>,
    pub(super) idle_wakeups: u32,
    pub(super) watched: BTreeMap<ReservationId, Process>,
    pub(super) tickets: BTreeMap<Ticket, Pid>,
    /// Moves of pool memory that the agent polls.
    pub(super) rehomes: BTreeSet<ReservationId>,
    /// Slices that the agent maps for a scrub.
    pub(super) scrubbing: BTreeSet<Holding>,
}

/// Process of a VM, or a child of such a process.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) process: Process,
    pub(super) vm: Name,
    /// Value that the process writes to its memory, unique to each VM start.
    pub(super) pattern: DataPattern,
    pub(super) has_memory: bool,
    /// Slices that the process received from the agent, with their reservation.
    pub(super) mapped: BTreeMap<Holding, ReservationId>,
    pub(super) rehome: GuestRehome,
    pub(super) attach_attempts: u32,
}

impl Machine {
    pub(super) fn new(id: HostId, name: Name) -> Self {
        Self {
            id,
            name,
            is_up: false,
            boot: 0,
            running: None,
            records: BTreeMap::new(),
            rack: None,
            instances: 0,
            kernel: BTreeSet::new(),
            processes: BTreeMap::new(),
            next_pid: 100,
            frozen_until: Ns::ZERO,
            is_network_down: false,
            manager_token: 0,
        }
    }

    /// Returns the running agent if `instance` is still running.
    pub(super) fn find_agent(&mut self, instance: u64) -> Option<&mut RunningAgent> {
        self.running.as_mut().filter(|running| running.instance == instance)
    }

    pub(super) fn set_session(&mut self, session: Option<SessionId>) {
        if let Some(running) = &mut self.running {
            running.session = session;
        }
    }

    pub(super) fn current_session(&self) -> Option<SessionId> {
        self.running.as_ref()?.session
    }

    pub(super) fn is_alive(&self, process: &Process) -> bool {
        self.processes.get(&process.pid).is_some_and(|guest| guest.process.is(process))
    }

    /// Returns the reservations whose VM runs in a process that the agent has recorded.
    pub(super) fn running_vms(&self) -> impl Iterator<Item = ReservationId> {
        let alive = self.records.values().filter(|record| self.is_alive(&record.process));
        alive.map(|record| record.reservation)
    }

    /// Returns every slice that a process or the kernel of the host can reach.
    pub(super) fn reachable(&self) -> impl Iterator<Item = Holding> {
        self.mappings().map(|(holding, _)| holding).chain(self.kernel.iter().copied())
    }

    /// Returns all mappings on this machine as pairs of a holding and a process. Process 0 is the
    /// agent.
    pub(super) fn mappings(&self) -> impl Iterator<Item = (Holding, Pid)> {
        let guests = self.processes.values().flat_map(|g| g.mapped.keys().map(|h| (*h, g.process.pid)));
        let agents = self.running.iter().flat_map(|running| running.scrubbing.iter());
        guests.chain(agents.map(|holding| (*holding, 0)))
    }
}
