//! Durable records of the ledger: a ledger is the fold of its records. Their encoding is left to
//! the store.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};
use units::{Bytes, EmcId, HostId, Name, Ns, RequestId, ReservationId, Revision, SliceId, UnixMs, UserId};

use crate::{audit::Decision, slice::Slot};

/// One durable record. The newest of each [`Key`] counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// The whole ledger.
    Meta(Meta),
    /// An EMC.
    Emc(EmcId, Emc),
    /// A host.
    Host(HostId, Host),
    /// A slice; a slice without a record is free and was never owned.
    Slice(SliceId, Slot),
    /// Memory of a VM.
    Reservation(ReservationId, Reservation),
    /// A migration request.
    Migration(ReservationId, Migration),
    /// A decision, by its number.
    Decision(u64, Decision),
    /// Deletes a record.
    Deleted(Key),
}

/// Key of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Key {
    /// See [`Record::Meta`].
    Meta,
    /// See [`Record::Emc`].
    Emc(EmcId),
    /// See [`Record::Host`].
    Host(HostId),
    /// See [`Record::Slice`].
    Slice(SliceId),
    /// See [`Record::Reservation`].
    Reservation(ReservationId),
    /// See [`Record::Migration`].
    Migration(ReservationId),
    /// See [`Record::Decision`].
    Decision(u64),
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
            Self::Migration(id, _) => Key::Migration(*id),
            Self::Decision(seq, _) => Key::Decision(*seq),
            Self::Deleted(key) => *key,
        }
    }
}

/// State of the whole ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Unique id of the rack.
    pub rack_uuid: String,
    /// Increases with every restore from a backup.
    pub generation: u64,
    /// Increases with every durable batch.
    pub revision: Revision,
    /// Rack time of the latest batch: total running time of the manager.
    pub rack_time: Ns,
    /// Number of the next reservation.
    pub next_reservation: ReservationId,
    /// Number of the next decision.
    pub next_decision: u64,
    /// Number of the oldest stored decision.
    pub first_decision: u64,
    /// Number of the next host.
    pub next_host: HostId,
    /// Number of the next EMC.
    pub next_emc: EmcId,
    /// First slice of the next EMC.
    pub next_slice: SliceId,
}

impl Meta {
    /// Creates the state of a new rack.
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
        }
    }
}

/// Scheduling of a host or EMC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheduling {
    /// Accepts reservations.
    #[default]
    Enabled,
    /// Accepts no reservations.
    Cordoned,
    /// Accepts no reservations, and its VMs are to be migrated.
    Draining,
}

/// EMC.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emc {
    /// Name in rack.toml.
    pub name: Name,
    /// Lowest slice.
    pub first: SliceId,
    /// Number of slices.
    pub slices: u32,
    /// Driver.
    pub driver: String,
    /// Path of the device, as its driver expects it.
    pub path: String,
    /// Scheduling.
    pub scheduling: Scheduling,
    /// Serial number under which hosts see it, if it is attached to their buses. Such a device is
    /// accessible to every attached host.
    #[serde(deserialize_with = "default_if_absent")]
    pub serial: Option<String>,
}

/// Last field of a record, absent in records of earlier versions.
fn default_if_absent<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Ok(T::deserialize(from).unwrap_or_default())
}

impl Emc {
    /// Returns whether it can revoke access; otherwise a host reaches a slice until it releases it
    /// or stops.
    pub fn can_revoke(&self) -> bool {
        self.serial.is_none()
    }

    /// Returns its slices.
    pub fn range(&self) -> impl DoubleEndedIterator<Item = SliceId> + use<> {
        (self.first.0..self.end().0).map(SliceId)
    }

    /// Returns the number after its highest slice.
    pub fn end(&self) -> SliceId {
        SliceId(self.first.0.saturating_add(self.slices))
    }

    /// Returns whether a slice belongs to it.
    pub fn contains(&self, slice: SliceId) -> bool {
        (self.first..self.end()).contains(&slice)
    }
}

/// Host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Name in rack.toml.
    pub name: Name,
    /// Cores available for reservations.
    pub cores: u32,
    /// Local memory available for reservations.
    pub local: Bytes,
    /// Attached EMCs.
    pub emcs: Vec<EmcId>,
    /// Scheduling.
    pub scheduling: Scheduling,
    /// Fence.
    pub fence: Fence,
    /// Boot id of the last connection.
    pub boot_id: String,
    /// The ledger was restored since the host last reported.
    pub must_report: bool,
    /// EMCs that have not confirmed the latest fence. They grant the host nothing until they have,
    /// even after it returned.
    #[serde(deserialize_with = "default_if_absent")]
    pub unconfirmed_fences: BTreeSet<EmcId>,
    /// EMCs to which the host is not attached and that have confirmed the current fence: a restored
    /// ledger may not contain all connections.
    #[serde(deserialize_with = "default_if_absent")]
    pub unwired_fences: BTreeSet<EmcId>,
    /// Start of the current fence; 0 if an earlier version recorded it.
    #[serde(deserialize_with = "default_if_absent")]
    pub fenced_at: UnixMs,
}

impl Host {
    /// Returns whether the host is fenced and this EMC has confirmed it.
    pub fn is_fenced_at(&self, emc: EmcId) -> bool {
        match self.fence {
            Fence::None => false,
            Fence::Fencing { .. } | Fence::Fenced => {
                let is_called = self.emcs.contains(&emc) || self.unwired_fences.contains(&emc);
                is_called && !self.unconfirmed_fences.contains(&emc)
            }
        }
    }

    /// Returns whether the host may have connections and slices that a restored ledger does not
    /// contain: it has not reported since, or was fenced before it reported.
    pub(crate) fn may_exceed_ledger(&self) -> bool {
        self.must_report || self.fence != Fence::None
    }

