//! Commands for a host over its third serial line: what is asked, what is answered, and the script that answers in there. Both ways
//! are base64, one line each, so that output may be any bytes. Each answer names its question: what comes late, or half, is nobody's.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};

/// Answers in a host, for ever. Commands run beside each other; answers do not mix.
pub(super) const ANSWER: &str = r#"#!/bin/sh
stty -F /dev/ttyS2 raw -echo
exec 3<>/dev/ttyS2
mkdir -p /run/control
while read -r id command <&3; do
  [ -n "$command" ] || continue
  (
    cd /run/control
    echo "$command" | base64 -d > "$id"
    sh "$id" > "$id.said" 2>&1 < /dev/null 3>&-
    status=$?
    { flock 4; { printf '%s %s ' "$id" $status; base64 -w 0 "$id.said"; echo; } >&3; } 4> lock
    rm "$id" "$id.said"
  ) &
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
/// There is no such socket, or no answer in time: `TimedOut`. A command that is late goes on.
pub(super) fn run(socket: &Path, command: &str, within: Duration) -> io::Result<Said> {
    let give_up = Instant::now() + within;
    let mut stream = UnixStream::connect(socket)?;
    stream.set_write_timeout(Some(within))?;
    let id = format!("{:016x}", RandomState::new().build_hasher().finish());
    stream.write_all(question(&id, command).as_bytes())?;
    let mut heard = Vec::new();
    let mut some = [0; 64 << 10];
    loop {
        let left = give_up.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut some) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => heard.extend(&some[..bytes]),
            Err(error) if is_only_time(&error) => {}
            Err(error) => return Err(error),
        }
        if heard.ends_with(b"\n")
            && let Some(said) = answer(&id, &heard)
        {
            return Ok(said);
        }
    }
}

fn is_only_time(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// It begins with the end of a line: somebody may have left in the middle of one.
fn question(id: &str, command: &str) -> String {
    format!("\n{id} {}\n", BASE64.encode(command))
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
    fn a_command_of_many_lines_is_one_line_after_what_somebody_left() {
        assert_eq!(question("0a", "echo 'a\nb'"), "\n0a ZWNobyAnYQpiJw==\n");
    }
}
