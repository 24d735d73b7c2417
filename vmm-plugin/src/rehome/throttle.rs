//! Throttle that keeps vCPUs out of KVM_RUN for a part of each period, so that they write fewer
//! pages than the migration copies (auto-converge). The migration calls [`Throttle::update`] between
//! chunks, so the throttle needs no thread.

use std::time::{Duration, Instant};

use units::limits::REHOME_THROTTLE_PERIOD;

use crate::{vcpu::PauseReason, vcpu_threads::VcpuThreads};

/// Throttle of all vCPUs of a guest. Drop resumes the vCPUs.
#[derive(Debug)]
pub(super) struct Throttle<'a> {
    vcpus: &'a VcpuThreads,
    percent: u32,
    percent_max: u32,
    start: Instant,
}

impl<'a> Throttle<'a> {
    /// Creates a throttle without effect.
    pub(super) fn new(vcpus: &'a VcpuThreads, percent_max: u32, now: Instant) -> Self {
        Self { vcpus, percent: 0, percent_max, start: now }
    }

    /// Increases the fraction of time for which vCPUs are stopped, up to the maximum.
    pub(super) fn increase(&mut self, percent: u32) {
        self.percent = (self.percent + percent).min(self.percent_max);
    }

    /// Stops or resumes the vCPUs, depending on the position of `now` in the period.
    pub(super) fn update(&self, now: Instant) {
        if self.percent == 0 {
            return;
        }
        if is_stopped(self.percent, now.saturating_duration_since(self.start)) {
            self.vcpus.request_pause(PauseReason::Throttle);
        } else {
            self.vcpus.resume(PauseReason::Throttle);
        }
    }
}

impl Drop for Throttle<'_> {
    fn drop(&mut self) {
        self.vcpus.resume(PauseReason::Throttle);
    }
}

/// Returns whether vCPUs are stopped at a time after the start of the first period.
fn is_stopped(percent: u32, elapsed: Duration) -> bool {
    let period = REHOME_THROTTLE_PERIOD.as_duration();
    let in_period = elapsed.as_nanos() % period.as_nanos();
    in_period * 100 < period.as_nanos() * u128::from(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_stopped_for_the_given_part_of_each_period() {
        let period = REHOME_THROTTLE_PERIOD.as_duration();
        for percent in [0, 20, 90] {
            let stopped = (0..300).filter(|step| is_stopped(percent, period * *step / 100)).count();
            assert_eq!(stopped, 3 * percent as usize);
        }
    }
}
