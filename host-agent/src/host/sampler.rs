//! Which pages tenants touch, by the processor: PEBS (Intel) or IBS (AMD) tell the address of one access in so many, and perf hands that on, of all
//! processes together. Spirit counts accesses so (4.2, 5.1); pages that are never sampled stand for no memory here, those that are for all accesses
//! between two samples.
//!
//! From a sample to [`Watched`] is a step that DAMON does not need: how often a page is touched is known by how close samples are to each other.

mod regions;
mod source;

use std::{
    collections::BTreeMap,
    fmt, io,
    time::{Duration, Instant},
};

use perf_event::{SampleFlag, Sampler as Ring, data};
use units::limits::SAMPLES_BYTES_PER_PROCESSOR;

use self::{regions::Access, source::Source};
use super::{
    sysfs::{Sysfs, SysfsError},
    watched::{PAGE, Watched},
};

/// Bytes of a sample in a ring: its head, whose it is, where, and how many accesses it stands for.
const SAMPLE_BYTES: usize = 32;
/// Samples of one processor per second, at most; and what part of its ring they are to fill in an epoch, since the kernel does not keep to that exactly.
const HZ_MAX: f64 = 1000.0;
const FILLED: f64 = 2.0 / 3.0;
/// Below so many samples of a tenant nothing is said of it.
const SAMPLES_MIN: usize = 1000;
/// The last address that may be a process's own.
const USER_MAX: u64 = u64::MAX >> 1;
/// Of the bits that say in which mode a processor was, those of a guest: its addresses are not those of the process.
const MODE: u16 = 7;
const GUEST_KERNEL: u16 = 4;
const GUEST_USER: u16 = 5;

/// Why the processor samples nothing.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// The kernel shows no processor that does.
    #[error("the kernel shows no processor that samples memory accesses (PEBS or IBS)")]
    None,
    /// What it shows cannot be read.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// It refuses.
    #[error("perf refuses samples of {what}")]
    Perf {
        /// Of what.
        what: &'static str,
        /// Why.
        #[source]
        error: io::Error,
    },
}

/// All processors of this machine, sampling or not.
pub struct Sampler {
    source: Source,
    rings: Vec<Ring>,
    begun: Option<Instant>,
}

/// What was sampled.
#[derive(Debug)]
pub struct Sampled {
    source: Source,
    /// For how long.
    seconds: f64,
    /// Of each process, in order of pages.
    accesses: BTreeMap<u32, Vec<Access>>,
}

impl Sampler {
    /// Of a machine whose kernel speaks in a tree such as `/sys`; what is sampled in such a time is taken then.
    ///
    /// # Errors
    /// The processor does not sample, or the kernel does not let us: see [`SamplerError`].
    pub fn open(sys: &Sysfs, epoch: Duration) -> Result<Self, SamplerError> {
        Self::of(Source::find(sys)?, &source::processors(sys)?, epoch)
    }

    fn of(source: Source, processors: &[usize], epoch: Duration) -> Result<Self, SamplerError> {
        let hz = (SAMPLES_BYTES_PER_PROCESSOR / SAMPLE_BYTES) as f64 * FILLED / epoch.as_secs_f64();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a thousand")]
        let hz = hz.clamp(1.0, HZ_MAX) as u64;
        let rings = processors.iter().map(|processor| ring(source, *processor, hz));
        let rings = rings.collect::<io::Result<Vec<Ring>>>();
        let rings = rings.map_err(|error| SamplerError::Perf { what: source.what(), error })?;
        Ok(Self { source, rings, begun: None })
    }

    /// Of page faults, which any machine can sample; nothing where that is not allowed, and then it is said.
    #[cfg(test)]
    pub fn of_faults(epoch: Duration) -> Option<Self> {
        let processors = source::processors(&Sysfs::at("/sys")).unwrap();
        match Self::of(Source::Faults, &processors, epoch) {
            Ok(sampler) => Some(sampler),
            Err(error) if !rustix::process::geteuid().is_root() => {
                eprintln!("skipped: root is needed: {}", units::chain(&error));
                None
            }
            Err(error) => panic!("{}", units::chain(&error)),
        }
    }

