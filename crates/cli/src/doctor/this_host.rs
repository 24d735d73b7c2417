//! The machine that `tarn doctor` runs on, if it is a host: `host-agent doctor` looks at it, as `tarn` touches no machine. Whether
//! the manager answers does not matter to it.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{process::Command, time::timeout};
use units::limits::RESPONSE_TIMEOUT_DEFAULT;

use super::Finding;

/// Where a host says what it is.
const USUAL: &str = "/etc/tarn/host.toml";
const AGENT: &str = "host-agent";

/// What its agent's program finds; nothing where there is no host.
pub(super) async fn findings(config: Option<PathBuf>, within: Option<Duration>) -> Vec<Finding> {
    let usual = || Some(PathBuf::from(USUAL)).filter(|usual| usual.exists());
    let Some(config) = config.or_else(usual) else { return Vec::new() };
    let (program, within) = (program(), within.unwrap_or(RESPONSE_TIMEOUT_DEFAULT.as_duration()));
    match ask(&program, &config, within).await {
        Ok(findings) => findings,
        Err(why) => {
            let what = format!("`{} doctor` does not look at it: {why}", program.display());
            let mend = format!("install the {AGENT} of this version beside tarn");
            vec![Finding::bad("host", "this host".to_owned(), what, mend)]
        }
    }
}

/// Beside this program, or else wherever PATH leads.
fn program() -> PathBuf {
    let here = std::env::current_exe().ok();
    let beside = here.and_then(|here| Some(here.parent()?.join(AGENT)));
    beside.filter(|beside| beside.exists()).unwrap_or_else(|| AGENT.into())
}

/// It ends badly, too, when it has found something wrong.
async fn ask(program: &Path, config: &Path, within: Duration) -> Result<Vec<Finding>, String> {
    let mut command = Command::new(program);
    command.args(["doctor", "--output", "json", "--config"]).arg(config);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = timeout(within, output).await.map_err(|_| format!("no answer within {within:?}"))?;
    let output = output.map_err(|errno| errno.to_string())?;
    serde_json::from_slice(&output.stdout).map_err(|_| match output.stderr.is_empty() {
        true => "it says nothing".to_owned(),
        false => String::from_utf8_lossy(&output.stderr).trim_end().to_owned(),
    })
}
