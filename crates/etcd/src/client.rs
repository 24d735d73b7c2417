//! Calls to a cluster of etcd. A call that a member does not answer in time is sent to the next member. A write can
//! therefore happen twice, or later than its answer: callers make their transactions conditional on a revision that
//! each of them changes.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio_stream::StreamExt as _;
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, ClientTlsConfig, Endpoint},
};

use crate::{
    error::{Error, is_temporary, needs_login},
    messages::{
        AuthenticateRequest, CompactionRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest,
        RangeRequest, RangeResponse, StatusRequest, TxnRequest, TxnResponse, auth_client::AuthClient,
        kv_client::KvClient, lease_client::LeaseClient, maintenance_client::MaintenanceClient,
    },
};

/// Metadata key of the token that etcd issues after the login.
const TOKEN_KEY: &str = "token";
/// Metadata key with which a member rejects calls while it knows no leader of its cluster.
const REQUIRE_LEADER_KEY: &str = "hasleader";

/// Interval of the pings that detect a lost connection. etcd rejects intervals below 5 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum size of the entries that one call reads, in bytes.
pub const RESPONSE_BYTES_MAX: usize = 40 << 20;

/// Cluster and login.
#[derive(Clone)]
pub struct Settings {
    /// Addresses of the members, such as `http://127.0.0.1:2379`; at least one.
    pub endpoints: Vec<String>,
    /// TLS settings for addresses that begin with `https://`.
    pub tls: Option<ClientTlsConfig>,
    /// User and password; `None` if etcd requires none.
    pub credentials: Option<Credentials>,
    /// Time limit of a call to one member, including the connection.
    pub call_timeout: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings").field("endpoints", &self.endpoints).finish_non_exhaustive() // the TLS settings contain a private key
    }
}

/// User and password of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// Name of the user.
    pub user: String,
    /// Password of the user.
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("user", &self.user).finish_non_exhaustive()
    }
}

/// Client of one cluster; cheap to clone.
#[derive(Clone)]
pub struct Client(Arc<Shared>);

struct Shared {
    members: Vec<Member>,
    /// Index of the member that answered last.
    current: AtomicUsize,
    credentials: Option<Credentials>,
    /// Token of the last login.
    token: Mutex<Option<MetadataValue<Ascii>>>,
    call_timeout: Duration,
}

struct Member {
    endpoint: String,
    channel: Channel,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.members.iter().map(|member| &member.endpoint)).finish()
    }
}

