//! `cargo xtask tidy`: the house rules that no compiler and no clippy knows, each a function from the repository's files
//! to complaints, each with a test in which it bites. Formatting and lints are `lint`'s.

mod code_map;
mod dependencies;
mod forbidden_words;
mod headers;
mod limits;
mod links;
mod metrics;
mod names;
mod protos;
mod pure;
mod rust;
mod size;
mod sources;
mod test_attributes;
mod unsafety;

use std::fmt;

use sources::Sources;

use crate::{failure::Failure, repository::root};

/// One place where a house rule is broken.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Complaint {
    /// The file, from the root of the repository.
    pub path: String,
    /// Its line, from 1.
    pub line: usize,
    /// Violation.
    pub what: String,
    /// How to fix it.
    pub mend: &'static str,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}\n    {}", self.path, self.line, self.what, self.mend)
    }
}

/// Looks at all files and answers with every place where it is broken.
type Rule = fn(&Sources) -> Vec<Complaint>;

/// Every rule, by the sentence it keeps true.
const RULES: &[(&str, Rule)] = &[
    ("each room imports only what the map allows", dependencies::imports),
    ("pure rooms import only what cannot touch the world", dependencies::externals),
    ("pure rooms touch no clock, file, thread or environment", pure::paths),
    ("pure rooms forbid unsafe code and are watched by clippy", pure::guards),
    ("unsafe code is where the map says", unsafety::places),
    ("each file first says what it is", headers::first_lines),
    ("functions and files stay small", size::lengths),
    ("every limit limits something", limits::used),
    ("docs/metrics.md lists every metric", metrics::documented),
    ("every message on the wire is explained", protos::documented),
    ("no test is left out or succeeds by failing", test_attributes::all),
    ("files have names of our domain", names::files),
    ("nothing is left for later, nothing points outside", forbidden_words::none_used),
    ("links between pages lead somewhere", links::resolve),
    ("the code map in ARCHITECTURE.md lists every folder", code_map::matches),
];

/// Keeps every rule, or prints each place where one is broken.
///
/// # Errors
/// The repository cannot be read, or a rule is broken.
pub fn run() -> Result<(), Failure> {
    let sources = Sources::read(&root())?;
    let broken: usize = RULES.iter().map(|(sentence, rule)| keep(sentence, rule(&sources))).sum();
    if broken > 0 { Err(Failure::Untidy(broken)) } else { Ok(()) }
}

fn keep(sentence: &str, mut complaints: Vec<Complaint>) -> usize {
    complaints.sort();
    println!("{} {sentence}", if complaints.is_empty() { "ok    " } else { "BROKEN" });
    complaints.iter().for_each(|complaint| println!("  {complaint}"));
    complaints.len()
}
