//! Commands for the requests of a scheduler: `tarn plan-vm`, `reserve`, `wait-ready`, `commit`,
//! `release` and `migration`.

use std::{
    io::{self, Write as _},
    time::Duration,
};

use proto::v1;
use tonic::Status;
use units::{
    RequestId,
    limits::{REHOME_POLL_INTERVAL, RESPONSE_TIMEOUT_SLACK},
};

use crate::{
    Connection, Failure, Format,
    args::{Migration, PlanVm, Rehome, Release, Reserve, Resolution, VmOrReservation},
    print, table, view,
};

/// Prints how the memory of a VM would be split, and the hosts that fit.
pub(crate) async fn plan_vm(args: PlanVm, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::PlanVmRequest {
        vm: args.vm.into(),
        cores: args.cores,
        memory_bytes: args.memory.get(),
        pinned: args.pinned,
        profile: Some(v1::VmProfile {
            key: args.customer,
            kind: args.vm_type,
            place: args.location,
            counters: args.counter.into_iter().collect(),
        }),
    };
    let plan = view::Plan::from(manager.call(manager.scheduler().plan_vm(request)).await?);
    print::value(format, &plan, |_| table::format_plan(&plan))
}

/// Reserves memory on a host for a VM.
pub(crate) async fn reserve(args: Reserve, manager: &Connection, format: Format) -> Result<(), Failure> {
    let timeout = if args.wait_ready { manager.wait_timeout() } else { manager.timeout() };
    let validate_only = args.validate_only;
    let request_id = match &args.request_id {
        Some(id) => id.clone(),
        // Not printed, because a validation changes nothing and can be repeated with any ID.
        None if validate_only => random_request_id()?,
        None => new_request_id(format)?,
    };
    let request = reserve_request(args, request_id);
    if validate_only {
        let valid = view::ValidationResult::from(
            manager.call_with_timeout(timeout, manager.scheduler().reserve(request)).await?,
        );
        return print::value(format, &valid, |_| table::format_validated(&valid));
    }
    print_reservation(format, manager.call_with_timeout(timeout, manager.scheduler().reserve(request)).await?)
}

fn reserve_request(args: Reserve, request_id: RequestId) -> v1::ReserveRequest {
    v1::ReserveRequest {
        request_id: request_id.into(),
        host: args.host.into(),
        vm: args.vm.into(),
        pool_bytes: args.pool.get(),
        local_bytes: args.local.get(),
        cores: args.cores,
        pinned: args.pinned,
        validate_only: args.validate_only,
        wait_ready: args.wait_ready,
        commit_within_ms: args.commit_within.map_or(0, to_request_ms),
        client: args.client.into(),
        uid: args.uid,
    }
}

/// Creates a random request ID and prints it before the request is sent. If the response is lost,
/// the user can repeat the request with this ID.
fn new_request_id(format: Format) -> Result<RequestId, Failure> {
    let id = random_request_id()?;
    let line = match format {
        Format::Json => format!("{{\"request_id\":\"{id}\"}}\n"),
        Format::Table | Format::Wide | Format::Yaml | Format::Csv => format!("request_id: {id}\n"),
    };
    io::stderr().lock().write_all(line.as_bytes()).map_err(Failure::Output)?;
    Ok(id)
}

fn random_request_id() -> Result<RequestId, Failure> {
    let mut random = [0_u8; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::Protocol(format!("cannot read random numbers: {errno}")))?;
    Ok(RequestId::new(&format!("{:032x}", u128::from_be_bytes(random)))
        .expect("32 hex digits are a valid request ID"))
}

/// Waits until every slice is online. The manager enforces the time limit. The client waits
/// slightly longer, so that the manager's timeout error arrives.
pub(crate) async fn wait_ready(
    target: VmOrReservation,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    let timeout = manager.wait_timeout();
    let request = v1::WaitReadyRequest { target: Some(target.into()), timeout_ms: to_request_ms(timeout) };
    let timeout = timeout.saturating_add(RESPONSE_TIMEOUT_SLACK.as_duration());
    print_reservation(
        format,
        manager.call_with_timeout(timeout, manager.scheduler().wait_ready(request)).await?,
    )
}

/// Confirms that a VM has started.
pub(crate) async fn commit(
    target: VmOrReservation,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    let request = v1::CommitRequest { target: Some(target.into()) };
    print_reservation(format, manager.call(manager.scheduler().commit(request)).await?)
}