    /// Returns whether slices of an EMC wait for this host's report after a restore. An EMC that
    /// has fenced it since does not wait; a fence completed in the backup may be outdated.
    pub fn must_report_on(&self, emc: EmcId) -> bool {
        let cut = matches!(self.fence, Fence::Fencing { .. }) && self.is_fenced_at(emc);
        self.must_report && !cut
    }

    /// Requires every EMC to confirm an incomplete fence again: it is from a backup, or from a version
    /// without [`Host::unconfirmed_fences`].
    pub(crate) fn restart_fence(&mut self) {
        if matches!(self.fence, Fence::Fencing { .. }) {
            self.unconfirmed_fences.extend(&self.emcs);
        }
    }
}

/// Fence of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fence {
    /// Not fenced.
    #[default]
    None,
    /// In progress: the EMCs in [`Host::unconfirmed_fences`] have not confirmed.
    Fencing {
        /// An operator confirmed that the machine is powered off.
        powered_off: bool,
    },
    /// Complete, until the host returns with another boot id or reports clean.
    Fenced,
}

/// Identity of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    /// Client.
    pub client: Name,
    /// Request id.
    pub id: RequestId,
}

/// Memory of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// VM.
    pub vm: Name,
    /// Host.
    pub host: HostId,
    /// Slices, in ascending order.
    pub slices: Vec<SliceId>,
    /// Local memory.
    pub local: Bytes,
    /// Cores.
    pub cores: u32,
    /// Pages must not be migrated.
    pub pinned: bool,
    /// Request that created it.
    pub request: RequestKey,
    /// Time that the request allowed until the commit.
    pub commit_within: Ns,
    /// Creation, wall clock.
    pub created: UnixMs,
    /// Stage.
    pub stage: Stage,
    /// User who may access the VM's memory, in addition to root; `None` for the agent's user.
    #[serde(deserialize_with = "default_if_absent")]
    pub uid: Option<UserId>,
    /// Whether the host reported a running process of the VM and has not reported its end. While
    /// the process runs, cores and local memory are in use, even after the reservation ended.
    #[serde(deserialize_with = "default_if_absent")]
    pub has_process: bool,
}

/// Stage of a reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Waiting for the commit.
    Reserved {
        /// Deadline, rack time.
        deadline: Ns,
        /// Deadline, wall clock; extended by the manager's downtime.
        deadline_unix: UnixMs,
    },
    /// In use by the VM.
    Committed,
    /// It cannot become ready, or lost a slice; the scheduler has to release it.
    Broken {
        /// Reason.
        why: String,
        /// Deadline, rack time; `None` if it was committed.
        #[serde(deserialize_with = "default_if_absent")]
        deadline: Option<Ns>,
        /// Time of the failure; 0 if recorded by an earlier version.
        #[serde(deserialize_with = "default_if_absent")]
        at: UnixMs,
    },
    /// Ended. Stored so that repeated requests get the same reply.
    Ended {
        /// Rack time of the end.
        at: Ns,
        /// Cause.
        why: EndedBy,
    },
}

impl Stage {
    /// Returns the rack time at which the reservation expires without a commit.
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
pub enum EndedBy {
    /// Release.
    Released {
        /// Forced, even if the VM was running.
        force: bool,
        /// Reason given by the caller.
        reason: String,
    },
    /// Not committed before its deadline.
    Deadline,
    /// The VM's process ended.
    ProcessGone,
    /// Its host was fenced.
    HostFenced,
    /// Its host restarted, so its processes ended.
    HostRestarted,
}

impl EndedBy {
    /// Returns whether the VM's process can still run after this end.
    pub(crate) fn leaves_process(&self) -> bool {
        match self {
            Self::Released { .. } | Self::Deadline => true,
            Self::ProcessGone | Self::HostFenced | Self::HostRestarted => false,
        }
    }
}

impl std::fmt::Display for EndedBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Released { force: true, reason } => write!(f, "released by force: {reason}"),
            Self::Released { force: false, reason } if reason.is_empty() => f.write_str("released"),
            Self::Released { force: false, reason } => write!(f, "released: {reason}"),
            Self::Deadline => f.write_str("not committed before its deadline"),
            Self::ProcessGone => f.write_str("the VM's process is gone"),
            Self::HostFenced => f.write_str("its host was fenced"),
            Self::HostRestarted => f.write_str("its host has started again"),
        }
    }
}

impl Reservation {
    /// Returns whether it still holds memory for a VM.
    pub fn is_active(&self) -> bool {
        !matches!(self.stage, Stage::Ended { .. })
    }

    /// Returns whether the reservation ended while the VM's process still runs on its host.
    pub fn has_ended_with_process(&self) -> bool {
        self.has_process && !self.is_active()
    }
}

/// Request to the scheduler to migrate a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    /// VM.
    pub vm: Name,
    /// Current host.
    pub host: HostId,
    /// Reason.
    pub why: String,
    /// Time of the request, wall clock.
    pub requested_at: UnixMs,
    /// Answer of the scheduler.
    pub answer: MigrationAnswer,
    /// Explanation by the scheduler.
    pub explanation: String,
    /// Rack time at which a declined request is repeated.
    pub retry_at: Option<Ns>,
}

/// Answer of the scheduler to a migration request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationAnswer {
    /// None yet.
    #[default]
    Open,
    /// Accepted.
    Accepted,
    /// Declined; repeated after [`units::limits::MIGRATION_REQUEST_RETRY_AFTER`].
    Declined,
    /// Migrated.
    Done,
}

#[cfg(test)]
mod tests {
    use serde::de::{IntoDeserializer, value::Error};

    use super::*;

    /// Returns a host of EMCs 1 and 2 that has yet to report; EMC 1 has confirmed the fence.
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
