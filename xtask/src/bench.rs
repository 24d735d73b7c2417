//! `cargo xtask bench`: runs the benchmarks and prints all their ratios at the end. Above 1 is
//! better; `*_taken` compares a nearly full rack with a nearly empty one, and should be about 1.

use crate::{artifacts, debian, failure::Failure, lightgbm, repository::cargo, step::step_read};

/// Prefix of a line `ratio NAME VALUE`.
const RATIO_PREFIX: &str = "ratio ";

/// Options of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Programs in benches/ to run, such as `reserve_vs_etcd`; all without a name
    names: Vec<String>,
}

/// Runs benchmarks and repeats every ratio at the end.
///
/// # Errors
/// A benchmark fails, or none of all prints a ratio.
pub fn run(args: &Args) -> Result<(), Failure> {
    debian::ensure(debian::ETCD)?;
    let (artifacts, python) = (artifacts::ensure()?, lightgbm::ensure()?);
    let mut ratios = Vec::new();
    step_read(
        "benchmarks",
        cargo(&["bench", "--package", "benches"])
            .args(args.names.iter().flat_map(|name| ["--bench", name]))
            .env(emulated_host::ARTIFACTS_ENV, artifacts)
            .env(lightgbm::FOLDER_ENV, python),
        |line| {
            println!("{line}");
            ratios.extend(line.starts_with(RATIO_PREFIX).then(|| line.to_owned()));
        },
    )?;
    if ratios.is_empty() && args.names.is_empty() {
        return Err(Failure::Result("the benchmarks printed no ratio".to_owned()));
    }
    println!("\n{}", ratios.join("\n"));
    Ok(())
}
