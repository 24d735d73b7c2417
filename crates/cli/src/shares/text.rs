//! Text output of `tarn explain shares`, and of the shares of one tenant: the result of the last epoch, the prices and budgets of
//! the market with explanations, and each tenant.

use super::{Certificate, Shares, Tenant, format_link, format_memory, format_mib, format_rate};
use crate::table::{format_timestamp, percent};

/// Explanation of each status of the market.
const STATUS_EXPLANATIONS: &[(&str, &str)] = &[
    ("exact", "every tenant gets its demand at one price"),
    ("mixed", "every tenant gets a mix of its demand just below and just above the price"),
    (
        "whole",
        "tenants that would lose by a mix get their demand just below or just above the price; all others get a mix",
    ),
    ("one marginal", "one tenant gets the remaining supply; all others get their demand"),
    (
        "searched",
        "at every price some tenant would lose; pairs of tenants divided their shares anew, starting from the equal split",
    ),
    ("fair shares", "at every price some tenant would lose, so every tenant gets its equal split"),
];

/// Smallest value that is not rounded to zero when printed with three decimals.
const PRINTED_NONZERO_MIN: f64 = 5e-4;

impl Shares {
    /// Formats the result of the epoch.
    pub(super) fn to_text(&self) -> String {
        let supply = self.supply.as_ref();
        let supply = format!(
            "  capacity: {} of local memory, {} of link bandwidth in each direction\n",
            format_memory(supply),
            format_link(supply)
        );
        let certificate = self.certificate.as_ref().map(Certificate::to_text).unwrap_or_default();
        let tenants = self.tenants.iter().map(Tenant::to_text).collect::<String>();
        format!("{}{supply}{certificate}{tenants}", self.header())
    }

    /// Formats the result of the epoch for one tenant.
    pub(crate) fn tenant_to_text(&self, tenant: &Tenant) -> String {
        self.header() + &tenant.to_text()
    }

    /// Formats the time and the effect of the epoch.
    fn header(&self) -> String {
        let (at, epoch, host) = (format_timestamp(self.at_unix_ms), self.epoch, &self.host);
        let reason = self.reason.iter().map(|reason| format!("  {reason}\n")).collect::<String>();
        format!("{at}  epoch {epoch} of host {host}: {}\n{reason}", self.epoch_result())
    }

    /// Describes the effect of the epoch on the shares.
    fn epoch_result(&self) -> &str {
        match self.state.as_str() {
            super::SHARE_STATE_SET => "shares updated",
            "unchanged" => "shares unchanged: the difference was too small",
            super::SHARE_STATE_BLOCKED => "shares unchanged: new shares could not be computed or enforced",
            other => other,
        }
    }
}

impl Certificate {
    /// Formats the results of the market, one per line with an explanation.
    fn to_text(&self) -> String {
        let meaning = STATUS_EXPLANATIONS.iter().find(|(status, _)| *status == self.status);
        let status =
            meaning.map_or_else(|| self.status.clone(), |(status, meaning)| format!("{status}: {meaning}"));
        let lines = [
            status,
            self.price_line(),
            self.budget_line(),
            format!("{} prices were evaluated", self.rounds),
            self.trade_line(),
            self.step_line(),
            format!(
                "supply above demand, which was distributed too: {} of memory, {} of link bandwidth",
                percent(self.memory_excess),
                percent(self.bandwidth_excess)
            ),
            self.spending_line(),
            self.worst_off_line(),
            self.envy_line(),
        ];
        let lines = lines.iter().map(|line| format!("    {line}\n")).collect::<String>();
        format!("  market:\n{lines}")
    }

    fn price_line(&self) -> String {
        let (memory, link) = (self.memory_price, 1.0 - self.memory_price);
        format!(
            "price of all memory {memory:.3}, of all link bandwidth {link:.3}; prices and budgets each add up to 1"
        )
    }

