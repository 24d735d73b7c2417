//! Audit log: decisions of the manager with their inputs. Decisions are stored in compact form and
//! formatted for operators on request.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use units::{Bytes, Name, ReservationId, SliceId, UnixMs};

/// One recorded decision of the manager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Time of the decision, wall clock.
    pub at: UnixMs,
    /// Client, agent or manager that caused the decision.
    pub actor: Actor,
    /// Object that the decision is about.
    pub subject: Subject,
    /// Decision and its inputs.
    pub what: DecisionKind,
}

/// Client, agent or manager that caused a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Actor {
    /// The scheduler or an operator, by client name.
    Client(Name),
    /// The agent of a host, by host name.
    Agent(Name),
    /// The manager itself, after a deadline, a device event or a restart.
    Manager,
}

/// Object that a decision is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Subject {
    /// A VM and its memory.
    Vm(Name),
    /// A host, by name.
    Host(Name),
    /// An EMC, by name.
    Emc(Name),
    /// A slice, by ID.
    Slice(SliceId),
    /// The whole rack.
    Rack,
}

/// Decision with its inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DecisionKind {
    /// A VM's memory was split into local memory and pool memory.
    Planned {
        /// Policy or model, with its version.
        model: String,
        /// Memory that the VM requested.
        memory: Bytes,
        /// Local memory of the VM.
        local: Bytes,
        /// Pool memory of the VM.
        pool: Bytes,
        /// Inputs and thresholds, as pairs of name and value.
        facts: Vec<(String, String)>,
        /// Candidate hosts, each with `Ok` or the reason why it is unsuitable.
        hosts: Vec<(Name, Result<(), String>)>,
    },
    /// Memory and cores were reserved for a VM.
    Reserved {
        /// ID of the new reservation.
        reservation: ReservationId,
        /// Host of the reservation.
        host: Name,
        /// Each chosen EMC, with the number of slices taken and the number of free slices before.
        taken: Vec<(Name, u32, u32)>,
        /// Each other EMC of the host, with its number of free slices and the reason why it was not
        /// chosen.
        others: Vec<(Name, u32, ExclusionReason)>,
        /// Local memory reserved.
        local: Bytes,
        /// Number of cores reserved.
        cores: u32,
    },
    /// The VM was started.
    Committed,
    /// The reservation ended.
    Ended {
        /// Cause of the end.
        why: String,
    },
    /// A reservation cannot become ready or lost a slice.
    Broken {
        /// Reason why the reservation is broken.
        why: String,
    },
    /// The host or EMC no longer accepts reservations.
    Cordoned {
        /// Reason given by the caller.
        reason: String,
    },
    /// The host or EMC accepts reservations again.
    Uncordoned {
        /// Reason given by the caller.
        reason: String,
    },
    /// A host or EMC is being drained: the scheduler was requested to migrate its VMs.
    Draining {
        /// Reason given by the caller.
        reason: String,
        /// Number of VMs to migrate.
        vms: u32,
    },
    /// Fencing of a host began.
    Fencing {
        /// Reason of the fence.
        reason: String,
        /// Number of slices that the host owned.
        slices: u32,
    },
    /// Every device has confirmed the fence of the host.
    Fenced,
    /// A fenced host returned without processes or mappings from before the fence.
    Returned {
        /// Evidence that the host is clean.
        proof: String,
    },
    /// A slice was quarantined.
    Quarantined {
        /// Reason of the quarantine.
        why: String,
    },
    /// A quarantined slice returned to circulation.
    Requalified {
        /// Reason of the requalification.
        reason: String,
    },
    /// A running VM was adopted whose slices the ledger had not assigned to it, for example after a
    /// restore.
    RecoveredVm {
        /// Slices that the VM uses.
        slices: Vec<SliceId>,
    },
    /// A migration request was sent to the scheduler.
    MigrationRequested {
        /// Reason for the migration.
        why: String,
    },
    /// A migration request because of a drain was withdrawn.
    MigrationWithdrawn,
    /// The scheduler answered a migration request.
    MigrationAnswered {
        /// "accepted", "declined" or "done".
        answer: String,
        /// Explanation by the scheduler.
        explanation: String,
    },
    /// The manager loaded rack.toml.
    Configured {
        /// Changes, one sentence each.
        changes: Vec<String>,
    },
    /// A fenced host reported that it was clean. Recorded only by earlier versions; newer versions
    /// record [`DecisionKind::Returned`].
    HostEmptied {
        /// Evidence that the host is clean.
        proof: String,
    },
    /// Another model became the serving model of its kind.
    ModelChanged {
        /// Kind of the model.
        kind: String,
        /// Version of the new serving model; `None` if predictions of this kind use no model now.
        version: Option<u32>,
        /// Version of the previous serving model; `None` if there was none.
        before: Option<u32>,
    },
    /// The weights of a host's tenants changed.
    WeightsChanged {
        /// Tenants of the host that have a weight, each with its weight.
        weights: Vec<(Name, f64)>,
    },
    /// A migration request because of a slowdown was withdrawn or expired.
    SlowdownEnded {
        /// Reason for the end of the request.
        why: String,
    },
    /// A move of a VM's pool memory to local memory of its host began.
    RehomeStarted {
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Local memory that was booked for the move.
        local: Bytes,
    },
    /// A move of a VM's pool memory to local memory failed.
    RehomeFailed {
        /// Number of the attempt, from 1.
        attempt: u32,
        /// Reason of the failure, from the host.
        why: String,
    },
    /// A VM's pool memory was moved to local memory, and its slices are being released.
    Rehomed {
        /// Slices that the VM no longer uses.
        slices: Vec<SliceId>,
    },
    /// A client cancelled a move of a VM's pool memory to local memory.
    RehomeCancelled {
        /// Number of the attempt, from 1.
        attempt: u32,
    },
    /// The slowdown of a VM was measured by comparing its counters before and after the move of its pool
    /// memory to local memory.
    LossMeasured(LossByMove),
}

