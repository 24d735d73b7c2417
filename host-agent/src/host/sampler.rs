//! Page accesses of tenants, sampled by the processor: PEBS (Intel) or IBS (AMD) record the address
//! of one access in many, for all processes together, and perf delivers them. Spirit counts
//! accesses in this way (4.2, 5.1).
//!
//! A visit to a page usually accesses many of its cache lines, and a host needs the rate of visits.
//! The number of accesses per visit is derived from DAMON's result for the same tenant
//! ([`TenantSamples::accesses_per_visit`]); without one, it is the number of cache lines of a page.

mod rates;
mod source;

use std::{
    collections::BTreeMap,
    fmt, fs, io,
    time::{Duration, Instant},
};

use perf_event::{SampleFlag, data};
use rustix::io::Errno;
use units::limits::SAMPLE_BUFFER_BYTES_PER_CPU;

use self::{
    rates::{Access, Rate},
    source::Source,
};
use super::{
    access_profile::{AccessProfile, AccessSource},
    memory::usage::PAGE,
    sysfs::{Sysfs, SysfsError},
};

/// Bytes of a sample in a ring: header, process, address, and weight.
const SAMPLE_BYTES: usize = 32;
/// Maximum samples per second and processor; and the fraction of its ring that they may fill in an
/// epoch, because the kernel does not keep the rate exactly.
const HZ_MAX: f64 = 1000.0;
const BUFFER_FILL_MAX: f64 = 2.0 / 3.0;
/// The kernel's limit also applies, which decreases where samples take long.
const KERNEL_HZ_MAX_FILE: &str = "/proc/sys/kernel/perf_event_max_sample_rate";
/// Number of samples of a tenant below which there is no result.
const SAMPLES_MIN: usize = 1000;
/// The last address that may be a process's own.
const USER_MAX: u64 = u64::MAX >> 1;
/// Bits of the processor mode that denote a guest: its addresses are not those of the process.
const MODE: u16 = 7;
const GUEST_KERNEL: u16 = 4;
const GUEST_USER: u16 = 5;

/// Default number of accesses per visit to a page: its cache lines.
pub const LINES_PER_PAGE: f64 = 64.0;
/// Upper bound: each byte of a page.
const ACCESSES_PER_VISIT_MAX: f64 = PAGE as f64;

/// Reason why the processor takes no samples.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// The kernel shows no processor with this capability.
    #[error("no processor of this host supports sampling of memory accesses (PEBS or IBS)")]
    None,
    /// The file cannot be parsed.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// Perf rejects it.
    #[error("perf refuses samples of {event_name}")]
    Perf {
        /// Object.
        event_name: &'static str,
        /// Why.
        #[source]
        error: io::Error,
    },
}

/// All processors of this machine, sampling or not.
#[derive(Debug)]
pub struct Sampler {
    source: Source,
    processors: Vec<usize>,
    rings: Vec<Ring>,
    started: Option<Instant>,
}

/// Ring buffer of one processor.
struct Ring {
    samples: perf_event::Sampler,
    /// Time enabled and time running so far: other users of the counters may displace it.
    times: (Duration, Duration),
}

/// Samples of all processes.
#[derive(Debug)]
pub struct SampleSet {
    source: AccessSource,
    /// Duration of sampling.
    seconds: f64,
    /// Accesses of each process, ordered by page.
    accesses: BTreeMap<u32, Vec<Access>>,
}

/// Samples of one tenant.
#[derive(Debug)]
pub struct TenantSamples {
    source: AccessSource,
    rates: Vec<Rate>,
}

impl Sampler {
    /// Creates it for a tree such as `/sys`; samples of the period are read at its end.
    ///
    /// # Errors
    /// The processor does not sample, or the kernel rejects it: see [`SamplerError`].
    pub fn open(sys: &Sysfs, epoch: Duration) -> Result<Self, SamplerError> {
        Self::of(Source::find(sys)?, source::processors(sys)?, epoch)
    }

