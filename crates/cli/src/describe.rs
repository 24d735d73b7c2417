//! `tarn describe` prints all details of a resource, `tarn explain` the recorded decisions about a
//! resource.

use proto::v1;
use serde::Serialize;
use tonic::{Code, Status};

use crate::{
    Connection, Failure, Format,
    args::{Subject, VmOrReservation},
    get, lists, print,
    table::{self, Row},
    view,
};

/// Maximum number of VMs that `tarn explain host` suggests if no decisions about the host are
/// recorded.
const VMS_SHOWN_MAX: usize = 8;

/// Output of `tarn describe vm`: the reservation and its slices.
#[derive(Debug, Serialize)]
struct Vm {
    #[serde(flatten)]
    reservation: view::Reservation,
    slice_details: Vec<view::SliceDetail>,
}

/// Output of `tarn describe host`: the host with its VMs and alarms.
#[derive(Debug, Serialize)]
struct Host {
    #[serde(flatten)]
    host: view::Host,
    vms: Vec<view::Reservation>,
    alarms: Vec<view::Alarm>,
}

/// Output of `tarn describe emc`: the EMC and its alarms.
#[derive(Debug, Serialize)]
struct Emc {
    #[serde(flatten)]
    emc: view::Emc,
    alarms: Vec<view::Alarm>,
}

/// Prints all details of one resource.
pub(crate) async fn run(subject: Subject, manager: &Connection, format: Format) -> Result<(), Failure> {
    match subject {
        Subject::Rack => {
            let rack = view::Rack::from(lists::rack(manager).await?);
            print::value(format, &rack, |_| table::details(&rack) + &format_section("ALARMS", &rack.alarms))
        }
        Subject::Vm { target } => describe_vm(target, manager, format).await,
        Subject::Host { name } => describe_host(name.into(), manager, format).await,
        Subject::Emc { name } => describe_emc(name.into(), manager, format).await,
        Subject::Slice { slice } => {
            let slice = view::SliceDetail::from(get::slice(manager, slice).await?);
            print::value(format, &slice, |_| table::details(&slice))
        }
    }
}

async fn describe_vm(target: VmOrReservation, manager: &Connection, format: Format) -> Result<(), Failure> {
    let reservation = get::reservation(manager, target).await?;
    let slice_details = slices_of(&reservation, manager).await?;
    let vm = Vm { reservation, slice_details };
    print::value(format, &vm, |_| {
        table::details(&vm.reservation) + &format_section("SLICES", &vm.slice_details)
    })
}

/// Returns the slices of a reservation that its VM still owns.
///
/// The function lists all slices from the first to the last of the reservation. Slices of a VM are
/// mostly adjacent, so the list contains few slices of other VMs.
async fn slices_of(
    reservation: &view::Reservation,
    manager: &Connection,
) -> Result<Vec<view::SliceDetail>, Failure> {
    let slices = &reservation.slices;
    let (Some(first), Some(last)) = (slices.iter().min(), slices.iter().max()) else {
        return Ok(Vec::new());
    };
    let range = lists::slices(manager, *first, *last).await?;
    let is_owned = |s: &v1::Slice| slices.contains(&s.slice) && s.vm.as_ref() == Some(&reservation.vm);
    Ok(range.into_iter().filter(is_owned).map(view::SliceDetail::from).collect())
}

async fn describe_host(name: String, manager: &Connection, format: Format) -> Result<(), Failure> {
    let host = get::host(manager, name.clone()).await?;
    let vms = lists::reservations(manager, false).await?.into_iter().filter(|r| r.host == name);
    let vms = vms.map(view::Reservation::from).collect();
    let alarms = get::alarms(manager, Some(&format!("host {name}"))).await?;
    let host = Host { host, vms, alarms };
    let text = |_| {
        table::details(&host.host)
            + &format_section("RESERVATIONS", &host.vms)
            + &format_section("ALARMS", &host.alarms)
    };
    print::value(format, &host, text)
}

async fn describe_emc(name: String, manager: &Connection, format: Format) -> Result<(), Failure> {
    let alarms = get::alarms(manager, Some(&format!("emc {name}"))).await?;
    let emc = Emc { emc: get::emc(manager, name).await?, alarms };
    print::value(format, &emc, |_| table::details(&emc.emc) + &format_section("ALARMS", &emc.alarms))
}

/// Formats a list as a table with a heading. Returns an empty string for an empty list.
fn format_section<T: Row>(heading: &str, items: &[T]) -> String {
    if items.is_empty() { String::new() } else { format!("\n{heading}\n{}", table::rows(items, false)) }
}

