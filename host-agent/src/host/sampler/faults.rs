//! Page faults for tests: accesses that are sampled on any machine.

use std::{collections::BTreeSet, time::Duration};

use rustix::time::{ClockId, clock_gettime};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use super::{Sampler, Source, source};
use crate::host::{sysfs::Sysfs, watched::Eyes};

const BYTES: usize = 1 << 20;
/// Page faults, as perf counts them, in place of a processor's events.
const FAULTS: Source = Source {
    eyes: Eyes::Pebs,
    what: "page faults",
    kind: 1,
    config: 2,
    is_precise: false,
    is_of_users: true,
};

/// Samples them; nothing where that is not allowed, and then it is said.
pub(crate) fn sampler(epoch: Duration) -> Option<Sampler> {
    let processors = source::processors(&Sysfs::at("/sys")).unwrap();
    match Sampler::of(FAULTS, processors, epoch) {
        Ok(sampler) => Some(sampler),
        Err(error) if !rustix::process::geteuid().is_root() => {
            eprintln!("skipped: root is needed: {}", units::chain(&error));
            None
        }
        Err(error) => panic!("{}", units::chain(&error)),
    }
}

/// Writes to each page of new memory, again and again, until this thread has worked for so long; says which pages that was.
pub(crate) fn fault(long: Duration) -> BTreeSet<u64> {
    let worked = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let (begun, mut pages) = (worked(), BTreeSet::new());
    while worked() - begun < long {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), BYTES)]).unwrap();
        for at in (0..BYTES as u64).step_by(4096) {
            memory.write_obj(1_u8, GuestAddress(at)).unwrap();
            pages.insert(memory.get_host_address(GuestAddress(at)).unwrap() as u64 / 4096);
        }
    }
    pages
}
