//! Tests of the agent: script tests, and property tests with random desired states, failures and
//! crashes. A script consists of words; a script test compares the output of the last word.
//!
//! In words, `S.E` is epoch E of slice S; VMs are `a`, `b`; `+` separates several slices, and `:`
//! separates several parts.
//!
//! Input words: `up` (a manager of rack R accepts the agent), `up:Q` (a manager of rack Q), `down`,
//! `report` (the manager requests a complete report), `desired:N:PARTS` (desired state of version
//! N), `ok:S.E` (the call for slice S and epoch E succeeds), `half:S.E` (a scrub verified only a
//! part), `fail:S.E`, `dirty:S.E` (the slice is not zeroed), `closed:S.E` and `unclosed:S.E` (an
//! orphan was closed, or could not be closed), `attach:VM@PID` (a request by root),
//! `attach:VM@PID/UID`, `recorded:VM`, `unrecorded:VM` (the write failed), `moved:VM` and
//! `unmoved:VM` (a move to local memory ended), `gone:VM` (the VM's process ended), `tick:MS`.
//!
//! Parts of a desired state: `a=1.1+2.1` (VM a has slices 1 and 2, each with epoch 1), `a/UID=...`
//! (VM a has this user), `a!N=...` (attempt N to move VM a to local memory), `release=S.E`, `force=S.E`, `scrub=S.E`, `fenced`, `instance` (for another
//! instance), `rack` (of rack Q). Parts of changes to version N: `base=N`, `no_vm=a`, `no_slice=S`.
//!
//! Output: effects, such as `online:S.E?` (`?` means that the slice is checked for zeros), and
//! reports. A complete report is `report:N`, a report of changes is `changes:N`. VM `a` has
//! reservation 1, VM `b` has reservation 2. A report marks a failed move with the reason and the
//! attempt, and a completed move with the local memory.

use std::fmt::Write as _;

use proptest::prelude::*;
use units::limits::{ENDED_VM_REPORT_DURATION, HOST_CALL_RETRY_DELAY};
use units::{Epoch, Revision, SliceId, UnixMs};

use super::*;
use crate::protocol::{DesiredRehome, DesiredRelease, DesiredVm, ObservedRehome, Removals};

mod limits;
mod properties;
mod records;
mod rehome;
mod users;

const INSTANCE: InstanceId = InstanceId(5);

pub(super) fn holding(text: &str) -> Holding {
    let (slice, epoch) = text.split_once('.').expect("the format is SLICE.EPOCH");
    Holding { slice: SliceId(slice.parse().unwrap()), epoch: Epoch(epoch.parse().unwrap()) }
}

fn handle(holding: Holding) -> Handle {
    Handle::new("emc", format!("/emc/{}.{}", holding.slice, holding.epoch))
}

fn reservation(vm: &str) -> ReservationId {
    ReservationId(u64::from(vm.as_bytes()[0] - b'a' + 1))
}

fn vm_name(id: ReservationId) -> char {
    char::from(b'a' + u8::try_from(id.0).unwrap() - 1)
}

fn process(pid: u32) -> Process {
    Process { pid, started: 1, cgroup: "/".to_owned() }
}

fn user_id(uid: u32) -> UserId {
    UserId::new(uid).unwrap()
}

/// Returns a process of root.
fn root_caller(pid: u32) -> Caller {
    Caller { process: process(pid), uid: UserId::ROOT, control_socket: None }
}

fn holdings(text: &str) -> impl Iterator<Item = Holding> {
    text.split('+').filter(|one| !one.is_empty()).map(holding)
}

fn desired_state(number: u64) -> DesiredState {
    DesiredState {
        number: DesiredVersion { generation: 0, revision: Revision(number) },
        instance: INSTANCE,
        base: None,
        vms: BTreeMap::new(),
        release: BTreeMap::new(),
        scrub: BTreeMap::new(),
        removals: Removals::default(),
        fenced: false,
    }
}

fn desired_release(holding: Holding, force: bool) -> DesiredRelease {
    DesiredRelease { force, handle: handle(holding) }
}

fn desired_vm(vm: &str, slices: impl Iterator<Item = Holding>) -> DesiredVm {
    let slices = slices.map(|holding| (holding, handle(holding))).collect();
    DesiredVm {
        vm: Name::new(vm).unwrap(),
        local: Bytes::mib(64),
        pinned: false,
        uid: None,
        slices,
        rehome: None,
    }
}

