//! Validates and converts weights set by schedulers and shares reported by agents. The manager
//! stores reports unchanged and only displays them.

use std::ops::RangeInclusive;

use proto::v1 as wire;
use units::Name;
use units::limits::{
    LOCAL_MEMORY_MIB_PER_HOST_MAX, SHARE_VALUE_MAX, SHARES_TEXT_BYTES_MAX, WEIGHT_MAX, WEIGHT_MIN, is_weight,
};

use super::{
    reports::{DUPLICATE_TENANT, add_tenant_name, check_tenant_count, check_tenants},
    requests::{InvalidField, parse_name},
};
use crate::records::share_rows::Weights;

/// Valid values of the field `enforcer`: how an agent enforces shares.
const ENFORCERS: [&str; 3] = ["swap", "tiered", "advise"];
/// Valid values of the field `access_source`: how an agent samples memory accesses.
const ACCESS_SOURCES: [&str; 4] = ["damon", "pebs", "ibs", "none"];
/// Valid range of a fraction.
const FRACTION_RANGE: RangeInclusive<f64> = 0.0..=1.0;
/// Valid range of a count or ratio.
const NUMBER_RANGE: RangeInclusive<f64> = 0.0..=SHARE_VALUE_MAX;

/// Validates a request to set weights, and returns the new weights by tenant. A weight of 0 removes
/// the tenant's weight.
///
/// # Errors
/// [`InvalidField`] if there are too many tenants, a tenant is malformed or repeated, or a weight
/// is out of range.
pub fn parse_weight_changes(weights: Vec<wire::Weight>) -> Result<Weights, InvalidField> {
    check_tenant_count("weights", weights.len())?;
    let mut changes = Weights::new();
    for wire::Weight { tenant, weight } in weights {
        let name = parse_name("weights.tenant", &tenant)?;
        if weight != 0.0 && !is_weight(weight) {
            let rule = format!("must be from {WEIGHT_MIN} to {WEIGHT_MAX}, or 0 for the weight in host.toml");
            return Err(add_tenant_name(&name)(InvalidField::new("weights.weight", weight, rule)));
        }
        if changes.insert(name, weight).is_some() {
            return Err(InvalidField::new("weights.tenant", format!("{tenant:?}"), DUPLICATE_TENANT));
        }
    }
    Ok(changes)
}

/// Converts the weights of a host's tenants.
pub fn weight_messages(weights: &Weights) -> Vec<wire::Weight> {
    weights
        .iter()
        .map(|(tenant, weight)| wire::Weight { tenant: tenant.to_string(), weight: *weight })
        .collect()
}

/// Validated report of a host's shares in one epoch.
#[derive(Clone, Debug, PartialEq)]
pub struct ShareReport(wire::Shares);

impl ShareReport {
    /// Returns the message for clients.
    pub fn into_message(self) -> wire::Shares {
        self.0
    }
}

/// Validates an agent's report of shares. The report's host is replaced by `host`, the host of the
/// session.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_share_report(host: &Name, shares: wire::Shares) -> Result<ShareReport, InvalidField> {
    if shares.epoch == 0 {
        return Err(InvalidField::new("shares.epoch", 0, "must be 1 or more"));
    }
    if shares.state() == wire::ShareState::Unspecified {
        return Err(InvalidField::new("shares.state", shares.state, "must be SET, UNCHANGED or BLOCKED"));
    }
    check_text("shares.reason", &shares.reason)?;
    check_share("shares.supply", shares.supply.as_ref())?;
    let fields = ["shares.tenants", "shares.tenants.tenant"];
    check_tenants(fields, &shares.tenants, |share| &share.tenant, check_tenant)?;
    shares.certificate.as_ref().map_or(Ok(()), check_certificate)?;
    Ok(ShareReport(wire::Shares { host: host.to_string(), ..shares }))
}

