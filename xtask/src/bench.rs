//! `cargo xtask bench`: runs the benchmarks and repeats their ratios at the end. Above 1 is better; `*_taken` compares a
//! nearly full rack with a nearly empty one, and should be about 1.

use crate::{bed, debian, failure::Failure, lightgbm, repository::cargo, step::step_read};

/// How a measured promise begins its line: `ratio NAME VALUE`.
const RATIO: &str = "ratio ";

/// Measures, and prints every ratio once more.
///
/// # Errors
/// A benchmark fails, or none printed a ratio.
pub fn run() -> Result<(), Failure> {
    debian::ensure(debian::FOR_BENCH)?;
    let (bed, python) = (bed::ensure()?, lightgbm::ensure()?);
    let mut ratios = Vec::new();
    step_read(
        "benchmarks",
        cargo(&["bench", "--package", "benches"])
            .env(emulated_host::ARTIFACTS_ENV, bed)
            .env(lightgbm::PLACE, python),
        |line| {
            println!("{line}");
            ratios.extend(line.starts_with(RATIO).then(|| line.to_owned()));
        },
    )?;
    if ratios.is_empty() {
        return Err(Failure::Result("the benchmarks printed no ratio".to_owned()));
    }
    println!("\n{}", ratios.join("\n"));
    Ok(())
}
