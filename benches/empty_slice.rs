//! Compares two ways to zero a slice: the non-temporal stores of the host agent, and `memset`.
//!
//! Goal: non-temporal stores take at most as long as `memset`. The agent uses non-temporal stores
//! because they do not evict cache lines of tenants. Both ways run in turns on the same local
//! memory. Pool memory is slower.

use std::{
    fs::File,
    num::NonZeroU64,
    sync::atomic::AtomicU64,
    time::{Duration, Instant},
};

use benches::report::{Rounds, format_ratio, format_table};
use host_agent::host::memory::{mapped::MappedMemory, throttle::Throttle};
use rustix::fs::{MemfdFlags, memfd_create};
use units::SLICE;
use vm_memory::{FileOffset, MmapRegion};

const ROUND_COUNT: usize = 7;

fn main() {
    let file = File::from(memfd_create("slice", MemfdFlags::CLOEXEC).expect("Linux has memfds"));
    file.set_len(SLICE.get()).expect("a memfd takes any length");
    let bytes = usize::try_from(SLICE.get()).expect("usize has 64 bits");
    let file_offset = FileOffset::new(file.try_clone().expect("a descriptor is free"), 0);
    let (mapping, memset_mapping) = (
        MappedMemory::map(&file, SLICE.get()).expect("memory can be mapped"),
        MmapRegion::from_file(file_offset, bytes).expect("memory can be mapped twice"),
    );
    let unlimited = Throttle::new(NonZeroU64::MAX);
    let zero = || mapping.zero(&unlimited, &AtomicU64::new(0)).expect("the mapping is not revoked");
    zero(); // allocates the pages of the file, which both mappings share
    memset(&memset_mapping);
    let (mut zero_times, mut memset_times) = (Rounds::default(), Rounds::default());
    for _ in 0..ROUND_COUNT {
        zero_times.add(duration_ms(zero));
        memset_times.add(duration_ms(|| memset(&memset_mapping)));
    }
    let row = |name: &str, rounds: &Rounds| vec![name.to_owned(), rounds.summary()];
    print!(
        "{}",
        format_table(&["", "ms/GiB"], &[row("non-temporal", &zero_times), row("memset", &memset_times)])
    );
    println!("{}", format_ratio("empty_slice_vs_memset", memset_times.median() / zero_times.median()));
}

fn memset(region: &MmapRegion<()>) {
    // SAFETY: the region is mapped writable with its length, and no references into it exist.
    unsafe { region.as_ptr().write_bytes(0, region.size()) };
}

/// Runs `work` and returns its duration, in milliseconds.
fn duration_ms(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().div_duration_f64(Duration::from_millis(1))
}
