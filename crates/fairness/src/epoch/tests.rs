//! What a host's tenants are promised from epoch to epoch.

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::{
    curve::{Knot, MissCurve},
    market::Slowdown,
};

mod closed;

const SUPPLY: Supply = Supply { memory_mib: 6000, bandwidth_mb_s: 1200 };

type One = Member<Slowdown>;

/// One that misses nothing with `footprint` MiB, and waits `gamma` seconds for each second of work with none.
fn tenant(footprint: f64, gamma: f64, wanted: f64) -> One {
    let knot = |at: u32| {
        let part = f64::from(at) / 64.0;
        Knot { memory: part * footprint, misses: (1.0 - part).powi(2) } // ever more slowly
    };
    let curve = MissCurve::new((0..=64).map(knot).collect()).unwrap();
    let utility = Slowdown::new(curve, gamma, wanted).unwrap();
    Member { name: "".into(), weight: 1.0, least: Share::default(), utility }
}

/// Reads all it has once, and then again: more memory is next to no use.
fn stream() -> One {
    tenant(1e6, 50.0, 1200.0)
}

/// Does the better the more memory it has.
fn key_value() -> One {
    tenant(8000.0, 50.0, 20.0)
}

/// They, by their places.
fn named(members: &[One]) -> Vec<One> {
    let named = |(at, member): (usize, &One)| Member { name: format!("t{at}").into(), ..member.clone() };
    members.iter().enumerate().map(named).collect()
}

fn sum(shares: &[Share]) -> Share {
    shares.iter().fold(Share::default(), |sum, share| Share {
        memory_mib: sum.memory_mib + share.memory_mib,
        bandwidth_mb_s: sum.bandwidth_mb_s + share.bandwidth_mb_s,
    })
}

/// Epochs until shares stay, and what they are then.
fn settled(epochs: &mut Epochs, tenants: &[One]) -> Vec<Share> {
    for _ in 0..20 {
        let decision = epochs.decide(SUPPLY, &named(tenants)).unwrap();
        if decision.change == Change::Held {
            return decision.shares;
        }
    }
    panic!("shares never stay");
}

#[test]
fn a_tenant_that_turns_from_stream_to_key_value_has_its_new_share_within_two_epochs() {
    let before = [stream(), key_value(), stream(), stream(), key_value(), stream()];
    let mut after = before.clone();
    after[0] = key_value();
    let mut epochs = Epochs::default();
    let had = settled(&mut epochs, &before)[0];
    let due = settled(&mut Epochs::default(), &after)[0];
    assert!(due.memory_mib > 2 * had.memory_mib, "{had:?} {due:?}");
    let first = epochs.decide(SUPPLY, &named(&after)).unwrap();
    assert!(
        first.shares[0].memory_mib as f64 <= had.memory_mib as f64 + PACE * 1000.0 + 1.0,
        "not all at once"
    );
    let has = epochs.decide(SUPPLY, &named(&after)).unwrap().shares[0];
    assert!(has.memory_mib as f64 >= 0.95 * due.memory_mib as f64, "{has:?} of {due:?}");
}

#[test]
fn noise_moves_nothing() {
    let mut epochs = Epochs::default();
    let quiet = [stream(), key_value(), key_value()];
    let shares = settled(&mut epochs, &quiet);
    for step in 0..20_u32 {
        let off = 1.0 + 0.02 * (f64::from(step) * 2.3).sin();
        let noisy = [
            tenant(1e6, 50.0 * off, 1200.0),
            tenant(8000.0 * off, 50.0, 20.0),
            tenant(8000.0, 50.0 / off, 20.0),
        ];
        let decision = epochs.decide(SUPPLY, &named(&noisy)).unwrap();
        assert_eq!((decision.change, decision.shares), (Change::Held, shares.clone()));
    }
}

#[test]
fn a_weight_changed_live_counts_from_the_next_epoch() {
    let mut epochs = Epochs::default();
    let mut tenants = [key_value(), key_value(), key_value()];
    let before = settled(&mut epochs, &tenants);
    tenants[1].weight = 2.0;
    let decision = epochs.decide(SUPPLY, &named(&tenants)).unwrap();
    assert_ne!(decision.change, Change::Held);
    assert_eq!(decision.fair[1], Share { memory_mib: 3000, bandwidth_mb_s: 600 });
    assert!(decision.shares[1].memory_mib > before[1].memory_mib, "{decision:?}");
}

#[test]
fn who_comes_begins_with_a_fair_share_and_who_goes_leaves_his_to_the_others() {
    let mut epochs = Epochs::default();
    let two = [stream(), key_value()];
    settled(&mut epochs, &two);
    let three = [stream(), key_value(), key_value()];
    let decision = epochs.decide(SUPPLY, &named(&three)).unwrap();
    let fair = 2000.0;
    assert!((decision.shares[2].memory_mib as f64 - fair).abs() <= PACE * fair + 1.0, "{decision:?}");
    let after = settled(&mut epochs, &two);
    let lies = SUPPLY.memory_mib - sum(&after).memory_mib;
    assert!(lies <= 1, "nothing is left lying but what is rounded: {after:?}");
}

#[test]
fn what_only_one_epoch_wants_is_not_done_whole() {
    let mut epochs = Epochs::default();
    let quiet = [stream(), key_value(), stream(), stream()];
    let before = settled(&mut epochs, &quiet);
    let other = [key_value(), stream(), stream(), stream()];
    let pace = PACE * 1500.0;
    for (at, tenants) in [&other, &quiet, &other, &quiet].into_iter().enumerate() {
        let decision = epochs.decide(SUPPLY, &named(tenants)).unwrap();
        let moved = decision.shares[1].memory_mib.abs_diff(before[1].memory_mib);
        assert!(moved as f64 <= pace + 1.0, "epoch {at}: {decision:?}, before {before:?}");
    }
}

