//! `tarn watch`: prints changes of the rack as they happen, one per line. After a restart of the
//! manager it reconnects.

use std::time::{Duration, Instant};

use proto::v1;
use serde::Serialize;
use tonic::{Status, Streaming};
use units::limits::{WATCH_RETRY_INTERVAL, WATCH_TIMEOUT_SLACK};

use crate::{
    Connection, Failure, Format,
    args::WatchStream,
    failure::Exit,
    print,
    table::{format_timestamp, size},
    view::{Alarm, Capacity, Change, Emc, Event, Host, HostCapacity, Migration, Reservation, SliceDetail},
};

/// Prints one stream for at most `limit`. `None` means no time limit.
pub(crate) async fn run(
    stream: WatchStream,
    manager: &Connection,
    limit: Option<Duration>,
    format: Format,
) -> Result<(), Failure> {
    let Some(after) = limit else { return watch_until_error(stream, manager, format).await };
    // The stream is polled first, so that its error takes precedence over the time limit.
    tokio::select! {
        biased;
        failed = watch_until_error(stream, manager, format) => failed,
        () = tokio::time::sleep(after.saturating_add(WATCH_TIMEOUT_SLACK.as_duration())) => {
            Err(Failure::WatchTimedOut { after })
        }
    }
}

async fn watch_until_error(stream: WatchStream, manager: &Connection, format: Format) -> Result<(), Failure> {
    let within = manager.timeout();
    match stream {
        WatchStream::Capacity => {
            let open =
                async || manager.call(manager.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await;
            print_stream::<_, Capacity>(open, within, format, capacity_lines).await
        }
        WatchStream::Events => {
            let open = async || manager.call(manager.admin().watch(v1::WatchRequest {})).await;
            print_stream::<_, Event>(open, within, format, event_line).await
        }
        WatchStream::Migrations => {
            let open = async || {
                manager.call(manager.scheduler().watch_migrations(v1::WatchMigrationsRequest {})).await
            };
            print_stream::<_, Migration>(open, within, format, migration_line).await
        }
    }
}

/// Prints the messages of a stream. Reopens the stream if the connection breaks. Returns an error
/// if the manager ends the stream or stays unavailable.
async fn print_stream<A, B: From<A> + Serialize>(
    open: impl AsyncFn() -> Result<Streaming<A>, Failure>,
    within: Duration,
    format: Format,
    text: fn(&B) -> String,
) -> Result<(), Failure> {
    let mut stream = open().await?;
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                let item = B::from(message);
                print::print_stream_item(format, &item, || text(&item))?;
            }
            Ok(None) => return Err(Status::unavailable("the manager ended the watch").into()),
            Err(status) => stream = reopen_stream(&open, within, format, status.into()).await?,
        }
    }
}

/// Reopens a stream once the manager is reachable again. Returns an error if the manager is still
/// unavailable after `within`.
async fn reopen_stream<A>(
    open: impl AsyncFn() -> Result<Streaming<A>, Failure>,
    within: Duration,
    format: Format,
    mut failure: Failure,
) -> Result<Streaming<A>, Failure> {
    let since = Instant::now();
    let limit = humantime::format_duration(within);
    print::note(format, &format!("connection to the manager lost: reconnecting for at most {limit}"));
    while failure.exit() == Exit::Unavailable && since.elapsed() < within {
        tokio::time::sleep(WATCH_RETRY_INTERVAL.as_duration()).await;
        match open().await {
            Ok(stream) => {
                print::note(
                    format,
                    "reconnected to the manager: changes in the meantime are not shown; list the resources again",
                );
                return Ok(stream);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn capacity_lines(capacity: &Capacity) -> String {
    capacity.hosts.iter().map(|host| host_line(capacity.revision, host)).collect()
}

fn host_line(revision: u64, host: &HostCapacity) -> String {
    let emcs: String =
        host.emcs.iter().map(|e| format!("  {} {}/{}", e.emc, e.free_slices, e.slices)).collect();
    let scheduling = if host.schedulable { "enabled" } else { "disabled" };
    let local = size(host.free_local_bytes);
    format!(
        "{revision:<8} {:<16} {scheduling:<8} cores {:<5} local {local:<9}{emcs}\n",
        host.host, host.free_cores
    )
}

fn migration_line(m: &Migration) -> String {
    let requested = format_timestamp(m.requested_unix_ms);
    let answer = m.answer.iter().map(|answer| format!(": {answer}")).collect::<String>();
    format!(
        "requested {requested}  {:<6} {:<8} {:<16} on {:<16} {}{answer} ({})\n",
        m.id, m.kind, m.vm, m.host, m.state, m.reason
    )
}

fn event_line(event: &Event) -> String {
    let (kind, name, state, details) = match &event.change {
        Change::Slice(slice) => slice_fields(slice),
        Change::Reservation(reservation) => reservation_fields(reservation),
        Change::Host(host) => host_fields(host),
        Change::Emc(emc) => emc_fields(emc),
        Change::Alarm(alarm) => alarm_fields(alarm),
        Change::EventsDropped { batches } => {
            let details = "list the resources again".to_owned();
            ("dropped", batches.to_string(), "batches".to_owned(), details)
        }
        Change::Other {} => {
            ("other", "-".to_owned(), "-".to_owned(), "unknown event of a newer manager".to_owned())
        }
    };
    let line = format!(
        "{}  {:<8} {kind:<11} {name:<16} {state:<12} {details}",
        format_timestamp(event.at_unix_ms),
        event.revision
    );
    format!("{}\n", line.trim_end())
}

/// Kind of resource, name, state and details of an event.
type EventFields = (&'static str, String, String, String);

fn slice_fields(s: &SliceDetail) -> EventFields {
    let host = s.slice.host.iter().map(|host| format!(" host {host}"));
    let vm = s.slice.vm.iter().map(|vm| format!(" vm {vm}"));
    let reason = s.reason.iter().map(|reason| format!(": {reason}"));
    let owner: String = host.chain(vm).chain(reason).collect();
    let details = format!("{} epoch {}{owner}", s.slice.emc, s.slice.epoch);
    ("slice", s.slice.slice.to_string(), s.slice.state.clone(), details)
}

fn reservation_fields(r: &Reservation) -> EventFields {
    let reason: String = r.reason.iter().map(|reason| format!(": {reason}")).collect();
    let details = format!("{} host {} {}/{} online{reason}", r.vm, r.host, r.slices_online, r.slices.len());
    ("reservation", r.reservation.clone(), r.state.clone(), details)
}

fn host_fields(h: &Host) -> EventFields {
    ("host", h.host.clone(), h.state.clone(), h.scheduling.clone())
}

fn emc_fields(e: &Emc) -> EventFields {
    let error: String = e.error.iter().map(|error| format!(": {error}")).collect();
    ("emc", e.emc.clone(), e.state.clone(), format!("{} {}/{} free{error}", e.scheduling, e.free, e.slices))
}

fn alarm_fields(a: &Alarm) -> EventFields {
    ("alarm", a.subject.clone(), a.reason.clone(), a.message.clone())
}
