//! Execution of steps in which the kernel may block forever. Unbinding a driver waits until no page
//! of the device is pinned, for example by VFIO or io_uring, and signals do not end that wait. Each
//! step runs in its own thread. The thread is abandoned after a time limit, so that a stuck slice
//! does not delay other slices.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use units::limits::{HUNG_SLICES_PER_REGION_MAX, SLICE_STEP_TIMEOUT};

use super::{SliceError, SysfsError};

/// Set of the devices with a running step, and the time limit for steps.
#[derive(Debug)]
pub(super) struct DetachedSteps {
    timeout: Duration,
    devices: Arc<Mutex<BTreeSet<String>>>,
}

/// Registration of a running step; dropping it ends the registration.
struct RunningStep {
    devices: Arc<Mutex<BTreeSet<String>>>,
    device: String,
}

impl Drop for RunningStep {
    fn drop(&mut self) {
        lock(&self.devices).remove(&self.device);
    }
}

/// Locks the set. A poisoned set is consistent, because no call can panic while the set is locked.
fn lock(devices: &Mutex<BTreeSet<String>>) -> MutexGuard<'_, BTreeSet<String>> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for DetachedSteps {
    fn default() -> Self {
        Self::with_timeout(SLICE_STEP_TIMEOUT.as_duration())
    }
}

impl DetachedSteps {
    /// Creates an empty set. Steps are abandoned after the time limit.
    pub(super) fn with_timeout(timeout: Duration) -> Self {
        Self { timeout, devices: Arc::default() }
    }

    /// Returns the number of running steps.
    pub(super) fn count(&self) -> usize {
        lock(&self.devices).len()
    }

    /// Returns the names of the devices with a running step.
    pub(super) fn devices(&self) -> BTreeSet<String> {
        lock(&self.devices).clone()
    }

    /// Checks that no step of a device is running.
    ///
    /// # Errors
    /// [`SliceError::Stuck`] if a step is running.
    pub(super) fn check_not_running(&self, device: &str) -> Result<(), SliceError> {
        if lock(&self.devices).contains(device) { Err(self.stuck_error(device)) } else { Ok(()) }
    }

    /// Runs a step in a new thread, and waits for its end up to the time limit.
    ///
    /// # Errors
    /// The error of the step; [`SliceError::Stuck`] if this or an earlier step of the device still
    /// runs; [`SliceError::TooManyStuck`]; [`SliceError::StepFailed`] if the thread cannot be
    /// started or panics.
    pub(super) fn run(
        &self,
        device: &str,
        step: impl FnOnce() -> Result<(), SysfsError> + Send + 'static,
    ) -> Result<(), SliceError> {
        let running = self.start(device)?;
        let (sender, outcome) = mpsc::channel();
        let work = move || {
            let _ = close_descriptors(); // on failure the descriptors stay open until the step ends
            let result = step();
            let device = running.device.clone();
            drop(running);
            if let Err(mpsc::SendError(result)) = sender.send(result) {
                let error = result.err().map(|error| units::chain(&error));
                tracing::info!(device, error, "stuck step of a slice ended");
            }
        };
        let spawned = thread::Builder::new().name("slice-step".to_owned()).spawn(work);
        spawned.map_err(|errno| SliceError::StepFailed { device: device.to_owned(), errno })?;
        match outcome.recv_timeout(self.timeout) {
            Ok(result) => Ok(result?),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = self.timeout.as_secs();
                tracing::error!(device, seconds, "slice is stuck: the kernel waits for pinned pages");
                Err(self.stuck_error(device))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let errno = io::Error::other("the thread of the step panicked");
                Err(SliceError::StepFailed { device: device.to_owned(), errno })
            }
        }
    }

    fn start(&self, device: &str) -> Result<RunningStep, SliceError> {
        let mut devices = lock(&self.devices);
        if devices.contains(device) {
            return Err(self.stuck_error(device));
        }
        if devices.len() >= HUNG_SLICES_PER_REGION_MAX {
            return Err(SliceError::TooManyStuck { device: device.to_owned() });
        }
        devices.insert(device.to_owned());
        Ok(RunningStep { devices: Arc::clone(&self.devices), device: device.to_owned() })
    }

    fn stuck_error(&self, device: &str) -> SliceError {
        SliceError::Stuck { device: device.to_owned(), seconds: self.timeout.as_secs() }
    }
}

/// Gives this thread its own descriptor table with only the standard streams. A thread that is
/// stuck in the kernel outlives its process, and would otherwise keep the agent's lock files open.
fn close_descriptors() -> io::Result<()> {
    const FIRST_CLOSED: libc::c_uint = 3;
    // SAFETY: the kernel unshares the descriptor table before it closes descriptors, so other
    // threads keep theirs. No object owned by this thread refers to a closed descriptor.
    let done = unsafe {
        libc::syscall(libc::SYS_close_range, FIRST_CLOSED, libc::c_uint::MAX, libc::CLOSE_RANGE_UNSHARE)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a step that blocks until the returned sender is dropped.
    fn blocking_step() -> (mpsc::Sender<()>, impl FnOnce() -> Result<(), SysfsError> + Send + 'static) {
        let (end, ended) = mpsc::channel::<()>();
        (end, move || {
            let _ = ended.recv(); // fails as soon as the sender is dropped
            Ok(())
        })
    }

    #[test]
    fn stuck_step_does_not_block_other_devices() {
        let steps = DetachedSteps::with_timeout(Duration::from_millis(50));
        let (end, step) = blocking_step();
        let stuck = steps.run("dax1.1", step).unwrap_err();
        assert!(matches!(&stuck, SliceError::Stuck { device, .. } if device == "dax1.1"), "{stuck}");
        let again = steps.run("dax1.1", || panic!("a second step of the device ran")).unwrap_err();
        assert!(matches!(again, SliceError::Stuck { .. }), "{again}");
        steps.run("dax1.2", || Ok(())).unwrap();
        assert_eq!(steps.count(), 1);
        drop(end);
        while steps.count() > 0 {
            thread::yield_now();
        }
        steps.run("dax1.1", || Ok(())).unwrap();
    }

    #[test]
    fn stuck_steps_are_limited() {
        let steps = DetachedSteps::with_timeout(Duration::ZERO);
        let senders: Vec<_> = (0..HUNG_SLICES_PER_REGION_MAX)
            .map(|n| {
                let (end, step) = blocking_step();
                steps.run(&format!("dax1.{n}"), step).unwrap_err();
                end
            })
            .collect();
        let error = steps.run("dax2.1", || panic!("a step above the limit ran")).unwrap_err().to_string();
        assert_eq!(error, "cannot change dax2.1: the limit of 64 stuck slices is reached");
        drop(senders);
    }

    #[test]
    fn step_thread_closes_descriptors_only_for_itself() {
        let file = tempfile::tempfile().unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let (sender, is_open) = mpsc::channel();
        let check = move || {
            let exists = std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists();
            sender.send(exists).unwrap();
            Ok(())
        };
        DetachedSteps::with_timeout(Duration::from_secs(60)).run("dax1.1", check).unwrap();
        assert!(!is_open.recv().unwrap(), "the thread of the step still had the descriptor");
        file.set_len(1).unwrap(); // the descriptor is still open in this thread
    }
}
