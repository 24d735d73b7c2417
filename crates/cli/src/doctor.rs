//! `tarn doctor`: checks a rack and shows a fix for each problem, without changing anything. Checks
//! of the local machine are in `local_host.rs`.

mod local_host;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use proto::v1;
use serde::{Deserialize, Serialize};
use tonic::Response;
use units::limits::CLOCK_SKEW_MAX;

use crate::{
    Connection, Failure, Global, args, lists, print,
    table::{self, Column, Row, col},
    view::{Alarm, Emc, Host, Rack, Slice, SliceDetail},
};

/// Result of one check. `host-agent doctor` writes findings in the same structure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Finding {
    check: Cow<'static, str>,
    ok: bool,
    /// Checked resource, named as in alarms, such as "host h1".
    subject: String,
    message: String,
    fix: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, message: impl Into<String>) -> Self {
        Self { check: check.into(), ok: true, subject: "rack".to_owned(), message: message.into(), fix: None }
    }

    fn problem(check: &'static str, subject: String, message: String, fix: impl Into<String>) -> Self {
        Self { check: check.into(), ok: false, subject, message, fix: Some(fix.into()) }
    }

    /// Returns whether an alarm repeats this finding. Each quarantined slice has an alarm, but all
    /// slices with the same cause are one finding.
    fn covers(&self, alarm: &Alarm) -> bool {
        let is_quarantine = self.check == "slices" && alarm.reason == "SLICE_QUARANTINED";
        !self.ok && (is_quarantine || self.subject == alarm.subject)
    }
}

impl Row for Finding {
    const COLUMNS: &'static [Column<Self>] = &[
        col("CHECK", |f| f.check.clone().into_owned()),
        col("STATE", |f| if f.ok { "ok" } else { "PROBLEM" }.to_owned()),
        col("SUBJECT", |f| f.subject.clone()),
        col("MESSAGE", |f| f.message.clone()),
        col("FIX", |f| f.fix.clone().unwrap_or_default()),
    ];
}

/// State of the rack that the checks evaluate.
#[derive(Clone, Debug)]
struct RackState {
    rack: Rack,
    hosts: Vec<Host>,
    emcs: Vec<Emc>,
    quarantined: Vec<SliceDetail>,
    /// Time of the manager's clock in whole seconds, or `None` if the response does not contain it,
    /// and time of the local clock when the response arrived.
    clocks: (Option<SystemTime>, SystemTime),
}

/// Prints all findings. Returns an error if a finding is a problem.
pub(crate) async fn run(args: args::Doctor, global: &Global) -> Result<(), Failure> {
    let mut findings = rack_findings(global).await?;
    findings.extend(local_host::host_findings(args.host_config, global.timeout).await);
    let text = |_| table::rows(&findings, true);
    print::value(global.output, &findings, text)?;
    match findings.iter().filter(|f| !f.ok).count() {
        0 => Ok(()),
        1 => Err(Failure::Problem("1 problem found".to_owned())),
        problems => Err(Failure::Problem(format!("{problems} problems found"))),
    }
}

/// Returns the findings about the rack. An unreachable manager is a finding, but invalid options
/// are an error.
async fn rack_findings(global: &Global) -> Result<Vec<Finding>, Failure> {
    let manager = match Connection::open(global).await {
        Ok(manager) => manager,
        Err(failure @ (Failure::InvalidValue { .. } | Failure::Usage(_) | Failure::File { .. })) => {
            return Err(failure);
        }
        Err(failure) => return Ok(vec![unreachable_finding(&failure)]),
    };
    Ok(match load_rack_state(&manager).await {
        Ok(state) => {
            [vec![Finding::ok("endpoint", format!("{} responds", manager.uri()))], run_checks(&state)]
                .concat()
        }
        Err(failure) => vec![unreachable_finding(&failure)],
    })
}

fn unreachable_finding(failure: &Failure) -> Finding {
    let fix = failure.hint().unwrap_or_else(|| "see the manager's log".to_owned());
    Finding::problem("endpoint", "manager".to_owned(), failure.message(), fix)
}

async fn load_rack_state(manager: &Connection) -> Result<RackState, Failure> {
    let rack = manager.call_with_metadata(manager.admin().get_rack(v1::GetRackRequest {})).await?;
    let clocks = (manager_clock(&rack), SystemTime::now());
    let emcs: Vec<_> = lists::emcs(manager).await?.into_iter().map(Emc::from).collect();
    let hosts = lists::hosts(manager).await?.into_iter().map(Host::from).collect();
    let quarantined = if emcs.iter().any(|e| e.quarantined > 0) {
        list_quarantined_slices(manager).await?
    } else {
        Vec::new()
    };
    Ok(RackState { rack: rack.into_inner().into(), hosts, emcs, quarantined, clocks })
}

