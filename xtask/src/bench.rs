//! `cargo xtask bench`: runs the benchmarks and prints all ratios at the end. A ratio above 1 means
//! that Tarn is better. Ratios named `*_taken` compare a nearly full rack with a nearly empty rack
//! and should be about 1.

use std::path::{Path, PathBuf};

use crate::{
    artifacts, etcd, failure::Failure, lightgbm, line_figure, redis, repository::cargo,
    step::run_step_with_output,
};

/// Prefix of result lines, which have the format `ratio NAME VALUE`.
const RATIO_PREFIX: &str = "ratio ";
/// Prefix of lines with the path of a file with the numbers of a figure.
const FIGURE_PREFIX: &str = "figure ";
/// Environment variable that passes the folder for figures to the benchmarks.
const FIGURES_ENV: &str = "TARN_FIGURES";

/// Options of `bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Benchmarks to run, such as `reserve_vs_etcd` [default: all programs in benches/]
    names: Vec<String>,
    /// Write the figure of soft_timeline to this folder, as SVG with its numbers as JSON
    #[arg(long, value_name = "FOLDER")]
    figures: Option<PathBuf>,
}

/// Runs the benchmarks, and prints all ratios again at the end.
///
/// # Errors
/// Returns an error if a benchmark fails, or if all benchmarks run and print no ratio.
pub fn run(args: &Args) -> Result<(), Failure> {
    let (artifacts, python) = (artifacts::ensure_downloaded()?, lightgbm::ensure_installed()?);
    let (redis, etcd) = (redis::ensure_downloaded()?, etcd::ensure_downloaded()?);
    let folder = args.figures.as_deref().map(create_folder).transpose()?;
    let (mut ratios, mut figures) = (Vec::new(), Vec::new());
    run_step_with_output(
        "benchmarks",
        cargo(&["bench", "--package", "benches"])
            .args(args.names.iter().flat_map(|name| ["--bench", name]))
            .env(emulated_host::ARTIFACTS_ENV, artifacts)
            .env(lightgbm::FOLDER_ENV, python)
            .env(redis::FOLDER_ENV, redis)
            .env(etcd::FOLDER_ENV, etcd)
            .envs(folder.map(|folder| (FIGURES_ENV, folder))),
        |line| {
            println!("{line}");
            ratios.extend(line.starts_with(RATIO_PREFIX).then(|| line.to_owned()));
            figures.extend(line.strip_prefix(FIGURE_PREFIX).map(PathBuf::from));
        },
    )?;
    figures.iter().try_for_each(|numbers| line_figure::draw_file(numbers))?;
    if ratios.is_empty() && args.names.is_empty() {
        return Err(Failure::BadResult("the benchmarks printed no ratio".to_owned()));
    }
    println!("\n{}", ratios.join("\n"));
    Ok(())
}

/// Creates a folder if it is missing, and returns its absolute path: benchmarks run in another folder.
fn create_folder(folder: &Path) -> Result<PathBuf, Failure> {
    let created = std::fs::create_dir_all(folder).and_then(|()| folder.canonicalize());
    created.map_err(Failure::file_error("create directory", folder))
}
