//! Process that requests memory on command and uses all of it until its end. It is this program with other arguments.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use benches::{failure::Failure, process::resident_bytes};
use soft::{PAGE_BYTES, Pinned, Pool, Priority, SoftBlocks};

/// First argument of the process. The second is the socket of the daemon, or [`NO_DAEMON`].
pub const ARGUMENT: &str = "second-process";
/// Argument for ordinary memory: a pool with a constant budget.
const NO_DAEMON: &str = "none";
/// Size of the memory in bytes.
pub const BYTES: usize = 12 << 20;
/// Size of an allocation in bytes.
const BLOCK_BYTES: usize = 1024;
/// Time limit of all allocations.
const ALLOCATION_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two attempts of an allocation.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Running second process. Dropping it kills the process.
#[derive(Debug)]
pub struct SecondProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Option<BufReader<ChildStdout>>,
    /// Resident memory before the request.
    initial_bytes: u64,
}

impl SecondProcess {
    /// Starts the process, and waits until it can request memory: soft memory of the daemon at a socket, or ordinary
    /// memory.
    ///
    /// # Errors
    /// [`Failure`] if the process fails.
    pub fn start(socket: Option<&Path>) -> Result<Self, Failure> {
        let program = std::env::current_exe().map_err(Failure::file_error("find", "/proc/self/exe"))?;
        let mut command = Command::new(&program);
        command.arg(ARGUMENT).arg(socket.unwrap_or(Path::new(NO_DAEMON)));
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|source| Failure::Start { program, source })?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().map(BufReader::new));
        let mut process = Self { child, stdin, stdout, initial_bytes: 0 };
        process.stdout = process.stdout.take().map(|stdout| expect_line(stdout, "ready")).transpose()?;
        process.initial_bytes = resident_bytes(process.child.id())?;
        Ok(process)
    }

    /// Makes the process request its memory. The result is the time when the process has it.
    pub fn request(&mut self) -> JoinHandle<Result<Instant, Failure>> {
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(b"request\n"); // if this fails, the process has ended and prints no line
        }
        let stdout = self.stdout.take();
        thread::spawn(move || {
            stdout.map(|stdout| expect_line(stdout, "full")).transpose()?;
            Ok(Instant::now())
        })
    }

    /// Returns the increase of the resident memory of the process in bytes.
    ///
    /// # Errors
    /// [`Failure`] if the process has ended.
    pub fn memory_bytes(&self) -> Result<u64, Failure> {
        Ok(resident_bytes(self.child.id())?.saturating_sub(self.initial_bytes))
    }
}

impl Drop for SecondProcess {
    fn drop(&mut self) {
        // Both calls fail only if the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn expect_line(
    mut stdout: BufReader<ChildStdout>,
    expected: &str,
) -> Result<BufReader<ChildStdout>, Failure> {
    let mut line = String::new();
    stdout.read_line(&mut line).map_err(Failure::file_error("read the output of", ARGUMENT))?;
    if line.trim_end() == expected {
        Ok(stdout)
    } else {
        Err(Failure::UnexpectedReply { subject: ARGUMENT.to_owned(), reply: line })
    }
}

/// Runs the second process until its standard input ends.
pub fn main(socket: &str) {
    let pages = BYTES / PAGE_BYTES;
    let pool = if socket == NO_DAEMON {
        Pool::new(pages).expect("the address space is available")
    } else {
        soft::client::connect(Path::new(socket), pages).expect("the daemon runs")
    };
    let blocks = SoftBlocks::new(&pool, Priority(0)).expect("a pool can have a structure");
    println!("ready");
    let mut lines = std::io::stdin().lines();
    lines.next();
    let used = allocate(&blocks);
    println!("full");
    lines.for_each(drop);
    drop(used);
}

/// Allocates all memory. The process uses it all the time, so that it pins each block.
fn allocate(blocks: &SoftBlocks) -> Vec<Pinned> {
    let end = Instant::now() + ALLOCATION_TIMEOUT;
    let mut used = Vec::with_capacity(BYTES / BLOCK_BYTES);
    while used.len() < BYTES / BLOCK_BYTES {
        match blocks.allocate(BLOCK_BYTES) {
            // The cache can request budget, so that the new block is evicted before it is pinned.
            Ok(handle) => used.extend(blocks.pin(handle).ok()),
            Err(error) => {
                assert!(Instant::now() < end, "{} of {BYTES} bytes: {error}", used.len() * BLOCK_BYTES);
                thread::sleep(RETRY_INTERVAL);
            }
        }
    }
    used
}
