//! Implements the gRPC service Agent. Each agent opens one bidirectional stream: it sends reports
//! of its host, and the manager sends desired states and weights.

use std::{pin::Pin, time::Duration};

use pool::{manager::SessionId, protocol::Hello};
use proto::v1::{self as wire, agent_server, from_agent, to_agent};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Extensions, Request, Response, Status, Streaming};
use units::{HostId, Name, limits::RESERVATIONS_PER_HOST_MAX};

use super::{
    ServiceContext,
    status::{
        driver_error_status, failed_precondition, invalid_argument, permission_denied, session_closed_status,
        stopping_status,
    },
};
use crate::{
    convert::{self, InvalidField},
    driver::SessionMessage,
    records::share_rows::Weights,
    shares::WeightsWatcher,
};

/// Handlers of the gRPC service Agent.
#[derive(Clone, Debug)]
pub struct Agent(pub ServiceContext);

/// Host whose agent opened a session.
struct Host {
    id: HostId,
    name: Name,
}

type Outgoing = Result<wire::ToAgent, Status>;

/// Maximum number of messages queued for one agent.
const QUEUED_MESSAGES_MAX: usize = 4;
/// Time after the start of a session within which the agent must send its Hello message.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

#[tonic::async_trait]
impl agent_server::Agent for Agent {
    type SessionStream = Pin<Box<dyn Stream<Item = Outgoing> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<wire::FromAgent>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message()).await;
        let first = first
            .map_err(|_| Status::deadline_exceeded(format!("no hello message within {HELLO_TIMEOUT:?}")))??;
        let Some(from_agent::Message::Hello(hello)) = first.and_then(|first| first.message) else {
            return Err(invalid_argument(InvalidField::new(
                "message",
                "unexpected type:",
                "the first message must be a hello",
            )));
        };
        let claimed_rack = hello.rack_uuid.clone();
        let (name, hello) = convert::agent::parse_hello(hello).map_err(invalid_argument)?;
        self.0.identity.admit_agent(&metadata, &extensions, &name)?;
        let host_name = name.clone();
        let rack = self.0.driver.read(move |manager, _| {
            (manager.durable().meta().rack_uuid.clone(), manager.durable().find_host_by_name(&host_name))
        });
        let (rack_uuid, host) = rack.map_err(driver_error_status)?;
        let id = host.ok_or_else(|| {
            permission_denied("HOST_NOT_FOUND", format!("host: {name} is not in this rack"))
        })?;
        if !claimed_rack.is_empty() && claimed_rack != rack_uuid {
            let message = format!(
                "rack_uuid: the host belongs to rack {claimed_rack}, expected {rack_uuid}: if this manager runs with the wrong store, mount or restore the store of rack {claimed_rack}; to move the host, remove it from rack {claimed_rack} first"
            );
            return Err(failed_precondition("OTHER_RACK", message));
        }
        self.start_session(Host { id, name }, hello, rack_uuid, &extensions, messages).await
    }
}

