//! Tests of the policy in a closed loop with a model of a host: tenants allocate local memory first,
//! the host performs the orders, and accessed pages are promoted. The model moves sizes, not pages.

use proptest::prelude::*;

use super::*;

/// Memory of the model's tiers. With the high watermark, 980 GB of local memory are usable.
const FAST_CAPACITY: u64 = 1000 * GB;
const SLOW_CAPACITY: u64 = 4000 * GB;
const USABLE: u64 = 980 * GB;
/// Size that a tenant allocates per second.
const ALLOCATION: u64 = 10 * GB;
/// Size that the host promotes per second for a tenant without a budget.
const PROMOTION: u64 = 2 * GB;
/// Deviation from a protection that a steady state may have: memory between the watermarks.
const TOLERANCE: u64 = 8 * GB;

#[derive(Clone, Debug)]
struct ModelTenant {
    start_s: u64,
    demand: u64,
    protection: u64,
    bound: Option<u64>,
    fast: u64,
    slow: u64,
    attempted: u64,
    promoted: u64,
}

struct Model {
    tenants: Vec<ModelTenant>,
    policy: Policy,
    at: u64,
}

impl Model {
    fn new(tenants: Vec<ModelTenant>) -> Self {
        Self { tenants, policy: Policy::new(Settings::default()).unwrap(), at: 0 }
    }

    fn free_fast(&self) -> u64 {
        FAST_CAPACITY - self.tenants.iter().map(|tenant| tenant.fast).sum::<u64>()
    }

    fn allocate(&mut self) {
        for index in 0..self.tenants.len() {
            let free = self.free_fast();
            let tenant = &mut self.tenants[index];
            if self.at < tenant.start_s {
                continue;
            }
            let size = (tenant.demand - tenant.fast - tenant.slow).min(ALLOCATION);
            let fast = size.min(free);
            tenant.fast += fast;
            tenant.slow += size - fast;
        }
    }

    fn samples(&self) -> Vec<TenantSample> {
        let sample = |(id, model): (u32, &ModelTenant)| {
            let mut sample = tenant(id, Bytes::new(model.fast), Bytes::new(model.protection));
            sample.tiers[FAST].bound = model.bound.map(Bytes::new);
            sample.tiers[1].usage = Bytes::new(model.slow);
            sample.counters.attempted = Bytes::new(model.attempted);
            sample.counters.promoted = Bytes::new(model.promoted);
            sample
        };
        (0..).zip(&self.tenants).map(sample).collect()
    }

    /// Runs one second: allocations, a step of the policy, demotions and promotions.
    fn step(&mut self) -> Decision {
        self.at += 1;
        self.allocate();
        let tier = |capacity, free| TierSample { capacity: Bytes::new(capacity), free: Bytes::new(free) };
        let slow: u64 = self.tenants.iter().map(|tenant| tenant.slow).sum();
        let tiers = [tier(FAST_CAPACITY, self.free_fast()), tier(SLOW_CAPACITY, SLOW_CAPACITY - slow)];
        let host = HostSample::new(Ns::secs(self.at), &tiers);
        let samples = self.samples();
        let decision = self.policy.step(&host, &samples).clone();
        decision.orders().iter().for_each(|order| self.perform(*order));
        decision
    }

    fn perform(&mut self, order: Order) {
        let free = self.free_fast();
        match order {
            Order::Demote { tenant, bytes, .. } => {
                let tenant = &mut self.tenants[tenant.0 as usize];
                let size = bytes.get().min(tenant.fast);
                tenant.fast -= size;
                tenant.slow += size;
            }
            Order::LimitPromotion { tenant, budget } => {
                let tenant = &mut self.tenants[tenant.0 as usize];
                let rate = budget.bytes_per_s.map_or(PROMOTION, |rate| rate.get().min(PROMOTION));
                let attempted = rate.min(tenant.slow);
                let size = attempted.min(free);
                tenant.fast += size;
                tenant.slow -= size;
                tenant.attempted += attempted;
                tenant.promoted += size;
            }
        }
    }

