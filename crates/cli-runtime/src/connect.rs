//! Connection to a pool manager over a Unix socket, a loopback address or mutual TLS, with time
//! limits for calls. Each command's requests are in the file of the command.

use std::{
    net::IpAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use proto::bearer::{Bearer, ClientChannel};
use proto::v1::{admin_client::AdminClient, models_client::ModelsClient, scheduler_client::SchedulerClient};
use tonic::{
    Response, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri},
};
use units::limits::{
    MANAGERS_MAX, PEM_FILE_BYTES_MAX, RESPONSE_TIMEOUT_DEFAULT, RPC_MESSAGE_BYTES_MAX, TOKEN_FILE_BYTES_MAX,
    WAIT_READY_TIMEOUT_MAX,
};

use crate::{
    Exit, Failure, Global, leader, open,
    target::{Target, connect_to_queue},
};

/// Endpoint that is used without --endpoint: the default listen address of a manager.
const ENDPOINT_DEFAULT: &str = "unix:/run/tarn/manager.sock";

/// Connection to the manager of a rack. After a restart of the manager, the next call reconnects. If there are several
/// managers, the next call after a failure uses the leader at that time.
#[derive(Clone, Debug)]
pub struct Connection {
    targets: Vec<Target>,
    bearer: Bearer,
    current: Arc<Mutex<Current>>,
    timeout: Option<Duration>,
}

/// Manager that receives the calls.
#[derive(Clone, Debug)]
struct Current {
    uri: String,
    channel: ClientChannel,
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
        let uris = global.endpoint.clone().unwrap_or_else(|| ENDPOINT_DEFAULT.to_owned());
        let uris: Vec<&str> = uris.split(',').collect();
        if uris.len() > MANAGERS_MAX {
            let rule = format!("must have at most {MANAGERS_MAX} addresses").into();
            return Err(Failure::InvalidValue { field: "--endpoint", value: uris.join(","), rule });
        }
        let target =
            |uri: &&str| Ok(Target { uri: (*uri).to_owned(), endpoint: parse_endpoint(uri, global)? });
        let targets = uris.iter().map(target).collect::<Result<Vec<_>, Failure>>()?;
        let bearer = read_token(&uris, global)?;
        let current = connect(&targets, &bearer, global.timeout).await?;
        Ok(Self { targets, bearer, current: Arc::new(Mutex::new(current)), timeout: global.timeout })
    }

    /// Opens another connection to the same manager, for programs with many concurrent calls.
    ///
    /// # Errors
    /// [`Failure::Connect`] if the connection fails, [`Failure::TimedOut`] if connecting takes
    /// longer than the timeout.
    pub async fn open_new_connection(&self) -> Result<Self, Failure> {
        let current = connect(&self.targets, &self.bearer, self.timeout).await?;
        Ok(Self { current: Arc::new(Mutex::new(current)), ..self.clone() })
    }

    /// Returns the address of the manager that receives the calls, as a URI.
    pub fn uri(&self) -> String {
        self.current().uri
    }

    fn current(&self) -> Current {
        self.current.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn channel(&self) -> ClientChannel {
        self.current().channel
    }

    /// Connects to the leader after a call failed, if there are several managers. A failure is ignored, because the
    /// next call reports it.
    async fn find_leader_after(&self, failure: &Failure) {
        if self.targets.len() > 1
            && matches!(failure.exit(), Exit::Unavailable | Exit::TimedOut)
            && let Ok(current) = connect(&self.targets, &self.bearer, Some(Duration::ZERO)).await
        {
            *self.current.lock().unwrap_or_else(PoisonError::into_inner) = current;
        }
    }

    /// Returns a client of the Scheduler service.
    pub fn scheduler(&self) -> SchedulerClient<ClientChannel> {
        SchedulerClient::new(self.channel()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
    }

    /// Returns a client of the Admin service.
    pub fn admin(&self) -> AdminClient<ClientChannel> {
        AdminClient::new(self.channel()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
    }

    /// Returns a client of the Models service.
    pub fn models(&self) -> ModelsClient<ClientChannel> {
        ModelsClient::new(self.channel()).max_decoding_message_size(RPC_MESSAGE_BYTES_MAX)
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
        let failure = match tokio::time::timeout(timeout, call).await {
            Ok(Ok(response)) => return Ok(response),
            Ok(Err(status)) => Failure::from(status),
            Err(_) => Failure::TimedOut { endpoint: self.uri(), after: timeout },
        };
        self.find_leader_after(&failure).await;
        Err(failure)
    }
}

/// Connects to the only manager, or to the leader of several managers.
async fn connect(targets: &[Target], bearer: &Bearer, timeout: Option<Duration>) -> Result<Current, Failure> {
    let after = timeout.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration());
    let (uri, channel) = match targets {
        [Target { uri, endpoint }] => (uri, connect_to_one(uri, endpoint, after).await?),
        several => {
            let (index, channel) = leader::find(several, after).await?;
            (&several[index].uri, channel)
        }
    };
    Ok(Current { uri: uri.clone(), channel: ClientChannel::new(channel, bearer.clone()) })
}

async fn connect_to_one(uri: &str, endpoint: &Endpoint, after: Duration) -> Result<Channel, Failure> {
    match tokio::time::timeout(after, connect_to_queue(endpoint)).await {
        Ok(connected) => connected.map_err(|source| Failure::Connect { endpoint: uri.to_owned(), source }),
        Err(_) => Err(Failure::TimedOut { endpoint: uri.to_owned(), after }),
    }
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
fn read_token(uris: &[&str], global: &Global) -> Result<Bearer, Failure> {
    let Some(path) = &global.token_file else { return Ok(Bearer::default()) };
    if let Some(remote) = uris.iter().find(|uri| !is_local_uri(uri)) {
        let rule = "must be unix:/PATH or http:// with a loopback address when --token-file is given";
        let value = (*remote).to_owned();
        return Err(Failure::InvalidValue { field: "--endpoint", value, rule: rule.into() });
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
