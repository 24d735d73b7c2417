//! Converts ledger objects into protobuf messages.

use std::collections::BTreeMap;

use pool::{
    audit::Decision,
    ledger::{EmcEntry, HostEntry, Ledger, When},
    manager::{Alarm, EmcState, HostState, Manager, ReservationView},
    record::{Fence, Key, Migration, MigrationAnswer, MigrationKind, Rehome, Reservation, Scheduling, Stage},
    slice::{Receipt, Scrub, Slot, State},
};
use proto::v1 as wire;
use units::{Bytes, EmcId, HostId, Name, ReservationId, SliceId, limits::MIGRATION_HOSTS_MAX};

use crate::write_chunk::WriteChunk;

/// Returns the name of a host, or the ID of a host that was removed.
pub fn host_name(ledger: &Ledger, id: HostId) -> String {
    ledger.host(id).map_or_else(|| id.to_string(), |entry| entry.host.name.to_string())
}

/// Converts a slice with its owner, its VM and its scrub receipt.
pub fn slice_message(ledger: &Ledger, id: SliceId, emc: EmcId, slot: Slot) -> wire::Slice {
    let vm = slot.reservation().and_then(|r| ledger.reservation(r)).map(|r| r.vm.to_string());
    wire::Slice {
        slice: id.0,
        emc: ledger.emc(emc).map_or_else(|| emc.to_string(), |entry| entry.emc.name.to_string()),
        state: slice_state(slot).into(),
        host: slot.holder().map(|host| host_name(ledger, host)),
        vm,
        epoch: slot.epoch.0,
        reason: unavailable_reason(ledger, slot),
        receipt: slot.receipt.map(|r| receipt_message(ledger, &r)),
    }
}

/// Returns a text for operators that explains why the slice cannot be used now, such as the reason
/// for its quarantine.
fn unavailable_reason(ledger: &Ledger, slot: Slot) -> Option<String> {
    let fence = slot.holder().and_then(|host| ledger.host(host)).map(|entry| entry.host.fence);
    match (slot.state, fence) {
        (State::Quarantined(why), _) => Some(why.to_string()),
        (_, Some(Fence::Fencing { .. })) => {
            Some("access of the host is being revoked; the host may still access the slice".to_owned())
        }
        (State::Scrubbing(Scrub::Leaving(_)), _) => {
            Some("waiting for the host to release the slice".to_owned())
        }
        _ => None,
    }
}

fn slice_state(slot: Slot) -> wire::SliceState {
    match slot.state {
        State::Free => wire::SliceState::Free,
        State::Assigned(_) => wire::SliceState::Assigned,
        State::Onlining(_) => wire::SliceState::Onlining,
        State::Online(_) => wire::SliceState::Online,
        State::Draining(..) | State::Scrubbing(Scrub::Leaving(_)) => wire::SliceState::Draining,
        State::Scrubbing(_) => wire::SliceState::Scrubbing,
        State::Quarantined(_) => wire::SliceState::Quarantined,
    }
}

fn receipt_message(ledger: &Ledger, r: &Receipt) -> wire::ScrubReceipt {
    wire::ScrubReceipt {
        scrubber: host_name(ledger, r.scrubber),
        epoch: r.scrubbed.holding.epoch.0,
        started_unix_ms: r.scrubbed.started.0,
        ended_unix_ms: r.scrubbed.ended.0,
        bytes_verified: r.scrubbed.verified.get(),
    }
}

/// Returns the state of a reservation in the API.
pub fn reservation_state(view: &ReservationView) -> wire::ReservationState {
    match view.reservation.stage {
        Stage::Reserved { .. } if view.is_ready() => wire::ReservationState::Ready,
        Stage::Reserved { .. } => wire::ReservationState::Assigned,
        Stage::Committed => wire::ReservationState::Committed,
        Stage::Broken { .. } => wire::ReservationState::Broken,
        Stage::Ended { .. } => wire::ReservationState::Released,
    }
}

