//! Volatile state of one host: session and lease of its agent, desired states sent to it, and its
//! reports.

use std::collections::{BTreeMap, BTreeSet};

use units::limits::{
    DELTA_CHANGES_PER_HOST_MAX, DESIRED_STATE_BATCH_DELAY, DESIRED_STATE_INTERVAL_MIN,
    DESIRED_STATE_RESEND_AFTER,
};
use units::{DesiredVersion, InstanceId, Ns, ReservationId, SliceId, UnixMs};

use super::{SessionId, report_log::ReportLog};
use crate::{
    ledger::When,
    protocol::{DesiredState, Hello, Holding},
};

/// Volatile state of a host. After a restart of the manager, every host gets a full lease.
#[derive(Clone, Debug)]
pub(super) struct Link {
    /// Session of the agent that represents the host, while it is connected.
    pub(super) session: Option<SessionId>,
    /// Hello of the current or last session, if an agent has connected since the manager started.
    pub(super) hello: Option<Hello>,
    /// Rack time of the last message; before the first message, the start of the manager.
    pub(super) last_message: Ns,
    /// Wall-clock time of the last message, if any.
    pub(super) last_message_wall: Option<UnixMs>,
    /// End of the lease, if it has expired, in rack time and wall-clock time. The rack time is
    /// [`Ns::NEVER`] after the decision to fence the host.
    pub(super) unknown_since: Option<(Ns, UnixMs)>,
    /// Last desired state that was sent in this session, if any.
    pub(super) last_sent: Option<SentState>,
    /// Whether changes for the next desired state are pending.
    pub(super) desired_state_due: bool,
    /// Changes that the next desired state will contain.
    pub(super) pending_changes: PendingChanges,
    /// Newest version of the desired state that the agent has applied, according to its reports.
    pub(super) reflected: DesiredVersion,
    /// First desired state of this session that contained the fence, if any.
    pub(super) fence_sent: Option<DesiredVersion>,
    /// Scrubs that the latest desired state of this session contained, each with the first version
    /// since which every version contained it.
    pub(super) scrubs_sent: BTreeMap<Holding, DesiredVersion>,
    /// Last rejected agent, until it stops trying to connect.
    pub(super) rejected: Option<RejectedAgent>,
    /// Reports of the current or last session.
    pub(super) reports: ReportLog,
    /// Draft of the complete desired state that is being built, if any.
    pub(super) draft: Option<Draft>,
}

/// Agent that was rejected because another agent represents the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct RejectedAgent {
    pub(super) instance: InstanceId,
    pub(super) since: UnixMs,
    pub(super) latest: Ns,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SentState {
    pub(super) number: DesiredVersion,
    pub(super) at: Ns,
}

/// Changes that the next desired state of a host must contain.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingChanges {
    pub(super) reservations: BTreeSet<ReservationId>,
    pub(super) slices: BTreeSet<SliceId>,
    /// Whether the next desired state must be complete, for example because there are too many
    /// changes to list.
    pub(super) all: bool,
    /// Whether a caller waits for the effect of the next desired state.
    pub(super) awaited: bool,
}

impl PendingChanges {
    /// Adds a changed slice, changed reservations, or both. If the changes exceed the limit, the
    /// next desired state will be complete.
    pub(super) fn add(&mut self, slice: Option<SliceId>, of: impl IntoIterator<Item = ReservationId>) {
        self.slices.extend(slice);
        self.reservations.extend(of);
        if self.slices.len() + self.reservations.len() > DELTA_CHANGES_PER_HOST_MAX {
            *self = Self { all: true, awaited: self.awaited, ..Self::default() };
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.slices.len() + self.reservations.len()
    }

    #[cfg(test)]
    pub(super) fn awaited() -> Self {
        Self { awaited: true, ..Self::default() }
    }

    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.awaited
    }

    #[cfg(test)]
    pub(super) fn is_complete(&self) -> bool {
        self.all
    }
}

impl Link {
    pub(super) fn new(now: Ns) -> Self {
        Self {
            session: None,
            hello: None,
            last_message: now,
            last_message_wall: None,
            unknown_since: None,
            last_sent: None,
            desired_state_due: true,
            pending_changes: PendingChanges { all: true, ..PendingChanges::default() },
            reflected: DesiredVersion::default(),
            fence_sent: None,
            scrubs_sent: BTreeMap::new(),
            rejected: None,
            reports: ReportLog::default(),
            draft: None,
        }
    }

    /// Returns whether the agent has sent a complete report in its current or latest session.
    pub(super) fn has_reported(&self) -> bool {
        self.reports.has_reported()
    }

