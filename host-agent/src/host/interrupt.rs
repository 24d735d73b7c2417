//! Calls of the kernel's that may never end by themselves, as when memory is taken offline that somebody holds: they are made in a
//! thread of their own, which a signal gets out of them.

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

/// A signal may come just before the call that it is to end; so there is another one.
const SIGNALLED_EVERY: Duration = Duration::from_millis(100);

/// How far work has come.
enum Stage<T> {
    NextStep,
    Done(T),
}

/// For work to say that it goes on.
pub(super) struct Steps<'a>(&'a dyn Fn());

impl Steps<'_> {
    /// Another step begins, and has all the time that one has.
    pub(super) fn next(&self) {
        (self.0)();
    }
}

/// The outcome of work, whose calls are interrupted (`EINTR`) in a step that takes longer than this. It must not make the same call
/// again then, as much of the standard library does.
///
/// # Errors
/// There is no thread for it, or the kernel takes no handler. Nothing was done then.
pub(super) fn stepwise<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce(&Steps<'_>) -> T + Send + 'static,
) -> io::Result<T> {
    prepare()?;
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
                wait = SIGNALLED_EVERY;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the work panicked")),
        }
    }
}

/// Nobody may listen any more.
fn run<T>(sender: &SyncSender<Stage<T>>, work: impl FnOnce(&Steps<'_>) -> T) {
    let next = || drop(sender.send(Stage::NextStep));
    let outcome = work(&Steps(&next));
    drop(sender.send(Stage::Done(outcome)));
}

/// The signal does nothing but interrupt.
fn prepare() -> io::Result<()> {
    static PREPARED: OnceLock<Result<(), i32>> = OnceLock::new();
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    let register = || register_signal_handler(SIGRTMIN(), nothing).map_err(|error| error.errno());
    PREPARED.get_or_init(register).map_err(io::Error::from_raw_os_error)
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
    fn what_ends_by_itself_is_not_interrupted() {
        assert_eq!(stepwise(Duration::from_secs(1000), |_| 7).unwrap(), 7);
    }

    #[test]
    fn a_step_that_never_ends_is_interrupted_after_the_limit_and_not_before_and_the_next_has_its_own_time() {
        let (_end, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let bytes = vec![0; fcntl_setpipe_size(&full, 4096).unwrap()];
        assert_eq!(rustix::io::write(&full, &bytes), Ok(bytes.len()));
        let limit = Duration::from_millis(50);
        let work = move |steps: &Steps<'_>| {
            [0, 1].map(|_| {
                steps.next();
                let begun = Instant::now();
                (rustix::io::write(&full, &[0]), begun.elapsed() >= limit)
            })
        };
        assert_eq!(stepwise(limit, work).unwrap(), [(Err(Errno::INTR), true); 2]);
    }
}
