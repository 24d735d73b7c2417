//! Durable records of the ledger. Applying all records in order yields the ledger. The store
//! encodes the records.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};
use units::{
    Bytes, EmcId, HostId, MigrationId, Name, Ns, RequestId, ReservationId, Revision, SliceId, UnixMs, UserId,
};

use crate::{audit::Decision, request_budget::RequestCounts, slice::Slot};

/// One durable record. A record replaces the earlier record with the same [`Key`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// Identity, revision and counters of the ledger.
    Meta(Meta),
    /// An EMC, by ID.
    Emc(EmcId, Emc),
    /// A host, by ID.
    Host(HostId, Host),
    /// State of a slice, by ID. A slice without a record is free and never had an owner.
    Slice(SliceId, Slot),
    /// Reservation of memory for a VM, by ID.
    Reservation(ReservationId, Reservation),
    /// Migration request, by the ID of the VM's reservation.
    Migration(ReservationId, Migration),
    /// A decision, by sequence number.
    Decision(u64, Decision),
    /// Deletion of the record with this key.
    Deleted(Key),
}

/// Key of a record; the newest record of each key is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Key {
    /// Key of a [`Record::Meta`].
    Meta,
    /// Key of a [`Record::Emc`].
    Emc(EmcId),
    /// Key of a [`Record::Host`].
    Host(HostId),
    /// Key of a [`Record::Slice`].
    Slice(SliceId),
    /// Key of a [`Record::Reservation`].
    Reservation(ReservationId),
    /// Key of a [`Record::Migration`].
    Migration(MigrationKey),
    /// Key of a [`Record::Decision`].
    Decision(u64),
}

/// Key of a migration request: the VM's reservation and the cause. A VM has at most one request of
/// each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationKey {
    /// Reservation of the VM.
    pub reservation: ReservationId,
    /// Cause of the request.
    pub kind: MigrationKind,
}

/// Cause of a migration request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MigrationKind {
    /// The VM's host or an EMC of its slices is draining.
    Drain,
    /// Pool memory slows the VM down.
    Slowdown,
}

impl MigrationKind {
    /// All kinds, in ascending order.
    pub const ALL: [Self; 2] = [Self::Drain, Self::Slowdown];

    /// Returns the key of a reservation's request of this kind.
    pub const fn of(self, reservation: ReservationId) -> MigrationKey {
        MigrationKey { reservation, kind: self }
    }
}

impl Record {
    /// Returns the key of the record.
    pub fn key(&self) -> Key {
        match self {
            Self::Meta(_) => Key::Meta,
            Self::Emc(id, _) => Key::Emc(*id),
            Self::Host(id, _) => Key::Host(*id),
            Self::Slice(id, _) => Key::Slice(*id),
            Self::Reservation(id, _) => Key::Reservation(*id),
            Self::Migration(id, migration) => Key::Migration(migration.kind().of(*id)),
            Self::Decision(seq, _) => Key::Decision(*seq),
            Self::Deleted(key) => *key,
        }
    }
}

/// Identity, revision and counters of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Unique ID of the rack.
    pub rack_uuid: String,
    /// Generation of the ledger, from 1. Each restore from a backup increases it.
    pub generation: u64,
    /// Revision of the latest durable batch. Each batch increases it.
    pub revision: Revision,
    /// Rack time of the latest batch. Rack time is the total running time of the manager.
    pub rack_time: Ns,
    /// ID of the next reservation.
    pub next_reservation: ReservationId,
    /// Sequence number of the next decision.
    pub next_decision: u64,
    /// Sequence number of the oldest stored decision.
    pub first_decision: u64,
    /// ID of the next host.
    pub next_host: HostId,
    /// ID of the next EMC.
    pub next_emc: EmcId,
    /// ID of the first slice of the next EMC.
    pub next_slice: SliceId,
    /// ID of the next migration request; 0 if an earlier version wrote the record.
    #[serde(deserialize_with = "default_if_absent")]
    pub next_migration: MigrationId,
    /// Recent migration requests because of slowdowns.
    #[serde(deserialize_with = "default_if_absent")]
    pub slowdown_requests: RequestCounts,
}

