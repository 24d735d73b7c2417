//! `cargo xtask test`: builds all programs and tests, runs all tests, and prints a summary.

use std::{collections::BTreeSet, fmt, fs, path::Path, process::Command, time::Instant};

use crate::{
    artifacts,
    demo::BIN_DIR_ENV,
    etcd,
    failure::Failure,
    libvirt, ns3, redis,
    repository::{cargo, root},
    step::{run_step, run_step_with_output},
    valgrind,
};

/// Options of `test`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Run the simulation tests with fewer seeds
    #[arg(long)]
    quick: bool,
}

/// Environment variable with the number of seeds of the simulation tests.
const SEEDS_ENV: &str = "TARN_SEEDS";
/// Environment variable with the path of a file. Tests append a line for each part that they skip
/// on this machine.
const SKIPPED_ENV: &str = "TARN_LEFT_OUT";
/// Number of simulation seeds with `--quick`.
const QUICK_SEEDS: &str = "50";

/// Builds all programs and tests, and runs all tests, even after a failure.
///
/// # Errors
/// Returns an error if the build or a test fails, or if a test is ignored.
pub fn run(args: &Args) -> Result<(), Failure> {
    let start = Instant::now();
    let (artifacts, libvirt) = (artifacts::ensure_downloaded()?, libvirt::ensure_downloaded()?);
    let etcd = etcd::ensure_downloaded()?;
    let (redis, valgrind) = (redis::ensure_downloaded()?, valgrind::ensure_downloaded()?);
    ns3::ensure_driver()?; // tests of the network model run xtask, which uses it
    // System tests start programs of other packages, which `cargo test` does not build. Programs
    // and tests are built together so that they share the built dependencies.
    let programs_and_tests = ["build", "--workspace", "--lib", "--bins", "--tests"];
    run_step("build programs and tests", &mut cargo(&programs_and_tests))?;
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    tests
        .env(emulated_host::ARTIFACTS_ENV, artifacts)
        .env(libvirt::FOLDER_ENV, libvirt)
        .env(redis::FOLDER_ENV, redis)
        .env(etcd::FOLDER_ENV, etcd)
        .env(valgrind::FOLDER_ENV, valgrind);
    if let Some(programs) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        tests.env(BIN_DIR_ENV, programs); // the programs are in the same folder as xtask
    }
    if args.quick {
        tests.env(SEEDS_ENV, QUICK_SEEDS);
    }
    let skipped = root().join("target/left-out");
    let _ = fs::remove_file(&skipped); // the file may exist from a previous run
    tests.env(SKIPPED_ENV, &skipped);
    let mut tally = TestTally::default();
    let mut run = |title: &str, command: &mut Command| {
        run_step_with_output(title, command, |line| {
            println!("{line}");
            tally.add_line(line);
        })
    };
    let result = run("run tests", &mut tests);
    let models = run("run models of concurrent use", &mut models());
    for part in fs::read_to_string(&skipped).unwrap_or_default().lines().collect::<BTreeSet<_>>() {
        println!("skipped: {part}");
    }
    println!("\n{tally} in {:.0} s", start.elapsed().as_secs_f64());
    result.and(models).and_then(|()| tally.check())
}

/// Returns the command that runs the models of soft memory with Shuttle instead of threads of the system. They have
/// their own folder, because the option of the compiler applies to all crates.
fn models() -> Command {
    let folder = root().join("target/shuttle");
    let mut models = cargo(&["test", "--package", "soft", "--test", "model", "--target-dir"]);
    models.arg(folder).env("RUSTFLAGS", "--cfg=shuttle");
    models
}

/// Sum of the results of all test programs, parsed from their output.
#[derive(Debug, Default, PartialEq, Eq)]
struct TestTally {
    programs: u64,
    passed: u64,
    failed: Vec<String>,
    ignored: u64,
}

impl TestTally {
    /// Parses one output line of a test program: a failed test, or the result of the program.
    fn add_line(&mut self, line: &str) {
        if let Some(test) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed.push(test.to_owned());
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.programs += 1;
            self.passed += number_before(result, "passed");
            self.ignored += number_before(result, "ignored");
        }
    }

    /// Checks that at least one test ran and none was ignored.
    fn check(&self) -> Result<(), Failure> {
        match self {
            Self { ignored: 1.., .. } => Err(Failure::BadResult("a test is ignored (#[ignore])".to_owned())),
            Self { passed: 0, .. } => Err(Failure::BadResult("no test ran".to_owned())),
            Self { .. } => Ok(()),
        }
    }
}

impl fmt::Display for TestTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for test in &self.failed {
            writeln!(f, "failed: {test}")?;
        }
        let Self { programs, passed, failed, ignored } = self;
        write!(
            f,
            "{passed} tests passed, {} failed, {ignored} ignored, in {programs} programs,",
            failed.len()
        )
    }
}

/// Returns the number before the word `part` in a result such as `ok. 3 passed; 0 failed; ...`.
fn number_before(result: &str, part: &str) -> u64 {
    let words: Vec<&str> = result.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == part).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(lines: &[&str]) -> TestTally {
        let mut tally = TestTally::default();
        lines.iter().for_each(|line| tally.add_line(line));
        tally
    }

    #[test]
    fn results_of_all_programs_are_summed() {
        let sum = tally(&[
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test a::b ... FAILED",
            "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!(sum, TestTally { programs: 2, passed: 7, failed: vec!["a::b".to_owned()], ignored: 0 });
    }

    #[test]
    fn ignored_test_is_a_failure() {
        let sum = tally(&["test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured"]);
        assert!(sum.check().is_err());
    }

    #[test]
    fn run_without_tests_is_a_failure() {
        assert!(tally(&[]).check().is_err());
    }
}