fn parse_desired_state(text: &str) -> Event {
    let mut parts = text.split(':');
    let mut desired = desired_state(parts.next().unwrap().parse().unwrap());
    let mut rack = "R";
    for part in parts {
        match part.split_once('=') {
            None if part == "fenced" => desired.fenced = true,
            None if part == "instance" => desired.instance = InstanceId(4),
            None if part == "rack" => rack = "Q",
            Some(("base", number)) => {
                let revision = Revision(number.parse().unwrap());
                desired.base = Some(DesiredVersion { generation: 0, revision });
            }
            Some(("no_vm", list)) => desired.removals.vms.extend(list.split('+').map(reservation)),
            Some(("no_slice", list)) => {
                desired.removals.slices.extend(list.split('+').map(|slice| SliceId(slice.parse().unwrap())));
            }
            Some(("release", list)) => {
                desired.release.extend(holdings(list).map(|h| (h, desired_release(h, false))))
            }
            Some(("force", list)) => {
                desired.release.extend(holdings(list).map(|h| (h, desired_release(h, true))))
            }
            Some(("scrub", list)) => desired.scrub.extend(holdings(list).map(|h| (h, handle(h)))),
            Some((vm, list)) => {
                let (vm, rehome) = vm.split_once('!').map_or((vm, None), |(vm, attempt)| (vm, Some(attempt)));
                let rehome = rehome.map(|attempt| DesiredRehome {
                    attempt: attempt.trim_end_matches('x').parse().unwrap(),
                    is_cancelled: attempt.ends_with('x'),
                });
                let (vm, uid) = vm.split_once('/').map_or((vm, None), |(vm, uid)| (vm, Some(uid)));
                let uid = uid.map(|uid| user_id(uid.parse().unwrap()));
                let vm_memory = DesiredVm { uid, rehome, ..desired_vm(vm, holdings(list)) };
                desired.vms.insert(reservation(vm), vm_memory);
            }
            None => panic!("unknown part {part}"),
        }
    }
    Event::DesiredState { rack: rack.to_owned(), desired }
}

fn scrub_outcome(holding: Holding, verified: Bytes) -> SliceOutcome {
    SliceOutcome::Scrubbed(ScrubReport { holding, started: UnixMs(1), ended: UnixMs(2), verified })
}

fn expected_outcome(agent: &Agent, holding: Holding) -> SliceOutcome {
    match &agent.slices[&holding] {
        SliceStatus::Opening(_) => SliceOutcome::Onlined,
        SliceStatus::Closing(_) => SliceOutcome::Offlined,
        SliceStatus::Scrubbing(_) => scrub_outcome(holding, units::SLICE),
        SliceStatus::Online(_) => panic!("no call for {holding:?}"),
    }
}

fn host_failure(reason: FailureReason) -> HostFailure {
    HostFailure { reason, message: "input/output error".to_owned() }
}

fn parse_event(agent: &Agent, tickets: &mut u64, word: &str) -> Event {
    let (verb, rest) = word.split_once(':').unwrap_or((word, ""));
    match verb {
        "up" => Event::SessionUp {
            rack: if rest.is_empty() { "R" } else { rest }.to_owned(),
            lease_ttl: Ns::secs(4),
        },
        "down" => Event::SessionDown,
        "desired" => parse_desired_state(rest),
        "ok" => Event::Done { holding: holding(rest), result: Ok(expected_outcome(agent, holding(rest))) },
        "half" => {
            let holding = holding(rest);
            Event::Done { holding, result: Ok(scrub_outcome(holding, Bytes::mib(512))) }
        }
        "fail" => Event::Done { holding: holding(rest), result: Err(host_failure(FailureReason::Host)) },
        "dirty" => Event::Done { holding: holding(rest), result: Err(host_failure(FailureReason::NotZero)) },
        "closed" => Event::OrphanClosed { place: handle(holding(rest)).place, result: Ok(()) },
        "unclosed" => {
            let (place, result) = (handle(holding(rest)).place, Err(host_failure(FailureReason::Host)));
            Event::OrphanClosed { place, result }
        }
        "attach" => {
            let (vm, caller) = rest.split_once('@').unwrap();
            let (pid, uid) = caller.split_once('/').unwrap_or((caller, "0"));
            *tickets += 1;
            let (vm, uid) = (Name::new(vm).unwrap(), user_id(uid.parse().unwrap()));
            let caller = Caller { process: process(pid.parse().unwrap()), uid, control_socket: None };
            Event::Attach { ticket: Ticket(*tickets), vm, caller }
        }
        "recorded" => Event::Recorded { reservation: reservation(rest), result: Ok(()) },
        "unrecorded" => Event::Recorded { reservation: reservation(rest), result: Err("full".to_owned()) },
        "moved" => Event::RehomeEnded { reservation: reservation(rest), result: Ok(()) },
        "unmoved" => Event::RehomeEnded { reservation: reservation(rest), result: Err("busy".to_owned()) },
        "gone" => Event::ProcessGone { reservation: reservation(rest) },
        "report" => Event::ReportRequested,
        "tick" => Event::Tick,
        _ => panic!("unknown word {word}"),
    }
}