async fn list_quarantined_slices(manager: &Connection) -> Result<Vec<SliceDetail>, Failure> {
    let slices = lists::slices(manager, 0, u32::MAX).await?;
    let quarantined = slices.into_iter().filter(|s| s.state() == v1::SliceState::Quarantined);
    Ok(quarantined.map(SliceDetail::from).collect())
}

/// Returns the time of the manager's clock, from the HTTP `date` header of a response.
fn manager_clock<T>(response: &Response<T>) -> Option<SystemTime> {
    let date = response.metadata().get("date")?.to_str().ok()?;
    httpdate::parse_http_date(date).ok()
}

/// Performs all checks. Omits alarms that another finding already covers.
fn run_checks(state: &RackState) -> Vec<Finding> {
    let mut findings = vec![check_version(&state.rack), check_clock(state.clocks)];
    findings.extend(problems_or_ok("hosts", state.hosts.iter().filter_map(check_host), state.hosts.len()));
    findings.extend(problems_or_ok("emcs", state.emcs.iter().filter_map(check_emc), state.emcs.len()));
    findings.push(check_scheduling(state));
    findings.push(check_buffer(&state.rack));
    findings.extend(problems_or_ok(
        "slices",
        check_quarantined_slices(&state.quarantined).into_iter(),
        state.rack.slices as usize,
    ));
    let alarms: Vec<_> = state
        .rack
        .alarms
        .iter()
        .filter(|a| !findings.iter().any(|f| f.covers(a)))
        .map(alarm_finding)
        .collect();
    findings.extend(if alarms.is_empty() { vec![Finding::ok("alarms", "no other alarms")] } else { alarms });
    findings
}

/// Returns the problems, or one finding without a problem about all `count` checked resources.
fn problems_or_ok(
    check: &'static str,
    problems: impl Iterator<Item = Finding>,
    count: usize,
) -> Vec<Finding> {
    let problems: Vec<_> = problems.collect();
    if problems.is_empty() { vec![Finding::ok(check, format!("{count} checked"))] } else { problems }
}

fn check_version(rack: &Rack) -> Finding {
    let own_version = env!("CARGO_PKG_VERSION");
    if rack.version == own_version {
        return Finding::ok("version", format!("manager and tarn have version {own_version}"));
    }
    let message = format!("manager has version {}, tarn has version {own_version}", rack.version);
    Finding::problem("version", "manager".to_owned(), message, "install the same version of both")
}

fn check_clock((manager, local): (Option<SystemTime>, SystemTime)) -> Finding {
    let Some(manager) = manager else {
        let message = "cannot compare clocks: the response has no date header".to_owned();
        return Finding::problem(
            "clock",
            "manager".to_owned(),
            message,
            "connect directly, without a proxy that removes headers",
        );
    };
    let skew = manager.duration_since(local).unwrap_or_else(|early| early.duration());
    if skew <= CLOCK_SKEW_MAX.as_duration() {
        return Finding::ok("clock", "clocks of manager and tarn agree");
    }
    let message = format!(
        "clocks of manager and tarn differ by {}",
        humantime::format_duration(truncate_to_seconds(skew))
    );
    Finding::problem(
        "clock",
        "manager".to_owned(),
        message,
        "synchronize both machines by NTP: `timedatectl set-ntp true`",
    )
}

fn truncate_to_seconds(span: Duration) -> Duration {
    Duration::from_secs(span.as_secs())
}

fn check_host(host: &Host) -> Option<Finding> {
    let name = &host.host;
    let (message, fix) = match host.state.as_str() {
        "unknown" => (
            format!("lease expired, host still owns {} slices", host.slices),
            format!("start its host-agent; if the machine is lost, run `tarn fence {name}`"),
        ),
        "fencing" => describe_fencing(host),
        "fenced" => (
            "fenced: access to its slices is revoked".to_owned(),
            "start its host-agent: the host returns to service once the agent reports that no old slice is in use; \
             a reboot guarantees that"
                .to_owned(),
        ),
        "expected" => (
            "not connected since the manager started".to_owned(),
            "start its host-agent: run `systemctl start host-agent` on the host".to_owned(),
        ),
        _ if host.cores == 0 || host.emcs.is_empty() => {
            ("has no cores or no EMC".to_owned(), "correct its [[host]] section in rack.toml".to_owned())
        }
        _ => return None,
    };
    Some(Finding::problem("hosts", format!("host {name}"), message, fix))
}

