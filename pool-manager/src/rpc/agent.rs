//! Service Agent: one stream per host, with observed state upwards, desired state and weights
//! downwards.

use std::{pin::Pin, time::Duration};

use pool::{manager::SessionId, protocol::Hello};
use proto::v1::{self as wire, agent_server, from_agent, to_agent};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};
use units::{HostId, Name};

use super::{
    Shared,
    refused::{closed, forbidden, invalid, precondition, refused, stopping},
};
use crate::{
    convert::{self, Invalid},
    driver::ToSession,
    shares::{Watched, Weights},
};

/// Service Agent.
#[derive(Clone, Debug)]
pub struct Agent(pub Shared);

/// Host of a session.
struct Host {
    id: HostId,
    name: Name,
}

type Sent = Result<wire::ToAgent, Status>;

/// Messages queued for one agent.
const MESSAGES_QUEUED_MAX: usize = 4;
/// Time for a caller to send its Hello.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

#[tonic::async_trait]
impl agent_server::Agent for Agent {
    type SessionStream = Pin<Box<dyn Stream<Item = Sent> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<wire::FromAgent>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (metadata, extensions, mut messages) = request.into_parts();
        let first = tokio::time::timeout(HELLO_WITHIN, messages.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("no hello in time"))??;
        let Some(from_agent::Message::Hello(said)) = first.and_then(|first| first.message) else {
            return Err(invalid(Invalid::new("message", "something else", "must be a hello, first of all")));
        };
        let claimed_rack = said.rack_uuid.clone();
        let (name, hello) = convert::agent::hello(said).map_err(invalid)?;
        self.0.identity.admit_agent(&metadata, &extensions, &name)?;
        let known = name.clone();
        let looked = self.0.driver.look(move |manager, _| {
            (manager.durable().meta().rack_uuid.clone(), manager.durable().host_named(&known))
        });
        let (rack_uuid, host) = looked.map_err(refused)?;
        let id =
            host.ok_or_else(|| forbidden("HOST_NOT_FOUND", format!("host: {name} is not in this rack")))?;
        if !claimed_rack.is_empty() && claimed_rack != rack_uuid {
            let message = format!(
                "rack_uuid: {claimed_rack} is not this rack, {rack_uuid}: remove the host there first"
            );
            return Err(precondition("OTHER_RACK", message));
        }
        self.begin(Host { id, name }, hello, rack_uuid, messages).await
    }
}

impl Agent {
    async fn begin(
        &self,
        host: Host,
        hello: Hello,
        rack_uuid: String,
        messages: Streaming<wire::FromAgent>,
    ) -> Result<Response<<Self as agent_server::Agent>::SessionStream>, Status> {
        let (sender, receiver) = mpsc::channel(MESSAGES_QUEUED_MAX);
        let (outbox, orders) = mpsc::channel(MESSAGES_QUEUED_MAX);
        let welcome = wire::Welcome {
            protocol_version: proto::PROTOCOL_VERSION,
            rack_uuid: rack_uuid.clone(),
            lease_ttl_ms: self.0.policy.borrow().lease_ttl.as_ms(),
        };
        let welcome = wire::ToAgent { message: Some(to_agent::Message::Welcome(welcome)) };
        sender.send(Ok(welcome)).await.map_err(|_| stopping())?;
        self.0.forecasts.agent_changes(host.id); // before its messages end anything
        let session = self.0.driver.agent_up(host.id, hello, outbox).map_err(refused)?;
        let weights = self.0.shares.watch(host.name.clone());
        let shared = self.0.clone();
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = hear(&shared, &host, session, messages) => ended,
                ended = tell(orders, weights, rack_uuid, &sender) => ended,
                () = shared.stopped() => Some(stopping()),
                () = sender.closed() => None,
            };
            if let Some(status) = ended {
                let _ = sender.send(Err(status)).await; // a caller that left needs no reason
            }
            shared.forecasts.agent_changes(host.id);
            shared.driver.agent_down(session);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Applies reports until the agent disconnects or sends an invalid one.
async fn hear(
    shared: &Shared,
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
        let heard = match message.message {
            Some(from_agent::Message::Observed(have)) => hear_have(shared, host.id, session, have).await,
            Some(from_agent::Message::Shares(told)) => hear_shares(shared, &host.name, told),
            Some(from_agent::Message::Hello(_)) | None => {
                let rule = "must be a have or shares after the hello";
                Err(invalid(Invalid::new("message", "something else", rule)))
            }
        };
        if let Err(status) = heard {
            return Some(status);
        }
    }
}

async fn hear_have(
    shared: &Shared,
    host: HostId,
    session: SessionId,
    mut have: wire::ObservedState,
) -> Result<(), Status> {
    let touched = convert::agent::touched(std::mem::take(&mut have.touched)).map_err(invalid)?;
    let have = convert::agent::have(have).map_err(invalid)?;
    shared.forecasts.touched(host, &touched).map_err(refused)?; // before the end of a VM is applied
    shared.driver.agent_have(session, have).await.map_err(refused)
}

fn hear_shares(shared: &Shared, host: &Name, told: wire::Shares) -> Result<(), Status> {
    let told = convert::shares::told(host, told).map_err(invalid)?;
    shared.shares.tell(host.clone(), told);
    Ok(())
}

/// Sends weights and desired states until the driver ends the session; weights first, so that the
/// next epoch uses them.
async fn tell(
    mut orders: mpsc::Receiver<ToSession>,
    mut weights: Watched,
    rack_uuid: String,
    sender: &mpsc::Sender<Sent>,
) -> Option<Status> {
    let first = weights.next().await;
    let mut message = weights_message(&first);
    loop {
        sender.send(Ok(wire::ToAgent { message: Some(message) })).await.ok()?;
        message = tokio::select! {
            biased; // the end has priority
            order = orders.recv() => match order {
                None => return Some(stopping()),
                Some(ToSession::Close(why)) => return Some(closed(why)),
                Some(ToSession::Order(want)) => {
                    to_agent::Message::Desired(convert::agent::want(rack_uuid.clone(), want))
                }
                Some(ToSession::RequestReport) => to_agent::Message::ReportRequest(wire::ReportRequest {}),
            },
            weights = weights.next() => weights_message(&weights),
        };
    }
}

fn weights_message(weights: &Weights) -> to_agent::Message {
    to_agent::Message::Weights(wire::Weights { weights: convert::shares::weights(weights) })
}
