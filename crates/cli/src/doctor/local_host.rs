//! Checks of the local machine in `tarn doctor`, if the machine is a host. `host-agent doctor`
//! performs these checks, without the manager.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{process::Command, time};
use units::limits::RESPONSE_TIMEOUT_DEFAULT;

use super::Finding;

/// Default configuration file of a host agent.
const HOST_CONFIG_DEFAULT: &str = "/etc/tarn/host.toml";
const AGENT_PROGRAM_NAME: &str = "host-agent";

/// Returns the findings of `host-agent doctor`, or an empty list if this machine is not a host.
pub(super) async fn host_findings(config: Option<PathBuf>, timeout: Option<Duration>) -> Vec<Finding> {
    let default = || Some(PathBuf::from(HOST_CONFIG_DEFAULT)).filter(|path| path.exists());
    let Some(config) = config.or_else(default) else { return Vec::new() };
    let (program, timeout) = (agent_program(), timeout.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration()));
    match run(&program, &config, timeout).await {
        Ok(findings) => findings,
        Err(error) => {
            let message = format!("`{} doctor` failed: {error}", program.display());
            let fix = format!("install the {AGENT_PROGRAM_NAME} of this version next to tarn");
            vec![Finding::problem("host", "this host".to_owned(), message, fix)]
        }
    }
}

/// Returns the path of `host-agent` in the directory of this program. If that file does not exist,
/// returns only the program name, which is then searched in PATH.
fn agent_program() -> PathBuf {
    let tarn = std::env::current_exe().ok();
    let sibling = tarn.and_then(|tarn| Some(tarn.parent()?.join(AGENT_PROGRAM_NAME)));
    sibling.filter(|sibling| sibling.exists()).unwrap_or_else(|| AGENT_PROGRAM_NAME.into())
}

/// Runs `host-agent doctor` and parses its findings. The exit code is ignored, because it is not 0
/// when the findings contain problems.
async fn run(program: &Path, config: &Path, limit: Duration) -> Result<Vec<Finding>, String> {
    let mut command = Command::new(program);
    command.args(["doctor", "--output", "json", "--config"]).arg(config);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = time::timeout(limit, output).await.map_err(|_| format!("timed out after {limit:?}"))?;
    let output = output.map_err(|errno| errno.to_string())?;
    serde_json::from_slice(&output.stdout).map_err(|_| match output.stderr.is_empty() {
        true => "no output".to_owned(),
        false => String::from_utf8_lossy(&output.stderr).trim_end().to_owned(),
    })
}