impl Meta {
    /// Creates the meta record of a new rack.
    pub fn new(rack_uuid: String) -> Self {
        Self {
            rack_uuid,
            generation: 1,
            revision: Revision(0),
            rack_time: Ns::ZERO,
            next_reservation: ReservationId(1),
            next_decision: 1,
            first_decision: 1,
            next_host: HostId(0),
            next_emc: EmcId(0),
            next_slice: SliceId(0),
            next_migration: MigrationId(0),
            slowdown_requests: RequestCounts::default(),
        }
    }
}

/// Whether a host or EMC accepts new reservations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheduling {
    /// The host or EMC accepts new reservations.
    #[default]
    Enabled,
    /// The host or EMC accepts no new reservations.
    Cordoned,
    /// The host or EMC accepts no new reservations, and the scheduler must migrate the VMs on it.
    Draining,
}

/// An EMC (pool device) and its slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emc {
    /// Name of the EMC in rack.toml.
    pub name: Name,
    /// First slice of the EMC; the IDs of its slices are consecutive.
    pub first: SliceId,
    /// Number of slices that the EMC provides.
    pub slices: u32,
    /// Name of the driver that accesses the device.
    pub driver: String,
    /// Path of the device, in the form that the driver expects.
    pub path: String,
    /// Whether the EMC accepts new reservations.
    pub scheduling: Scheduling,
    /// Serial number of a shared device, which is attached to the buses of its hosts; `None` for
    /// other devices. Every attached host can access all memory of a shared device.
    #[serde(deserialize_with = "default_if_absent")]
    pub serial: Option<String>,
}

/// Deserializes a trailing field of a record. Returns the default if an earlier version wrote the
/// record without this field.
fn default_if_absent<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(T::deserialize(from).unwrap_or_default())
}

impl Emc {
    /// Returns whether the device can revoke access. Otherwise a host can reach a slice until the
    /// host releases the slice or stops.
    pub fn can_revoke(&self) -> bool {
        self.serial.is_none()
    }

    /// Returns the slices of the EMC, in ascending order.
    pub fn range(&self) -> impl DoubleEndedIterator<Item = SliceId> + use<> {
        (self.first.0..self.end().0).map(SliceId)
    }

    /// Returns the ID after the EMC's last slice.
    pub fn end(&self) -> SliceId {
        SliceId(self.first.0.saturating_add(self.slices))
    }

    /// Returns whether the EMC contains this slice.
    pub fn contains(&self, slice: SliceId) -> bool {
        (self.first..self.end()).contains(&slice)
    }
}

/// A host and its capacity for reservations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Name of the host in rack.toml.
    pub name: Name,
    /// Cores available for reservations.
    pub cores: u32,
    /// Local memory available for reservations.
    pub local: Bytes,
    /// EMCs that the host is attached to.
    pub emcs: Vec<EmcId>,
    /// Whether the host accepts new reservations.
    pub scheduling: Scheduling,
    /// State of the host's fence.
    pub fence: Fence,
    /// Boot ID of the host at its latest connection; a restart of the machine changes it.
    pub boot_id: String,
    /// Whether the host has not reported since the ledger was restored from a backup.
    pub must_report: bool,
    /// EMCs that have not confirmed the latest fence of the host. The host gets no slices of such
    /// an EMC, even after the host has returned.
    #[serde(deserialize_with = "default_if_absent")]
    pub unconfirmed_fences: BTreeSet<EmcId>,
    /// EMCs that have confirmed the current fence although the host is not attached to them
    /// according to the ledger. A restored ledger may lack some attachments.
    #[serde(deserialize_with = "default_if_absent")]
    pub unwired_fences: BTreeSet<EmcId>,
    /// Start of the current fence, wall clock; 0 if an earlier version recorded the fence.
    #[serde(deserialize_with = "default_if_absent")]
    pub fenced_at: UnixMs,
}

impl Host {
    /// Returns whether this EMC has confirmed the host's current fence.
    pub fn is_fenced_at(&self, emc: EmcId) -> bool {
        match self.fence {
            Fence::None => false,
            Fence::Fencing { .. } | Fence::Fenced => {
                let is_called = self.emcs.contains(&emc) || self.unwired_fences.contains(&emc);
                is_called && !self.unconfirmed_fences.contains(&emc)
            }
        }
    }

    /// Returns whether the host may have attachments and slices that a restored ledger does not
    /// contain. Such a host has not reported since the restore, or is fenced.
    pub(crate) fn may_have_unrecorded_slices(&self) -> bool {
        self.must_report || self.fence != Fence::None
    }