/// Slowdown of a VM by pool memory, measured by the move of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossByMove {
    /// Slowdown before the move relative to local memory: 0.1 is 10 %.
    pub loss: f64,
    /// Standard error of the slowdown.
    pub standard_error: f64,
    /// Whether the slowdown is training data of models: it is exact and plausible.
    pub is_label: bool,
}

/// Reason why an EMC was not chosen for a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExclusionReason {
    /// The EMC has fewer free slices than the VM needs, and another EMC has enough.
    TooSmall,
    /// Another EMC has more free slices.
    Fuller,
    /// The EMC is cordoned.
    Cordoned,
    /// The EMC's driver reports errors.
    Failed,
    /// The EMC is draining.
    Draining,
    /// The host does not detect the EMC's device or cannot use it.
    NotSeen,
    /// The EMC has not confirmed the latest fence of the host.
    FenceUnconfirmed,
    /// The chosen EMC has the same number of free slices; the tie was broken by ID.
    Tied,
}

impl std::fmt::Display for ExclusionReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::TooSmall => "too few free slices for the whole VM",
            Self::Fuller => "another EMC has more free slices",
            Self::Tied => "the chosen EMC has as many free slices",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
            Self::Failed => "failed",
            Self::NotSeen => "its device is not reported by the host",
            Self::FenceUnconfirmed => "it has not confirmed the fence of the host",
        })
    }
}

impl std::fmt::Display for LossByMove {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [loss, error] = [self.loss, self.standard_error].map(|share| 100.0 * share);
        let use_of_loss = if self.is_label { "training data of models" } else { "not used for training" };
        write!(
            f,
            "pool memory slowed the VM down by {loss:.1} % (standard error {error:.1} %): {use_of_loss}"
        )
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

/// Decision as text, for operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecisionText {
    /// Name of the action, without spaces.
    pub action: &'static str,
    /// Reason of the decision, one sentence.
    pub why: String,
    /// Policy or model, with its version.
    pub model: String,
    /// Inputs, thresholds and outcomes, by name.
    pub facts: BTreeMap<String, String>,
    /// Alternatives, each with the reason why it was rejected.
    pub alternatives: Vec<String>,
}

/// Name and version of the placement rule. Every change of the rule increases the version.
pub const PLACEMENT_RULE: &str = "one-emc-most-free/1";