    fn of(source: Source, processors: Vec<usize>, epoch: Duration) -> Result<Self, SamplerError> {
        let allowed = fs::read_to_string(KERNEL_HZ_MAX_FILE).ok().and_then(|hz| hz.trim().parse().ok());
        let hz = (SAMPLE_BUFFER_BYTES_PER_CPU / SAMPLE_BYTES) as f64 * BUFFER_FILL_MAX / epoch.as_secs_f64();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a thousand")]
        let hz = hz.min(allowed.unwrap_or(HZ_MAX)).clamp(1.0, HZ_MAX) as u64;
        let rings = processors.iter().map(|processor| Ring::open(source, *processor, hz));
        let rings = rings.collect::<io::Result<Vec<Ring>>>();
        let rings = rings.map_err(|error| SamplerError::Perf { event_name: source.event_name, error })?;
        Ok(Self { source, processors, rings, started: None })
    }

    /// Returns the sampled event.
    pub const fn event_name(&self) -> &'static str {
        self.source.event_name
    }

    /// Returns whether the machine still has the same processors.
    pub fn covers_processors_of(&self, sys: &Sysfs) -> bool {
        source::processors(sys).is_ok_and(|processors| processors == self.processors)
    }

    /// Starts sampling.
    ///
    /// # Errors
    /// The kernel rejects it.
    pub fn begin(&mut self) -> Result<(), SamplerError> {
        if self.started.is_some() {
            self.take()?;
        }
        let result = self.rings.iter_mut().try_for_each(Ring::begin);
        result.map_err(|error| self.perf_error(error))?;
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Stops sampling, and returns the samples.
    ///
    /// # Errors
    /// The kernel rejects it.
    pub fn take(&mut self) -> Result<SampleSet, SamplerError> {
        let seconds = self.started.take().map_or(0.0, |result| result.elapsed().as_secs_f64());
        let ended = self.rings.iter_mut().try_for_each(|ring| ring.samples.disable());
        ended.map_err(|error| self.perf_error(error))?;
        let samples: io::Result<Vec<_>> =
            self.rings.iter_mut().map(|ring| ring.drain(seconds > 0.0)).collect();
        let samples = samples.map_err(|error| self.perf_error(error))?;
        let mut accesses = BTreeMap::<u32, Vec<Access>>::new();
        for (process, access) in samples.into_iter().flatten() {
            accesses.entry(process).or_default().push(access);
        }
        accesses.values_mut().for_each(|accesses| accesses.sort_by_key(|access| access.page));
        Ok(SampleSet { source: self.source.access_source, seconds, accesses })
    }

    fn perf_error(&self, error: io::Error) -> SamplerError {
        SamplerError::Perf { event_name: self.source.event_name, error }
    }
}

impl Ring {
    fn open(source: Source, processor: usize, hz: u64) -> io::Result<Self> {
        let open = |excludes_guests| {
            let mut builder = source.event();
            builder.any_pid().one_cpu(processor).sample_frequency(hz).exclude_guest(excludes_guests);
            builder.sample(SampleFlag::TID | SampleFlag::ADDR | SampleFlag::PERIOD);
            // No reader waits for them.
            builder.wakeup_watermark(SAMPLE_BUFFER_BYTES_PER_CPU);
            builder.build()?.sampled(SAMPLE_BUFFER_BYTES_PER_CPU)
        };
        // Not every processor can exclude guests; their samples are dropped later then.
        let cannot =
            |error: &io::Error| matches!(Errno::from_io_error(error), Some(Errno::INVAL | Errno::OPNOTSUPP));
        let samples = open(true).or_else(|error| if cannot(&error) { open(false) } else { Err(error) })?;
        Ok(Self { samples, times: (Duration::ZERO, Duration::ZERO) })
    }

