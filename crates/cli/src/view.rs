//! Structs that are serialized as JSON or YAML, one per resource, converted from protobuf messages.
//! Scripts depend on the field names. `table.rs` formats the same structs as tables.

use std::collections::BTreeMap;

use proto::v1;
use serde::Serialize;

/// Slice as printed by `tarn get slices`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Slice {
    pub(crate) slice: u32,
    pub(crate) emc: String,
    pub(crate) state: String,
    pub(crate) host: Option<String>,
    pub(crate) vm: Option<String>,
    pub(crate) epoch: u64,
}

/// Slice as printed by `tarn describe slice`, with its last scrub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct SliceDetail {
    #[serde(flatten)]
    pub(crate) slice: Slice,
    pub(crate) reason: Option<String>,
    pub(crate) receipt: Option<Receipt>,
}

/// Receipt of the last scrub of a slice, as part of [`SliceDetail`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Receipt {
    pub(crate) scrubber: String,
    pub(crate) epoch: u64,
    pub(crate) started_unix_ms: u64,
    pub(crate) ended_unix_ms: u64,
    pub(crate) bytes_verified: u64,
}

/// Reservation as printed by `tarn get reservations`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Reservation {
    pub(crate) reservation: String,
    pub(crate) vm: String,
    pub(crate) host: String,
    pub(crate) state: String,
    pub(crate) slices: Vec<u32>,
    pub(crate) slices_online: u32,
    pub(crate) local_bytes: u64,
    pub(crate) pool_bytes: u64,
    pub(crate) cores: u32,
    pub(crate) pinned: bool,
    pub(crate) uid: Option<u32>,
    pub(crate) process_running: bool,
    pub(crate) request_id: String,
    pub(crate) created_unix_ms: u64,
    pub(crate) commit_deadline_unix_ms: Option<u64>,
    pub(crate) reason: Option<String>,
    pub(crate) rehome: Option<Rehome>,
}

/// Move of a VM's pool memory to local memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Rehome {
    /// "copying", "done" or "failed".
    pub(crate) state: String,
    pub(crate) attempt: u32,
    pub(crate) reason: Option<String>,
    pub(crate) bytes: u64,
}

/// Result of `tarn reserve --validate-only`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ValidationResult {
    pub(crate) valid: bool,
    pub(crate) vm: String,
    pub(crate) host: String,
    pub(crate) would_take_slices: Vec<u32>,
    pub(crate) local_bytes: u64,
    pub(crate) pool_bytes: u64,
    pub(crate) cores: u32,
    pub(crate) pinned: bool,
}

impl From<v1::Reservation> for ValidationResult {
    fn from(r: v1::Reservation) -> Self {
        Self {
            valid: true,
            vm: r.vm,
            host: r.host,
            would_take_slices: r.slices,
            local_bytes: r.local_bytes,
            pool_bytes: r.pool_bytes,
            cores: r.cores,
            pinned: r.pinned,
        }
    }
}

/// Host as printed by `tarn get hosts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Host {
    pub(crate) host: String,
    pub(crate) state: String,
    pub(crate) scheduling: String,
    pub(crate) emcs: Vec<String>,
    pub(crate) cores: u32,
    pub(crate) free_cores: u32,
    pub(crate) local_bytes: u64,
    pub(crate) free_local_bytes: u64,
    pub(crate) slices: u32,
    pub(crate) reservations: u32,
    pub(crate) boot_id: Option<String>,
    pub(crate) last_heartbeat_unix_ms: Option<u64>,
    pub(crate) host_memory_socket: Option<String>,
    pub(crate) fence_error: Option<String>,
}

/// EMC (pool device) as printed by `tarn get emcs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Emc {
    pub(crate) emc: String,
    pub(crate) state: String,
    pub(crate) scheduling: String,
    pub(crate) driver: String,
    pub(crate) path: Option<String>,
    pub(crate) first_slice: u32,
    pub(crate) slices: u32,
    pub(crate) free: u32,
    pub(crate) in_use: u32,
    pub(crate) draining: u32,
    pub(crate) quarantined: u32,
    pub(crate) error: Option<String>,
    pub(crate) serial: Option<String>,
}