fn format_holdings(holdings: impl IntoIterator<Item = Holding>) -> String {
    holdings.into_iter().map(|h| format!("{}.{}", h.slice, h.epoch)).collect::<Vec<_>>().join("+")
}

fn format_report(report: &ObservedState) -> String {
    let mut words = format!("{}:{}", if report.whole { "report" } else { "changes" }, report.number.revision);
    let mut part = |name: &str, list: String| {
        if !list.is_empty() {
            write!(words, ":{name}={list}").unwrap();
        }
    };
    part("online", format_holdings(report.online.iter().copied()));
    part("released", format_holdings(report.released.iter().copied()));
    part("scrubbed", format_holdings(report.scrubbed.iter().map(|s| s.holding)));
    part("failed", format_holdings(report.failed.iter().map(|f| f.holding)));
    let mark = |vm: &ObservedVm| match &vm.rehome {
        ObservedRehome::None => String::new(),
        ObservedRehome::Failed { attempt, why } => format!("({why}{attempt})"),
        ObservedRehome::Done => format!("({})", vm.local),
    };
    part("vms", report.vms.iter().map(|(id, vm)| format!("{}{}", vm_name(*id), mark(vm))).collect());
    part("ended", report.ended.iter().copied().map(vm_name).collect());
    words + if report.clean { ":clean" } else { "" }
}

fn format_effect(effect: &Effect) -> String {
    let mark = |yes: bool| if yes { "?" } else { "" };
    match effect {
        Effect::Online { holding, check_zero, .. } => {
            format!("online:{}{}", format_holdings([*holding]), mark(*check_zero))
        }
        Effect::Offline { holding, verify, .. } => {
            format!("offline:{}{}", format_holdings([*holding]), mark(*verify))
        }
        Effect::Scrub { holding, .. } => format!("scrub:{}", format_holdings([*holding])),
        Effect::CloseOrphan { place } => format!("close:{place}"),
        Effect::Record(record) => format!("record:{}", record.vm),
        Effect::DeleteRecord(id) => format!("delete:{}", vm_name(*id)),
        Effect::PassMemory { ticket, record } => {
            format!("pass:{}={}", ticket.0, format_holdings(record.slices.keys().copied()))
        }
        Effect::Refuse { ticket, why } => format!("refuse:{}:{why}", ticket.0),
        Effect::Watch { reservation, process } => format!("watch:{}@{}", vm_name(*reservation), process.pid),
        Effect::Rehome { reservation, is_resumed } => {
            format!("rehome:{}{}", vm_name(*reservation), if *is_resumed { "?" } else { "" })
        }
        Effect::CancelRehome { reservation, is_resumed } => {
            format!("cancel_rehome:{}{}", vm_name(*reservation), if *is_resumed { "?" } else { "" })
        }
        Effect::Kill(id) => format!("kill:{}", vm_name(*id)),
        Effect::FreeLocal(id) => format!("free:{}", vm_name(*id)),
        Effect::SendReport(report) => format_report(report),
        Effect::RecordRack { rack } => format!("record_rack:{rack}"),
        Effect::Disconnect(_) => "disconnect".to_owned(),
        Effect::CommandRejection(_, why) => format!("rejected:{why}"),
    }
}

/// Returns the locations of slices that an earlier instance left open.
fn orphan_locations(places: &str) -> Vec<Arc<str>> {
    holdings(places).map(|holding| handle(holding).place).collect()
}

/// Runs a script, and returns the agent and the effects of the last word.
fn run(recovered: Vec<RecoveredVm>, places: &str, script: &str) -> (Agent, String) {
    let mut now = Ns::secs(1);
    let mut agent = Agent::new(now, INSTANCE, None, recovered, orphan_locations(places));
    let (mut tickets, mut last) = (0, String::new());
    for word in script.split_whitespace() {
        if let Some(ms) = word.strip_prefix("tick:") {
            now = now.after(Ns::ms(ms.parse().unwrap()));
        }
        let event = parse_event(&agent, &mut tickets, word);
        agent.handle(now, event);
        let effects: Vec<_> = std::iter::from_fn(|| agent.poll_effect()).collect();
        last = effects.iter().map(format_effect).collect::<Vec<_>>().join(" ");
    }
    (agent, last)
}

#[track_caller]
fn check_recovered_vms(recovered: Vec<RecoveredVm>, script: &str, expected: &str) {
    assert_eq!(run(recovered, "", script).1, expected, "after {script}");
}

/// Checks the reply to a preview of VM a for process 200.
#[track_caller]
fn check_preview(script: &str, expected: Result<&str, &str>) {
    let (agent, _) = run(Vec::new(), "", script);
    let before = agent.observed_state();
    let result = agent.preview(&Name::new("a").unwrap(), root_caller(200));
    let result =
        result.map(|record| format_holdings(record.slices.keys().copied())).map_err(|why| why.to_string());
    assert_eq!(result.as_deref().map_err(String::as_str), expected, "after {script}");
    assert_eq!(agent.observed_state(), before, "a preview must not change the state");
}

