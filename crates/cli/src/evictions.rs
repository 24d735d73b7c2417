//! `tarn get evictions`: the thresholds above which memory of a host's tenants is evicted early. The host's
//! agent decides about evictions.

use proto::v1;
use serde::Serialize;
use units::Name;

use crate::{
    Connection, Failure, Format, print,
    shares::HostArg,
    table::{Column, Row, col, format_timestamp, mib, text_or_dash, wide},
    view::non_empty,
};

/// Each state of a threshold: its name in JSON, and its explanation.
const THRESHOLD_STATES: [(v1::ThresholdChange, &str, &str); 6] = [
    (
        v1::ThresholdChange::Unchanged,
        "unchanged",
        "the largest one: the tenant does not grow faster than its memory is evicted",
    ),
    (v1::ThresholdChange::Lowered, "lowered", "lowered: the tenant grows faster than its memory is evicted"),
    (
        v1::ThresholdChange::PulledBack,
        "pulled_back",
        "lowered by less: the tenant grows faster than its memory is evicted, but its cache miss rate increased",
    ),
    (
        v1::ThresholdChange::Reset,
        "reset",
        "raised towards the largest one: the tenant does not grow faster than its memory is evicted",
    ),
    (
        v1::ThresholdChange::Costly,
        "costly",
        "the largest one: early eviction was costly, because the tenant needed evicted memory again",
    ),
    (
        v1::ThresholdChange::Stalled,
        "stalled",
        "the largest one: the device is stalled, no eviction was completed",
    ),
];

/// Prints the tenants of a host, one per row.
pub(crate) async fn list(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let evictions = load(args.host, manager).await?;
    print::list(format, &evictions.tenants)?;
    if let Some(reason) = &evictions.reason {
        print::note(format, &format!("no memory is evicted early: {reason}"));
    }
    let (host, at) = (&evictions.host, format_timestamp(evictions.at_unix_ms));
    print::note(format, &format!("reported by host {host} at {at}"));
    Ok(())
}

/// Loads the state of early eviction of a host.
///
/// # Errors
/// The host has not reported any, or the manager is unreachable.
pub(crate) async fn load(host: Name, manager: &Connection) -> Result<Evictions, Failure> {
    let request = v1::GetEvictionsRequest { host: host.into() };
    Ok(manager.call(manager.admin().get_evictions(request)).await?.into())
}

/// State of one tenant at the end of a cycle.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tenant {
    pub(crate) tenant: String,
    usage_bytes: u64,
    limit_bytes: u64,
    threshold_bytes: u64,
    lower_threshold_bytes: u64,
    upper_threshold_bytes: u64,
    growth_bytes_per_s: u64,
    eviction_bytes_per_s: u64,
    threshold_change: String,
    class: u32,
    evicted_bytes: u64,
    blocked_ms: u64,
    fetching_ms: u64,
    problem: Option<String>,
}

/// Result of a host's last reported cycle of early eviction.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Evictions {
    host: String,
    at_unix_ms: u64,
    pub(crate) reason: Option<String>,
    pub(crate) tenants: Vec<Tenant>,
}

impl From<v1::EvictedTenant> for Tenant {
    fn from(t: v1::EvictedTenant) -> Self {
        let number = t.threshold_change;
        let state = THRESHOLD_STATES.iter().find(|(change, ..)| i32::from(*change) == number);
        Self {
            tenant: t.tenant,
            usage_bytes: t.usage_bytes,
            limit_bytes: t.limit_bytes,
            threshold_bytes: t.threshold_bytes,
            lower_threshold_bytes: t.lower_threshold_bytes,
            upper_threshold_bytes: t.upper_threshold_bytes,
            growth_bytes_per_s: t.growth_bytes_per_s,
            eviction_bytes_per_s: t.eviction_bytes_per_s,
            threshold_change: state
                .map_or_else(|| format!("number-{number}"), |(_, name, _)| (*name).to_owned()),
            class: t.class,
            evicted_bytes: t.evicted_bytes,
            blocked_ms: t.blocked_ms,
            fetching_ms: t.fetching_ms,
            problem: non_empty(t.problem),
        }
    }
}

