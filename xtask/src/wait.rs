//! Waits for a condition. A wait ends at a time limit or when the user interrupts the task.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::Failure;

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Flag that is set when the user interrupts the task with a signal.
#[derive(Clone, Debug)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
}

impl Interrupt {
    /// Registers handlers for SIGINT, SIGTERM and SIGHUP. These signals then end waits instead of
    /// the process, so that the task can clean up.
    ///
    /// # Errors
    /// Returns an error if a handler cannot be registered.
    pub fn new() -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag))
                .map_err(Failure::start_error("signal handling"))?;
        }
        Ok(Self { flag })
    }

    /// Waits until a condition holds, and returns the duration of the wait. `event` is used in
    /// error messages.
    ///
    /// # Errors
    /// Returns [`Failure::TimedOut`] after `within`, [`Failure::Interrupted`] if the user
    /// interrupts, or the error of `condition`.
    pub fn wait_until(
        &self,
        event: &'static str,
        within: Duration,
        mut condition: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<Duration, Failure> {
        wait_until(event, within, || self.check().and_then(|()| condition()))
    }

    /// Sleeps for the interval between two checks of a condition.
    ///
    /// # Errors
    /// Returns [`Failure::Interrupted`] if the user has interrupted the task.
    pub fn pause(&self) -> Result<(), Failure> {
        thread::sleep(POLL_INTERVAL);
        self.check()
    }

    /// Returns whether the task should continue, because the user has not interrupted it.
    pub fn should_continue(&self) -> bool {
        !self.flag.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), Failure> {
        if self.should_continue() { Ok(()) } else { Err(Failure::Interrupted) }
    }
}

/// Waits until a condition holds, and returns the duration of the wait. Unlike
/// [`Interrupt::wait_until`], this function ignores interrupts, so that it can be used in a
/// shutdown.
///
/// # Errors
/// Returns [`Failure::TimedOut`] after `within`, or the error of `condition`.
pub fn wait_until(
    event: &'static str,
    within: Duration,
    mut condition: impl FnMut() -> Result<bool, Failure>,
) -> Result<Duration, Failure> {
    let start = Instant::now();
    while !condition()? {
        if start.elapsed() > within {
            return Err(Failure::TimedOut { event, limit: within });
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(start.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_at_the_time_limit() {
        let interrupt = Interrupt { flag: Arc::default() };
        let timed_out = interrupt.wait_until("an impossible event", Duration::from_millis(60), || Ok(false));
        assert!(matches!(timed_out, Err(Failure::TimedOut { event: "an impossible event", .. })));
    }

    #[test]
    fn wait_ends_when_the_user_interrupts() {
        let interrupt = Interrupt { flag: Arc::new(AtomicBool::new(true)) };
        let interrupted = interrupt.wait_until("an impossible event", Duration::from_secs(600), || Ok(false));
        assert!(matches!(interrupted, Err(Failure::Interrupted)));
    }
}
