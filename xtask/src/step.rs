//! Runs the commands of a task and prints their titles and durations.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    time::Instant,
};

use serde::Deserialize;

use crate::{failure::Failure, repository::cargo};

/// Runs a command as one step of a task. The command writes to stdout and stderr of this process.
///
/// # Errors
/// Returns an error if the command does not start or exits with a failure.
pub fn run_step(title: &str, command: &mut Command) -> Result<(), Failure> {
    let start = begin_step(title);
    let status = command.status().map_err(Failure::start_error(title))?;
    end_step(title, start, status)
}

/// Runs a command as one step of a task, and passes every line of its stdout to `on_line`.
///
/// # Errors
/// Returns an error if the command does not start or exits with a failure.
pub fn run_step_with_output(
    title: &str,
    command: &mut Command,
    mut on_line: impl FnMut(&str),
) -> Result<(), Failure> {
    let start = begin_step(title);
    let mut process = command.stdout(Stdio::piped()).spawn().map_err(Failure::start_error(title))?;
    let out = process.stdout.take().expect("stdout is a pipe");
    for line in BufReader::new(out).split(b'\n') {
        on_line(&String::from_utf8_lossy(&line.map_err(Failure::start_error(title))?));
    }
    let status = process.wait().map_err(Failure::start_error(title))?;
    end_step(title, start, status)
}

fn begin_step(title: &str) -> Instant {
    eprintln!("── {title}");
    Instant::now()
}

fn end_step(title: &str, start: Instant, status: ExitStatus) -> Result<(), Failure> {
    if !status.success() {
        return Err(Failure::Step { step: title.to_owned(), status });
    }
    eprintln!("   {title}: done in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Output line of `cargo build --message-format json`, with the fields that are used here.
#[derive(Debug, Deserialize)]
struct BuildMessage {
    executable: Option<PathBuf>,
}

/// Builds all programs of the workspace, and returns the paths of the given programs. The build
/// uses the options of the tests, so that both share the built dependencies.
///
/// # Errors
/// Returns an error if cargo fails or does not build one of the given programs.
pub fn build_programs<const N: usize>(programs: [&str; N]) -> Result<[PathBuf; N], Failure> {
    let mut command = cargo(&["build", "--workspace", "--bins"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let mut found = BTreeMap::new();
    run_step_with_output(&format!("build {}", programs.join(", ")), &mut command, |line| {
        let path = serde_json::from_str::<BuildMessage>(line).ok().and_then(|message| message.executable);
        found.extend(path.and_then(|path| Some((path.file_name()?.to_str()?.to_owned(), path.clone()))));
    })?;
    let mut missing = None;
    let paths = programs.map(|program| {
        found.remove(program).unwrap_or_else(|| {
            missing = Some(format!("program {program} was not built"));
            PathBuf::new()
        })
    });
    missing.map_or(Ok(paths), |reason| {
        Err(Failure::UnexpectedOutput { program: "cargo build".to_owned(), reason })
    })
}