#[track_caller]
fn check(script: &str, expected: &str) {
    check_recovered_vms(Vec::new(), script, expected);
}

fn recovered_vm(vm: &str, slices: &str, is_alive: bool) -> RecoveredVm {
    let DesiredVm { vm: name, local, pinned, uid, slices, rehome: _ } = desired_vm(vm, holdings(slices));
    let (reservation, process) = (reservation(vm), process(100));
    let record = VmRecord {
        reservation,
        vm: name,
        process,
        local,
        pinned,
        uid,
        slices,
        control_socket: None,
        is_rehomed: false,
    };
    RecoveredVm { record, is_alive }
}

const ATTACH_SCRIPT: &str = "up desired:1:a=1.1 ok:1.1 attach:a@100 recorded:a";

fn script_after_attach(more: &str) -> String {
    format!("{ATTACH_SCRIPT} {more}")
}

#[test]
fn preview_returns_the_memory_or_the_refusal_as_an_attach_would() {
    check_preview("up desired:1:a=1.1+2.1 ok:1.1 ok:2.1", Ok("1.1+2.1"));
    check_preview("up desired:1:a=1.1 ok:1.1 attach:a@200", Ok("1.1"));
    check_preview("up desired:1:a=1.1 ok:1.1 attach:a@200 recorded:a desired:2", Ok("1.1"));
    check_preview("up desired:1", Err("no VM a on this host"));
    check_preview("up desired:1:a=1.1+2.1 ok:1.1", Err("1 of 2 slices of VM a are online"));
    check_preview(ATTACH_SCRIPT, Err("VM a is attached to process 100, which still runs"));
    check_preview(
        &script_after_attach("gone:a"),
        Err("VM a was attached to process 100, which has ended: create a new reservation"),
    );
}

#[test]
fn new_slice_is_checked_for_zeros_before_use() {
    check("up desired:1:a=1.1", "online:1.1?");
    check("up desired:1:a=1.1 ok:1.1", "report:1:online=1.1");
}

#[test]
fn change_applies_only_to_its_base_version() {
    check("up desired:1:a=1.1 ok:1.1 desired:2:base=1:b=2.1", "online:2.1?");
    check("up desired:1:a=1.1 ok:1.1 desired:2:base=1:b=2.1 ok:2.1", "changes:2:online=2.1");
    check("up desired:1:a=1.1 ok:1.1 desired:2:base=1:b=2.1 ok:2.1 desired:3", "report:3:online=1.1+2.1");
    check("up desired:1:a=1.1 ok:1.1 desired:2:base=1:no_vm=a:release=1.1", "offline:1.1");
    check(
        "up desired:1:a=1.1 ok:1.1 desired:2:base=1:no_vm=a:release=1.1 ok:1.1",
        "changes:2:released=1.1:clean",
    );
    check(
        "up desired:1:a=1.1 ok:1.1 desired:2:base=1:no_vm=a:release=1.1 ok:1.1 desired:3:base=2:no_slice=1",
        "changes:3:clean",
    );
    check(
        "up desired:1 desired:3:base=2:a=1.1",
        "rejected:desired state changes version 0.2, but the latest applied version is 0.1",
    );
    check(
        "up desired:1 desired:2:base=1:a=1.1 desired:2:base=1:a=1.1",
        "rejected:desired state changes version 0.1, but the latest applied version is 0.2",
    );
}

#[test]
fn heartbeat_is_empty_and_requested_report_is_complete() {
    let ms = 4000 / HEARTBEATS_PER_LEASE;
    let online = "up desired:1:a=1.1+2.1 ok:1.1 ok:2.1";
    check(&format!("{online} tick:{}", ms - 1), "");
    check(&format!("{online} tick:{ms}"), "changes:1");
    check(&format!("{online} report"), "report:1:online=1.1+2.1");
    check(&format!("{online} report tick:{ms}"), "changes:1");
    check(&format!("{online} down up"), "report:1:online=1.1+2.1");
}

#[test]
fn reports_are_numbered_in_each_session() {
    let mut agent = Agent::new(Ns::ZERO, INSTANCE, None, Vec::new(), orphan_locations(""));
    let mut sequences = |word: &str| {
        let event = parse_event(&agent, &mut 0, word);
        agent.handle(Ns::ZERO, event);
        let effects = std::iter::from_fn(|| agent.poll_effect());
        let reports = effects.filter_map(|effect| match effect {
            Effect::SendReport(report) => Some((report.after, report.sequence)),
            _ => None,
        });
        reports.collect::<Vec<_>>()
    };
    assert_eq!(sequences("up"), [(0, 1)]);
    assert_eq!(sequences("desired:1"), [(1, 2)]);
    assert_eq!(sequences("report"), [(2, 3)]);
    assert_eq!([sequences("down"), sequences("up")], [vec![], vec![(0, 1)]]);
}

