//! Validates the memory tiers of tenants as reported by agents. The manager stores reports unchanged and
//! only displays them.

use proto::v1 as wire;
use units::{Name, limits::TIERING_PROBLEMS_MAX};

use super::{
    reports::{check_tenants, check_text},
    requests::InvalidField,
};

/// Validated report of a step of fair tiering on a host.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantsReport(wire::Tenants);

impl TenantsReport {
    /// Returns the message for clients.
    pub fn into_message(self) -> wire::Tenants {
        self.0
    }
}

/// Validates an agent's report. The report's host is replaced by `host`, the host of the session.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_tenants_report(host: &Name, report: wire::Tenants) -> Result<TenantsReport, InvalidField> {
    check_text("tenants.reason", &report.reason)?;
    if report.problems.len() > TIERING_PROBLEMS_MAX {
        let rule = format!("must be at most {TIERING_PROBLEMS_MAX}");
        return Err(InvalidField::new("tenants.problems", report.problems.len(), rule));
    }
    report.problems.iter().try_for_each(|problem| check_text("tenants.problems", problem))?;
    let fields = ["tenants.tenants", "tenants.tenants.tenant"];
    check_tenants(fields, &report.tenants, |tenant| &tenant.tenant, check_tenant)?;
    Ok(TenantsReport(wire::Tenants { host: host.to_string(), ..report }))
}

fn check_tenant(tenant: &wire::TieredTenant) -> Result<(), InvalidField> {
    if !(0.0..=1.0).contains(&tenant.promotion_factor) {
        let rule = "must be a number from 0 to 1";
        return Err(InvalidField::new("tenants.tenants.promotion_factor", tenant.promotion_factor, rule));
    }
    check_text("tenants.tenants.demotion_reason", &tenant.demotion_reason)?;
    check_text("tenants.tenants.promotion_candidates", &tenant.promotion_candidates)?;
    check_text("tenants.tenants.throttle_reason", &tenant.throttle_reason)?;
    check_text("tenants.tenants.thrash_state", &tenant.thrash_state)?;
    check_text("tenants.tenants.problem", &tenant.problem)
}

#[cfg(test)]
mod tests {
    use units::limits::{TENANTS_PER_HOST_MAX, TIERING_TEXT_BYTES_MAX};

    use super::*;

    fn report(tenants: Vec<wire::TieredTenant>) -> wire::Tenants {
        wire::Tenants { host: "other".to_owned(), tenants, ..wire::Tenants::default() }
    }

    fn tenant(name: &str) -> wire::TieredTenant {
        wire::TieredTenant { tenant: name.to_owned(), ..wire::TieredTenant::default() }
    }

    #[test]
    fn host_of_the_session_replaces_the_reported_host() {
        let host = Name::new("h0").unwrap();
        let parsed = parse_tenants_report(&host, report(vec![tenant("db")])).unwrap().into_message();
        assert_eq!((&*parsed.host, parsed.tenants.len()), ("h0", 1));
    }

    #[test]
    fn invalid_report_is_an_error_with_field_value_and_rule() {
        let host = Name::new("h0").unwrap();
        let long = "x".repeat(TIERING_TEXT_BYTES_MAX + 1);
        let many = (0..=TENANTS_PER_HOST_MAX).map(|at| tenant(&format!("t{at}"))).collect();
        let factor = wire::TieredTenant { promotion_factor: f64::NAN, ..tenant("db") };
        let problem = wire::TieredTenant { problem: long, ..tenant("db") };
        for (tenants, message) in [
            (vec![tenant("../db")], "tenants.tenants.tenant"),
            (vec![tenant("db"), tenant("db")], "\"db\" is a duplicate"),
            (many, "tenants.tenants: 257 must be at most 256"),
            (vec![factor], "tenants.tenants.promotion_factor: NaN must be a number from 0 to 1"),
            (vec![problem], "tenants.tenants.problem: 1025 bytes must have at most 1024 bytes"),
        ] {
            let error = parse_tenants_report(&host, report(tenants)).unwrap_err().to_string();
            assert!(error.contains(message), "{message}: {error}");
        }
        let problems = vec![String::new(); TIERING_PROBLEMS_MAX + 1];
        let report = wire::Tenants { problems, ..report(Vec::new()) };
        let error = parse_tenants_report(&host, report).unwrap_err().to_string();
        assert!(error.contains("tenants.problems: 9 must be at most 8"), "{error}");
    }
}
