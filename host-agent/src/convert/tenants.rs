//! Conversion of a step of fair tiering to the message for the manager.

use proto::v1 as wire;
use tiering::fair::{FAST, TierReport};
use units::{
    Bytes,
    limits::{TIERING_PROBLEMS_MAX, TIERING_TEXT_BYTES_MAX},
    truncated,
};

use crate::tiering_report::{Report, TenantReport};

/// Converts the result of a step to a message.
pub fn to_wire_tenants(report: Report) -> wire::Tenants {
    let [local, slow] = if report.reason.is_empty() {
        report.tiers.map(|tier| Some(to_wire_tier(&tier)))
    } else {
        [None, None]
    };
    wire::Tenants {
        host: String::new(), // the manager uses the host of the session
        at_unix_ms: report.at.0,
        reason: truncated(report.reason, TIERING_TEXT_BYTES_MAX),
        problems: report
            .problems
            .into_iter()
            .take(TIERING_PROBLEMS_MAX)
            .map(|text| truncated(text, TIERING_TEXT_BYTES_MAX))
            .collect(),
        local,
        slow,
        tenants: report.tenants.into_iter().map(to_wire_tenant).collect(),
    }
}

fn to_wire_tier(tier: &TierReport) -> wire::TierMemory {
    wire::TierMemory {
        capacity_bytes: tier.capacity.get(),
        free_bytes: tier.free.get(),
        usable_bytes: tier.usable.get(),
        protection_bytes: tier.protection.get(),
        scaled_protection_bytes: tier.scaled_protection.get(),
        shortfall_bytes: tier.shortfall.get(),
        full: tier.is_full,
    }
}

fn to_wire_tenant(report: TenantReport) -> wire::TieredTenant {
    let TenantReport { decided, moves, .. } = report;
    let [fast, slow] = [FAST, FAST + 1].map(|tier| decided.tiers[tier]);
    wire::TieredTenant {
        tenant: report.name.to_string(),
        local_bytes: fast.usage.get(),
        slow_bytes: slow.usage.get(),
        protection_bytes: fast.protection.get(),
        scaled_protection_bytes: fast.scaled_protection.get(),
        bound_bytes: fast.bound.map(Bytes::get),
        demotion_bytes: fast.demotion.map_or(0, |demotion| demotion.bytes.get()),
        demotion_reason: fast.demotion.map(|demotion| demotion.reason.to_string()).unwrap_or_default(),
        promotion_bytes_per_s: decided.budget.bytes_per_s.map(Bytes::get),
        promotion_candidates: decided.budget.candidates.to_string(),
        throttle_reason: decided.throttle.map(|reason| reason.to_string()).unwrap_or_default(),
        promotion_factor: f64::from(decided.factor.ppm()) / 1e6,
        thrash_level: decided.thrash_level.into(),
        thrash_state: decided.thrash.to_string(),
        demoted_bytes: moves.demoted.get(),
        promoted_bytes: moves.promoted.get(),
        attempted_bytes: moves.attempted.get(),
        refaulted_bytes: report.refaulted.get(),
        sampled_promotions: report.thrash.promotions,
        thrashed_pages: report.thrash.thrashed,
        problem: truncated(report.problem, TIERING_TEXT_BYTES_MAX),
    }
}
