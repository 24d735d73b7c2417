//! Every decision with what it was made from, typed and small; it becomes words only when somebody asks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use units::{Bytes, Name, ReservationId, SliceId, UnixMs};

/// One decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// When, as people read time.
    pub at: UnixMs,
    /// Who asked.
    pub actor: Actor,
    /// What it is about.
    pub subject: Subject,
    /// What was decided, from what.
    pub what: What,
}

/// Who asked for a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Actor {
    /// A scheduler or an operator.
    Client(Name),
    /// A host's agent.
    Agent(Name),
    /// Nobody: a deadline, a device, a restart.
    Manager,
}

/// What a decision is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Subject {
    /// A VM and its memory.
    Vm(Name),
    /// A host.
    Host(Name),
    /// A pool device.
    Emc(Name),
    /// A slice.
    Slice(SliceId),
    /// The rack itself.
    Rack,
}

/// What was decided, from what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum What {
    /// How a VM's memory should be split.
    Planned {
        /// Policy or model, with its version.
        model: String,
        /// What was asked.
        memory: Bytes,
        /// The local part.
        local: Bytes,
        /// The pool's part.
        pool: Bytes,
        /// Thresholds and inputs by name.
        facts: Vec<(String, String)>,
        /// Hosts, and why not those that do not fit.
        hosts: Vec<(Name, Result<(), String>)>,
    },
    /// A host became owner of slices for a VM.
    Reserved {
        /// As which reservation.
        reservation: ReservationId,
        /// Which host.
        host: Name,
        /// Slices taken, and free slices before, by EMC.
        taken: Vec<(Name, u32, u32)>,
        /// The other EMCs within reach: free slices, and why not.
        others: Vec<(Name, u32, NotChosen)>,
        /// Local memory taken.
        local: Bytes,
        /// Cores taken.
        cores: u32,
    },
    /// The VM was started.
    Committed,
    /// The reservation ended.
    Ended {
        /// Who or what ended it.
        why: String,
    },
    /// A reservation cannot become ready or lost a slice.
    Broken {
        /// What happened.
        why: String,
    },
    /// New reservations are no longer accepted.
    Cordoned {
        /// In the caller's words.
        reason: String,
    },
    /// New reservations are accepted again.
    Uncordoned {
        /// In the caller's words.
        reason: String,
    },
    /// VMs are asked to move away.
    Draining {
        /// In the caller's words.
        reason: String,
        /// How many VMs were there.
        vms: u32,
    },
    /// A host is cut off its slices.
    Fencing {
        /// Why.
        reason: String,
        /// How many slices it had.
        slices: u32,
    },
    /// Every device has cut the host off.
    Fenced,
    /// A fenced host returned clean.
    Returned {
        /// What proved it.
        proof: String,
    },
    /// A slice is kept from everybody.
    Quarantined {
        /// Why.
        why: String,
    },
    /// A quarantined slice goes back into the cycle.
    Requalified {
        /// Why.
        reason: String,
    },
    /// A VM was found running on memory that a restored ledger did not know it had.
    Adopted {
        /// Its slices.
        slices: Vec<SliceId>,
    },
    /// The scheduler was asked to move the VM.
    MigrationAsked {
        /// Why.
        why: String,
    },
    /// The scheduler need not move the VM any more.
    MigrationWithdrawn,
    /// The scheduler answered a request to move the VM.
    MigrationAnswered {
        /// "accepted", "declined" or "done".
        answer: String,
        /// In the scheduler's words.
        words: String,
    },
    /// rack.toml was read.
    Configured {
        /// What changed, one sentence each.
        changes: Vec<String>,
    },
    /// A host that was being cut off had nothing left. Earlier versions recorded it; now such a host returns.
    LetGo {
        /// What proved it.
        proof: String,
    },
    /// Another model of a kind serves, or none.
    ModelServes {
        /// Which kind.
        kind: String,
        /// Its version.
        version: Option<u32>,
        /// The one before.
        before: Option<u32>,
    },
    /// Tenants of a host have other weights.
    Weighed {
        /// All that are set there now.
        weights: Vec<(Name, f64)>,
    },
}

