//! Numbers of slices, EMCs and hosts are never reused. Only existing objects count for the limits.
//! Configurations that exhaust the range of numbers are rejected.

use units::{
    HostId,
    limits::{EMC_IDS_MAX, HOST_IDS_MAX, RESERVATIONS_SINCE_BACKUP_MAX, SLICE_IDS_MAX},
};

use super::*;

fn too_many_rejection(what: &'static str, max: u32) -> Result<(), Rejection> {
    Err(Rejection::LimitExceeded { what, max: u64::from(max) })
}

#[test]
fn adding_and_removing_emcs_uses_constant_memory() {
    let mut rack = Rack::new("e0=1024 h1:e0");
    for n in 1..=100_u32 {
        rack.configure(&format!("e{n}=1024 h1:e{n}")).unwrap();
        assert_eq!(rack.ledger.slots.len(), 1024);
    }
    assert_eq!(rack.ledger.meta.next_slice, SliceId(101 * 1024));
    assert_eq!(rack.reserve_slices("a", "h1", 2), [100 * 1024, 100 * 1024 + 1]);
    assert_eq!(rack.ledger.slot(SliceId(99 * 1024)), None);
    assert_eq!(rack.disk.keys().filter(|key| matches!(key, Key::Slice(_))).count(), 2);
}

#[test]
fn host_emc_and_slice_ids_above_16_bits_are_accepted() {
    let mut rack = Rack::new("e0=1 h0:e0");
    let before = u32::from(u16::MAX) - 2;
    let meta = Meta {
        next_slice: SliceId(before),
        next_emc: EmcId(before),
        next_host: HostId(before),
        ..rack.ledger.meta.clone()
    };
    rack.apply(Change(vec![Record::Meta(meta)]));
    for n in before..before + 5 {
        rack.configure(&format!("e{n}=1 h{n}:e{n}")).unwrap();
        assert_eq!(rack.ledger.find_host_by_name(&name(&format!("h{n}"))), Some(HostId(n)));
        assert_eq!(rack.host(&format!("h{n}")).host.emcs, [EmcId(n)]);
    }
    assert_eq!(rack.reserve_slices("a", "h65537", 1), [65_537]);
}

#[test]
fn slice_limit_does_not_count_removed_slices() {
    let mut rack = Rack::new("e0=1 h1:e0");
    for n in 1..=2_u32 {
        rack.configure(&format!("e{n}={SLICES_MAX} h1:e{n}")).unwrap();
        let one_more = rack.configure(&format!("e{n}={SLICES_MAX} f=1 h1:e{n}"));
        assert_eq!(one_more, too_many_rejection("slices", SLICES_MAX));
    }
}

#[test]
fn exhausted_id_space_is_rejected_and_changes_nothing() {
    let mut rack = Rack::new("e1=4 h1:e1");
    let meta = Meta {
        next_slice: SliceId(u32::MAX - 4),
        next_emc: EmcId(u32::MAX - 2),
        next_host: HostId(u32::MAX - 1),
        ..rack.ledger.meta.clone()
    };
    rack.apply(Change(vec![Record::Meta(meta)]));
    assert_eq!(rack.configure("e1=4 e2=5 h1:e1"), too_many_rejection("slices ever added", SLICE_IDS_MAX));
    rack.configure("e1=4 e2=4 h1:e1+e2 h2:e2").unwrap();
    let last = u32::MAX - 4;
    assert_eq!(rack.reserve_slices("a", "h2", 4), [last, last + 1, last + 2, last + 3]);
    let before = format!("{:?}", rack.ledger.meta);
    assert_eq!(
        rack.configure("e1=4 e2=4 e3=1 h1:e1 h2:e2"),
        too_many_rejection("slices ever added", SLICE_IDS_MAX)
    );
    assert_eq!(
        rack.configure("e1=4 e2=4 h1:e1 h2:e2 h3:e1"),
        too_many_rejection("hosts ever added", HOST_IDS_MAX)
    );
    let no_slices = "e1=4 e2=4 e3=0 e4=0 h1:e1 h2:e2";
    assert_eq!(rack.configure(no_slices), too_many_rejection("EMCs ever added", EMC_IDS_MAX));
    assert_eq!(format!("{:?}", rack.ledger.meta), before);
    let message = too_many_rejection("slices ever added", SLICE_IDS_MAX).unwrap_err().to_string();
    assert_eq!(message, "slices ever added would exceed the limit of 4294967295");
    let loaded = Ledger::load(rack.ledger.meta().clone(), rack.disk.values().cloned());
    assert_eq!(loaded.slot(SliceId(u32::MAX - 1)), rack.ledger.slot(SliceId(u32::MAX - 1)));
    assert_eq!(loaded.slot(SliceId(u32::MAX)), None);
}

#[test]
fn slice_lookup_respects_the_first_and_last_slice_of_each_emc() {
    let mut rack = Rack::new("e1=3 e2=2 e3=4 h1:e1+e2+e3");
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

#[test]
fn hosts_are_listed_in_order_from_an_id() {
    let mut rack = Rack::new("e1=1 h1:e1 h2:e1 h3:e1");
    rack.configure("e1=1 h1:e1 h3:e1").unwrap();
    let listed = |from| rack.ledger.hosts_from(HostId(from)).map(|(host, _)| host.0).collect::<Vec<_>>();
    assert_eq!(listed(0), [0, 2]);
    assert_eq!(listed(1), [2]);
    assert_eq!(listed(3), []);
}

#[test]
fn restore_of_the_largest_generation_leaves_unused_reservation_ids() {
    let mut rack = Rack::new("e1=4 h1:e1");
    rack.ledger.meta_mut().generation = u64::MAX;
    let change = rack.ledger.decide_restore();
    rack.apply(change);
    assert!(u64::MAX - rack.ledger.meta.next_reservation.0 >= RESERVATIONS_SINCE_BACKUP_MAX);
}
