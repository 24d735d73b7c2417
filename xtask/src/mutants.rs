//! `cargo xtask mutants`: mutation testing of the crate `pool` with cargo-mutants, which is
//! installed into `target/tools` and configured in `.cargo/mutants.toml`. The task fails if too
//! many mutants survive.

use std::{collections::BTreeMap, fmt, fs, path::Path, process::Command};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Deserialize;

use crate::{failure::Failure, repository::root, step::step, tools};

/// Version of cargo-mutants.
const VERSION: &str = "27.1.0";
/// The task fails from this share of survivors among viable mutants on, in percent.
const SURVIVORS_MAX_PERCENT: f64 = 5.0;
/// Cases of a property test, where the default is 256: the tests run once for every mutant.
const PROPTEST_CASES: &str = "32";
/// Makes property tests try the same cases in every run, so that runs can be compared.
const PROPTEST_RNG_SEED: &str = "1";
/// Address space of each process: a mutant with unbounded allocation fails instead of exhausting
/// the machine.
const ADDRESS_SPACE_MAX: u64 = 16 << 30;
/// Exit codes of cargo-mutants after a complete run: every mutant caught, some missed, some timed
/// out.
const COMPLETE: [i32; 3] = [0, 2, 3];

/// Selection of mutants, and limits.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Only files that match, such as '**/slice.rs'; may be repeated
    #[arg(long, value_name = "GLOB")]
    file: Vec<String>,
    /// Only one part of the mutants, such as 0/4
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,
    /// Mutants tested at the same time
    #[arg(long, default_value_t = 1)]
    jobs: u32,
    /// Seconds after which the tests of a mutant are stopped; a mutant that is stopped counts as
    /// caught
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u32>,
}

/// Tests every mutant and prints the survivors.
///
/// # Errors
/// cargo-mutants cannot be installed or does not complete, or too many mutants survive.
pub fn run(args: &Args) -> Result<(), Failure> {
    let tool = tools::installed("cargo-mutants", VERSION)?;
    let results = root().join("target/mutants");
    fs::create_dir_all(&results).map_err(Failure::file("create", &results))?;
    limit_address_space();
    match step("mutants", &mut command(args, &tool, &results)) {
        Err(Failure::Step { status, .. }) if status.code().is_some_and(|code| COMPLETE.contains(&code)) => {}
        ended => ended?,
    }
    let path = results.join("mutants.out/outcomes.json");
    let text = fs::read_to_string(&path).map_err(Failure::file("read", &path))?;
    let tally = Tally::parse(&text)?;
    print!("\n{tally}");
    tally.check()
}

fn command(args: &Args, tool: &Path, results: &Path) -> Command {
    let mut command = Command::new(tool);
    command.args(["mutants", "--package", "pool", "--no-shuffle", "--colors", "never", "--output"]);
    command.arg(results).arg("--jobs").arg(args.jobs.to_string()).current_dir(root());
    command.args(args.file.iter().flat_map(|glob| ["--file", glob]));
    command.args(args.shard.iter().flat_map(|shard| ["--shard", shard]));
    command.args(args.timeout.iter().flat_map(|seconds| ["--timeout".to_owned(), seconds.to_string()]));
    if args.jobs == 1 {
        command.env("CARGO_TARGET_DIR", results.join("build")); // dependencies are built once, not in every run
    }
    command.env("PROPTEST_CASES", PROPTEST_CASES).env("PROPTEST_RNG_SEED", PROPTEST_RNG_SEED);
    // Failures are expected: they are neither shrunk nor recorded beside the sources.
    command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
    command
}

/// Limits the address space of this process and its children. A lower limit is kept.
fn limit_address_space() {
    let Rlimit { current, maximum } = getrlimit(Resource::As);
    let current = Some(current.map_or(ADDRESS_SPACE_MAX, |set| set.min(ADDRESS_SPACE_MAX)));
    let _ = setrlimit(Resource::As, Rlimit { current, maximum }); // the limit is a precaution
}

/// Part of the results of cargo-mutants.
#[derive(Debug, Deserialize)]
struct Results {
    outcomes: Vec<Outcome>,
}

#[derive(Debug, Deserialize)]
struct Outcome {
    scenario: Scenario,
    summary: Summary,
}

