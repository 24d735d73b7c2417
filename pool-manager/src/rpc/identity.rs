//! Who may call what. On a loopback address or a unix socket an agent shows its host's token, and schedulers and
//! operators are whoever can reach the socket. On any other address everybody shows a certificate: an agent's carries
//! its host's name, and the names that may schedule and administer are listed in rack.toml.

use std::sync::{Arc, RwLock};

use rustls_pki_types::ServerName;
use tonic::{
    Extensions, Request, Status,
    metadata::MetadataMap,
    transport::server::{TcpConnectInfo, TlsConnectInfo},
};
use units::Name;
use webpki::EndEntityCert;

use super::refused::forbidden;
use crate::tokens::Tokens;

/// What a caller wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Uses the service Scheduler.
    Scheduler,
    /// Uses the service Admin.
    Admin,
}

/// Who may call what.
#[derive(Debug)]
pub struct Identity {
    rules: RwLock<Arc<Rules>>,
}

/// What identities are checked against; replaced when rack.toml is read again.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// What each host's token hashes to.
    pub tokens: Tokens,
    /// Certificate names with the role Scheduler, and with the role Admin; `None` where no certificates are used.
    pub certified: Option<(Vec<Name>, Vec<Name>)>,
}

impl Identity {
    /// With these rules.
    pub fn new(rules: Rules) -> Self {
        Self { rules: RwLock::new(Arc::new(rules)) }
    }

    /// Uses other rules from now on.
    pub fn replace(&self, rules: Rules) {
        *self.rules.write().expect("nobody panics while writing") = Arc::new(rules);
    }

    /// Shares the rules, which are checked with each request and hold a token for each host.
    fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.read().expect("nobody panics while reading"))
    }

    /// Lets a scheduler or an operator in, and says under which certified name.
    ///
    /// # Errors
    /// PERMISSION_DENIED if certificates are required and none has this role.
    pub fn admit<T>(&self, request: &Request<T>, role: Role) -> Result<Option<Name>, Status> {
        let rules = self.rules();
        let Some((schedulers, admins)) = &rules.certified else { return Ok(None) };
        let (names, field) = match role {
            Role::Scheduler => (schedulers, "schedulers"),
            Role::Admin => (admins, "admins"),
        };
        let found = names.iter().find(|name| is_certified(request.extensions(), name));
        found.cloned().map(Some).ok_or_else(|| {
            forbidden(
                "ROLE_MISSING",
                format!("certificate: must carry a name listed in rack.toml as tls.{field}"),
            )
        })
    }

    /// Whether the caller is the agent of this host.
    ///
    /// # Errors
    /// PERMISSION_DENIED without the host's token, or its certificate.
    pub fn admit_agent(
        &self,
        metadata: &MetadataMap,
        extensions: &Extensions,
        host: &Name,
    ) -> Result<(), Status> {
        let rules = self.rules();
        if rules.certified.is_some() {
            let problem = format!("certificate: must carry the name of host {host}");
            return if is_certified(extensions, host) {
                Ok(())
            } else {
                Err(forbidden("NOT_THIS_HOST", problem))
            };
        }
        let header = metadata.get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let token = header.strip_prefix("Bearer ").unwrap_or_default();
        if rules.tokens.admits(host, token) {
            return Ok(());
        }
        let problem = format!("authorization: must be \"Bearer\" and the token of host {host}");
        Err(forbidden("NOT_THIS_HOST", problem))
    }
}

/// Whether the connection's certificate is valid for a name. That it is signed by the right authority was checked when
/// the connection was made.
fn is_certified(extensions: &Extensions, name: &Name) -> bool {
    let info = extensions.get::<TlsConnectInfo<TcpConnectInfo>>();
    let Some(certificates) = info.and_then(TlsConnectInfo::peer_certs) else { return false };
    let Some(leaf) = certificates.first() else { return false };
    let (Ok(leaf), Ok(name)) = (EndEntityCert::try_from(leaf), ServerName::try_from(name.as_str())) else {
        return false;
    };
    leaf.verify_is_valid_for_subject_name(&name).is_ok()
}
