//! What must hold of all that is drawn.

use fairness::market::{Bundle, MarketWarmStart};

use super::*;

const MEMORY: f64 = 0.2;

fn equal() -> Bundle {
    Host { memory: MEMORY * SMALL as f64 }.equal(SMALL)
}

fn traces() -> Vec<Tenant> {
    let tenants = tenants();
    let mut cold = tenants[0].clone();
    "cold".clone_into(&mut cold.name);
    vec![tenants[3].clone(), cold, tenants[0].clone()]
}

#[test]
fn a_stream_gains_by_bandwidth_and_a_key_value_store_by_memory_too() {
    let tenants = tenants();
    let (stream, key_value) = (along(&tenants[0], equal()), along(&tenants[3], equal()));
    let at = |times: f64, of: &[Along]| *of.iter().find(|along| along.times == times).unwrap();
    for of in [&stream, &key_value] {
        assert_eq!(at(1.0, of), Along { times: 1.0, by_memory: 1.0, by_bandwidth: 1.0 });
        assert!(of.is_sorted_by(|one, next| one.by_memory <= next.by_memory), "{of:?}");
        assert!(of.is_sorted_by(|one, next| one.by_bandwidth < next.by_bandwidth), "{of:?}");
    }
    assert!(at(2.0, &stream).by_memory < 1.01 && at(2.0, &stream).by_bandwidth > 1.95, "{stream:?}");
    assert!(at(2.0, &key_value).by_memory > 1.2, "{key_value:?}");
}

#[test]
fn those_that_differ_most_and_those_that_stand_for_their_kind_are_found() {
    let (traces, tenants) = (traces(), tenants());
    assert_eq!(opposites(&traces, equal()), Some((1, 0)));
    assert_eq!(opposites(&traces[..1], equal()), None);
    let name = |kind| typical(&tenants, kind, equal()).map(|tenant| tenant.name.as_str());
    assert_eq!(name(Kind::Memory), Some("key-value"));
    assert_eq!(name(Kind::Bandwidth), Some("stream"));
    assert!(leaning(typical(&tenants, Kind::Compute, equal()).unwrap(), equal()).abs() < 0.01);
    assert!(typical(&tenants[..1], Kind::Memory, equal()).is_none());
}

#[test]
fn a_watched_market_tries_as_many_prices_as_it_says_and_ends_where_all_is_sold() {
    let auction = auction(&tenants(), Host { memory: MEMORY * SMALL as f64 });
    assert_eq!(auction.rounds.len(), auction.tried as usize, "{auction:?}");
    assert!(auction.rounds.iter().any(|round| round.price == auction.price), "{auction:?}");
    let off = |round: &Round| (round.sum.memory - 1.0).abs().max((round.sum.bandwidth - 1.0).abs());
    let (first, best) =
        (off(&auction.rounds[0]), auction.rounds.iter().map(off).fold(f64::INFINITY, f64::min));
    assert!(best < 0.02 && best < first / 4.0, "{first} {best}: {auction:?}");
    let money = |round: &Round| round.price * round.sum.memory + (1.0 - round.price) * round.sum.bandwidth;
    assert!(auction.rounds.iter().all(|round| money(round) <= 1.0 + 1e-6), "{auction:?}");
}

#[test]
fn dearer_memory_is_asked_for_less() {
    let auction = auction(&tenants(), Host { memory: MEMORY * SMALL as f64 });
    // Where the link costs next to nothing and all have their fill of it, money is left for memory, whatever that costs.
    let demand: Vec<&Round> = auction.demand.iter().filter(|round| round.sum.bandwidth < 5.0).collect();
    assert!(demand.len() > 30 && demand[0].sum.memory > 1.0, "{auction:?}");
    assert!(demand.is_sorted_by(|one, next| one.sum.memory >= next.sum.memory - 1e-3), "{auction:?}");
    let above = demand.iter().find(|round| round.sum.memory <= 1.0).unwrap();
    assert!((above.price - auction.price).abs() <= 0.03, "{above:?} {}", auction.price);
}

#[test]
fn markets_of_any_size_sell_what_there_is_and_harm_nobody() {
    for tenants in [1, 5, 70] {
        let crowd = Crowd::new(&traces(), tenants, MEMORY);
        let bidders = crowd.bidders();
        assert_eq!((bidders.count(), bidders.are_refined()), (tenants, tenants < 70));
        let outcome = bidders.shares(MarketWarmStart::default());
        let sum = outcome.bought.iter().fold(0.0, |sum, bundle| sum + bundle.bandwidth) / 1e6;
        assert!(sum <= 1.0 + 1e-9 && sum > 0.9, "{tenants}: {sum}");
        let later = crowd.later().bidders();
        assert!(later.shares(outcome.warm_start.clone()).rounds <= outcome.rounds + 5);
        let refined = bidders.refined(MarketWarmStart::default());
        assert!(bidders.are_refined() || refined.refinements == 0);
    }
}

