//! Decisions with their inputs, typed and compact; they are formatted on request only.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use units::{Bytes, Name, ReservationId, SliceId, UnixMs};

/// A decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Time, wall clock.
    pub at: UnixMs,
    /// Requester.
    pub actor: Actor,
    /// Subject.
    pub subject: Subject,
    /// Decision with its inputs.
    pub what: DecisionKind,
}

/// Requester of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Actor {
    /// Scheduler or operator.
    Client(Name),
    /// A host's agent.
    Agent(Name),
    /// The manager: a deadline, a device, a restart.
    Manager,
}

/// Subject of a decision.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Subject {
    /// VM and its memory.
    Vm(Name),
    /// Host.
    Host(Name),
    /// EMC.
    Emc(Name),
    /// Slice.
    Slice(SliceId),
    /// The rack.
    Rack,
}

/// Decision with its inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DecisionKind {
    /// Split of a VM's memory.
    Planned {
        /// Policy or model, with its version.
        model: String,
        /// Request.
        memory: Bytes,
        /// Local memory.
        local: Bytes,
        /// Pool memory.
        pool: Bytes,
        /// Thresholds and inputs by name.
        facts: Vec<(String, String)>,
        /// Hosts, with the reason for those that do not fit.
        hosts: Vec<(Name, Result<(), String>)>,
    },
    /// A host became owner of slices for a VM.
    Reserved {
        /// Reservation.
        reservation: ReservationId,
        /// Host.
        host: Name,
        /// Slices taken, and free slices before, by EMC.
        taken: Vec<(Name, u32, u32)>,
        /// Other reachable EMCs: free slices, and the reason why they were not chosen.
        others: Vec<(Name, u32, ExclusionReason)>,
        /// Local memory taken.
        local: Bytes,
        /// Cores taken.
        cores: u32,
    },
    /// The VM was started.
    Committed,
    /// The reservation ended.
    Ended {
        /// Cause.
        why: String,
    },
    /// A reservation cannot become ready or lost a slice.
    Broken {
        /// Reason.
        why: String,
    },
    /// Reservations are no longer accepted.
    Cordoned {
        /// Reason given by the caller.
        reason: String,
    },
    /// Reservations are accepted again.
    Uncordoned {
        /// Reason given by the caller.
        reason: String,
    },
    /// Migration of the VMs is requested.
    Draining {
        /// Reason given by the caller.
        reason: String,
        /// Number of VMs.
        vms: u32,
    },
    /// A fence began.
    Fencing {
        /// Reason.
        reason: String,
        /// Number of the host's slices.
        slices: u32,
    },
    /// Every device has confirmed the fence.
    Fenced,
    /// A fenced host returned clean.
    Returned {
        /// Evidence.
        proof: String,
    },
    /// A slice was quarantined.
    Quarantined {
        /// Reason.
        why: String,
    },
    /// A quarantined slice returned to circulation.
    Requalified {
        /// Reason.
        reason: String,
    },
    /// A running VM was adopted on memory that a restored ledger did not assign to it.
    RecoveredVm {
        /// Slices.
        slices: Vec<SliceId>,
    },
    /// A migration request was sent.
    MigrationRequested {
        /// Reason.
        why: String,
    },
    /// A migration request was withdrawn.
    MigrationWithdrawn,
    /// The scheduler answered a migration request.
    MigrationAnswered {
        /// "accepted", "declined" or "done".
        answer: String,
        /// Explanation by the scheduler.
        explanation: String,
    },
    /// rack.toml was loaded.
    Configured {
        /// Changes, one sentence each.
        changes: Vec<String>,
    },
    /// A host during a fence had nothing left. Recorded by earlier versions; now such a host
    /// returns.
    HostEmptied {
        /// Evidence.
        proof: String,
    },
    /// Another model of a kind serves, or none.
    ModelChanged {
        /// Kind.
        kind: String,
        /// Version.
        version: Option<u32>,
        /// Previous version.
        before: Option<u32>,
    },
    /// Weights of a host's tenants changed.
    WeightsChanged {
        /// All weights of the host.
        weights: Vec<(Name, f64)>,
    },
}

/// Reason why an EMC was not chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExclusionReason {
    /// It has fewer free slices than the VM needs, and another EMC has enough.
    TooSmall,
    /// Another EMC has more free slices.
    Fuller,
    /// It is cordoned.
    Cordoned,
    /// Its driver reports errors.
    Failed,
    /// It is draining.
    Draining,
    /// The host does not see it.
    NotSeen,
    /// It has not confirmed the latest fence of the host.
    FenceUnconfirmed,
    /// Another EMC has as many free slices and was chosen.
    Tied,
}

