//! Client of the QEMU Machine Protocol (QMP). Uses one connection per command, because QEMU serves
//! one client at a time and several clients may control a host.

use std::{
    io::{self, BufRead as _, BufReader, Write as _},
    path::Path,
    time::Duration,
};

use serde_json::{Value, json};

use super::socket::connect;
use crate::HostError;

/// Timeout of each read and write. Long enough for a busy machine.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Executes a QMP command on the QEMU process that listens on `socket`.
///
/// # Errors
/// [`HostError`] if QEMU does not reply, or rejects the command.
pub(super) fn execute(socket: &Path, command: &str, arguments: Value) -> Result<(), HostError> {
    let connection_error = || HostError::file_error("communicate with QEMU at", socket);
    let stream = connect(socket, REPLY_TIMEOUT).map_err(connection_error())?;
    for message in
        [json!({"execute": "qmp_capabilities"}), json!({"execute": command, "arguments": arguments})]
    {
        writeln!(&stream, "{message}").map_err(connection_error())?;
    }
    let replies = BufReader::new(&stream).lines();
    let error = read_replies(replies).map_err(connection_error())?;
    error.map_or(Ok(()), |output| Err(HostError::Failed { program: format!("QEMU's {command}"), output }))
}

/// Reads two replies: to `qmp_capabilities` and to the command. Returns the first error message, if
/// any. Skips the greeting and events.
fn read_replies(lines: impl Iterator<Item = io::Result<String>>) -> io::Result<Option<String>> {
    let mut is_negotiated = false;
    for line in lines {
        let message: Value = serde_json::from_str(&line?)?;
        match (message.get("error"), message.get("return")) {
            (Some(error), _) => return Ok(Some(error["desc"].as_str().unwrap_or_default().to_owned())),
            (None, Some(_)) if is_negotiated => return Ok(None),
            (None, Some(_)) => is_negotiated = true,
            (None, None) => {}
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply_to(lines: &[&str]) -> io::Result<Option<String>> {
        read_replies(lines.iter().map(|line| Ok((*line).to_owned())))
    }

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#;
    const DONE_REPLY: &str = r#"{"return": {}}"#;

    #[test]
    fn qmp_reply_is_found_among_greeting_and_events() {
        let event = r#"{"timestamp": {"seconds": 1}, "event": "STOP"}"#;
        assert_eq!(reply_to(&[GREETING, DONE_REPLY, event, DONE_REPLY]).unwrap(), None);
        let rejection = r#"{"error": {"class": "DeviceNotFound", "desc": "Device 'net7' not found"}}"#;
        assert_eq!(reply_to(&[GREETING, DONE_REPLY, rejection]).unwrap().unwrap(), "Device 'net7' not found");
    }

    #[test]
    fn qmp_connection_closed_before_reply_is_an_error() {
        assert!(reply_to(&[GREETING, DONE_REPLY]).is_err());
        assert!(reply_to(&[GREETING, "{half"]).is_err());
    }
}
