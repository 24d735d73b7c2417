//! One attempt to move the pool memory of a guest (pre-copy live migration, Clark et al., NSDI 2005).
//! The first round copies all pages with data. Each further round copies the pages that were written
//! since the previous round. When few pages remain, the guest is paused, the remaining pages are
//! copied, and the spare memory is mapped in place of the pool memory.

use std::{
    io,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use units::limits::{
    REHOME_CHUNK_PAGES, REHOME_COPY_BYTES_PER_S_MAX, REHOME_DEVICES_STOP_TIMEOUT,
    REHOME_ROUNDS_BEFORE_THROTTLE, REHOME_THROTTLE_STEP_PERCENT, VCPUS_STOP_TIMEOUT,
};

use super::{Rehomer, dirty_pages::DirtyPages, throttle::Throttle};
use crate::{
    memory::{
        PAGE_BYTES, SpareMemory,
        pool_region::{NotMovable, PoolRegion, replace_mappings},
    },
    vcpu::PauseReason,
};

/// Reason why an attempt failed. The guest uses its pool memory as before.
#[derive(Debug, thiserror::Error)]
pub(super) enum MigrationError {
    #[error("cancelled")]
    Cancelled,
    #[error("the guest writes faster than pages are copied: {remaining} bytes remain after {rounds} rounds")]
    NotConverging { remaining: u64, rounds: u32 },
    #[error("a vCPU did not pause within {VCPUS_STOP_TIMEOUT}")]
    VcpuBusy,
    #[error("a device did not become idle within {REHOME_DEVICES_STOP_TIMEOUT}")]
    DeviceBusy,
    #[error(transparent)]
    NotMovable(#[from] NotMovable),
    #[error("cannot {operation}")]
    System {
        operation: &'static str,
        #[source]
        errno: io::Error,
    },
}

fn system_error(operation: &'static str) -> impl Fn(io::Error) -> MigrationError {
    move |errno| MigrationError::System { operation, errno }
}

/// Attempt in progress.
pub(super) struct Migration<'a> {
    rehomer: &'a Rehomer,
    regions: &'a [PoolRegion],
    spare: &'a SpareMemory,
    throttle: Throttle<'a>,
    buffer: Vec<u8>,
    copied_bytes: u64,
    speed: CopySpeed,
}

/// Mean speed of all copies of an attempt.
#[derive(Clone, Copy, Debug, Default)]
struct CopySpeed {
    /// Copied pages, and pages that were skipped because they contain zeros.
    bytes: u64,
    time: Duration,
}

impl CopySpeed {
    fn record(&mut self, bytes: u64, time: Duration) {
        self.bytes += bytes;
        self.time += time;
    }

    /// Returns the estimated time to copy this many bytes, at a speed of at most
    /// [`REHOME_COPY_BYTES_PER_S_MAX`].
    fn estimate(&self, bytes: u64) -> Duration {
        let nanoseconds = |per_bytes: u64, time: Duration| {
            let estimate = u128::from(bytes) * time.as_nanos() / u128::from(per_bytes.max(1));
            Duration::from_nanos(u64::try_from(estimate).unwrap_or(u64::MAX))
        };
        nanoseconds(self.bytes, self.time)
            .max(nanoseconds(REHOME_COPY_BYTES_PER_S_MAX, Duration::from_secs(1)))
    }
}

/// Result of the attempt to pause the guest and to complete the migration.
enum Completion {
    /// The guest uses the spare memory. It was paused for this time.
    Done(Duration),
    /// Too many pages were written before the guest was paused. The guest runs again.
    PagesRemain(DirtyPages),
}

impl<'a> Migration<'a> {
    pub(super) fn new(rehomer: &'a Rehomer, regions: &'a [PoolRegion], spare: &'a SpareMemory) -> Self {
        let throttle = Throttle::new(&rehomer.vcpus, rehomer.limits.throttle_percent_max, Instant::now());
        let buffer = vec![0; REHOME_CHUNK_PAGES * PAGE_BYTES];
        Self { rehomer, regions, spare, throttle, buffer, copied_bytes: 0, speed: CopySpeed::default() }
    }

    /// Moves the memory. Returns the time for which the guest was paused. After an error, the spare
    /// memory has no pages.
    pub(super) fn run(mut self) -> Result<Duration, MigrationError> {
        self.rehomer.shared.status().total_bytes = self.regions.iter().map(PoolRegion::bytes).sum();
        let result = self.clear_spare().and_then(|()| self.migrate());
        if result.is_err() {
            self.stop_logging();
            // An error leaves pages allocated. The next attempt clears the spare memory again.
            let _ = self.spare.clear();
        }
        result
    }

    fn clear_spare(&self) -> Result<(), MigrationError> {
        self.spare.clear().map_err(system_error("clear the spare local memory"))
    }

    /// Stops the log of writes. An error is ignored: the log does not affect the guest's data.
    fn stop_logging(&self) {
        for region in self.regions {
            let _ = region.stop_logging(&self.rehomer.vm);
        }
    }

    fn migrate(&mut self) -> Result<Duration, MigrationError> {
        for region in self.regions {
            region.start_logging(&self.rehomer.vm).map_err(system_error("log the writes of the guest"))?;
        }
        let mut pages = self.pages_with_data();
        let rounds_max = self.rehomer.limits.rounds_max;
        for round in 1..=rounds_max {
            self.copy_pages(&pages, round == 1)?;
            self.rehomer.shared.status().rounds = round;
            let written = self.take_written_pages()?;
            if self.speed.estimate(written.bytes()) < self.rehomer.limits.pause_max {
                match self.pause_and_complete(written)? {
                    Completion::Done(pause) => return Ok(pause),
                    Completion::PagesRemain(remaining) => pages = remaining,
                }
            } else {
                if needs_throttle(round, pages.bytes(), written.bytes()) {
                    self.throttle.increase(REHOME_THROTTLE_STEP_PERCENT);
                }
                pages = written;
            }
        }
        Err(MigrationError::NotConverging { remaining: pages.bytes(), rounds: rounds_max })
    }

    fn no_pages(&self) -> DirtyPages {
        DirtyPages::new(self.regions.iter().map(PoolRegion::bytes))
    }

    fn pages_with_data(&self) -> DirtyPages {
        let mut pages = self.no_pages();
        for (index, region) in self.regions.iter().enumerate() {
            region.data_ranges().iter().for_each(|range| pages.add(index, range));
        }
        pages
    }

    fn take_written_pages(&self) -> Result<DirtyPages, MigrationError> {
        let mut pages = self.no_pages();
        for (region, bitmap) in self.regions.iter().zip(pages.bitmaps()) {
            region
                .move_log_to(&self.rehomer.vm, bitmap)
                .map_err(system_error("read the log of the guest's writes"))?;
        }
        Ok(pages)
    }

    /// Copies pages to the spare memory. In the first round, the spare memory contains zeros, and
    /// pages with zeros are skipped.
    fn copy_pages(&mut self, pages: &DirtyPages, skips_zeros: bool) -> Result<(), MigrationError> {
        let start = Instant::now();
        for (index, region) in self.regions.iter().enumerate() {
            for run in pages.runs(index, REHOME_CHUNK_PAGES) {
                if self.rehomer.shared.is_cancelled.load(Ordering::SeqCst) {
                    return Err(MigrationError::Cancelled);
                }
                let bytes = usize::try_from(run.end - run.start).expect("a run has at most one chunk");
                region.read(self.rehomer.memory.guest(), run.start, &mut self.buffer[..bytes]);
                self.write_chunk(region.spare_offset + run.start, bytes, skips_zeros)
                    .map_err(system_error("allocate local memory"))?;
                self.throttle.update(Instant::now());
            }
        }
        self.speed.record(pages.bytes(), start.elapsed());
        Ok(())
    }

    /// Writes the start of the buffer to the spare memory.
    fn write_chunk(&mut self, offset: u64, bytes: usize, skips_zeros: bool) -> io::Result<()> {
        let mut written = 0;
        if skips_zeros {
            for (page, at) in self.buffer[..bytes].chunks(PAGE_BYTES).zip((offset..).step_by(PAGE_BYTES)) {
                if page.iter().any(|byte| *byte != 0) {
                    self.spare.write(at, page)?;
                    written += page.len() as u64;
                }
            }
        } else {
            self.spare.write(offset, &self.buffer[..bytes])?;
            written = bytes as u64;
        }
        self.copied_bytes += written;
        self.rehomer.shared.status().copied_bytes = self.copied_bytes;
        Ok(())
    }

    /// Pauses the guest, copies the remaining pages, and replaces the mappings.
    fn pause_and_complete(&mut self, remaining: DirtyPages) -> Result<Completion, MigrationError> {
        let start = Instant::now();
        if !self.rehomer.vcpus.pause(PauseReason::Rehome) {
            return Err(MigrationError::VcpuBusy);
        }
        let completed = self.complete(remaining);
        self.rehomer.vcpus.resume(PauseReason::Rehome);
        Ok(match completed? {
            None => Completion::Done(start.elapsed()),
            Some(pages) => Completion::PagesRemain(pages),
        })
    }

    /// Completes the migration of a paused guest. Returns the remaining pages if they are too many.
    fn complete(&mut self, mut remaining: DirtyPages) -> Result<Option<DirtyPages>, MigrationError> {
        let deadline = Instant::now() + REHOME_DEVICES_STOP_TIMEOUT.as_duration();
        let devices = self.rehomer.devices.quiesce(deadline).ok_or(MigrationError::DeviceBusy)?;
        remaining.add_all(&self.take_written_pages()?);
        if self.speed.estimate(remaining.bytes()) > 2 * self.rehomer.limits.pause_max {
            return Ok(Some(remaining));
        }
        self.copy_pages(&remaining, false)?;
        replace_mappings(self.regions, self.spare).map_err(system_error("map the local memory"))?;
        self.stop_logging();
        drop(devices);
        Ok(None)
    }
}

/// Returns whether the vCPUs must be throttled more: after some rounds, the guest still writes more
/// than half of the bytes that a round copies.
fn needs_throttle(round: u32, copied: u64, written: u64) -> bool {
    round >= REHOME_ROUNDS_BEFORE_THROTTLE && written > copied / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_time_is_estimated_from_the_mean_speed_and_a_maximum_speed() {
        let mut speed = CopySpeed::default();
        assert_eq!(speed.estimate(REHOME_COPY_BYTES_PER_S_MAX), Duration::from_secs(1));
        speed.record(6 << 20, Duration::from_secs(2));
        speed.record(2 << 20, Duration::from_secs(2));
        assert_eq!(speed.estimate(4 << 20), Duration::from_secs(2));
        speed.record(REHOME_COPY_BYTES_PER_S_MAX * 100, Duration::ZERO);
        assert_eq!(speed.estimate(REHOME_COPY_BYTES_PER_S_MAX), Duration::from_secs(1));
    }

    #[test]
    fn throttle_increases_only_while_late_rounds_do_not_halve_the_pages() {
        assert!(!needs_throttle(REHOME_ROUNDS_BEFORE_THROTTLE - 1, 100, 100));
        assert!(!needs_throttle(REHOME_ROUNDS_BEFORE_THROTTLE, 100, 50));
        assert!(needs_throttle(REHOME_ROUNDS_BEFORE_THROTTLE, 100, 51));
    }
}