    /// Samples from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn begin(&mut self) -> Result<(), SamplerError> {
        if self.begun.is_some() {
            self.take()?;
        }
        self.each(|ring| ring.reset().and_then(|()| ring.enable()))?;
        self.begun = Some(Instant::now());
        Ok(())
    }

    /// No longer; and what was sampled since.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn take(&mut self) -> Result<Sampled, SamplerError> {
        let begun = self.begun.take();
        self.each(|ring| ring.disable())?;
        let taken: io::Result<Vec<_>> = self.rings.iter_mut().map(drained).collect();
        let taken = taken.map_err(|error| self.refused(error))?;
        let seconds = begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
        let mut accesses = BTreeMap::<u32, Vec<Access>>::new();
        for (process, access) in taken.into_iter().flatten() {
            accesses.entry(process).or_default().push(access);
        }
        accesses.values_mut().for_each(|accesses| accesses.sort_by_key(|access| access.page));
        Ok(Sampled { source: self.source, seconds, accesses })
    }

    /// What it samples.
    pub const fn what(&self) -> &'static str {
        self.source.what()
    }

    fn each(&mut self, what: impl Fn(&mut Ring) -> io::Result<()>) -> Result<(), SamplerError> {
        let done = self.rings.iter_mut().try_for_each(what);
        done.map_err(|error| self.refused(error))
    }

    fn refused(&self, error: io::Error) -> SamplerError {
        SamplerError::Perf { what: self.source.what(), error }
    }
}

impl fmt::Debug for Sampler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sampler({:?} of {} processors)", self.source, self.rings.len())
    }
}

impl Sampled {
    /// What was seen of a tenant that has so much memory, wherever it is; nothing if that is too little.
    pub fn of(&self, processes: &[u32], bytes: u64) -> Option<Watched> {
        let accesses = || processes.iter().filter_map(|process| self.accesses.get(process));
        let samples: usize = accesses().map(Vec::len).sum();
        if samples < SAMPLES_MIN || self.seconds <= 0.0 {
            return None;
        }
        let pages: usize = accesses().map(|accesses| regions::pages(accesses).count()).sum();
        let apart = bytes / PAGE / pages as u64;
        let regions = accesses().flat_map(|accesses| regions::of(accesses, apart, self.seconds)).collect();
        Some(Watched { by: self.source.eyes(), regions })
    }
}

/// A processor's samples, none yet.
fn ring(source: Source, processor: usize, hz: u64) -> io::Result<Ring> {
    let open = |excludes_guests| {
        let mut builder = source.event();
        builder.any_pid().one_cpu(processor).sample_frequency(hz).exclude_guest(excludes_guests);
        builder.sample(SampleFlag::TID | SampleFlag::ADDR | SampleFlag::PERIOD);
        // Nobody waits for them.
        builder.wakeup_watermark(SAMPLES_BYTES_PER_PROCESSOR);
        builder.build()?.sampled(SAMPLES_BYTES_PER_PROCESSOR)
    };
    // Not every processor can leave guests out; then theirs are left out as they come.
    open(true).or_else(|_| open(false))
}

/// What a processor sampled of processes' own memory, and whose.
///
/// While the kernel seeks how often to sample it says of some samples that they stand for far more than they do; but it knows how many there were in all.
fn drained(ring: &mut Ring) -> io::Result<Vec<(u32, Access)>> {
    let (mut accesses, mut stand_for) = (Vec::new(), 0.0);
    // As many as there is room for: nothing is added any more.
    while let Some(record) = ring.next_record() {
        let is_of_guest = matches!(record.misc() & MODE, GUEST_KERNEL | GUEST_USER);
        let Ok(data::Record::Sample(sample)) = record.parse_record() else { continue };
        let (Some(process), Some(address), Some(period)) = (sample.pid(), sample.addr(), sample.period())
        else {
            continue;
        };
        let period = period as f64;
        stand_for += period;
        if !is_of_guest && address > 0 && address <= USER_MAX {
            accesses.push((process, Access { page: address / PAGE, stands_for: period }));
        }
    }
    let part = if stand_for > 0.0 { ring.read()? as f64 / stand_for } else { 0.0 };
    accesses.iter_mut().for_each(|(_, access)| access.stands_for *= part);
    Ok(accesses)
}

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
