//! Cost of zeroing a slice: non-temporal stores, as used by an agent, against `memset`, in turns
//! over the same memory of this machine. Non-temporal stores leave the caches to tenants; the goal
//! is that they take no longer. Pool memory is slower than this machine's.

use std::{
    fs::File,
    num::NonZeroU64,
    sync::atomic::AtomicU64,
    time::{Duration, Instant},
};

use benches::report::{Rounds, ratio, table};
use host_agent::host::memory::{mapped::Mapped, throttle::Throttle};
use rustix::fs::{MemfdFlags, memfd_create};
use units::SLICE;
use vm_memory::{FileOffset, MmapRegion};

const ROUNDS: usize = 7;

fn main() {
    let file = File::from(memfd_create("slice", MemfdFlags::CLOEXEC).expect("Linux has memfds"));
    file.set_len(SLICE.get()).expect("a memfd takes any length");
    let bytes = usize::try_from(SLICE.get()).expect("64-bit");
    let same = FileOffset::new(file.try_clone().expect("a descriptor is free"), 0);
    let (ours, theirs) = (
        Mapped::map(&file, SLICE.get()).expect("memory can be mapped"),
        MmapRegion::from_file(same, bytes).expect("memory can be mapped twice"),
    );
    let unlimited = Throttle::new(NonZeroU64::MAX);
    let stream = || ours.zero(&unlimited, &AtomicU64::new(0)).expect("nobody takes it away");
    stream(); // from now on all of its pages are there, in both mappings
    memset(&theirs);
    let (mut streamed, mut set) = (Rounds::default(), Rounds::default());
    for _ in 0..ROUNDS {
        streamed.add(ms(stream));
        set.add(ms(|| memset(&theirs)));
    }
    let row = |name: &str, rounds: &Rounds| vec![name.to_owned(), rounds.show()];
    print!("{}", table(&["", "ms/GiB"], &[row("streamed", &streamed), row("memset", &set)]));
    println!("{}", ratio("empty_slice_vs_memset", set.median() / streamed.median()));
}

fn memset(region: &MmapRegion<()>) {
    // SAFETY: the region is mapped writable with its length, and no references into it exist.
    unsafe { region.as_ptr().write_bytes(0, region.size()) };
}

/// How long something takes, in milliseconds.
fn ms(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().div_duration_f64(Duration::from_millis(1))
}