/// Why slices were not taken from an EMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotChosen {
    /// It has fewer free slices than the VM needs, and another has them all.
    TooSmall,
    /// Another has more free slices.
    Fuller,
    /// It takes no new reservations.
    Cordoned,
    /// Its driver reports errors.
    Failed,
    /// Its VMs are asked to move away.
    Draining,
    /// The host does not see it.
    NotSeen,
    /// It has not confirmed the latest fence of the host.
    FenceUnconfirmed,
    /// Another has as many free slices, and was chosen.
    Tied,
}

impl std::fmt::Display for NotChosen {
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

/// A decision in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// One word.
    pub action: &'static str,
    /// One sentence.
    pub why: String,
    /// What decided, with its version.
    pub model: String,
    /// Inputs, thresholds and outcomes by name.
    pub facts: BTreeMap<String, String>,
    /// What else was possible, and why it was not chosen.
    pub alternatives: Vec<String>,
}

/// The rule by which slices are chosen; changes with the rule.
pub const PLACEMENT_RULE: &str = "one-emc-most-free/1";

impl What {
    /// As words.
    pub fn words(&self) -> Words {
        let say = |action, why: String| Words { action, why, ..Words::default() };
        match self {
            Self::Planned { model, memory, local, pool, facts, hosts } => Words {
                action: "plan",
                why: format!("{pool} of {memory} may come from the pool, {local} stays local"),
                model: model.clone(),
                facts: facts.iter().cloned().collect(),
                alternatives: hosts.iter().map(|(host, fits)| host_in_words(host, fits)).collect(),
            },
            Self::Reserved { reservation, host, taken, others, local, cores } => {
                reserved_in_words(*reservation, host, taken, others, *local, *cores)
            }
            Self::Committed => say("commit", "the VM was started".into()),
            Self::Ended { why } => say("end", why.clone()),
            Self::Broken { why } => say("break", why.clone()),
            Self::Cordoned { reason } => say("cordon", reason.clone()),
            Self::Uncordoned { reason } => say("uncordon", reason.clone()),
            Self::Draining { reason, vms } => {
                say("drain", with_count(reason, *vms, "VM to move", "VMs to move"))
            }
            Self::Fencing { reason, slices } => say("fence", with_count(reason, *slices, "slice", "slices")),
            Self::Fenced => say("fenced", "every device has cut the host off".into()),
            Self::LetGo { proof } => say("let-go", proof.clone()),
            Self::Returned { proof } => say("return", proof.clone()),
            Self::Quarantined { why } => say("quarantine", why.clone()),
            Self::Requalified { reason } => say("requalify", reason.clone()),
            Self::Adopted { slices } => {
                let count = u32::try_from(slices.len()).unwrap_or(u32::MAX);
                say("adopt", with_count("found running", count, "slice", "slices"))
            }
            Self::MigrationAsked { why } => say("ask-migration", why.clone()),
            Self::MigrationWithdrawn => say("withdraw-migration", "nothing there drains any more".into()),
            Self::MigrationAnswered { answer, words } if words.is_empty() => {
                say("answer-migration", answer.clone())
            }
            Self::MigrationAnswered { answer, words } => {
                say("answer-migration", format!("{answer}: {words}"))
            }
            Self::Configured { changes } => say("configure", changes.join("; ")),
            Self::ModelServes { kind, version, before } => {
                let named =
                    |version: &Option<u32>| version.map_or("none".into(), |of| format!("{kind}/{of}"));
                say("serve-model", format!("{} serves, {} did before", named(version), named(before)))
            }
            Self::Weighed { weights } if weights.is_empty() => {
                say("weigh", "no weight is set any more".into())
            }
            Self::Weighed { weights } => {
                let all: Vec<_> =
                    weights.iter().map(|(tenant, weight)| format!("{tenant}={weight}")).collect();
                say("weigh", format!("set now: {}", all.join(" ")))
            }
        }
    }
}

/// "maintenance (3 slices)", or "3 slices" where nobody gave a reason.
fn with_count(reason: &str, count: u32, one: &str, many: &str) -> String {
    let counted = format!("{count} {}", if count == 1 { one } else { many });
    if reason.is_empty() { counted } else { format!("{reason} ({counted})") }
}