#[derive(Debug, Deserialize)]
enum Scenario {
    Baseline,
    Mutant { name: String, file: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Summary {
    Success,
    CaughtMutant,
    MissedMutant,
    Unviable,
    Failure,
    Timeout,
}

/// Mutants of one file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    caught: u64,
    timed_out: u64,
    survived: u64,
    /// Mutants that do not compile.
    unviable: u64,
}

impl Counts {
    fn viable(&self) -> u64 {
        self.caught + self.timed_out + self.survived
    }
}

/// Results by file, and the names of the survivors.
#[derive(Debug, Default)]
struct Tally {
    files: BTreeMap<String, Counts>,
    survivors: Vec<String>,
}

impl Tally {
    fn parse(text: &str) -> Result<Self, Failure> {
        let results: Results = serde_json::from_str(text).map_err(|reason| Failure::UnexpectedOutput {
            program: "cargo-mutants".to_owned(),
            reason: reason.to_string(),
        })?;
        let mut tally = Self::default();
        results.outcomes.into_iter().for_each(|outcome| tally.add(outcome));
        Ok(tally)
    }

    fn add(&mut self, Outcome { scenario, summary }: Outcome) {
        let Scenario::Mutant { name, file } = scenario else { return };
        let counts = self.files.entry(file).or_default();
        match summary {
            Summary::CaughtMutant => counts.caught += 1,
            Summary::Timeout => counts.timed_out += 1,
            Summary::Unviable => counts.unviable += 1,
            Summary::MissedMutant | Summary::Success | Summary::Failure => {
                counts.survived += 1;
                self.survivors.push(name);
            }
        }
    }

    fn viable(&self) -> u64 {
        self.files.values().map(Counts::viable).sum()
    }

    #[expect(clippy::cast_precision_loss, reason = "there are thousands of mutants, not 2^53")]
    fn survivors_percent(&self) -> f64 {
        100.0 * self.survivors.len() as f64 / self.viable().max(1) as f64
    }

    fn check(&self) -> Result<(), Failure> {
        if self.viable() == 0 {
            return Err(Failure::Result("no mutant was tested".to_owned()));
        }
        let percent = self.survivors_percent();
        if percent < SURVIVORS_MAX_PERCENT {
            return Ok(());
        }
        let limit = SURVIVORS_MAX_PERCENT;
        Err(Failure::Result(format!("{percent:.1} % of the mutants survive, the limit is {limit} %")))
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "viable  caught  timed out  survived  file")?;
        for (file, counts) in &self.files {
            let Counts { caught, timed_out, survived, .. } = counts;
            writeln!(f, "{:>6}  {caught:>6}  {timed_out:>9}  {survived:>8}  {file}", counts.viable())?;
        }
        for survivor in &self.survivors {
            writeln!(f, "survived: {survivor}")?;
        }
        let (survived, viable) = (self.survivors.len(), self.viable());
        writeln!(f, "{survived} of {viable} viable mutants survived ({:.1} %)", self.survivors_percent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(outcomes: &[(&str, &str)]) -> Tally {
        let mutant = |(file, summary): &(&str, &str)| {
            let name = format!("{file}:1:2: replace a with b");
            let span = r#"{"start": {"line": 1, "column": 2}}"#;
            format!(
                r#"{{"scenario": {{"Mutant": {{"name": "{name}", "file": "{file}", "span": {span}}}}}, "summary": "{summary}"}}"#
            )
        };
        let baseline = r#"{"scenario": "Baseline", "summary": "Success", "phase_results": []}"#.to_owned();
        let all: Vec<_> = std::iter::once(baseline).chain(outcomes.iter().map(mutant)).collect();
        Tally::parse(&format!(r#"{{"outcomes": [{}], "missed": 1}}"#, all.join(","))).unwrap()
    }

    #[test]
    fn outcomes_are_counted_by_file_and_survivors_listed() {
        let tally = tally(&[
            ("a.rs", "CaughtMutant"),
            ("a.rs", "MissedMutant"),
            ("b.rs", "Unviable"),
            ("b.rs", "Timeout"),
        ]);
        assert_eq!(tally.survivors, ["a.rs:1:2: replace a with b"]);
        assert_eq!(tally.files["a.rs"], Counts { caught: 1, survived: 1, ..Counts::default() });
        assert_eq!(tally.files["b.rs"], Counts { timed_out: 1, unviable: 1, ..Counts::default() });
        assert!(tally.to_string().ends_with("1 of 3 viable mutants survived (33.3 %)\n"), "{tally}");
    }

    #[test]
    fn survivor_share_of_five_percent_fails() {
        let with = |caught: usize| {
            let mut outcomes = vec![("a.rs", "CaughtMutant"); caught];
            outcomes.push(("a.rs", "MissedMutant"));
            tally(&outcomes).check()
        };
        assert!(with(20).is_ok(), "1 of 21");
        assert!(with(19).is_err(), "1 of 20");
    }

    #[test]
    fn run_without_viable_mutants_fails() {
        assert!(tally(&[("a.rs", "Unviable")]).check().is_err());
    }
}
