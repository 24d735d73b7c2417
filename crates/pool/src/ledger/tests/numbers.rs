//! Numbers of slices, EMCs and hosts: never reused, limited by those that exist, refused at the end of their space.

use units::limits::{EMCS_EVER_MAX, HOSTS_EVER_MAX, SLICES_EVER_MAX};

use super::*;

fn too_many(what: &'static str, max: u32) -> Result<(), Denied> {
    Err(Denied::TooMany { what, max: u64::from(max) })
}

#[test]
fn emc_of_65536_slices_is_added_and_removed_100_times_in_constant_memory() {
    let mut rack = Rack::of("e0=65536 h1:e0");
    for n in 1..=100_u32 {
        rack.configure(&format!("e{n}=65536 h1:e{n}")).unwrap();
        assert_eq!(rack.ledger.slots.len(), 65_536);
    }
    assert_eq!(rack.ledger.meta.next_slice, SliceId(101 * 65_536));
    assert_eq!(rack.takes("a", "h1", 2), [100 * 65_536, 100 * 65_536 + 1]);
    assert_eq!(rack.ledger.slot(SliceId(99 * 65_536)), None);
    assert_eq!(rack.disk.keys().filter(|key| matches!(key, Key::Slice(_))).count(), 2);
}

#[test]
fn hosts_and_emcs_are_added_and_removed_70000_times() {
    let mut rack = Rack::of("e0=1 h0:e0");
    for n in 1..=70_000_u32 {
        let words = format!("e{n}=1 h{n}:e{n}");
        let change = rack.ledger.decide_configure(at(0), &RackSpec::in_words(&words)).unwrap();
        rack.ledger.apply(change);
    }
    assert_eq!(rack.takes("a", "h70000", 1), [70_000]);
    assert_eq!(rack.host("h70000").host.emcs, [EmcId(70_000)]);
    assert_eq!(rack.ledger.host_named(&name("h70000")), Some(HostId(70_000)));
}

#[test]
fn slices_that_exist_are_limited_and_those_removed_are_not_counted() {
    let mut rack = Rack::of("e0=1 h1:e0");
    for n in 1..=3_u32 {
        rack.configure(&format!("e{n}={SLICES_MAX} h1:e{n}")).unwrap();
        let one_more = rack.configure(&format!("e{n}={SLICES_MAX} f=1 h1:e{n}"));
        assert_eq!(one_more, too_many("slices", SLICES_MAX));
    }
}

#[test]
fn end_of_each_number_space_is_refused_by_its_limit_and_changes_nothing() {
    let mut rack = Rack::of("e1=4 h1:e1");
    let meta = Meta {
        next_slice: SliceId(u32::MAX - 4),
        next_emc: EmcId(u32::MAX - 2),
        next_host: HostId(u32::MAX - 1),
        ..rack.ledger.meta.clone()
    };
    rack.apply(Change(vec![Record::Meta(meta)]));
    assert_eq!(rack.configure("e1=4 e2=5 h1:e1"), too_many("slices ever added", SLICES_EVER_MAX));
    rack.configure("e1=4 e2=4 h1:e1+e2 h2:e2").unwrap();
    let last = u32::MAX - 4;
    assert_eq!(rack.takes("a", "h2", 4), [last, last + 1, last + 2, last + 3]);
    let before = format!("{:?}", rack.ledger.meta);
    assert_eq!(rack.configure("e1=4 e2=4 e3=1 h1:e1 h2:e2"), too_many("slices ever added", SLICES_EVER_MAX));
    assert_eq!(rack.configure("e1=4 e2=4 h1:e1 h2:e2 h3:e1"), too_many("hosts ever added", HOSTS_EVER_MAX));
    let no_slices = "e1=4 e2=4 e3=0 e4=0 h1:e1 h2:e2";
    assert_eq!(rack.configure(no_slices), too_many("EMCs ever added", EMCS_EVER_MAX));
    assert_eq!(format!("{:?}", rack.ledger.meta), before);
    let refused = too_many("slices ever added", SLICES_EVER_MAX).unwrap_err().to_string();
    assert_eq!(refused, "slices ever added would exceed the limit of 4294967295");
    let loaded = Ledger::load(rack.ledger.meta().clone(), rack.disk.values().cloned());
    assert_eq!(loaded.slot(SliceId(u32::MAX - 1)), rack.ledger.slot(SliceId(u32::MAX - 1)));
    assert_eq!(loaded.slot(SliceId(u32::MAX)), None);
}

#[test]
fn every_slice_is_found_at_the_edges_of_its_emc_and_none_between_emcs() {
    let mut rack = Rack::of("e1=3 e2=2 e3=4 h1:e1+e2+e3");
    rack.configure("e1=3 e3=4 h1:e1+e3").unwrap();
    rack.configure("e1=3 e3=4 e4=1 h1:e1+e3+e4").unwrap();
    let emcs = (0..12).map(|slice| rack.ledger.emc_of(SliceId(slice)).map(|emc| emc.0));
    let expected = [0, 0, 0, 9, 9, 2, 2, 2, 2, 3, 9, 9].map(|emc| (emc != 9).then_some(emc));
    assert_eq!(emcs.collect::<Vec<_>>(), expected);
    let listed = |from| rack.ledger.slots_from(SliceId(from)).map(|(slice, ..)| slice.0).collect::<Vec<_>>();
    assert_eq!(listed(0), [0, 1, 2, 5, 6, 7, 8, 9]);
    assert_eq!(listed(2), [2, 5, 6, 7, 8, 9]);
    assert_eq!(listed(6), [6, 7, 8, 9]);
    assert_eq!(listed(10), []);
}
