//! `tarn watch`: changes as they happen, a line each, until the reader ends it. A manager that is restarted is waited for.

use std::time::{Duration, Instant};

use proto::v1;
use serde::Serialize;
use tonic::{Status, Streaming};
use units::limits::{WATCH_RETRY_INTERVAL, WATCH_TIMEOUT_SLACK};

use crate::{
    Connection, Failure, Format,
    args::Stream,
    failure::Exit,
    print,
    table::{moment, size},
    view::{Alarm, Capacity, Emc, Event, Host, HostCapacity, Migration, Reservation, SliceDetail, What},
};

/// Prints one stream, for so long if that is limited.
pub(crate) async fn run(
    stream: Stream,
    to: &Connection,
    limit: Option<Duration>,
    format: Format,
) -> Result<(), Failure> {
    let Some(after) = limit else { return endless(stream, to, format).await };
    // Polled first: the manager's own failure is reported where both are due.
    tokio::select! {
        biased;
        failed = endless(stream, to, format) => failed,
        () = tokio::time::sleep(after.saturating_add(WATCH_TIMEOUT_SLACK.as_duration())) => {
            Err(Failure::WatchOver { after })
        }
    }
}

async fn endless(stream: Stream, to: &Connection, format: Format) -> Result<(), Failure> {
    let within = to.timeout();
    match stream {
        Stream::Capacity => {
            let open = async || to.ask(to.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await;
            follow::<_, Capacity>(open, within, format, capacity_lines).await
        }
        Stream::Events => {
            let open = async || to.ask(to.admin().watch(v1::WatchRequest {})).await;
            follow::<_, Event>(open, within, format, event_line).await
        }
        Stream::Migrations => {
            let open = async || to.ask(to.scheduler().watch_migrations(v1::WatchMigrationsRequest {})).await;
            follow::<_, Migration>(open, within, format, migration_line).await
        }
    }
}

/// A stream that breaks is opened again; one that just ends was ended on purpose, and whoever watches wants to know.
async fn follow<A, B: From<A> + Serialize>(
    open: impl AsyncFn() -> Result<Streaming<A>, Failure>,
    within: Duration,
    format: Format,
    text: fn(&B) -> String,
) -> Result<(), Failure> {
    let mut stream = open().await?;
    loop {
        match stream.message().await {
            Ok(Some(message)) => {
                let thing = B::from(message);
                print::next(format, &thing, || text(&thing))?;
            }
            Ok(None) => return Err(Status::unavailable("the manager ended the watch").into()),
            Err(broke) => stream = again(&open, within, format, broke.into()).await?,
        }
    }
}

/// Waits for the manager to be back.
async fn again<A>(
    open: impl AsyncFn() -> Result<Streaming<A>, Failure>,
    within: Duration,
    format: Format,
    broke: Failure,
) -> Result<Streaming<A>, Failure> {
    let since = Instant::now();
    let mut failure = broke;
    let patience = humantime::format_duration(within);
    print::note(format, &format!("the manager is gone: waiting for it, at most {patience}"));
    while failure.exit() == Exit::Unavailable && since.elapsed() < within {
        tokio::time::sleep(WATCH_RETRY_INTERVAL.as_duration()).await;
        match open().await {
            Ok(stream) => {
                print::note(format, "the manager is back: what changed meanwhile is not shown, list again");
                return Ok(stream);
            }
            Err(not_yet) => failure = not_yet,
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
    let accepts = if host.schedulable { "accepts" } else { "closed" };
    let local = size(host.free_local_bytes);
    format!(
        "{revision:<8} {:<16} {accepts:<8} cores {:<5} local {local:<9}{emcs}\n",
        host.host, host.free_cores
    )
}

fn migration_line(m: &Migration) -> String {
    format!("{}  {:<16} on {:<16} {:<9} {}\n", moment(m.asked_unix_ms), m.vm, m.host, m.state, m.why)
}

fn event_line(event: &Event) -> String {
    let (kind, name, state, more) = match &event.what {
        What::Slice(slice) => slice_words(slice),
        What::Reservation(reservation) => reservation_words(reservation),
        What::Host(host) => host_words(host),
        What::Emc(emc) => emc_words(emc),
        What::Alarm(alarm) => alarm_words(alarm),
        What::Missed { events } => {
            ("missed", events.to_string(), "changes".to_owned(), "list again".to_owned())
        }
        What::Other {} => ("other", "-".to_owned(), "-".to_owned(), "a newer manager's event".to_owned()),
    };
    let line = format!(
        "{}  {:<8} {kind:<11} {name:<16} {state:<12} {more}",
        moment(event.at_unix_ms),
        event.revision
    );
    format!("{}\n", line.trim_end())
}

/// Kind, name, state, and what else there is to say.
type Words = (&'static str, String, String, String);

fn slice_words(s: &SliceDetail) -> Words {
    let host = s.slice.host.iter().map(|host| format!(" host {host}"));
    let vm = s.slice.vm.iter().map(|vm| format!(" vm {vm}"));
    let reason = s.reason.iter().map(|reason| format!(": {reason}"));
    let more: String = host.chain(vm).chain(reason).collect();
    let more = format!("{} epoch {}{more}", s.slice.emc, s.slice.epoch);
    ("slice", s.slice.slice.to_string(), s.slice.state.clone(), more)
}

fn reservation_words(r: &Reservation) -> Words {
    let reason: String = r.reason.iter().map(|reason| format!(": {reason}")).collect();
    let more = format!("{} host {} {}/{} online{reason}", r.vm, r.host, r.slices_online, r.slices.len());
    ("reservation", r.reservation.clone(), r.state.clone(), more)
}

fn host_words(h: &Host) -> Words {
    ("host", h.host.clone(), h.state.clone(), h.scheduling.clone())
}

fn emc_words(e: &Emc) -> Words {
    let error: String = e.error.iter().map(|error| format!(": {error}")).collect();
    ("emc", e.emc.clone(), e.state.clone(), format!("{} {}/{} free{error}", e.scheduling, e.free, e.slices))
}

fn alarm_words(a: &Alarm) -> Words {
    ("alarm", a.subject.clone(), a.reason.clone(), a.message.clone())
}
