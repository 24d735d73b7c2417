//! Validates the state of early eviction as reported by agents. The manager stores reports unchanged and
//! only displays them.

use proto::v1 as wire;
use units::{Name, limits::EVICTION_CLASS_MAX};

use super::{
    reports::{check_tenants, check_text},
    requests::InvalidField,
};

/// Validated report of a cycle of early eviction on a host.
#[derive(Clone, Debug, PartialEq)]
pub struct EvictionsReport(wire::Evictions);

impl EvictionsReport {
    /// Returns the message for clients.
    pub fn into_message(self) -> wire::Evictions {
        self.0
    }
}

/// Validates an agent's report. The report's host is replaced by `host`, the host of the session.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_evictions_report(host: &Name, report: wire::Evictions) -> Result<EvictionsReport, InvalidField> {
    check_text("evictions.reason", &report.reason)?;
    let fields = ["evictions.tenants", "evictions.tenants.tenant"];
    check_tenants(fields, &report.tenants, |tenant| &tenant.tenant, check_tenant)?;
    Ok(EvictionsReport(wire::Evictions { host: host.to_string(), ..report }))
}

fn check_tenant(tenant: &wire::EvictedTenant) -> Result<(), InvalidField> {
    if tenant.threshold_change() == wire::ThresholdChange::Unspecified {
        let rule = "must be UNCHANGED, LOWERED, PULLED_BACK, RESET, COSTLY or STALLED";
        return Err(InvalidField::new("evictions.tenants.threshold_change", tenant.threshold_change, rule));
    }
    if !(1..=EVICTION_CLASS_MAX).contains(&tenant.class) {
        let rule = format!("must be from 1 to {EVICTION_CLASS_MAX}");
        return Err(InvalidField::new("evictions.tenants.class", tenant.class, rule));
    }
    check_text("evictions.tenants.problem", &tenant.problem)
}

#[cfg(test)]
mod tests {
    use units::limits::{TENANTS_PER_HOST_MAX, TIERING_TEXT_BYTES_MAX};

    use super::*;

    fn report(tenants: Vec<wire::EvictedTenant>) -> wire::Evictions {
        wire::Evictions { host: "other".to_owned(), tenants, ..wire::Evictions::default() }
    }

    /// Returns a tenant with the largest numbers.
    fn tenant(name: &str) -> wire::EvictedTenant {
        wire::EvictedTenant {
            tenant: name.to_owned(),
            usage_bytes: u64::MAX,
            growth_bytes_per_s: u64::MAX,
            threshold_change: wire::ThresholdChange::Stalled.into(),
            class: 7,
            blocked_ms: u64::MAX,
            ..wire::EvictedTenant::default()
        }
    }

    #[test]
    fn host_of_the_session_replaces_the_reported_host() {
        let host = Name::new("h0").unwrap();
        let parsed = parse_evictions_report(&host, report(vec![tenant("db")])).unwrap().into_message();
        assert_eq!(
            parsed,
            wire::Evictions { host: "h0".to_owned(), tenants: vec![tenant("db")], ..Default::default() }
        );
    }

    #[test]
    fn invalid_report_is_an_error_with_field_value_and_rule() {
        let host = Name::new("h0").unwrap();
        let long = || "x".repeat(TIERING_TEXT_BYTES_MAX + 1);
        let many = (0..=TENANTS_PER_HOST_MAX).map(|at| tenant(&format!("t{at}"))).collect();
        let unknown = |threshold_change| wire::EvictedTenant { threshold_change, ..tenant("db") };
        let class = |class| wire::EvictedTenant { class, ..tenant("db") };
        let problem = wire::EvictedTenant { problem: long(), ..tenant("db") };
        for (tenants, message) in [
            (vec![tenant("../db")], "evictions.tenants.tenant: "),
            (vec![tenant("")], "evictions.tenants.tenant: "),
            (vec![tenant("db"), tenant("db")], "evictions.tenants.tenant: \"db\" is a duplicate"),
            (many, "evictions.tenants: 257 must be at most 256"),
            (vec![unknown(0)], "evictions.tenants.threshold_change: 0 must be UNCHANGED, LOWERED,"),
            (vec![unknown(7)], "evictions.tenants.threshold_change: 7 must be UNCHANGED, LOWERED,"),
            (vec![unknown(-1)], "evictions.tenants.threshold_change: -1 must be UNCHANGED, LOWERED,"),
            (vec![class(0)], "evictions.tenants.class: 0 must be from 1 to 7 (of db)"),
            (vec![class(8)], "evictions.tenants.class: 8 must be from 1 to 7 (of db)"),
            (vec![problem], "evictions.tenants.problem: 1025 bytes must have at most 1024 bytes (of db)"),
        ] {
            let error = parse_evictions_report(&host, report(tenants)).unwrap_err().to_string();
            assert!(error.starts_with(message), "{message}: {error}");
        }
        let report = wire::Evictions { reason: long(), ..report(Vec::new()) };
        let error = parse_evictions_report(&host, report).unwrap_err().to_string();
        assert_eq!(error, "evictions.reason: 1025 bytes must have at most 1024 bytes");
    }
}
