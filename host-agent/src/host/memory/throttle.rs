//! Rate limit for all scrubs of a host together, so that scrubs leave bandwidth of pool memory to
//! VMs. [`TokenBucket`] computes the waits from a time passed as argument; [`Throttle`] reads the
//! clock and sleeps. Operations that a VM waits for are not throttled.

use std::{
    num::NonZeroU64,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use units::{Ns, limits::SCRUB_BURST_DURATION};

/// Token bucket, which grants bytes in the order of requests.
#[derive(Debug)]
struct TokenBucket {
    bytes_per_s: NonZeroU64,
    /// Time until which the bytes granted so far use the whole rate.
    granted_until: Ns,
}

impl TokenBucket {
    /// Grants a number of bytes, and returns the wait before they may be used.
    fn take(&mut self, now: Ns, bytes: u64) -> Ns {
        let earliest = Ns(now.since(SCRUB_BURST_DURATION).0);
        let start = self.granted_until.max(earliest);
        self.granted_until = start.after(self.duration_of(bytes));
        start.since(now)
    }

    fn duration_of(&self, bytes: u64) -> Ns {
        let ns = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s.get());
        Ns(u64::try_from(ns).unwrap_or(u64::MAX))
    }
}

/// Throttle shared by all scrubs of a host.
#[derive(Debug)]
pub struct Throttle {
    bucket: Mutex<TokenBucket>,
    started: Instant,
}

impl Throttle {
    /// Creates a throttle with a rate in bytes per second.
    pub fn new(bytes_per_s: NonZeroU64) -> Self {
        let bucket = TokenBucket { bytes_per_s, granted_until: Ns::ZERO };
        Self { bucket: Mutex::new(bucket), started: Instant::now() }
    }

    /// Sleeps until this number of bytes may be used.
    pub fn wait_for(&self, bytes: u64) {
        let now = Ns::from(self.started.elapsed());
        // A poisoned bucket is consistent, because one assignment changes it.
        let wait = self.bucket.lock().unwrap_or_else(PoisonError::into_inner).take(now, bytes).as_duration();
        if wait > Duration::ZERO {
            std::thread::sleep(wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn bucket(mib_per_s: u64) -> TokenBucket {
        TokenBucket { bytes_per_s: NonZeroU64::new(mib_per_s * MIB).unwrap(), granted_until: Ns::ZERO }
    }

    #[test]
    fn concurrent_scrubs_stay_within_the_rate() {
        let mut bucket = bucket(1000);
        let mut used = Vec::new(); // time and number of bytes of each grant
        let mut now = Ns::secs(5);
        for n in 0..2000 {
            let bytes = (1 + n % 7) * MIB;
            used.push((now.after(bucket.take(now, bytes)), bytes));
            now = now.after(Ns((n % 11) * 400_000)); // 0 to 4 ms between requests
        }
        for (first, (from, _)) in used.iter().enumerate() {
            let mut sum = 0;
            for (at, bytes) in &used[first..] {
                sum += bytes;
                let allowed = (at.since(*from).0 + SCRUB_BURST_DURATION.0) * MIB / 1_000_000 + 7 * MIB;
                assert!(sum <= allowed, "{sum} bytes from {from} to {at}");
            }
        }
    }

    #[test]
    fn throttle_serves_in_request_order() {
        let mut bucket = bucket(1);
        let waits: Vec<Ns> = (0..4).map(|_| bucket.take(Ns::secs(9), MIB)).collect();
        assert!(waits.is_sorted() && waits[3].since(waits[1]) == Ns::secs(2), "{waits:?}");
    }

    #[test]
    fn idle_throttle_accumulates_at_most_one_burst() {
        let mut bucket = bucket(1000);
        assert_eq!(bucket.take(Ns::secs(100), MIB), Ns::ZERO);
        let burst_mib = (0..100).take_while(|_| bucket.take(Ns::secs(100), MIB) == Ns::ZERO).count();
        assert!(burst_mib as u64 <= SCRUB_BURST_DURATION.as_ms(), "{burst_mib} MiB without a wait");
    }

    #[test]
    fn throttle_delays_requests_above_the_rate() {
        let throttle = Throttle::new(NonZeroU64::new(100 * MIB).unwrap());
        let started = Instant::now();
        (0..6).for_each(|_| throttle.wait_for(MIB));
        assert!(started.elapsed() >= Duration::from_millis(40), "{:?}", started.elapsed());
    }
}