/// Converts a reservation with its slices and its commit deadline.
pub fn reservation_message(view: ReservationView) -> wire::Reservation {
    let state = reservation_state(&view).into();
    let r = view.reservation;
    let (deadline, reason) = match &r.stage {
        Stage::Reserved { deadline_unix, .. } => (Some(deadline_unix.0), None),
        Stage::Committed => (None, None),
        Stage::Broken { why, .. } => (None, Some(why.clone())),
        Stage::Ended { why, .. } => (None, Some(why.to_string())),
    };
    wire::Reservation {
        reservation: view.id.to_string(),
        vm: r.vm.to_string(),
        host: view.host.to_string(),
        state,
        local_bytes: r.local.get(),
        pool_bytes: r.pool().get(),
        slices: r.slices.iter().map(|s| s.0).collect(),
        cores: r.cores,
        pinned: r.pinned,
        uid: r.uid.map(u32::from),
        process_running: r.has_process,
        commit_deadline_unix_ms: deadline,
        created_unix_ms: r.created.0,
        request_id: r.request.id.to_string(),
        slices_online: view.online,
        reason,
        monitoring: None,
        rehome: rehome_message(&r),
    }
}

/// Converts the latest move of a VM's pool memory; `None` if none was requested.
fn rehome_message(reservation: &Reservation) -> Option<wire::Rehome> {
    let (state, attempt, reason) = match &reservation.rehome {
        Rehome::None => return None,
        Rehome::Moving { attempt } | Rehome::Cancelling { attempt } if !reservation.is_active() => {
            (wire::RehomeState::Failed, *attempt, "the reservation has ended".to_owned())
        }
        Rehome::Moving { attempt } => (wire::RehomeState::Copying, *attempt, String::new()),
        Rehome::Cancelling { attempt } => (wire::RehomeState::Cancelling, *attempt, String::new()),
        Rehome::Failed { attempt, why, .. } => (wire::RehomeState::Failed, *attempt, why.clone()),
        Rehome::Done { .. } => (wire::RehomeState::Done, 0, String::new()),
    };
    let moved = reservation.rehome.former_slices().len();
    let bytes = Bytes::slices(u32::try_from(moved + reservation.slices.len()).unwrap_or(u32::MAX)).get();
    Some(wire::Rehome { state: state.into(), attempt, reason, bytes })
}

/// Converts a recorded decision. `seq` is its sequence number in the audit log.
pub fn decision_message(seq: u64, decision: &Decision) -> wire::Decision {
    let description = decision.what.describe();
    wire::Decision {
        seq,
        at_unix_ms: decision.at.0,
        actor: decision.actor.to_string(),
        action: description.action.into(),
        subject: decision.subject.to_string(),
        reason: description.why,
        model: description.model,
        facts: description.facts.into_iter().collect(),
        alternatives: description.alternatives,
    }
}

/// Returns the scheduling state of a host or EMC. A drain is complete once the object is empty.
fn scheduling_state(state: Scheduling, empty: bool) -> wire::Scheduling {
    match state {
        Scheduling::Enabled => wire::Scheduling::Enabled,
        Scheduling::Cordoned => wire::Scheduling::Cordoned,
        Scheduling::Draining if empty => wire::Scheduling::Drained,
        Scheduling::Draining => wire::Scheduling::Draining,
    }
}

/// Converts a host with its state and its free capacity. Returns `None` if the host does not exist.
pub fn host_message(manager: &Manager, id: HostId) -> Option<wire::Host> {
    let ledger = manager.durable();
    let entry = ledger.host(id)?;
    let (hello, last_report) = manager.agent_identity(id);
    let state = match manager.host_state(id) {
        HostState::Up => wire::HostState::Up,
        HostState::Silent => wire::HostState::Silent,
        HostState::Unknown => wire::HostState::Unknown,
        HostState::Fencing => wire::HostState::Fencing,
        HostState::Fenced => wire::HostState::Fenced,
        HostState::Expected => wire::HostState::Expected,
    };
    let h = &entry.host;
    let (slices, reservations) = (entry.held().len(), entry.reservations().len());
    Some(wire::Host {
        host: h.name.to_string(),
        state: state.into(),
        scheduling: scheduling_state(h.scheduling, slices == 0 && reservations == 0).into(),
        emcs: h.emcs.iter().filter_map(|id| Some(ledger.emc(*id)?.emc.name.to_string())).collect(),
        cores: h.cores,
        free_cores: entry.cores_free(),
        local_bytes: h.local.get(),
        free_local_bytes: entry.local_free().get(),
        slices: saturate_to_u32(slices),
        reservations: saturate_to_u32(reservations),
        boot_id: h.boot_id.clone(),
        last_heartbeat_unix_ms: last_report.map(|at| at.0),
        host_memory_socket: hello.map(|hello| hello.host_memory_socket.clone()).unwrap_or_default(),
        fence_error: manager.fence_obstacle(id).map(str::to_owned),
    })
}

