//! Tests of the data behind each figure.

use fairness::market::Bundle;

use super::*;

const FOOTPRINTS_PER_TENANT: f64 = 0.2;

fn equal_share() -> Bundle {
    Host { memory: FOOTPRINTS_PER_TENANT * SMALL_HOST_TENANTS as f64 }.equal(SMALL_HOST_TENANTS)
}

fn traces() -> Vec<Tenant> {
    let tenants = tenants();
    let mut cold = tenants[0].clone();
    "cold".clone_into(&mut cold.name);
    vec![tenants[3].clone(), cold, tenants[0].clone()]
}

#[test]
fn stream_gains_by_bandwidth_and_key_value_by_memory() {
    let tenants = tenants();
    let (stream, key_value) =
        (share_sensitivity(&tenants[0], equal_share()), share_sensitivity(&tenants[3], equal_share()));
    let at = |times: f64, of: &[ShareSensitivity]| {
        *of.iter().find(|share_sensitivity| share_sensitivity.times == times).unwrap()
    };
    for of in [&stream, &key_value] {
        assert_eq!(at(1.0, of), ShareSensitivity { times: 1.0, by_memory: 1.0, by_bandwidth: 1.0 });
        assert!(of.is_sorted_by(|left, right| left.by_memory <= right.by_memory), "{of:?}");
        assert!(of.is_sorted_by(|left, right| left.by_bandwidth < right.by_bandwidth), "{of:?}");
    }
    assert!(at(2.0, &stream).by_memory < 1.01 && at(2.0, &stream).by_bandwidth > 1.95, "{stream:?}");
    assert!(at(2.0, &key_value).by_memory > 1.2, "{key_value:?}");
}

#[test]
fn most_different_and_typical_tenants_are_selected() {
    let (traces, tenants) = (traces(), tenants());
    assert_eq!(most_different_traces(&traces, equal_share()), Some((1, 0)));
    assert_eq!(most_different_traces(&traces[..1], equal_share()), None);
    let name = |kind| typical(&tenants, kind, equal_share()).map(|tenant| tenant.name.as_str());
    assert_eq!(name(Kind::Memory), Some("key-value"));
    assert_eq!(name(Kind::Bandwidth), Some("stream"));
    assert!(
        memory_preference(typical(&tenants, Kind::Compute, equal_share()).unwrap(), equal_share()).abs()
            < 0.01
    );
    assert!(typical(&tenants[..1], Kind::Memory, equal_share()).is_none());
}

#[test]
fn recorded_market_contains_all_rounds_and_clears() {
    let auction = auction(&tenants(), Host { memory: FOOTPRINTS_PER_TENANT * SMALL_HOST_TENANTS as f64 });
    assert_eq!(auction.rounds.len(), auction.tried as usize, "{auction:?}");
    let is_final = |round: &Round| (round.price - auction.price).abs() < 1e-12;
    assert!(auction.rounds.iter().any(is_final), "{auction:?}");
    let excess = |round: &Round| (round.sum.memory - 1.0).abs().max((round.sum.bandwidth - 1.0).abs());
    let (first, best) =
        (excess(&auction.rounds[0]), auction.rounds.iter().map(excess).fold(f64::INFINITY, f64::min));
    assert!(best < 0.02 && best < first / 4.0, "{first} {best}: {auction:?}");
    let money = |round: &Round| round.price * round.sum.memory + (1.0 - round.price) * round.sum.bandwidth;
    assert!(auction.rounds.iter().all(|round| money(round) <= 1.0 + 1e-6), "{auction:?}");
}

#[test]
fn memory_demand_falls_with_price() {
    let auction = auction(&tenants(), Host { memory: FOOTPRINTS_PER_TENANT * SMALL_HOST_TENANTS as f64 });
    // Rounds with a nearly free link are excluded: tenants satiated with bandwidth spend the rest
    // of their money on memory at any price.
    let demand: Vec<&Round> = auction.demand.iter().filter(|round| round.sum.bandwidth < 5.0).collect();
    assert!(demand.len() > 30 && demand[0].sum.memory > 1.0, "{auction:?}");
    assert!(demand.is_sorted_by(|left, right| left.sum.memory >= right.sum.memory - 1e-3), "{auction:?}");
    let above = demand.iter().find(|round| round.sum.memory <= 1.0).unwrap();
    assert!((above.price - auction.price).abs() <= 0.03, "{above:?} {}", auction.price);
}

#[test]
fn markets_of_any_size_clear_within_supply() {
    for tenants in [1, 5, 70] {
        let scaling = ScalingTenants::new(&traces(), tenants, FOOTPRINTS_PER_TENANT);
        let bidders = scaling.bidders();
        assert_eq!((bidders.count(), bidders.is_refinement_possible()), (tenants, tenants < 70));
        let outcome = bidders.shares();
        let sum = outcome.bought.iter().fold(0.0, |sum, bundle| sum + bundle.bandwidth) / 1e6;
        assert!(sum <= 1.0 + 1e-6 && sum > 0.9, "{tenants}: {sum}");
        let refined = bidders.refined();
        assert!(bidders.is_refinement_possible() || refined.refinements == 0);
    }
}

