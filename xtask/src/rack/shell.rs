//! A terminal for a host's shell: bytes there and back until one of them ends, or a person leaves.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    process::{Command, Stdio},
};

use emulated_host::rack::RackHost;
use rustix::event::{PollFd, PollFlags, poll};

use crate::failure::Failure;

/// Ctrl-].
const LEAVE: u8 = 0x1d;

/// Connects this terminal until Ctrl-], or until the host has no power.
///
/// # Errors
/// The host has no power.
pub fn run(host: &RackHost) -> Result<(), Failure> {
    let shell = host.shell();
    let socket = UnixStream::connect(&shell).map_err(Failure::file("connect to", &shell))?;
    let raw = Raw::new(host);
    let done = carry(&socket).map_err(Failure::file("talk to", &shell));
    drop(raw);
    println!();
    done
}

fn carry(mut socket: &UnixStream) -> io::Result<()> {
    // Not std's, which reads ahead.
    let mut keys = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut some = [0; 4096];
    socket.write_all(b"\n")?; // for a prompt
    loop {
        let mut ready = [PollFd::new(&keys, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        poll(&mut ready, None)?;
        let [from_person, from_host] = ready.each_ref().map(|one| !one.revents().is_empty());
        if from_person {
            let bytes = keys.read(&mut some)?;
            if bytes == 0 || some[..bytes].contains(&LEAVE) {
                return Ok(());
            }
            socket.write_all(&some[..bytes])?;
        }
        if from_host {
            let bytes = socket.read(&mut some)?;
            if bytes == 0 {
                return Ok(());
            }
            let mut screen = io::stdout();
            screen.write_all(&some[..bytes]).and_then(|()| screen.flush())?;
        }
    }
}

/// Terminal in raw mode, restored when it is dropped; other files are unchanged.
struct Raw {
    before: Option<String>,
}

impl Raw {
    fn new(host: &RackHost) -> Self {
        let before = stty(&["-g"]);
        if before.is_some() {
            stty(&["raw", "-echo"]);
            if let Some((rows, columns)) = stty(&["size"]).as_deref().and_then(|size| size.split_once(' ')) {
                // For nicer lines; the shell works without.
                let _ = host.run(&format!("stty -F /dev/ttyS1 rows {rows} cols {columns}"));
            }
        }
        Self { before }
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            stty(&[before]);
        }
    }
}

/// Returns the settings of this terminal by `stty`; `None` if it is none.
fn stty(words: &[&str]) -> Option<String> {
    let output =
        Command::new("stty").args(words).stdin(Stdio::inherit()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
