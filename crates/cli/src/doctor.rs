//! `tarn doctor`: looks at a rack as an experienced operator would, says what is wrong and which command mends it. It
//! mends nothing itself. What is wrong with the machine it runs on, a host's agent says.

mod this_host;

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

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Finding {
    check: Cow<'static, str>,
    ok: bool,
    /// What it is about, as alarms name it: "host h1".
    subject: String,
    what: String,
    mend: Option<String>,
}

impl Finding {
    fn good(check: &'static str, what: impl Into<String>) -> Self {
        Self { check: check.into(), ok: true, subject: "rack".to_owned(), what: what.into(), mend: None }
    }

    fn bad(check: &'static str, subject: String, what: String, mend: impl Into<String>) -> Self {
        Self { check: check.into(), ok: false, subject, what, mend: Some(mend.into()) }
    }

    /// Quarantined slices are found by cause and alarmed one by one.
    fn covers(&self, alarm: &Alarm) -> bool {
        let by_cause = self.check == "slices" && alarm.reason == "SLICE_QUARANTINED";
        !self.ok && (by_cause || self.subject == alarm.subject)
    }
}

impl Row for Finding {
    const COLUMNS: &'static [Column<Self>] = &[
        col("CHECK", |f| f.check.clone().into_owned()),
        col("STATE", |f| if f.ok { "ok" } else { "WRONG" }.to_owned()),
        col("SUBJECT", |f| f.subject.clone()),
        col("WHAT", |f| f.what.clone()),
        col("MEND", |f| f.mend.clone().unwrap_or_default()),
    ];
}

/// Everything a verdict is made from.
#[derive(Clone, Debug)]
struct Seen {
    rack: Rack,
    hosts: Vec<Host>,
    emcs: Vec<Emc>,
    quarantined: Vec<SliceDetail>,
    /// The manager's clock, to the second, and ours when its answer came.
    clocks: (Option<SystemTime>, SystemTime),
}

/// Looks, prints what was found, and fails if anything is wrong.
pub(crate) async fn run(args: args::Doctor, global: &Global) -> Result<(), Failure> {
    let mut findings = findings(global).await?;
    findings.extend(this_host::findings(args.host_config, global.timeout).await);
    let text = |_| table::rows(&findings, true);
    print::say(global.output, &findings, text)?;
    match findings.iter().filter(|f| !f.ok).count() {
        0 => Ok(()),
        1 => Err(Failure::Found("1 thing is wrong".to_owned())),
        wrong => Err(Failure::Found(format!("{wrong} things are wrong"))),
    }
}

/// Options that make no sense stay errors; a manager that does not answer is the first finding.
async fn findings(global: &Global) -> Result<Vec<Finding>, Failure> {
    let to = match Connection::open(global).await {
        Ok(to) => to,
        Err(wrong @ (Failure::Value { .. } | Failure::File { .. })) => return Err(wrong),
        Err(nobody) => return Ok(vec![unanswered(&nobody)]),
    };
    Ok(match look(&to).await {
        Ok(seen) => {
            [vec![Finding::good("endpoint", format!("{} answers", to.uri()))], verdict(&seen)].concat()
        }
        Err(refused) => vec![unanswered(&refused)],
    })
}

fn unanswered(failure: &Failure) -> Finding {
    let mend = failure.hint().unwrap_or_else(|| "see the manager's log".to_owned());
    Finding::bad("endpoint", "manager".to_owned(), failure.sentence(), mend)
}

async fn look(to: &Connection) -> Result<Seen, Failure> {
    let rack = to.answer(to.admin().get_rack(v1::GetRackRequest {})).await?;
    let clocks = (date(&rack), SystemTime::now());
    let emcs: Vec<_> = lists::emcs(to).await?.into_iter().map(Emc::from).collect();
    let hosts = lists::hosts(to).await?.into_iter().map(Host::from).collect();
    let quarantined =
        if emcs.iter().any(|e| e.quarantined > 0) { quarantined(to).await? } else { Vec::new() };
    Ok(Seen { rack: rack.into_inner().into(), hosts, emcs, quarantined, clocks })
}

