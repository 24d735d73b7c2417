//! Table columns of each resource, and text formats of other results.

use cli_runtime::table::SizeUnit;
pub(crate) use cli_runtime::table::{Column, Row, col, details, format_timestamp, percent, rows, size, wide};

use crate::view::{
    Alarm, Decision, Emc, Host, HostCapacity, HostFit, Manager, Migration, Plan, Rack, Rehome, Reservation,
    Slice, SliceDetail, TargetResult, ValidationResult, Vm,
};

/// Formats a size in MiB, because sizes of tenants are rarely whole GiB.
pub(crate) fn mib(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}

/// Formats a text that may be missing.
pub(crate) fn text_or_dash(text: Option<&String>) -> String {
    text.cloned().unwrap_or_else(|| "-".to_owned())
}

fn timestamp_or_dash(unix_ms: Option<u64>) -> String {
    unix_ms.map_or_else(|| "-".to_owned(), format_timestamp)
}

fn join_or_dash(texts: &[String]) -> String {
    if texts.is_empty() { "-".to_owned() } else { texts.join(",") }
}

fn yes_or_no(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

/// Formats slice numbers as ranges, such as `0-3,7`.
pub(crate) fn format_ranges(numbers: &[u32]) -> String {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    let runs = sorted.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let text = runs.map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    join_or_dash(&text.collect::<Vec<_>>())
}

/// Formats the result of `tarn reserve --validate-only`.
pub(crate) fn format_validated(v: &ValidationResult) -> String {
    format!(
        "valid, nothing reserved: vm {} on host {} would get {} of pool memory (slices {}), {} of local memory and {} cores\n",
        v.vm,
        v.host,
        size(v.pool_bytes),
        format_ranges(&v.would_take_slices),
        size(v.local_bytes),
        v.cores
    )
}

impl Row for Slice {
    const COLUMNS: &'static [Column<Self>] = &[
        col("SLICE", |s| s.slice.to_string()),
        col("EMC", |s| s.emc.clone()),
        col("STATE", |s| s.state.clone()),
        col("HOST", |s| text_or_dash(s.host.as_ref())),
        col("VM", |s| text_or_dash(s.vm.as_ref())),
        wide("EPOCH", |s| s.epoch.to_string()),
    ];
}

impl Row for SliceDetail {
    const COLUMNS: &'static [Column<Self>] = &[
        col("SLICE", |s| s.slice.slice.to_string()),
        col("EMC", |s| s.slice.emc.clone()),
        col("STATE", |s| s.slice.state.clone()),
        col("HOST", |s| text_or_dash(s.slice.host.as_ref())),
        col("VM", |s| text_or_dash(s.slice.vm.as_ref())),
        col("EPOCH", |s| s.slice.epoch.to_string()),
        wide("REASON", |s| text_or_dash(s.reason.as_ref())),
        wide("LAST SCRUB", format_last_scrub),
    ];
}

fn format_last_scrub(s: &SliceDetail) -> String {
    s.receipt.as_ref().map_or_else(
        || "-".to_owned(),
        |r| {
            format!(
                "{} by {}, epoch {}, {} verified",
                format_timestamp(r.ended_unix_ms),
                r.scrubber,
                r.epoch,
                size(r.bytes_verified)
            )
        },
    )
}

impl Row for Reservation {
    const COLUMNS: &'static [Column<Self>] = &[
        col("RESERVATION", |r| r.reservation.clone()),
        col("VM", |r| r.vm.clone()),
        col("HOST", |r| r.host.clone()),
        col("STATE", reservation_state),
        col("ONLINE", |r| format!("{}/{}", r.slices_online, r.slices.len())),
        col("LOCAL", |r| size(r.local_bytes)),
        col("POOL", |r| size(r.pool_bytes)),
        wide("CORES", |r| r.cores.to_string()),
        wide("PINNED", |r| yes_or_no(r.pinned)),
        wide("UID", |r| r.uid.map_or_else(|| "-".to_owned(), |uid| uid.to_string())),
        wide("PROCESS", |r| if r.process_running { "running" } else { "-" }.to_owned()),
        wide("REHOME", |r| r.rehome.as_ref().map_or_else(|| "-".to_owned(), format_rehome)),
        wide("SLICES", |r| format_ranges(&r.slices)),
        wide("CREATED", |r| format_timestamp(r.created_unix_ms)),
        wide("COMMIT BY", |r| timestamp_or_dash(r.commit_deadline_unix_ms)),
        wide("REQUEST ID", |r| r.request_id.clone()),
        wide("REASON", |r| text_or_dash(r.reason.as_ref())),
    ];
}