    /// Returns whether slices of an EMC must wait for this host's report after a restore. If the
    /// EMC has fenced the host since the restore, its slices do not wait. A fence that was complete
    /// in the backup may be outdated and is ignored.
    pub fn must_report_on(&self, emc: EmcId) -> bool {
        let cut = matches!(self.fence, Fence::Fencing { .. }) && self.is_fenced_at(emc);
        self.must_report && !cut
    }

    /// Requires every EMC to confirm an incomplete fence again: a backup, or a version without
    /// [`Host::unconfirmed_fences`], may lack EMCs that must still confirm it.
    pub(crate) fn restart_fence(&mut self) {
        if matches!(self.fence, Fence::Fencing { .. }) {
            self.unconfirmed_fences.extend(&self.emcs);
        }
    }
}

/// State of a host's fence, which revokes the host's access to all slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fence {
    /// The host is not fenced.
    #[default]
    None,
    /// The fence is in progress: the EMCs in [`Host::unconfirmed_fences`] have not confirmed it.
    Fencing {
        /// Whether an operator confirmed that the machine is powered off.
        powered_off: bool,
    },
    /// The fence is complete. It ends when the host reconnects with another boot ID or reports that
    /// it is clean.
    Fenced,
}

/// Identity of a request. The manager uses it to recognize repeated requests.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    /// Client that sent the request.
    pub client: Name,
    /// ID that the client chose for the request.
    pub id: RequestId,
}

/// Memory and cores reserved for one VM on one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// Name of the VM.
    pub vm: Name,
    /// Host that runs the VM.
    pub host: HostId,
    /// Slices of the reservation, in ascending order.
    pub slices: Vec<SliceId>,
    /// Reserved local memory.
    pub local: Bytes,
    /// Number of reserved cores.
    pub cores: u32,
    /// Whether the VM's pages must not be migrated.
    pub pinned: bool,
    /// Request that created the reservation.
    pub request: RequestKey,
    /// Time from the creation of the reservation to its commit deadline.
    pub commit_within: Ns,
    /// Time of creation, wall clock.
    pub created: UnixMs,
    /// Stage of the reservation.
    pub stage: Stage,
    /// User who may access the VM's memory, in addition to root; `None` for the agent's user.
    #[serde(deserialize_with = "default_if_absent")]
    pub uid: Option<UserId>,
    /// Whether the host reported a running process of the VM and not yet its end. The process uses
    /// cores and local memory until it ends, even if the reservation has ended before.
    #[serde(deserialize_with = "default_if_absent")]
    pub has_process: bool,
    /// Latest move of the VM's pool memory to local memory of its host.
    #[serde(deserialize_with = "default_if_absent")]
    pub rehome: Rehome,
}

/// Move of a VM's pool memory to local memory of its host, while the VM runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rehome {
    /// No move was requested.
    #[default]
    None,
    /// The move is in progress. Local memory of the size of the pool memory is booked for it.
    Moving {
        /// Number of this attempt, from 1.
        attempt: u32,
    },
    /// The latest attempt failed. The VM uses its pool memory as before.
    Failed {
        /// Number of the failed attempt, from 1.
        attempt: u32,
        /// Reason of the failure, from the host.
        why: String,
        /// Rack time at which the failure was recorded.
        at: Ns,
    },
    /// The VM uses only local memory.
    Done {
        /// Slices that the VM had before, in ascending order.
        slices: Vec<SliceId>,
    },
    /// A client cancelled the move. Local memory stays booked until the host reports the result: the
    /// memory may have been moved already.
    Cancelling {
        /// Number of this attempt, from 1.
        attempt: u32,
    },
}

impl Rehome {
    /// Returns the number of attempts so far.
    pub const fn attempts(&self) -> u32 {
        match self {
            Self::None | Self::Done { .. } => 0,
            Self::Moving { attempt } | Self::Cancelling { attempt } | Self::Failed { attempt, .. } => {
                *attempt
            }
        }
    }

    /// Returns the number of the attempt in progress, if any.
    pub const fn attempt_in_progress(&self) -> Option<u32> {
        match self {
            Self::Moving { attempt } | Self::Cancelling { attempt } => Some(*attempt),
            Self::None | Self::Failed { .. } | Self::Done { .. } => None,
        }
    }