#[test]
fn nonzero_slice_is_closed_then_reported_and_never_passed_on() {
    check("up desired:1:a=1.1 dirty:1.1", "close:/emc/1.1 report:1");
    check("up desired:1:a=1.1 dirty:1.1 unclosed:1.1", "changes:1");
    let closed = |more: &str| format!("up desired:1:a=1.1 dirty:1.1 closed:1.1 {more}");
    check(&closed(""), "changes:1:failed=1.1:clean");
    check(&closed("tick:60000"), "changes:1:failed=1.1:clean");
    check(&closed("desired:2:a=1.1"), "report:2:failed=1.1:clean");
    check(&closed("attach:a@100"), "refuse:1:0 of 1 slices of VM a are online");
    check(&closed("desired:2"), "report:2:clean");
    check(&closed("desired:2:release=1.1 ok:1.1"), "report:2:released=1.1:clean");
}

#[test]
fn failed_host_call_is_retried_and_repeated_failure_reported() {
    let ms = HOST_CALL_RETRY_DELAY.as_ms();
    check("up desired:1:a=1.1 fail:1.1", "report:1");
    check(&format!("up desired:1:a=1.1 fail:1.1 tick:{}", ms - 1), "");
    check(&format!("up desired:1:a=1.1 fail:1.1 tick:{ms}"), "online:1.1?");
    let twice = format!("up desired:1:a=1.1 fail:1.1 tick:{ms} fail:1.1 tick:{ms}");
    check(&format!("{twice} fail:1.1"), "close:/emc/1.1 changes:1");
    check(&format!("{twice} fail:1.1 tick:{ms}"), "");
    check(&format!("{twice} fail:1.1 closed:1.1"), "changes:1:failed=1.1:clean");
    check(&format!("{twice} fail:1.1 closed:1.1 tick:{ms}"), "online:1.1?");
    check(&format!("{twice} ok:1.1"), "changes:1:online=1.1");
}

#[test]
fn orphan_is_closed_unless_desired_first_or_used_by_a_vm() {
    let check = |script: &str, expected: &str| {
        assert_eq!(run(Vec::new(), "1.1+2.1", script).1, expected, "after {script}");
    };
    check("up", "record_rack:R report:0");
    check("up tick:60000", "changes:0");
    check("up desired:1", "close:/emc/1.1 close:/emc/2.1 report:1");
    check("up desired:1 closed:1.1", "changes:1");
    check("up desired:1 closed:1.1 closed:2.1", "changes:1:clean");
    check("up desired:1:a=1.1", "online:1.1? close:/emc/2.1");
    check("up desired:1:release=1.1", "offline:1.1 close:/emc/2.1");
    check("up desired:1:scrub=1.1", "scrub:1.1 close:/emc/2.1 report:1");
    check(
        "up desired:1:a=1.1+2.1 ok:1.1 ok:2.1 desired:2:base=1:no_vm=a:release=1.1+2.1",
        "offline:1.1 offline:2.1",
    );
    check("up desired:1:fenced", "close:/emc/1.1 close:/emc/2.1 report:1");
    let (_, last) = run(vec![recovered_vm("a", "1.1", true)], "1.1+2.1", "up ok:1.1 desired:1");
    assert_eq!(last, "close:/emc/2.1 report:1:online=1.1:vms=a");
}

#[test]
fn orphan_of_an_ended_vm_stays_until_its_release_is_requested() {
    let check = |script: &str, expected: &str| {
        assert_eq!(run(vec![recovered_vm("a", "1.1", false)], "1.1", script).1, expected, "after {script}");
    };
    check("up desired:1", "report:1:ended=a");
    check("up desired:1:a=1.1", "report:1:ended=a");
    check("up desired:1:release=1.1", "offline:1.1?");
    check("up desired:1:fenced", "offline:1.1?");
    check("up desired:1:fenced ok:1.1", "record:a report:1:ended=a:clean");
}

/// The record of ended VM a still contains a slice that was released and passed to VM b. A
/// restarted agent must not take the slice from VM b.
#[test]
fn slice_of_a_later_owner_is_not_closed_for_an_earlier_owner() {
    let mut before = recovered_vm("a", "1.1", false);
    before.record.slices.insert(holding("1.1"), handle(holding("1.2")));
    let check = |recovered: Vec<RecoveredVm>, script: &str, expected: &str| {
        assert_eq!(run(recovered, "1.2", script).1, expected, "after {script}");
    };
    check(vec![before.clone()], "up desired:1:b=1.2", "record:a online:1.2?");
    check(vec![before.clone()], "up desired:1:release=1.2", "record:a offline:1.2");
    let later = recovered_vm("b", "1.2", true);
    check(vec![before, later], "up ok:1.2 desired:1:b=1.2", "record:a report:1:online=1.2:vms=b:ended=a");
}

