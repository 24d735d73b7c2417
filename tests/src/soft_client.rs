//! Client processes of soft memory for tests. They run the program `host-agent-test-soft-client`, which documents the
//! requests.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use rustix::process::Signal;

use crate::rack::{programs_dir, send_signal};

/// Budget and use of a client, as it reports them itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientStats {
    /// Budget in pages.
    pub budget: u64,
    /// Pages with values.
    pub held: u64,
    /// Number of evicted values.
    pub evicted: u64,
}

/// Client process. Dropping it kills the process.
#[derive(Debug)]
pub struct SoftClient {
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl SoftClient {
    /// Starts a client, and waits until it is connected.
    ///
    /// # Errors
    /// Returns the output of the client if it cannot connect.
    pub fn start(socket: &Path) -> Result<Self, String> {
        Self::start_with(socket, &[], &[])
    }

    /// Starts a client as another user, and waits until it is connected. Requires root.
    ///
    /// # Errors
    /// Returns the output of the client if it cannot connect.
    pub fn start_as(socket: &Path, uid: u32) -> Result<Self, String> {
        Self::start_with(socket, &[], &["user", &uid.to_string()])
    }

    /// Starts a client through another program, whose command line is `launcher`, and waits until it is connected.
    ///
    /// # Errors
    /// Returns the output of the client if it cannot connect.
    pub fn start_through(launcher: &[&str], socket: &Path) -> Result<Self, String> {
        Self::start_with(socket, launcher, &[])
    }

    fn start_with(socket: &Path, launcher: &[&str], arguments: &[&str]) -> Result<Self, String> {
        let program = programs_dir().join("host-agent-test-soft-client");
        let mut command = match launcher {
            [] => Command::new(program),
            [launcher, arguments @ ..] => {
                let mut command = Command::new(launcher);
                command.args(arguments).arg(program);
                command
            }
        };
        command.arg(socket).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().expect("the client starts");
        let stdin = process.stdin.take().expect("stdin is a pipe");
        let stdout = process.stdout.take().expect("stdout is a pipe");
        let mut client = Self { process, stdin, stdout: BufReader::new(stdout) };
        if client.read_line() == "connected" {
            return Ok(client);
        }
        let mut error = String::new();
        let stderr = client.process.stderr.as_mut().expect("stderr is a pipe");
        stderr.read_to_string(&mut error).expect("the output is UTF-8");
        Err(error)
    }

    /// Returns the process ID.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a request without waiting for the reply.
    pub fn send(&mut self, request: &str) {
        writeln!(self.stdin, "{request}").expect("the client runs");
    }

    /// Returns the next reply, or an empty text if the client has ended.
    pub fn read_line(&mut self) -> String {
        let mut reply = String::new();
        self.stdout.read_line(&mut reply).expect("the output is UTF-8");
        reply.trim_end().to_owned()
    }

    /// Sends a request, and returns the reply.
    pub fn request(&mut self, request: &str) -> String {
        self.send(request);
        self.read_line()
    }

    /// Adds up to `values` values, each of one page, and returns how many were added.
    pub fn push(&mut self, values: u64) -> u64 {
        self.request(&format!("push {values}")).parse().expect("the reply is a number")
    }

    /// Returns the budget and the use.
    pub fn stats(&mut self) -> ClientStats {
        let reply = self.request("stats");
        let numbers: Vec<u64> = reply.split(' ').filter_map(|number| number.parse().ok()).collect();
        let [budget, held, evicted] = numbers[..] else { panic!("the client replied {reply:?}") };
        ClientStats { budget, held, evicted }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        send_signal(&self.process, signal);
    }
}

impl Drop for SoftClient {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
