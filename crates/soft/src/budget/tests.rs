//! Tests of weights, decisions and the ledger.

use proptest::prelude::*;

use super::*;

fn client(pid: u32, budget: u64, used: u64, traditional: u64) -> ClientSample {
    ClientSample { pid: Pid(pid), budget, claimed_used: used, footprint: used + traditional }
}

fn settings(targets_max: usize, over_reclaim_percent: u32) -> Settings {
    Settings { targets_max, over_reclaim_percent, ..Settings::default() }
}

fn demand(pid: u32, unused_pages: u64, used_pages: u64) -> Demand {
    Demand { pid: Pid(pid), unused_pages, used_pages }
}

fn demands(decision: Decision) -> Vec<Demand> {
    match decision {
        Decision::Reclaim { demands } => demands,
        other => panic!("no reclamation: {other:?}"),
    }
}

#[test]
fn weights_match_the_reference_values() {
    let vectors: [(u64, u64, f64); 11] = [
        (100, 50, 83.3333),
        (100, 200, 266.6667),
        (100, 100, 150.0),
        (100, 0, 0.0),
        (0, 200, 200.0),
        (200, 100, 166.6667),
        (50, 250, 291.6667),
        (150, 150, 225.0),
        (250, 50, 91.6667),
        (300, 0, 0.0),
        (0, 0, 0.0),
    ];
    for (soft, traditional, expected) in vectors {
        let weight = Weight::new(soft, traditional).pages();
        assert!((weight - expected).abs() < 5e-5, "W({soft}, {traditional}) is {weight}, not {expected}");
    }
    assert!(Weight::new(200, 200) > Weight::new(50, 250), "300 and 291.67");
    assert!(Weight::new(u64::MAX, u64::MAX) > Weight::new(u64::MAX, 1));
}

#[test]
fn free_pages_are_granted_without_demands() {
    let clients = [client(1, 100, 0, 0)];
    assert_eq!(decide(&settings(4, 25), 10, &clients, Pid(2), 10), Decision::Grant);
    assert_eq!(decide(&settings(4, 25), 0, &clients, Pid(2), 0), Decision::Grant);
}

#[test]
fn unused_budget_precedes_pages_in_use_of_heavier_clients() {
    let clients = [client(1, 100, 100, 500), client(2, 100, 60, 10)];
    let decision = decide(&settings(4, 0), 0, &clients, Pid(3), 50);
    assert_eq!(demands(decision), [demand(2, 40, 0), demand(1, 0, 10)]);
}

#[test]
fn pages_in_use_are_taken_by_descending_weight() {
    let clients = [client(1, 100, 100, 50), client(2, 100, 100, 200), client(3, 100, 100, 100)];
    let decision = decide(&settings(4, 0), 5, &clients, Pid(9), 155);
    assert_eq!(demands(decision), [demand(2, 0, 100), demand(3, 0, 50)]);
    let clients = [client(1, 200, 200, 100), client(2, 50, 50, 250)];
    let decision = decide(&settings(4, 0), 0, &clients, Pid(9), 60);
    assert_eq!(demands(decision), [demand(2, 0, 50), demand(1, 0, 10)]);
}

#[test]
fn equal_weights_prefer_more_soft_memory_and_then_lower_pids() {
    let clients = [client(7, 10, 10, 0), client(5, 20, 20, 0), client(6, 20, 20, 0)];
    let decision = decide(&settings(4, 0), 0, &clients, Pid(9), 45);
    assert_eq!(demands(decision), [demand(5, 0, 20), demand(6, 0, 20), demand(7, 0, 5)]);
}

#[test]
fn clients_without_budget_and_the_requester_give_nothing() {
    let clients = [client(1, 0, 0, 1000), client(2, 50, 50, 10)];
    let decision = decide(&settings(4, 0), 0, &clients, Pid(2), 20);
    assert_eq!(decision, Decision::Deny { missing: 20 });
}

#[test]
fn clients_keep_their_minimum_except_for_the_host() {
    let settings = Settings { client_pages_min: 30, ..settings(4, 0) };
    let clients = [client(1, 100, 60, 50), client(2, 30, 30, 900), client(3, 40, 40, 10)];
    assert_eq!(demands(decide(&settings, 0, &clients, Pid(9), 40)), [demand(1, 40, 0)]);
    assert_eq!(demands(decide(&settings, 0, &clients, Pid(9), 80)), [demand(1, 40, 30), demand(3, 0, 10)]);
    assert_eq!(decide(&settings, 0, &clients, Pid(9), 81), Decision::Deny { missing: 1 });
    assert_eq!(decide_for_host(&settings, &clients, 50, 20), [demand(2, 0, 20)]);
    let excess = [demand(1, 40, 60), demand(2, 0, 30), demand(3, 0, 40)];
    assert_eq!(total_pages(&decide_for_host(&settings, &clients, 170, 0)), total_pages(&excess));
}

fn total_pages(demands: &[Demand]) -> u64 {
    demands.iter().map(Demand::pages).sum()
}

