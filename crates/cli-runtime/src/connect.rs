//! Connections to a pool manager: a unix socket, a loopback address, or TLS with a certificate on both sides. No command is
//! known here.

use std::{fs, net::IpAddr, path::Path, time::Duration};

use proto::bearer::{Bearer, ClientChannel};
use proto::v1::{admin_client::AdminClient, models_client::ModelsClient, scheduler_client::SchedulerClient};
use tonic::{
    Response, Status,
    transport::{Certificate, ClientTlsConfig, Endpoint, Identity, Uri},
};
use units::limits::{MESSAGE_BYTES_MAX, RESPONSE_TIMEOUT_DEFAULT, WAIT_READY_MAX};

use crate::{Failure, Global};

/// Where a manager listens unless rack.toml says otherwise.
const ENDPOINT_DEFAULT: &str = "unix:/run/tarn/manager.sock";

/// An open connection to one manager. It mends itself: after a restart of the manager the next call connects again.
#[derive(Clone, Debug)]
pub struct Connection {
    uri: String,
    endpoint: Endpoint,
    bearer: Bearer,
    channel: ClientChannel,
    timeout: Option<Duration>,
}

impl Connection {
    /// Connects as the options say.
    ///
    /// # Errors
    /// [`Failure::Value`] for options that make no sense together, [`Failure::File`] for an unreadable PEM file,
    /// [`Failure::Connect`] or [`Failure::TimedOut`] if nobody answers.
    pub async fn open(global: &Global) -> Result<Self, Failure> {
        let uri = global.endpoint.clone().unwrap_or_else(|| ENDPOINT_DEFAULT.to_owned());
        let endpoint = endpoint(&uri, global)?;
        let bearer = bearer(&uri, global)?;
        let channel = connect(&uri, &endpoint, bearer.clone(), global.timeout).await?;
        Ok(Self { uri, endpoint, bearer, channel, timeout: global.timeout })
    }

    /// One more connection to the same manager, for programs that keep many calls going.
    ///
    /// # Errors
    /// [`Failure::Connect`] or [`Failure::TimedOut`] if nobody answers.
    pub async fn another(&self) -> Result<Self, Failure> {
        let channel = connect(&self.uri, &self.endpoint, self.bearer.clone(), self.timeout).await?;
        Ok(Self { channel, ..self.clone() })
    }

    /// Where it leads.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// What a scheduler may ask.
    pub fn scheduler(&self) -> SchedulerClient<ClientChannel> {
        SchedulerClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// What an operator may ask.
    pub fn admin(&self) -> AdminClient<ClientChannel> {
        AdminClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// What may be asked of forecasts.
    pub fn models(&self) -> ModelsClient<ClientChannel> {
        ModelsClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// How long a call waits for its answer.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration())
    }

    /// How long a call waits for slices to come online, or for a model.
    pub fn patience(&self) -> Duration {
        self.timeout.unwrap_or(WAIT_READY_MAX.as_duration())
    }

    /// What one call answers, or why it does not; dropped calls are cancelled at the manager.
    ///
    /// # Errors
    /// [`Failure::Said`] with what the manager said, [`Failure::TimedOut`] if it said nothing in time.
    pub async fn ask<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        self.ask_within(self.timeout(), call).await
    }

    /// As [`Self::ask`], with another time to wait.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn ask_within<T>(
        &self,
        span: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Failure> {
        self.within(span, call).await.map(Response::into_inner)
    }

    /// As [`Self::ask`], with the headers of the answer.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn answer<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<Response<T>, Failure> {
        self.within(self.timeout(), call).await
    }

