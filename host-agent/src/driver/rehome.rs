//! Moves of pool memory to local memory. A task per VM starts the move, by the backend or by the VMM.
//! It polls the status of a move by the VMM until the move ends. A cancelled move also ends with a
//! status. Therefore each task causes one event.

use std::{sync::Arc, time::Duration};

use pool::agent::{Event, Process, VmRecord};
use proto::v1::{self as wire, RehomeState};
use tokio::{sync::watch, time::Instant};
use tonic::Code;
use units::{
    Bytes, Name, ReservationId, SLICE,
    limits::{
        REASON_BYTES_MAX, REHOME_CALL_FAILURES_MAX, REHOME_DURATION_MAX, REHOME_POLL_INTERVAL,
        REHOME_USE_CHECK_DELAY_MAX, VMM_RESPONSE_TIMEOUT,
    },
};

use super::{Driver, calls::join};
use crate::{
    host::{
        Host,
        cgroup::find_unified_hierarchy,
        memory_limit::{FreeMemory, read_free_memory},
        process::{ProcessHandle, identify_process},
        sysfs::Sysfs,
    },
    vmm_client::{VmmClient, VmmError},
};

impl Driver {
    /// Starts to move the pool memory of a VM. With `is_resumed`, an earlier agent may have started the
    /// move.
    pub(super) fn start_rehome(&mut self, reservation: ReservationId, is_resumed: bool) {
        self.spawn_rehome(reservation, false, is_resumed);
    }

    /// Cancels the move in progress.
    pub(super) fn cancel_rehome(&mut self, reservation: ReservationId, is_resumed: bool) {
        match self.rehomes.get(&reservation) {
            Some(is_cancelled) => drop(is_cancelled.send_replace(true)),
            None => self.spawn_rehome(reservation, true, is_resumed),
        }
    }

    /// Starts the task of a VM. With `is_cancelled`, the task only cancels a move by the VMM.
    fn spawn_rehome(&mut self, reservation: ReservationId, is_cancelled: bool, is_resumed: bool) {
        let Some(record) = self.agent.live_record(reservation).cloned() else { return };
        let vm = record.vm.clone();
        let (cancel, cancelled) = watch::channel(is_cancelled);
        self.rehomes.insert(reservation, cancel);
        let host = Arc::clone(&self.host);
        self.tasks.spawn(async move {
            let result = move_memory(host, record, cancelled, is_resumed).await;
            match &result {
                Ok(None) => tracing::info!(%vm, %reservation, "the kernel has moved pool memory to local memory"),
                Ok(Some(wire::RehomeStatus { pause_us, duration_us, rounds, copied_bytes, .. })) => {
                    tracing::info!(%vm, %reservation, pause_us, duration_us, rounds, copied_bytes, "moved pool memory to local memory");
                }
                // An agent that starts cancels all moves, most of which do not exist.
                Err(reason) if is_cancelled => tracing::debug!(%vm, %reservation, reason, "no move was in progress"),
                Err(reason) => tracing::warn!(%vm, %reservation, reason, "cannot move pool memory to local memory"),
            }
            Event::RehomeEnded { reservation, result: result.map(drop) }
        });
    }
}

/// Moves the pool memory of a VM: the backend moves it if it can, and otherwise the VMM. A move by the
/// backend cannot be cancelled, and has no status.
async fn move_memory(
    host: Arc<dyn Host>,
    record: VmRecord,
    is_cancelled: watch::Receiver<bool>,
    is_resumed: bool,
) -> Result<Option<wire::RehomeStatus>, String> {
    let moved_by_host = if *is_cancelled.borrow() {
        None
    } else {
        let (host, record) = (Arc::clone(&host), record.clone());
        join(tokio::task::spawn_blocking(move || host.rehome(&record)).await)
    };
    let bytes = record.used_slices().map(|_| SLICE).sum();
    match (moved_by_host, record.control_socket.clone()) {
        (Some(Ok(())), _) => Ok(None),
        (Some(Err(error)), _) => Err(units::chain(&error)),
        (None, Some(socket)) => {
            let vmm = VmmProcess { vm: record.vm.clone(), socket, process: record.process.clone() };
            let status = RehomeCalls::new(vmm, bytes, is_cancelled, is_resumed).run().await?;
            wait_until_slices_are_unused(host, record).await?;
            Ok(Some(status))
        }
        (None, None) => Err("the VMM has no control socket".to_owned()),
    }
}

