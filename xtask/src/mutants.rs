//! `cargo xtask mutants`: mutation testing of the crate `pool` with cargo-mutants. cargo-mutants is
//! installed into `target/tools` and configured in `.cargo/mutants.toml`. A mutant survives if no
//! test detects it. The task fails if too many mutants survive.

use std::{collections::BTreeMap, fmt, fs, path::Path, process::Command};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Deserialize;

use crate::{failure::Failure, repository::root, step::run_step, tools};

/// Version of cargo-mutants to install.
const CARGO_MUTANTS_VERSION: &str = "27.1.0";
/// Percentage of surviving mutants among viable mutants at which the task fails.
const SURVIVORS_MAX_PERCENT: f64 = 5.0;
/// Number of cases of a property test. It is lower than the default of 256, because all tests run
/// once per mutant.
const PROPTEST_CASES: &str = "32";
/// Seed of the property tests. It is fixed so that results of different runs can be compared.
const PROPTEST_RNG_SEED: &str = "1";
/// Limit on the address space of each process, in bytes. A mutant with unbounded allocation fails
/// before it exhausts the memory of the machine.
const ADDRESS_SPACE_MAX: u64 = 16 << 30;
/// Exit codes of cargo-mutants after a complete run: all mutants caught (0), some missed (2), some
/// timed out (3).
const COMPLETE_EXIT_CODES: [i32; 3] = [0, 2, 3];

/// Options of `mutants`: selection of mutants, and limits.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Test only mutants in matching files, such as '**/slice.rs'; may be repeated
    #[arg(long, value_name = "GLOB")]
    file: Vec<String>,
    /// Test only part K of N parts of the mutants, such as 0/4
    #[arg(long, value_name = "K/N")]
    shard: Option<String>,
    /// Number of mutants tested at the same time
    #[arg(long, default_value_t = 1)]
    jobs: u32,
    /// Time limit for the tests of one mutant, in seconds; a mutant that times out counts as caught
    #[arg(long, value_name = "SECONDS")]
    timeout: Option<u32>,
}

/// Tests all selected mutants and prints the survivors.
///
/// # Errors
/// Returns an error if cargo-mutants cannot be installed or does not complete, or if too many
/// mutants survive.
pub fn run(args: &Args) -> Result<(), Failure> {
    let tool = tools::ensure_installed("cargo-mutants", CARGO_MUTANTS_VERSION)?;
    let results = root().join("target/mutants");
    fs::create_dir_all(&results).map_err(Failure::file_error("create", &results))?;
    limit_address_space();
    match run_step("test mutants", &mut command(args, &tool, &results)) {
        Err(Failure::Step { status, .. })
            if status.code().is_some_and(|code| COMPLETE_EXIT_CODES.contains(&code)) => {}
        ended => ended?,
    }
    let path = results.join("mutants.out/outcomes.json");
    let text = fs::read_to_string(&path).map_err(Failure::file_error("read", &path))?;
    let tally = MutantTally::parse(&text)?;
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
        // With a fixed target folder, dependencies are not built again in the next run.
        command.env("CARGO_TARGET_DIR", results.join("build"));
    }
    command.env("PROPTEST_CASES", PROPTEST_CASES).env("PROPTEST_RNG_SEED", PROPTEST_RNG_SEED);
    // Tests of mutants are expected to fail, so failing cases are neither shrunk nor stored.
    command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true");
    command
}

/// Limits the address space of this process and its children, unless a lower limit is already set.
fn limit_address_space() {
    let Rlimit { current, maximum } = getrlimit(Resource::As);
    let current = Some(current.map_or(ADDRESS_SPACE_MAX, |set| set.min(ADDRESS_SPACE_MAX)));
    // The limit is a precaution: the task also works without it.
    let _ = setrlimit(Resource::As, Rlimit { current, maximum });
}

/// Results file of cargo-mutants, with the fields that are used here.
#[derive(Debug, Deserialize)]
struct Results {
    outcomes: Vec<MutantOutcome>,
}

#[derive(Debug, Deserialize)]
struct MutantOutcome {
    scenario: MutantScenario,
    summary: MutantSummary,
}