#[test]
fn closed_orphan_can_reopen_and_failed_close_is_retried() {
    let check = |script: &str, expected: &str| {
        assert_eq!(run(Vec::new(), "1.1", script).1, expected, "after {script}");
    };
    check("up desired:1 desired:2:a=1.1", "report:2");
    check("up desired:1 desired:2:a=1.1 closed:1.1", "online:1.1?");
    check("up desired:1 unclosed:1.1", "changes:1");
    check(&format!("up desired:1 unclosed:1.1 tick:{}", HOST_CALL_RETRY_DELAY.as_ms()), "close:/emc/1.1");
    check(&format!("up desired:1 unclosed:1.1 tick:{}", HOST_CALL_RETRY_DELAY.as_ms() - 1), "");
}

#[test]
fn process_receives_memory_only_after_it_is_recorded() {
    check("up desired:1:a=1.1 ok:1.1 attach:a@100", "record:a");
    check(ATTACH_SCRIPT, "watch:a@100 pass:1=1.1 changes:1:vms=a");
    check("up desired:1:a=1.1 ok:1.1 attach:a@100 attach:a@100", "");
    check(
        "up desired:1:a=1.1 ok:1.1 attach:a@100 attach:a@100 recorded:a",
        "watch:a@100 pass:1=1.1 pass:2=1.1 changes:1:vms=a",
    );
    check(
        "up desired:1:a=1.1 ok:1.1 attach:a@100 unrecorded:a",
        "delete:a refuse:1:VM a could not be recorded: full",
    );
}

#[test]
fn vm_receives_all_its_slices_or_none() {
    check("up desired:1:a=1.1+2.1 ok:1.1 attach:a@100", "refuse:1:1 of 2 slices of VM a are online");
    check("up desired:1 attach:a@100", "refuse:1:no VM a on this host");
}

#[test]
fn vm_is_unknown_only_after_the_first_desired_state() {
    let text = |reason: &str| format!("cannot look up VM a: the agent {reason} yet; retry later");
    let disconnected = text("is not connected to the manager");
    let connected = text("has not received its desired state from the manager");
    check("attach:a@100", &format!("refuse:1:{disconnected}"));
    check("up attach:a@100", &format!("refuse:1:{connected}"));
    check("up down attach:a@100", &format!("refuse:1:{disconnected}"));
    check_preview("", Err(&disconnected));
    check_preview("up", Err(&connected));
    check("up desired:1 down attach:a@100", "refuse:1:no VM a on this host");
}

#[test]
fn vm_without_slices_receives_its_local_memory() {
    check("up desired:1:a= attach:a@100 recorded:a", "watch:a@100 pass:1= changes:1:vms=a");
}

#[test]
fn only_its_own_process_attaches_a_vm_again() {
    check(&script_after_attach("attach:a@100"), "pass:2=1.1");
    check(&script_after_attach("down desired:2 attach:a@100"), "pass:2=1.1");
    check(&script_after_attach("attach:a@200"), "refuse:2:VM a is attached to process 100, which still runs");
    check(
        &script_after_attach("gone:a attach:a@200"),
        "refuse:2:VM a was attached to process 100, which has ended: create a new reservation",
    );
    check(
        "up desired:1:a=1.1 ok:1.1 attach:a@100 attach:a@200",
        "refuse:2:VM a is attached to process 100, which still runs",
    );
}

#[test]
fn desired_state_received_during_a_record_write_applies() {
    check(
        "up desired:1:a=1.1 ok:1.1 attach:a@100 desired:2:release=1.1 recorded:a",
        "delete:a refuse:1:no VM a on this host offline:1.1",
    );
    check(
        "up desired:1:a=1.1 ok:1.1 attach:a@100 desired:2:a=1.1:force=1.1 recorded:a",
        "delete:a refuse:1:0 of 1 slices of VM a are online",
    );
}

#[test]
fn slice_of_a_running_vm_is_released_only_by_force() {
    check(&script_after_attach("desired:2:release=1.1"), "report:2:online=1.1:vms=a");
    check(&script_after_attach("desired:2:release=1.1 gone:a"), "free:a offline:1.1?");
    check(
        &script_after_attach("desired:2:release=1.1 gone:a ok:1.1"),
        "record:a changes:2:released=1.1:ended=a:clean",
    );
    check(&script_after_attach("desired:2:force=1.1"), "offline:1.1");
    check(&script_after_attach("desired:2:force=1.1 ok:1.1"), "record:a report:2:released=1.1:vms=a");
}