fn format_rehome(rehome: &Rehome) -> String {
    rehome
        .reason
        .as_ref()
        .map_or_else(|| rehome.state.clone(), |reason| format!("{}: {reason}", rehome.state))
}

/// Returns the state of a reservation. Appends "running" to a released reservation if the VM's
/// process still runs.
fn reservation_state(r: &Reservation) -> String {
    if r.state == "released" && r.process_running { "released, running".to_owned() } else { r.state.clone() }
}

impl Row for Host {
    const COLUMNS: &'static [Column<Self>] = &[
        col("HOST", |h| h.host.clone()),
        col("STATE", |h| h.state.clone()),
        col("SCHEDULING", |h| h.scheduling.clone()),
        col("CORES", |h| format!("{}/{}", h.free_cores, h.cores)),
        col("LOCAL", |h| format!("{}/{}", size(h.free_local_bytes), size(h.local_bytes))),
        col("SLICES", |h| h.slices.to_string()),
        col("VMS", |h| h.reservations.to_string()),
        wide("EMCS", |h| join_or_dash(&h.emcs)),
        wide("LAST HEARTBEAT", |h| timestamp_or_dash(h.last_heartbeat_unix_ms)),
        wide("BOOT ID", |h| text_or_dash(h.boot_id.as_ref())),
        wide("SOCKET", |h| text_or_dash(h.host_memory_socket.as_ref())),
        wide("FENCE ERROR", |h| text_or_dash(h.fence_error.as_ref())),
    ];
}

impl Row for Emc {
    const COLUMNS: &'static [Column<Self>] = &[
        col("EMC", |e| e.emc.clone()),
        col("STATE", |e| e.state.clone()),
        col("SCHEDULING", |e| e.scheduling.clone()),
        col("SLICES", |e| e.slices.to_string()),
        col("FREE", |e| e.free.to_string()),
        col("IN USE", |e| e.in_use.to_string()),
        col("DRAINING", |e| e.draining.to_string()),
        col("QUARANTINED", |e| e.quarantined.to_string()),
        wide("FIRST", |e| e.first_slice.to_string()),
        wide("DRIVER", |e| e.driver.clone()),
        wide("PATH", |e| text_or_dash(e.path.as_ref())),
        wide("SERIAL", |e| text_or_dash(e.serial.as_ref())),
        wide("ERROR", |e| text_or_dash(e.error.as_ref())),
    ];
}

impl Row for Alarm {
    const COLUMNS: &'static [Column<Self>] = &[
        col("SINCE", |a| timestamp_or_dash(Some(a.since_unix_ms).filter(|since| *since > 0))),
        col("REASON", |a| a.reason.clone()),
        col("SUBJECT", |a| a.subject.clone()),
        col("MESSAGE", |a| a.message.clone()),
    ];
}

impl Row for Rack {
    const COLUMNS: &'static [Column<Self>] = &[
        col("RACK", |r| r.rack_uuid.clone()),
        col("VERSION", |r| r.version.clone()),
        col("SLICES", |r| r.slices.to_string()),
        col("FREE", |r| r.slices_free.to_string()),
        col("BUFFER", |r| r.buffer_target.to_string()),
        col("ALARMS", |r| r.alarms.len().to_string()),
        wide("REVISION", |r| format!("{}.{}", r.generation, r.revision)),
        wide("STARTED", |r| format_timestamp(r.started_unix_ms)),
    ];
}

/// Row of one host in the table of a plan. All sizes in the table have the same unit.
struct HostFitRow {
    fit: HostFit,
    free_local: String,
}

impl Row for HostFitRow {
    const COLUMNS: &'static [Column<Self>] = &[
        col("HOST", |r| r.fit.host.clone()),
        col("FITS", |r| yes_or_no(r.fit.fits)),
        col("FREE CORES", |r| r.fit.free_cores.to_string()),
        col("FREE LOCAL", |r| r.free_local.clone()),
        col("EMC", |r| text_or_dash(r.fit.emc.as_ref())),
        col("REASON", |r| text_or_dash(r.fit.reason.as_ref())),
    ];
}

