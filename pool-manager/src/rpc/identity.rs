//! Authenticates and authorizes callers. The required credentials depend on the connection:
//!
//! | connection | agent of a host | scheduler, administrator |
//! |---|---|---|
//! | unix socket | token of the host | user of the connected process, or token of the role |
//! | loopback address | token of the host | token of the role |
//! | TLS | certificate with the host's name | certificate with a name listed in rack.toml |

use std::sync::{Arc, RwLock};

use rustls_pki_types::ServerName;
use service_files::log_limit::RejectionLog;
use tonic::{Extensions, Request, Status, metadata::MetadataMap};
use units::Name;
use webpki::EndEntityCert;

use super::{
    connections::{ConnectionOrigin, Peer},
    status::permission_denied,
};
use crate::{config::Access, role::Role, tokens::Tokens};

/// Location of role tokens, for error messages.
const ROLE_TOKEN_HINT: &str = "roles/ROLE.token in the manager's store";

/// Authorization of calls, with rules that a reload can replace.
#[derive(Debug)]
pub struct Identity {
    rules: RwLock<Arc<AccessRules>>,
    rejections: Arc<RejectionLog>,
}

/// Credentials that authorize calls.
#[derive(Clone, Debug, Default)]
pub struct AccessRules {
    /// Accepted tokens of hosts and roles.
    pub tokens: Tokens,
    /// Roles of local users on the unix socket.
    pub access: Access,
    /// Certificate names of schedulers and of administrators, in this order; `None` without TLS.
    pub certificate_names: Option<(Vec<Name>, Vec<Name>)>,
}

impl Identity {
    /// Creates the authorization with initial rules. Rejected calls are logged to `rejections`.
    pub fn new(rules: AccessRules, rejections: Arc<RejectionLog>) -> Self {
        Self { rules: RwLock::new(Arc::new(rules)), rejections }
    }

    /// Replaces the rules; they apply to all later calls.
    pub fn replace(&self, rules: AccessRules) {
        *self.rules.write().expect("no thread panics under this lock") = Arc::new(rules);
    }

    /// Returns the current rules. The rules are shared and not copied, because every request reads
    /// them and they can contain many tokens.
    fn current_rules(&self) -> Arc<AccessRules> {
        Arc::clone(&self.rules.read().expect("no thread panics under this lock"))
    }

    /// Checks that a client has a role, and returns the client's name. The name is the
    /// certificate's name with TLS, and `uid-N` for a configured user of the unix socket. The name
    /// is `None` for root, the manager's user and clients with tokens.
    ///
    /// # Errors
    /// PERMISSION_DENIED (ROLE_MISSING) if the client does not have the role.
    pub fn admit<T>(&self, request: &Request<T>, role: Role) -> Result<Option<Name>, Status> {
        let rules = self.current_rules();
        let admitted = match &rules.certificate_names {
            Some((schedulers, admins)) => {
                admit_by_certificate(request.extensions(), schedulers, admins, role)
            }
            None => admit_local_client(&rules, request, role),
        };
        self.record_result(request.extensions(), "ROLE_MISSING", admitted)
    }

    /// Checks that the caller is the agent of `host`.
    ///
    /// # Errors
    /// PERMISSION_DENIED (NOT_THIS_HOST) without the host's token or, with TLS, the host's
    /// certificate.
    pub fn admit_agent(
        &self,
        metadata: &MetadataMap,
        extensions: &Extensions,
        host: &Name,
    ) -> Result<(), Status> {
        let rules = self.current_rules();
        let admitted = if rules.certificate_names.is_some() {
            let is_host = client_certificate(extensions).is_some_and(|leaf| is_named(&leaf, host));
            is_host.then_some(()).ok_or_else(|| format!("certificate: must contain the name of host {host}"))
        } else {
            let is_host = bearer_token(metadata).is_some_and(|token| rules.tokens.is_host_token(host, token));
            let problem = || format!("authorization: must be \"Bearer\" and the token of host {host}");
            is_host.then_some(()).ok_or_else(problem)
        };
        self.record_result(extensions, "NOT_THIS_HOST", admitted)
    }

    /// Logs the agent of a session that the manager rejected because another agent represents `host`.
    pub fn log_rejected_agent(&self, extensions: &Extensions, host: &Name) {
        if let Some(peer) = extensions.get::<Peer>() {
            self.rejections.log(&peer.origin, &format_args!("another agent represents host {host}"));
        }
    }

    /// Lets the connection of an authorized call stay open, or logs a rejected call.
    fn record_result<T>(
        &self,
        extensions: &Extensions,
        reason: &str,
        admitted: Result<T, String>,
    ) -> Result<T, Status> {
        let peer = extensions.get::<Peer>();
        match admitted {
            Ok(admitted) => {
                peer.into_iter().for_each(Peer::admit);
                Ok(admitted)
            }
            Err(problem) => {
                if let Some(peer) = peer {
                    self.rejections.log(&peer.origin, &problem);
                }
                Err(permission_denied(reason, problem))
            }
        }
    }
}

fn admit_by_certificate(
    extensions: &Extensions,
    schedulers: &[Name],
    admins: &[Name],
    role: Role,
) -> Result<Option<Name>, String> {
    let leaf = client_certificate(extensions);
    let find = |names: &[Name]| {
        names.iter().find(|name| leaf.as_ref().is_some_and(|leaf| is_named(leaf, name))).cloned()
    };
    let (names, field) = match role {
        Role::Scheduler => (schedulers, "tls.schedulers or tls.admins"),
        Role::Admin => (admins, "tls.admins"),
    };
    let found = find(names).or_else(|| find(admins));
    found
        .map(Some)
        .ok_or_else(|| format!("certificate: must contain a name listed in rack.toml under {field}"))
}

fn admit_local_client<T>(
    rules: &AccessRules,
    request: &Request<T>,
    role: Role,
) -> Result<Option<Name>, String> {
    let origin = request.extensions().get::<Peer>().map(|peer| &peer.origin);
    let by_user = match origin {
        Some(ConnectionOrigin::Unix { is_trusted: true, .. }) => Some(None),
        Some(ConnectionOrigin::Unix { uid, .. }) if rules.access.has_role(*uid, role) => {
            Some(Some(Name::new(&format!("uid-{uid}")).expect("a name")))
        }
        _ => None,
    };
    let token = bearer_token(request.metadata());
    let has_token = |role| token.is_some_and(|token| rules.tokens.is_role_token(role, token));
    let by_token =
        || Role::ALL.into_iter().any(|held| held.includes(role) && has_token(held)).then_some(None);
    by_user.or_else(by_token).ok_or_else(|| match origin {
        Some(ConnectionOrigin::Unix { uid, .. }) => format!(
             "user {uid}: must be root, the manager's user or a user with the role {role} in section [access] of rack.toml, or \
             send the token of the role as authorization ({ROLE_TOKEN_HINT})"
        ),
        _ => format!("authorization: must be \"Bearer\" and the token of the role {role} ({ROLE_TOKEN_HINT})"),
    })
}

fn bearer_token(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")
}

/// Returns the client certificate of the connection. The TLS handshake has verified the
/// certificate.
fn client_certificate(extensions: &Extensions) -> Option<EndEntityCert<'_>> {
    EndEntityCert::try_from(extensions.get::<Peer>()?.certificates.first()?).ok()
}

fn is_named(leaf: &EndEntityCert<'_>, name: &Name) -> bool {
    let name = ServerName::try_from(name.as_str());
    name.is_ok_and(|name| leaf.verify_is_valid_for_subject_name(&name).is_ok())
}