/// Alarm as printed by `tarn get alarms`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Alarm {
    pub(crate) reason: String,
    pub(crate) subject: String,
    pub(crate) message: String,
    pub(crate) since_unix_ms: u64,
}

/// Summary of the rack as printed by `tarn get rack`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Rack {
    pub(crate) rack_uuid: String,
    pub(crate) version: String,
    pub(crate) generation: u64,
    pub(crate) revision: u64,
    pub(crate) slices: u32,
    pub(crate) slices_free: u32,
    pub(crate) buffer_target: u32,
    pub(crate) started_unix_ms: u64,
    pub(crate) alarms: Vec<Alarm>,
}

/// Decision from the manager's audit log as printed by `tarn explain`, with its inputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Decision {
    pub(crate) seq: u64,
    pub(crate) at_unix_ms: u64,
    pub(crate) actor: String,
    pub(crate) action: String,
    pub(crate) subject: String,
    pub(crate) reason: String,
    pub(crate) model: Option<String>,
    pub(crate) facts: BTreeMap<String, String>,
    pub(crate) alternatives: Vec<String>,
}

/// Plan as printed by `tarn plan-vm`: split of a VM's memory, and the fit of each host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Plan {
    pub(crate) local_bytes: u64,
    pub(crate) pool_bytes: u64,
    pub(crate) hosts: Vec<HostFit>,
    pub(crate) decision: Option<Decision>,
}

/// Result of checking one host for a VM, as part of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostFit {
    pub(crate) host: String,
    pub(crate) fits: bool,
    pub(crate) free_cores: u32,
    pub(crate) free_local_bytes: u64,
    pub(crate) emc: Option<String>,
    pub(crate) reason: Option<String>,
}

/// Free capacity as printed by `tarn watch capacity`, at one revision of the ledger.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Capacity {
    pub(crate) revision: u64,
    pub(crate) hosts: Vec<HostCapacity>,
    pub(crate) emcs: Vec<EmcCapacity>,
}

/// Free capacity of one host, as part of [`Capacity`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct HostCapacity {
    pub(crate) host: String,
    pub(crate) schedulable: bool,
    pub(crate) free_cores: u32,
    pub(crate) free_local_bytes: u64,
    pub(crate) emcs: Vec<EmcCapacity>,
}

/// Free capacity of one EMC, as part of [`Capacity`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct EmcCapacity {
    pub(crate) emc: String,
    pub(crate) free_slices: u32,
    pub(crate) slices: u32,
}

/// Manager as printed by `tarn get managers`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Manager {
    pub(crate) name: String,
    /// "leader" or "standby".
    pub(crate) role: &'static str,
    pub(crate) address: String,
    pub(crate) version: String,
    pub(crate) started_unix_ms: u64,
}

impl From<v1::Manager> for Manager {
    fn from(manager: v1::Manager) -> Self {
        Self {
            name: manager.name,
            role: if manager.is_leader { "leader" } else { "standby" },
            address: manager.address,
            version: manager.version,
            started_unix_ms: manager.started_unix_ms,
        }
    }
}

/// Migration request as printed by `tarn get migrations`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Migration {
    pub(crate) vm: String,
    pub(crate) reservation: String,
    pub(crate) host: String,
    pub(crate) state: String,
    pub(crate) reason: String,
    pub(crate) requested_unix_ms: u64,
    pub(crate) answer: Option<String>,
    pub(crate) id: String,
    pub(crate) kind: String,
    /// Evidence and remedies of a request because of a slowdown.
    pub(crate) slowdown: Option<Slowdown>,
}

/// Evidence and remedies of a migration request because of a slowdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Slowdown {
    pub(crate) loss: Option<f64>,
    pub(crate) severity: f64,
    pub(crate) samples: u32,
    pub(crate) needed_local_bytes: u64,
    pub(crate) hosts: Vec<String>,
    pub(crate) can_rehome: bool,
}

