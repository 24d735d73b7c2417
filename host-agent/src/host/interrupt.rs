//! Kernel calls that may never return, such as taking offline memory that is in use: they run in a
//! thread of their own, which a signal interrupts.

use std::{
    io,
    sync::{
        OnceLock,
        mpsc::{self, RecvTimeoutError, SyncSender},
    },
    thread,
    time::Duration,
};

use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler};

/// Delay between signals: one may arrive just before the call that it has to interrupt.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Progress of work.
enum Stage<T> {
    NextStep,
    Done(T),
}

/// Lets work report its progress.
pub(super) struct Steps<'a>(&'a dyn Fn());

impl Steps<'_> {
    /// Starts another step, with the full time limit of a step.
    pub(super) fn next(&self) {
        (self.0)();
    }
}

/// Returns the result of work, whose calls are interrupted (`EINTR`) in a step that exceeds its
/// time limit. It must not repeat the same call then, as much of the standard library does.
///
/// # Errors
/// There is no thread for it, or the kernel rejects the signal handler. Nothing was done then.
pub(super) fn run_interruptible<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce(&Steps<'_>) -> T + Send + 'static,
) -> io::Result<T> {
    install_handler()?;
    let (sender, stages) = mpsc::sync_channel(1);
    let name = "interruptible".to_owned();
    let worker = thread::Builder::new().name(name).spawn(move || run(&sender, work))?;
    let mut wait = limit;
    loop {
        match stages.recv_timeout(wait) {
            Ok(Stage::NextStep) => wait = limit,
            Ok(Stage::Done(outcome)) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => {
                worker.kill(SIGRTMIN()).map_err(io::Error::from)?;
                wait = SIGNAL_INTERVAL;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the work panicked")),
        }
    }
}

/// There may be no receiver.
fn run<T>(sender: &SyncSender<Stage<T>>, work: impl FnOnce(&Steps<'_>) -> T) {
    let next = || drop(sender.send(Stage::NextStep));
    let outcome = work(&Steps(&next));
    drop(sender.send(Stage::Done(outcome)));
}

/// The signal only interrupts.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    let register = || register_signal_handler(SIGRTMIN(), nothing).map_err(|error| error.errno());
    INSTALLED.get_or_init(register).map_err(io::Error::from_raw_os_error)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rustix::{
        io::Errno,
        pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
    };

    use super::*;

    #[test]
    fn finished_work_is_not_interrupted() {
        assert_eq!(run_interruptible(Duration::from_secs(1000), |_| 7).unwrap(), 7);
    }

    #[test]
    fn each_endless_step_is_interrupted_after_its_limit() {
        let (_end, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let bytes = vec![0; fcntl_setpipe_size(&full, 4096).unwrap()];
        assert_eq!(rustix::io::write(&full, &bytes), Ok(bytes.len()));
        let limit = Duration::from_millis(50);
        let work = move |steps: &Steps<'_>| {
            [0, 1].map(|_| {
                steps.next();
                let started = Instant::now();
                (rustix::io::write(&full, &[0]), started.elapsed() >= limit)
            })
        };
        assert_eq!(run_interruptible(limit, work).unwrap(), [(Err(Errno::INTR), true); 2]);
    }
}