#[test]
fn over_reclaim_is_rounded_up_and_optional() {
    let clients = [client(1, 100, 100, 10)];
    let decide = |pages| decide(&settings(4, 25), 0, &clients, Pid(9), pages);
    assert_eq!(demands(decide(10)), [demand(1, 0, 13)]);
    assert_eq!(demands(decide(100)), [demand(1, 0, 100)]);
    assert_eq!(decide(101), Decision::Deny { missing: 1 });
}

#[test]
fn number_of_targets_is_limited() {
    let clients = [client(1, 10, 10, 30), client(2, 10, 10, 20), client(3, 10, 10, 10)];
    let decision = decide(&settings(2, 0), 0, &clients, Pid(9), 25);
    assert_eq!(decision, Decision::Deny { missing: 5 });
    assert_eq!(decide(&settings(0, 0), 0, &clients, Pid(9), 1), Decision::Deny { missing: 1 });
}

#[test]
fn small_unused_budgets_do_not_cause_a_denial() {
    let clients = [client(1, 11, 10, 30), client(2, 11, 10, 20), client(3, 500, 500, 10)];
    let decision = decide(&settings(2, 0), 0, &clients, Pid(9), 400);
    assert_eq!(demands(decision), [demand(1, 1, 10), demand(3, 0, 389)]);
}

#[test]
fn set_of_the_largest_budgets_is_ordered_by_weight() {
    // The unused budgets of the heaviest clients exhaust the number of targets.
    let clients =
        [client(1, 11, 10, 90), client(2, 11, 10, 80), client(3, 300, 300, 70), client(4, 400, 400, 0)];
    let decision = decide(&settings(2, 0), 0, &clients, Pid(9), 350);
    assert_eq!(demands(decision), [demand(3, 0, 300), demand(4, 0, 50)]);
}

#[test]
fn over_reclaim_takes_no_pages_in_use_if_unused_budget_suffices() {
    let clients = [client(1, 100, 0, 10), client(2, 100, 100, 50)];
    assert_eq!(demands(decide(&settings(4, 25), 0, &clients, Pid(9), 100)), [demand(1, 100, 0)]);
    let both = [demand(1, 100, 0), demand(2, 0, 27)];
    assert_eq!(demands(decide(&settings(4, 25), 0, &clients, Pid(9), 101)), both);
}

#[test]
fn host_without_memory_takes_pages_in_use_and_as_many_as_there_are() {
    let clients = [client(1, 100, 0, 10), client(2, 100, 40, 50), client(3, 100, 30, 20)];
    let decide = |excess, memory| decide_for_host(&settings(4, 25), &clients, excess, memory);
    assert_eq!(decide(0, 0), []);
    // The heaviest client with pages in use also gives its unused budget up, which has no memory.
    assert_eq!(decide(16, 16), [demand(2, 60, 20)]);
    assert_eq!(decide(1000, 1000), [demand(2, 60, 40), demand(3, 70, 30)]);
    assert_eq!(decide_for_host(&settings(1, 0), &clients, 1000, 1000), [demand(2, 60, 40)]);
    // The heaviest clients have few pages in use.
    let light = [client(1, 1, 1, 900), client(2, 1, 1, 800), client(3, 60, 60, 1)];
    assert_eq!(decide_for_host(&settings(2, 0), &light, 50, 50), [demand(1, 0, 1), demand(3, 0, 49)]);
    // Enough memory is available, but the budgets are larger.
    assert_eq!(decide(150, 0), [demand(2, 60, 0), demand(3, 70, 0), demand(1, 20, 0)]);
    assert_eq!(decide(240, 0), [demand(2, 60, 10), demand(3, 70, 0), demand(1, 100, 0)]);
}

#[test]
fn claims_are_bounded_by_budget_and_footprint() {
    let sample = ClientSample { pid: Pid(1), budget: 50, claimed_used: 1000, footprint: 30 };
    assert_eq!((sample.used(), sample.unused()), (30, 20));
    let honest = ClientSample { pid: Pid(1), budget: 50, claimed_used: 50, footprint: 300 };
    let claim = ClientSample { claimed_used: 300, ..honest };
    assert_eq!(claim.weight(), honest.weight(), "a claim above the budget does not lower the weight");
}

#[test]
fn ledger_rejects_invalid_operations() {
    let mut ledger = Ledger::new(10);
    ledger.connect(Pid(1)).unwrap();
    assert_eq!(ledger.connect(Pid(1)), Err(LedgerError::AlreadyConnected(Pid(1))));
    assert_eq!(ledger.grant(Pid(1), 11), Err(LedgerError::Short { free: 10, requested: 11 }));
    assert_eq!(ledger.grant(Pid(2), 1), Err(LedgerError::NotConnected(Pid(2))));
    ledger.grant(Pid(1), 6).unwrap();
    assert_eq!(ledger.record_returned(Pid(1), 7), Ok(6));
    assert_eq!((ledger.free(), ledger.shrink(15), ledger.total()), (10, 10, 0));
}

