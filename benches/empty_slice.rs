//! What emptying a slice costs: zeros streamed past the caches, as an agent does it, and `memset`, in turns over the same
//! memory of this machine. Streaming leaves the caches to tenants; the promise is that it takes no longer for it. The ratio is
//! of two ways on one machine, and says nothing of pool memory, which is slower than this.

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
    // SAFETY: the region is mapped and can be written, as long as it says, and nobody has references into it.
    unsafe { region.as_ptr().write_bytes(0, region.size()) };
}

/// How long something takes, in milliseconds.
fn ms(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().div_duration_f64(Duration::from_millis(1))
}
