//! QEMU's own control: one command for each connection, as QEMU talks to one at a time and others want to stop the same host.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};

use super::socket::connect;
use crate::HostError;

/// How long QEMU may take for a word: the machine may be busy.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// Tells the QEMU behind a socket to do something.
///
/// # Errors
/// It does not answer, or refuses.
pub(super) fn tell(socket: &Path, command: &str, arguments: Value) -> Result<(), HostError> {
    let failed = || HostError::file("talk to QEMU by", socket);
    let stream = connect(socket, ANSWERS_WITHIN).map_err(failed())?;
    for said in [json!({"execute": "qmp_capabilities"}), json!({"execute": command, "arguments": arguments})]
    {
        writeln!(&stream, "{said}").map_err(failed())?;
    }
    let answers = BufReader::new(&stream).lines();
    let why = answer(answers).map_err(failed())?;
    why.map_or(Ok(()), |said| Err(HostError::Failed { program: format!("QEMU's {command}"), said }))
}

/// Why the second thing that was asked for is refused, if it is. Greetings and events are not answers.
fn answer(lines: impl Iterator<Item = io::Result<String>>) -> io::Result<Option<String>> {
    let mut agreed = false;
    for line in lines {
        let said: Value = serde_json::from_str(&line?)?;
        match (said.get("error"), said.get("return")) {
            (Some(why), _) => return Ok(Some(why["desc"].as_str().unwrap_or_default().to_owned())),
            (None, Some(_)) if agreed => return Ok(None),
            (None, Some(_)) => agreed = true,
            (None, None) => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(lines: &[&str]) -> io::Result<Option<String>> {
        answer(lines.iter().map(|line| Ok((*line).to_owned())))
    }

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
    const DONE: &str = r#"{"return": {}}"#;

    #[test]
    fn an_answer_is_found_among_greetings_and_events() {
        let event = r#"{"timestamp": {"seconds": 1}, "event": "STOP"}"#;
        assert_eq!(answered(&[GREETING, DONE, event, DONE]).unwrap(), None);
        let refusal = r#"{"error": {"class": "DeviceNotFound", "desc": "Device 'net7' not found"}}"#;
        assert_eq!(answered(&[GREETING, DONE, refusal]).unwrap().unwrap(), "Device 'net7' not found");
    }

    #[test]
    fn an_end_before_the_answer_is_no_answer() {
        assert!(answered(&[GREETING, DONE]).is_err());
        assert!(answered(&[GREETING, "{half"]).is_err());
    }
}
