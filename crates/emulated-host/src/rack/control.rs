//! Commands for a host over its third serial line: what is asked, what is answered, and the script that answers in there. Both ways
//! are base64, one line each, so that output may be any bytes. Each command has a name by which it may be asked for again: it is
//! done once, and what gets lost on the way is said once more.

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

/// How long it is listened to a host that says nothing before it is asked again, and others may ask in between.
const RESEND_INTERVAL: Duration = Duration::from_millis(500);

/// Answers in a host, for ever. Commands run beside each other; answers do not mix. Nothing is a child of whoever reads: a child's
/// end would cost it the line it is reading.
pub(super) const COMMAND_SERVER_SCRIPT: &str = r#"#!/bin/sh
stty -F /dev/ttyS2 raw -echo
exec 3<>/dev/ttyS2
mkdir -p /run/control
cd /run/control
tell() {
  until mkdir telling 2> /dev/null; do sleep 0.05; done
  { printf '%s %s ' $1 $(cat $1.status); base64 -w 0 $1.output; echo; } >&3
  rmdir telling
}
obey() {
  sh $1.sh > $1.said 2>&1 < /dev/null 3>&-
  echo $? > $1.status
  tell $1
}
while read -r begin id command end <&3; do
  [ "$begin$end" = :. ] || continue
  if [ "$command" = - ]; then
    rm -f $id.*
  elif [ -e $id.status ]; then
    (tell $id &)
  elif [ ! -e $id.sh ]; then
    echo $command | base64 -d > $id.sh
    (obey $id &)
  fi
done
"#;

/// What a command said and how it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOutput {
    /// 0 if it was content.
    pub status: i32,
    /// All that it said, on both its outputs; bytes that are no text are replaced.
    pub text: String,
}

/// Runs a command behind a socket.
///
/// # Errors
/// There is no such socket, or no answer in time: `TimedOut`. A command that is late goes on; a host that is paused begins with it
/// when it goes on.
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

/// Asks once, and listens as long as something is said. An answer that was heard is not wanted any more.
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

/// Waits until QEMU has read it: what is under way is lost when somebody leaves. An answer that is kept is in nobody's way.
fn delete_reply(mut stream: UnixStream, id: &str) {
    let sent =
        stream.write_all(request_line(id, "-").as_bytes()).and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = sent.and_then(|()| stream.read_to_end(&mut Vec::new()));
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// It begins with the end of a line: somebody may have left in the middle of one. A line without either mark is half a line.
fn request_line(id: &str, what: &str) -> String {
    format!("\n: {id} {what} .\n")
}

/// The answer to a question among all that was heard.
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