#[derive(Debug, Deserialize)]
enum MutantScenario {
    Baseline,
    Mutant { name: String, file: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum MutantSummary {
    Success,
    CaughtMutant,
    MissedMutant,
    Unviable,
    Failure,
    Timeout,
}

/// Numbers of mutants in one file, by outcome.
#[derive(Debug, Default, PartialEq, Eq)]
struct MutantCounts {
    caught: u64,
    timed_out: u64,
    survived: u64,
    /// Number of mutants that do not compile.
    unviable: u64,
}

impl MutantCounts {
    fn viable_count(&self) -> u64 {
        self.caught + self.timed_out + self.survived
    }
}

/// Numbers of mutants by file, and the names of the survivors.
#[derive(Debug, Default)]
struct MutantTally {
    files: BTreeMap<String, MutantCounts>,
    survivors: Vec<String>,
}

impl MutantTally {
    fn parse(text: &str) -> Result<Self, Failure> {
        let results: Results = serde_json::from_str(text).map_err(|reason| Failure::UnexpectedOutput {
            program: "cargo-mutants".to_owned(),
            reason: reason.to_string(),
        })?;
        let mut tally = Self::default();
        results.outcomes.into_iter().for_each(|outcome| tally.add(outcome));
        Ok(tally)
    }

    fn add(&mut self, MutantOutcome { scenario, summary }: MutantOutcome) {
        let MutantScenario::Mutant { name, file } = scenario else { return };
        let counts = self.files.entry(file).or_default();
        match summary {
            MutantSummary::CaughtMutant => counts.caught += 1,
            MutantSummary::Timeout => counts.timed_out += 1,
            MutantSummary::Unviable => counts.unviable += 1,
            MutantSummary::MissedMutant | MutantSummary::Success | MutantSummary::Failure => {
                counts.survived += 1;
                self.survivors.push(name);
            }
        }
    }

    fn viable_count(&self) -> u64 {
        self.files.values().map(MutantCounts::viable_count).sum()
    }

    #[expect(clippy::cast_precision_loss, reason = "the number of mutants is far below 2^53")]
    fn survivors_percent(&self) -> f64 {
        100.0 * self.survivors.len() as f64 / self.viable_count().max(1) as f64
    }

    fn check(&self) -> Result<(), Failure> {
        if self.viable_count() == 0 {
            return Err(Failure::BadResult("no mutant was tested".to_owned()));
        }
        let percent = self.survivors_percent();
        if percent < SURVIVORS_MAX_PERCENT {
            return Ok(());
        }
        let limit = SURVIVORS_MAX_PERCENT;
        Err(Failure::BadResult(format!("{percent:.1} % of the mutants survive: must be below {limit} %")))
    }
}

impl fmt::Display for MutantTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "viable  caught  timed out  survived  file")?;
        for (file, counts) in &self.files {
            let MutantCounts { caught, timed_out, survived, .. } = counts;
            writeln!(f, "{:>6}  {caught:>6}  {timed_out:>9}  {survived:>8}  {file}", counts.viable_count())?;
        }
        for survivor in &self.survivors {
            writeln!(f, "survived: {survivor}")?;
        }
        let (survived, viable) = (self.survivors.len(), self.viable_count());
        writeln!(f, "{survived} of {viable} viable mutants survived ({:.1} %)", self.survivors_percent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(outcomes: &[(&str, &str)]) -> MutantTally {
        let mutant = |(file, summary): &(&str, &str)| {
            let name = format!("{file}:1:2: replace a with b");
            let span = r#"{"start": {"line": 1, "column": 2}}"#;
            format!(
                r#"{{"scenario": {{"Mutant": {{"name": "{name}", "file": "{file}", "span": {span}}}}}, "summary": "{summary}"}}"#
            )
        };
        let baseline = r#"{"scenario": "Baseline", "summary": "Success", "phase_results": []}"#.to_owned();
        let all: Vec<_> = std::iter::once(baseline).chain(outcomes.iter().map(mutant)).collect();
        MutantTally::parse(&format!(r#"{{"outcomes": [{}], "missed": 1}}"#, all.join(","))).unwrap()
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
        assert_eq!(tally.files["a.rs"], MutantCounts { caught: 1, survived: 1, ..MutantCounts::default() });
        assert_eq!(
            tally.files["b.rs"],
            MutantCounts { timed_out: 1, unviable: 1, ..MutantCounts::default() }
        );
        assert!(tally.to_string().ends_with("1 of 3 viable mutants survived (33.3 %)\n"), "{tally}");
    }

    #[test]
    fn survivor_fraction_of_five_percent_fails() {
        let check_with_caught = |caught: usize| {
            let mut outcomes = vec![("a.rs", "CaughtMutant"); caught];
            outcomes.push(("a.rs", "MissedMutant"));
            tally(&outcomes).check()
        };
        assert!(check_with_caught(20).is_ok(), "1 survivor of 21 mutants is below the limit");
        assert!(check_with_caught(19).is_err(), "1 survivor of 20 mutants reaches the limit");
    }

    #[test]
    fn run_without_viable_mutants_fails() {
        assert!(tally(&[("a.rs", "Unviable")]).check().is_err());
    }
}
