//! How the process of a guest ends, and what it leaves tidy when there is no time.

use std::{
    ffi::CString,
    io::{self, Write as _},
    os::fd::OwnedFd,
    panic,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::Instant,
};

use rustix::{
    fs::AtFlags,
    termios::{OptionalActions, Termios, tcsetattr},
};
use units::limits::MAIN_THREAD_ENDS_WITHIN;

use crate::{
    bell::Bell,
    confine::threads::{self, Work},
};

/// The guest switched itself off.
pub const POWERED_OFF: u8 = 0;
/// Nothing was started, or the VMM failed.
pub const FAILED: u8 = 1;
/// The guest asked to be started anew.
pub const RESET: u8 = 10;
/// The guest's processor gave up: a triple fault, or an instruction that KVM does not know.
pub const CRASHED: u8 = 11;
/// The guest was asked to switch itself off, did not, and was stopped.
pub const STOPPED: u8 = 12;
/// A slice was taken away under the guest.
pub const SLICE_LOST: u8 = 20;
/// The host had no memory left to put behind what the guest touched.
pub const MEMORY_EXHAUSTED: u8 = 21;
/// Memory of the guest cannot hold what was written to it.
pub const MEMORY_BROKEN: u8 = 22;
/// A thread tried what it never needs: the guest may have broken out into it.
pub const FORBIDDEN: u8 = 30;

/// A file that is there for as long as a process lives.
#[derive(Debug)]
struct Entry {
    folder: OwnedFd,
    name: CString,
}

static TERMINAL: OnceLock<Termios> = OnceLock::new();
static SOCKET: OnceLock<Entry> = OnceLock::new();
static TIDIED: AtomicBool = AtomicBool::new(false);
static BELL: OnceLock<Arc<Bell>> = OnceLock::new();
/// How the main thread is to end the process; 0 if it is not.
static TOLD: AtomicU8 = AtomicU8::new(0);

/// Says what wakes the main thread when another one wants the end; only the first word counts.
pub fn wake_by(bell: Arc<Bell>) {
    let _ = BELL.set(bell);
}

/// Ends the process if another thread wants it to. For the main thread, whenever it was woken.
pub fn at_once_if_told() {
    match TOLD.load(Ordering::SeqCst) {
        0 => {}
        code => at_once(code),
    }
}

/// Says how the terminal was before it was changed; only the first word counts.
pub fn restore_terminal_at_end(before: Termios) {
    let _ = TERMINAL.set(before);
}

/// Says which socket is to be gone with this process; only the first word counts. The folder is held open, so that the
/// socket is found also when this process sees other folders by then.
pub fn remove_socket_at_end(folder: OwnedFd, name: CString) {
    let _ = SOCKET.set(Entry { folder, name });
}

/// Tidies, once: what has the name of the socket later is another process's. Safe in a signal handler.
pub fn tidy() {
    if TIDIED.swap(true, Ordering::SeqCst) {
        return;
    }
    if let Some(before) = TERMINAL.get() {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, before);
    }
    // No other thread may remove files, as the guest may have broken out into it; a socket that is left is replaced.
    if let Some(Entry { folder, name }) = SOCKET.get().filter(|_| is_main_thread()) {
        let _ = rustix::fs::unlinkat(folder, name.as_c_str(), AtFlags::empty());
    }
}

/// It is alone until others are started, each of which says what it is there for.
fn is_main_thread() -> bool {
    threads::work().is_none_or(|work| work == Work::Main)
}

/// Says something on standard error, if anybody listens: a guest goes on without.
pub fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A panic of a thread that the guest needs ends the process, as a guest that lost a processor or a device is none any more.
/// Its message is all that is said: a backtrace would read files, which threads that serve a guest may not.
pub fn when_any_thread_panics() {
    panic::set_hook(Box::new(|panic| {
        say(&format!("error: {panic}"));
        if threads::work().is_none_or(Work::is_needed) {
            at_once(FAILED)
        }
    }));
}

/// Ends the process, never to return to the guest. The main thread does it, as no other may remove files; it is waited for no
/// longer than it takes. Safe in a signal handler.
pub fn at_once(code: u8) -> ! {
    if let Some(bell) = BELL.get().filter(|_| !is_main_thread()) {
        TOLD.store(code, Ordering::SeqCst);
        bell.ring();
        let give_up = Instant::now() + MAIN_THREAD_ENDS_WITHIN.as_duration();
        while Instant::now() < give_up {
            std::thread::yield_now();
        }
    }
    tidy();
    // SAFETY: it takes a number and does not return; nothing of this process is used any more.
    unsafe { libc::_exit(i32::from(code)) }
}