impl From<v1::Evictions> for Evictions {
    fn from(e: v1::Evictions) -> Self {
        Self {
            host: e.host,
            at_unix_ms: e.at_unix_ms,
            reason: non_empty(e.reason),
            tenants: e.tenants.into_iter().map(Tenant::from).collect(),
        }
    }
}

fn mib_per_s(bytes: u64) -> String {
    format!("{}/s", mib(bytes))
}

fn seconds(ms: u64) -> String {
    format!("{}.{} s", ms / 1000, ms % 1000 / 100)
}

impl Row for Tenant {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TENANT", |t| t.tenant.clone()),
        col("USAGE", |t| mib(t.usage_bytes)),
        col("LIMIT", |t| mib(t.limit_bytes)),
        col("THRESHOLD", |t| mib(t.threshold_bytes)),
        col("STATE", |t| t.state().to_owned()),
        col("GROWTH", |t| mib_per_s(t.growth_bytes_per_s)),
        col("EVICTION", |t| mib_per_s(t.eviction_bytes_per_s)),
        col("CLASS", |t| t.class.to_string()),
        wide("SMALLEST", |t| mib(t.lower_threshold_bytes)),
        wide("LARGEST", |t| mib(t.upper_threshold_bytes)),
        wide("EVICTED", |t| mib(t.evicted_bytes)),
        wide("BLOCKED", |t| seconds(t.blocked_ms)),
        wide("FETCHING", |t| seconds(t.fetching_ms)),
        wide("PROBLEM", |t| text_or_dash(t.problem.as_ref())),
    ];
}

impl Tenant {
    /// Returns the state of the threshold.
    fn state(&self) -> &str {
        if self.has_fixed_threshold() { "fixed" } else { &self.threshold_change }
    }

    /// Returns whether the threshold cannot change.
    const fn has_fixed_threshold(&self) -> bool {
        self.lower_threshold_bytes == self.upper_threshold_bytes
    }

    /// Describes the threshold, and the reason of its last change.
    fn threshold_text(&self) -> String {
        let threshold = mib(self.threshold_bytes);
        if self.has_fixed_threshold() {
            return format!("{threshold}, fixed");
        }
        let state = THRESHOLD_STATES.iter().find(|(_, name, _)| *name == self.threshold_change);
        let explanation = state.map_or(self.threshold_change.as_str(), |(_, _, explanation)| explanation);
        let (smallest, largest) = (mib(self.lower_threshold_bytes), mib(self.upper_threshold_bytes));
        format!("{threshold} (from {smallest} to {largest}), {explanation}")
    }

    fn class_text(&self) -> String {
        match self.class {
            1 => "1 of 7 (most urgent): the tenant is blocked".to_owned(),
            class => format!("{class} of 7"),
        }
    }
}

impl Evictions {
    /// Formats a tenant with the reason of the last decision.
    pub(crate) fn to_text(&self, tenant: &Tenant) -> String {
        let t = tenant;
        let lines = [
            format!("usage: {} of {}", mib(t.usage_bytes), mib(t.limit_bytes)),
            format!("threshold: {}", t.threshold_text()),
            format!("growth: {} while it is not blocked", mib_per_s(t.growth_bytes_per_s)),
            format!("eviction rate: {}", mib_per_s(t.eviction_bytes_per_s)),
            format!("class: {}", t.class_text()),
            format!("evicted by the agent: {}", mib(t.evicted_bytes)),
            format!(
                "waiting: {} for evictions, {} for evicted memory",
                seconds(t.blocked_ms),
                seconds(t.fetching_ms)
            ),
        ];
        let problem = t.problem.iter().map(|problem| format!("problem: {problem}"));
        let lines: String = lines.into_iter().chain(problem).map(|line| format!("  {line}\n")).collect();
        let (at, host) = (format_timestamp(self.at_unix_ms), &self.host);
        format!("{at}  early eviction of tenant {} of host {host}\n{lines}", t.tenant)
    }
}