    /// Waits for an answer, or for the next message of a stream.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn within<T>(
        &self,
        after: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Failure> {
        match tokio::time::timeout(after, call).await {
            Ok(answer) => Ok(answer?),
            Err(_) => Err(Failure::TimedOut { endpoint: self.uri.clone(), after }),
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
    match tokio::time::timeout(after, endpoint.connect()).await {
        Ok(connected) => connected
            .map(|channel| ClientChannel::new(channel, bearer))
            .map_err(|source| Failure::Connect { endpoint: uri.to_owned(), source }),
        Err(_) => Err(Failure::TimedOut { endpoint: uri.to_owned(), after }),
    }
}

fn endpoint(uri: &str, global: &Global) -> Result<Endpoint, Failure> {
    let known = ["http://", "https://", "unix:"].iter().any(|scheme| uri.starts_with(scheme));
    let endpoint = if known { Endpoint::from_shared(uri.to_owned()).ok() } else { None };
    let endpoint = endpoint.ok_or_else(|| Failure::Value {
        field: "--endpoint",
        value: uri.to_owned(),
        rule: "must be http://HOST:PORT, https://HOST:PORT or unix:/PATH",
    })?;
    let endpoint = endpoint.tcp_nodelay(true);
    match tls(uri, global)? {
        None => Ok(endpoint),
        Some(tls) => {
            endpoint.tls_config(tls).map_err(|source| Failure::Connect { endpoint: uri.to_owned(), source })
        }
    }
}

/// Reads the token of this client's role. It is a secret, so it only goes to this machine.
fn bearer(uri: &str, global: &Global) -> Result<Bearer, Failure> {
    let Some(path) = &global.token_file else { return Ok(Bearer::default()) };
    if !is_local(uri) {
        let rule = "must be unix:/PATH or http:// and a loopback address with --token-file";
        return Err(Failure::Value { field: "--endpoint", value: uri.to_owned(), rule });
    }
    let text = String::from_utf8(read(path)?).ok();
    let bearer = text.and_then(|text| Bearer::new(text.trim()).ok());
    bearer.ok_or_else(|| Failure::Value {
        field: "--token-file",
        value: path.display().to_string(),
        rule: "must hold a token as pool-manager writes it",
    })
}

fn is_local(uri: &str) -> bool {
    let parsed = uri.parse::<Uri>().ok();
    let host = parsed.as_ref().and_then(Uri::host).unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    uri.starts_with("unix:")
        || uri.starts_with("http:")
            && (host == "localhost" || address.is_ok_and(|address| address.is_loopback()))
}

/// What TLS needs, or `None` without TLS. Half a set of options is a mistake worth a word.
fn tls(uri: &str, global: &Global) -> Result<Option<ClientTlsConfig>, Failure> {
    let given = [&global.ca, &global.cert, &global.key].into_iter().any(Option::is_some);
    if !uri.starts_with("https://") {
        let rule = "must begin with https:// when --ca, --cert or --key is given";
        return if given {
            Err(Failure::Value { field: "--endpoint", value: uri.to_owned(), rule })
        } else {
            Ok(None)
        };
    }
    let ca = global.ca.as_deref().ok_or_else(|| Failure::Value {
        field: "--ca",
        value: String::new(),
        rule: "must name the certificate authority of an https:// manager",
    })?;
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(ca)?));
    if let Some(identity) = identity(global)? {
        tls = tls.identity(identity);
    }
    if let Some(name) = &global.server_name {
        tls = tls.domain_name(name);
    }
    Ok(Some(tls))
}

fn identity(global: &Global) -> Result<Option<Identity>, Failure> {
    match (&global.cert, &global.key) {
        (None, None) => Ok(None),
        (Some(cert), Some(key)) => Ok(Some(Identity::from_pem(read(cert)?, read(key)?))),
        (Some(lone), None) => Err(half("--cert", lone, "must come with --key")),
        (None, Some(lone)) => Err(half("--key", lone, "must come with --cert")),
    }
}

fn half(field: &'static str, lone: &Path, rule: &'static str) -> Failure {
    Failure::Value { field, value: lone.display().to_string(), rule }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|errno| Failure::File { tried: "read", path: path.to_owned(), errno })
}
