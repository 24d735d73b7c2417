//! Conversion of an epoch's result.

use fairness::market::Share;
use proto::v1 as wire;
use units::limits::{SHARES_NUMBER_MAX, SHARES_TEXT_BYTES_MAX};

use crate::{
    host::watched::Eyes,
    symbiosis::{Certified, Report, State, TenantReport},
};

/// Converts the result of an epoch.
pub fn shares(report: Report) -> wire::Shares {
    let state = match report.state {
        State::Set => wire::ShareState::Set,
        State::Held => wire::ShareState::Unchanged,
        State::Kept => wire::ShareState::Blocked,
    };
    wire::Shares {
        host: String::new(), // the session's host
        epoch: report.epoch,
        at_unix_ms: report.at.0,
        supply: Some(share(report.supply.all())),
        state: state.into(),
        reason: shortened(report.why),
        tenants: report.tenants.into_iter().map(tenant).collect(),
        certificate: report.certified.map(certificate),
    }
}

/// Shortens a text to the manager's limit.
fn shortened(mut text: String) -> String {
    let ends = text.char_indices().map(|(at, letter)| at + letter.len_utf8());
    let end = ends.take_while(|end| *end <= SHARES_TEXT_BYTES_MAX).last();
    text.truncate(end.unwrap_or(0));
    text
}

/// Limits a number to the manager's maximum, also if it is infinite.
const fn told(number: f64) -> f64 {
    number.clamp(0.0, SHARES_NUMBER_MAX)
}

fn share(share: Share) -> wire::Share {
    wire::Share { memory_mib: share.memory_mib, bandwidth_mb_s: share.bandwidth_mb_s }
}

fn tenant(one: TenantReport) -> wire::TenantShare {
    let measured = one.measured;
    let mib = |bytes: units::Bytes| bytes.get() / units::Bytes::mib(1).get();
    let learnt_from = measured.and_then(|measured| measured.seen_by).map_or("none", Eyes::name);
    wire::TenantShare {
        tenant: one.name.to_string(),
        weight: one.weight,
        enforcer: one.enforce.name().to_owned(),
        fair: Some(share(one.fair)),
        share: Some(share(one.share)),
        memory_used_mib: measured.map_or(0, |measured| mib(measured.memory)),
        bandwidth_used_mb_s: told(measured.map_or(0.0, |measured| measured.used)),
        stalled: measured.map_or(0.0, |measured| measured.waited),
        bandwidth_demand_mb_s: told(one.wanted),
        gain: told(one.gain),
        access_source: learnt_from.to_owned(),
        error: one.error.clamp(0.0, 1.0),
        problem: shortened(one.problem),
    }
}

fn certificate(certified: Certified) -> wire::ShareCertificate {
    let Certified { certificate, way, worst_off } = certified;
    wire::ShareCertificate {
        status: certificate.status.name().to_owned(),
        memory_price: certificate.memory_price,
        dividend: told(certificate.dividend),
        rounds: certificate.rounds,
        refinements: certificate.refinements,
        step: way,
        memory_excess: certificate.left_over.memory,
        bandwidth_excess: certificate.left_over.bandwidth,
        budget_excess: told(certificate.overspent),
        sharing_incentive: told(certificate.sharing_incentive),
        worst_off: worst_off.to_string(),
        envy: certificate.envy.map(told),
    }
}
