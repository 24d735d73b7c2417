//! Tests of the texts that explain a decision.

use super::*;

#[test]
fn report_explains_usage_limits_and_reasons() {
    let mut policy = Policy::new(Settings::default()).unwrap();
    let gib = |n| Bytes::gib(n);
    let tier = |capacity, free| TierSample { capacity: gib(capacity), free: gib(free) };
    let host = HostSample::new(Ns::secs(1), &[tier(100, 0), tier(50, 50)]);
    let mut bounded = tenant(7, gib(60), gib(100));
    bounded.tiers[FAST].bound = Some(gib(50));
    bounded.tiers[1].usage = gib(3);
    let decision = policy.step(&host, &[bounded, tenant(8, gib(20), gib(100))]);
    assert_eq!(
        decision.tenants()[0].to_string(),
        "tenant 7, tier 0: usage 60.00 GiB, protection 100.00 GiB (scaled to 39.00 GiB), bound 50.00 GiB, \
         borrows 21.00 GiB; demote 10.12 GiB (immediate): usage is above the bound\n\
         tenant 7, tier 1: usage 3.00 GiB, protection 0.00 GiB, borrows 3.00 GiB\n\
         tenant 7, promotions: hot pages of 191669358B/s; factor 17.9 % (above the protection while local \
         memory is full); thrash level 0 (not yet observed)"
    );
    assert_eq!(
        decision.tenants()[1].to_string(),
        "tenant 8, tier 0: usage 20.00 GiB, protection 100.00 GiB (scaled to 39.00 GiB), donates 19.00 GiB\n\
         tenant 8, promotions: all pages without limit; factor 100.0 %; thrash level 0 (not yet observed)"
    );
}