/// VM with pool memory as printed by `tarn get vms`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Vm {
    pub(crate) vm: String,
    pub(crate) host: String,
    pub(crate) reservation: String,
    pub(crate) local_bytes: u64,
    pub(crate) pool_bytes: u64,
    /// "fine", "watch", "migrate", or "unknown" if the VM was not sampled or not observed.
    pub(crate) verdict: String,
    pub(crate) reason: Option<String>,
    pub(crate) loss: Option<f64>,
    pub(crate) accessed_share: Option<f64>,
    pub(crate) accessed_share_low: Option<f64>,
    pub(crate) accessed_share_high: Option<f64>,
    pub(crate) access_source: Option<String>,
    pub(crate) access_problem: Option<String>,
    pub(crate) counter_source: Option<String>,
    pub(crate) counter_problem: Option<String>,
    pub(crate) loss_model: Option<String>,
    pub(crate) samples: u32,
    pub(crate) steal_share: Option<f64>,
    pub(crate) memory_stalled_some: Option<f64>,
    pub(crate) memory_stalled_full: Option<f64>,
    pub(crate) major_faults_per_s: Option<f64>,
    pub(crate) sampled_unix_ms: Option<u64>,
}

/// Change of a resource as printed by `tarn watch`, such as `{revision, at_unix_ms, slice: {...}}`.
/// The last key is the kind of resource.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Event {
    pub(crate) revision: u64,
    pub(crate) at_unix_ms: u64,
    #[serde(flatten)]
    pub(crate) change: Change,
}

/// Resource that changed, with its new state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Slice(SliceDetail),
    Reservation(Reservation),
    Host(Host),
    Emc(Emc),
    Alarm(Alarm),
    /// Events were dropped because the watcher was too slow.
    EventsDropped {
        /// Number of dropped batches of up to 64 events.
        batches: u64,
    },
    /// Event of a kind that this version of `tarn` does not support.
    Other {},
}

/// Result of `tarn cordon`, `uncordon`, `drain` or `fence`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct TargetResult {
    pub(crate) revision: u64,
    pub(crate) waiting_for: Vec<String>,
}

/// Converts an empty string, which represents an absent value in protobuf messages, to `None`.
pub(crate) fn non_empty(text: String) -> Option<String> {
    if text.is_empty() { None } else { Some(text) }
}

/// Returns the name of an enum value in lower case and without its prefix, such as "free" for
/// `SLICE_STATE_FREE`. Returns `number-N` for an unknown value N, which a newer manager may send.
pub(crate) fn enum_name<E: TryFrom<i32>>(
    number: i32,
    prefix: &str,
    name: impl Fn(&E) -> &'static str,
) -> String {
    match E::try_from(number) {
        Ok(known) => name(&known).trim_start_matches(prefix).to_lowercase(),
        Err(_) => format!("number-{number}"),
    }
}

fn scheduling_name(number: i32) -> String {
    enum_name(number, "SCHEDULING_", v1::Scheduling::as_str_name)
}

fn convert_all<A, B: From<A>>(items: Vec<A>) -> Vec<B> {
    items.into_iter().map(B::from).collect()
}

impl From<v1::Slice> for Slice {
    fn from(s: v1::Slice) -> Self {
        let state = enum_name(s.state, "SLICE_STATE_", v1::SliceState::as_str_name);
        Self { slice: s.slice, emc: s.emc, state, host: s.host, vm: s.vm, epoch: s.epoch }
    }
}

impl From<v1::Slice> for SliceDetail {
    fn from(mut s: v1::Slice) -> Self {
        let (reason, receipt) = (s.reason.take(), s.receipt.take());
        Self { slice: s.into(), reason, receipt: receipt.map(Receipt::from) }
    }
}

impl From<v1::ScrubReceipt> for Receipt {
    fn from(r: v1::ScrubReceipt) -> Self {
        Self {
            scrubber: r.scrubber,
            epoch: r.epoch,
            started_unix_ms: r.started_unix_ms,
            ended_unix_ms: r.ended_unix_ms,
            bytes_verified: r.bytes_verified,
        }
    }
}