fn check_tenant(t: &wire::TenantShare) -> Result<(), InvalidField> {
    if !is_weight(t.weight) {
        let rule = format!("must be from {WEIGHT_MIN} to {WEIGHT_MAX}");
        return Err(InvalidField::new("shares.tenants.weight", t.weight, rule));
    }
    check_choice("shares.tenants.enforcer", &t.enforcer, &ENFORCERS)?;
    check_share("shares.tenants.fair", t.fair.as_ref())?;
    check_share("shares.tenants.share", t.share.as_ref())?;
    check_mib("shares.tenants.memory_used_mib", t.memory_used_mib)?;
    check_number("shares.tenants.bandwidth_used_mb_s", t.bandwidth_used_mb_s, NUMBER_RANGE)?;
    check_number("shares.tenants.stalled", t.stalled, FRACTION_RANGE)?;
    check_number("shares.tenants.bandwidth_demand_mb_s", t.bandwidth_demand_mb_s, NUMBER_RANGE)?;
    check_number("shares.tenants.gain", t.gain, NUMBER_RANGE)?;
    check_choice("shares.tenants.access_source", &t.access_source, &ACCESS_SOURCES)?;
    check_number("shares.tenants.error", t.error, FRACTION_RANGE)?;
    check_text("shares.tenants.problem", &t.problem)
}

fn check_certificate(c: &wire::ShareCertificate) -> Result<(), InvalidField> {
    check_text("shares.certificate.status", &c.status)?;
    check_number("shares.certificate.memory_price", c.memory_price, FRACTION_RANGE)?;
    check_number("shares.certificate.dividend", c.dividend, 1.0..=SHARE_VALUE_MAX)?;
    check_number("shares.certificate.step", c.step, FRACTION_RANGE)?;
    check_number("shares.certificate.memory_excess", c.memory_excess, FRACTION_RANGE)?;
    check_number("shares.certificate.bandwidth_excess", c.bandwidth_excess, FRACTION_RANGE)?;
    check_number("shares.certificate.budget_excess", c.budget_excess, NUMBER_RANGE)?;
    check_number("shares.certificate.sharing_incentive", c.sharing_incentive, NUMBER_RANGE)?;
    if !c.worst_off.is_empty() {
        parse_name("shares.certificate.worst_off", &c.worst_off)?;
    }
    c.envy.map_or(Ok(()), |envy| check_number("shares.certificate.envy", envy, NUMBER_RANGE))
}

/// Checks that a value is within a range. NaN is always rejected.
fn check_number(field: &'static str, value: f64, within: RangeInclusive<f64>) -> Result<(), InvalidField> {
    let rule = || format!("must be a number from {} to {}", within.start(), within.end());
    if within.contains(&value) { Ok(()) } else { Err(InvalidField::new(field, value, rule())) }
}

fn check_mib(field: &'static str, mib: u64) -> Result<(), InvalidField> {
    let rule = || format!("must be at most {LOCAL_MEMORY_MIB_PER_HOST_MAX}");
    if mib <= LOCAL_MEMORY_MIB_PER_HOST_MAX { Ok(()) } else { Err(InvalidField::new(field, mib, rule())) }
}

/// Validates a share of memory and bandwidth, if it is present.
fn check_share(field: &'static str, share: Option<&wire::Share>) -> Result<(), InvalidField> {
    let Some(share) = share else { return Ok(()) };
    check_mib(field, share.memory_mib)?;
    check_number(field, share.bandwidth_mb_s as f64, NUMBER_RANGE)
}

fn check_choice(field: &'static str, value: &str, choices: &[&str]) -> Result<(), InvalidField> {
    let shown = || format!("{:?}", value.chars().take(SHARES_TEXT_BYTES_MAX / 4).collect::<String>());
    let rule = || format!("must be one of {}", choices.join(", "));
    if choices.contains(&value) { Ok(()) } else { Err(InvalidField::new(field, shown(), rule())) }
}

fn check_text(field: &'static str, text: &str) -> Result<(), InvalidField> {
    let rule = || format!("bytes: must be at most {SHARES_TEXT_BYTES_MAX}");
    if text.len() <= SHARES_TEXT_BYTES_MAX {
        Ok(())
    } else {
        Err(InvalidField::new(field, text.len(), rule()))
    }
}

#[cfg(test)]
mod tests {
    use units::limits::TENANTS_PER_HOST_MAX;

    use super::*;

    fn weight(tenant: &str, weight: f64) -> wire::Weight {
        wire::Weight { tenant: tenant.into(), weight }
    }

