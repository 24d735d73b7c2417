//! The ledger's facts, as they are made durable: a ledger is the fold of its records. How they are written down is the
//! store's business.

use std::collections::BTreeSet;

use serde::{Deserialize, Deserializer, Serialize};
use units::{Bytes, EmcId, HostId, Name, Ns, RequestId, ReservationId, Revision, SliceId, UnixMs, UserId};

use crate::{audit::Decision, slice::Slot};

/// One durable fact. The newest of a [`Key`] counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// What concerns the whole ledger.
    Meta(Meta),
    /// One EMC.
    Emc(EmcId, Emc),
    /// One host.
    Host(HostId, Host),
    /// One slice; a slice without a record is free and was never owned.
    Slice(SliceId, Slot),
    /// The memory of one VM.
    Reservation(ReservationId, Reservation),
    /// A request to move one VM.
    Migration(ReservationId, Migration),
    /// One decision, by its number.
    Decision(u64, Decision),
    /// What this names is no more.
    Gone(Key),
}

/// What a record is about.
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
    /// What it is about.
    pub fn key(&self) -> Key {
        match self {
            Self::Meta(_) => Key::Meta,
            Self::Emc(id, _) => Key::Emc(*id),
            Self::Host(id, _) => Key::Host(*id),
            Self::Slice(id, _) => Key::Slice(*id),
            Self::Reservation(id, _) => Key::Reservation(*id),
            Self::Migration(id, _) => Key::Migration(*id),
            Self::Decision(seq, _) => Key::Decision(*seq),
            Self::Gone(key) => *key,
        }
    }
}

/// What concerns the whole ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// Tells this rack from every other.
    pub rack_uuid: String,
    /// Rises when the store is restored from a backup.
    pub generation: u64,
    /// Rises with every durable batch.
    pub revision: Revision,
    /// Rack time of the latest batch: how long the manager has run, all lives added up.
    pub rack_time: Ns,
    /// The next reservation's number.
    pub next_reservation: ReservationId,
    /// The next decision's number.
    pub next_decision: u64,
    /// The oldest remembered decision's number.
    pub first_decision: u64,
    /// The next host's number.
    pub next_host: HostId,
    /// The next EMC's number.
    pub next_emc: EmcId,
    /// The first slice of the next EMC.
    pub next_slice: SliceId,
}

impl Meta {
    /// Of a rack that has just been founded.
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

/// Whether new reservations are accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheduling {
    /// They are.
    #[default]
    Enabled,
    /// They are not.
    Cordoned,
    /// They are not, and what is there is to move away.
    Draining,
}

/// One pool device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emc {
    /// As rack.toml has it.
    pub name: Name,
    /// Its lowest slice.
    pub first: SliceId,
    /// How many slices it has.
    pub slices: u32,
    /// Which driver speaks to it.
    pub driver: String,
    /// Where the driver finds it.
    pub path: String,
    /// Whether new slices are taken from it.
    pub scheduling: Scheduling,
    /// What its hosts call it, if they find it on buses of their own. Such a device lets in whoever is wired to it.
    #[serde(deserialize_with = "if_written")]
    pub serial: Option<String>,
}

/// The last field of a record, which earlier versions did not write.
fn if_written<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(T::deserialize(from).unwrap_or_default())
}

impl Emc {
    /// Whether it can cut a host off; else who had a slice reaches it until it lets go or stops.
    pub fn cuts_off(&self) -> bool {
        self.serial.is_none()
    }

    /// Its slices.
    pub fn range(&self) -> impl DoubleEndedIterator<Item = SliceId> + use<> {
        (self.first.0..self.end().0).map(SliceId)
    }

    /// The number after its highest slice.
    pub fn end(&self) -> SliceId {
        SliceId(self.first.0.saturating_add(self.slices))
    }

    /// Whether the slice is its own.
    pub fn contains(&self, slice: SliceId) -> bool {
        (self.first..self.end()).contains(&slice)
    }
}

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// As rack.toml has it.
    pub name: Name,
    /// Cores that may be reserved.
    pub cores: u32,
    /// Local memory that may be reserved.
    pub local: Bytes,
    /// The EMCs it is wired to.
    pub emcs: Vec<EmcId>,
    /// Whether new reservations are accepted.
    pub scheduling: Scheduling,
    /// Whether it is cut off its slices.
    pub fence: Fence,
    /// The boot it was last seen in.
    pub boot_id: String,
    /// Whether the ledger was restored since it last reported.
    pub must_report: bool,
    /// EMCs that have not cut the host off since it was last fenced. It gets nothing from them until they have, even after
    /// it returned.
    #[serde(deserialize_with = "if_written")]
    pub unconfirmed_fences: BTreeSet<EmcId>,
    /// EMCs to which the host is not wired and that have confirmed the present fence: a restored ledger may lack wires.
    #[serde(deserialize_with = "if_written")]
    pub unwired_fences: BTreeSet<EmcId>,
    /// When the present fence began; 0 if an earlier version began it.
    #[serde(deserialize_with = "if_written")]
    pub fenced_at: UnixMs,
}

impl Host {
    /// Whether the host is fenced and this EMC has confirmed it.
    pub fn is_cut_off(&self, emc: EmcId) -> bool {
        match self.fence {
            Fence::None => false,
            Fence::Fencing { .. } | Fence::Fenced => {
                let asked = self.emcs.contains(&emc) || self.unwired_fences.contains(&emc);
                asked && !self.unconfirmed_fences.contains(&emc)
            }
        }
    }