impl From<v1::Reservation> for Reservation {
    fn from(r: v1::Reservation) -> Self {
        Self {
            state: enum_name(r.state, "RESERVATION_STATE_", v1::ReservationState::as_str_name),
            reservation: r.reservation,
            vm: r.vm,
            host: r.host,
            slices: r.slices,
            slices_online: r.slices_online,
            local_bytes: r.local_bytes,
            pool_bytes: r.pool_bytes,
            cores: r.cores,
            pinned: r.pinned,
            uid: r.uid,
            process_running: r.process_running,
            request_id: r.request_id,
            created_unix_ms: r.created_unix_ms,
            commit_deadline_unix_ms: r.commit_deadline_unix_ms,
            reason: r.reason,
            rehome: r.rehome.map(Rehome::from),
        }
    }
}

impl From<v1::Rehome> for Rehome {
    fn from(r: v1::Rehome) -> Self {
        Self {
            state: enum_name(r.state, "REHOME_STATE_", v1::RehomeState::as_str_name),
            attempt: r.attempt,
            reason: non_empty(r.reason),
            bytes: r.bytes,
        }
    }
}

impl From<v1::Host> for Host {
    fn from(h: v1::Host) -> Self {
        Self {
            state: enum_name(h.state, "HOST_STATE_", v1::HostState::as_str_name),
            scheduling: scheduling_name(h.scheduling),
            host: h.host,
            emcs: h.emcs,
            cores: h.cores,
            free_cores: h.free_cores,
            local_bytes: h.local_bytes,
            free_local_bytes: h.free_local_bytes,
            slices: h.slices,
            reservations: h.reservations,
            boot_id: non_empty(h.boot_id),
            last_heartbeat_unix_ms: h.last_heartbeat_unix_ms,
            host_memory_socket: non_empty(h.host_memory_socket),
            fence_error: h.fence_error,
        }
    }
}

impl From<v1::Emc> for Emc {
    fn from(e: v1::Emc) -> Self {
        Self {
            state: enum_name(e.state, "EMC_STATE_", v1::EmcState::as_str_name),
            scheduling: scheduling_name(e.scheduling),
            emc: e.emc,
            driver: e.driver,
            path: non_empty(e.path),
            first_slice: e.first_slice,
            slices: e.slices,
            free: e.free,
            in_use: e.in_use,
            draining: e.draining,
            quarantined: e.quarantined,
            error: non_empty(e.error),
            serial: e.serial,
        }
    }
}

impl From<v1::Alarm> for Alarm {
    fn from(a: v1::Alarm) -> Self {
        Self { reason: a.reason, subject: a.subject, message: a.message, since_unix_ms: a.since_unix_ms }
    }
}

impl From<v1::Rack> for Rack {
    fn from(r: v1::Rack) -> Self {
        Self {
            rack_uuid: r.rack_uuid,
            version: r.version,
            generation: r.generation,
            revision: r.revision,
            slices: r.slices,
            slices_free: r.slices_free,
            buffer_target: r.buffer_target,
            started_unix_ms: r.started_unix_ms,
            alarms: convert_all(r.alarms),
        }
    }
}

impl From<v1::Decision> for Decision {
    fn from(d: v1::Decision) -> Self {
        Self {
            seq: d.seq,
            at_unix_ms: d.at_unix_ms,
            actor: d.actor,
            action: d.action,
            subject: d.subject,
            reason: d.reason,
            model: non_empty(d.model),
            facts: d.facts.into_iter().collect(),
            alternatives: d.alternatives,
        }
    }
}

impl From<v1::PlanVmResponse> for Plan {
    fn from(p: v1::PlanVmResponse) -> Self {
        let decision = p.decision.map(Decision::from);
        Self { local_bytes: p.local_bytes, pool_bytes: p.pool_bytes, hosts: convert_all(p.hosts), decision }
    }
}

impl From<v1::HostFit> for HostFit {
    fn from(f: v1::HostFit) -> Self {
        Self {
            host: f.host,
            fits: f.fits,
            free_cores: f.free_cores,
            free_local_bytes: f.free_local_bytes,
            emc: non_empty(f.emc),
            reason: non_empty(f.reason),
        }
    }
}