fn saturate_to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Converts an EMC with its state and its free slices. Returns `None` if the EMC does not exist.
pub fn emc_message(manager: &Manager, id: EmcId) -> Option<wire::Emc> {
    let entry = manager.durable().emc(id)?;
    let (state, error) = match manager.emc_state(id) {
        EmcState::Starting => (wire::EmcState::Starting, String::new()),
        EmcState::Up => (wire::EmcState::Up, String::new()),
        EmcState::Failed(error) => (wire::EmcState::Failed, error),
    };
    let e = &entry.emc;
    Some(wire::Emc {
        emc: e.name.to_string(),
        state: state.into(),
        scheduling: scheduling_state(e.scheduling, entry.free() == e.slices).into(),
        driver: e.driver.clone(),
        path: e.path.clone(),
        first_slice: e.first.0,
        slices: e.slices,
        free: entry.free(),
        in_use: e.slices - entry.free() - entry.draining() - entry.quarantined(),
        draining: entry.draining(),
        quarantined: entry.quarantined(),
        error,
        serial: e.serial.clone(),
    })
}

/// Converts all EMCs of the rack.
pub fn emc_messages(manager: &Manager) -> Vec<wire::Emc> {
    manager.durable().emcs().filter_map(|(id, _)| emc_message(manager, id)).collect()
}

/// Free capacity of the rack at one revision of the ledger. Hosts refer to EMCs by ID, so that
/// copying under the ledger's lock is fast.
#[derive(Clone, Debug)]
pub struct CapacityView {
    revision: u64,
    emcs: BTreeMap<EmcId, EmcView>,
    hosts: Vec<HostView>,
}

#[derive(Clone, Debug)]
struct EmcView {
    name: Name,
    free_slices: u32,
    slices: u32,
}

#[derive(Clone, Debug)]
struct HostView {
    name: Name,
    schedulable: bool,
    free_cores: u32,
    free_local: Bytes,
    emcs: Vec<EmcId>,
}

/// Copies the free capacity of all hosts and EMCs from the ledger.
pub fn capacity(manager: &Manager) -> CapacityView {
    let ledger = manager.durable();
    let emc = |entry: &EmcEntry| EmcView {
        name: entry.emc.name.clone(),
        free_slices: if entry.up && entry.emc.scheduling == Scheduling::Enabled { entry.free() } else { 0 },
        slices: entry.emc.slices,
    };
    CapacityView {
        revision: ledger.meta().revision.0,
        emcs: ledger.emcs().map(|(id, entry)| (id, emc(entry))).collect(),
        hosts: ledger.hosts().map(|(id, entry)| host_view(entry, manager.is_schedulable(id))).collect(),
    }
}

fn host_view(entry: &HostEntry, schedulable: bool) -> HostView {
    HostView {
        name: entry.host.name.clone(),
        schedulable,
        free_cores: entry.cores_free(),
        free_local: entry.local_free(),
        emcs: entry.host.emcs.clone(),
    }
}

impl From<&EmcView> for wire::EmcCapacity {
    fn from(emc: &EmcView) -> Self {
        Self { emc: emc.name.to_string(), free_slices: emc.free_slices, slices: emc.slices }
    }
}

impl From<CapacityView> for wire::Capacity {
    fn from(view: CapacityView) -> Self {
        let hosts = view.hosts.into_iter().map(|host| wire::HostCapacity {
            host: host.name.to_string(),
            schedulable: host.schedulable,
            free_cores: host.free_cores,
            free_local_bytes: host.free_local.get(),
            emcs: host.emcs.iter().filter_map(|id| view.emcs.get(id)).map(Into::into).collect(),
        });
        Self {
            revision: view.revision,
            hosts: hosts.collect(),
            emcs: view.emcs.values().map(Into::into).collect(),
        }
    }
}

/// Migration requests, and the free capacity of the hosts to which VMs can migrate.
#[derive(Clone, Debug, Default)]
pub struct MigrationList {
    requests: Vec<MigrationView>,
    /// Hosts that accept reservations; empty if no request is because of a slowdown.
    hosts: Vec<HostView>,
}

/// Migration request, with values derived from the ledger.
#[derive(Clone, Debug)]
struct MigrationView {
    message: wire::Migration,
    /// Memory and cores of the whole VM.
    memory: Bytes,
    cores: u32,
}

