//! `cargo xtask test`: builds everything, runs every test, and prints a summary.

use std::{collections::BTreeSet, fmt, fs, path::Path, time::Instant};

use crate::{
    bed,
    demo::BIN_DIR,
    failure::Failure,
    libvirt,
    repository::{cargo, root},
    step::{step, step_read},
};

/// How thorough.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Fewer seeds of the simulation, for a look in between
    #[arg(long)]
    quick: bool,
}

/// Read by the simulation tests: how many seeds they run. Unset, they run their thousands.
const SEEDS: &str = "TARN_SEEDS";
/// Names a file to tests that leave something out on this machine: they add a line.
const LEFT_OUT: &str = "TARN_LEFT_OUT";
/// Seeds of a quick run.
const QUICK_SEEDS: &str = "50";

/// Builds and runs them all, even when one fails.
///
/// # Errors
/// Something does not build, a test fails, or one was left out.
pub fn run(args: &Args) -> Result<(), Failure> {
    let begun = Instant::now();
    let (bed, libvirt) = (bed::ensure()?, libvirt::ensure()?);
    // System tests start programs, which `cargo test` alone does not build; built together, they
    // share dependencies.
    let programs_and_tests = ["build", "--workspace", "--lib", "--bins", "--tests"];
    step("build programs and tests", &mut cargo(&programs_and_tests))?;
    let mut tests = cargo(&["test", "--workspace", "--no-fail-fast"]);
    tests.env(emulated_host::ARTIFACTS_ENV, bed).env(libvirt::LIBVIRT, libvirt);
    if let Some(programs) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        tests.env(BIN_DIR, programs); // they were built beside this one
    }
    if args.quick {
        tests.env(SEEDS, QUICK_SEEDS);
    }
    let left_out = root().join("target/left-out");
    let _ = fs::remove_file(&left_out); // of the last run, if there was one
    tests.env(LEFT_OUT, &left_out);
    let mut tally = Tally::default();
    let ran = step_read("tests", &mut tests, |line| {
        println!("{line}");
        tally.see(line);
    });
    for what in fs::read_to_string(&left_out).unwrap_or_default().lines().collect::<BTreeSet<_>>() {
        println!("left out: {what}");
    }
    println!("\n{tally} in {:.0} s", begun.elapsed().as_secs_f64());
    ran.and_then(|()| tally.verdict())
}

/// Sum of the results of all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    programs: u64,
    passed: u64,
    failed: Vec<String>,
    left_out: u64,
}

impl Tally {
    /// Processes one line of a test program: a failed test, or the result of the program.
    fn see(&mut self, line: &str) {
        if let Some(test) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed.push(test.to_owned());
        } else if let Some(result) = line.strip_prefix("test result: ") {
            self.programs += 1;
            self.passed += count(result, "passed");
            self.left_out += count(result, "ignored");
        }
    }

    /// Every test ran and passed, and there were some.
    fn verdict(&self) -> Result<(), Failure> {
        match self {
            Self { left_out: 1.., .. } => Err(Failure::Result("a test was left out (#[ignore])".to_owned())),
            Self { passed: 0, .. } => Err(Failure::Result("not one test ran".to_owned())),
            Self { .. } => Ok(()),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for test in &self.failed {
            writeln!(f, "failed: {test}")?;
        }
        let Self { programs, passed, failed, left_out } = self;
        write!(
            f,
            "{passed} tests passed, {} failed, {left_out} left out, in {programs} programs,",
            failed.len()
        )
    }
}

/// The number before a word in `ok. 3 passed; 0 failed; 1 ignored; ...`.
fn count(result: &str, what: &str) -> u64 {
    let words: Vec<&str> = result.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    words.windows(2).find(|pair| pair[1] == what).and_then(|pair| pair[0].parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(lines: &[&str]) -> Tally {
        let mut tally = Tally::default();
        lines.iter().for_each(|line| tally.see(line));
        tally
    }

    #[test]
    fn results_of_all_programs_are_summed() {
        let seen = tally(&[
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "test a::b ... FAILED",
            "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out",
        ]);
        assert_eq!(seen, Tally { programs: 2, passed: 7, failed: vec!["a::b".to_owned()], left_out: 0 });
    }

    #[test]
    fn a_test_left_out_is_a_failure() {
        let seen = tally(&["test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured"]);
        assert!(seen.verdict().is_err());
    }

    #[test]
    fn no_test_at_all_is_a_failure() {
        assert!(tally(&[]).verdict().is_err());
    }
}