impl From<v1::Capacity> for Capacity {
    fn from(c: v1::Capacity) -> Self {
        Self { revision: c.revision, hosts: convert_all(c.hosts), emcs: convert_all(c.emcs) }
    }
}

impl From<v1::HostCapacity> for HostCapacity {
    fn from(h: v1::HostCapacity) -> Self {
        Self {
            host: h.host,
            schedulable: h.schedulable,
            free_cores: h.free_cores,
            free_local_bytes: h.free_local_bytes,
            emcs: convert_all(h.emcs),
        }
    }
}

impl From<v1::EmcCapacity> for EmcCapacity {
    fn from(e: v1::EmcCapacity) -> Self {
        Self { emc: e.emc, free_slices: e.free_slices, slices: e.slices }
    }
}

impl From<v1::Migration> for Migration {
    fn from(m: v1::Migration) -> Self {
        let state = enum_name(m.state, "MIGRATION_STATE_", v1::MigrationState::as_str_name);
        Self {
            vm: m.vm,
            reservation: m.reservation,
            host: m.host,
            state,
            reason: m.reason,
            requested_unix_ms: m.requested_unix_ms,
            answer: non_empty(m.answer),
            id: m.id,
            kind: enum_name(m.kind, "MIGRATION_KIND_", v1::MigrationKind::as_str_name),
            slowdown: m.slowdown.map(Slowdown::from),
        }
    }
}

impl From<v1::Slowdown> for Slowdown {
    fn from(s: v1::Slowdown) -> Self {
        let v1::Slowdown { loss, severity, samples, needed_local_bytes, hosts, can_rehome } = s;
        Self { loss, severity, samples, needed_local_bytes, hosts, can_rehome }
    }
}

impl From<v1::Reservation> for Vm {
    fn from(r: v1::Reservation) -> Self {
        let m = r.monitoring;
        let verdict = m
            .as_ref()
            .map(|m| enum_name(m.verdict, "MONITORING_VERDICT_", v1::MonitoringVerdict::as_str_name));
        let m = m.unwrap_or_default();
        Self {
            vm: r.vm,
            host: r.host,
            reservation: r.reservation,
            local_bytes: r.local_bytes,
            pool_bytes: r.pool_bytes,
            verdict: verdict.filter(|verdict| verdict != "unspecified").unwrap_or_else(|| "unknown".into()),
            reason: non_empty(m.reason),
            loss: m.loss,
            accessed_share: m.accessed_share,
            accessed_share_low: m.accessed_share_low,
            accessed_share_high: m.accessed_share_high,
            access_source: non_empty(m.access_source),
            access_problem: non_empty(m.access_problem),
            counter_source: non_empty(m.counter_source),
            counter_problem: non_empty(m.counter_problem),
            loss_model: non_empty(m.loss_model),
            samples: m.samples,
            steal_share: m.steal_share,
            memory_stalled_some: m.memory_stalled_some,
            memory_stalled_full: m.memory_stalled_full,
            major_faults_per_s: m.major_faults_per_s,
            sampled_unix_ms: Some(m.sampled_unix_ms).filter(|at| *at > 0),
        }
    }
}

impl From<v1::Event> for Event {
    fn from(e: v1::Event) -> Self {
        use v1::event::Change as W;
        let change = match e.change {
            Some(W::Slice(s)) => Change::Slice(s.into()),
            Some(W::Reservation(r)) => Change::Reservation(r.into()),
            Some(W::Host(h)) => Change::Host(h.into()),
            Some(W::Emc(c)) => Change::Emc(c.into()),
            Some(W::Alarm(a)) => Change::Alarm(a.into()),
            Some(W::EventsDropped(m)) => Change::EventsDropped { batches: m.batches },
            None => Change::Other {},
        };
        Self { revision: e.revision, at_unix_ms: e.at_unix_ms, change }
    }
}

impl From<v1::TargetResponse> for TargetResult {
    fn from(t: v1::TargetResponse) -> Self {
        Self { revision: t.revision, waiting_for: t.waiting_for }
    }
}
