//! Waits for a condition, with a time limit and until the user interrupts.

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

/// Interval between checks of other processes.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// Interrupt flag of the user.
#[derive(Clone, Debug)]
pub struct Patience {
    stop: Arc<AtomicBool>,
}

impl Patience {
    /// From now on SIGINT, SIGTERM and SIGHUP end waits instead of the process, so that it can clear up.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn new() -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&stop))
                .map_err(Failure::start("signal handling"))?;
        }
        Ok(Self { stop })
    }

    /// Waits until a condition holds, and returns how long it took.
    ///
    /// # Errors
    /// [`Failure::Late`], [`Failure::Interrupted`], or the error of `look`.
    pub fn until(
        &self,
        what: &'static str,
        within: Duration,
        mut look: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<Duration, Failure> {
        until(what, within, || self.check().and_then(|()| look()))
    }

    /// A moment between two looks.
    ///
    /// # Errors
    /// [`Failure::Interrupted`].
    pub fn pause(&self) -> Result<(), Failure> {
        thread::sleep(LOOK_EVERY);
        self.check()
    }

    /// Returns whether the user has not interrupted.
    pub fn lasts(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), Failure> {
        if self.lasts() { Ok(()) } else { Err(Failure::Interrupted) }
    }
}

/// Waits until a condition holds, also after an interrupt, for an orderly end.
///
/// # Errors
/// [`Failure::Late`], or the error of `look`.
pub fn until(
    what: &'static str,
    within: Duration,
    mut look: impl FnMut() -> Result<bool, Failure>,
) -> Result<Duration, Failure> {
    let begun = Instant::now();
    while !look()? {
        if begun.elapsed() > within {
            return Err(Failure::Late { what, within });
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(begun.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_come_is_late() {
        let patience = Patience { stop: Arc::default() };
        let late = patience.until("a miracle", Duration::from_millis(60), || Ok(false));
        assert!(matches!(late, Err(Failure::Late { what: "a miracle", .. })));
    }

    #[test]
    fn a_person_who_interrupts_does_not_wait() {
        let patience = Patience { stop: Arc::new(AtomicBool::new(true)) };
        let ended = patience.until("a miracle", Duration::from_secs(600), || Ok(false));
        assert!(matches!(ended, Err(Failure::Interrupted)));
    }
}