#[test]
fn closing_a_slice_in_use_is_retried() {
    let gone = script_after_attach("desired:2:release=1.1 gone:a fail:1.1");
    check(&gone, "changes:2:ended=a");
    check(&format!("{gone} tick:{}", HOST_CALL_RETRY_DELAY.as_ms()), "offline:1.1?");
}

#[test]
fn unknown_slice_is_closed_and_reported_while_requested() {
    check("up desired:1:release=9.3", "offline:9.3");
    check("up desired:1:release=9.3 ok:9.3", "report:1:released=9.3:clean");
    check("up desired:1:release=9.3 fail:9.3", "report:1:online=9.3");
    check("up desired:1:release=9.3 ok:9.3 desired:2:release=9.3", "report:2:released=9.3:clean");
    check("up desired:1:release=9.3 ok:9.3 tick:1000", "changes:1:released=9.3:clean");
    check("up desired:1:release=9.3 ok:9.3 desired:2", "report:2:clean");
}

#[test]
fn release_waits_for_the_current_call() {
    check("up desired:1:a=1.1 desired:2:release=1.1", "");
    check("up desired:1:a=1.1 desired:2:release=1.1 ok:1.1", "offline:1.1");
    check("up desired:1:a=1.1 desired:2:release=1.1 fail:1.1", "offline:1.1");
    check("up desired:1:a=1.1 desired:2:release=1.1 fail:1.1 ok:1.1", "report:2:released=1.1:clean");
}

#[test]
fn slice_absent_from_the_desired_state_stays_online() {
    check("up desired:1:a=1.1 ok:1.1 desired:2", "report:2:online=1.1");
    check(&script_after_attach("desired:2"), "report:2:online=1.1:vms=a");
}

#[test]
fn earlier_owner_is_closed_before_its_successor_opens() {
    check("up desired:1:a=1.1 ok:1.1 desired:2:b=1.2", "offline:1.1 online:1.2?");
    check(&script_after_attach("desired:2:b=1.2"), "online:1.2?");
}

#[test]
fn close_failure_is_reported_only_while_a_later_owner_is_desired() {
    let ms = HOST_CALL_RETRY_DELAY.as_ms();
    let succeeded = "up desired:1:a=1.1 ok:1.1 desired:2:b=1.2 ok:1.2 fail:1.1";
    let failed = format!("{succeeded} tick:{ms} fail:1.1 tick:{ms} fail:1.1");
    check(&failed, "changes:2:failed=1.1");
    check(&format!("{failed} desired:3:b=1.2"), "report:3:online=1.1+1.2:failed=1.1");
    check(&format!("{failed} desired:3"), "report:3:online=1.1+1.2");
}

#[test]
fn slices_are_released_before_new_slices_open() {
    check("up desired:1:a=7.1 ok:7.1 desired:2:b=1.1:release=7.1", "offline:7.1 online:1.1?");
}

#[test]
fn scrub_is_reported_while_it_is_requested() {
    check("up desired:1:scrub=1.2", "scrub:1.2 report:1");
    check("up desired:1:scrub=1.2 ok:1.2", "changes:1:scrubbed=1.2:clean");
    check("up desired:1:scrub=1.2 ok:1.2 desired:1:scrub=1.2", "report:1:scrubbed=1.2:clean");
    check("up desired:1:scrub=1.2 ok:1.2 desired:2", "report:2:clean");
    check("up desired:1:scrub=1.2 desired:2 ok:1.2", "changes:2:clean");
}

#[test]
fn partly_verified_scrub_is_repeated() {
    check("up desired:1:scrub=1.2 half:1.2", "changes:1");
    check("up desired:1:scrub=1.2 half:1.2 tick:500", "scrub:1.2");
    check("up desired:1:scrub=1.2 half:1.2 tick:500 ok:1.2", "changes:1:scrubbed=1.2:clean");
}

#[test]
fn stale_and_foreign_desired_states_are_rejected() {
    check("desired:1:a=1.1", "rejected:no manager has accepted this host yet");
    check("up desired:2 desired:1:a=1.1", "rejected:desired state is older than version 0.2");
    check("up desired:2:a=1.1:instance", "rejected:desired state is for instance 4, but this is instance 5");
    check(
        "up desired:2:a=1.1:rack",
        "rejected:this host serves rack R, not rack Q: if the host was moved, empty its runtime directory",
    );
    check("up down up:Q", "disconnect");
    check("up down up:Q desired:3:a=1.1:rack tick:60000", "");
}

#[test]
fn fenced_host_kills_its_vms_and_then_reports_clean() {
    check(&script_after_attach("desired:2:fenced"), "kill:a report:2:online=1.1:vms=a");
    check(&script_after_attach("desired:2:fenced gone:a"), "free:a offline:1.1?");
    check(&script_after_attach("desired:2:fenced gone:a ok:1.1"), "record:a changes:2:ended=a:clean");
    check("up desired:1:a=1.1 ok:1.1 desired:2:fenced", "offline:1.1");
    check("up desired:1:fenced", "report:1:clean");
}

