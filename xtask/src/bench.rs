//! `cargo xtask bench`: runs the benchmarks and prints all ratios at the end. A ratio above 1 means
//! that Tarn is better. Ratios named `*_taken` compare a nearly full rack with a nearly empty rack
//! and should be about 1.

use crate::{
    artifacts, debian, failure::Failure, lightgbm, redis, repository::cargo, step::run_step_with_output,
};

/// Prefix of result lines, which have the format `ratio NAME VALUE`.
const RATIO_PREFIX: &str = "ratio ";

/// Options of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Benchmarks to run, such as `reserve_vs_etcd` [default: all programs in benches/]
    names: Vec<String>,
}

/// Runs the benchmarks, and prints all ratios again at the end.
///
/// # Errors
/// Returns an error if a benchmark fails, or if all benchmarks run and print no ratio.
pub fn run(args: &Args) -> Result<(), Failure> {
    debian::ensure_installed(debian::ETCD)?;
    let (artifacts, python) = (artifacts::ensure_downloaded()?, lightgbm::ensure_installed()?);
    let redis = redis::ensure_downloaded()?;
    let mut ratios = Vec::new();
    run_step_with_output(
        "benchmarks",
        cargo(&["bench", "--package", "benches"])
            .args(args.names.iter().flat_map(|name| ["--bench", name]))
            .env(emulated_host::ARTIFACTS_ENV, artifacts)
            .env(lightgbm::FOLDER_ENV, python)
            .env(redis::FOLDER_ENV, redis),
        |line| {
            println!("{line}");
            ratios.extend(line.starts_with(RATIO_PREFIX).then(|| line.to_owned()));
        },
    )?;
    if ratios.is_empty() && args.names.is_empty() {
        return Err(Failure::BadResult("the benchmarks printed no ratio".to_owned()));
    }
    println!("\n{}", ratios.join("\n"));
    Ok(())
}