/// Simulates a streaming and a key-value workload that change at run time. The stream returns to a
/// tenth of its pages in one of eight accesses, so that memory is useful to all tenants.
fn changing_epochs() -> Vec<Epoch> {
    let hot = skewed_accesses(400, 2).into_iter();
    let stream = looped_accesses(4000).into_iter().zip(hot).take(12_000);
    let stream = stream.enumerate().map(|(at, (next, hot))| if at % 8 == 0 { hot } else { next });
    let traces = [("stream", stream.collect()), ("key-value", skewed_accesses(2000, 1))];
    let traces = traces.map(|(name, touches)| (name.to_owned(), touches));
    simulate_changes(
        &TenantActivity::pair_with_equal_footprints(traces),
        FOOTPRINTS_PER_TENANT,
        &ACTIVITY_CHANGES,
    )
}

#[test]
fn shares_settle_within_two_epochs_of_change() {
    let epochs = changing_epochs();
    let change_responses = change_responses(&epochs, &ACTIVITY_CHANGES);
    for response in &change_responses {
        assert!(
            response.is_settled_in_time()
                && response.epochs.is_some_and(|epochs| epochs <= RESPONSE_EPOCHS_MAX),
            "{response:?}"
        );
    }
    let [first, second, first_back, second_back] = &change_responses[..] else {
        panic!("{change_responses:?}")
    };
    for to_key_value in [first, second] {
        let ChangeResponse { before, long_run, .. } = to_key_value;
        assert!(long_run.memory > 1.4 * before.memory, "{to_key_value:?}");
        assert!(long_run.bandwidth < 0.9 * before.bandwidth, "{to_key_value:?}");
    }
    for back in [first_back, second_back] {
        assert!(back.long_run.memory < 0.8 * back.before.memory, "{back:?}");
        assert!(back.long_run.bandwidth > 1.1 * back.before.bandwidth, "{back:?}");
    }
}

#[test]
fn shares_change_little_before_a_change_is_observed() {
    let epochs = changing_epochs();
    for change in ACTIVITY_CHANGES {
        let share = |epoch: usize| epochs[epoch].tenants[change.tenant].share;
        let (before, during) = (share(change.epoch - 1), share(change.epoch));
        let after = share(change.epoch + RESPONSE_EPOCHS_MAX);
        let is_small_change = |resource: fn(Bundle) -> f64| {
            (resource(during) - resource(before)).abs() <= 0.25 * (resource(after) - resource(before)).abs()
        };
        assert!(is_small_change(|share| share.memory), "{change:?}: {before:?} {during:?} {after:?}");
        assert!(is_small_change(|share| share.bandwidth), "{change:?}: {before:?} {during:?} {after:?}");
    }
    assert!(epochs[0].tenants.iter().all(|tenant| tenant.share == Bundle { memory: 0.25, bandwidth: 0.25 }));
}

#[test]
fn shares_stay_within_supply_and_settled_tenants_gain() {
    let epochs = changing_epochs();
    let mut gained = 0;
    for (at, epoch) in epochs.iter().enumerate() {
        let sum = |value: fn(&TenantEpoch) -> f64| epoch.tenants.iter().map(value).sum::<f64>();
        assert!(sum(|tenant| tenant.share.memory) <= 1.0 + 1e-6, "{at}: {epoch:?}");
        assert!(sum(|tenant| tenant.share.bandwidth) <= 1.0 + 1e-6, "{at}: {epoch:?}");
        let is_settled =
            ACTIVITY_CHANGES.iter().all(|change| !(change.epoch..=change.epoch + 2).contains(&at));
        for tenant in epoch.tenants.iter().filter(|_| is_settled) {
            assert!(tenant.throughput >= 0.95 * tenant.equal_split_throughput, "{at}: {epoch:?}");
            gained += usize::from(tenant.throughput >= 1.1 * tenant.equal_split_throughput);
        }
    }
    assert!(gained > 40, "{gained}");
}

#[test]
fn public_traces_settle_within_two_epochs() {
    let read = |name: &str| {
        let input = crate::public_data::open_gz(&format!("cache-traces/{name}.csv.gz"))?;
        Some((name.to_owned(), read(input).unwrap()))
    };
    let (Some(stream), Some(key_value)) = (read("spec-gzip"), read("lirs-sprite")) else { return };
    let traces = [&stream, &key_value].map(|(name, touches)| Tenant::new(name.clone(), touches, 1.0, 1.0));
    assert_eq!(most_different_traces(&traces, equal_share()), Some((0, 1)));
    let epochs = simulate_changes(
        &TenantActivity::pair_with_equal_footprints([stream, key_value]),
        FOOTPRINTS_PER_TENANT,
        &ACTIVITY_CHANGES,
    );
    for response in change_responses(&epochs, &ACTIVITY_CHANGES) {
        assert!(response.is_settled_in_time() && response.deviation_max <= 0.1, "{response:?}");
    }
}
