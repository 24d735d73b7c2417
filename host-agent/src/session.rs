//! Session with the manager: connects, identifies the agent, passes desired states to the driver
//! and reports to the manager, and reconnects after a delay. The end of a session does not affect
//! guests.

use std::{
    error::Error as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use pool::protocol::SeenDevice;
use proto::v1::{self as wire, agent_client::AgentClient, from_agent, to_agent};
use service_files::certificates::CertificateError;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Request, Status, Streaming,
    metadata::MetadataValue,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt as _;
use units::limits::{
    RECONNECT_BACKOFF_MAX, RECONNECT_BACKOFF_MIN, RPC_MESSAGE_BYTES_MAX, SESSION_SILENCE_TIMEOUT,
};
use units::{FencingToken, InstanceId, Name, Ns};

use crate::{
    config::Tls,
    convert,
    manager_list::{ManagerList, SessionEnd},
    manager_token::{ManagerToken, ManagerTokenError},
    secrets::read_tls,
    session_channel::{ReportStream, SessionEvent},
    session_log::SessionLog,
    shares::SharesState,
};

/// Maximum number of reports that are queued for sending; further reports are merged in the outbox.
const REPORTS_QUEUED_MAX: usize = 2;
/// Time without messages after which an agent probes its connection if another manager can take over, and timeout of
/// the probe.
const FAIL_OVER_SILENCE: Duration = Duration::from_millis(1500);
/// Delay before an agent asks the managers again while none of them is the leader.
const NO_LEADER_DELAY: Duration = Duration::from_millis(200);

/// Identity of the agent, and address of the manager.
#[derive(Clone, Debug)]
pub struct AgentIdentity {
    /// Addresses of the rack's managers, at least one: `http://…`, `https://…` or `unix:/path`.
    pub managers: Vec<String>,
    /// Name of the agent's host.
    pub host: Name,
    /// Token of the host; `None` if only certificates identify it.
    pub token: Option<String>,
    /// Certificate files, if TLS is used. Each connection reads them again.
    pub tls: Option<Tls>,
    /// Boot id of the machine.
    pub boot_id: String,
    /// Instance number of this start of the agent.
    pub instance: InstanceId,
    /// Socket at which VMMs of this host attach to memory.
    pub socket: PathBuf,
    /// Pool devices that are attached to this machine.
    pub devices: Vec<SeenDevice>,
}

/// Reason why a session ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("cannot connect to {manager}")]
    Connect {
        manager: String,
        #[source]
        cause: tonic::transport::Error,
    },
    #[error(transparent)]
    Tls(#[from] CertificateError),
    #[error("the manager ended the session: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] Status),
    #[error("the manager closed the stream")]
    Closed,
    #[error("invalid message from the manager")]
    InvalidMessage(#[from] convert::InvalidMessage),
    #[error("the token contains characters that are not allowed in an HTTP header")]
    Token,
    #[error("the manager belongs to another rack")]
    OtherRack,
    #[error("the manager does not respond")]
    Silent,
    #[error(transparent)]
    ManagerToken(#[from] ManagerTokenError),
    #[error("the agent is stopping")]
    Stopping,
}

impl SessionError {
    /// Returns whether the manager rejected the session because another one is the leader.
    fn is_not_leader(&self) -> bool {
        match self {
            Self::Status(status) => {
                status.get_details_error_info().is_some_and(|info| info.reason == "NOT_LEADER")
            }
            _ => false,
        }
    }

    /// Returns how the session ended, for the selection of the next manager.
    fn session_end(&self) -> SessionEnd {
        match self {
            Self::Silent => SessionEnd::Silent,
            // A transport error that is no status of the manager: a probe of the connection was not answered.
            Self::Status(status) if status.source().is_some() => SessionEnd::Silent,
            _ => SessionEnd::Responded,
        }
    }

    /// Returns the error and all its causes. The causes of a status are those of its transport
    /// error; the status itself is part of the error.
    fn describe(&self) -> String {
        let cause = match self {
            Self::Status(status) => status.source(),
            _ => return units::chain(self),
        };
        cause.map_or_else(|| self.to_string(), |cause| format!("{self}: {}", units::chain(cause)))
    }
}

/// Runs sessions, one after another, until the receiver of `events` is dropped.
pub async fn run_sessions(
    identity: AgentIdentity,
    token: ManagerToken,
    reports: ReportStream,
    shares: Arc<SharesState>,
    events: mpsc::Sender<SessionEvent>,
) {
    let mut delay = RECONNECT_BACKOFF_MIN.as_duration();
    let mut log = SessionLog::default();
    let mut managers = ManagerList::new(&identity.managers);
    loop {
        let known_rack = reports.rack.borrow().clone().unwrap_or_default();
        let (started, mut lease) = (Instant::now(), None);
        let link = ManagerLink {
            address: managers.current(),
            token: &token,
            silence: if managers.has_several() {
                FAIL_OVER_SILENCE
            } else {
                SESSION_SILENCE_TIMEOUT.as_duration()
            },
        };
        let error = run_session(&identity, link, known_rack, &reports, &shares, &events, &mut lease).await;
        let (Err(error), manager) = (error, managers.current().to_owned());
        if matches!(error, SessionError::Stopping) || events.send(SessionEvent::Disconnected).await.is_err() {
            return;
        }
        if managers.advance(error.session_end(), Instant::now()) && lease.is_none() {
            continue; // another manager may be the leader
        }
        delay = match error.is_not_leader() {
            true => NO_LEADER_DELAY,
            false => reconnect_delay(delay, &error, lease, started.elapsed()),
        };
        let (error, lasted) = (error.describe(), lease.map(|_| started.elapsed()));
        if let Some(suppressed) = log.count_failure(&error, lasted, Instant::now()) {
            tracing::warn!(manager, error, retry_in = ?delay, suppressed, "session ended");
        }
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = events.closed() => return,
        }
    }
}

/// Returns the delay before the next session. `lease` is `None` if the manager did not reply.
///
/// The delay doubles if no connection is possible. It also doubles if the manager aborts the
/// session within a lease, because another agent represents this host or a lease from before a
/// restart is valid. In that case it is limited to the lease, so that the manager still notices
/// that both agents run. Otherwise it is minimal.
fn reconnect_delay(
    last: Duration,
    error: &SessionError,
    lease: Option<Duration>,
    lasted: Duration,
) -> Duration {
    match (error, lease) {
        (_, None) => (last * 2).min(RECONNECT_BACKOFF_MAX.as_duration()),
        (SessionError::Status(status), Some(lease)) if status.code() == Code::Aborted && lasted < lease => {
            (last * 2).min(lease)
        }
        (_, Some(_)) => RECONNECT_BACKOFF_MIN.as_duration(),
    }
}

/// Manager of one session.
#[derive(Clone, Copy)]
struct ManagerLink<'a> {
    address: &'a str,
    /// Highest known fencing token.
    token: &'a ManagerToken,
    /// Time without messages after which the connection is probed, and timeout of the probe.
    silence: Duration,
}

async fn connect(identity: &AgentIdentity, manager: ManagerLink<'_>) -> Result<Channel, SessionError> {
    let failed = |cause| SessionError::Connect { manager: manager.address.to_owned(), cause };
    let mut endpoint = Endpoint::from_shared(manager.address.to_owned())
        .map_err(failed)?
        .tcp_nodelay(true)
        .connect_timeout(RECONNECT_BACKOFF_MAX.as_duration())
        .http2_keep_alive_interval(manager.silence)
        .keep_alive_timeout(manager.silence);
    if let Some(tls) = &identity.tls {
        // Read the files again, because certificates may have been renewed.
        endpoint = endpoint.tls_config(read_tls(tls)?).map_err(failed)?;
    }
    endpoint.connect().await.map_err(failed)
}

/// Session that the manager has accepted or rejects with its next message.
struct Session {
    sender: mpsc::Sender<wire::FromAgent>,
    messages: Streaming<wire::ToAgent>,
    welcome: wire::Welcome,
}

/// Opens a session with a manager, unless a later manager is known.
async fn open_session(
    identity: &AgentIdentity,
    manager: ManagerLink<'_>,
    known_rack: String,
) -> Result<Session, SessionError> {
    let channel = connect(identity, manager).await?;
    let mut client = AgentClient::new(channel)
        .max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(RPC_MESSAGE_BYTES_MAX);
    let (sender, receiver) = mpsc::channel(REPORTS_QUEUED_MAX);
    sender.send(hello_message(identity, known_rack)).await.map_err(|_| SessionError::Closed)?;
    let opened = async {
        let mut messages = client.session(session_request(identity, receiver)?).await?.into_inner();
        let first = messages.message().await?.and_then(|first| first.message);
        let Some(to_agent::Message::Welcome(welcome)) = first else { return Err(SessionError::Closed) };
        Ok((messages, welcome))
    };
    let opened = tokio::time::timeout(2 * manager.silence, opened).await;
    let (messages, welcome) = opened.map_err(|_| SessionError::Silent)??;
    manager.token.check(FencingToken { generation: welcome.generation, election: welcome.election })?;
    Ok(Session { sender, messages, welcome })
}

/// Runs one session, and returns the reason for its end. `lease` is set when the manager has
/// replied to the hello message, even if it then rejects the agent.
async fn run_session(
    identity: &AgentIdentity,
    manager: ManagerLink<'_>,
    known_rack: String,
    reports: &ReportStream,
    shares: &SharesState,
    events: &mpsc::Sender<SessionEvent>,
    lease: &mut Option<Duration>,
) -> Result<std::convert::Infallible, SessionError> {
    let Session { sender, mut messages, welcome } = open_session(identity, manager, known_rack).await?;
    let lease_ttl = Ns::ms(welcome.lease_ttl_ms);
    *lease = Some(lease_ttl.as_duration());
    // A rejected agent receives the reason of the rejection instead of weights.
    let second = messages.message().await?.and_then(|second| second.message);
    let Some(to_agent::Message::Weights(weights)) = second else { return Err(SessionError::Closed) };
    let weights = convert::to_weights(weights)?;
    let connected = SessionEvent::Connected { rack: welcome.rack_uuid, lease_ttl };
    reports.restart(); // a session begins with a complete report
    shares.reports.resend();
    events.send(connected).await.map_err(|_| SessionError::Stopping)?;
    shares.set_weights(weights);
    loop {
        tokio::select! {
            message = messages.message() => {
                match message?.ok_or(SessionError::Closed)?.message {
                    Some(to_agent::Message::Desired(state)) => {
                        let rack = state.rack_uuid.clone();
                        let event = SessionEvent::DesiredState(rack, convert::to_desired_state(state)?);
                        events.send(event).await.map_err(|_| SessionError::Stopping)?;
                    }
                    Some(to_agent::Message::ReportRequest(_)) => {
                        events.send(SessionEvent::ReportRequested).await.map_err(|_| SessionError::Stopping)?;
                    }
                    Some(to_agent::Message::Weights(weights)) => {
                        shares.set_weights(convert::to_weights(weights)?);
                    }
                    Some(to_agent::Message::Welcome(_)) | None => return Err(SessionError::Closed),
                }
            }
            report = shares.reports.next() => {
                send(&sender, from_agent::Message::Shares(convert::to_wire_shares(report))).await?;
            }
            report = reports.tiering.next() => {
                send(&sender, from_agent::Message::Tenants(convert::to_wire_tenants(report))).await?;
            }
            report = reports.evictions.next() => {
                send(&sender, from_agent::Message::Evictions(convert::to_wire_evictions(report))).await?;
            }
            report = reports.soft_memory.next() => {
                send(&sender, from_agent::Message::SoftMemory(convert::to_wire_soft_memory(report))).await?;
            }
            samples = reports.samples.next() => {
                send(&sender, from_agent::Message::Samples(samples)).await?;
            }
            report = reports.outbox.next() => {
                let touched = reports.usage.take_unreported();
                let report = convert::to_wire_observed_state(identity.instance, report, touched);
                send(&sender, from_agent::Message::Observed(report)).await?;
            }
            () = reports.disconnect.notified() => return Err(SessionError::OtherRack),
        }
    }
}

/// Returns the request that opens a session, with the token of the host.
fn session_request(
    identity: &AgentIdentity,
    messages: mpsc::Receiver<wire::FromAgent>,
) -> Result<Request<ReceiverStream<wire::FromAgent>>, SessionError> {
    let mut request = Request::new(ReceiverStream::new(messages));
    if let Some(token) = &identity.token {
        let bearer = MetadataValue::try_from(format!("Bearer {token}")).map_err(|_| SessionError::Token)?;
        request.metadata_mut().insert("authorization", bearer);
    }
    Ok(request)
}

async fn send(
    sender: &mpsc::Sender<wire::FromAgent>,
    message: from_agent::Message,
) -> Result<(), SessionError> {
    sender.send(wire::FromAgent { message: Some(message) }).await.map_err(|_| SessionError::Closed)
}

fn hello_message(identity: &AgentIdentity, rack_uuid: String) -> wire::FromAgent {
    let hello = wire::Hello {
        protocol_version: proto::PROTOCOL_VERSION,
        host: identity.host.to_string(),
        rack_uuid,
        boot_id: identity.boot_id.clone(),
        instance: identity.instance.0,
        host_memory_socket: identity.socket.display().to_string(),
        version: env!("CARGO_PKG_VERSION").into(),
        devices: identity.devices.iter().cloned().map(convert::to_wire_seen_device).collect(),
        can_rehome: true,
    };
    wire::FromAgent { message: Some(from_agent::Message::Hello(hello)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn failed_connection_is_described_with_all_causes() {
        let dir = tempfile::tempdir().unwrap();
        let manager = format!("unix:{}", dir.path().join("missing.sock").display());
        let cause = Endpoint::from_shared(manager.clone()).unwrap().connect().await.unwrap_err();
        let text = SessionError::Connect { manager, cause }.describe();
        assert!(text.starts_with("cannot connect to unix:") && text.contains("No such file"), "{text}");
    }

    #[test]
    fn ended_session_is_described_with_the_cause_of_its_status() {
        let status = Status::from_error(Box::new(std::io::Error::other("certificate expired")));
        let text = SessionError::Status(status).describe();
        assert!(text.ends_with(": certificate expired"), "{text}");
        let text = SessionError::Status(Status::aborted("a newer agent runs")).describe();
        assert_eq!(text, "the manager ended the session: a newer agent runs (Aborted)");
    }

    #[test]
    fn delay_of_repeatedly_aborted_session_grows_up_to_the_lease() {
        let lease = Duration::from_secs(10);
        let aborted = || SessionError::Status(Status::aborted("a newer agent runs for this host"));
        let mut delays = vec![RECONNECT_BACKOFF_MIN.as_duration()];
        for _ in 0..9 {
            delays.push(reconnect_delay(delays[delays.len() - 1], &aborted(), Some(lease), Duration::ZERO));
        }
        assert!(delays.is_sorted(), "{delays:?}");
        assert_eq!((delays[1], delays[9]), (Duration::from_millis(200), lease));
        let after_long_session = reconnect_delay(lease, &aborted(), Some(lease), lease);
        let after_other_error = reconnect_delay(lease, &SessionError::Closed, Some(lease), Duration::ZERO);
        assert_eq!([after_long_session, after_other_error], [RECONNECT_BACKOFF_MIN.as_duration(); 2]);
        assert_eq!(
            reconnect_delay(lease, &SessionError::Closed, None, Duration::ZERO),
            RECONNECT_BACKOFF_MAX.as_duration()
        );
    }
}
