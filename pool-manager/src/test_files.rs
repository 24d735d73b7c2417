//! Special and private files for tests, and a time limit for functions that must not wait for such a file.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::fs::{CWD, Mode, mkfifoat};

/// Time limit of [`run_with_timeout`].
const TIMEOUT: Duration = Duration::from_secs(10);

/// Creates a FIFO with mode 0600 at `path`. Opening the FIFO for reading waits for a writer.
pub(crate) fn create_fifo(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

/// Writes a file that only its owner can access.
pub(crate) fn write_private_file(path: &Path, contents: impl AsRef<[u8]>) {
    fs::write(path, contents).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}

/// Runs `run` on another thread and returns its result.
///
/// # Panics
/// If `run` does not return within [`TIMEOUT`].
#[track_caller]
pub(crate) fn run_with_timeout<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(run()));
    receiver.recv_timeout(TIMEOUT).expect("the function waits for a special file")
}