async fn quarantined(to: &Connection) -> Result<Vec<SliceDetail>, Failure> {
    let slices = lists::slices(to, 0, u32::MAX).await?;
    let kept = slices.into_iter().filter(|s| s.state() == v1::SliceState::Quarantined);
    Ok(kept.map(SliceDetail::from).collect())
}

/// HTTP carries the server's clock with every answer.
fn date<T>(answer: &Response<T>) -> Option<SystemTime> {
    let date = answer.metadata().get("date")?.to_str().ok()?;
    httpdate::parse_http_date(date).ok()
}

/// What all that means. An alarm about what has been found already is the same news twice.
fn verdict(seen: &Seen) -> Vec<Finding> {
    let mut found = vec![version(&seen.rack), clock(seen.clocks)];
    found.extend(each("hosts", seen.hosts.iter().filter_map(host), seen.hosts.len()));
    found.extend(each("emcs", seen.emcs.iter().filter_map(emc), seen.emcs.len()));
    found.push(scheduling(seen));
    found.push(buffer(&seen.rack));
    found.extend(each("slices", quarantine(&seen.quarantined).into_iter(), seen.rack.slices as usize));
    let alarms: Vec<_> =
        seen.rack.alarms.iter().filter(|a| !found.iter().any(|f| f.covers(a))).map(alarm).collect();
    found.extend(if alarms.is_empty() { vec![Finding::good("alarms", "no others")] } else { alarms });
    found
}

/// What is wrong among `count` things, or that nothing is.
fn each(check: &'static str, wrong: impl Iterator<Item = Finding>, count: usize) -> Vec<Finding> {
    let wrong: Vec<_> = wrong.collect();
    if wrong.is_empty() { vec![Finding::good(check, format!("{count} in order"))] } else { wrong }
}

fn version(rack: &Rack) -> Finding {
    let ours = env!("CARGO_PKG_VERSION");
    if rack.version == ours {
        return Finding::good("version", format!("manager and tarn are {ours}"));
    }
    let what = format!("the manager is {}, tarn is {ours}", rack.version);
    Finding::bad("version", "manager".to_owned(), what, "install the same version of both")
}

fn clock((manager, here): (Option<SystemTime>, SystemTime)) -> Finding {
    let Some(manager) = manager else {
        let what = "the manager's answer carries no date: clocks not compared".to_owned();
        return Finding::bad(
            "clock",
            "manager".to_owned(),
            what,
            "ask it directly, without a proxy that removes headers",
        );
    };
    let skew = manager.duration_since(here).unwrap_or_else(|early| early.duration());
    if skew <= CLOCK_SKEW_MAX.as_duration() {
        return Finding::good("clock", "the manager's clock is near ours");
    }
    let what =
        format!("the manager's clock and ours differ by {}", humantime::format_duration(whole_secs(skew)));
    Finding::bad(
        "clock",
        "manager".to_owned(),
        what,
        "`timedatectl` on both machines: let them keep time by NTP",
    )
}

fn whole_secs(span: Duration) -> Duration {
    Duration::from_secs(span.as_secs())
}

fn host(host: &Host) -> Option<Finding> {
    let name = &host.host;
    let (what, mend) = match host.state.as_str() {
        "unknown" => (
            format!("silent past its lease, keeps {} slices", host.slices),
            format!("start its host-agent; if the machine is lost: `tarn fence {name}`"),
        ),
        "fencing" => fencing(host),
        "fenced" => (
            "cut off its slices".to_owned(),
            "start its host-agent: the host returns once that shows that nothing of the old slices is in use \
             there; a restart of the machine makes sure"
                .to_owned(),
        ),
        "expected" => (
            "not seen since the manager started".to_owned(),
            "start its host-agent: `systemctl start host-agent` there".to_owned(),
        ),
        _ if host.cores == 0 || host.emcs.is_empty() => {
            ("has no cores or reaches no EMC".to_owned(), "mend its [[host]] in rack.toml".to_owned())
        }
        _ => return None,
    };
    Some(Finding::bad("hosts", format!("host {name}"), what, mend))
}

