//! Page faults for tests: accesses that are sampled on any machine.

use std::{
    collections::BTreeSet,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rustix::{
    io::Errno,
    time::{ClockId, clock_gettime},
};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

use super::{Sampler, SamplerError, Source, source};
use crate::{
    host::{access_profile::AccessSource, memory::usage::PAGE, sysfs::Sysfs},
    skipped::report_skipped,
};

const MEMORY_BYTES: usize = 1 << 20;
/// Page faults, as perf counts them, in place of a processor's events.
const FAULTS: Source = Source {
    access_source: AccessSource::Pebs,
    event_name: "page faults",
    kind: 1,
    config: 2,
    is_precise: false,
    is_of_users: true,
};

/// Serializes tests that count this process's faults with tests that cause some.
static FAULTS_LOCK: Mutex<()> = Mutex::new(());

/// Exclusive right to count faults, while it is held.
pub(crate) fn lock_faults() -> MutexGuard<'static, ()> {
    FAULTS_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Samples them; `None` where it is not permitted, which is reported at the end of all tests.
pub(crate) fn sampler(epoch: Duration) -> Option<Sampler> {
    let processors = source::processors(&Sysfs::at("/sys")).unwrap();
    match Sampler::of(FAULTS, processors, epoch) {
        Ok(sampler) => Some(sampler),
        Err(SamplerError::Perf { error, .. }) if is_forbidden(&error) => {
            report_skipped(&format!("samples of page faults, as perf is not allowed: {error}"));
            None
        }
        Err(error) => panic!("{}", units::chain(&error)),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS))
}

/// Writes to each page of new memory repeatedly for a time, and returns the pages.
pub(crate) fn cause_faults(duration: Duration) -> BTreeSet<u64> {
    let worked = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let (started, mut pages) = (worked(), BTreeSet::new());
    while worked() - started < duration {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        for at in (0..MEMORY_BYTES as u64 / PAGE).map(|page| GuestAddress(page * PAGE)) {
            memory.write_obj(1_u8, at).unwrap();
            pages.insert(memory.get_host_address(at).unwrap() as u64 / PAGE);
        }
    }
    pages
}