    /// Returns the slices that the VM had before a completed move; empty in other states.
    pub fn former_slices(&self) -> &[SliceId] {
        match self {
            Self::Done { slices } => slices,
            Self::None | Self::Moving { .. } | Self::Failed { .. } | Self::Cancelling { .. } => &[],
        }
    }
}

/// Stage of a reservation, from its creation to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// The reservation was created; the scheduler has not committed it.
    Reserved {
        /// Commit deadline, rack time.
        deadline: Ns,
        /// Commit deadline, wall clock, estimated at creation. Downtime of the manager postpones
        /// the actual deadline.
        deadline_unix: UnixMs,
    },
    /// The reservation is committed: its VM was started.
    Committed,
    /// The reservation cannot become ready, or lost a slice. The scheduler must release it.
    Broken {
        /// Reason why the reservation is broken.
        why: String,
        /// Commit deadline, rack time; `None` if the reservation was committed.
        #[serde(deserialize_with = "default_if_absent")]
        deadline: Option<Ns>,
        /// Time at which the reservation broke, wall clock; 0 if recorded by an earlier version.
        #[serde(deserialize_with = "default_if_absent")]
        at: UnixMs,
    },
    /// The reservation has ended. The record remains so that a repeated request gets the same
    /// reply.
    Ended {
        /// Rack time of the end.
        at: Ns,
        /// Cause of the end.
        why: EndReason,
    },
}

impl Stage {
    /// Returns the commit deadline in rack time; `None` if the reservation cannot expire.
    pub fn deadline(&self) -> Option<Ns> {
        match self {
            Self::Reserved { deadline, .. } => Some(*deadline),
            Self::Broken { deadline, .. } => *deadline,
            Self::Committed | Self::Ended { .. } => None,
        }
    }
}

/// Cause of the end of a reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndReason {
    /// A client released the reservation.
    Released {
        /// Whether the release was forced, so that even a running VM lost its memory.
        force: bool,
        /// Reason given by the caller.
        reason: String,
    },
    /// The reservation was not committed before its deadline.
    Deadline,
    /// The VM's process ended.
    ProcessGone,
    /// The host of the VM was fenced.
    HostFenced,
    /// The host of the VM restarted, which ended the VM's process.
    HostRestarted,
}

impl EndReason {
    /// Returns whether the VM's process may still run after the reservation ended for this cause.
    pub(crate) fn may_leave_process(&self) -> bool {
        match self {
            Self::Released { .. } | Self::Deadline => true,
            Self::ProcessGone | Self::HostFenced | Self::HostRestarted => false,
        }
    }
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Released { force: true, reason } => write!(f, "released by force: {reason}"),
            Self::Released { force: false, reason } if reason.is_empty() => f.write_str("released"),
            Self::Released { force: false, reason } => write!(f, "released: {reason}"),
            Self::Deadline => f.write_str("not committed before its deadline"),
            Self::ProcessGone => f.write_str("the VM's process has ended"),
            Self::HostFenced => f.write_str("its host was fenced"),
            Self::HostRestarted => f.write_str("its host has restarted"),
        }
    }
}

impl Reservation {
    /// Returns whether the reservation has not ended.
    pub fn is_active(&self) -> bool {
        !matches!(self.stage, Stage::Ended { .. })
    }

    /// Returns the size of the VM's pool memory.
    pub fn pool(&self) -> Bytes {
        total_size(&self.slices)
    }

    /// Returns the local memory that the VM uses or may use, including the local memory for a move in
    /// progress.
    pub fn booked_local(&self) -> Bytes {
        let for_move = if self.rehome.attempt_in_progress().is_some() { self.pool() } else { Bytes::ZERO };
        [self.local, for_move].into_iter().sum()
    }

    /// Returns the number of slices and the local memory for which the reservation was made, before
    /// any move of pool memory to local memory.
    pub fn requested_memory(&self) -> (usize, Bytes) {
        let moved = self.rehome.former_slices();
        (self.slices.len() + moved.len(), self.local.saturating_sub(total_size(moved)))
    }
}

fn total_size(slices: &[SliceId]) -> Bytes {
    Bytes::slices(u32::try_from(slices.len()).unwrap_or(u32::MAX))
}