    #[track_caller]
    fn check_rejected<T: std::fmt::Debug>(result: Result<T, InvalidField>, field: &str, parts: &[&str]) {
        let error = result.expect_err("an invalid message was accepted");
        assert_eq!(error.field, field, "{error}");
        for part in parts {
            assert!(error.to_string().contains(part), "{error} does not contain {part:?}");
        }
    }

    #[test]
    fn invalid_weights_are_rejected_with_field_value_and_rule() {
        let set = parse_weight_changes(vec![weight("web", 2.5), weight("db", 0.0), weight("x", WEIGHT_MAX)])
            .unwrap();
        assert_eq!(set.len(), 3);
        assert!(parse_weight_changes(Vec::new()).unwrap().is_empty());
        for weight_value in [-1.0, f64::NAN, f64::INFINITY, 10_000.5, 1e-9] {
            let parts = [weight_value.to_string(), "from 0.01 to 10000, or 0".into(), "of web".into()];
            let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
            check_rejected(parse_weight_changes(vec![weight("web", weight_value)]), "weights.weight", &parts);
        }
        check_rejected(
            parse_weight_changes(vec![weight("../x", 1.0)]),
            "weights.tenant",
            &["../x", "must be 1 to 63"],
        );
        check_rejected(parse_weight_changes(vec![weight("", 1.0)]), "weights.tenant", &["must be 1 to 63"]);
        check_rejected(
            parse_weight_changes(vec![weight("a", 1.0), weight("a", 1.0)]),
            "weights.tenant",
            &["\"a\"", "appear once"],
        );
        let many = (0..=TENANTS_PER_HOST_MAX).map(|n| weight(&format!("t{n}"), 1.0)).collect();
        check_rejected(parse_weight_changes(many), "weights", &["257", "at most 256"]);
    }

    fn valid_report() -> wire::Shares {
        let share = |memory_mib, bandwidth_mb_s| Some(wire::Share { memory_mib, bandwidth_mb_s });
        let tenant = wire::TenantShare {
            tenant: "web".into(),
            weight: 2.0,
            enforcer: "swap".into(),
            fair: share(1024, 500),
            share: share(2048, 250),
            memory_used_mib: 1000,
            bandwidth_used_mb_s: 100.5,
            stalled: 0.1,
            bandwidth_demand_mb_s: 200.0,
            gain: 1.1,
            access_source: "damon".into(),
            error: 0.05,
            problem: String::new(),
        };
        let certificate = wire::ShareCertificate {
            status: "exact".into(),
            memory_price: 0.6,
            dividend: 1.0,
            step: 1.0,
            sharing_incentive: 1.02,
            worst_off: "web".into(),
            envy: Some(0.0),
            ..Default::default()
        };
        wire::Shares {
            host: "another".into(),
            epoch: 1,
            supply: share(4096, 1000),
            state: wire::ShareState::Set.into(),
            tenants: vec![tenant],
            certificate: Some(certificate),
            ..Default::default()
        }
    }

    #[track_caller]
    fn check_report_rejected(change: impl Fn(&mut wire::Shares), field: &str, parts: &[&str]) {
        let mut shares = valid_report();
        change(&mut shares);
        check_rejected(
            parse_share_report(&Name::new("h").unwrap(), shares),
            &format!("shares.{field}"),
            parts,
        );
    }

    #[track_caller]
    fn check_tenant_rejected(change: impl Fn(&mut wire::TenantShare), field: &str, parts: &[&str]) {
        check_report_rejected(|shares| change(&mut shares.tenants[0]), &format!("tenants.{field}"), parts);
    }

    #[track_caller]
    fn check_certificate_rejected(change: impl Fn(&mut wire::ShareCertificate), field: &str, parts: &[&str]) {
        let change = |shares: &mut wire::Shares| change(shares.certificate.as_mut().unwrap());
        check_report_rejected(change, &format!("certificate.{field}"), parts);
    }

    #[test]
    fn report_is_unchanged_except_for_the_host_of_the_session() {
        let host = Name::new("h").unwrap();
        let message = parse_share_report(&host, valid_report()).unwrap().into_message();
        assert_eq!(message, wire::Shares { host: "h".into(), ..valid_report() });
        let blocked = wire::Shares {
            epoch: 1,
            state: wire::ShareState::Blocked.into(),
            reason: "no link is known".into(),
            ..Default::default()
        };
        assert!(
            parse_share_report(&host, blocked).is_ok(),
            "a report of a blocked epoch must be accepted without shares"
        );
    }