fn host_in_words(host: &Name, fits: &Result<(), String>) -> String {
    match fits {
        Ok(()) => format!("host {host}: fits"),
        Err(why) => format!("host {host}: {why}"),
    }
}

fn reserved_in_words(
    reservation: ReservationId,
    host: &Name,
    taken: &[(Name, u32, u32)],
    others: &[(Name, u32, NotChosen)],
    local: Bytes,
    cores: u32,
) -> Words {
    let slices: u32 = taken.iter().map(|(_, n, _)| n).sum();
    let from: Vec<_> = taken.iter().map(|(emc, n, free)| format!("{n} of {free} free on {emc}")).collect();
    let why = match taken {
        [] => format!("{reservation} on {host} needs no slice"),
        [_] => format!(
            "{reservation} on {host}: all slices from one EMC, the one with most free: {}",
            from.join(", ")
        ),
        _ => format!(
            "{reservation} on {host}: no EMC has all slices, so the fewest that have: {}",
            from.join(", ")
        ),
    };
    let facts = [
        ("slices", slices.to_string()),
        ("local", local.to_string()),
        ("cores", cores.to_string()),
        ("host", host.to_string()),
    ];
    Words {
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

    fn reserved(taken: &[(Name, u32, u32)]) -> Words {
        let others = vec![(name("e9"), 3, NotChosen::Fuller)];
        let (reservation, host) = (ReservationId(7), name("h1"));
        let taken = taken.to_vec();
        What::Reserved { reservation, host, taken, others, local: Bytes::gib(8), cores: 2 }.words()
    }

    #[test]
    fn reservation_is_explained_by_its_rule_its_facts_and_its_alternatives() {
        let words = reserved(&[(name("e1"), 2, 5), (name("e2"), 1, 1)]);
        assert_eq!((words.action, words.model.as_str()), ("reserve", PLACEMENT_RULE));
        let facts: Vec<_> = words.facts.iter().map(|(fact, value)| format!("{fact}={value}")).collect();
        assert_eq!(facts.join(" "), "cores=2 host=h1 local=8GiB slices=3");
        assert_eq!(words.alternatives, ["emc e9: 3 free, another has more free"]);
        assert!(words.why.ends_with(
            "no EMC has all slices, so the fewest that have: 2 of 5 free on e1, 1 of 1 free on e2"
        ));
        let one = reserved(&[(name("e1"), 2, 5)]).why;
        assert!(one.ends_with("all slices from one EMC, the one with most free: 2 of 5 free on e1"), "{one}");
        assert!(reserved(&[]).why.ends_with("on h1 needs no slice"));
    }

    #[test]
    fn plan_is_explained_by_its_model_its_inputs_and_its_hosts() {
        let plan = What::Planned {
            model: "frigid/3".to_owned(),
            memory: Bytes::gib(8),
            local: Bytes::gib(6),
            pool: Bytes::gib(2),
            facts: vec![("cores".to_owned(), "4".to_owned())],
            hosts: vec![(name("h1"), Ok(())), (name("h2"), Err("it is cordoned".to_owned()))],
        };
        let words = plan.words();
        assert_eq!((words.action, words.model.as_str()), ("plan", "frigid/3"));
        assert_eq!(words.facts.get("cores").map(String::as_str), Some("4"));
        assert_eq!(words.alternatives, ["host h1: fits", "host h2: it is cordoned"]);
    }

    #[test]
    fn absent_words_and_weights_leave_no_empty_list() {
        let answer = |words: &str| {
            What::MigrationAnswered { answer: "declined".to_owned(), words: words.to_owned() }.words().why
        };
        assert_eq!(What::Committed.words().action, "commit");
        assert_eq!((answer(""), answer("busy")), ("declined".to_owned(), "declined: busy".to_owned()));
        let weighed = |weights: &[(Name, f64)]| What::Weighed { weights: weights.to_vec() }.words().why;
        assert_eq!(weighed(&[]), "no weight is set any more");
        assert_eq!(weighed(&[(name("a"), 2.0)]), "set now: a=2");
    }
}
