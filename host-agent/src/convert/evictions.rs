//! Conversion of a cycle of early eviction to the message for the manager.

use proto::v1 as wire;
use tiering::evict::{CLASSES, ThresholdChange};
use units::{
    limits::{EVICTION_CLASS_MAX, TIERING_TEXT_BYTES_MAX},
    truncated,
};

use crate::eviction_report::{Report, TenantReport};

// The manager rejects other classes.
const _: () = assert!(CLASSES as u32 == EVICTION_CLASS_MAX);

/// Converts the result of a cycle to a message.
pub fn to_wire_evictions(report: Report) -> wire::Evictions {
    wire::Evictions {
        host: String::new(), // the manager uses the host of the session
        at_unix_ms: report.at.0,
        reason: truncated(report.reason, TIERING_TEXT_BYTES_MAX),
        tenants: report.tenants.into_iter().map(to_wire_tenant).collect(),
    }
}

fn to_wire_tenant(report: TenantReport) -> wire::EvictedTenant {
    let TenantReport { name, decided, counts, problem } = report;
    wire::EvictedTenant {
        tenant: name.to_string(),
        usage_bytes: decided.usage.get(),
        limit_bytes: decided.limit.get(),
        threshold_bytes: decided.threshold.get(),
        lower_threshold_bytes: decided.lower_threshold.get(),
        upper_threshold_bytes: decided.upper_threshold.get(),
        growth_bytes_per_s: decided.growth_bytes_per_s.get(),
        eviction_bytes_per_s: decided.eviction_bytes_per_s.get(),
        threshold_change: to_wire_change(decided.change).into(),
        class: decided.class.number().into(),
        evicted_bytes: counts.evicted.get(),
        blocked_ms: counts.blocked.as_ms(),
        fetching_ms: counts.fetching.as_ms(),
        problem: truncated(problem, TIERING_TEXT_BYTES_MAX),
    }
}

const fn to_wire_change(change: ThresholdChange) -> wire::ThresholdChange {
    match change {
        ThresholdChange::Unchanged => wire::ThresholdChange::Unchanged,
        ThresholdChange::Lowered => wire::ThresholdChange::Lowered,
        ThresholdChange::PulledBack => wire::ThresholdChange::PulledBack,
        ThresholdChange::Reset => wire::ThresholdChange::Reset,
        ThresholdChange::Costly => wire::ThresholdChange::Costly,
        ThresholdChange::Stalled => wire::ThresholdChange::Stalled,
    }
}

#[cfg(test)]
mod tests {
    use tiering::{
        evict::{FlowClass, TenantReport as Decision},
        fair::TenantId,
    };
    use units::{Bytes, Name, Ns, UnixMs};

    use super::*;
    use crate::eviction_report::Counts;

    #[test]
    fn report_is_converted_with_bounded_texts() {
        let decided = Decision {
            id: TenantId(1),
            usage: Bytes::mib(200),
            limit: Bytes::mib(210),
            threshold: Bytes::mib(160),
            lower_threshold: Bytes::mib(105),
            upper_threshold: Bytes::mib(202),
            excess: Bytes::mib(40),
            growth_bytes_per_s: Bytes::mib(100),
            eviction_bytes_per_s: Bytes::mib(84),
            change: ThresholdChange::PulledBack,
            class: FlowClass::URGENT,
        };
        let counts = Counts { evicted: Bytes::mib(42), blocked: Ns::ms(500), fetching: Ns(1_999_999) };
        let name = Name::new("db").unwrap();
        let tenant = TenantReport { name, decided, counts, problem: "é".repeat(600) };
        let message =
            to_wire_evictions(Report { at: UnixMs(7), reason: "x".repeat(2000), tenants: vec![tenant] });
        let expected = wire::EvictedTenant {
            tenant: "db".into(),
            usage_bytes: 200 << 20,
            limit_bytes: 210 << 20,
            threshold_bytes: 160 << 20,
            lower_threshold_bytes: 105 << 20,
            upper_threshold_bytes: 202 << 20,
            growth_bytes_per_s: 100 << 20,
            eviction_bytes_per_s: 84 << 20,
            threshold_change: 3,
            class: 1,
            evicted_bytes: 42 << 20,
            blocked_ms: 500,
            fetching_ms: 1,
            problem: "é".repeat(512),
        };
        let reason = "x".repeat(1024);
        let tenants = vec![expected];
        assert_eq!(message, wire::Evictions { host: String::new(), at_unix_ms: 7, reason, tenants });
    }
}
