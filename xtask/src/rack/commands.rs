//! Commands on an emulated host, for the comparisons that `cargo xtask rack` runs.

use std::time::{Duration, Instant};

use emulated_host::rack::RackHost;

use crate::{failure::Failure, wait::Interrupt};

/// Time limit of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of characters of a command, and of its output, in an error.
const COMMAND_CHARS_MAX: usize = 60;
const OUTPUT_CHARS_MAX: usize = 500;

/// Runs a command on a host, and returns its output.
///
/// # Errors
/// Returns an error if the command fails or exceeds its time limit.
pub(super) fn run_checked(host: &RackHost, command: &str) -> Result<String, Failure> {
    let output = host.run_with_timeout(command, COMMAND_TIMEOUT)?;
    match output.status {
        0 => Ok(output.text),
        _ => Err(unexpected_output(command, &output.text)),
    }
}

/// Returns the error for an output that is not as expected.
pub(super) fn unexpected_output(program: &str, output: &str) -> Failure {
    let reason = output.chars().take(OUTPUT_CHARS_MAX).collect();
    Failure::UnexpectedOutput { program: program.chars().take(COMMAND_CHARS_MAX).collect(), reason }
}

/// Waits for a time, or until the user interrupts the program.
///
/// # Errors
/// [`Failure::Interrupted`].
pub(super) fn wait(duration: Duration, interrupt: &Interrupt) -> Result<(), Failure> {
    let end = Instant::now() + duration;
    while Instant::now() < end {
        interrupt.pause()?;
    }
    Ok(())
}
