//! What a replay asks of the rack, repeated for as long as the manager may be away: with the same request id, so that what
//! was done is done once. Every answer goes into the journal before anything relies on it.

use std::time::Instant;

use cli_runtime::{Exit, Failure};
use proto::v1;
use sim::packing::Placement;
use tonic::Code;
use units::{
    Bytes,
    limits::{
        REPLAY_BACKOFF_FIRST, REPLAY_BACKOFF_MAX, REPLAY_READY_TIMEOUT, REPLAY_UNAVAILABLE_MAX,
        RESPONSE_TIMEOUT_SLACK,
    },
};

use super::{Rack, journal::Action};

/// The name under which a replay asks.
const CLIENT: &str = "replay";

/// Repeats a call while the manager is away.
pub(super) async fn patiently<T, F>(call: impl Fn() -> F) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Failure>>,
{
    let began = tokio::time::Instant::now();
    let mut pause = REPLAY_BACKOFF_FIRST.as_duration();
    loop {
        match call().await {
            Err(failure) if is_away(&failure) && began.elapsed() < REPLAY_UNAVAILABLE_MAX.as_duration() => {
                tokio::time::sleep(pause).await;
                pause = REPLAY_BACKOFF_MAX.as_duration().min(2 * pause);
            }
            other => return other,
        }
    }
}

/// Whether a failure says that the manager is away, or that its answer was lost on the way.
fn is_away(failure: &Failure) -> bool {
    failure.exit() == Exit::Unavailable || matches!(failure, Failure::TimedOut { .. })
}

/// Whether a failure is the manager's no to this VM on this host, which another host may take.
pub(super) fn is_refusal(failure: &Failure) -> bool {
    let Failure::Rejected(status) = failure else { return false };
    matches!(
        status.code(),
        Code::ResourceExhausted | Code::FailedPrecondition | Code::NotFound | Code::DeadlineExceeded
    )
}

fn by_id(reservation: &v1::Reservation) -> Option<v1::ReservationRef> {
    Some(v1::ReservationRef { reservation: reservation.reservation.clone(), vm: String::new() })
}

impl Rack {
    /// Memory for a VM on a host. The time of the call that was answered is what `reserve_ms` reports.
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
            client: CLIENT.to_owned(),
            // The processes that stand in for VMs run as the user of this one.
            uid: Some(rustix::process::geteuid().as_raw()),
            ..Default::default()
        };
        let call = || async {
            let began = Instant::now();
            let answer = self.to.call(self.to.scheduler().reserve(request.clone())).await?;
            Ok((answer, began.elapsed()))
        };
        let (reservation, took) = patiently(call).await?;
        self.tally().reserve_took(took);
        self.journal().reserved(&reservation)?;
        Ok(reservation)
    }

    /// Answers when every slice is online.
    pub(super) async fn wait_ready(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        let timeout_ms = REPLAY_READY_TIMEOUT.as_ms();
        let request = v1::WaitReadyRequest { target: by_id(reservation), timeout_ms };
        let span = REPLAY_READY_TIMEOUT.after(RESPONSE_TIMEOUT_SLACK).as_duration();
        let call =
            || async { self.to.call_within(span, self.to.scheduler().wait_ready(request.clone())).await };
        let ready = patiently(call).await?;
        self.journal().became(Action::Ready, &ready)
    }

    /// The VM runs.
    pub(super) async fn commit(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        let request = v1::CommitRequest { target: by_id(reservation) };
        let call = || async { self.to.call(self.to.scheduler().commit(request.clone())).await };
        let committed = patiently(call).await?;
        self.journal().became(Action::Commit, &committed)
    }

    /// The VM is gone. One that the manager has forgotten is released.
    pub(super) async fn release(&self, reservation: &v1::Reservation) -> Result<(), Failure> {
        self.journal().giving_back(reservation);
        let request = v1::ReleaseRequest { target: by_id(reservation), ..Default::default() };
        let call = || async { self.to.call(self.to.scheduler().release(request.clone())).await };
        match patiently(call).await {
            Err(Failure::Rejected(status)) if status.code() == Code::NotFound => {
                self.journal().released(reservation)
            }
            answered => self.journal().released(&answered?),
        }
    }
}
