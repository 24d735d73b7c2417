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
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Answers in a host, for ever. Commands run beside each other; answers do not mix. Nothing is a child of whoever reads: a child's
/// end would cost it the line it is reading.
pub(super) const ANSWER: &str = r#"#!/bin/sh
stty -F /dev/ttyS2 raw -echo
exec 3<>/dev/ttyS2
mkdir -p /run/control
cd /run/control
tell() {
  until mkdir telling 2> /dev/null; do sleep 0.05; done
  { printf '%s %s ' $1 $(cat $1.status); base64 -w 0 $1.said; echo; } >&3
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
pub struct Said {
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
pub(super) fn run(at: &Path, command: &str, within: Duration) -> io::Result<Said> {
    let give_up = Instant::now() + within;
    let id = format!("{:016x}", RandomState::new().build_hasher().finish());
    let question = line(&id, &BASE64.encode(command));
    loop {
        let left = give_up.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match ask(at, &id, &question, left.min(ASKED_AGAIN_AFTER)) {
            Err(error) if is_only_time(&error) => {}
            asked => return asked,
        }
    }
}

/// Asks once, and listens as long as something is said. An answer that was heard is not wanted any more.
fn ask(at: &Path, id: &str, question: &str, silence: Duration) -> io::Result<Said> {
    let mut stream = socket::connect(at, silence)?;
    stream.write_all(question.as_bytes())?;
    let mut heard = Vec::new();
    let mut some = [0; 64 << 10];
    loop {
        match stream.read(&mut some)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => heard.extend(&some[..bytes]),
        }
        if heard.ends_with(b"\n")
            && let Some(said) = answer(id, &heard)
        {
            forget(stream, id);
            return Ok(said);
        }
    }
}

/// Waits until QEMU has read it: what is under way is lost when somebody leaves. An answer that is kept is in nobody's way.
fn forget(mut stream: UnixStream, id: &str) {
    let said = stream.write_all(line(id, "-").as_bytes()).and_then(|()| stream.shutdown(Shutdown::Write));
    let _ = said.and_then(|()| stream.read_to_end(&mut Vec::new()));
}

fn is_only_time(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// It begins with the end of a line: somebody may have left in the middle of one. A line without either mark is half a line.
fn line(id: &str, what: &str) -> String {
    format!("\n: {id} {what} .\n")
}

/// The answer to a question among all that was heard.
fn answer(id: &str, heard: &[u8]) -> Option<Said> {
    let heard = String::from_utf8_lossy(heard);
    let answer = heard.lines().find_map(|line| line.strip_prefix(id)?.strip_prefix(' '))?;
    let (status, text) = answer.split_once(' ')?;
    let text = BASE64.decode(text).ok()?;
    Some(Said { status: status.parse().ok()?, text: String::from_utf8_lossy(&text).into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_found_among_those_to_others_and_pieces_of_lines() {
        let heard = b"yYWFh\n0a 0 aGFsbG8=\n0b 7 bm8K\n";
        assert_eq!(answer("0b", heard), Some(Said { status: 7, text: "no\n".to_owned() }));
        assert_eq!(answer("0c", heard), None);
    }

    #[test]
    fn output_may_be_empty_or_any_bytes() {
        assert_eq!(answer("0a", b"0a 0 \n"), Some(Said { status: 0, text: String::new() }));
        assert_eq!(answer("0a", b"0a 0 /wAK\n").unwrap().text, "\u{fffd}\0\n");
    }

    #[test]
    fn a_line_is_whole_or_is_seen_not_to_be() {
        assert_eq!(line("0a", &BASE64.encode("echo 'a\nb'")), "\n: 0a ZWNobyAnYQpiJw== .\n");
    }
}
