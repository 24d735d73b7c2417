//! `tarn get tenants`: the memory of a host's tenants in local memory and in slower memory. The host's agent
//! decides about page moves.

use proto::v1;
use serde::Serialize;
use units::Name;

use crate::{
    Connection, Failure, Format, print,
    shares::HostArg,
    table::{Column, Row, col, format_timestamp, mib, text_or_dash, wide},
    view::non_empty,
};

/// Prints the tenants of a host, one per row.
pub(crate) async fn list(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let tenants = load(args.host, manager).await?;
    print::list(format, &tenants.tenants)?;
    if let Some(reason) = &tenants.reason {
        print::note(format, &format!("no pages are moved: {reason}"));
    }
    tenants.problems.iter().for_each(|problem| print::note(format, problem));
    print::note(
        format,
        &format!("reported by host {} at {}", tenants.host, format_timestamp(tenants.at_unix_ms)),
    );
    Ok(())
}

/// Loads the tenants of a host.
///
/// # Errors
/// The host has not reported any, or the manager is unreachable.
pub(crate) async fn load(host: Name, manager: &Connection) -> Result<Tenants, Failure> {
    let request = v1::GetTenantsRequest { host: host.into() };
    Ok(manager.call(manager.admin().get_tenants(request)).await?.into())
}

/// Memory of one tier that the tenants share.
#[derive(Clone, Debug, Serialize)]
struct Tier {
    capacity_bytes: u64,
    free_bytes: u64,
    usable_bytes: u64,
    protection_bytes: u64,
    scaled_protection_bytes: u64,
    shortfall_bytes: u64,
    full: bool,
}

/// State of one tenant after a step.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tenant {
    pub(crate) tenant: String,
    pub(crate) local_bytes: u64,
    pub(crate) slow_bytes: u64,
    protection_bytes: u64,
    pub(crate) scaled_protection_bytes: u64,
    pub(crate) bound_bytes: Option<u64>,
    demotion_bytes: u64,
    demotion_reason: Option<String>,
    promotion_bytes_per_s: Option<u64>,
    promotion_candidates: String,
    throttle_reason: Option<String>,
    promotion_factor: f64,
    pub(crate) thrash_level: u32,
    thrash_state: String,
    demoted_bytes: u64,
    promoted_bytes: u64,
    attempted_bytes: u64,
    refaulted_bytes: u64,
    sampled_promotions: u64,
    thrashed_pages: u64,
    problem: Option<String>,
}

/// Result of a host's last step of fair tiering.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Tenants {
    pub(crate) host: String,
    pub(crate) at_unix_ms: u64,
    pub(crate) reason: Option<String>,
    problems: Vec<String>,
    local: Option<Tier>,
    slow: Option<Tier>,
    pub(crate) tenants: Vec<Tenant>,
}

impl From<v1::TierMemory> for Tier {
    fn from(t: v1::TierMemory) -> Self {
        Self {
            capacity_bytes: t.capacity_bytes,
            free_bytes: t.free_bytes,
            usable_bytes: t.usable_bytes,
            protection_bytes: t.protection_bytes,
            scaled_protection_bytes: t.scaled_protection_bytes,
            shortfall_bytes: t.shortfall_bytes,
            full: t.full,
        }
    }
}

impl From<v1::TieredTenant> for Tenant {
    fn from(t: v1::TieredTenant) -> Self {
        Self {
            tenant: t.tenant,
            local_bytes: t.local_bytes,
            slow_bytes: t.slow_bytes,
            protection_bytes: t.protection_bytes,
            scaled_protection_bytes: t.scaled_protection_bytes,
            bound_bytes: t.bound_bytes,
            demotion_bytes: t.demotion_bytes,
            demotion_reason: non_empty(t.demotion_reason),
            promotion_bytes_per_s: t.promotion_bytes_per_s,
            promotion_candidates: t.promotion_candidates,
            throttle_reason: non_empty(t.throttle_reason),
            promotion_factor: t.promotion_factor,
            thrash_level: t.thrash_level,
            thrash_state: t.thrash_state,
            demoted_bytes: t.demoted_bytes,
            promoted_bytes: t.promoted_bytes,
            attempted_bytes: t.attempted_bytes,
            refaulted_bytes: t.refaulted_bytes,
            sampled_promotions: t.sampled_promotions,
            thrashed_pages: t.thrashed_pages,
            problem: non_empty(t.problem),
        }
    }
}

