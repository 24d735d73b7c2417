//! Ports, connections and bounded waiting on this machine.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    time::{Duration, Instant},
};

use proto::bearer::{Bearer, ClientChannel};
use tonic::transport::Endpoint;

use crate::failure::Failure;

/// Interval between checks of an awaited condition.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Returns a free TCP port of the loopback address.
///
/// # Errors
/// The kernel has none.
pub fn free_port() -> Result<u16, Failure> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    port.map(|address| address.port()).map_err(Failure::file("find a free port on", Path::new("127.0.0.1")))
}

/// Opens connections to one server, with the client's token.
///
/// # Errors
/// The server does not accept one.
pub async fn connect(uri: &str, bearer: &Bearer, count: usize) -> Result<Vec<ClientChannel>, Failure> {
    let mut channels = Vec::with_capacity(count);
    for _ in 0..count {
        let endpoint = Endpoint::from_shared(uri.to_owned());
        let refused = |source| Failure::Connect { uri: uri.to_owned(), source };
        let channel = endpoint.map_err(refused)?.connect().await.map_err(refused)?;
        channels.push(ClientChannel::new(channel, bearer.clone()));
    }
    Ok(channels)
}

/// Repeats `look` until its condition holds; `Ok(Err(seen))` means not yet.
///
/// # Errors
/// It does not come about in time, or looking fails for good.
pub async fn until<T>(
    what: &str,
    within: Duration,
    mut look: impl AsyncFnMut() -> Result<Result<T, String>, Failure>,
) -> Result<T, Failure> {
    let end = Instant::now() + within;
    loop {
        let seen = match look().await? {
            Ok(found) => return Ok(found),
            Err(seen) => seen,
        };
        if Instant::now() >= end {
            return Err(Failure::NotInTime { what: what.to_owned(), seconds: within.as_secs(), seen });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_ends_with_what_was_seen_last() {
        let mut looks = 0;
        let never = until::<()>("rain", Duration::from_millis(50), async || {
            looks += 1;
            Ok(Err(format!("{looks} clouds")))
        });
        let failure = never.await.unwrap_err().to_string();
        assert!(failure.starts_with("rain did not come about") && failure.ends_with("clouds"), "{failure}");
        assert!(looks > 1);
    }

    #[tokio::test]
    async fn waiting_ends_as_soon_as_it_is_there() {
        let mut left = 3;
        let there = until("three looks", Duration::from_secs(600), async || {
            left -= 1;
            Ok(if left == 0 { Ok(left) } else { Err(format!("{left} left")) })
        });
        assert_eq!(there.await.unwrap(), 0);
    }
}