impl Agent {
    async fn start_session(
        &self,
        host: Host,
        hello: Hello,
        rack_uuid: String,
        extensions: &Extensions,
        messages: Streaming<wire::FromAgent>,
    ) -> Result<Response<<Self as agent_server::Agent>::SessionStream>, Status> {
        let (sender, receiver) = mpsc::channel(QUEUED_MESSAGES_MAX);
        let (outbox, session_messages) = mpsc::channel(QUEUED_MESSAGES_MAX);
        let token = self.0.driver.fencing_token().map_err(driver_error_status)?;
        let welcome = wire::Welcome {
            protocol_version: proto::PROTOCOL_VERSION,
            rack_uuid: rack_uuid.clone(),
            lease_ttl_ms: self.0.policy.borrow().lease_ttl.as_ms(),
            generation: token.generation,
            election: token.election,
        };
        let welcome = wire::ToAgent { message: Some(to_agent::Message::Welcome(welcome)) };
        sender.send(Ok(welcome)).await.map_err(|_| stopping_status())?;
        let (session, is_accepted) =
            self.0.driver.connect_agent(host.id, hello, outbox).map_err(driver_error_status)?;
        if is_accepted {
            self.0.forecasts.reset_memory_peaks(host.id); // must precede messages of this session that end a VM
            self.0.shares.soft_memory.remove(&host.name); // its configuration may not contain soft memory any more
        } else {
            self.0.identity.log_rejected_agent(extensions, &host.name);
        }
        let weights = self.0.shares.watch(host.name.clone());
        let shared = self.0.clone();
        tokio::spawn(async move {
            let outgoing = async {
                match is_accepted {
                    true => send_messages(session_messages, weights, rack_uuid, &sender).await,
                    false => Some(receive_rejection(session_messages).await),
                }
            };
            let ended = tokio::select! {
                ended = receive_reports(&shared, &host, session, messages), if is_accepted => ended,
                ended = outgoing => ended,
                () = shared.wait_until_stopping() => Some(stopping_status()),
                () = sender.closed() => None,
            };
            if let Some(status) = ended {
                let _ = sender.send(Err(status)).await; // the agent may have disconnected
            }
            if is_accepted {
                shared.forecasts.reset_memory_peaks(host.id);
            }
            shared.driver.disconnect_agent(session);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Applies reports of an agent until the agent disconnects or sends an invalid message. Returns the
/// status for an invalid message.
async fn receive_reports(
    shared: &ServiceContext,
    host: &Host,
    session: SessionId,
    mut messages: Streaming<wire::FromAgent>,
) -> Option<Status> {
    loop {
        let message = match messages.message().await {
            Ok(Some(message)) => message,
            Ok(None) => return None,
            Err(status) => return (status.code() == tonic::Code::OutOfRange).then_some(status),
        };
        let result = match message.message {
            Some(from_agent::Message::Observed(report)) => {
                handle_report(shared, host.id, session, report).await
            }
            Some(from_agent::Message::Shares(shares)) => handle_shares(shared, &host.name, shares),
            Some(from_agent::Message::Tenants(tenants)) => handle_tenants(shared, &host.name, tenants),
            Some(from_agent::Message::Evictions(evictions)) => {
                handle_evictions(shared, &host.name, evictions)
            }
            Some(from_agent::Message::SoftMemory(soft_memory)) => {
                handle_soft_memory(shared, &host.name, soft_memory)
            }
            Some(from_agent::Message::Samples(samples)) => handle_samples(shared, host, samples),
            Some(from_agent::Message::Hello(_)) | None => {
                let rule =
                    "must be a report, shares, tenants, evictions, soft memory or samples after the hello";
                Err(invalid_argument(InvalidField::new("message", "unexpected type:", rule)))
            }
        };
        if let Err(status) = result {
            return Some(status);
        }
    }
}

async fn handle_report(
    shared: &ServiceContext,
    host: HostId,
    session: SessionId,
    mut report: wire::ObservedState,
) -> Result<(), Status> {
    let touched = convert::agent::parse_touched_memory(std::mem::take(&mut report.touched))
        .map_err(invalid_argument)?;
    let report = convert::agent::parse_report(report).map_err(invalid_argument)?;
    shared.forecasts.record_touched_memory(host, &touched).map_err(driver_error_status)?; // must precede the report, which can end a VM
    shared.driver.handle_report(session, report).await.map_err(driver_error_status)
}

fn handle_shares(shared: &ServiceContext, host: &Name, shares: wire::Shares) -> Result<(), Status> {
    let report = convert::shares::parse_share_report(host, shares).map_err(invalid_argument)?;
    shared.shares.reports.record(host.clone(), report);
    Ok(())
}

fn handle_tenants(shared: &ServiceContext, host: &Name, tenants: wire::Tenants) -> Result<(), Status> {
    let report = convert::tenants::parse_tenants_report(host, tenants).map_err(invalid_argument)?;
    shared.shares.tenants.record(host.clone(), report);
    Ok(())
}

fn handle_evictions(shared: &ServiceContext, host: &Name, evictions: wire::Evictions) -> Result<(), Status> {
    let report = convert::evictions::parse_evictions_report(host, evictions).map_err(invalid_argument)?;
    shared.shares.evictions.record(host.clone(), report);
    Ok(())
}

fn handle_soft_memory(
    shared: &ServiceContext,
    host: &Name,
    soft_memory: wire::SoftMemory,
) -> Result<(), Status> {
    let report =
        convert::soft_memory::parse_soft_memory_report(host, soft_memory).map_err(invalid_argument)?;
    shared.shares.soft_memory.record(host.clone(), report);
    Ok(())
}

/// Judges samples of running VMs. Invalid samples are dropped and counted. They do not end the
/// session, because the lease of the host is more important than a sample.
fn handle_samples(shared: &ServiceContext, host: &Host, samples: wire::VmSamples) -> Result<(), Status> {
    let samples = samples.samples.into_iter().take(RESERVATIONS_PER_HOST_MAX);
    let samples = samples.map(convert::samples::parse_sample).collect::<Vec<_>>();
    shared.monitor.record(host.id, &host.name, samples).map_err(driver_error_status)
}

/// Sends weights and desired states to an agent until the driver closes the session. Weights are
/// sent first, so that the agent's next epoch uses them.
async fn send_messages(
    mut session_messages: mpsc::Receiver<SessionMessage>,
    mut weights: WeightsWatcher,
    rack_uuid: String,
    sender: &mpsc::Sender<Outgoing>,
) -> Option<Status> {
    let first = weights.next().await;
    let mut message = weights_message(&first);
    loop {
        sender.send(Ok(wire::ToAgent { message: Some(message) })).await.ok()?;
        message = tokio::select! {
            biased; // closing the session has priority over new weights
            message = session_messages.recv() => match message {
                None => return Some(stopping_status()),
                Some(SessionMessage::Close(why)) => return Some(session_closed_status(why)),
                Some(SessionMessage::Desired(desired)) => {
                    to_agent::Message::Desired(convert::agent::desired_state_message(rack_uuid.clone(), desired))
                }
                Some(SessionMessage::RequestReport) => to_agent::Message::ReportRequest(wire::ReportRequest {}),
            },
            weights = weights.next() => weights_message(&weights),
        };
    }
}

/// Waits until the driver closes the session of a rejected agent. Returns the status for the agent.
async fn receive_rejection(mut session_messages: mpsc::Receiver<SessionMessage>) -> Status {
    loop {
        match session_messages.recv().await {
            None => return stopping_status(),
            Some(SessionMessage::Close(why)) => return session_closed_status(why),
            Some(SessionMessage::Desired(_) | SessionMessage::RequestReport) => {}
        }
    }
}

fn weights_message(weights: &Weights) -> to_agent::Message {
    to_agent::Message::Weights(wire::Weights { weights: convert::shares::weight_messages(weights) })
}