impl std::fmt::Display for ExclusionReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TooSmall => "too few for the whole VM",
            Self::Fuller => "another has more free",
            Self::Tied => "as many free as the chosen one",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::NotSeen => "not seen by the host",
            Self::FenceUnconfirmed => "its fence of the host is not confirmed yet",
        })
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Vm(name) => write!(f, "vm {name}"),
            Self::Host(name) => write!(f, "host {name}"),
            Self::Emc(name) => write!(f, "emc {name}"),
            Self::Slice(id) => write!(f, "slice {id}"),
            Self::Rack => f.write_str("rack"),
        }
    }
}

impl std::fmt::Display for Actor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client(name) => write!(f, "{name}"),
            Self::Agent(name) => write!(f, "agent of {name}"),
            Self::Manager => f.write_str("manager"),
        }
    }
}

/// Formatted decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecisionText {
    /// Action, one word.
    pub action: &'static str,
    /// Reason, one sentence.
    pub why: String,
    /// Policy or model, with its version.
    pub model: String,
    /// Inputs, thresholds and outcomes by name.
    pub facts: BTreeMap<String, String>,
    /// Alternatives, each with the reason why it was rejected.
    pub alternatives: Vec<String>,
}

/// Name of the rule that chooses slices; changes with the rule.
pub const PLACEMENT_RULE: &str = "one-emc-most-free/1";

impl DecisionKind {
    /// Formats the decision.
    pub fn describe(&self) -> DecisionText {
        let plain = |action, why: String| DecisionText { action, why, ..DecisionText::default() };
        match self {
            Self::Planned { model, memory, local, pool, facts, hosts } => DecisionText {
                action: "plan",
                why: format!("{pool} of {memory} may come from the pool, {local} stays local"),
                model: model.clone(),
                facts: facts.iter().cloned().collect(),
                alternatives: hosts.iter().map(|(host, fits)| host_text(host, fits)).collect(),
            },
            Self::Reserved { reservation, host, taken, others, local, cores } => {
                reserved_text(*reservation, host, taken, others, *local, *cores)
            }
            Self::Committed => plain("commit", "the VM was started".into()),
            Self::Ended { why } => plain("end", why.clone()),
            Self::Broken { why } => plain("break", why.clone()),
            Self::Cordoned { reason } => plain("cordon", reason.clone()),
            Self::Uncordoned { reason } => plain("uncordon", reason.clone()),
            Self::Draining { reason, vms } => {
                plain("drain", with_count(reason, *vms, "VM to migrate", "VMs to migrate"))
            }
            Self::Fencing { reason, slices } => {
                plain("fence", with_count(reason, *slices, "slice", "slices"))
            }
            Self::Fenced => plain("fenced", "every device has revoked the host's access".into()),
            Self::HostEmptied { proof } => plain("let-go", proof.clone()),
            Self::Returned { proof } => plain("return", proof.clone()),
            Self::Quarantined { why } => plain("quarantine", why.clone()),
            Self::Requalified { reason } => plain("requalify", reason.clone()),
            Self::RecoveredVm { slices } => {
                let count = u32::try_from(slices.len()).unwrap_or(u32::MAX);
                plain("adopt", with_count("found running", count, "slice", "slices"))
            }
            Self::MigrationRequested { why } => plain("ask-migration", why.clone()),
            Self::MigrationWithdrawn => plain("withdraw-migration", "the drain was cancelled".into()),
            Self::MigrationAnswered { answer, explanation } if explanation.is_empty() => {
                plain("answer-migration", answer.clone())
            }
            Self::MigrationAnswered { answer, explanation } => {
                plain("answer-migration", format!("{answer}: {explanation}"))
            }
            Self::Configured { changes } => plain("configure", changes.join("; ")),
            Self::ModelChanged { kind, version, before } => {
                let named =
                    |version: &Option<u32>| version.map_or("none".into(), |of| format!("{kind}/{of}"));
                plain("serve-model", format!("{} replaces {}", named(version), named(before)))
            }
            Self::WeightsChanged { weights } if weights.is_empty() => {
                plain("weigh", "no weight is set any more".into())
            }
            Self::WeightsChanged { weights } => {
                let all: Vec<_> =
                    weights.iter().map(|(tenant, weight)| format!("{tenant}={weight}")).collect();
                plain("weigh", format!("set now: {}", all.join(" ")))
            }
        }
    }
}

/// Formats "maintenance (3 slices)", or "3 slices" without a reason.
fn with_count(reason: &str, count: u32, one: &str, many: &str) -> String {
    let counted = format!("{count} {}", if count == 1 { one } else { many });
    if reason.is_empty() { counted } else { format!("{reason} ({counted})") }
}