    fn begin(&mut self) -> io::Result<()> {
        self.samples.reset()?;
        self.times = self.read()?.1;
        self.samples.enable()
    }

    /// Returns the number of accesses since the start, sampled or not, with time enabled and time
    /// running.
    fn read(&mut self) -> io::Result<(f64, (Duration, Duration))> {
        let read = self.samples.read_full()?;
        let times = read.time_enabled().zip(read.time_running());
        Ok((read.count() as f64, times.unwrap_or_default()))
    }

    /// Reads the samples of a processor for processes' own memory, with their process.
    ///
    /// While the kernel adapts the period, it reports too large weights for some samples; the total
    /// count is right.
    fn drain(&mut self, has_begun: bool) -> io::Result<Vec<(u32, Access)>> {
        let (mut accesses, mut weight_sum) = (Vec::new(), 0.0);
        // Bounded by the ring: no samples are added any more.
        while let Some(record) = self.samples.next_record() {
            let is_of_guest = matches!(record.misc() & MODE, GUEST_KERNEL | GUEST_USER);
            let Ok(data::Record::Sample(sample)) = record.parse_record() else { continue };
            let (Some(process), Some(address), Some(period)) = (sample.pid(), sample.addr(), sample.period())
            else {
                continue;
            };
            let period = period as f64;
            weight_sum += period;
            // Process 0 is outside of this namespace.
            if !is_of_guest && process > 0 && address > 0 && address <= USER_MAX {
                accesses.push((process, Access { page: address / PAGE, weight: period }));
            }
        }
        let (count, (enabled, running)) = self.read()?;
        let (enabled, running) = (enabled - self.times.0, running - self.times.1);
        if has_begun && enabled.is_zero() {
            // The processor was offline meanwhile, which dropped the event.
            return Err(Errno::NODEV.into());
        }
        let all = if running.is_zero() { 0.0 } else { count * enabled.div_duration_f64(running) };
        let part = if weight_sum > 0.0 { all / weight_sum } else { 0.0 };
        accesses.iter_mut().for_each(|(_, access)| access.weight *= part);
        Ok(accesses)
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("times", &self.times).finish_non_exhaustive()
    }
}

impl SampleSet {
    /// Returns the samples of a tenant with an amount of memory; none if there are too few.
    pub fn tenant(&self, processes: &[u32], bytes: u64) -> Option<TenantSamples> {
        let accesses = || processes.iter().filter_map(|process| self.accesses.get(process));
        let samples: usize = accesses().map(Vec::len).sum();
        if samples < SAMPLES_MIN || self.seconds <= 0.0 {
            return None;
        }
        let sampled: usize = accesses().map(|accesses| rates::pages(accesses).count()).sum();
        let rates = accesses().flat_map(|accesses| rates::of(accesses, bytes / PAGE, sampled, self.seconds));
        Some(TenantSamples { source: self.source, rates: rates.collect() })
    }
}

impl TenantSamples {
    /// Returns the page accesses for a number of accesses per visit.
    pub fn profile(&self, accesses_per_visit: f64) -> AccessProfile {
        AccessProfile {
            source: self.source,
            regions: self.rates.iter().map(|rate| rate.region(accesses_per_visit)).collect(),
        }
    }

    /// Returns the number of accesses per visit that matches another monitor's count of touched
    /// pages; at least 1.
    pub fn accesses_per_visit(&self, pages_per_second: f64) -> f64 {
        let (mut low, mut high) = (0.0, ACCESSES_PER_VISIT_MAX.ln());
        for _ in 0..BISECTION_STEPS {
            let visit = f64::midpoint(low, high);
            if self.profile(visit.exp()).pages_per_second() > pages_per_second {
                low = visit
            } else {
                high = visit
            }
        }
        f64::midpoint(low, high).exp()
    }
}

/// Steps of the bisection: more exact than the measurements.
const BISECTION_STEPS: u32 = 16;

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