/// It keeps its slices until it is certain that nothing of them is in use there.
fn fencing(host: &Host) -> (String, String) {
    let (name, slices) = (&host.host, host.slices);
    let Some(why) = &host.not_fenced else {
        let what = format!("being cut off its {slices} slices");
        return (what, "wait; a device that failed is asked again by itself".to_owned());
    };
    (
        format!("not cut off, keeps {slices} slices: {why}"),
        format!(
            "start its host-agent: the host returns once that shows that nothing is left; or, once the machine is certainly \
             off: `tarn fence {name} --confirm-powered-off`"
        ),
    )
}

fn emc(emc: &Emc) -> Option<Finding> {
    let (what, mend) = if emc.state == "failed" {
        let error = emc.error.as_deref().unwrap_or("its driver reports errors");
        let mend = format!("move its VMs away: `tarn drain emc {}`; then mend the device", emc.emc);
        (format!("failed: {error}"), mend)
    } else if emc.slices == 0 {
        ("has a capacity of 0".to_owned(), "mend its [[emc]] in rack.toml".to_owned())
    } else {
        return None;
    };
    Some(Finding::bad("emcs", format!("emc {}", emc.emc), what, mend))
}

/// What an operator closed is not wrong, but easily forgotten.
fn scheduling(seen: &Seen) -> Finding {
    let hosts = seen.hosts.iter().map(|h| ("host", &h.host, &h.scheduling));
    let emcs = seen.emcs.iter().map(|e| ("emc", &e.emc, &e.scheduling));
    let closed: Vec<_> = hosts.chain(emcs).filter(|(.., scheduling)| *scheduling != "enabled").collect();
    let Some((kind, name, _)) = closed.first() else {
        return Finding::good("scheduling", "every host and EMC takes new reservations");
    };
    let each = closed.iter().map(|(kind, name, scheduling)| format!("{kind} {name} is {scheduling}"));
    Finding {
        mend: Some(format!("when done: `tarn uncordon {kind} {name}`")),
        ..Finding::good("scheduling", each.collect::<Vec<_>>().join(", "))
    }
}

fn buffer(rack: &Rack) -> Finding {
    let (free, target) = (rack.slices_free, rack.buffer_target);
    if free >= target {
        return Finding::good("buffer", format!("{free} slices free, {target} wanted"));
    }
    let what = format!("{free} slices free, {target} wanted");
    let mend = "draining slices come back by themselves (`tarn watch`); else release VMs or add an EMC";
    Finding::bad("buffer", "pool".to_owned(), what, mend)
}

/// One finding for each EMC and reason: a fenced host may leave thousands of slices behind for one cause.
fn quarantine(slices: &[SliceDetail]) -> Vec<Finding> {
    let mut causes: BTreeMap<(&str, &str), Vec<&Slice>> = BTreeMap::new();
    for s in slices {
        let reason = s.reason.as_deref().unwrap_or("no reason given");
        causes.entry((&s.slice.emc, reason)).or_default().push(&s.slice);
    }
    causes.iter().map(|((emc, reason), slices)| quarantined_for(emc, reason, slices)).collect()
}

fn quarantined_for(emc: &str, reason: &str, slices: &[&Slice]) -> Finding {
    let numbers: Vec<_> = slices.iter().map(|s| s.slice).collect();
    let (subject, noun, hand) = match numbers.as_slice() {
        [one] => (format!("slice {one}"), "slice", one.to_string()),
        _ => (format!("slices {}", table::runs(&numbers)), "slices", "NUMBER".to_owned()),
    };
    let what = format!("{} {noun} of {emc} quarantined: {reason}", numbers.len());
    let mend = format!("once nothing can reach it: `tarn uncordon slice {hand}` (scrubs, verifies, frees)");
    Finding::bad("slices", subject, what, mend)
}