fn host_text(host: &Name, fits: &Result<(), String>) -> String {
    match fits {
        Ok(()) => format!("host {host}: fits"),
        Err(why) => format!("host {host}: {why}"),
    }
}

fn reserved_text(
    reservation: ReservationId,
    host: &Name,
    taken: &[(Name, u32, u32)],
    others: &[(Name, u32, ExclusionReason)],
    local: Bytes,
    cores: u32,
) -> DecisionText {
    let slices: u32 = taken.iter().map(|(_, n, _)| n).sum();
    let from: Vec<_> = taken.iter().map(|(emc, n, free)| format!("{n} of {free} free on {emc}")).collect();
    let why = match taken {
        [] => format!("{reservation} on {host} needs no slice"),
        [_] => format!(
            "{reservation} on {host}: all slices from one EMC, the one with most free: {}",
            from.join(", ")
        ),
        _ => format!(
            "{reservation} on {host}: no EMC has enough free slices, so the fewest EMCs that do: {}",
            from.join(", ")
        ),
    };
    let facts = [
        ("slices", slices.to_string()),
        ("local", local.to_string()),
        ("cores", cores.to_string()),
        ("host", host.to_string()),
    ];
    DecisionText {
        action: "reserve",
        why,
        model: PLACEMENT_RULE.into(),
        facts: facts.map(|(k, v)| (k.to_owned(), v)).into(),
        alternatives: others
            .iter()
            .map(|(emc, free, why)| format!("emc {emc}: {free} free, {why}"))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn reserved(taken: &[(Name, u32, u32)]) -> DecisionText {
        let others = vec![(name("e9"), 3, ExclusionReason::Fuller)];
        let (reservation, host) = (ReservationId(7), name("h1"));
        let taken = taken.to_vec();
        DecisionKind::Reserved { reservation, host, taken, others, local: Bytes::gib(8), cores: 2 }.describe()
    }

    #[test]
    fn reservation_text_names_rule_facts_and_alternatives() {
        let text = reserved(&[(name("e1"), 2, 5), (name("e2"), 1, 1)]);
        assert_eq!((text.action, text.model.as_str()), ("reserve", PLACEMENT_RULE));
        let facts: Vec<_> = text.facts.iter().map(|(fact, value)| format!("{fact}={value}")).collect();
        assert_eq!(facts.join(" "), "cores=2 host=h1 local=8GiB slices=3");
        assert_eq!(text.alternatives, ["emc e9: 3 free, another has more free"]);
        assert!(text.why.ends_with(
            "no EMC has enough free slices, so the fewest EMCs that do: 2 of 5 free on e1, 1 of 1 free on e2"
        ));
        let one = reserved(&[(name("e1"), 2, 5)]).why;
        assert!(one.ends_with("all slices from one EMC, the one with most free: 2 of 5 free on e1"), "{one}");
        assert!(reserved(&[]).why.ends_with("on h1 needs no slice"));
    }

    #[test]
    fn plan_text_names_model_inputs_and_hosts() {
        let plan = DecisionKind::Planned {
            model: "frigid/3".to_owned(),
            memory: Bytes::gib(8),
            local: Bytes::gib(6),
            pool: Bytes::gib(2),
            facts: vec![("cores".to_owned(), "4".to_owned())],
            hosts: vec![(name("h1"), Ok(())), (name("h2"), Err("it is cordoned".to_owned()))],
        };
        let text = plan.describe();
        assert_eq!((text.action, text.model.as_str()), ("plan", "frigid/3"));
        assert_eq!(text.facts.get("cores").map(String::as_str), Some("4"));
        assert_eq!(text.alternatives, ["host h1: fits", "host h2: it is cordoned"]);
    }

    #[test]
    fn absent_explanation_and_weights_leave_no_empty_list() {
        let answer = |explanation: &str| {
            DecisionKind::MigrationAnswered {
                answer: "declined".to_owned(),
                explanation: explanation.to_owned(),
            }
            .describe()
            .why
        };
        assert_eq!(DecisionKind::Committed.describe().action, "commit");
        assert_eq!((answer(""), answer("busy")), ("declined".to_owned(), "declined: busy".to_owned()));
        let weighed = |weights: &[(Name, f64)]| {
            DecisionKind::WeightsChanged { weights: weights.to_vec() }.describe().why
        };
        assert_eq!(weighed(&[]), "no weight is set any more");
        assert_eq!(weighed(&[(name("a"), 2.0)]), "set now: a=2");
    }
}