#[test]
fn what_cannot_be_changes_nothing() {
    let mut epochs = Epochs::default();
    let mut tenants = [stream(), key_value()];
    settled(&mut epochs, &tenants);
    let before = epochs.dealt().cloned();
    tenants[0].weight = 0.0;
    epochs.decide(SUPPLY, &named(&tenants)).unwrap_err();
    tenants[0].weight = 1.0;
    tenants[1].least.memory_mib = 4000; // its fair share is 3000
    epochs.decide(SUPPLY, &named(&tenants)).unwrap_err();
    assert_eq!(epochs.dealt().cloned(), before);
}

#[test]
fn what_was_dealt_before_a_restart_is_what_is_gone_on_from() {
    let mut epochs = Epochs::default();
    let tenants = [stream(), key_value(), key_value()];
    let shares = settled(&mut epochs, &tenants);
    let mut restarted = Epochs::from(epochs.dealt().cloned());
    let decision = restarted.decide(SUPPLY, &named(&tenants)).unwrap();
    assert_eq!((decision.change, decision.shares), (Change::Held, shares));
}

prop_compose! {
    fn any_tenant()(footprint in 100.0..20_000.0_f64, gamma in 0.0..200.0_f64, wanted in 0.0..2000.0_f64,
        weight in 0.1..10.0_f64) -> One {
        Member { weight, ..tenant(footprint, gamma, wanted) }
    }
}

#[test]
fn nobody_gets_less_than_it_must_have_while_another_comes_to_weigh_more() {
    let shares = [3600, 1200, 1200].map(|memory_mib| Share { memory_mib, bandwidth_mb_s: 400 });
    let weighed = |share| Weighed { weight: 1.0, share };
    let names = ["t0", "t1", "t2"].map(Arc::from);
    let tenants = names.into_iter().zip(shares.map(weighed)).collect();
    let mut epochs = Epochs::from(Some(Dealt { supply: SUPPLY, tenants }));
    let mut members = named(&[stream(), key_value(), key_value()]);
    members[0].weight = 3.0;
    members[2].least.memory_mib = 1200;
    for _ in 0..4 {
        let decision = epochs.decide(SUPPLY, &members).unwrap();
        assert!(decision.shares[2].memory_mib >= 1200, "{decision:?}");
        assert!(sum(&decision.shares).memory_mib <= SUPPLY.memory_mib, "{decision:?}");
    }
}

#[test]
fn a_fair_share_of_less_than_a_unit_is_no_reason_to_deal_nothing_out() {
    let mut members = named(&[stream(), key_value()]);
    members[0].weight = 20.0;
    let supply = Supply { memory_mib: 6000, bandwidth_mb_s: 16 };
    let decision = Epochs::default().decide(supply, &members).unwrap();
    assert_eq!(
        (decision.shares[0].bandwidth_mb_s, decision.shares[1].bandwidth_mb_s),
        (15, 1),
        "{decision:?}"
    );
}

#[test]
fn where_there_are_fewer_units_than_tenants_some_get_none_and_nothing_breaks() {
    let members = named(&vec![key_value(); 5]);
    let supply = Supply { memory_mib: 6000, bandwidth_mb_s: 3 };
    let mut epochs = Epochs::default();
    for _ in 0..3 {
        let sum = sum(&epochs.decide(supply, &members).unwrap().shares);
        assert!(sum.memory_mib <= 6000 && sum.bandwidth_mb_s <= 3, "{sum:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Tenants come, go and change as they like, and weights too.
    #[test]
    fn no_epoch_deals_out_more_than_there_is_or_moves_a_share_by_more_than_it_may(
        epochs_of in vec(vec(any_tenant(), 1..8), 1..6),
    ) {
        let mut epochs = Epochs::default();
        for tenants in epochs_of {
            let members = named(&tenants);
            let tenants = super::tenants(SUPPLY, &members);
            let market = Market::new(SUPPLY, &tenants).unwrap();
            let had = epochs.had(&market, &members);
            let decision = epochs.decide(SUPPLY, &members).unwrap();
            let sum = sum(&decision.shares);
            prop_assert!(sum.memory_mib <= SUPPLY.memory_mib && sum.bandwidth_mb_s <= SUPPLY.bandwidth_mb_s);
            for (share, Tenant { least, .. }) in decision.shares.iter().zip(&tenants) {
                let has_least = share.memory_mib >= least.memory_mib && share.bandwidth_mb_s >= least.bandwidth_mb_s;
                prop_assert!(has_least, "{share:?} of at least {least:?}: {decision:?}");
            }
            prop_assert!(decision.gains.iter().all(|gain| gain.is_finite()), "{decision:?}");
            if let Change::Set { way } = decision.change {
                prop_assert!(way > 0.0 && way <= 1.0);
                for (at, had) in had.iter().enumerate().filter(|_| way < 1.0) {
                    let moved = decision.shares[at].memory_mib as f64 - had.memory;
                    // What nobody bought is handed out beyond that, and sums are rounded.
                    let most = PACE * market.fair(at).memory + 1.0 + decision.certificate.left_over.memory * 6000.0;
                    prop_assert!(moved <= most, "{moved} of {most}: {decision:?}");
                }
            }
        }
    }
}