#[test]
fn ended_vm_is_reported_until_absent_for_retention_time() {
    let ended = script_after_attach("gone:a");
    check(&ended, "free:a changes:1:ended=a");
    let later = ENDED_VM_REPORT_DURATION.as_ms();
    check(&format!("{ended} tick:{later}"), "changes:1:ended=a");
    let absent = format!("{ended} desired:2:release=1.1 ok:1.1 desired:3");
    check(&absent, "report:3:ended=a:clean");
    check(&format!("{absent} tick:{later}"), "delete:a changes:3:clean");
    check(&format!("{ended} desired:2 tick:{later}"), "changes:2:ended=a");
}

#[test]
fn restarted_agent_keeps_running_vms() {
    let live = || vec![recovered_vm("a", "1.1", true)];
    check_recovered_vms(live(), "up", "watch:a@100 online:1.1 record_rack:R");
    check_recovered_vms(live(), "up ok:1.1", "report:0:online=1.1:vms=a");
    check_recovered_vms(live(), "up ok:1.1 attach:a@100", "pass:1=1.1");
    check_recovered_vms(live(), "up ok:1.1 desired:1:release=1.1", "report:1:online=1.1:vms=a");
    check_recovered_vms(live(), "up fail:1.1 desired:1:release=1.1", "report:1:vms=a");
    check_recovered_vms(live(), "up fail:1.1 desired:1:release=1.1 gone:a", "free:a offline:1.1?");
}

#[test]
fn restarted_agent_reports_vms_that_ended_before_restart() {
    let dead = || vec![recovered_vm("a", "1.1", false)];
    check_recovered_vms(dead(), "up", "free:a record_rack:R report:0:ended=a");
    check_recovered_vms(dead(), "up desired:1:a=1.1", "report:1:ended=a");
    check_recovered_vms(dead(), "up desired:1:release=1.1", "offline:1.1?");
    check_recovered_vms(
        dead(),
        "up desired:1:a=1.1 attach:a@200",
        "refuse:1:VM a was attached to process 100, which has ended: create a new reservation",
    );
}

/// A child process of an ended VM may still have a slice. The restarted agent of a fenced host must
/// not report that the host is clean before the slice is closed.
#[test]
fn host_is_not_clean_while_a_child_of_an_ended_vm_has_a_slice() {
    let dead = || vec![recovered_vm("a", "1.1", false)];
    check_recovered_vms(dead(), "up desired:1:fenced", "offline:1.1?");
    check_recovered_vms(dead(), "up desired:1:fenced fail:1.1", "report:1:online=1.1:ended=a");
    check_recovered_vms(dead(), "up desired:1:fenced fail:1.1 tick:500", "offline:1.1?");
    check_recovered_vms(dead(), "up desired:1:fenced ok:1.1", "record:a report:1:ended=a:clean");
}

#[test]
fn host_with_hidden_devices_never_reports_clean() {
    let mut agent = Agent::new(Ns::ZERO, INSTANCE, Some("R".to_owned()), Vec::new(), Vec::new());
    assert!(agent.observed_state().clean);
    agent.assume_undetected_orphans();
    assert!(!agent.observed_state().clean);
}

#[test]
fn reused_vm_name_is_another_vm() {
    let mut again = desired_state(2);
    again.vms.insert(ReservationId(2), desired_vm("a", holdings("2.1")));
    let mut agent = Agent::new(
        Ns::ZERO,
        INSTANCE,
        Some("R".to_owned()),
        vec![recovered_vm("a", "1.1", true)],
        Vec::new(),
    );
    agent.handle(Ns::ZERO, Event::DesiredState { rack: "R".to_owned(), desired: again });
    agent.handle(Ns::ZERO, Event::Done { holding: holding("2.1"), result: Ok(SliceOutcome::Onlined) });
    let attach = Event::Attach { ticket: Ticket(1), vm: Name::new("a").unwrap(), caller: root_caller(200) };
    agent.handle(Ns::ZERO, attach);
    agent.handle(Ns::ZERO, Event::Recorded { reservation: ReservationId(2), result: Ok(()) });
    assert_eq!(format_report(&agent.observed_state()), "report:2:online=2.1:vms=ab");
}

#[test]
fn heartbeats_are_sent_only_while_connected() {
    check("up tick:999", "");
    check("up tick:1000", "changes:0:clean");
    check("up down tick:5000", "");
    let mut agent = Agent::new(Ns::ZERO, INSTANCE, None, Vec::new(), Vec::new());
    assert_eq!(agent.next_wakeup(), None);
    agent.handle(Ns::ZERO, Event::SessionUp { rack: "R".to_owned(), lease_ttl: Ns::secs(4) });
    assert_eq!(agent.next_wakeup(), Some(Ns::secs(1)));
}