    /// Records a message of the agent. Returns whether the message is outdated: an earlier report
    /// reflects a newer version.
    pub(super) fn record_message(&mut self, when: When, reflected: DesiredVersion) -> bool {
        (self.last_message, self.last_message_wall) = (when.now, Some(when.wall));
        let is_outdated = reflected < self.reflected;
        self.reflected = self.reflected.max(reflected);
        is_outdated
    }

    /// Stores the draft of a desired state and schedules its next chunk immediately.
    pub(super) fn store_draft(&mut self, draft: Draft) {
        self.draft = Some(draft);
        self.desired_state_due = true;
    }

    /// Returns whether the host's agent has connected since the manager started.
    pub(super) fn has_connected(&self) -> bool {
        self.hello.is_some()
    }

    /// Returns the end of the lease if no further message arrives, in rack time.
    pub(super) fn lease_end(&self, ttl: Ns) -> Ns {
        self.last_message.after(ttl)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    pub(super) fn is_expected(&self) -> bool {
        self.hello.is_none() && self.unknown_since.is_none()
    }

    pub(super) fn is_unknown(&self) -> bool {
        self.unknown_since.is_some()
    }

    pub(super) fn unknown_since(&self) -> Option<UnixMs> {
        self.unknown_since.map(|(_, wall)| wall)
    }

    pub(super) fn hello(&self) -> Option<&Hello> {
        self.hello.as_ref()
    }

    pub(super) fn instance(&self) -> Option<InstanceId> {
        self.session.and(self.hello.as_ref()).map(|hello| hello.instance)
    }

    /// Returns whether the agent is connected with a valid lease.
    pub(super) fn is_live(&self) -> bool {
        self.is_connected() && !self.is_unknown()
    }

    /// Returns the times at which work for the host is due.
    pub(super) fn due_times(&self) -> HostDueTimes {
        HostDueTimes {
            last_message: self.unknown_since.is_none().then_some(self.last_message),
            silent: self.unknown_since.map(|(since, _)| since).filter(|_| !self.is_connected()),
            resend: self.resend_time(),
            desired_state: if self.desired_state_due { self.next_send_time() } else { None },
            rejected: self.rejected.map(|agent| agent.latest),
        }
    }

    /// Returns the latest rejected agent, if any.
    pub(super) fn rejected_agent(&self) -> Option<RejectedAgent> {
        self.rejected
    }

    /// Returns whether another agent of the same boot represents the host. Such an agent has a
    /// valid lease, and is connected or has a newer instance ID.
    pub(super) fn has_other_agent(&self, hello: &Hello, now: Ns, ttl: Ns) -> bool {
        let is_other = |current: &Hello| {
            current.boot_id == hello.boot_id
                && current.instance != hello.instance
                && (self.is_connected() || current.instance > hello.instance)
        };
        self.hello.as_ref().is_some_and(is_other) && now < self.lease_end(ttl)
    }

    /// Returns the rack time from which the next pending desired state may be sent.
    fn next_send_time(&self) -> Option<Ns> {
        self.session?;
        let Some(sent) = self.last_sent.filter(|_| self.draft.is_none()) else { return Some(Ns::ZERO) };
        let answered = self.reflected >= sent.number;
        Some(sent.at.after(match self.pending_changes.awaited {
            _ if !answered => DESIRED_STATE_RESEND_AFTER,
            true => DESIRED_STATE_INTERVAL_MIN,
            false => DESIRED_STATE_BATCH_DELAY,
        }))
    }

    /// Returns the rack time at which an unanswered desired state is sent again.
    fn resend_time(&self) -> Option<Ns> {
        let is_unanswered = |sent: &SentState| self.is_connected() && self.reflected < sent.number;
        let sent = self.last_sent.filter(|sent| is_unanswered(sent) && self.draft.is_none())?;
        Some(sent.at.after(DESIRED_STATE_RESEND_AFTER))
    }
}

/// Complete desired state that is being built in chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    pub(super) desired: Option<DesiredState>,
    pub(super) next_slice: SliceId,
    pub(super) next_reservation: ReservationId,
}

/// Times at which work for a host is due, in rack time; `None` if no such work is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HostDueTimes {
    /// Time of the latest message, while the lease is valid.
    pub(super) last_message: Option<Ns>,
    /// End of the lease, once the lease has expired and while the agent is not connected.
    pub(super) silent: Option<Ns>,
    /// Time at which the unanswered desired state is sent again.
    pub(super) resend: Option<Ns>,
    /// Time from which the next pending desired state may be sent.
    pub(super) desired_state: Option<Ns>,
    /// Time of the latest rejection of another agent.
    pub(super) rejected: Option<Ns>,
}
