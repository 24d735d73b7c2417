//! Sampling of page faults for tests: unlike PEBS and IBS events, perf can sample them on any
//! machine.

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

use super::{EventSource, Sampler, SamplerError, source};
use crate::{
    host::{access_profile::AccessSource, memory::usage::PAGE_BYTES, sysfs::Sysfs},
    skipped::report_skipped,
};

const MEMORY_BYTES: usize = 1 << 20;
/// Event of page faults, which replaces the processor's event in tests.
const FAULT_SOURCE: EventSource = EventSource {
    access_source: AccessSource::Pebs,
    event_name: "page faults",
    kind: 1,
    config: 2,
    is_precise: false,
    excludes_kernel: true,
};

/// Lock that serializes tests that count page faults of this process and tests that cause them.
static FAULTS_LOCK: Mutex<()> = Mutex::new(());

/// Locks the page faults of this process: other tests do not cause faults while the lock is held.
pub(crate) fn lock_faults() -> MutexGuard<'static, ()> {
    FAULTS_LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens a sampler of page faults. Returns `None`, and reports the test as skipped, if perf is not
/// permitted.
pub(crate) fn sampler(epoch: Duration) -> Option<Sampler> {
    let processors = source::processors(&Sysfs::at("/sys")).unwrap();
    match Sampler::of(FAULT_SOURCE, processors, epoch) {
        Ok(sampler) => Some(sampler),
        Err(SamplerError::Perf { error, .. }) if is_forbidden(&error) => {
            report_skipped(&format!("sampling of page faults, which requires access to perf: {error}"));
            None
        }
        Err(error) => panic!("{}", units::chain(&error)),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::PERM | Errno::ACCESS | Errno::NOSYS))
}

/// Causes page faults by writing to each page of new mappings, until this thread has used
/// `duration` of CPU time. Returns the written pages.
pub(crate) fn cause_faults(duration: Duration) -> BTreeSet<u64> {
    let cpu_time = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let (started, mut pages) = (cpu_time(), BTreeSet::new());
    while cpu_time() - started < duration {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap();
        for at in (0..MEMORY_BYTES as u64 / PAGE_BYTES).map(|page| GuestAddress(page * PAGE_BYTES)) {
            memory.write_obj(1_u8, at).unwrap();
            pages.insert(memory.get_host_address(at).unwrap() as u64 / PAGE_BYTES);
        }
    }
    pages
}