impl Client {
    /// Creates a client. Connections are made by the first call to each member. Must be called in a Tokio runtime.
    ///
    /// # Errors
    /// [`Error::Endpoint`] if an address is invalid, or TLS settings are missing or unusable.
    ///
    /// # Panics
    /// If there are no addresses.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        assert!(!settings.endpoints.is_empty(), "a cluster has at least one member");
        let member = |endpoint: String| {
            let channel = lazy_channel(&endpoint, &settings)
                .map_err(|cause| Error::Endpoint { endpoint: endpoint.clone(), cause })?;
            Ok(Member { endpoint, channel })
        };
        let members = settings.endpoints.iter().cloned().map(member).collect::<Result<_, _>>()?;
        let Settings { credentials, call_timeout, .. } = settings;
        Ok(Self(Arc::new(Shared {
            members,
            current: AtomicUsize::new(0),
            credentials,
            token: Mutex::default(),
            call_timeout,
        })))
    }

    /// Reads entries, at most [`RESPONSE_BYTES_MAX`].
    ///
    /// # Errors
    /// [`Error`]; [`Error::Compacted`] if `revision` is set and was compacted.
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, Error> {
        self.call(request, async |channel, request| {
            let mut client = KvClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX);
            client.range(request).await.map(tonic::Response::into_inner)
        })
        .await
    }

    /// Performs a transaction. After [`Error::Unavailable`], it may have been performed, or may be performed later.
    ///
    /// # Errors
    /// [`Error`]; [`Error::NoSpace`] if etcd accepts no writes.
    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Error> {
        self.call(request, async |channel, request| {
            KvClient::new(channel).txn(request).await.map(tonic::Response::into_inner)
        })
        .await
    }

    /// Removes the history of all entries before a revision. A revision that is already compacted is no error.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn compact(&self, revision: i64) -> Result<(), Error> {
        let compacted = self.call(CompactionRequest { revision }, async |channel, request| {
            KvClient::new(channel).compact(request).await.map(drop)
        });
        match compacted.await {
            Err(Error::Compacted) => Ok(()),
            result => result,
        }
    }

    /// Creates a lease, and returns its ID and its time to live.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn grant_lease(&self, ttl: Duration) -> Result<(i64, Duration), Error> {
        let ttl = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX);
        let request = LeaseGrantRequest { ttl, id: 0 };
        let lease = self
            .call(request, async |channel, request| {
                LeaseClient::new(channel).lease_grant(request).await.map(tonic::Response::into_inner)
            })
            .await?;
        if !lease.error.is_empty() {
            return Err(Error::Rejected(lease.error));
        }
        Ok((lease.id, Duration::from_secs(u64::try_from(lease.ttl).unwrap_or(0))))
    }

    /// Renews a lease, and returns its new time to live.
    ///
    /// # Errors
    /// [`Error::LeaseNotFound`] if the lease has ended, or another [`Error`].
    pub async fn keep_lease_alive(&self, id: i64) -> Result<Duration, Error> {
        let renewed = self.call(LeaseKeepAliveRequest { id }, async |channel, request| {
            let (metadata, extensions, message) = request.into_parts();
            let stream = Request::from_parts(metadata, extensions, tokio_stream::once(message));
            let mut replies = LeaseClient::new(channel).lease_keep_alive(stream).await?.into_inner();
            let reply = replies.next().await.unwrap_or_else(|| Err(Status::unavailable("no reply")));
            reply.map(|reply| reply.ttl)
        });
        match u64::try_from(renewed.await?) {
            Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
            _ => Err(Error::LeaseNotFound),
        }
    }

    /// Ends a lease, and deletes its entries. A lease that has ended is no error.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn revoke_lease(&self, id: i64) -> Result<(), Error> {
        let revoked = self.call(LeaseRevokeRequest { id }, async |channel, request| {
            LeaseClient::new(channel).lease_revoke(request).await.map(drop)
        });
        match revoked.await {
            Err(Error::LeaseNotFound) => Ok(()),
            result => result,
        }
    }

    /// Returns the size of the database of the member that answers, in bytes; `None` while etcd rejects writes because
    /// it is out of space.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn database_bytes(&self) -> Result<Option<u64>, Error> {
        let status = self.call(StatusRequest {}, async |channel, request| {
            MaintenanceClient::new(channel).status(request).await.map(tonic::Response::into_inner)
        });
        let status = status.await?;
        if status.errors.iter().any(|error| error.contains("NOSPACE")) {
            return Ok(None);
        }
        Ok(Some(u64::try_from(status.db_size).unwrap_or(0)))
    }

    /// Sends a request to the members in turn until one answers, each at most once.
    async fn call<Q: Clone, R>(
        &self,
        request: Q,
        send: impl AsyncFn(Channel, Request<Q>) -> Result<R, Status>,
    ) -> Result<R, Error> {
        let members = &self.0.members;
        let first = self.0.current.load(Ordering::Relaxed);
        let mut attempts = Vec::new();
        for index in (first..members.len()).chain(0..first) {
            match self.try_member(&members[index], &request, &send).await {
                Ok(reply) => {
                    self.0.current.store(index, Ordering::Relaxed);
                    return Ok(reply);
                }
                Err(status) if is_temporary(&status) => attempts.push(members[index].describe(&status)),
                Err(status) => return Err(Error::from_status(&status)),
            }
        }
        Err(Error::Unavailable { attempts })
    }

    /// Sends a request to one member. Logs in first if there is no token, and again if the token has expired.
    async fn try_member<Q: Clone, R>(
        &self,
        member: &Member,
        request: &Q,
        send: &impl AsyncFn(Channel, Request<Q>) -> Result<R, Status>,
    ) -> Result<R, Status> {
        let attempt = async {
            let stored = self.stored_token();
            let token = match (&self.0.credentials, stored) {
                (Some(credentials), None) => Some(self.log_in(member, credentials).await?),
                (_, stored) => stored,
            };
            let reply = send(member.channel.clone(), authorized(request.clone(), token)).await;
            match (reply, &self.0.credentials) {
                (Err(status), Some(credentials)) if needs_login(&status) => {
                    let token = self.log_in(member, credentials).await?;
                    send(member.channel.clone(), authorized(request.clone(), Some(token))).await
                }
                (reply, _) => reply,
            }
        };
        let timed_out = |_| Status::deadline_exceeded(format!("no answer within {:?}", self.0.call_timeout));
        tokio::time::timeout(self.0.call_timeout, attempt).await.map_err(timed_out)?
    }

    fn stored_token(&self) -> Option<MetadataValue<Ascii>> {
        self.0.token.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn log_in(
        &self,
        member: &Member,
        credentials: &Credentials,
    ) -> Result<MetadataValue<Ascii>, Status> {
        let Credentials { user, password } = credentials.clone();
        let request = AuthenticateRequest { name: user, password };
        let reply = AuthClient::new(member.channel.clone()).authenticate(request).await?.into_inner();
        let token = reply.token.parse().map_err(|_| Status::internal("the token is invalid"))?;
        *self.0.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(MetadataValue::clone(&token));
        Ok(token)
    }
}

impl Member {
    fn describe(&self, status: &Status) -> String {
        let reason = match status.message() {
            "" => status.code().description(),
            message => message,
        };
        format!("{}: {reason}", self.endpoint)
    }
}

fn lazy_channel(endpoint: &str, settings: &Settings) -> Result<Channel, tonic::transport::Error> {
    let mut endpoint_settings = Endpoint::from_shared(endpoint.to_owned())?
        .tcp_nodelay(true)
        .connect_timeout(settings.call_timeout)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(settings.call_timeout)
        .keep_alive_while_idle(true);
    if let Some(tls) = &settings.tls
        && endpoint.starts_with("https://")
    {
        endpoint_settings = endpoint_settings.tls_config(tls.clone())?;
    }
    Ok(endpoint_settings.connect_lazy())
}

fn authorized<Q>(message: Q, token: Option<MetadataValue<Ascii>>) -> Request<Q> {
    let mut request = Request::new(message);
    request.metadata_mut().insert(REQUIRE_LEADER_KEY, MetadataValue::from_static("true"));
    if let Some(token) = token {
        request.metadata_mut().insert(TOKEN_KEY, token);
    }
    request
}