impl DecisionKind {
    /// Formats the decision for operators.
    pub fn describe(&self) -> DecisionText {
        let without_facts = |action, why: String| DecisionText { action, why, ..DecisionText::default() };
        match self {
            Self::Planned { model, memory, local, pool, facts, hosts } => DecisionText {
                action: "plan",
                why: format!("{pool} of {memory} may come from the pool, {local} stays local"),
                model: model.clone(),
                facts: facts.iter().cloned().collect(),
                alternatives: hosts.iter().map(|(host, fits)| describe_host(host, fits)).collect(),
            },
            Self::Reserved { reservation, host, taken, others, local, cores } => {
                describe_reservation(*reservation, host, taken, others, *local, *cores)
            }
            Self::Committed => without_facts("commit", "the VM was started".into()),
            Self::Ended { why } => without_facts("end", why.clone()),
            Self::Broken { why } => without_facts("break", why.clone()),
            Self::Cordoned { reason } => without_facts("cordon", reason.clone()),
            Self::Uncordoned { reason } => without_facts("uncordon", reason.clone()),
            Self::Draining { reason, vms } => {
                without_facts("drain", append_count(reason, *vms, "VM to migrate", "VMs to migrate"))
            }
            Self::Fencing { reason, slices } => {
                without_facts("fence", append_count(reason, *slices, "slice", "slices"))
            }
            Self::Fenced => without_facts("fenced", "every device has revoked the host's access".into()),
            Self::HostEmptied { proof } => without_facts("host-clean", proof.clone()),
            Self::Returned { proof } => without_facts("return", proof.clone()),
            Self::Quarantined { why } => without_facts("quarantine", why.clone()),
            Self::Requalified { reason } => without_facts("requalify", reason.clone()),
            Self::RecoveredVm { slices } => {
                without_facts("adopt", append_count("found running", count(slices), "slice", "slices"))
            }
            Self::MigrationRequested { why } => without_facts("request-migration", why.clone()),
            Self::MigrationWithdrawn => without_facts("withdraw-migration", "the drain was cancelled".into()),
            Self::MigrationAnswered { answer, explanation } if explanation.is_empty() => {
                without_facts("answer-migration", answer.clone())
            }
            Self::MigrationAnswered { answer, explanation } => {
                without_facts("answer-migration", format!("{answer}: {explanation}"))
            }
            Self::Configured { changes } => without_facts("configure", changes.join("; ")),
            Self::ModelChanged { kind, version, before } => {
                let model_name =
                    |version: &Option<u32>| version.map_or("none".into(), |of| format!("{kind}/{of}"));
                without_facts(
                    "serve-model",
                    format!("{} replaces {}", model_name(version), model_name(before)),
                )
            }
            Self::WeightsChanged { weights } if weights.is_empty() => {
                without_facts("weigh", "no tenant has a weight".into())
            }
            Self::WeightsChanged { weights } => {
                let all: Vec<_> =
                    weights.iter().map(|(tenant, weight)| format!("{tenant}={weight}")).collect();
                without_facts("weigh", format!("weights: {}", all.join(" ")))
            }
            Self::SlowdownEnded { why } => without_facts("withdraw-migration", why.clone()),
            Self::RehomeStarted { attempt, local } => without_facts(
                "rehome",
                format!("attempt {attempt} to move {local} of pool memory to local memory of the host"),
            ),
            Self::RehomeFailed { attempt, why } => {
                without_facts("rehome-failed", format!("attempt {attempt}: {why}"))
            }
            Self::Rehomed { slices } => without_facts("rehomed", describe_rehomed(slices)),
            Self::LossMeasured(loss) => without_facts("measure-loss", loss.to_string()),
            Self::RehomeCancelled { attempt } => without_facts("cancel-rehome", format!("attempt {attempt}")),
        }
    }
}

fn count(slices: &[SliceId]) -> u32 {
    u32::try_from(slices.len()).unwrap_or(u32::MAX)
}

fn describe_rehomed(slices: &[SliceId]) -> String {
    append_count("the VM uses only local memory", count(slices), "slice freed", "slices freed")
}

/// Appends the count to the reason: "maintenance (3 slices)", or "3 slices" without a reason.
fn append_count(reason: &str, count: u32, one: &str, many: &str) -> String {
    let counted = format!("{count} {}", if count == 1 { one } else { many });
    if reason.is_empty() { counted } else { format!("{reason} ({counted})") }
}

fn describe_host(host: &Name, fits: &Result<(), String>) -> String {
    match fits {
        Ok(()) => format!("host {host}: fits"),
        Err(why) => format!("host {host}: {why}"),
    }
}

fn describe_reservation(
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
            "{reservation} on {host}: all slices are from the EMC with the most free slices: {}",
            from.join(", ")
        ),
        _ => format!(
            "{reservation} on {host}: no EMC has enough free slices, so the slices are from as few EMCs as possible: {}",
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
        assert_eq!(text.alternatives, ["emc e9: 3 free, another EMC has more free slices"]);
        assert!(text.why.ends_with(
            "no EMC has enough free slices, so the slices are from as few EMCs as possible: 2 of 5 free on e1, 1 of 1 free on e2"
        ));
        let one = reserved(&[(name("e1"), 2, 5)]).why;
        assert!(
            one.ends_with("all slices are from the EMC with the most free slices: 2 of 5 free on e1"),
            "{one}"
        );
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
        assert_eq!(weighed(&[]), "no tenant has a weight");
        assert_eq!(weighed(&[(name("a"), 2.0)]), "weights: a=2");
    }
}
