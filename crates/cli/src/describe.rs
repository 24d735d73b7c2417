//! `tarn describe` and `tarn explain`: everything about one thing, and why it is so.

use proto::v1;
use serde::Serialize;
use tonic::Status;

use crate::{
    Connection, Failure, Format,
    args::{Ref, Subject},
    get, lists, print,
    table::{self, Row},
    view,
};

/// VMs of a host that `tarn explain host` names.
const VMS_SHOWN: usize = 8;

/// A VM's memory, slice by slice.
#[derive(Debug, Serialize)]
struct Vm {
    #[serde(flatten)]
    reservation: view::Reservation,
    slice_details: Vec<view::SliceDetail>,
}

/// A host with what runs there.
#[derive(Debug, Serialize)]
struct Host {
    #[serde(flatten)]
    host: view::Host,
    vms: Vec<view::Reservation>,
    alarms: Vec<view::Alarm>,
}

/// An EMC with what is wrong with it.
#[derive(Debug, Serialize)]
struct Emc {
    #[serde(flatten)]
    emc: view::Emc,
    alarms: Vec<view::Alarm>,
}

/// Prints everything about one thing.
pub(crate) async fn run(subject: Subject, to: &Connection, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Rack => {
            let rack = view::Rack::from(lists::rack(to).await?);
            print::say(format, &rack, |_| table::facts(&rack) + &section("ALARMS", &rack.alarms))
        }
        Subject::Vm { which } => vm(which, to, format).await,
        Subject::Host { name } => host(name.into(), to, format).await,
        Subject::Emc { name } => emc(name.into(), to, format).await,
        Subject::Slice { slice } => {
            let slice = view::SliceDetail::from(get::slice(to, slice).await?);
            print::say(format, &slice, |_| table::facts(&slice))
        }
    }
}

async fn vm(which: Ref, to: &Connection, format: Format) -> Result<(), Failure> {
    let reservation = get::reservation(to, which).await?;
    let slice_details = slices_of(&reservation, to).await?;
    let vm = Vm { reservation, slice_details };
    print::say(format, &vm, |_| table::facts(&vm.reservation) + &section("SLICES", &vm.slice_details))
}

/// Slices of one VM are mostly neighbours: the pages between its first and its last hold few others. Those that have
/// gone on to another owner are no longer this VM's.
async fn slices_of(of: &view::Reservation, to: &Connection) -> Result<Vec<view::SliceDetail>, Failure> {
    let (Some(first), Some(last)) = (of.slices.iter().min(), of.slices.iter().max()) else {
        return Ok(Vec::new());
    };
    let between = lists::slices(to, *first, *last).await?;
    let its = |s: &v1::Slice| of.slices.contains(&s.slice) && s.vm.as_ref() == Some(&of.vm);
    Ok(between.into_iter().filter(its).map(view::SliceDetail::from).collect())
}

async fn host(name: String, to: &Connection, format: Format) -> Result<(), Failure> {
    let host = get::host(to, name.clone()).await?;
    let vms = lists::reservations(to, false).await?.into_iter().filter(|r| r.host == name);
    let vms = vms.map(view::Reservation::from).collect();
    let alarms = get::alarms(to, Some(&format!("host {name}"))).await?;
    let host = Host { host, vms, alarms };
    let text =
        |_| table::facts(&host.host) + &section("RESERVATIONS", &host.vms) + &section("ALARMS", &host.alarms);
    print::say(format, &host, text)
}

async fn emc(name: String, to: &Connection, format: Format) -> Result<(), Failure> {
    let alarms = get::alarms(to, Some(&format!("emc {name}"))).await?;
    let emc = Emc { emc: get::emc(to, name).await?, alarms };
    print::say(format, &emc, |_| table::facts(&emc.emc) + &section("ALARMS", &emc.alarms))
}

/// A headed table, or nothing if there is nothing.
fn section<T: Row>(head: &str, things: &[T]) -> String {
    if things.is_empty() { String::new() } else { format!("\n{head}\n{}", table::rows(things, false)) }
}

/// Prints every decision about one thing.
pub(crate) async fn explain(subject: Subject, to: &Connection, format: Format) -> Result<(), Failure> {
    let words = asked(subject.clone(), to).await?;
    let answer = to.ask(to.admin().explain(v1::ExplainRequest { subject: words.clone() })).await?;
    let decisions: Vec<_> = answer.decisions.into_iter().map(view::Decision::from).collect();
    let without = if decisions.is_empty() { unexplained(subject, &words, to).await? } else { String::new() };
    print::say(format, &decisions, |_| match decisions.as_slice() {
        [] => without,
        some => some.iter().map(table::decision).collect(),
    })
}

/// The state of something about which no decision is remembered, and where decisions that concern it are; a refusal if it
/// does not exist.
async fn unexplained(subject: Subject, words: &str, to: &Connection) -> Result<String, Failure> {
    let nothing = format!("no decision about {words} is remembered");
    match subject {
        Subject::Rack => Ok(format!("{nothing}\n")),
        Subject::Vm { .. } => Err(Status::not_found(nothing).into()),
        Subject::Host { name } => {
            let host = get::host(to, name.clone().into()).await?;
            let vms = lists::reservations(to, false).await?.into_iter();
            let vms = vms.filter(|r| r.host == name.as_str()).map(|r| r.vm);
            let alarms = get::alarms(to, Some(words)).await?;
            let state = format!("{nothing}; it is {}, scheduling {}\n", host.state, host.scheduling);
            Ok(state + &alarm_lines(&alarms) + &pointers(vms))
        }
        Subject::Emc { name } => {
            let emc = get::emc(to, name.into()).await?;
            let alarms = get::alarms(to, Some(words)).await?;
            let state = format!("{nothing}; it is {}, scheduling {}\n", emc.state, emc.scheduling);
            Ok(state + &alarm_lines(&alarms))
        }
        Subject::Slice { slice } => {
            let slice = view::SliceDetail::from(get::slice(to, slice).await?);
            let host = slice.slice.host.iter().map(|host| format!(" of host {host}")).collect::<String>();
            let reason = slice.reason.iter().map(|reason| format!(": {reason}")).collect::<String>();
            let (state, epoch) = (&slice.slice.state, slice.slice.epoch);
            let state = format!("{nothing}; it is {state}{host}, epoch {epoch}{reason}\n");
            Ok(state + &pointers(slice.slice.vm))
        }
    }
}

fn alarm_lines(alarms: &[view::Alarm]) -> String {
    alarms.iter().map(|alarm| format!("{}: {}\n", alarm.reason, alarm.message)).collect()
}

/// The commands that show the decisions about VMs, a line each.
fn pointers(vms: impl IntoIterator<Item = String>) -> String {
    let mut vms = vms.into_iter();
    let shown = vms.by_ref().take(VMS_SHOWN).map(|vm| format!("its VM: `tarn explain vm {vm}`\n"));
    let shown: String = shown.collect();
    match vms.count() {
        0 => shown,
        more => format!("{shown}and {more} more VMs: `tarn get reservations`\n"),
    }
}

/// The subject in the manager's words: decisions are filed under VMs, so a reservation is looked up first.
async fn asked(subject: Subject, to: &Connection) -> Result<String, Failure> {
    Ok(match subject {
        Subject::Rack => "rack".to_owned(),
        Subject::Vm { which: Ref::Vm(name) } => format!("vm {name}"),
        Subject::Vm { which } => format!("vm {}", get::reservation(to, which).await?.vm),
        Subject::Host { name } => format!("host {name}"),
        Subject::Emc { name } => format!("emc {name}"),
        Subject::Slice { slice } => format!("slice {slice}"),
    })
}