fn alarm(alarm: &Alarm) -> Finding {
    let what = format!("{}: {}", alarm.reason, alarm.message);
    let mend = match alarm.reason.as_str() {
        "STORE_LOW_SPACE" => "make room on the disk of the manager's store".to_owned(),
        "CAPACITY_ZERO" => "mend rack.toml or the device: a capacity of 0 is never a fact".to_owned(),
        _ => format!("`tarn explain {}`", alarm.subject),
    };
    Finding::bad("alarms", alarm.subject.clone(), what, mend)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Seen {
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
        Seen {
            rack: rack.into(),
            hosts: vec![host.into()],
            emcs: vec![emc.into()],
            quarantined: Vec::new(),
            clocks: (Some(SystemTime::UNIX_EPOCH), SystemTime::UNIX_EPOCH),
        }
    }

    fn wrong(seen: &Seen) -> Vec<(String, String)> {
        verdict(seen).into_iter().filter(|f| !f.ok).map(|f| (f.check.into_owned(), f.subject)).collect()
    }

    #[test]
    fn a_healthy_rack_has_nothing_wrong() {
        assert_eq!(wrong(&healthy()), []);
        assert_eq!(verdict(&healthy()).len(), 8, "every check says that it was made");
    }

    #[test]
    fn what_an_operator_closed_is_said_but_not_wrong() {
        let mut seen = healthy();
        seen.hosts[0].scheduling = "cordoned".into();
        seen.emcs[0].scheduling = "draining".into();
        assert_eq!(wrong(&seen), []);
        let said = verdict(&seen).into_iter().find(|f| f.check == "scheduling").unwrap();
        assert_eq!(said.what, "host h1 is cordoned, emc e0 is draining");
        assert_eq!(said.mend.as_deref(), Some("when done: `tarn uncordon host h1`"));
    }

    #[test]
    fn each_trouble_is_found_once_even_if_an_alarm_repeats_it() {
        let mut seen = healthy();
        seen.hosts[0].state = "unknown".into();
        let alarm = |reason: &str, subject: &str| Alarm {
            reason: reason.into(),
            subject: subject.into(),
            message: "silent".into(),
            since_unix_ms: 0,
        };
        seen.rack.alarms = vec![alarm("HOST_UNKNOWN", "host h1"), alarm("STORE_LOW_SPACE", "rack")];
        assert_eq!(
            wrong(&seen),
            [("hosts".to_owned(), "host h1".to_owned()), ("alarms".to_owned(), "rack".to_owned())]
        );
    }

    #[test]
    fn slices_kept_for_one_cause_are_one_finding() {
        let slice = |n, reason: &str| {
            SliceDetail::from(v1::Slice {
                slice: n,
                emc: "e0".into(),
                state: 7,
                reason: Some(reason.into()),
                ..Default::default()
            })
        };
        let mut seen = healthy();
        seen.quarantined = vec![slice(1, "fenced"), slice(2, "fenced"), slice(9, "not zero")];
        let alarm = |n: u32| Alarm {
            reason: "SLICE_QUARANTINED".into(),
            subject: format!("slice {n}"),
            message: "kept".into(),
            since_unix_ms: 0,
        };
        seen.rack.alarms = vec![alarm(1), alarm(2), alarm(9)];
        assert_eq!(
            wrong(&seen),
            [("slices".to_owned(), "slices 1-2".to_owned()), ("slices".to_owned(), "slice 9".to_owned())]
        );
    }

    #[test]
    fn a_host_that_is_not_cut_off_is_shown_with_both_ways_out() {
        let mut seen = healthy();
        (seen.hosts[0].state, seen.hosts[0].slices) = ("fencing".into(), 3);
        let said = |seen: &Seen| verdict(seen).into_iter().find(|f| !f.ok).unwrap();
        assert_eq!(said(&seen).what, "being cut off its 3 slices");
        seen.hosts[0].not_fenced = Some("`off h1` ended with exit status: 1".into());
        let finding = said(&seen);
        assert_eq!(finding.what, "not cut off, keeps 3 slices: `off h1` ended with exit status: 1");
        let mend = finding.mend.unwrap();
        assert!(
            mend.contains("host-agent") && mend.contains("`tarn fence h1 --confirm-powered-off`"),
            "{mend}"
        );
    }

    #[test]
    fn clocks_apart_a_short_buffer_and_a_failed_emc_are_wrong() {
        let mut seen = healthy();
        seen.clocks.0 = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(3600));
        seen.rack.slices_free = 1;
        seen.emcs[0].state = "failed".into();
        seen.rack.version = "9.9.9".into();
        let checks: Vec<_> = wrong(&seen).into_iter().map(|(check, _)| check).collect();
        assert_eq!(checks, ["version", "clock", "emcs", "buffer"]);
        seen.clocks.0 = None;
        assert!(
            wrong(&seen).iter().any(|(check, _)| check == "clock"),
            "a check that cannot be made is not passed over"
        );
    }
}