    #[test]
    fn invalid_reports_are_rejected_with_field_value_and_rule() {
        check_report_rejected(|s| s.epoch = 0, "epoch", &["0", "1 or more"]);
        check_report_rejected(|s| s.state = 0, "state", &["0", "SET"]);
        check_report_rejected(|s| s.state = 99, "state", &["99"]);
        check_report_rejected(|s| s.reason = "x".repeat(401), "reason", &["401 bytes", "at most 400"]);
        check_report_rejected(
            |s| s.supply.as_mut().unwrap().memory_mib = u64::MAX,
            "supply",
            &["at most 67108864"],
        );
        check_report_rejected(
            |s| s.supply.as_mut().unwrap().bandwidth_mb_s = u64::MAX,
            "supply",
            &["1000000000000"],
        );
        check_report_rejected(
            |s| s.tenants.push(s.tenants[0].clone()),
            "tenants.tenant",
            &["\"web\"", "appear once"],
        );
        let many = |s: &mut wire::Shares| {
            let named = |n| wire::TenantShare { tenant: format!("t{n}"), ..s.tenants[0].clone() };
            s.tenants = (0..=TENANTS_PER_HOST_MAX).map(named).collect();
        };
        check_report_rejected(many, "tenants", &["257", "at most 256"]);
        check_tenant_rejected(|t| t.tenant = "a/b".into(), "tenant", &["a/b"]);
        check_tenant_rejected(|t| t.weight = 0.0, "weight", &["0", "from 0.01"]);
        check_tenant_rejected(|t| t.weight = f64::NAN, "weight", &["NaN"]);
        check_tenant_rejected(
            |t| t.enforcer = "none".into(),
            "enforcer",
            &["\"none\"", "swap, tiered, advise"],
        );
        check_tenant_rejected(|t| t.fair.as_mut().unwrap().memory_mib = u64::MAX, "fair", &["at most"]);
        check_tenant_rejected(|t| t.share.as_mut().unwrap().memory_mib = u64::MAX, "share", &["at most"]);
        check_tenant_rejected(|t| t.memory_used_mib = u64::MAX, "memory_used_mib", &["at most"]);
        check_tenant_rejected(|t| t.bandwidth_used_mb_s = f64::INFINITY, "bandwidth_used_mb_s", &["inf"]);
        check_tenant_rejected(|t| t.stalled = 1.1, "stalled", &["1.1", "from 0 to 1"]);
        check_tenant_rejected(|t| t.bandwidth_demand_mb_s = -1.0, "bandwidth_demand_mb_s", &["-1"]);
        check_tenant_rejected(|t| t.gain = f64::NAN, "gain", &["NaN", "of web"]);
        check_tenant_rejected(
            |t| t.access_source = String::new(),
            "access_source",
            &["damon, pebs, ibs, none"],
        );
        check_tenant_rejected(|t| t.error = 2.0, "error", &["2", "from 0 to 1"]);
        check_tenant_rejected(|t| t.problem = "x".repeat(401), "problem", &["401"]);
        check_certificate_rejected(|c| c.status = "x".repeat(401), "status", &["401"]);
        check_certificate_rejected(|c| c.memory_price = 1.5, "memory_price", &["1.5"]);
        check_certificate_rejected(|c| c.dividend = 0.5, "dividend", &["0.5", "from 1 to"]);
        check_certificate_rejected(|c| c.step = -0.1, "step", &["-0.1"]);
        check_certificate_rejected(|c| c.memory_excess = 2.0, "memory_excess", &["2"]);
        check_certificate_rejected(|c| c.bandwidth_excess = 2.0, "bandwidth_excess", &["2"]);
        check_certificate_rejected(|c| c.budget_excess = f64::NAN, "budget_excess", &["NaN"]);
        check_certificate_rejected(|c| c.sharing_incentive = f64::INFINITY, "sharing_incentive", &["inf"]);
        check_certificate_rejected(|c| c.worst_off = "a b".into(), "worst_off", &["a b"]);
        check_certificate_rejected(|c| c.envy = Some(-1.0), "envy", &["-1"]);
    }
}
