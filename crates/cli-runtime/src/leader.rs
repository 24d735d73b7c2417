//! Finds the manager that serves requests. Of several managers of a rack, one is the leader, and the others only wait to
//! take over.

use std::time::{Duration, Instant};

use proto::v1::{ListManagersRequest, admin_client::AdminClient, scheduler_server::SERVICE_NAME};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{
    Failure,
    target::{Target, connect_to_queue},
};

/// Time in which one manager must answer, so that a manager that does not respond delays a command only shortly.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay before the managers are asked again while none of them is the leader.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Connects to the leader among `targets`, at least one. Waits for at most `after` until there is a leader.
///
/// # Errors
/// [`Failure::NoLeader`] with the last answer of each manager.
pub(crate) async fn find(targets: &[Target], after: Duration) -> Result<(usize, Channel), Failure> {
    let started = Instant::now();
    loop {
        let mut answers = Vec::new();
        for (index, target) in targets.iter().enumerate() {
            let asked = tokio::time::timeout(ANSWER_TIMEOUT, connect_to_leader(&target.endpoint)).await;
            match asked {
                Ok(Ok(channel)) => return Ok((index, channel)),
                Ok(Err(answer)) => answers.push(format!("{}: {answer}", target.uri)),
                Err(_) => answers.push(format!("{}: no response within {ANSWER_TIMEOUT:?}", target.uri)),
            }
        }
        if started.elapsed() >= after {
            return Err(Failure::NoLeader { after, answers });
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Connects to a manager. Returns the reason if it is not the leader.
async fn connect_to_leader(endpoint: &Endpoint) -> Result<Channel, String> {
    let channel = connect_to_queue(endpoint).await.map_err(|error| units::chain(&error))?;
    let request = HealthCheckRequest { service: SERVICE_NAME.to_owned() };
    let checked = HealthClient::new(channel.clone()).check(request).await;
    match checked.map_err(|status| status.message().to_owned())?.into_inner().status() {
        ServingStatus::Serving => Ok(channel),
        _ => Err(ask_for_leader(channel).await),
    }
}

/// Returns the answer of a standby to a call, which names the leader.
async fn ask_for_leader(standby: Channel) -> String {
    let answer = AdminClient::new(standby).list_managers(ListManagersRequest {}).await;
    answer.map_or_else(|status| status.message().to_owned(), |_| "has become the leader".to_owned())
}
