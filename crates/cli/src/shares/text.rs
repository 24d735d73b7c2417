//! What came of a host's epoch, in words for people: what was done, what there is, what the market's numbers mean, and each tenant. It prints
//! nothing.

use super::{Certificate, Shares, Tenant, link, memory, mib, rate};
use crate::table::{moment, percent};

/// How shares come about, by the market's word for it.
const STATUS: &[(&str, &str)] = &[
    ("exact", "everybody has what it asks for at one price"),
    ("mixed", "everybody has a mix of what it asks for just below and just above the price"),
    (
        "whole",
        "who would lose by a mix has what it asks for just below or just above the price, whole; the others have a mix",
    ),
    ("one marginal", "one tenant has what remained; the others have what they ask for"),
    (
        "one fixed",
        "one tenant has what it asked for; the others bought the rest in a market of their own, at prices of its own",
    ),
    ("fair shares", "there is no price at which nobody loses: everybody has its equal split"),
];

/// What is less would be printed as none.
const NOTHING: f64 = 5e-4;

impl Shares {
    /// All of it.
    pub(super) fn text(&self) -> String {
        let (at, epoch, host) = (moment(self.at_unix_ms), self.epoch, &self.host);
        let why = self.why.iter().map(|why| format!("  {why}\n")).collect::<String>();
        let supply = self.supply.as_ref();
        let supply = format!(
            "  to share: {} of local memory, {} of the link to remote memory, each way\n",
            memory(supply),
            link(supply)
        );
        let certificate = self.certificate.as_ref().map(Certificate::text).unwrap_or_default();
        let tenants = self.tenants.iter().map(Tenant::text).collect::<String>();
        format!("{at}  epoch {epoch} of host {host}: {}\n{why}{supply}{certificate}{tenants}", self.did())
    }

    /// What the epoch did.
    fn did(&self) -> &str {
        match self.state.as_str() {
            super::SET => "shares were set anew",
            "held" => "new shares would have differed too little, so that none was set",
            super::KEPT => "shares are as they were, as something was missing or went wrong",
            other => other,
        }
    }
}

impl Certificate {
    /// A number a line, and what it means.
    fn text(&self) -> String {
        let meaning = STATUS.iter().find(|(status, _)| *status == self.status);
        let status =
            meaning.map_or_else(|| self.status.clone(), |(status, means)| format!("{status}: {means}"));
        let lines = [
            status,
            self.prices(),
            self.budgets(),
            format!("{} prices were tried", self.rounds),
            self.refined(),
            self.gone(),
            format!(
                "{} of memory and {} of the link nobody wanted: handed out all the same",
                percent(self.memory_left_over),
                percent(self.bandwidth_left_over)
            ),
            self.spent(),
            self.worst(),
            self.envied(),
        ];
        let lines = lines.iter().map(|line| format!("    {line}\n")).collect::<String>();
        format!("  market:\n{lines}")
    }

    fn prices(&self) -> String {
        let (memory, link) = (self.memory_price, 1.0 - self.memory_price);
        format!(
            "all memory costs {memory:.3}, all of the link {link:.3}: together 1, which is what tenants have to spend"
        )
    }

    fn budgets(&self) -> String {
        let why =
            if self.dividend > 1.0 + NOTHING { ": some do not want to spend all of theirs" } else { "" };
        format!("each may spend {:.3} times its part of all weights{why}", self.dividend)
    }

    /// Only what was bought at these prices, and kept so, can be held against them.
    fn spent(&self) -> String {
        if self.status == "one fixed" {
            "one tenant was not held to these prices, nor the others: budgets do not bound them".to_owned()
        } else if self.refinements > 0 {
            "deals are made at prices of their own: budgets do not bound them".to_owned()
        } else {
            format!("no purchase exceeds its budget by more than {}", percent(self.overspent))
        }
    }

    fn refined(&self) -> String {
        match self.refinements {
            0 => {
                "no deal beyond the market makes the geometric mean of throughputs larger, or none was sought"
                    .to_owned()
            }
            1 => "1 deal beyond the market makes the geometric mean of throughputs larger".to_owned(),
            deals => format!("{deals} deals beyond the market make the geometric mean of throughputs larger"),
        }
    }

    fn gone(&self) -> String {
        let way = if self.way < 1.0 { percent(self.way) } else { "all".to_owned() };
        format!("{way} of the way from the shares before was gone")
    }

    fn worst(&self) -> String {
        let who = self.worst_off.as_deref().unwrap_or("the worst-off");
        let times = self.sharing_incentive;
        let means = if times >= 1.0 - NOTHING { "nobody loses by sharing" } else { "it loses by sharing" };
        format!(
            "{who}, the worst-off, has {times:.3} of its throughput with an equal split, as estimated: {means}"
        )
    }

    fn envied(&self) -> String {
        match self.envy {
            None => "whether anybody would rather have another's share was not looked at: there are too many tenants".to_owned(),
            Some(envy) if envy < NOTHING => "nobody would have more throughput with another's share".to_owned(),
            Some(envy) => format!("somebody would have {} more throughput with another's share", percent(envy)),
        }
    }
}

impl Tenant {
    /// What it has, what it might have, and from what that is known.
    fn text(&self) -> String {
        let (share, fair) = (self.share.as_ref(), self.fair.as_ref());
        let does = match self.enforcer.as_str() {
            "swap" => "what exceeds its share is swapped out",
            "tiered" => "nothing moves its pages yet, this is what it ought to have",
            "advise" => "nobody enforces it, this is what it ought to have",
            other => other,
        };
        let lines = [
            format!(
                "memory: {}, {} by weight alone; it has {}",
                memory(share),
                memory(fair),
                mib(self.memory_used_mib)
            ),
            format!(
                "link: {}, {} by weight alone; it used {} and could use {}",
                link(share),
                link(fair),
                rate(self.bandwidth_used_mb_s),
                rate(self.bandwidth_wanted_mb_s)
            ),
            format!("it waited for pages or devices {} of its time", percent(self.waited)),
            self.worth(),
        ];
        let problem = self.problem.iter().map(|problem| format!("kept from its share: {problem}"));
        let lines = lines.into_iter().chain(problem).map(|line| format!("    {line}\n")).collect::<String>();
        format!("  tenant {}, weight {}, {}: {does}\n{lines}", self.tenant, self.weight, self.enforcer)
    }

    fn worth(&self) -> String {
        if self.learnt_from == "none" {
            return format!(
                "nobody saw which pages it touches: by how long it waited its share is worth about {:.2} of its throughput with an equal split",
                self.gain
            );
        }
        format!(
            "its share is worth {:.3} of its throughput with an equal split, as learnt from {}; that may be {} off",
            self.gain,
            self.learnt_from,
            percent(self.error)
        )
    }
}
