//! Runs commands in a host over its third serial line; includes the server script. Requests and
//! replies are base64, one line each, so output may be binary. Each command has an ID: a repeated
//! request does not run the command again but returns the stored reply.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io::{self, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};

use super::socket;

/// Time without data after which the request is sent again. Other clients can connect in between.
const RESEND_INTERVAL: Duration = Duration::from_millis(500);

/// Command server in a host. Commands run concurrently; their replies do not interleave. Commands
/// are not children of the reading shell: SIGCHLD would make its read fail.
pub(super) const COMMAND_SERVER_SCRIPT: &str = r#"#!/bin/sh
stty -F /dev/ttyS2 raw -echo
exec 3<>/dev/ttyS2
mkdir -p /run/control
cd /run/control
send_reply() {
  until mkdir sending 2> /dev/null; do sleep 0.05; done
  { printf '%s %s ' $1 $(cat $1.status); base64 -w 0 $1.output; echo; } >&3
  rmdir sending
}
run_command() {
  sh $1.sh > $1.output 2>&1 < /dev/null 3>&-
  echo $? > $1.status
  send_reply $1
}
while read -r begin id command end <&3; do
  [ "$begin$end" = :. ] || continue
  if [ "$command" = - ]; then
    rm -f $id.*
  elif [ -e $id.status ]; then
    (send_reply $id &)
  elif [ ! -e $id.sh ]; then
    echo $command | base64 -d > $id.sh
    (run_command $id &)
  fi
done
"#;

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// Exit status.
    pub status: i32,
    /// Standard output and standard error, with invalid UTF-8 replaced.
    pub text: String,
}

/// Runs a command in the host behind a socket.
///
/// # Errors
/// `TimedOut` without a reply in time, or the error of the socket. The command continues after a
/// timeout; a paused host starts it when resumed.
pub(super) fn run(at: &Path, command: &str, within: Duration) -> io::Result<CommandOutput> {
    let deadline = Instant::now() + within;
    let id = format!("{:016x}", RandomState::new().build_hasher().finish());
    let request = request_line(&id, &BASE64.encode(command));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match send_request(at, &id, &request, left.min(RESEND_INTERVAL)) {
            Err(error) if is_timeout(&error) => {}
            result => return result,
        }
    }
}

/// Sends the request once and reads while data arrives. The stored reply is deleted after it was
/// received.
fn send_request(at: &Path, id: &str, request: &str, read_timeout: Duration) -> io::Result<CommandOutput> {
    let mut stream = socket::connect(at, read_timeout)?;
    stream.write_all(request.as_bytes())?;
    let mut received = Vec::new();
    let mut buffer = [0; 64 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => received.extend(&buffer[..bytes]),
        }
        if received.ends_with(b"\n")
            && let Some(output) = parse_reply(id, &received)
        {
            delete_reply(stream, id);
            return Ok(output);
        }
    }
}

/// Waits until QEMU has read the deletion: closing the socket drops data in flight. A reply that is
/// not deleted is harmless.
fn delete_reply(mut stream: UnixStream, id: &str) {
    let sent =
        stream.write_all(request_line(id, "-").as_bytes()).and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = sent.and_then(|()| stream.read_to_end(&mut Vec::new()));
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Formats a request. It starts with a newline, as another client may have left an incomplete line;
/// both marks are required for a complete line.
fn request_line(id: &str, what: &str) -> String {
    format!("\n: {id} {what} .\n")
}

/// Finds the reply to a request in received data.
fn parse_reply(id: &str, received: &[u8]) -> Option<CommandOutput> {
    let received = String::from_utf8_lossy(received);
    let answer = received.lines().find_map(|line| line.strip_prefix(id)?.strip_prefix(' '))?;
    let (status, text) = answer.split_once(' ')?;
    let text = BASE64.decode(text).ok()?;
    Some(CommandOutput { status: status.parse().ok()?, text: String::from_utf8_lossy(&text).into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_is_found_among_other_and_partial_lines() {
        let received = b"yYWFh\n0a 0 aGFsbG8=\n0b 7 bm8K\n";
        assert_eq!(parse_reply("0b", received), Some(CommandOutput { status: 7, text: "no\n".to_owned() }));
        assert_eq!(parse_reply("0c", received), None);
    }

    #[test]
    fn command_output_may_be_empty_or_binary() {
        assert_eq!(parse_reply("0a", b"0a 0 \n"), Some(CommandOutput { status: 0, text: String::new() }));
        assert_eq!(parse_reply("0a", b"0a 0 /wAK\n").unwrap().text, "\u{fffd}\0\n");
    }

    #[test]
    fn request_line_has_start_and_end_marks() {
        assert_eq!(request_line("0a", &BASE64.encode("echo 'a\nb'")), "\n: 0a ZWNobyAnYQpiJw== .\n");
    }
}
