//! Execution of system calls that may never return, such as offlining memory that is in use. Each
//! call runs in a separate thread, which a signal interrupts after a time limit.

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

/// Interval between repeated signals. A signal is repeated, because it may arrive just before the
/// system call that it has to interrupt.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Message from the worker thread.
enum WorkerMessage<T> {
    /// The work begins a new step.
    NextStep,
    /// The work has ended with this result.
    Done(T),
}

/// Callback that the work calls at the start of each step.
pub(super) struct StepCallback<'a>(&'a dyn Fn());

impl StepCallback<'_> {
    /// Reports the start of a step, which restarts the time limit.
    pub(super) fn begin_step(&self) {
        (self.0)();
    }
}

/// Runs work in a separate thread, and returns its result. When a step exceeds the time limit, its
/// system calls are interrupted (`EINTR`). The work must not retry interrupted calls; many
/// functions of the standard library do.
///
/// # Errors
/// The signal handler cannot be installed or the thread cannot be started (the work then did not
/// run), the thread cannot be signalled, or the work panicked.
pub(super) fn run_interruptible<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce(&StepCallback<'_>) -> T + Send + 'static,
) -> io::Result<T> {
    install_handler()?;
    let (sender, messages) = mpsc::sync_channel(1);
    let name = "interruptible".to_owned();
    let worker = thread::Builder::new().name(name).spawn(move || run_work(&sender, work))?;
    let mut wait = limit;
    loop {
        match messages.recv_timeout(wait) {
            Ok(WorkerMessage::NextStep) => wait = limit,
            Ok(WorkerMessage::Done(outcome)) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => {
                worker.kill(SIGRTMIN()).map_err(io::Error::from)?;
                wait = SIGNAL_INTERVAL;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the work panicked")),
        }
    }
}

/// Runs work, and sends its progress and result. Errors of sending are ignored, because the
/// receiver may have ended.
fn run_work<T>(sender: &SyncSender<WorkerMessage<T>>, work: impl FnOnce(&StepCallback<'_>) -> T) {
    let next = || drop(sender.send(WorkerMessage::NextStep));
    let outcome = work(&StepCallback(&next));
    drop(sender.send(WorkerMessage::Done(outcome)));
}

/// Installs an empty handler, so that the signal interrupts system calls and has no other effect.
fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    let register = || register_signal_handler(SIGRTMIN(), ignore_signal).map_err(|error| error.errno());
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
    fn each_blocked_step_is_interrupted_after_its_limit() {
        let (_reader, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let bytes = vec![0; fcntl_setpipe_size(&full, 4096).unwrap()];
        assert_eq!(rustix::io::write(&full, &bytes), Ok(bytes.len()));
        let limit = Duration::from_millis(50);
        let work = move |steps: &StepCallback<'_>| {
            [0, 1].map(|_| {
                steps.begin_step();
                let started = Instant::now();
                (rustix::io::write(&full, &[0]), started.elapsed() >= limit)
            })
        };
        assert_eq!(run_interruptible(limit, work).unwrap(), [(Err(Errno::INTR), true); 2]);
    }
}