impl From<v1::Tenants> for Tenants {
    fn from(t: v1::Tenants) -> Self {
        Self {
            host: t.host,
            at_unix_ms: t.at_unix_ms,
            reason: non_empty(t.reason),
            problems: t.problems,
            local: t.local.map(Tier::from),
            slow: t.slow.map(Tier::from),
            tenants: t.tenants.into_iter().map(Tenant::from).collect(),
        }
    }
}

impl Tenant {
    /// Formats the limit on promotions.
    pub(crate) fn promotion_text(&self) -> String {
        let rate = self.promotion_bytes_per_s;
        rate.map_or_else(|| "unlimited".to_owned(), |rate| format!("{}/s", mib(rate)))
    }

    /// Formats the local memory that the tenant donates or borrows.
    fn donation_text(&self) -> String {
        let (used, protected) = (self.local_bytes, self.scaled_protection_bytes);
        if used > protected {
            format!("it borrows {}", mib(used - protected))
        } else {
            format!("it donates {}", mib(protected - used))
        }
    }
}

impl Row for Tenant {
    const COLUMNS: &'static [Column<Self>] = &[
        col("TENANT", |t| t.tenant.clone()),
        col("LOCAL", |t| mib(t.local_bytes)),
        col("SLOW", |t| mib(t.slow_bytes)),
        col("PROTECTION", |t| mib(t.scaled_protection_bytes)),
        col("BOUND", |t| t.bound_bytes.map_or_else(|| "-".to_owned(), mib)),
        col("PROMOTION", Self::promotion_text),
        col("THRASH LEVEL", |t| t.thrash_level.to_string()),
        wide("DEMOTED", |t| mib(t.demoted_bytes)),
        wide("PROMOTED", |t| mib(t.promoted_bytes)),
        wide("REFAULTED", |t| mib(t.refaulted_bytes)),
        wide("PROBLEM", |t| text_or_dash(t.problem.as_ref())),
    ];
}

impl Tenants {
    /// Formats a tenant with the reasons of the last decision.
    pub(crate) fn to_text(&self, tenant: &Tenant) -> String {
        let t = tenant;
        let (at, host) = (format_timestamp(self.at_unix_ms), &self.host);
        let mut text = format!("{at}  fair tiering of tenant {} of host {host}\n", t.tenant);
        let mut line = |name: &str, value: String| text.push_str(&format!("  {name}: {value}\n"));
        if let Some(local) = &self.local {
            let full = if local.full { ", fully utilized" } else { "" };
            line(
                "local memory of the host",
                format!("{} free of {}{full}", mib(local.free_bytes), mib(local.capacity_bytes)),
            );
            if local.scaled_protection_bytes < local.protection_bytes {
                let (sum, usable) = (mib(local.protection_bytes), mib(local.usable_bytes));
                line(
                    "protections",
                    format!("the sum of {sum} exceeds the usable {usable}, so all are reduced in proportion"),
                );
            }
        }
        line(
            "usage",
            format!("{} of local memory, {} of slower memory", mib(t.local_bytes), mib(t.slow_bytes)),
        );
        line(
            "protection",
            format!(
                "{} in effect, {} configured; {}",
                mib(t.scaled_protection_bytes),
                mib(t.protection_bytes),
                t.donation_text()
            ),
        );
        line("bound", t.bound_bytes.map_or_else(|| "none".to_owned(), mib));
        let demotion =
            t.demotion_reason.as_ref().map(|reason| format!("{}: {reason}", mib(t.demotion_bytes)));
        line("demotion", demotion.unwrap_or_else(|| "none".to_owned()));
        let throttle =
            t.throttle_reason.as_ref().map(|reason| format!("; factor {:.3}: {reason}", t.promotion_factor));
        line(
            "promotion",
            format!("{} of {}{}", t.promotion_text(), t.promotion_candidates, throttle.unwrap_or_default()),
        );
        line(
            "thrashing",
            format!(
                "{}, level {}; {} of {} observed promotions were demoted soon after",
                t.thrash_state, t.thrash_level, t.thrashed_pages, t.sampled_promotions
            ),
        );
        line(
            "moved by the agent",
            format!(
                "{} demoted, {} promoted of {} attempted",
                mib(t.demoted_bytes),
                mib(t.promoted_bytes),
                mib(t.attempted_bytes)
            ),
        );
        for problem in &self.problems {
            line("problem of the host", problem.clone());
        }
        if let Some(problem) = &t.problem {
            line("demotion problem", problem.clone());
        }
        text
    }
}