#[test]
fn number_of_clients_is_limited() {
    let mut ledger = Ledger::new(0);
    let limit = units::limits::SOFT_CLIENTS_MAX;
    for pid in 0..u32::try_from(limit).unwrap() {
        ledger.connect(Pid(pid)).unwrap();
    }
    assert_eq!(ledger.connect(Pid(u32::MAX)), Err(LedgerError::TooManyClients(limit)));
}

fn samples() -> impl Strategy<Value = Vec<ClientSample>> {
    let sample = (0..200_u64, 0..300_u64, 0..500_u64);
    prop::collection::vec(sample, 0..12).prop_map(|samples| {
        let samples = samples.into_iter().zip(1..);
        let sample = |((budget, claimed_used, footprint), pid)| ClientSample {
            pid: Pid(pid),
            budget,
            claimed_used,
            footprint,
        };
        samples.map(sample).collect()
    })
}

proptest! {
    #[test]
    fn weight_grows_with_both_kinds_and_falls_with_the_share_of_soft(
        soft in 0..1_u64 << 40, traditional in 0..1_u64 << 40, more in 1..1_u64 << 39,
    ) {
        let weight = Weight::new(soft, traditional);
        prop_assert!(Weight::new(soft.saturating_add(more).min(1 << 40), traditional) >= weight);
        prop_assert!(Weight::new(soft, traditional.saturating_add(more).min(1 << 40)) >= weight);
        let moved = more.min(traditional).min((1 << 40) - soft);
        prop_assert!(Weight::new(soft + moved, traditional - moved) <= weight);
    }

    #[test]
    fn decisions_demand_enough_and_not_more_than_exists(
        clients in samples(), free in 0..100_u64, pages in 0..1500_u64, targets in 0..6_usize, percent in 0..120_u32,
        kept in prop_oneof![Just(0), 0..100_u64],
    ) {
        let settings = Settings { client_pages_min: kept, ..settings(targets, percent) };
        let decision = decide(&settings, free, &clients, Pid(1), pages);
        let mut reversed = clients.clone();
        reversed.reverse();
        prop_assert_eq!(&decision, &decide(&settings, free, &reversed, Pid(1), pages));
        match decision {
            Decision::Grant => prop_assert!(free >= pages),
            Decision::Reclaim { demands } => {
                prop_assert!(demands.len() <= targets);
                let total: u64 = demands.iter().map(Demand::pages).sum();
                prop_assert!(free + total >= pages);
                prop_assert!(total <= (pages - free) + ((pages - free) * u64::from(percent.min(100))).div_ceil(100));
                for (index, demand) in demands.iter().enumerate() {
                    let client = clients.iter().find(|client| client.pid == demand.pid).unwrap();
                    prop_assert!(demand.pid != Pid(1) && demand.pages() > 0);
                    prop_assert!(demand.unused_pages <= client.unused() && demand.used_pages <= client.used());
                    prop_assert!(client.budget - demand.pages() >= kept, "{demand:?} of {client:?}");
                    prop_assert!(demands[..index].iter().all(|other| other.pid != demand.pid));
                }
            }
            Decision::Deny { missing } => {
                let others = clients.iter().filter(|client| client.pid != Pid(1));
                let mut budgets: Vec<u64> = others.map(|client| client.budget.saturating_sub(kept)).collect();
                budgets.sort_unstable_by(|a, b| b.cmp(a));
                let most: u64 = budgets.iter().take(targets).sum();
                prop_assert_eq!(pages - free, most + missing);
                prop_assert!(missing > 0);
            }
        }
    }

    #[test]
    fn ledger_conserves_pages(operations in prop::collection::vec((0..7_u8, 0..5_u32, 0..200_u64), 0..200)) {
        let mut ledger = Ledger::new(500);
        for (operation, pid, pages) in operations {
            let pid = Pid(pid);
            match operation {
                0 => drop(ledger.connect(pid)),
                1 => drop(ledger.disconnect(pid)),
                2 => drop(ledger.report_used(pid, pages).and(ledger.report_footprint(pid, 2 * pages, 0))),
                3 => drop(ledger.grant(pid, pages)),
                4 => drop(ledger.record_returned(pid, pages)),
                5 => ledger.grow(pages / 8),
                _ => drop(ledger.shrink(pages / 8)),
            }
            let budgets: u64 = ledger.clients().map(|client| client.budget).sum();
            prop_assert_eq!(ledger.free() + budgets, ledger.total());
            // A client has at most the last measured memory, and the pages of its budget.
            prop_assert!(ledger.clients().all(|client| client.footprint <= 2 * 199 + client.budget));
            let samples: Vec<ClientSample> = ledger.clients().copied().collect();
            if let Decision::Reclaim { demands } = decide(&Settings::default(), ledger.free(), &samples, pid, pages) {
                for demand in demands {
                    prop_assert!(demand.pages() <= ledger.budget(demand.pid));
                }
            }
        }
    }
}