/// Request to the scheduler to migrate a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Migration {
    /// Name of the VM to migrate.
    pub vm: Name,
    /// Host that runs the VM.
    pub host: HostId,
    /// Reason for the migration.
    pub why: String,
    /// Time of the request, wall clock.
    pub requested_at: UnixMs,
    /// Latest answer of the scheduler.
    pub answer: MigrationAnswer,
    /// Explanation of the answer by the scheduler; may be empty.
    pub explanation: String,
    /// Rack time at which the request is repeated; `None` if it is not answered, or if it is for a drain and
    /// was not declined.
    pub retry_at: Option<Ns>,
    /// ID of the request; 0 if an earlier version made the request.
    #[serde(deserialize_with = "default_if_absent")]
    pub id: MigrationId,
    /// Evidence of a request because of a slowdown; `None` for a drain.
    #[serde(deserialize_with = "default_if_absent")]
    pub slowdown: Option<Slowdown>,
}

impl Migration {
    /// Returns the cause of the request.
    pub const fn kind(&self) -> MigrationKind {
        if self.slowdown.is_some() { MigrationKind::Slowdown } else { MigrationKind::Drain }
    }
}

/// Latest evidence that pool memory slows a VM down.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Slowdown {
    /// Estimate of the slowdown.
    pub estimate: SlowdownEstimate,
    /// Rack time at which the request expires, unless the slowdown is observed again.
    pub expires_at: Ns,
}

/// Estimate of the slowdown of a VM by pool memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlowdownEstimate {
    /// Slowdown relative to local memory: 0.1 is 10 % longer run time. `None` without processor
    /// counters.
    pub loss: Option<f64>,
    /// Urgency: the estimate divided by the threshold above which a VM must be migrated.
    pub severity: f64,
    /// Number of samples on which the estimate is based.
    pub samples: u32,
}

impl std::fmt::Display for SlowdownEstimate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { loss, severity, samples } = self;
        match loss {
            Some(loss) => write!(f, "pool memory slows the VM down by an estimated {:.1} %", 100.0 * loss)?,
            None => f.write_str("the VM accesses much of its pool memory")?,
        }
        write!(f, " (severity {severity:.2}, {samples} samples)")
    }
}

/// Answer of the scheduler to a migration request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationAnswer {
    /// The scheduler has not answered.
    #[default]
    Open,
    /// The scheduler will migrate the VM. A request because of a slowdown is repeated after
    /// [`units::limits::SLOWDOWN_REQUEST_REPEAT_AFTER`], also in the state `Done`.
    Accepted,
    /// The scheduler declined; the request is repeated after
    /// [`units::limits::MIGRATION_REQUEST_RETRY_AFTER`].
    Declined,
    /// The scheduler migrated the VM.
    Done,
}

#[cfg(test)]
mod tests {
    use serde::de::{IntoDeserializer, value::Error};

    use super::*;

    /// The host is attached to EMCs 1 and 2 and has not reported since the restore. EMC 1 has
    /// confirmed the fence.
    #[test]
    fn report_is_due_except_on_emcs_that_confirmed_current_fence() {
        let [none, under_way, complete] = [Fence::None, Fence::Fencing { powered_off: false }, Fence::Fenced]
            .map(|fence| {
                let host = Host {
                    name: Name::new("h").unwrap(),
                    cores: 1,
                    local: Bytes::ZERO,
                    emcs: vec![EmcId(1), EmcId(2)],
                    fence,
                    scheduling: Scheduling::default(),
                    boot_id: String::new(),
                    must_report: true,
                    unconfirmed_fences: [EmcId(2)].into(),
                    unwired_fences: [EmcId(3)].into(),
                    fenced_at: UnixMs::default(),
                };
                [1, 2].map(|emc| host.must_report_on(EmcId(emc)))
            });
        assert_eq!((none, under_way, complete), ([true, true], [false, true], [true, true]));
    }

    #[test]
    fn absent_last_field_reads_as_default() {
        let read = |text: &str| {
            let from: serde::de::value::StrDeserializer<'_, Error> = text.into_deserializer();
            default_if_absent::<_, String>(from)
        };
        assert_eq!(read("0x1"), Ok("0x1".to_owned()));
        let absent: serde::de::value::UnitDeserializer<Error> = ().into_deserializer();
        assert_eq!(default_if_absent::<_, String>(absent), Ok(String::new()));
    }
}