/// Releases the memory of a VM.
pub(crate) async fn release(args: Release, manager: &Connection, format: Format) -> Result<(), Failure> {
    let reason = args.reason.unwrap_or_default();
    let request = v1::ReleaseRequest { target: Some(args.target.into()), force: args.force, reason };
    let released = manager.call(manager.scheduler().release(request)).await?;
    if released.process_running {
        warn_process_running(&released)?;
    }
    print_reservation(format, released)
}

/// Moves the pool memory of a VM to local memory.
pub(crate) async fn rehome(args: Rehome, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::RehomeVmRequest { target: Some(args.target.into()), cancel: args.cancel };
    let mut reservation = manager.call(manager.scheduler().rehome_vm(request)).await?;
    let state = reservation.rehome.as_ref().map(v1::Rehome::state);
    if args.cancel && state != Some(v1::RehomeState::Cancelling) {
        print::note(format, &format!("no move of vm {} is in progress", reservation.vm));
    } else if !args.wait && state == Some(v1::RehomeState::Done) {
        print::note(format, &format!("vm {} already uses only local memory", reservation.vm));
    } else if !args.wait {
        let action = if args.cancel { "is being cancelled" } else { "is in progress" };
        let vm = &reservation.vm;
        print::note(format, &format!("the move {action}; to see the result, run `tarn describe vm {vm}`"));
    }
    if args.wait {
        let wait = wait_for_rehome(&mut reservation, manager);
        let timeout = manager.wait_timeout();
        let late = |_| Err(Status::deadline_exceeded("the memory is still being moved").into());
        tokio::time::timeout(timeout, wait).await.unwrap_or_else(late)?;
    }
    print_reservation(format, reservation)
}

/// Polls a reservation until the move of its VM's memory has ended.
async fn wait_for_rehome(reservation: &mut v1::Reservation, manager: &Connection) -> Result<(), Failure> {
    let reference = v1::ReservationRef { reservation: reservation.reservation.clone(), vm: String::new() };
    let target = Some(reference);
    loop {
        let rehome = reservation.rehome.clone().unwrap_or_default();
        match rehome.state() {
            v1::RehomeState::Done => return Ok(()),
            v1::RehomeState::Copying | v1::RehomeState::Cancelling
                if reservation.state() != v1::ReservationState::Released => {}
            _ => {
                let reason = if rehome.reason.is_empty() { "the VM has ended".into() } else { rehome.reason };
                return Err(Status::aborted(format!("the memory was not moved: {reason}")).into());
            }
        }
        tokio::time::sleep(REHOME_POLL_INTERVAL.as_duration()).await;
        // A running VM is ready, so the reply is immediate.
        let request = v1::WaitReadyRequest { target: target.clone(), timeout_ms: 0 };
        *reservation = manager.call(manager.scheduler().wait_ready(request)).await?;
    }
}

/// Prints a warning that the process of a released VM still runs.
fn warn_process_running(released: &v1::Reservation) -> Result<(), Failure> {
    let v1::Reservation { vm, host, .. } = released;
    let line = format!(
        "warning: the process of VM {vm} still runs on host {host}; \
         its cores and local memory stay in use until it ends\n"
    );
    io::stderr().lock().write_all(line.as_bytes()).map_err(Failure::Output)
}

/// Sets the state of a migration request.
pub(crate) async fn migration(
    command: Migration,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    let Migration::Resolve { vm, state, id, reason } = command;
    let request = v1::ResolveMigrationRequest {
        vm: vm.into(),
        state: v1::MigrationState::from(state).into(),
        answer: reason.unwrap_or_default(),
        id: id.map(|id| id.to_string()).unwrap_or_default(),
    };
    print::one(
        format,
        &view::Migration::from(manager.call(manager.scheduler().resolve_migration(request)).await?),
    )
}

impl From<Resolution> for v1::MigrationState {
    fn from(resolution: Resolution) -> Self {
        match resolution {
            Resolution::Accepted => Self::Accepted,
            Resolution::Declined => Self::Declined,
            Resolution::Done => Self::Done,
        }
    }
}

fn print_reservation(format: Format, reservation: v1::Reservation) -> Result<(), Failure> {
    print::one(format, &view::Reservation::from(reservation))
}

/// Converts a duration to whole milliseconds. Returns at least 1, because 0 means the default in
/// requests.
fn to_request_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1)
}
