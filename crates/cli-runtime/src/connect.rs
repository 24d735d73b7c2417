//! Connection to a pool manager over a Unix socket, a loopback address or mutual TLS, with time
//! limits for calls. Each command's requests are in the file of the command.

use std::{io, net::IpAddr, path::Path, time::Duration};

use proto::bearer::{Bearer, ClientChannel};
use proto::v1::{admin_client::AdminClient, models_client::ModelsClient, scheduler_client::SchedulerClient};
use tonic::{
    Response, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri},
};
use units::limits::{
    PEM_FILE_BYTES_MAX, RESPONSE_TIMEOUT_DEFAULT, RPC_MESSAGE_BYTES_MAX, TOKEN_FILE_BYTES_MAX,
    WAIT_READY_TIMEOUT_MAX,
};

use crate::{Failure, Global, open};

/// Endpoint that is used without --endpoint: the default listen address of a manager.
const ENDPOINT_DEFAULT: &str = "unix:/run/tarn/manager.sock";

/// Delay before the next attempt to connect while the queue of a unix socket is full.
const QUEUE_FULL_RETRY_AFTER: Duration = Duration::from_millis(10);

/// Connection to one manager. After a restart of the manager, the next call reconnects.
#[derive(Clone, Debug)]
pub struct Connection {
    uri: String,
    endpoint: Endpoint,
    bearer: Bearer,
    channel: ClientChannel,
    timeout: Option<Duration>,
}

impl Connection {
    /// Opens a connection according to the global options.
    ///
    /// # Errors
    /// [`Failure::InvalidValue`] or [`Failure::Usage`] if the endpoint, an option, the token file
    /// or a PEM file is invalid, or options contradict each other. [`Failure::File`] if a file
    /// cannot be read. [`Failure::Connect`] if the connection fails. [`Failure::TimedOut`] if
    /// connecting takes longer than the timeout.
    pub async fn open(global: &Global) -> Result<Self, Failure> {
        let uri = global.endpoint.clone().unwrap_or_else(|| ENDPOINT_DEFAULT.to_owned());
        let endpoint = parse_endpoint(&uri, global)?;
        let bearer = read_token(&uri, global)?;
        let channel = connect(&uri, &endpoint, bearer.clone(), global.timeout).await?;
        Ok(Self { uri, endpoint, bearer, channel, timeout: global.timeout })
    }

    /// Opens another connection to the same manager, for programs with many concurrent calls.
    ///
    /// # Errors
    /// [`Failure::Connect`] if the connection fails, [`Failure::TimedOut`] if connecting takes
    /// longer than the timeout.
    pub async fn open_new_connection(&self) -> Result<Self, Failure> {
        let channel = connect(&self.uri, &self.endpoint, self.bearer.clone(), self.timeout).await?;
        Ok(Self { channel, ..self.clone() })
    }

    /// Returns the address of the manager, as a URI.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Returns a client of the Scheduler service.
    pub fn scheduler(&self) -> SchedulerClient<ClientChannel> {
        SchedulerClient::new(self.channel.clone()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
    }

    /// Returns a client of the Admin service.
    pub fn admin(&self) -> AdminClient<ClientChannel> {
        AdminClient::new(self.channel.clone()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
    }

    /// Returns a client of the Models service.
    pub fn models(&self) -> ModelsClient<ClientChannel> {
        ModelsClient::new(self.channel.clone()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
    }

    /// Returns the time limit of a call: --timeout or its default.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration())
    }

    /// Returns the time limit of a call that waits for slices or models, which is longer by
    /// default.
    pub fn wait_timeout(&self) -> Duration {
        self.timeout.unwrap_or(WAIT_READY_TIMEOUT_MAX.as_duration())
    }

    /// Awaits a call for at most [`Self::timeout`] and returns its response. A call that times out
    /// is cancelled at the manager.
    ///
    /// # Errors
    /// [`Failure::Rejected`] with the manager's status, [`Failure::TimedOut`] if no response
    /// arrives in time.
    pub async fn call<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        self.call_with_timeout(self.timeout(), call).await
    }

    /// Awaits a call like [`Self::call`], but with the given timeout.
    ///
    /// # Errors
    /// The errors of [`Self::call`].
    pub async fn call_with_timeout<T>(
        &self,
        timeout: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        self.await_with_timeout(timeout, call).await.map(Response::into_inner)
    }

    /// Awaits a call like [`Self::call`], and returns the response with its metadata.
    ///
    /// # Errors
    /// The errors of [`Self::call`].
    pub async fn call_with_metadata<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Failure> {
        self.await_with_timeout(self.timeout(), call).await
    }

    /// Waits for a response or for the next message of a stream, for at most `timeout`.
    ///
    /// # Errors
    /// The errors of [`Self::call`].
    pub async fn await_with_timeout<T>(
        &self,
        timeout: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(timeout, call).await {
            Ok(response) => Ok(response?),
            Err(_) => Err(Failure::TimedOut { endpoint: self.uri.clone(), after: timeout }),
        }
    }
}

async fn connect(
    uri: &str,
    endpoint: &Endpoint,
    bearer: Bearer,
    timeout: Option<Duration>,
) -> Result<ClientChannel, Failure> {
    let after = timeout.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration());
    match tokio::time::timeout(after, connect_to_queue(endpoint)).await {
        Ok(connected) => connected
            .map(|channel| ClientChannel::new(channel, bearer))
            .map_err(|source| Failure::Connect { endpoint: uri.to_owned(), source }),
        Err(_) => Err(Failure::TimedOut { endpoint: uri.to_owned(), after }),
    }
}