/// A stream that comes back to a tenth of its pages now and then, so that memory is of some use to all; and a key-value store with larger pages.
fn changing() -> Vec<Epoch> {
    let again = skewed(400, 2).into_iter();
    let stream = looped(4000).into_iter().zip(again).take(12_000);
    let stream = stream.enumerate().map(|(at, (next, again))| if at % 8 == 0 { again } else { next });
    let traces = [("stream", stream.collect()), ("key-value", skewed(2000, 1))];
    let traces = traces.map(|(name, touches)| (name.to_owned(), touches));
    play(&Activity::pair(traces), MEMORY, &CHANGES)
}

#[test]
fn shares_follow_a_tenant_that_changes_within_two_epochs() {
    let epochs = changing();
    let followed = followed(&epochs, &CHANGES);
    for one in &followed {
        assert!(one.is_soon_there() && one.epochs.is_some_and(|epochs| epochs <= FOLLOWED_WITHIN), "{one:?}");
    }
    let [first, second, first_back, second_back] = &followed[..] else { panic!("{followed:?}") };
    for to_key_value in [first, second] {
        let Followed { before, long_run, .. } = to_key_value;
        assert!(long_run.memory > 1.4 * before.memory, "{to_key_value:?}");
        assert!(long_run.bandwidth < 0.9 * before.bandwidth, "{to_key_value:?}");
    }
    for back in [first_back, second_back] {
        assert!(back.long_run.memory < 0.8 * back.before.memory, "{back:?}");
        assert!(back.long_run.bandwidth > 1.1 * back.before.bandwidth, "{back:?}");
    }
}

#[test]
fn nobody_knows_of_a_change_before_it_is_seen() {
    let epochs = changing();
    for change in CHANGES {
        let share = |epoch: usize| epochs[epoch].tenants[change.tenant].share;
        let (before, during) = (share(change.epoch - 1), share(change.epoch));
        let after = share(change.epoch + FOLLOWED_WITHIN);
        let is_little = |good: fn(Bundle) -> f64| {
            (good(during) - good(before)).abs() <= 0.25 * (good(after) - good(before)).abs()
        };
        assert!(is_little(|share| share.memory), "{change:?}: {before:?} {during:?} {after:?}");
        assert!(is_little(|share| share.bandwidth), "{change:?}: {before:?} {during:?} {after:?}");
    }
    assert!(epochs[0].tenants.iter().all(|tenant| tenant.share == Bundle { memory: 0.25, bandwidth: 0.25 }));
}

#[test]
fn while_tenants_change_no_more_is_shared_than_there_is_and_settled_ones_gain() {
    let epochs = changing();
    let mut gained = 0;
    for (at, epoch) in epochs.iter().enumerate() {
        let sum = |good: fn(&Played) -> f64| epoch.tenants.iter().map(good).sum::<f64>();
        assert!(sum(|played| played.share.memory) <= 1.0 + 1e-6, "{at}: {epoch:?}");
        assert!(sum(|played| played.share.bandwidth) <= 1.0 + 1e-6, "{at}: {epoch:?}");
        let is_settled = CHANGES.iter().all(|change| !(change.epoch..=change.epoch + 2).contains(&at));
        for played in epoch.tenants.iter().filter(|_| is_settled) {
            assert!(played.throughput >= 0.95 * played.of_equal_split, "{at}: {epoch:?}");
            gained += usize::from(played.throughput >= 1.1 * played.of_equal_split);
        }
    }
    assert!(gained > 40, "{gained}");
}

#[test]
fn of_real_traces_shares_follow_within_two_epochs_too() {
    let read = |name: &str| {
        let input = crate::public::unpacked(&format!("cache-traces/{name}.csv.gz"))?;
        Some((name.to_owned(), read(input).unwrap()))
    };
    let (Some(stream), Some(key_value)) = (read("spec-gzip"), read("lirs-sprite")) else { return };
    let traces = [&stream, &key_value].map(|(name, touches)| Tenant::new(name.clone(), touches, 1.0, 1.0));
    assert_eq!(opposites(&traces, equal()), Some((0, 1)));
    let epochs = play(&Activity::pair([stream, key_value]), MEMORY, &CHANGES);
    for one in followed(&epochs, &CHANGES) {
        assert!(one.is_soon_there() && one.wanders <= 0.1, "{one:?}");
    }
}