    fn budget_line(&self) -> String {
        let reason = if self.dividend > 1.0 + PRINTED_NONZERO_MIN {
            ", because some tenants do not spend their whole budget"
        } else {
            ""
        };
        format!("budget of each tenant: {:.3} times its fraction of all weights{reason}", self.dividend)
    }

    /// Describes by how much purchases exceed budgets. Budgets limit only purchases at the market's
    /// prices.
    fn spending_line(&self) -> String {
        if self.status == "searched" {
            "budgets do not apply: the shares do not follow from prices".to_owned()
        } else if self.refinements > 0 {
            "budgets do not apply: trades after the market have prices of their own".to_owned()
        } else {
            format!("no purchase exceeds its budget by more than {}", percent(self.budget_excess))
        }
    }

    fn trade_line(&self) -> String {
        match self.refinements {
            0 => {
                "no trade after the market increases the geometric mean of throughputs, or trades were not searched"
                    .to_owned()
            }
            1 => "1 trade after the market increases the geometric mean of throughputs".to_owned(),
            trades => format!("{trades} trades after the market increase the geometric mean of throughputs"),
        }
    }

    fn step_line(&self) -> String {
        let step = if self.step < 1.0 { percent(self.step) } else { "100 %".to_owned() };
        format!("{step} of the change to the new shares was applied")
    }

    fn worst_off_line(&self) -> String {
        let tenant = self.worst_off.as_deref().unwrap_or("unknown");
        let times = self.sharing_incentive;
        let conclusion = if times >= 1.0 - PRINTED_NONZERO_MIN {
            "no tenant loses by sharing"
        } else {
            "this tenant loses by sharing"
        };
        format!(
            "estimated throughput of {tenant}, the worst-off tenant: {times:.3} times that with an equal split; {conclusion}"
        )
    }

    fn envy_line(&self) -> String {
        match self.envy {
            None => "envy not computed: too many tenants".to_owned(),
            Some(envy) if envy < PRINTED_NONZERO_MIN => {
                "no tenant would have more throughput with another tenant's share".to_owned()
            }
            Some(envy) => format!(
                "envy: a tenant would have {} more throughput with another tenant's share",
                percent(envy)
            ),
        }
    }
}

impl Tenant {
    /// Formats the shares and measurements of the tenant, and its estimated gain.
    fn to_text(&self) -> String {
        let (share, fair) = (self.share.as_ref(), self.fair.as_ref());
        let enforcement = match self.enforcer.as_str() {
            "swap" => "memory beyond its share is swapped out",
            "tiered" if self.problem.is_some() => "not enforced",
            "tiered" => "memory is protected by fair tiering, bandwidth is not limited",
            "advise" => "not enforced (advisory)",
            other => other,
        };
        let lines = [
            format!(
                "memory: share {}, fair share by weight {}, used {}",
                format_memory(share),
                format_memory(fair),
                format_mib(self.memory_used_mib)
            ),
            format!(
                "link: share {}, fair share by weight {}, used {}, demand {}",
                format_link(share),
                format_link(fair),
                format_rate(self.bandwidth_used_mb_s),
                format_rate(self.bandwidth_demand_mb_s)
            ),
            format!("stalled on memory or I/O {} of the time", percent(self.stalled)),
            self.throughput_line(),
        ];
        let problem = self.problem.iter().map(|problem| format!("share not enforced: {problem}"));
        let lines = lines.into_iter().chain(problem).map(|line| format!("    {line}\n")).collect::<String>();
        format!("  tenant {}, weight {}, {}: {enforcement}\n{lines}", self.tenant, self.weight, self.enforcer)
    }

    fn throughput_line(&self) -> String {
        if self.access_source == "none" {
            return format!(
                "throughput: about {:.2} times that with an equal split, estimated from stall time without page accesses",
                self.gain
            );
        }
        format!(
            "throughput: {:.3} times that with an equal split, estimated from {}, error {}",
            self.gain,
            self.access_source,
            percent(self.error)
        )
    }
}
