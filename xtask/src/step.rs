//! Runs the commands of a task one after another, and prints their names and durations.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    time::Instant,
};

use serde::Deserialize;

use crate::{failure::Failure, repository::cargo};

/// Runs a command as one step; its output is the terminal's.
///
/// # Errors
/// It does not start, or ends with anything but success.
pub fn step(title: &str, command: &mut Command) -> Result<(), Failure> {
    let begun = begin(title);
    let status = command.status().map_err(Failure::start(title))?;
    end(title, begun, status)
}

/// Runs a command as one step and passes every line of its stdout to `see`.
///
/// # Errors
/// It does not start, or ends with anything but success.
pub fn step_read(title: &str, command: &mut Command, mut see: impl FnMut(&str)) -> Result<(), Failure> {
    let begun = begin(title);
    let mut process = command.stdout(Stdio::piped()).spawn().map_err(Failure::start(title))?;
    let out = process.stdout.take().expect("stdout was asked to be a pipe");
    for line in BufReader::new(out).split(b'\n') {
        see(&String::from_utf8_lossy(&line.map_err(Failure::start(title))?));
    }
    let status = process.wait().map_err(Failure::start(title))?;
    end(title, begun, status)
}

fn begin(title: &str) -> Instant {
    eprintln!("── {title}");
    Instant::now()
}

fn end(title: &str, begun: Instant, status: ExitStatus) -> Result<(), Failure> {
    if !status.success() {
        return Err(Failure::Step { step: title.to_owned(), status });
    }
    eprintln!("   {title}: done in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// One line of `cargo build --message-format json`, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Built {
    executable: Option<PathBuf>,
}

/// Builds all programs like the tests do, so that nothing is built twice, and returns their paths.
///
/// # Errors
/// Cargo fails, or one of the programs did not come out of it.
pub fn build<const N: usize>(programs: [&str; N]) -> Result<[PathBuf; N], Failure> {
    let mut command = cargo(&["build", "--workspace", "--bins"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    let mut found = BTreeMap::new();
    step_read(&format!("build {}", programs.join(", ")), &mut command, |line| {
        let path = serde_json::from_str::<Built>(line).ok().and_then(|built| built.executable);
        found.extend(path.and_then(|path| Some((path.file_name()?.to_str()?.to_owned(), path.clone()))));
    })?;
    let mut missing = None;
    let paths = programs.map(|program| {
        found.remove(program).unwrap_or_else(|| {
            missing = Some(format!("no program {program} among those it built"));
            PathBuf::new()
        })
    });
    missing.map_or(Ok(paths), |why| Err(Failure::Answer { program: "cargo build".to_owned(), why }))
}
