//! Turns of the tenants in the thread that evicts their memory. The time of the thread is shared among the
//! tenants by the weights of their classes, so that requests for a tenant with a slow device do not delay
//! those for other tenants by more than one request.

use std::time::Duration;

use tiering::evict::FlowClass;
use units::{Bytes, Ns, limits::RECLAIM_BYTES_PER_CALL_MAX};

use super::io_class;

/// Size of the smallest request.
pub(super) const REQUEST_BYTES_MIN: u64 = 256 << 10;
/// Time that a request should take. Later requests of the tenant are larger or smaller accordingly.
pub(super) const REQUEST_TIME: Ns = Ns::ms(10);
/// Shortest and longest time without requests after the kernel has evicted less than requested.
const PAUSE_MIN: Ns = Ns::ms(10);
const PAUSE_MAX: Ns = Ns::secs(1);

/// State of the requests to evict memory of one tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    /// Time that the requests took, multiplied by the default weight and divided by that of the class. A
    /// tenant with less comes first.
    used: Ns,
    /// Size of the next request if so much must be evicted.
    size: u64,
    /// Time until which nothing is requested.
    paused_until: Ns,
    /// Duration of the last pause; zero after a complete request.
    pause: Ns,
}

/// Result of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub class: FlowClass,
    pub requested: Bytes,
    pub evicted: Bytes,
    /// Time that the request took.
    pub elapsed: Ns,
    /// Time after the request.
    pub now: Ns,
}

impl Turns {
    pub const fn new() -> Self {
        Self { used: Ns::ZERO, size: REQUEST_BYTES_MIN, paused_until: Ns::ZERO, pause: Ns::ZERO }
    }

    /// Returns the used time: that of the requests, by the weight of the class.
    pub const fn used(&self) -> Ns {
        self.used
    }

    /// Raises the used time to that of the other tenants after a time without requests.
    pub fn rejoin(&mut self, least_used: Ns) {
        self.used = self.used.max(least_used);
    }

    /// Returns the size of a request for a tenant with `excess` above its threshold.
    pub fn request_size(&self, excess: Bytes) -> Bytes {
        excess.min(Bytes::new(self.size))
    }

    /// Returns the time until requests are allowed again; zero if they are.
    pub fn paused_for(&self, now: Ns) -> Duration {
        self.paused_until.since(now).as_duration()
    }

    /// Returns whether the kernel has evicted less than requested for so long that the pauses have reached
    /// their maximum.
    pub fn is_failing(&self) -> bool {
        self.pause == PAUSE_MAX
    }

    /// Adds a request, and determines the size and the time of the next one.
    pub fn add(&mut self, request: &Request) {
        let Request { class, requested, evicted, elapsed, now } = *request;
        let weighted =
            elapsed.0.saturating_mul(io_class::WEIGHT_DEFAULT.into()) / u64::from(io_class::weight(class));
        self.used = self.used.after(Ns(weighted));
        // Less than requested can mean that the kernel has nothing left to evict. It also stops early if a
        // device is slow.
        if evicted.get() < requested.get() / 2 {
            self.fail(now);
            return;
        }
        self.pause = Ns::ZERO;
        let per_time = u128::from(evicted.get()) * u128::from(REQUEST_TIME.0) / u128::from(elapsed.0.max(1));
        let largest = (2 * self.size).min(RECLAIM_BYTES_PER_CALL_MAX);
        self.size = u64::try_from(per_time).unwrap_or(u64::MAX).clamp(REQUEST_BYTES_MIN, largest);
    }

    /// Begins a pause, which is twice as long as the last one.
    pub fn fail(&mut self, now: Ns) {
        self.size = REQUEST_BYTES_MIN;
        self.pause = Ns(self.pause.0.saturating_mul(2)).clamp(PAUSE_MIN, PAUSE_MAX);
        self.paused_until = now.after(self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a complete request at time zero.
    fn add(turns: &mut Turns, class: FlowClass, mib: u64, ms: u64) {
        let requested = Bytes::mib(mib);
        turns.add(&Request { class, requested, evicted: requested, elapsed: Ns::ms(ms), now: Ns::ZERO });
    }

    #[test]
    fn requests_grow_until_they_take_their_time() {
        let mut turns = Turns::new();
        let largest = Bytes::gib(1);
        assert_eq!(turns.request_size(largest), Bytes::new(256 << 10));
        assert_eq!(turns.request_size(Bytes::mib(0)), Bytes::ZERO);
        add(&mut turns, FlowClass::URGENT, 1, 1);
        assert_eq!(turns.request_size(largest), Bytes::new(512 << 10), "at most twice as much");
        (0..20).for_each(|_| add(&mut turns, FlowClass::URGENT, 1, 1));
        assert_eq!(turns.request_size(largest), Bytes::mib(10), "1 MiB per ms");
        add(&mut turns, FlowClass::URGENT, 10, 1000);
        assert_eq!(turns.request_size(largest), Bytes::new(256 << 10), "a slow device");
        (0..20).for_each(|_| add(&mut turns, FlowClass::URGENT, 64, 0));
        assert_eq!(turns.request_size(largest), Bytes::mib(64));
    }

    #[test]
    fn time_counts_by_the_weight_of_the_class() {
        let used = |class| {
            let mut turns = Turns::new();
            add(&mut turns, class, 1, 40);
            turns.used()
        };
        assert_eq!([FlowClass::URGENT, FlowClass::LEAST_URGENT].map(used), [Ns::ms(10), Ns::ms(80)]);
        let mut turns = Turns::new();
        turns.rejoin(Ns::ms(7));
        turns.rejoin(Ns::ms(5));
        assert_eq!(turns.used(), Ns::ms(7));
    }

    #[test]
    fn pauses_double_until_a_request_evicts_half_of_its_size() {
        let mut turns = Turns::new();
        let mut request = |evicted, now| {
            turns.add(&Request {
                class: FlowClass::URGENT,
                requested: Bytes::mib(2),
                evicted: Bytes::mib(evicted),
                elapsed: Ns::ms(1),
                now,
            });
            (turns.paused_for(now).as_millis(), turns.is_failing())
        };
        let paused: Vec<_> = (0..9).map(|at| request(0, Ns::secs(2 * at))).collect();
        assert_eq!(paused[..3], [(10, false), (20, false), (40, false)]);
        assert_eq!(paused[6..], [(640, false), (1000, true), (1000, true)]);
        assert_eq!(request(1, Ns::secs(20)), (0, false));
    }
}
