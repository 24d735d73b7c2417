//! `cargo xtask tidy`: checks rules of this repository that the compiler and clippy do not check.
//! Each rule is a function from the files of the repository to a list of violations. Formatting and
//! lints are checked by `lint`.

mod code_map;
mod cycles;
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

/// Violation of a rule at a line of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path of the file, relative to the root of the repository.
    pub path: String,
    /// Line number, from 1.
    pub line: usize,
    /// Description of the violation.
    pub message: String,
    /// Advice on how to fix the violation.
    pub fix: &'static str,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}\n    {}", self.path, self.line, self.message, self.fix)
    }
}

/// Function that returns the violations of one rule in all files.
type Rule = fn(&Sources) -> Vec<Violation>;

/// All rules: the statement of the rule, and its function.
const TIDY_RULES: &[(&str, Rule)] = &[
    ("each crate imports only the crates listed for it", dependencies::check_internal_imports),
    ("imports between modules have no cycles", cycles::check_cycles),
    ("pure crates import only listed external crates", dependencies::check_external_imports),
    ("pure crates must not use clocks, files, threads or the environment", pure::check_impure_paths),
    ("pure crates forbid unsafe code and use the shared clippy configuration", pure::check_purity_guards),
    ("unsafe code is only in the listed files", unsafety::check_unsafe_code),
    ("the first line of each file describes the file", headers::check_first_lines),
    ("functions and files do not exceed their maximum length", size::check_lengths),
    ("every constant in limits.rs is used", limits::check_limits_are_used),
    ("docs/metrics.md lists every metric", metrics::check_metrics_are_documented),
    ("every message, enum and service in proto files has a comment", protos::check_protos_are_documented),
    ("no test has the attribute ignore or should_panic", test_attributes::check_attributes),
    ("names of files and folders are not generic", names::check_names),
    (
        "no file contains markers of unfinished work or machine-specific paths",
        forbidden_words::check_forbidden_words,
    ),
    ("relative links between pages have a target", links::check_links),
    ("the code map in ARCHITECTURE.md lists every folder", code_map::check_code_map),
];

/// Checks all rules and prints their violations.
///
/// # Errors
/// Returns an error if the repository cannot be read or a rule is violated.
pub fn run() -> Result<(), Failure> {
    let sources = Sources::read(&root())?;
    let violations: usize =
        TIDY_RULES.iter().map(|(statement, rule)| print_violations(statement, rule(&sources))).sum();
    if violations > 0 { Err(Failure::RulesViolated(violations)) } else { Ok(()) }
}

fn print_violations(statement: &str, mut violations: Vec<Violation>) -> usize {
    violations.sort();
    println!("{} {statement}", if violations.is_empty() { "ok    " } else { "FAILED" });
    violations.iter().for_each(|violation| println!("  {violation}"));
    violations.len()
}
