//! Scenarios of the paper (Equilibria, sections III-F and V-B to V-D), on a host with 240 GB of usable
//! local memory.

use super::{
    Scenario, Scheme,
    scenario::{LOWER_TIER_GB, Pattern, Tenant},
};

/// Usable local memory in GB. The paper's host has 256 GB, and its results imply 240 GB.
const CAPACITY_GB: f64 = 240.0;
/// Protection of each tenant in section V-B, in GB.
const PROTECTION_GB: f64 = 80.0;
/// Duration in seconds.
const SECONDS: u32 = 900;

/// Returns all scenarios, in the order of the report.
pub fn scenarios() -> Vec<Scenario> {
    vec![
        three_tenants("120/40/40", [(120.0, 0), (40.0, 0), (40.0, 0)]),
        three_tenants("120/90/90", [(120.0, 0), (90.0, 0), (90.0, 0)]),
        three_tenants("120/70/70", [(120.0, 0), (70.0, 120), (70.0, 120)]),
        bounded(),
        noisy_neighbour(),
        launch_order(),
        burst(),
        returning_tenant(),
        lower_tiers(),
        thrashing(),
    ]
}

fn scenario(name: &str, tenants: Vec<Tenant>) -> Scenario {
    Scenario {
        name: name.to_owned(),
        tiers_gb: vec![CAPACITY_GB, LOWER_TIER_GB],
        seconds: SECONDS,
        tenants,
        schemes: Scheme::DEFAULT.to_vec(),
    }
}

/// Creates a scenario of section V-B from demands in GB and start times in seconds.
fn three_tenants(name: &str, tenants: [(f64, u32); 3]) -> Scenario {
    let tenants = ["A", "B", "C"].into_iter().zip(tenants);
    let tenant = |(name, (demand_gb, start_s))| Tenant::new(name, start_s, demand_gb, PROTECTION_GB);
    scenario(name, tenants.map(tenant).collect())
}

/// Upper bound (section V-B 4).
fn bounded() -> Scenario {
    let mut scenario = three_tenants("120/40/40 bound 80", [(120.0, 0), (40.0, 0), (40.0, 0)]);
    scenario.tenants[0] = Tenant::new("A", 0, 120.0, PROTECTION_GB).with_bound(80.0);
    scenario
}

/// Tenant that accesses its memory twice as often as its neighbour (section III-F, figure 3).
fn noisy_neighbour() -> Scenario {
    let mut tenants = vec![
        Tenant::new("hot", 0, 160.0, CAPACITY_GB / 2.0),
        Tenant::new("cold", 0, 160.0, CAPACITY_GB / 2.0),
    ];
    tenants[0].threads = 2;
    scenario("noisy neighbour", tenants)
}

/// Equal tenants, of which one starts later (section III-F). The later one is the first in the list.
fn launch_order() -> Scenario {
    let tenant = |name, start_s| Tenant::new(name, start_s, 200.0, CAPACITY_GB / 2.0);
    scenario("launch order", vec![tenant("late", 150), tenant("early", 0)])
}

/// Neighbour whose memory grows from 0 to 90 % of its limit within a minute (section V-D 1).
/// Protection and bound are 70 % and 75 % of the memory of each tenant.
fn burst() -> Scenario {
    const MEMORY_GB: f64 = 160.0;
    let tenant = |name| Tenant::new(name, 0, MEMORY_GB, 0.7 * MEMORY_GB).with_bound(0.75 * MEMORY_GB);
    let grown_gb = 0.9 * MEMORY_GB;
    let mut burst = tenant("burst");
    burst.demand_gb = vec![(450, grown_gb)];
    burst.allocation_gb_per_s = grown_gb / 60.0;
    scenario("burst", vec![tenant("steady"), burst])
}

/// Tenant that frees its memory, so that its protection is donated, and allocates it again.
fn returning_tenant() -> Scenario {
    let mut returning = Tenant::new("returning", 0, 80.0, PROTECTION_GB);
    returning.demand_gb = vec![(0, 80.0), (300, 20.0), (600, 80.0)];
    scenario("returning tenant", vec![Tenant::new("borrowing", 0, 240.0, PROTECTION_GB), returning])
}

/// Three tiers, in which the first tenant has limits in each of the upper tiers (section IV-D).
fn lower_tiers() -> Scenario {
    let mut limited = Tenant::new("limited", 0, 200.0, PROTECTION_GB);
    limited.limits_gb = vec![(PROTECTION_GB, Some(80.0)), (20.0, Some(40.0))];
    let mut scenario = scenario("lower tiers", vec![limited, Tenant::new("local", 0, 100.0, PROTECTION_GB)]);
    scenario.tiers_gb = vec![CAPACITY_GB, 64.0, LOWER_TIER_GB];
    scenario
}

/// Tenant that thrashes because of its bound, and two tenants within their protection (section V-B 5).
fn thrashing() -> Scenario {
    let mut thrashing = Tenant::new("thrashing", 0, 100.0, PROTECTION_GB).with_bound(10.0);
    thrashing.pattern = Pattern::Blocks { block_gb: 2.0, passes: 3 };
    let normal = |name| Tenant::new(name, 0, 50.0, PROTECTION_GB);
    let mut scenario = scenario("thrashing", vec![thrashing, normal("B"), normal("C")]);
    scenario.schemes.insert(3, Scheme::EquilibriaWithoutMitigation);
    scenario
}
