//! Runs commands in a host over its third serial line. Contains the client and the script of the
//! server.
//!
//! Each request and each reply is one line. Commands and output are encoded in base64, so output
//! may be binary. Each command has an ID. If a request is repeated, the server does not run the
//! command again and returns the stored reply.

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

/// Time without data after which the client closes its connection and sends the request again. QEMU
/// serves one client at a time, so other clients can connect in between.
const RESEND_INTERVAL: Duration = Duration::from_millis(500);

/// Shell script of the command server in a host. Commands run concurrently, but their replies do
/// not interleave. Commands are not children of the shell that reads requests, because SIGCHLD
/// would make the `read` of that shell fail.
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

/// Result of a command that ran in a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// Exit status of the command.
    pub status: i32,
    /// Standard output and standard error, with invalid UTF-8 replaced.
    pub text: String,
}

/// Runs a shell command in the host with this control socket.
///
/// # Errors
/// `TimedOut` if no reply arrives in time, or the error of the socket. The command continues after
/// a timeout. A paused host starts the command when it is resumed.
pub(super) fn run(socket: &Path, command: &str, within: Duration) -> io::Result<CommandOutput> {
    let deadline = Instant::now() + within;
    let id = format!("{:016x}", RandomState::new().build_hasher().finish());
    let request = request_line(&id, &BASE64.encode(command));
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match send_request(socket, &id, &request, remaining.min(RESEND_INTERVAL)) {
            Err(error) if is_timeout(&error) => {}
            result => return result,
        }
    }
}

/// Sends the request once and reads until the reply is complete or no more data arrives. Deletes
/// the stored reply on the host after receiving it.
fn send_request(socket: &Path, id: &str, request: &str, read_timeout: Duration) -> io::Result<CommandOutput> {
    let mut stream = socket::connect(socket, read_timeout)?;
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

/// Sends a request to delete a stored reply. Waits until QEMU has read the request, because closing
/// the socket would drop data in flight. Ignores errors: a reply that is not deleted is harmless.
fn delete_reply(mut stream: UnixStream, id: &str) {
    let sent =
        stream.write_all(request_line(id, "-").as_bytes()).and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = sent.and_then(|()| stream.read_to_end(&mut Vec::new()));
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Formats a request line. The line starts with a newline, because another client may have left an
/// incomplete line. The marks ":" and "." let the server detect incomplete lines.
fn request_line(id: &str, command: &str) -> String {
    format!("\n: {id} {command} .\n")
}

/// Finds the reply to the request with this ID in received data.
fn parse_reply(id: &str, received: &[u8]) -> Option<CommandOutput> {
    let received = String::from_utf8_lossy(received);
    let reply = received.lines().find_map(|line| line.strip_prefix(id)?.strip_prefix(' '))?;
    let (status, text) = reply.split_once(' ')?;
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