/// Connects, and retries while the queue of a unix socket is full. The server then processes other
/// connections, and connect(2) fails with EAGAIN instead of waiting.
async fn connect_to_queue(endpoint: &Endpoint) -> Result<Channel, tonic::transport::Error> {
    loop {
        match endpoint.connect().await {
            Err(error) if is_queue_full(&error) => tokio::time::sleep(QUEUE_FULL_RETRY_AFTER).await,
            connected => return connected,
        }
    }
}

fn is_queue_full(error: &tonic::transport::Error) -> bool {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|errno| errno.kind() == io::ErrorKind::WouldBlock)
}

fn parse_endpoint(uri: &str, global: &Global) -> Result<Endpoint, Failure> {
    let has_address = match uri.strip_prefix("unix:") {
        Some(path) => !path.trim_start_matches('/').is_empty(),
        None => ["http://", "https://"].iter().any(|scheme| uri.starts_with(scheme)),
    };
    let endpoint = if has_address { Endpoint::from_shared(uri.to_owned()).ok() } else { None };
    let endpoint = endpoint.ok_or_else(|| Failure::InvalidValue {
        field: "--endpoint",
        value: uri.to_owned(),
        rule: "must be http://HOST:PORT, https://HOST:PORT or unix:/PATH".into(),
    })?;
    let endpoint = endpoint.tcp_nodelay(true);
    match tls_config(uri, global)? {
        None => Ok(endpoint),
        Some(tls) => {
            endpoint.tls_config(tls).map_err(|source| Failure::Connect { endpoint: uri.to_owned(), source })
        }
    }
}

/// Reads the token file. Returns an error for a remote endpoint, because the token is a secret and
/// would be sent unencrypted.
fn read_token(uri: &str, global: &Global) -> Result<Bearer, Failure> {
    let Some(path) = &global.token_file else { return Ok(Bearer::default()) };
    if !is_local_uri(uri) {
        let rule = "must be unix:/PATH or http:// with a loopback address when --token-file is given";
        return Err(Failure::InvalidValue { field: "--endpoint", value: uri.to_owned(), rule: rule.into() });
    }
    let text = String::from_utf8(open::credentials("--token-file", path, TOKEN_FILE_BYTES_MAX)?).ok();
    let bearer = text.and_then(|text| Bearer::new(text.trim()).ok());
    bearer.ok_or_else(|| Failure::InvalidValue {
        field: "--token-file",
        value: path.display().to_string(),
        rule: "must contain a token written by pool-manager".into(),
    })
}

fn is_local_uri(uri: &str) -> bool {
    let parsed = uri.parse::<Uri>().ok();
    let host = parsed.as_ref().and_then(Uri::host).unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    uri.starts_with("unix:")
        || uri.starts_with("http:")
            && (host == "localhost" || address.is_ok_and(|address| address.is_loopback()))
}

/// Returns the TLS configuration, or `None` for an endpoint without TLS.
///
/// # Errors
/// [`Failure::InvalidValue`] or [`Failure::Usage`] if TLS options are missing or not applicable.
fn tls_config(uri: &str, global: &Global) -> Result<Option<ClientTlsConfig>, Failure> {
    let has_tls_options = [&global.ca, &global.cert, &global.key].into_iter().any(Option::is_some);
    if !uri.starts_with("https://") {
        let rule = "must begin with https:// when --ca, --cert or --key is given";
        return if has_tls_options {
            Err(Failure::InvalidValue { field: "--endpoint", value: uri.to_owned(), rule: rule.into() })
        } else {
            Ok(None)
        };
    }
    let ca = global
        .ca
        .as_deref()
        .ok_or_else(|| Failure::Usage("--ca is required for an https:// endpoint".to_owned()))?;
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read_pem("--ca", ca)?));
    if let Some(identity) = client_identity(global)? {
        tls = tls.identity(identity);
    }
    if let Some(name) = &global.server_name {
        tls = tls.domain_name(name);
    }
    Ok(Some(tls))
}

fn client_identity(global: &Global) -> Result<Option<Identity>, Failure> {
    match (&global.cert, &global.key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => {
            Ok(Some(Identity::from_pem(read_pem("--cert", cert)?, read_pem("--key", key)?)))
        }
        (Some(cert), None) => Err(incomplete_key_pair("--cert", cert, "requires --key")),
        (None, Some(key)) => Err(incomplete_key_pair("--key", key, "requires --cert")),
    }
}

fn incomplete_key_pair(field: &'static str, path: &Path, rule: &'static str) -> Failure {
    Failure::InvalidValue { field, value: path.display().to_string(), rule: rule.into() }
}

fn read_pem(option: &'static str, path: &Path) -> Result<Vec<u8>, Failure> {
    open::credentials(option, path, PEM_FILE_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
    };

    use super::*;

    #[tokio::test]
    async fn connect_waits_while_the_queue_of_a_unix_socket_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manager.sock");
        let address = SocketAddrUnix::new(&path).unwrap();
        let socket =
            || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        let listening = socket();
        bind(&listening, &address).unwrap();
        listen(&listening, 1).unwrap();
        let mut queued = Vec::new();
        while queued.last().is_none_or(|(_, connected): &(_, Result<(), _>)| connected.is_ok()) {
            let client = socket();
            let connected = connect(&client, &address);
            queued.push((client, connected));
        }
        let endpoint = Endpoint::from_shared(format!("unix:{}", path.display())).unwrap();
        assert!(is_queue_full(&endpoint.connect().await.unwrap_err()));
        let mut connecting = std::pin::pin!(connect_to_queue(&endpoint));
        let waited = tokio::time::timeout(QUEUE_FULL_RETRY_AFTER * 5, &mut connecting).await;
        assert!(waited.is_err(), "connected although the queue is full");
        let listener = UnixListener::from(listening);
        let _accepted: Vec<_> = std::iter::from_fn(|| listener.accept().ok()).collect();
        connecting.await.unwrap();
    }
}
