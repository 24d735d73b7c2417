//! Calls of a replay to the manager. A call is retried while the manager is unavailable, with the
//! same request ID, so that the manager executes it once. Every reply is recorded in the journal
//! before it is used.

use std::time::Instant;

use cli_runtime::{Exit, Failure};
use proto::v1;
use sim::packing::Placement;
use tonic::Code;
use units::{
    Bytes,
    limits::{
        REPLAY_BACKOFF_MAX, REPLAY_BACKOFF_MIN, REPLAY_READY_TIMEOUT, REPLAY_UNAVAILABLE_TIME_MAX,
        RESPONSE_TIMEOUT_SLACK,
    },
};

use super::{ReplayState, journal::JournalAction};

/// Client name that a replay sends in its reservations.
const CLIENT_NAME: &str = "replay";

/// Performs a call, and retries it with increasing delays while the manager is unavailable, for at
/// most [`REPLAY_UNAVAILABLE_TIME_MAX`].
pub(super) async fn retry_while_unavailable<T, F>(call: impl Fn() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Failure>>,
{
    let started = tokio::time::Instant::now();
    let mut pause = REPLAY_BACKOFF_MIN.as_duration();
    loop {
        match call().await {
            Err(failure)
                if is_unavailable(&failure)
                    && started.elapsed() < REPLAY_UNAVAILABLE_TIME_MAX.as_duration() =>
            {
                tokio::time::sleep(pause).await;
                pause = REPLAY_BACKOFF_MAX.as_duration().min(2 * pause);
            }
            result => return result,
        }
    }
}

/// Returns whether a failure means that the manager is unavailable or its reply was lost.
fn is_unavailable(failure: &Failure) -> bool {
    failure.exit() == Exit::Unavailable || matches!(failure, Failure::TimedOut { .. })
}

/// Returns whether a failure is a rejection of a VM by a host. Another host may accept the VM.
pub(super) fn is_rejection(failure: &Failure) -> bool {
    let Failure::Rejected(status) = failure else { return false };
    matches!(
        status.code(),
        Code::ResourceExhausted | Code::FailedPrecondition | Code::NotFound | Code::DeadlineExceeded
    )
}

fn to_reservation_ref(reservation: &v1::Reservation) -> Option<v1::ReservationRef> {
    Some(v1::ReservationRef { reservation: reservation.reservation.clone(), vm: String::new() })
}

impl ReplayState {
    /// Reserves memory for a VM on a host. The duration of the successful call is recorded for
    /// `reserve_ms` in the report.
    pub(super) async fn reserve(
        &self,
        vm: &str,
        placement: &Placement,
        attempt: usize,
    ) -> Result<v1::Reservation, Failure> {
        let request = v1::ReserveRequest {
            request_id: format!("{vm}.{attempt}"),
            host: placement.host.to_string(),
            vm: vm.to_owned(),
            pool_bytes: Bytes::slices(placement.slices).get(),
            local_bytes: placement.local.get(),
            cores: placement.cores,
            client: CLIENT_NAME.to_owned(),
            // Test VMMs run as the user of this process, and must be allowed to attach.
            uid: Some(rustix::process::geteuid().as_raw()),
            ..Default::default()
        };
        let call = || async {
            let started = Instant::now();
            let reply = self.manager.call(self.manager.scheduler().reserve(request.clone())).await?;
            Ok((reply, started.elapsed()))
        };
        let (reservation, duration) = retry_while_unavailable(call).await?;
        self.tally().record_reserve_time(duration);
        self.journal().record_reservation(&reservation)?;
        Ok(reservation)
    }

    /// Waits until all slices of a reservation are online.
    pub(super) async fn wait_ready(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        let timeout_ms = REPLAY_READY_TIMEOUT.as_ms();
        let request = v1::WaitReadyRequest { target: to_reservation_ref(reservation), timeout_ms };
        let span = REPLAY_READY_TIMEOUT.after(RESPONSE_TIMEOUT_SLACK).as_duration();
        let call = || async {
            self.manager.call_with_timeout(span, self.manager.scheduler().wait_ready(request.clone())).await
        };
        let ready = retry_while_unavailable(call).await?;
        self.journal().record_confirmation(JournalAction::Ready, &ready)
    }

    /// Commits the reservation of a VM.
    pub(super) async fn commit(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        let request = v1::CommitRequest { target: to_reservation_ref(reservation) };
        let call = || async { self.manager.call(self.manager.scheduler().commit(request.clone())).await };
        let committed = retry_while_unavailable(call).await?;
        self.journal().record_confirmation(JournalAction::Commit, &committed)
    }

    /// Releases the reservation of a VM. A reservation that the manager does not find counts as
    /// released.
    pub(super) async fn release(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        self.journal().record_release_request(reservation);
        let request = v1::ReleaseRequest { target: to_reservation_ref(reservation), ..Default::default() };
        let call = || async { self.manager.call(self.manager.scheduler().release(request.clone())).await };
        match retry_while_unavailable(call).await {
            Err(Failure::Rejected(status)) if status.code() == Code::NotFound => {
                self.journal().record_release(reservation)
            }
            reply => self.journal().record_release(&reply?),
        }
    }
}