/// Copies migration requests from the ledger.
pub fn migration_list<'a>(
    manager: &Manager,
    requests: impl Iterator<Item = (ReservationId, &'a Migration)>,
) -> MigrationList {
    let ledger = manager.durable();
    let requests: Vec<_> = requests.map(|(id, migration)| migration_view(ledger, id, migration)).collect();
    let needs_hosts = requests.iter().any(|request| request.message.slowdown.is_some());
    let hosts = ledger.hosts().filter(|(id, _)| needs_hosts && manager.is_schedulable(*id));
    MigrationList { hosts: hosts.map(|(_, entry)| host_view(entry, true)).collect(), requests }
}

impl From<MigrationList> for Vec<wire::Migration> {
    fn from(MigrationList { requests, hosts }: MigrationList) -> Self {
        let messages = requests.into_iter().map(|MigrationView { mut message, memory, cores }| {
            if let Some(slowdown) = &mut message.slowdown {
                let fits = |host: &&HostView| host.free_local >= memory && host.free_cores >= cores;
                let names = hosts.iter().filter(fits).map(|host| host.name.to_string());
                slowdown.hosts = names.take(MIGRATION_HOSTS_MAX).collect();
            }
            message
        });
        messages.collect()
    }
}

fn migration_view(ledger: &Ledger, id: ReservationId, migration: &Migration) -> MigrationView {
    let reservation = ledger.reservation(id);
    let pool = reservation.map_or(Bytes::ZERO, Reservation::pool);
    let can_rehome = reservation.is_some_and(|reservation| ledger.check_rehome(reservation).is_ok());
    let slowdown = migration.slowdown.map(|slowdown| wire::Slowdown {
        loss: slowdown.estimate.loss,
        severity: slowdown.estimate.severity,
        samples: slowdown.estimate.samples,
        needed_local_bytes: pool.get(),
        hosts: Vec::new(),
        can_rehome,
    });
    MigrationView {
        message: wire::Migration { slowdown, ..migration_message(ledger, id, migration) },
        memory: [reservation.map_or(Bytes::ZERO, |reservation| reservation.local), pool].into_iter().sum(),
        cores: reservation.map_or(0, |reservation| reservation.cores),
    }
}

/// Converts a request to migrate a VM, without evidence.
fn migration_message(ledger: &Ledger, id: ReservationId, m: &Migration) -> wire::Migration {
    let state = match m.answer {
        MigrationAnswer::Open => wire::MigrationState::Open,
        MigrationAnswer::Accepted => wire::MigrationState::Accepted,
        MigrationAnswer::Declined => wire::MigrationState::Declined,
        MigrationAnswer::Done => wire::MigrationState::Done,
    };
    wire::Migration {
        vm: m.vm.to_string(),
        host: host_name(ledger, m.host),
        state: state.into(),
        reason: m.why.clone(),
        requested_unix_ms: m.requested_at.0,
        answer: m.explanation.clone(),
        reservation: id.to_string(),
        id: m.id.to_string(),
        kind: match m.kind() {
            MigrationKind::Drain => wire::MigrationKind::Drain,
            MigrationKind::Slowdown => wire::MigrationKind::Slowdown,
        }
        .into(),
        slowdown: None,
    }
}

/// Converts an active alarm.
pub fn alarm_message(a: Alarm) -> wire::Alarm {
    wire::Alarm {
        reason: a.reason.into(),
        subject: a.subject.to_string(),
        message: a.message,
        since_unix_ms: a.since.0,
    }
}

/// Converts a durable change into events for watchers. Each event contains the current state of a
/// changed object, which can be newer than the change.
pub fn event_messages(manager: &Manager, when: When, chunk: &WriteChunk) -> Vec<wire::Event> {
    use wire::event::Change;
    let ledger = manager.durable();
    let changes = chunk.records().iter().filter_map(|record| match record.key() {
        Key::Slice(id) => {
            Some(Change::Slice(slice_message(ledger, id, ledger.emc_of(id)?, ledger.slot(id)?)))
        }
        Key::Reservation(id) => Some(Change::Reservation(reservation_message(ledger.view(id)?))),
        Key::Host(id) => Some(Change::Host(host_message(manager, id)?)),
        Key::Emc(id) => Some(Change::Emc(emc_message(manager, id)?)),
        Key::Meta | Key::Migration(_) | Key::Decision(_) => None,
    });
    let events = changes.map(|change| wire::Event {
        revision: chunk.revision().0,
        at_unix_ms: chunk.when().wall.0.min(when.wall.0),
        change: Some(change),
    });
    events.collect()
}
