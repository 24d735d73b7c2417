//! Free ports and connections on this machine, and waiting with a time limit.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    time::{Duration, Instant},
};

use proto::bearer::{Bearer, ClientChannel};
use tonic::transport::Endpoint;

use crate::failure::Failure;

/// Interval between checks of an awaited condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns a TCP port that is free on the loopback address.
///
/// # Errors
/// [`Failure`] if no port is free.
pub fn free_port() -> Result<u16, Failure> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    port.map(|address| address.port())
        .map_err(Failure::file_error("find a free port on", Path::new("127.0.0.1")))
}

/// Opens `count` connections to a server. Each request on a connection contains the token `bearer`.
///
/// # Errors
/// [`Failure`] if the server does not accept a connection.
pub async fn connect(uri: &str, bearer: &Bearer, count: usize) -> Result<Vec<ClientChannel>, Failure> {
    let mut channels = Vec::with_capacity(count);
    for _ in 0..count {
        let endpoint = Endpoint::from_shared(uri.to_owned());
        let failure = |source| Failure::Connect { uri: uri.to_owned(), source };
        let channel = endpoint.map_err(failure)?.connect().await.map_err(failure)?;
        channels.push(ClientChannel::new(channel, bearer.clone()));
    }
    Ok(channels)
}

/// Repeats `check` until it returns `Ok(Ok(_))`. If the condition does not hold yet, `check`
/// returns `Ok(Err(state))`, where `state` describes the current state for the error message.
///
/// # Errors
/// [`Failure`] if the time limit expires or `check` fails.
pub async fn wait_until<T>(
    event: &str,
    within: Duration,
    mut check: impl AsyncFnMut() -> Result<Result<T, String>, Failure>,
) -> Result<T, Failure> {
    let end = Instant::now() + within;
    loop {
        let last_state = match check().await? {
            Ok(found) => return Ok(found),
            Err(last_state) => last_state,
        };
        if Instant::now() >= end {
            return Err(Failure::TimedOut { event: event.to_owned(), seconds: within.as_secs(), last_state });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn timeout_reports_last_state() {
        let mut checks = 0;
        let result = wait_until::<()>("an impossible event", Duration::from_millis(50), async || {
            checks += 1;
            Ok(Err(format!("{checks} attempts")))
        });
        let failure = result.await.unwrap_err().to_string();
        assert!(
            failure.contains("waiting for an impossible event") && failure.ends_with("attempts"),
            "{failure}"
        );
        assert!(checks > 1);
    }

    #[tokio::test]
    async fn wait_ends_when_condition_holds() {
        let mut remaining = 3;
        let result = wait_until("three checks", Duration::from_secs(600), async || {
            remaining -= 1;
            Ok(if remaining == 0 { Ok(remaining) } else { Err(format!("{remaining} left")) })
        });
        assert_eq!(result.await.unwrap(), 0);
    }
}
