//! What a cloud's scheduler asks, typed by hand: plan, reserve, wait, commit, release, and answers to migrations.

use std::{
    io::{self, Write as _},
    time::Duration,
};

use proto::v1;
use units::{RequestId, limits::RESPONSE_TIMEOUT_SLACK};

use crate::{
    Connection, Failure, Format,
    args::{Migration, PlanVm, Ref, Release, Reserve, Resolution},
    print, table, view,
};

/// How a VM's memory would be split.
pub(crate) async fn plan_vm(args: PlanVm, to: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::PlanVmRequest {
        vm: args.vm.into(),
        cores: args.cores,
        memory_bytes: args.memory.get(),
        pinned: args.pinned,
        profile: Some(v1::VmProfile {
            key: args.customer,
            kind: args.kind,
            place: args.place,
            counters: args.counter.into_iter().collect(),
        }),
    };
    let plan = view::Plan::from(to.ask(to.scheduler().plan_vm(request)).await?);
    print::say(format, &plan, |_| table::plan(&plan))
}

/// Makes a host the owner of memory for a VM.
pub(crate) async fn reserve(args: Reserve, to: &Connection, format: Format) -> Result<(), Failure> {
    let span = if args.wait_ready { to.patience() } else { to.timeout() };
    let validate_only = args.validate_only;
    let request_id = match &args.request_id {
        Some(id) => id.clone(),
        None if validate_only => random_id()?, // nothing is done that could be repeated
        None => announced(format)?,
    };
    let request = request(args, request_id);
    if validate_only {
        let valid = view::Validated::from(to.ask_within(span, to.scheduler().reserve(request)).await?);
        return print::say(format, &valid, |_| table::validated(&valid));
    }
    show(format, to.ask_within(span, to.scheduler().reserve(request)).await?)
}

fn request(args: Reserve, request_id: RequestId) -> v1::ReserveRequest {
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
        commit_within_ms: args.commit_within.map_or(0, whole_ms),
        client: args.client.into(),
        uid: args.uid,
    }
}

/// A new request id, said before it is used: whoever loses the answer can repeat the question.
fn announced(format: Format) -> Result<RequestId, Failure> {
    let id = random_id()?;
    let line = match format {
        Format::Json => format!("{{\"request_id\":\"{id}\"}}\n"),
        Format::Table | Format::Wide | Format::Yaml => format!("request_id: {id}\n"),
    };
    io::stderr().lock().write_all(line.as_bytes()).map_err(Failure::Output)?;
    Ok(id)
}

fn random_id() -> Result<RequestId, Failure> {
    let mut random = [0_u8; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| Failure::Protocol(format!("no random numbers from the system: {errno}")))?;
    Ok(RequestId::new(&format!("{:032x}", u128::from_be_bytes(random)))
        .expect("32 hex digits are a request id"))
}

/// Answers when every slice is online. The manager keeps the time; this side only waits a little longer for its word.
pub(crate) async fn wait_ready(which: Ref, to: &Connection, format: Format) -> Result<(), Failure> {
    let patience = to.patience();
    let request = v1::WaitReadyRequest { target: Some(which.into()), timeout_ms: whole_ms(patience) };
    let span = patience.saturating_add(RESPONSE_TIMEOUT_SLACK.as_duration());
    show(format, to.ask_within(span, to.scheduler().wait_ready(request)).await?)
}

/// The VM was started.
pub(crate) async fn commit(which: Ref, to: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::CommitRequest { target: Some(which.into()) };
    show(format, to.ask(to.scheduler().commit(request)).await?)
}

/// The VM ended.
pub(crate) async fn release(args: Release, to: &Connection, format: Format) -> Result<(), Failure> {
    let reason = args.reason.unwrap_or_default();
    let request = v1::ReleaseRequest { target: Some(args.which.into()), force: args.force, reason };
    show(format, to.ask(to.scheduler().release(request)).await?)
}

/// Answers a request to move a VM.
pub(crate) async fn migration(asked: Migration, to: &Connection, format: Format) -> Result<(), Failure> {
    let Migration::Resolve { vm, state, answer } = asked;
    let request = v1::ResolveMigrationRequest {
        vm: vm.into(),
        state: v1::MigrationState::from(state).into(),
        answer: answer.unwrap_or_default(),
    };
    print::one(format, &view::Migration::from(to.ask(to.scheduler().resolve_migration(request)).await?))
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

fn show(format: Format, reservation: v1::Reservation) -> Result<(), Failure> {
    print::one(format, &view::Reservation::from(reservation))
}

/// In whole milliseconds, at least one: zero would mean "as you like".
fn whole_ms(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX).max(1)
}
