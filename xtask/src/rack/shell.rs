//! Connects this terminal to the shell of a host, until the host closes the connection or the user
//! presses Ctrl-].

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    process::{Command, Stdio},
};

use emulated_host::rack::RackHost;
use rustix::event::{PollFd, PollFlags, poll};

use crate::failure::Failure;

/// Key that closes the shell: Ctrl-].
const ESCAPE_KEY: u8 = 0x1d;

/// Connects this terminal to the shell of a host until Ctrl-] or until the host is powered off.
///
/// # Errors
/// Returns an error if the host is powered off or the connection fails.
pub fn run(host: &RackHost) -> Result<(), Failure> {
    let shell = host.shell_socket();
    let socket = UnixStream::connect(&shell).map_err(Failure::file_error("connect to", &shell))?;
    let terminal = RawTerminal::new(host);
    let result = forward_terminal(&socket).map_err(Failure::file_error("communicate with", &shell));
    drop(terminal);
    println!();
    result
}

fn forward_terminal(mut socket: &UnixStream) -> io::Result<()> {
    // `io::Stdin` is not used because poll does not report bytes in its buffer.
    let mut keyboard = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut buffer = [0; 4096];
    socket.write_all(b"\n")?; // shows a prompt
    loop {
        let mut ready = [PollFd::new(&keyboard, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        poll(&mut ready, None)?;
        let [from_user, from_host] = ready.each_ref().map(|one| !one.revents().is_empty());
        if from_user {
            let bytes = keyboard.read(&mut buffer)?;
            if bytes == 0 || buffer[..bytes].contains(&ESCAPE_KEY) {
                return Ok(());
            }
            socket.write_all(&buffer[..bytes])?;
        }
        if from_host {
            let bytes = socket.read(&mut buffer)?;
            if bytes == 0 {
                return Ok(());
            }
            let mut screen = io::stdout();
            screen.write_all(&buffer[..bytes]).and_then(|()| screen.flush())?;
        }
    }
}

/// Terminal in raw mode. Dropping the value restores the settings. If stdin is not a terminal,
/// nothing is changed.
struct RawTerminal {
    settings: Option<String>,
}

impl RawTerminal {
    fn new(host: &RackHost) -> Self {
        let settings = run_stty(&["-g"]);
        if settings.is_some() {
            run_stty(&["raw", "-echo"]);
            if let Some((rows, columns)) =
                run_stty(&["size"]).as_deref().and_then(|size| size.split_once(' '))
            {
                // The size affects only line wrapping, so errors are ignored.
                let _ = host.run(&format!("stty -F /dev/ttyS1 rows {rows} cols {columns}"));
            }
        }
        Self { settings }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Some(settings) = &self.settings {
            run_stty(&[settings]);
        }
    }
}

/// Runs `stty` and returns its output. Returns `None` if stdin is not a terminal.
fn run_stty(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("stty").args(arguments).stdin(Stdio::inherit()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