    /// Whether the host may have wires and slices that a restored ledger lacks: it has not reported since, or was fenced
    /// before it reported.
    pub(crate) fn may_know_more(&self) -> bool {
        self.must_report || self.fence != Fence::None
    }

    /// Whether slices of an EMC wait for this host's report after a restore. An EMC that has cut it off since leaves it
    /// nothing to report; a fence that was complete in the backup may be outdated.
    pub fn must_report_on(&self, emc: EmcId) -> bool {
        let cut = matches!(self.fence, Fence::Fencing { .. }) && self.is_cut_off(emc);
        self.must_report && !cut
    }

    /// Has every EMC answer a fence that is not complete: one of a backup, or one begun by a version without
    /// [`Host::unconfirmed_fences`].
    pub(crate) fn restart_fence(&mut self) {
        if matches!(self.fence, Fence::Fencing { .. }) {
            self.unconfirmed_fences.extend(&self.emcs);
        }
    }
}

/// Whether a host is cut off its slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fence {
    /// It is not.
    #[default]
    None,
    /// It is being cut off; the EMCs in [`Host::unconfirmed_fences`] have not done it yet.
    Fencing {
        /// An operator vouches that the machine is off.
        powered_off: bool,
    },
    /// It is cut off, until it returns with another boot id or proves itself clean.
    Fenced,
}

/// Whose request id it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestKey {
    /// Who asked.
    pub client: Name,
    /// As which request.
    pub id: RequestId,
}

/// The memory of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// Whose memory it is.
    pub vm: Name,
    /// Where.
    pub host: HostId,
    /// Its slices, in ascending order.
    pub slices: Vec<SliceId>,
    /// Its local memory.
    pub local: Bytes,
    /// Its cores.
    pub cores: u32,
    /// Whether its pages must stay where they are.
    pub pinned: bool,
    /// The request that made it.
    pub request: RequestKey,
    /// How long the request allowed until the commit.
    pub commit_within: Ns,
    /// When it was made, as people read time.
    pub created: UnixMs,
    /// How far its life has come.
    pub stage: Stage,
    /// The user of the host that may use it beside root; `None` for the agent's own user.
    #[serde(deserialize_with = "if_written")]
    pub uid: Option<UserId>,
}

/// How far a reservation's life has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Waiting for the commit until a moment of rack time.
    Reserved {
        /// When it ends by itself.
        deadline: Ns,
        /// The same as people read time; prolonged by the manager's downtime.
        deadline_unix: UnixMs,
    },
    /// The VM runs on it.
    Committed,
    /// It cannot become ready, or lost a slice; the scheduler is to release it.
    Broken {
        /// What happened.
        why: String,
        /// When it ends by itself, in rack time; `None` if it had been committed.
        #[serde(deserialize_with = "if_written")]
        deadline: Option<Ns>,
        /// When it broke; 0 if under an earlier version.
        #[serde(deserialize_with = "if_written")]
        at: UnixMs,
    },
    /// Over. Remembered so that a repeated request gets its answer.
    Ended {
        /// When, in rack time.
        at: Ns,
        /// Who or what ended it.
        why: EndedBy,
    },
}

impl Stage {
    /// The moment of rack time at which the reservation ends unless it is committed before.
    pub fn deadline(&self) -> Option<Ns> {
        match self {
            Self::Reserved { deadline, .. } => Some(*deadline),
            Self::Broken { deadline, .. } => *deadline,
            Self::Committed | Self::Ended { .. } => None,
        }
    }
}

/// Who or what ended a reservation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndedBy {
    /// A release.
    Released {
        /// Even though the VM might still run.
        force: bool,
        /// In the caller's words.
        reason: String,
    },
    /// Nobody committed it in time.
    Deadline,
    /// The VM's process is gone.
    ProcessGone,
    /// Its host was fenced.
    HostFenced,
    /// Its host has started again, and nothing that ran there runs any more.
    HostRestarted,
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
    /// Whether it still holds memory for a VM.
    pub fn is_active(&self) -> bool {
        !matches!(self.stage, Stage::Ended { .. })
    }
}

/// A request to the scheduler to move one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    /// Which VM.
    pub vm: Name,
    /// Away from where.
    pub host: HostId,
    /// Why.
    pub why: String,
    /// When it was asked, as people read time.
    pub asked: UnixMs,
    /// What the scheduler said.
    pub answer: MigrationAnswer,
    /// In the scheduler's words.
    pub words: String,
    /// When one that was declined is asked again, on the rack's clock.
    pub again: Option<Ns>,
}

/// What the scheduler said to a request to move a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationAnswer {
    /// Nothing yet.
    #[default]
    Open,
    /// It will.
    Accepted,
    /// It will not; it is asked again after [`units::limits::MIGRATION_REQUEST_RETRY_AFTER`].
    Declined,
    /// It did.
    Done,
}

#[cfg(test)]
mod tests {
    use serde::de::{IntoDeserializer, value::Error};

    use super::*;

    /// A host of EMCs 1 and 2 that has yet to report; EMC 1 has confirmed the fence.
    #[test]
    fn host_owes_a_report_except_on_emcs_that_have_confirmed_a_fence_under_way() {
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
    fn last_field_is_read_if_written_and_has_its_default_otherwise() {
        let read = |text: &str| {
            let from: serde::de::value::StrDeserializer<'_, Error> = text.into_deserializer();
            if_written::<_, String>(from)
        };
        assert_eq!(read("0x1"), Ok("0x1".to_owned()));
        let absent: serde::de::value::UnitDeserializer<Error> = ().into_deserializer();
        assert_eq!(if_written::<_, String>(absent), Ok(String::new()));
    }
}