impl Row for HostCapacity {
    const COLUMNS: &'static [Column<Self>] = &[
        col("HOST", |h| h.host.clone()),
        col("SCHEDULABLE", |h| yes_or_no(h.schedulable)),
        col("FREE CORES", |h| h.free_cores.to_string()),
        col("FREE LOCAL", |h| size(h.free_local_bytes)),
        col("FREE SLICES", format_free_slices),
    ];
}

fn format_free_slices(host: &HostCapacity) -> String {
    join_or_dash(&host.emcs.iter().map(|e| format!("{}:{}", e.emc, e.free_slices)).collect::<Vec<_>>())
}

impl Row for Manager {
    const COLUMNS: &'static [Column<Self>] = &[
        col("NAME", |m| m.name.clone()),
        col("ROLE", |m| m.role.to_owned()),
        col("ADDRESS", |m| m.address.clone()),
        col("VERSION", |m| m.version.clone()),
        col("STARTED", |m| format_timestamp(m.started_unix_ms)),
    ];
}

impl Row for Migration {
    const COLUMNS: &'static [Column<Self>] = &[
        col("ID", |m| m.id.clone()),
        col("REQUESTED", |m| format_timestamp(m.requested_unix_ms)),
        col("VM", |m| m.vm.clone()),
        col("HOST", |m| m.host.clone()),
        col("KIND", |m| m.kind.clone()),
        col("STATE", |m| m.state.clone()),
        col("REASON", |m| m.reason.clone()),
        wide("RESOLUTION REASON", |m| text_or_dash(m.answer.as_ref())),
        wide("RESERVATION", |m| m.reservation.clone()),
        wide("NEEDED LOCAL", |m| optional(m.slowdown.as_ref(), |s| size(s.needed_local_bytes))),
        wide("REHOME", |m| optional(m.slowdown.as_ref(), |s| yes_or_no(s.can_rehome))),
        wide("HOSTS", |m| join_or_dash(m.slowdown.as_ref().map_or(&[], |s| s.hosts.as_slice()))),
    ];
}

impl Row for Vm {
    const COLUMNS: &'static [Column<Self>] = &[
        col("VM", |v| v.vm.clone()),
        col("HOST", |v| v.host.clone()),
        col("POOL", |v| size(v.pool_bytes)),
        col("VERDICT", |v| v.verdict.clone()),
        col("LOSS", |v| optional(v.loss, percent)),
        col("ACCESSED", |v| optional(v.accessed_share, percent)),
        col("SOURCE", |v| text_or_dash(v.access_source.as_ref())),
        col("REASON", |v| text_or_dash(v.reason.as_ref())),
        wide("SAMPLED", |v| optional(v.sampled_unix_ms, format_timestamp)),
        wide("COUNTERS", |v| text_or_dash(v.counter_source.as_ref())),
        wide("MODEL", |v| text_or_dash(v.loss_model.as_ref())),
        wide("STEAL", |v| optional(v.steal_share, percent)),
        wide("MEMORY STALLED", |v| optional(v.memory_stalled_some, percent)),
        wide("MAJOR FAULTS/S", |v| optional(v.major_faults_per_s, |rate| format!("{rate:.0}"))),
        wide("ACCESS PROBLEM", |v| text_or_dash(v.access_problem.as_ref())),
        wide("COUNTER PROBLEM", |v| text_or_dash(v.counter_problem.as_ref())),
        wide("RESERVATION", |v| v.reservation.clone()),
    ];
}

fn optional<T>(value: Option<T>, format: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".into(), format)
}

impl Row for TargetResult {
    const COLUMNS: &'static [Column<Self>] =
        &[col("REVISION", |d| d.revision.to_string()), col("WAITING FOR", |d| join_or_dash(&d.waiting_for))];
}

/// Text about a VM with pool memory that has no sample.
const NOT_SAMPLED: &str = "verdict unknown: no sample yet; the agent samples VMs with a running process, the first time after one or two intervals\n";

