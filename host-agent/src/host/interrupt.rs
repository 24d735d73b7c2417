//! A call of the kernel's that may never end by itself, as when memory is taken offline that somebody holds: it is made in a thread of
//! its own, which a signal gets out of it.

use std::{
    io,
    sync::{OnceLock, mpsc},
    thread,
    time::Duration,
};

use vmm_sys_util::signal::{Killable as _, SIGRTMIN, register_signal_handler};

/// A signal may come just before the call that it is to end; so there is another one.
const SIGNALLED_EVERY: Duration = Duration::from_millis(100);

/// The outcome of a call, which is interrupted (`EINTR`) once it takes longer than this. Whoever makes the call must not begin it
/// again then, as much of the standard library does.
///
/// # Errors
/// There is no thread for it, or the kernel takes no handler. It was not called then.
pub(super) fn within<T: Send + 'static>(
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    prepare()?;
    let (sender, ended) = mpsc::sync_channel(1);
    let name = "interruptible".to_owned();
    let caller = thread::Builder::new().name(name).spawn(move || sender.send(call()))?;
    let mut wait = limit;
    loop {
        match ended.recv_timeout(wait) {
            Ok(outcome) => return Ok(outcome),
            Err(mpsc::RecvTimeoutError::Timeout) => caller.kill(SIGRTMIN()).map_err(io::Error::from)?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(io::Error::other("the call panicked")),
        }
        wait = SIGNALLED_EVERY;
    }
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
        assert_eq!(within(Duration::from_secs(1000), || 7).unwrap(), 7);
    }

    #[test]
    fn a_call_that_never_ends_is_interrupted_after_the_limit_and_not_before() {
        let (_end, full) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let bytes = vec![0; fcntl_setpipe_size(&full, 4096).unwrap()];
        assert_eq!(rustix::io::write(&full, &bytes), Ok(bytes.len()));
        let (begun, limit) = (Instant::now(), Duration::from_millis(50));
        let written = within(limit, move || rustix::io::write(&full, &[0])).unwrap();
        assert_eq!(written, Err(Errno::INTR));
        assert!(begun.elapsed() >= limit);
    }
}