/// Prints every recorded decision about one resource.
pub(crate) async fn explain(subject: Subject, manager: &Connection, format: Format) -> Result<(), Failure> {
    let name = decision_subject(subject.clone(), manager).await?;
    let response =
        manager.call(manager.admin().explain(v1::ExplainRequest { subject: name.clone() })).await?;
    let decisions: Vec<_> = response.decisions.into_iter().map(view::Decision::from).collect();
    let rest = match subject {
        subject if decisions.is_empty() => describe_without_decisions(subject, &name, manager).await?,
        Subject::Vm { target } if matches!(format, Format::Table | Format::Wide) => {
            explain_verdict(target, manager).await?
        }
        _ => String::new(),
    };
    print::value(format, &decisions, |_| {
        decisions.iter().map(table::format_decision).collect::<String>() + &rest
    })
}

/// Explains the current verdict about a VM. Returns an empty string for a VM that has ended or has no
/// pool memory.
async fn explain_verdict(target: VmOrReservation, manager: &Connection) -> Result<String, Failure> {
    match get::find_reservation(manager, target).await {
        Ok(reservation) if reservation.state() == v1::ReservationState::Released => Ok(String::new()),
        Ok(reservation) => Ok(table::format_verdict(&view::Vm::from(reservation))),
        Err(Failure::Rejected(status)) if status.code() == Code::NotFound => Ok(String::new()),
        Err(failure) => Err(failure),
    }
}

/// Describes a resource without recorded decisions by its state, its alarms, and the commands that
/// explain its VMs.
///
/// # Errors
/// `NOT_FOUND` if the resource does not exist.
async fn describe_without_decisions(
    subject: Subject,
    name_in_ledger: &str,
    manager: &Connection,
) -> Result<String, Failure> {
    let no_decisions = format!("no decisions recorded for {name_in_ledger}");
    match subject {
        Subject::Rack => Ok(format!("{no_decisions}\n")),
        Subject::Vm { .. } => Err(Status::not_found(no_decisions).into()),
        Subject::Host { name } => {
            let host = get::host(manager, name.clone().into()).await?;
            let vms = lists::reservations(manager, false).await?.into_iter();
            let vms = vms.filter(|r| r.host == name.as_str()).map(|r| r.vm);
            let alarms = get::alarms(manager, Some(name_in_ledger)).await?;
            let state = format!("{no_decisions}; state {}, scheduling {}\n", host.state, host.scheduling);
            Ok(state + &alarm_lines(&alarms) + &explain_hints(vms))
        }
        Subject::Emc { name } => {
            let emc = get::emc(manager, name.into()).await?;
            let alarms = get::alarms(manager, Some(name_in_ledger)).await?;
            let state = format!("{no_decisions}; state {}, scheduling {}\n", emc.state, emc.scheduling);
            Ok(state + &alarm_lines(&alarms))
        }
        Subject::Slice { slice } => {
            let slice = view::SliceDetail::from(get::slice(manager, slice).await?);
            let host = slice.slice.host.iter().map(|host| format!(", host {host}")).collect::<String>();
            let reason = slice.reason.iter().map(|reason| format!(": {reason}")).collect::<String>();
            let (state, epoch) = (&slice.slice.state, slice.slice.epoch);
            let state = format!("{no_decisions}; state {state}{host}, epoch {epoch}{reason}\n");
            Ok(state + &explain_hints(slice.slice.vm))
        }
    }
}

fn alarm_lines(alarms: &[view::Alarm]) -> String {
    alarms.iter().map(|alarm| format!("{}: {}\n", alarm.reason, alarm.message)).collect()
}

/// Returns one line per VM with the `tarn explain` command for this VM.
fn explain_hints(vms: impl IntoIterator<Item = String>) -> String {
    let mut vms = vms.into_iter();
    let shown = vms.by_ref().take(VMS_SHOWN_MAX).map(|vm| format!("see also: `tarn explain vm {vm}`\n"));
    let shown: String = shown.collect();
    match vms.count() {
        0 => shown,
        more => format!("{shown}{more} more VMs: `tarn get reservations`\n"),
    }
}

/// Returns the name of a resource in the manager's audit log, such as "host h1". The log stores
/// decisions about a reservation under the name of the VM.
async fn decision_subject(subject: Subject, manager: &Connection) -> Result<String, Failure> {
    Ok(match subject {
        Subject::Rack => "rack".to_owned(),
        Subject::Vm { target: VmOrReservation::Vm(name) } => format!("vm {name}"),
        Subject::Vm { target } => format!("vm {}", get::reservation(manager, target).await?.vm),
        Subject::Host { name } => format!("host {name}"),
        Subject::Emc { name } => format!("emc {name}"),
        Subject::Slice { slice } => format!("slice {slice}"),
    })
}
