//! `cargo xtask tidy`: rules of this repository that neither the compiler nor clippy checks. Each is a
//! function from the repository's files to violations, with a test. Formatting and lints are in `lint`.

mod circles;
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

/// Violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path of the file, from the root of the repository.
    pub path: String,
    /// Line, from 1.
    pub line: usize,
    /// Violation.
    pub message: String,
    /// How to fix it.
    pub fix: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}\n    {}", self.path, self.line, self.message, self.fix)
    }
}

/// Returns the violations in all files.
type Rule = fn(&Sources) -> Vec<Violation>;

/// All rules, with what they state.
const RULES: &[(&str, Rule)] = &[
    ("each crate imports only the crates it may use", dependencies::imports),
    ("modules import each other in one direction", circles::imports),
    ("pure crates import only harmless dependencies", dependencies::externals),
    ("pure crates use no clock, file, thread or environment", pure::paths),
    ("pure crates forbid unsafe code and have clippy's rules for them", pure::guards),
    ("unsafe code is only in the listed files", unsafety::places),
    ("each file begins with its purpose", headers::first_lines),
    ("functions and files stay small", size::lengths),
    ("every limit is used", limits::used),
    ("docs/metrics.md lists every metric", metrics::documented),
    ("every wire message and field has a comment", protos::documented),
    ("no test is ignored or passes by any panic", test_attributes::all),
    ("file names are terms of the domain", names::files),
    ("no file has unfinished work or paths of one machine", forbidden_words::none_used),
    ("links between pages resolve", links::resolve),
    ("the code map in ARCHITECTURE.md lists every folder", code_map::matches),
];

/// Checks every rule and prints violations.
///
/// # Errors
/// The repository cannot be read, or a rule is violated.
pub fn run() -> Result<(), Failure> {
    let sources = Sources::read(&root())?;
    let violations: usize = RULES.iter().map(|(statement, rule)| report(statement, rule(&sources))).sum();
    if violations > 0 { Err(Failure::RulesViolated(violations)) } else { Ok(()) }
}

fn report(statement: &str, mut violations: Vec<Violation>) -> usize {
    violations.sort();
    println!("{} {statement}", if violations.is_empty() { "ok    " } else { "FAILED" });
    violations.iter().for_each(|violation| println!("  {violation}"));
    violations.len()
}
