//! Conversion of a result of Symbiosis to the message for the manager.

use fairness::market::Share;
use proto::v1 as wire;
use units::limits::{SHARE_VALUE_MAX, SHARES_TEXT_BYTES_MAX};

use crate::{
    host::access_profile::AccessSource,
    shares::{Report, ShareCertificate, State, TenantReport},
};

/// Converts the result of an epoch to a message.
pub fn to_wire_shares(report: Report) -> wire::Shares {
    let state = match report.state {
        State::Set => wire::ShareState::Set,
        State::Unchanged => wire::ShareState::Unchanged,
        State::Blocked => wire::ShareState::Blocked,
    };
    wire::Shares {
        host: String::new(), // the manager uses the host of the session
        epoch: report.epoch,
        at_unix_ms: report.at.0,
        supply: Some(to_wire_share(report.supply.all())),
        state: state.into(),
        reason: truncate_text(report.reason),
        tenants: report.tenants.into_iter().map(to_wire_tenant_share).collect(),
        certificate: report.certificate.map(to_wire_certificate),
    }
}

/// Shortens a text to the length that the manager accepts, at a character boundary.
fn truncate_text(mut text: String) -> String {
    let ends = text.char_indices().map(|(at, letter)| at + letter.len_utf8());
    let end = ends.take_while(|end| *end <= SHARES_TEXT_BYTES_MAX).last();
    text.truncate(end.unwrap_or(0));
    text
}

/// Limits a number, which may be infinite, to the range that the manager accepts.
const fn clamp_number(number: f64) -> f64 {
    number.clamp(0.0, SHARE_VALUE_MAX)
}

fn to_wire_share(share: Share) -> wire::Share {
    wire::Share { memory_mib: share.memory_mib(), bandwidth_mb_s: share.bandwidth_mb_s() }
}

fn to_wire_tenant_share(report: TenantReport) -> wire::TenantShare {
    let measured = report.measured;
    let mib = |bytes: units::Bytes| bytes.get() / units::Bytes::mib(1).get();
    let access_source = measured.and_then(|measured| measured.source).map_or("none", AccessSource::name);
    wire::TenantShare {
        tenant: report.name.to_string(),
        weight: report.weight,
        enforcer: report.enforce.name().to_owned(),
        fair: Some(to_wire_share(report.fair)),
        share: Some(to_wire_share(report.share)),
        memory_used_mib: measured.map_or(0, |measured| mib(measured.memory)),
        bandwidth_used_mb_s: clamp_number(measured.map_or(0.0, |measured| measured.used_mb_s)),
        stalled: measured.map_or(0.0, |measured| measured.stalled_fraction),
        bandwidth_demand_mb_s: clamp_number(report.demand_mb_s),
        gain: clamp_number(report.gain),
        access_source: access_source.to_owned(),
        error: report.error.clamp(0.0, 1.0),
        problem: truncate_text(report.problem),
    }
}

fn to_wire_certificate(shares: ShareCertificate) -> wire::ShareCertificate {
    let ShareCertificate { certificate, step_fraction, worst_off } = shares;
    wire::ShareCertificate {
        status: certificate.status.name().to_owned(),
        memory_price: certificate.memory_price,
        dividend: clamp_number(certificate.dividend),
        rounds: certificate.rounds,
        refinements: certificate.refinements,
        step: step_fraction,
        memory_excess: certificate.left_over.memory,
        bandwidth_excess: certificate.left_over.bandwidth,
        budget_excess: clamp_number(certificate.overspent),
        sharing_incentive: clamp_number(certificate.sharing_incentive),
        worst_off: worst_off.to_string(),
        envy: certificate.envy.map(clamp_number),
    }
}