    /// Returns the protection of each tenant in force, limited by its bound.
    fn entitlements(&self) -> Vec<u64> {
        let sum: u64 = self.tenants.iter().map(|tenant| tenant.protection).sum();
        let scaled = |tenant: &ModelTenant| match sum <= USABLE {
            true => tenant.protection,
            false => equations::mul_div(tenant.protection, USABLE, sum),
        };
        self.tenants.iter().map(|tenant| scaled(tenant).min(tenant.bound.unwrap_or(u64::MAX))).collect()
    }
}

fn model_tenant(start_s: u64, demand_gb: u64, protection_gb: u64, bound_gb: Option<u64>) -> ModelTenant {
    ModelTenant {
        start_s,
        demand: demand_gb * GB,
        protection: protection_gb * GB,
        bound: bound_gb.map(|bound| bound * GB),
        fast: 0,
        slow: 0,
        attempted: 0,
        promoted: 0,
    }
}

prop_compose! {
    fn any_model_tenant()(
        start_s in 0_u64..120,
        demand_gb in 0_u64..600,
        protection_gb in 0_u64..300,
        bound_gb in prop::option::of(1_u64..400),
    ) -> ModelTenant {
        model_tenant(start_s, demand_gb, protection_gb, bound_gb)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn steady_state_is_fair(tenants in prop::collection::vec(any_model_tenant(), 1..8)) {
        let mut model = Model::new(tenants);
        for _ in 0..1500 {
            let before: Vec<u64> = model.tenants.iter().map(|tenant| tenant.fast).collect();
            let decision = model.step();
            let scaled: Bytes = decision.tenants().iter().map(|report| report.fast().scaled_protection).sum();
            prop_assert!(scaled <= Bytes::new(USABLE), "protections must fit");
            // The excess of a bound is at most the memory of one step.
            for (tenant, before) in model.tenants.iter().zip(before) {
                let bound = tenant.bound.unwrap_or(u64::MAX);
                let step = ALLOCATION + 2 * PROMOTION;
                prop_assert!(tenant.fast <= bound.max(before).saturating_add(step));
                prop_assert!(tenant.fast <= bound.saturating_add(step));
            }
        }
        let entitlements = model.entitlements();
        let is_short = model.tenants.iter().zip(&entitlements).any(|(tenant, entitled)| {
            tenant.fast + TOLERANCE < tenant.demand.min(*entitled)
        });
        let has_borrower = model
            .tenants
            .iter()
            .zip(&entitlements)
            .any(|(tenant, entitled)| tenant.fast > entitled + TOLERANCE);
        prop_assert!(!(is_short && has_borrower), "{:?}", model.tenants);
        prop_assert!(!is_short, "the protections fit, so each tenant reaches its own: {:?}", model.tenants);
    }
}

#[test]
fn launch_order_does_not_matter_in_steady_state() {
    let usage = |starts: [u64; 3]| {
        let tenants = starts.map(|start_s| model_tenant(start_s, 500, 320, None));
        let mut model = Model::new(tenants.to_vec());
        (0..1500).for_each(|_| {
            model.step();
        });
        model.tenants.iter().map(|tenant| tenant.fast / GB).collect::<Vec<u64>>()
    };
    for starts in [[0, 0, 0], [0, 100, 200], [200, 0, 100]] {
        assert!(
            usage(starts).iter().all(|fast| (318..=335).contains(fast)),
            "{starts:?}: {:?}",
            usage(starts)
        );
    }
}

#[test]
fn vanished_tenant_returns_its_memory_to_the_others() {
    let mut model = Model::new(vec![model_tenant(0, 900, 480, None), model_tenant(0, 900, 480, None)]);
    (0..900).for_each(|_| {
        model.step();
    });
    model.tenants.pop();
    (0..300).for_each(|_| {
        model.step();
    });
    assert_eq!(model.tenants[0].slow, 0, "{:?}", model.tenants);
}
