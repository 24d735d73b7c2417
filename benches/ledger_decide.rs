//! Measures the decision of a one-slice reservation, without store, network or other tasks.
//!
//! Goal: less than 200 ns, with a ledger of 65,536 slices and 4,096 reservations.

use std::{hint::black_box, time::Duration};

use criterion::{BatchSize, Criterion};
use pool::{
    ledger::{EmcSpec, HostSpec, Ledger, RackSpec, Reserve, ReserveOutcome, When},
    record::{Meta, RequestKey},
};
use units::{Bytes, Name, Ns, RequestId, UnixMs};

/// Allocator that pool-manager uses in production.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const EMC_COUNT: u32 = 4;
const SLICES_PER_EMC: u32 = 16_384;
const HOST_COUNT: u32 = 4;
const RESERVATION_COUNT: u32 = 4096;
const SLICES_PER_RESERVATION: u32 = 8;

fn main() {
    let mut criterion = Criterion::default().measurement_time(Duration::from_secs(3)).configure_from_args();
    let (ledger, request) = (half_used_ledger(), reserve_request(RESERVATION_COUNT, 1));
    criterion.bench_function("decide_reserve of one slice (goal: below 200 ns)", |bencher| {
        let decide = |request| black_box(&ledger).decide_reserve(now(), request);
        bencher.iter_batched(|| request.clone(), decide, BatchSize::SmallInput);
    });
    criterion.final_summary();
}

/// Returns a ledger in which half of the slices are reserved.
fn half_used_ledger() -> Ledger {
    let mut ledger = Ledger::new(Meta::new("bench".to_owned()));
    let change = ledger.decide_configuration(now(), &rack()).expect("the rack is within all limits");
    ledger.apply(change);
    for number in 0..RESERVATION_COUNT {
        let decision = ledger.decide_reserve(now(), reserve_request(number, SLICES_PER_RESERVATION));
        let Ok(ReserveOutcome::New(_, change)) = decision else {
            panic!("reservation {number} was rejected: {decision:?}")
        };
        ledger.apply(change);
    }
    ledger
}

fn rack() -> RackSpec {
    let emc = |n| EmcSpec {
        serial: None,
        name: name(&format!("emc{n}")),
        slices: SLICES_PER_EMC,
        driver: "emulated".to_owned(),
        path: format!("/nowhere/emc{n}"),
    };
    let host = |n| HostSpec {
        name: name(&format!("h{n}")),
        cores: 64,
        local: Bytes::gib(256),
        emcs: (0..EMC_COUNT).map(|emc| name(&format!("emc{emc}"))).collect(),
    };
    RackSpec { emcs: (0..EMC_COUNT).map(emc).collect(), hosts: (0..HOST_COUNT).map(host).collect() }
}

fn reserve_request(number: u32, slices: u32) -> Reserve {
    let id = RequestId::new(&format!("request-{number}")).expect("letters, digits and a dash");
    Reserve {
        request: RequestKey { client: name("bench"), id },
        host: name(&format!("h{}", number % HOST_COUNT)),
        vm: name(&format!("vm-{number}")),
        slices,
        local: Bytes::ZERO,
        cores: 0,
        pinned: false,
        commit_within: Ns::secs(300),
        uid: None,
    }
}

fn name(text: &str) -> Name {
    Name::new(text).expect("letters, digits and a dash")
}

fn now() -> When {
    When { now: Ns::secs(1), wall: UnixMs(1_700_000_000_000) }
}