/// Explains the verdict by its reason and the evidence. Returns an empty string for a VM without pool
/// memory.
pub(crate) fn format_verdict(vm: &Vm) -> String {
    let (Some(reason), Some(sampled)) = (&vm.reason, vm.sampled_unix_ms) else {
        return if vm.pool_bytes > 0 { NOT_SAMPLED.to_owned() } else { String::new() };
    };
    let mut evidence = Vec::new();
    if let Some(loss) = vm.loss {
        let model = vm.loss_model.as_deref().unwrap_or("an unknown model");
        evidence.push(format!(
            "slowdown: {}, estimated by {model} from {} samples",
            percent(loss),
            vm.samples
        ));
    }
    match (vm.accessed_share, vm.accessed_share_low, vm.accessed_share_high) {
        (Some(share), Some(low), Some(high)) => evidence.push(format!(
            "accessed: {} of the pool memory ({} to {}), source {}",
            percent(share),
            percent(low),
            percent(high),
            vm.access_source.as_deref().unwrap_or("unknown"),
        )),
        _ => evidence.extend(vm.access_problem.iter().map(|why| format!("accesses are unknown: {why}"))),
    }
    evidence.extend(vm.counter_problem.iter().map(|why| format!("counters are unknown: {why}")));
    for (name, share) in [("steal", vm.steal_share), ("stalled on memory", vm.memory_stalled_some)] {
        evidence.extend(share.map(|share| format!("{name}: {} of the time", percent(share))));
    }
    evidence.extend(vm.major_faults_per_s.map(|rate| format!("major page faults: {rate:.1} per second")));
    let evidence: String = evidence.iter().map(|line| format!("  {line}\n")).collect();
    format!("{}  verdict {}: {reason}\n{evidence}", format_timestamp(sampled), vm.verdict)
}

/// Formats a recorded decision, with its inputs and alternatives on separate lines.
pub(crate) fn format_decision(d: &Decision) -> String {
    let model = d.model.iter().map(|m| format!("  model: {m}\n")).collect::<String>();
    let facts = d.facts.iter().map(|(name, value)| format!("  {name} = {value}\n")).collect::<String>();
    let others = d.alternatives.iter().map(|other| format!("  alternative: {other}\n")).collect::<String>();
    let head =
        format!("{}  #{} {} {} (by {})", format_timestamp(d.at_unix_ms), d.seq, d.action, d.subject, d.actor);
    let reason = Some(&d.reason).filter(|reason| !reason.is_empty());
    let reason = reason.map(|reason| format!("  {reason}\n")).unwrap_or_default();
    format!("{head}\n{reason}{model}{facts}{others}")
}

/// Formats a plan: the split of the memory, the reason, and a table of hosts.
pub(crate) fn format_plan(p: &Plan) -> String {
    let reason = p.decision.iter().map(|d| format!("reason: {}\n", d.reason)).collect::<String>();
    let sizes = p.hosts.iter().map(|fit| fit.free_local_bytes).chain([p.local_bytes, p.pool_bytes]);
    let unit = SizeUnit::largest_common_unit(sizes);
    let row = |fit: &HostFit| HostFitRow { fit: fit.clone(), free_local: unit.format(fit.free_local_bytes) };
    let hosts: Vec<_> = p.hosts.iter().map(row).collect();
    let (local, pool) = (unit.format(p.local_bytes), unit.format(p.pool_bytes));
    format!("local {local}, pool {pool}\n{reason}\n{}", rows(&hosts, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_slices_are_printed_as_a_range() {
        assert_eq!(format_ranges(&[7, 0, 1, 2, 3, u32::MAX]), "0-3,7,4294967295");
        assert_eq!(format_ranges(&[]), "-");
    }

    #[test]
    fn sizes_of_a_plan_have_the_same_unit() {
        let host = |host: &str, free_mib: u64| HostFit {
            host: host.to_owned(),
            fits: true,
            free_cores: 4,
            free_local_bytes: free_mib << 20,
            emc: None,
            reason: None,
        };
        let printed = |local_mib: u64, hosts: Vec<HostFit>| {
            format_plan(&Plan { local_bytes: local_mib << 20, pool_bytes: 2 << 30, hosts, decision: None })
        };
        assert_eq!(
            printed(6 << 10, vec![host("h1", 63 << 10), host("h2", 0)]),
            "\
local 6GiB, pool 2GiB

HOST  FITS  FREE CORES  FREE LOCAL  EMC  REASON
h1    yes   4           63GiB       -    -
h2    yes   4           0GiB        -    -
"
        );
        assert_eq!(
            printed(6 << 10, vec![host("h1", 63 << 10), host("h2", 1500)]),
            "\
local 6144MiB, pool 2048MiB

HOST  FITS  FREE CORES  FREE LOCAL  EMC  REASON
h1    yes   4           64512MiB    -    -
h2    yes   4           1500MiB     -    -
"
        );
    }
}