/// Returns the message and the fix for a host in state `fencing`. The host owns its slices until
/// fencing is complete.
fn describe_fencing(host: &Host) -> (String, String) {
    let (name, slices) = (&host.host, host.slices);
    let Some(error) = &host.fence_error else {
        let message = format!("fencing in progress, host still owns {slices} slices");
        return (message, "wait; failed device requests are retried automatically".to_owned());
    };
    (
        format!("fencing failed, host still owns {slices} slices: {error}"),
        format!(
            "start its host-agent: the host returns to service once the agent reports that no slice is in use; or power \
             the machine off and run `tarn fence {name} --confirm-powered-off`"
        ),
    )
}

fn check_emc(emc: &Emc) -> Option<Finding> {
    let (message, fix) = if emc.state == "failed" {
        let error = emc.error.as_deref().unwrap_or("its driver reports errors");
        let fix = format!("migrate its VMs with `tarn drain emc {}`, then repair the device", emc.emc);
        (format!("failed: {error}"), fix)
    } else if emc.slices == 0 {
        ("has a capacity of 0".to_owned(), "correct its [[emc]] section in rack.toml".to_owned())
    } else {
        return None;
    };
    Some(Finding::problem("emcs", format!("emc {}", emc.emc), message, fix))
}

/// Lists cordoned and draining hosts and EMCs. The finding is not a problem: it reminds the
/// operator to uncordon them after maintenance.
fn check_scheduling(state: &RackState) -> Finding {
    let hosts = state.hosts.iter().map(|h| ("host", &h.host, &h.scheduling));
    let emcs = state.emcs.iter().map(|e| ("emc", &e.emc, &e.scheduling));
    let unschedulable: Vec<_> =
        hosts.chain(emcs).filter(|(.., scheduling)| *scheduling != "enabled").collect();
    let Some((kind, name, _)) = unschedulable.first() else {
        return Finding::ok("scheduling", "every host and EMC accepts new reservations");
    };
    let descriptions =
        unschedulable.iter().map(|(kind, name, scheduling)| format!("{kind} {name} is {scheduling}"));
    Finding {
        fix: Some(format!("after maintenance, run `tarn uncordon {kind} {name}`")),
        ..Finding::ok("scheduling", descriptions.collect::<Vec<_>>().join(", "))
    }
}

fn check_buffer(rack: &Rack) -> Finding {
    let (free, target) = (rack.slices_free, rack.buffer_target);
    if free >= target {
        return Finding::ok("buffer", format!("{free} slices free, target {target}"));
    }
    let message = format!("{free} slices free, target {target}");
    let fix = "wait for draining slices to become free (`tarn watch`), release VMs or add an EMC";
    Finding::problem("buffer", "pool".to_owned(), message, fix)
}

/// Returns one finding per EMC and quarantine reason, because fencing a host can quarantine
/// thousands of slices for the same reason.
fn check_quarantined_slices(slices: &[SliceDetail]) -> Vec<Finding> {
    let mut causes: BTreeMap<(&str, &str), Vec<&Slice>> = BTreeMap::new();
    for s in slices {
        let reason = s.reason.as_deref().unwrap_or("no reason given");
        causes.entry((&s.slice.emc, reason)).or_default().push(&s.slice);
    }
    causes.iter().map(|((emc, reason), slices)| quarantine_finding(emc, reason, slices)).collect()
}

fn quarantine_finding(emc: &str, reason: &str, slices: &[&Slice]) -> Finding {
    let numbers: Vec<_> = slices.iter().map(|s| s.slice).collect();
    let (subject, noun, argument) = match numbers.as_slice() {
        [one] => (format!("slice {one}"), "slice", one.to_string()),
        _ => (format!("slices {}", table::format_ranges(&numbers)), "slices", "NUMBER".to_owned()),
    };
    let message = format!("{} {noun} of {emc} quarantined: {reason}", numbers.len());
    let fix = format!(
        "once no host can access the slice, run `tarn uncordon slice {argument}`, which scrubs, verifies and frees it"
    );
    Finding::problem("slices", subject, message, fix)
}