/// Waits until no process uses the slices of a VM whose VMM has reported a completed move. Without this
/// check, the ledger would count local memory for a VM that still uses the pool.
///
/// # Errors
/// The VM has ended.
async fn wait_until_slices_are_unused(host: Arc<dyn Host>, record: VmRecord) -> Result<(), String> {
    let mut delay = REHOME_POLL_INTERVAL.as_duration();
    let record = Arc::new(record);
    loop {
        let checked = {
            let (host, record) = (Arc::clone(&host), Arc::clone(&record));
            join(tokio::task::spawn_blocking(move || host.check_slices_unused(&record)).await)
        };
        let Err(error) = checked else { return Ok(()) };
        if matches!(ProcessHandle::open(&record.process), Ok(None)) {
            return Err("the VM has ended".to_owned());
        }
        if delay >= REHOME_USE_CHECK_DELAY_MAX.as_duration() {
            let (vm, error) = (record.vm.as_str(), units::chain(&error));
            tracing::warn!(
                vm,
                error,
                "the VMM reports a completed move, but a process still uses the slices"
            );
        }
        tokio::time::sleep(delay).await;
        delay = (2 * delay).min(REHOME_USE_CHECK_DELAY_MAX.as_duration());
    }
}

/// Checks that the VMM's cgroup may use as much more memory as the VMM allocates for a move. Otherwise,
/// the kernel may end the VMM. Without control groups of version 2, nothing is checked.
fn check_memory_limit(cgroups: Option<Sysfs>, cgroup: &str, needed: Bytes) -> Result<(), String> {
    let Some(cgroups) = cgroups else { return Ok(()) };
    match read_free_memory(&cgroups, cgroup) {
        Ok(Some(FreeMemory { cgroup, free })) if free < needed => {
            Err(format!("the limit memory.max of cgroup {cgroup} leaves {free}, {needed} needed"))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(units::chain(&error)),
    }
}

/// Error of a call of a VMM.
enum CallError {
    /// The call failed.
    Vmm(VmmError),
    /// The move must not start, for this reason.
    NotAllowed(String),
}

impl CallError {
    fn is_temporary(&self) -> bool {
        matches!(self, Self::Vmm(error) if error.is_temporary())
    }

    /// Returns whether the VMM has no function to move memory.
    fn is_unsupported(&self) -> bool {
        matches!(self, Self::Vmm(VmmError::Rejected(status)) if status.code() == Code::Unimplemented)
    }

    fn reason(&self) -> String {
        match self {
            Self::Vmm(error) => units::single_line(&units::chain(error), REASON_BYTES_MAX),
            Self::NotAllowed(reason) => reason.clone(),
        }
    }
}

impl From<VmmError> for CallError {
    fn from(error: VmmError) -> Self {
        Self::Vmm(error)
    }
}

/// Process of a VM with a control socket.
struct VmmProcess {
    vm: Name,
    socket: String,
    process: Process,
}

/// Calls of one VMM for one move.
struct RehomeCalls {
    vmm: VmmProcess,
    /// Memory that the VMM allocates for the move.
    bytes: Bytes,
    is_cancelled: watch::Receiver<bool>,
    client: Option<VmmClient>,
    /// Whether a move may be in progress or complete: an earlier agent may have started it, or the reply
    /// to its start was lost. Then only a status of the VMM shows that the memory was not moved.
    may_be_started: bool,
    /// Whether the move is in progress, or the VMM has replied to the start or the cancellation.
    is_acknowledged: bool,
    /// Whether the VMM has received the cancellation.
    is_cancellation_sent: bool,
    /// Time at which the move is cancelled.
    deadline: Instant,
    /// Interval between requests for the status, and delay after a failed call.
    poll_interval: Duration,
}

impl RehomeCalls {
    fn new(vmm: VmmProcess, bytes: Bytes, is_cancelled: watch::Receiver<bool>, is_resumed: bool) -> Self {
        Self {
            vmm,
            bytes,
            is_cancelled,
            client: None,
            may_be_started: is_resumed,
            is_acknowledged: false,
            is_cancellation_sent: false,
            deadline: Instant::now() + REHOME_DURATION_MAX.as_duration(),
            poll_interval: REHOME_POLL_INTERVAL.as_duration(),
        }
    }

    /// Calls the VMM until the move has ended. Failed calls are repeated, because the VMM continues a
    /// move on its own: only the VMM knows whether its memory was moved. The error is the reason why the
    /// memory was not moved.
    async fn run(mut self) -> Result<wire::RehomeStatus, String> {
        let mut failures = 0;
        loop {
            let was_acknowledged = self.is_acknowledged;
            let called = tokio::time::timeout(VMM_RESPONSE_TIMEOUT.as_duration(), self.call()).await;
            let problem = match called {
                Ok(Ok(status)) => match status.state() {
                    RehomeState::Done => return Ok(status),
                    RehomeState::Failed => {
                        let reason = units::single_line(&status.reason, REASON_BYTES_MAX);
                        let late = format!("took longer than {REHOME_DURATION_MAX}: ");
                        return Err(if self.is_late() { late + &reason } else { reason });
                    }
                    RehomeState::Copying | RehomeState::Cancelling => {
                        self.wait().await;
                        continue;
                    }
                    RehomeState::None if !was_acknowledged => {
                        return Err("the VMM has started no move".to_owned());
                    }
                    // A VMM that has started a move may use the memory of the move.
                    RehomeState::None => "the VMM does not know of the move that it has started".to_owned(),
                    RehomeState::Unspecified => format!("the VMM reports the unknown state {}", status.state),
                },
                Ok(Err(error)) if error.is_unsupported() && !was_acknowledged => return Err(error.reason()),
                Ok(Err(error)) if !self.may_be_started && !error.is_temporary() => {
                    return Err(error.reason());
                }
                Ok(Err(error)) => error.reason(),
                Err(_) => format!("the VMM did not reply within {VMM_RESPONSE_TIMEOUT}"),
            };
            self.client = None;
            failures += 1;
            let has_failed = !self.may_be_started && failures >= REHOME_CALL_FAILURES_MAX;
            if has_failed || self.has_process_ended() {
                return Err(problem);
            }
            if failures % REHOME_CALL_FAILURES_MAX == 0 {
                let (vm, pid) = (self.vmm.vm.as_str(), self.vmm.process.pid);
                tracing::warn!(vm, pid, failures, problem, "the VMM does not report the state of a move");
            }
            tokio::time::sleep(self.poll_interval).await;
        }
    }

    fn has_process_ended(&self) -> bool {
        matches!(ProcessHandle::open(&self.vmm.process), Ok(None))
    }

    /// Returns whether the move is cancelled because it took too long.
    fn is_late(&self) -> bool {
        !*self.is_cancelled.borrow() && Instant::now() >= self.deadline
    }

    /// Sends the next request: the start or the cancellation if it was not acknowledged yet, and
    /// otherwise a request for the status.
    async fn call(&mut self) -> Result<wire::RehomeStatus, CallError> {
        let is_cancelled = *self.is_cancelled.borrow() || self.is_late();
        let mut client = match self.client.take() {
            Some(client) => client,
            None => VmmClient::connect(self.vmm.socket.clone().into(), self.vmm.process.clone()).await?,
        };
        let status = match (is_cancelled, self.is_acknowledged) {
            (true, _) if !self.is_cancellation_sent => client.cancel_rehome().await?,
            (false, false) => self.start(&mut client).await?,
            _ => client.get_rehome().await?,
        };
        (self.is_acknowledged, self.is_cancellation_sent) = (true, is_cancelled);
        self.may_be_started = true;
        self.client = Some(client);
        Ok(status)
    }

    /// Starts the move, unless it was started before.
    async fn start(&mut self, client: &mut VmmClient) -> Result<wire::RehomeStatus, CallError> {
        let found = client.get_rehome().await?;
        // A move that is being cancelled may still be completed.
        if matches!(found.state(), RehomeState::Copying | RehomeState::Cancelling | RehomeState::Done) {
            return Ok(found);
        }
        self.may_be_started = false;
        let (process, bytes) = (self.vmm.process.clone(), self.bytes);
        let check = move || {
            // The process may be in another cgroup than at its start.
            let current = identify_process(process.pid).map_err(|error| units::chain(&error))?;
            check_memory_limit(find_unified_hierarchy(), &current.cgroup, bytes)
        };
        join(tokio::task::spawn_blocking(check).await).map_err(CallError::NotAllowed)?;
        self.may_be_started = true;
        let started = client.rehome().await;
        if let Err(error) = &started
            && !error.is_temporary()
        {
            self.may_be_started = false; // the VMM has rejected the move
        }
        Ok(started?)
    }

    /// Waits until the status is polled again, or until the move is cancelled.
    async fn wait(&mut self) {
        let is_cancellation_sent = self.is_cancellation_sent;
        let cancelled = async {
            let changed = self.is_cancelled.wait_for(|is_cancelled| *is_cancelled && !is_cancellation_sent);
            if changed.await.is_err() {
                std::future::pending::<()>().await; // the driver has ended
            }
        };
        let _ = tokio::time::timeout(self.poll_interval, cancelled).await;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        sync::{Arc, Mutex},
    };

    use proto::v1::vmm_server::{Vmm, VmmServer};
    use tokio::net::UnixListener;
    use tokio_stream::wrappers::UnixListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::host::{fake::Fake, sysfs::fake::FakeSysfs};

    /// VMM that replies to the methods of moves with scripted replies, and records the methods.
    #[derive(Clone, Default)]
    struct FakeVmm(Arc<Mutex<Script>>);

    #[derive(Default)]
    struct Script {
        replies: VecDeque<Result<RehomeState, Status>>,
        calls: Vec<&'static str>,
    }

    impl FakeVmm {
        fn reply(&self, method: &'static str) -> Reply<wire::RehomeStatus> {
            let mut script = self.0.lock().unwrap();
            script.calls.push(method);
            let state = script.replies.pop_front().unwrap_or(Ok(RehomeState::Copying))?;
            let reason = if state == RehomeState::Failed { "busy".to_owned() } else { String::new() };
            Ok(Response::new(wire::RehomeStatus { state: state.into(), reason, ..Default::default() }))
        }
    }

    type Reply<T> = Result<Response<T>, Status>;

    #[tonic::async_trait]
    impl Vmm for FakeVmm {
        async fn info(&self, _: Request<wire::InfoRequest>) -> Reply<wire::Guest> {
            Err(Status::unimplemented("info"))
        }

        async fn pause(&self, _: Request<wire::PauseRequest>) -> Reply<wire::PauseResponse> {
            Err(Status::unimplemented("pause"))
        }

        async fn resume(&self, _: Request<wire::ResumeRequest>) -> Reply<wire::ResumeResponse> {
            Err(Status::unimplemented("resume"))
        }

        async fn stop(&self, _: Request<wire::StopRequest>) -> Reply<wire::StopResponse> {
            Err(Status::unimplemented("stop"))
        }

        async fn sample_access(
            &self,
            _: Request<wire::SampleAccessRequest>,
        ) -> Reply<wire::SampleAccessResponse> {
            Err(Status::unimplemented("sample_access"))
        }

        async fn rehome(&self, _: Request<wire::RehomeRequest>) -> Reply<wire::RehomeStatus> {
            self.reply("rehome")
        }

        async fn get_rehome(&self, _: Request<wire::GetRehomeRequest>) -> Reply<wire::RehomeStatus> {
            self.reply("get")
        }

        async fn cancel_rehome(&self, _: Request<wire::CancelRehomeRequest>) -> Reply<wire::RehomeStatus> {
            self.reply("cancel")
        }
    }

    /// Runs the calls with a VMM that first reports that it has started no move, and then sends these
    /// replies. Cancels the move once the VMM has received `cancel_after` more calls. Returns the result
    /// and the methods that were called afterwards. With `cancel_after` of 0, the first call is missing.
    async fn run(
        replies: Vec<Result<RehomeState, Status>>,
        cancel_after: Option<usize>,
    ) -> (Result<(), String>, Vec<&'static str>) {
        let is_started = cancel_after != Some(0);
        let none = is_started.then_some(Ok(RehomeState::None));
        let replies = none.into_iter().chain(replies).collect();
        let cancel_after = cancel_after.map(|calls| calls + usize::from(is_started));
        let (result, mut calls) = run_until(replies, cancel_after, REHOME_DURATION_MAX.as_duration()).await;
        if is_started {
            assert_eq!(calls.remove(0), "get");
        }
        (result, calls)
    }

    /// Runs the calls with a VMM that sends these replies. Cancels the move after this duration, or once
    /// the VMM has received `cancel_after` calls. Returns the result and the called methods.
    async fn run_until(
        replies: Vec<Result<RehomeState, Status>>,
        cancel_after: Option<usize>,
        duration_max: Duration,
    ) -> (Result<(), String>, Vec<&'static str>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let vmm = FakeVmm::default();
        vmm.0.lock().unwrap().replies = replies.into();
        let server = tonic::transport::Server::builder().add_service(VmmServer::new(vmm.clone()));
        let server = tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        let own = identify_process(std::process::id()).unwrap();
        let (cancel, cancelled) = watch::channel(cancel_after == Some(0));
        let vmm_process =
            VmmProcess { vm: Name::new("a").unwrap(), socket: path.display().to_string(), process: own };
        let mut calls = RehomeCalls::new(vmm_process, Bytes::ZERO, cancelled, false);
        calls.deadline = Instant::now() + duration_max;
        let calls = tokio::spawn(calls.run());
        while let Some(after) = cancel_after {
            if vmm.0.lock().unwrap().calls.len() >= after {
                cancel.send_replace(true);
                break;
            }
            tokio::task::yield_now().await;
        }
        let result = calls.await.unwrap().map(drop);
        server.abort();
        let calls = vmm.0.lock().unwrap().calls.clone();
        (result, calls)
    }

    #[tokio::test]
    async fn move_is_started_once_and_polled_until_it_ends() {
        let (copying, done) = (|| Ok(RehomeState::Copying), || Ok(RehomeState::Done));
        let calls = vec!["rehome", "get", "get"];
        assert_eq!(run(vec![copying(), copying(), done()], None).await, (Ok(()), calls));
        let failed = vec![copying(), Ok(RehomeState::Failed)];
        assert_eq!(run(failed, None).await, (Err("busy".into()), vec!["rehome", "get"]));
    }

    #[tokio::test]
    async fn temporary_errors_are_retried_and_rejections_are_not() {
        let lost = Err(Status::unavailable("broken pipe"));
        let none = Ok(RehomeState::None);
        let replies = vec![lost.clone(), none, Ok(RehomeState::Copying), lost, Ok(RehomeState::Done)];
        assert_eq!(run(replies, None).await, (Ok(()), vec!["rehome", "get", "rehome", "get", "get"]));
        let rejected = vec![Err(Status::failed_precondition("the pool memory is private"))];
        let reason = "the VMM rejected the request: the pool memory is private".to_owned();
        assert_eq!(run(rejected, None).await, (Err(reason), vec!["rehome"]));
    }

    /// The VMM may have received the request whose reply was lost.
    #[tokio::test]
    async fn lost_reply_to_the_start_is_not_a_failure() {
        let lost = || Err(Status::unavailable("broken pipe"));
        let rejected = || Err(Status::failed_precondition("the guest is powering off"));
        let replies = vec![lost(), rejected(), Ok(RehomeState::Copying), Ok(RehomeState::Done)];
        assert_eq!(run(replies, None).await, (Ok(()), vec!["rehome", "get", "get", "get"]));
        let replies = vec![lost(), Ok(RehomeState::None), rejected()];
        let reason = "the VMM rejected the request: the guest is powering off".to_owned();
        assert_eq!(run(replies, None).await, (Err(reason), vec!["rehome", "get", "rehome"]));
    }

    /// The VMM may have moved the memory for an earlier agent, so the move must not be reported as failed
    /// while the VMM does not reply.
    #[tokio::test]
    async fn resumed_move_does_not_fail_while_the_vmm_is_unreachable() {
        let run = |is_resumed| {
            let dir = tempfile::tempdir().unwrap();
            let own = identify_process(std::process::id()).unwrap();
            let socket = dir.path().join("missing.sock").display().to_string();
            let (cancel, cancelled) = watch::channel(false);
            let vmm = VmmProcess { vm: Name::new("a").unwrap(), socket, process: own };
            let mut calls = RehomeCalls::new(vmm, Bytes::ZERO, cancelled, is_resumed);
            calls.poll_interval = Duration::ZERO;
            async move {
                let result = tokio::time::timeout(Duration::from_secs(2), calls.run()).await;
                drop((cancel, dir));
                result.ok()
            }
        };
        assert!(run(false).await.is_some_and(|result| result.is_err()), "no move was started");
        assert_eq!(run(true).await, None, "only the VMM knows whether its memory was moved");
    }

    /// The VMM may have moved the memory, so a rejection does not end the move.
    #[tokio::test]
    async fn started_move_ends_only_with_a_status() {
        let rejected = Err(Status::permission_denied("no"));
        let replies = vec![Ok(RehomeState::Copying), rejected.clone(), rejected, Ok(RehomeState::Done)];
        assert_eq!(run(replies, None).await, (Ok(()), vec!["rehome", "get", "get", "get"]));
    }

    /// The VMM may copy the memory although it denies this, so the booked local memory is not released.
    #[tokio::test]
    async fn started_move_does_not_end_with_a_denial() {
        let unsupported = Err(Status::unimplemented("GetRehome"));
        let (none, unknown) = (Ok(RehomeState::None), Ok(RehomeState::Unspecified));
        let replies = vec![Ok(RehomeState::Copying), unsupported, none, unknown, Ok(RehomeState::Failed)];
        let calls = vec!["rehome", "get", "get", "get", "get"];
        assert_eq!(run(replies, None).await, (Err("busy".into()), calls));
    }

    #[tokio::test]
    async fn completed_move_is_not_believed_while_the_slices_are_in_use() {
        let fake = Arc::new(Fake::default());
        fake.set_slices_in_use(true);
        let own = identify_process(std::process::id()).unwrap();
        let record = VmRecord {
            reservation: ReservationId(1),
            vm: Name::new("a").unwrap(),
            process: own,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            slices: std::collections::BTreeMap::new(),
            control_socket: None,
            is_rehomed: false,
        };
        let waiting = tokio::spawn(wait_until_slices_are_unused(Arc::<Fake>::clone(&fake), record.clone()));
        while fake.slice_use_checks() < 2 {
            tokio::task::yield_now().await; // the first check did not end the wait
        }
        assert!(!waiting.is_finished());
        fake.set_slices_in_use(false);
        assert_eq!(waiting.await.unwrap(), Ok(()));
        fake.set_slices_in_use(true);
        let ended = Process { started: 1, ..record.process.clone() };
        let result = wait_until_slices_are_unused(fake, VmRecord { process: ended, ..record }).await;
        assert_eq!(result, Err("the VM has ended".to_owned()));
    }

    #[tokio::test]
    async fn move_without_support_of_the_vmm_fails_at_once() {
        let unsupported = || vec![Err(Status::unimplemented("CancelRehome"))];
        let reason = "the VMM rejected the request: CancelRehome".to_owned();
        assert_eq!(run(unsupported(), Some(0)).await, (Err(reason.clone()), vec!["cancel"]));
        assert_eq!(run(unsupported(), None).await, (Err(reason), vec!["rehome"]));
    }

    #[tokio::test]
    async fn failed_cancellations_are_repeated_after_a_delay() {
        let lost = Err(Status::unavailable("broken pipe"));
        let start = std::time::Instant::now();
        let replies = vec![lost.clone(), lost, Ok(RehomeState::Failed)];
        assert_eq!(run(replies, Some(0)).await, (Err("busy".into()), vec!["cancel"; 3]));
        assert!(start.elapsed() >= 2 * REHOME_POLL_INTERVAL.as_duration());
    }

    #[tokio::test]
    async fn cancellation_is_sent_once_and_its_result_is_awaited() {
        let copying = || Ok(RehomeState::Copying);
        let replies = vec![copying(), copying(), Ok(RehomeState::Failed)];
        assert_eq!(run(replies, Some(1)).await, (Err("busy".into()), vec!["rehome", "cancel", "get"]));
        // The move may be complete before the VMM receives the cancellation.
        assert_eq!(
            run(vec![copying(), Ok(RehomeState::Done)], Some(1)).await,
            (Ok(()), vec!["rehome", "cancel"])
        );
    }

    #[tokio::test]
    async fn move_that_takes_too_long_is_cancelled() {
        let replies = vec![Ok(RehomeState::Copying), Ok(RehomeState::Copying), Ok(RehomeState::Failed)];
        let (result, calls) = run_until(replies, None, Duration::from_millis(200)).await;
        assert_eq!(
            (result, calls),
            (Err("took longer than 3600s: busy".into()), vec!["get", "cancel", "get"])
        );
    }

    #[tokio::test]
    async fn move_of_an_earlier_agent_is_not_started_again() {
        let replies = vec![Ok(RehomeState::Copying), Ok(RehomeState::Done)];
        let max = REHOME_DURATION_MAX.as_duration();
        assert_eq!(run_until(replies, None, max).await, (Ok(()), vec!["get"; 2]));
    }

    #[tokio::test]
    async fn cancelled_move_of_an_earlier_agent_is_awaited() {
        let replies = vec![Ok(RehomeState::Cancelling), Ok(RehomeState::Done)];
        let max = REHOME_DURATION_MAX.as_duration();
        assert_eq!(run_until(replies, None, max).await, (Ok(()), vec!["get"; 2]));
    }

    #[test]
    fn move_into_a_full_cgroup_is_not_allowed() {
        let fake = FakeSysfs::new(&[]);
        let files = [("memory.max", "1500000"), ("memory.current", "1000000"), ("memory.stat", "anon 1")];
        fake.files("vms/a", &files);
        let check = |needed| check_memory_limit(Some(fake.sysfs.clone()), "/vms/a", Bytes::new(needed));
        assert_eq!(check(500_000), Ok(()));
        let reason = check(500_001).unwrap_err();
        assert!(reason.starts_with("the limit memory.max of cgroup /vms/a leaves"), "{reason}");
        assert_eq!(check_memory_limit(None, "/vms/a", Bytes::gib(9)), Ok(()));
    }

    #[tokio::test]
    async fn result_of_an_earlier_agent_is_found_without_a_new_move() {
        assert_eq!(run(vec![Ok(RehomeState::Done)], Some(0)).await, (Ok(()), vec!["cancel"]));
        let none = "the VMM has started no move".to_owned();
        assert_eq!(run(vec![Ok(RehomeState::None)], Some(0)).await, (Err(none), vec!["cancel"]));
    }
}
