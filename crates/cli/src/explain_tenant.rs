//! `tarn explain tenant`: the last decisions about a tenant by each function of the host's agent that
//! manages it: fair tiering, early eviction and Symbiosis.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;
use tonic::{Code, Status};
use units::{Name, QuotedText};

use crate::{
    Connection, Failure, Format,
    evictions::{self, Evictions},
    print,
    shares::{self, Shares},
    tenants::{self, Tenants},
};

/// Reasons of the manager's errors if a host has not reported anything about a function.
const NOT_REPORTED_REASONS: [&str; 3] =
    ["TENANTS_NOT_REPORTED", "EVICTIONS_NOT_REPORTED", "SHARES_NOT_REPORTED"];
/// Hint if a host has reported no tenants at all.
const NOTHING_REPORTED_HINT: &str = "the host's agent reports tenants if [tiering], [early_eviction] or [symbiosis] is configured; check its state with `tarn get hosts`";

/// Tenant of a host.
#[derive(Clone, Debug, Args)]
pub struct TenantArg {
    /// Name of the host
    pub host: Name,
    /// Name of the tenant, which is the name of its cgroup
    pub tenant: Name,
}

/// Last reports of a host about one tenant. A report is absent if it does not contain the tenant.
#[derive(Debug, Serialize)]
struct Explanation {
    tiering: Option<Tenants>,
    early_eviction: Option<Evictions>,
    shares: Option<Shares>,
}

/// Prints the last decisions about a tenant, with their reasons.
pub(crate) async fn run(args: TenantArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let TenantArg { host, tenant } = args;
    let tiering = if_reported(tenants::load(host.clone(), manager).await)?;
    let early_eviction = if_reported(evictions::load(host.clone(), manager).await)?;
    let shares = if_reported(shares::load(host.clone(), manager).await)?;
    let mut explanation = Explanation { tiering, early_eviction, shares };
    let notes = explanation.reasons_without_decision();
    let is_reported = explanation.has_report();
    explanation.retain(tenant.as_str());
    if !explanation.has_report() {
        return Err(not_found(&host, &tenant, &notes, is_reported));
    }
    print::value(format, &explanation, |_| explanation.to_text())?;
    notes.iter().for_each(|note| print::note(format, note));
    Ok(())
}

/// Returns `None` for a function that the host has not reported, or that the manager does not know.
fn if_reported<T>(loaded: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match loaded {
        Ok(report) => Ok(Some(report)),
        Err(Failure::Rejected(status)) if status.code() == Code::Unimplemented => Ok(None),
        Err(failure) => {
            let reason = failure.reason();
            let is_missing = reason.is_some_and(|reason| NOT_REPORTED_REASONS.contains(&&*reason));
            if is_missing { Ok(None) } else { Err(failure) }
        }
    }
}

/// Returns the error for a tenant that no report contains.
fn not_found(host: &Name, tenant: &Name, notes: &[String], is_reported: bool) -> Failure {
    let mut message = format!("host {host} has reported no tenant {}", QuotedText(tenant.as_str()));
    for (at, note) in notes.iter().enumerate() {
        let _ = write!(message, "{}{note}", if at == 0 { ": " } else { "; " });
    }
    let status = Box::new(Status::not_found(message));
    if is_reported {
        return Failure::Rejected(status);
    }
    Failure::RejectedWithHint { status, hint: NOTHING_REPORTED_HINT.to_owned() }
}

impl Explanation {
    const fn has_report(&self) -> bool {
        self.tiering.is_some() || self.early_eviction.is_some() || self.shares.is_some()
    }

    /// Returns the functions that did not decide about any tenant, each with the reason.
    fn reasons_without_decision(&self) -> Vec<String> {
        let tiering = self.tiering.as_ref().and_then(|tiering| tiering.reason.as_ref());
        let eviction = self.early_eviction.as_ref().and_then(|eviction| eviction.reason.as_ref());
        let tiering = tiering.map(|reason| format!("no pages are moved: {reason}"));
        tiering
            .into_iter()
            .chain(eviction.map(|reason| format!("no memory is evicted early: {reason}")))
            .collect()
    }

    /// Removes other tenants, and reports without this tenant.
    fn retain(&mut self, tenant: &str) {
        if let Some(report) = &mut self.tiering {
            report.tenants.retain(|t| t.tenant == tenant);
        }
        if let Some(report) = &mut self.early_eviction {
            report.tenants.retain(|t| t.tenant == tenant);
        }
        if let Some(report) = &mut self.shares {
            report.tenants.retain(|t| t.tenant == tenant);
        }
        self.tiering.take_if(|report| report.tenants.is_empty());
        self.early_eviction.take_if(|report| report.tenants.is_empty());
        self.shares.take_if(|report| report.tenants.is_empty());
    }

    /// Formats a section per report.
    fn to_text(&self) -> String {
        let tiering = self.tiering.iter();
        let tiering = tiering.flat_map(|report| report.tenants.iter().map(|t| report.to_text(t)));
        let eviction = self.early_eviction.iter();
        let eviction = eviction.flat_map(|report| report.tenants.iter().map(|t| report.to_text(t)));
        let shares = self.shares.iter();
        let shares = shares.flat_map(|report| report.tenants.iter().map(|t| report.tenant_to_text(t)));
        tiering.chain(eviction).chain(shares).collect()
    }
}