fn alarm_finding(alarm: &Alarm) -> Finding {
    let message = format!("{}: {}", alarm.reason, alarm.message);
    let fix = match alarm.reason.as_str() {
        "STORE_LOW_SPACE" => "free space on the disk of the manager's store".to_owned(),
        "CAPACITY_ZERO" => "correct rack.toml or repair the device".to_owned(),
        _ => format!("`tarn explain {}`", alarm.subject),
    };
    Finding::problem("alarms", alarm.subject.clone(), message, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy_rack() -> RackState {
        let host = v1::Host {
            host: "h1".into(),
            cores: 8,
            emcs: vec!["e0".into()],
            state: 1,
            scheduling: 1,
            ..Default::default()
        };
        let emc = v1::Emc { emc: "e0".into(), state: 1, scheduling: 1, slices: 4, ..Default::default() };
        let rack = v1::Rack {
            version: env!("CARGO_PKG_VERSION").into(),
            slices: 4,
            slices_free: 2,
            buffer_target: 2,
            ..Default::default()
        };
        RackState {
            rack: rack.into(),
            hosts: vec![host.into()],
            emcs: vec![emc.into()],
            quarantined: Vec::new(),
            clocks: (Some(SystemTime::UNIX_EPOCH), SystemTime::UNIX_EPOCH),
        }
    }

    fn problems(state: &RackState) -> Vec<(String, String)> {
        run_checks(state).into_iter().filter(|f| !f.ok).map(|f| (f.check.into_owned(), f.subject)).collect()
    }

    #[test]
    fn healthy_rack_has_no_problems() {
        assert_eq!(problems(&healthy_rack()), []);
        assert_eq!(run_checks(&healthy_rack()).len(), 8, "every check has a finding");
    }

    #[test]
    fn cordoned_host_is_listed_but_is_not_a_problem() {
        let mut state = healthy_rack();
        state.hosts[0].scheduling = "cordoned".into();
        state.emcs[0].scheduling = "draining".into();
        assert_eq!(problems(&state), []);
        let scheduling = run_checks(&state).into_iter().find(|f| f.check == "scheduling").unwrap();
        assert_eq!(scheduling.message, "host h1 is cordoned, emc e0 is draining");
        assert_eq!(scheduling.fix.as_deref(), Some("after maintenance, run `tarn uncordon host h1`"));
    }

    #[test]
    fn alarm_that_repeats_a_finding_is_omitted() {
        let mut state = healthy_rack();
        state.hosts[0].state = "unknown".into();
        let alarm = |reason: &str, subject: &str| Alarm {
            reason: reason.into(),
            subject: subject.into(),
            message: "silent".into(),
            since_unix_ms: 0,
        };
        state.rack.alarms = vec![alarm("HOST_UNKNOWN", "host h1"), alarm("STORE_LOW_SPACE", "rack")];
        assert_eq!(
            problems(&state),
            [("hosts".to_owned(), "host h1".to_owned()), ("alarms".to_owned(), "rack".to_owned())]
        );
    }

    #[test]
    fn quarantined_slices_with_the_same_cause_are_one_finding() {
        let slice = |n, reason: &str| {
            SliceDetail::from(v1::Slice {
                slice: n,
                emc: "e0".into(),
                state: 7,
                reason: Some(reason.into()),
                ..Default::default()
            })
        };
        let mut state = healthy_rack();
        state.quarantined = vec![slice(1, "fenced"), slice(2, "fenced"), slice(9, "not zero")];
        let alarm = |n: u32| Alarm {
            reason: "SLICE_QUARANTINED".into(),
            subject: format!("slice {n}"),
            message: "quarantined".into(),
            since_unix_ms: 0,
        };
        state.rack.alarms = vec![alarm(1), alarm(2), alarm(9)];
        assert_eq!(
            problems(&state),
            [("slices".to_owned(), "slices 1-2".to_owned()), ("slices".to_owned(), "slice 9".to_owned())]
        );
    }

    #[test]
    fn finding_about_failed_fencing_shows_both_fixes() {
        let mut state = healthy_rack();
        (state.hosts[0].state, state.hosts[0].slices) = ("fencing".into(), 3);
        let problem = |state: &RackState| run_checks(state).into_iter().find(|f| !f.ok).unwrap();
        assert_eq!(problem(&state).message, "fencing in progress, host still owns 3 slices");
        state.hosts[0].fence_error = Some("`off h1` ended with exit status: 1".into());
        let finding = problem(&state);
        assert_eq!(
            finding.message,
            "fencing failed, host still owns 3 slices: `off h1` ended with exit status: 1"
        );
        let fix = finding.fix.unwrap();
        assert!(fix.contains("host-agent") && fix.contains("`tarn fence h1 --confirm-powered-off`"), "{fix}");
    }

    #[test]
    fn clock_skew_short_buffer_and_failed_emc_are_problems() {
        let mut state = healthy_rack();
        state.clocks.0 = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(3600));
        state.rack.slices_free = 1;
        state.emcs[0].state = "failed".into();
        state.rack.version = "9.9.9".into();
        let checks: Vec<_> = problems(&state).into_iter().map(|(check, _)| check).collect();
        assert_eq!(checks, ["version", "clock", "emcs", "buffer"]);
        state.clocks.0 = None;
        assert!(
            problems(&state).iter().any(|(check, _)| check == "clock"),
            "a check that cannot be performed is a problem"
        );
    }
}
