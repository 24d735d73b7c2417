//! Requests to evict the memory of tenants, by one thread. The time of the thread is shared among the tenants
//! by weighted fair queueing with the weights of their classes, so that requests for a tenant with a slow
//! device do not delay those for other tenants by more than one request.

use std::time::Duration;

use tiering::evict::FlowClass;
use units::{Bytes, Ns};

use super::io_class;

/// Size of the smallest request.
pub(super) const REQUEST_BYTES_MIN: u64 = 256 << 10;
/// Size of the largest request. It limits the time for which a request to a slow device delays others.
const REQUEST_BYTES_MAX: u64 = 4 << 20;
/// Time that a request should take. Later requests of the tenant are larger or smaller accordingly.
pub(super) const REQUEST_TIME: Ns = Ns::ms(10);
/// Largest virtual time by which a tenant can be behind the first one, for example after its device stalled.
const LAG_MAX: Ns = Ns::secs(2);
/// Shortest time without requests after the kernel has evicted less than requested.
const PAUSE_MIN: Ns = Ns::ms(10);
/// Longest time without requests after the kernel has evicted less than requested.
const PAUSE_MAX: Ns = Ns::secs(1);

/// State of the requests for one tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Requests {
    /// Time that the requests took, multiplied by the default weight and divided by that of the class. The
    /// tenant with the smallest virtual time comes first.
    virtual_time: Ns,
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
    /// Class of the tenant.
    pub class: FlowClass,
    /// Requested memory.
    pub requested: Bytes,
    /// Evicted memory, at most the requested memory.
    pub evicted: Bytes,
    /// Time that the request took.
    pub elapsed: Ns,
    /// Time after the request.
    pub now: Ns,
}

impl Requests {
    /// Creates the state of a tenant without requests.
    pub const fn new() -> Self {
        Self { virtual_time: Ns::ZERO, size: REQUEST_BYTES_MIN, paused_until: Ns::ZERO, pause: Ns::ZERO }
    }

    /// Returns the virtual time.
    pub const fn virtual_time(&self) -> Ns {
        self.virtual_time
    }

    /// Limits the virtual time. `least` is that of the first tenant. A tenant gains nothing by a time without
    /// requests, and is at most [`LAG_MAX`] behind.
    pub fn limit_virtual_time(&mut self, least: Ns) {
        self.virtual_time = self.virtual_time.clamp(least, least.after(LAG_MAX));
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
        let (weight, default) = (u64::from(io_class::weight(class)), u64::from(io_class::WEIGHT_DEFAULT));
        self.virtual_time = self.virtual_time.after(Ns(elapsed.0.saturating_mul(default) / weight));
        // The kernel also evicts less than requested if a device is slow.
        if evicted.get() < requested.get() / 2 {
            self.size = REQUEST_BYTES_MIN;
            self.pause = Ns(self.pause.0.saturating_mul(2)).clamp(PAUSE_MIN, PAUSE_MAX);
            self.paused_until = now.after(self.pause);
            return;
        }
        self.pause = Ns::ZERO;
        let per_time = u128::from(evicted.get()) * u128::from(REQUEST_TIME.0) / u128::from(elapsed.0.max(1));
        let largest = (2 * self.size).min(REQUEST_BYTES_MAX);
        self.size = u64::try_from(per_time).unwrap_or(u64::MAX).clamp(REQUEST_BYTES_MIN, largest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a complete request at time zero.
    fn add(requests: &mut Requests, class: FlowClass, mib: u64, ms: u64) {
        let requested = Bytes::mib(mib);
        requests.add(&Request { class, requested, evicted: requested, elapsed: Ns::ms(ms), now: Ns::ZERO });
    }

    #[test]
    fn requests_grow_until_they_take_their_time() {
        let mut requests = Requests::new();
        let largest = Bytes::gib(1);
        assert_eq!(requests.request_size(largest), Bytes::new(256 << 10));
        assert_eq!(requests.request_size(Bytes::mib(0)), Bytes::ZERO);
        add(&mut requests, FlowClass::URGENT, 1, 1);
        assert_eq!(requests.request_size(largest), Bytes::new(512 << 10), "at most twice as much");
        (0..20).for_each(|_| add(&mut requests, FlowClass::URGENT, 3, 10));
        assert_eq!(requests.request_size(largest), Bytes::mib(3), "3 MiB in 10 ms");
        add(&mut requests, FlowClass::URGENT, 3, 1000);
        assert_eq!(requests.request_size(largest), Bytes::new(256 << 10), "a slow device");
        (0..20).for_each(|_| add(&mut requests, FlowClass::URGENT, 4, 0));
        assert_eq!(requests.request_size(largest), Bytes::mib(4), "the maximum");
    }

    #[test]
    fn time_counts_by_the_weight_of_the_class() {
        let used = |class| {
            let mut requests = Requests::new();
            add(&mut requests, class, 1, 40);
            requests.virtual_time()
        };
        assert_eq!([FlowClass::URGENT, FlowClass::LEAST_URGENT].map(used), [Ns::ms(10), Ns::ms(80)]);
        let mut requests = Requests::new();
        requests.limit_virtual_time(Ns::ms(7));
        requests.limit_virtual_time(Ns::ms(5));
        assert_eq!(requests.virtual_time(), Ns::ms(7), "no advantage after a time without requests");
        add(&mut requests, FlowClass::URGENT, 1, 3_600_000);
        requests.limit_virtual_time(Ns::ms(7));
        assert_eq!(requests.virtual_time(), Ns::ms(2007), "a stalled device is forgotten");
    }

    #[test]
    fn pauses_double_until_a_request_evicts_half_of_its_size() {
        let mut requests = Requests::new();
        let mut request = |evicted, now| {
            requests.add(&Request {
                class: FlowClass::URGENT,
                requested: Bytes::mib(2),
                evicted: Bytes::mib(evicted),
                elapsed: Ns::ms(1),
                now,
            });
            (requests.paused_for(now).as_millis(), requests.is_failing())
        };
        let paused: Vec<_> = (0..9).map(|at| request(0, Ns::secs(2 * at))).collect();
        assert_eq!(paused[..3], [(10, false), (20, false), (40, false)]);
        assert_eq!(paused[6..], [(640, false), (1000, true), (1000, true)]);
        assert_eq!(request(1, Ns::secs(20)), (0, false));
    }
}
