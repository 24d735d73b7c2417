//! Page accesses of tenants, sampled by the processor. PEBS (Intel) or IBS (AMD) records the
//! addresses of a small sample of the accesses of all processes, and perf delivers the samples.
//! Spirit (sections 4.2 and 5.1) counts accesses in the same way.
//!
//! Access profiles count bursts of accesses to a page, and one burst usually accesses many cache
//! lines of the page. The number of accesses per burst is derived from DAMON's result for the same
//! tenant ([`TenantSamples::accesses_per_burst`]). Without such a result, it is the number of cache
//! lines of a page.

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
    rates::{Access, AccessRate},
    source::EventSource,
};
use super::{
    access_profile::{AccessProfile, AccessSource},
    memory::usage::PAGE_BYTES,
    sysfs::{Sysfs, SysfsError},
};

/// Size of a sample in the ring buffer, in bytes: header, process, address, and period.
const SAMPLE_BYTES: usize = 32;
/// Maximum sampling rate, in samples per second and processor.
const SAMPLE_HZ_MAX: f64 = 1000.0;
/// Fraction of the ring buffer that the samples of one epoch may fill at the nominal rate; the
/// kernel may exceed the rate.
const BUFFER_FILL_FRACTION_MAX: f64 = 2.0 / 3.0;
/// File with the kernel's limit of the sampling rate. The kernel lowers this limit if samples take
/// too long.
const KERNEL_HZ_MAX_FILE: &str = "/proc/sys/kernel/perf_event_max_sample_rate";
/// Minimum number of samples of a tenant for a result.
const SAMPLES_MIN: usize = 1000;
/// Highest address that a process can have; higher addresses belong to the kernel.
const USER_ADDRESS_MAX: u64 = u64::MAX >> 1;
/// Bits of the processor mode in a perf record.
const PERF_RECORD_MISC_CPUMODE_MASK: u16 = 7;
/// Processor mode of a guest's kernel. The sampled addresses are not addresses of the process.
const PERF_RECORD_MISC_GUEST_KERNEL: u16 = 4;
/// Processor mode of a guest's processes. The sampled addresses are not addresses of the process.
const PERF_RECORD_MISC_GUEST_USER: u16 = 5;

/// Default number of accesses per burst: the number of cache lines of a page.
pub const LINES_PER_PAGE: f64 = 64.0;
/// Maximum number of accesses per burst: one for each byte of the page.
const ACCESSES_PER_BURST_MAX: f64 = PAGE_BYTES as f64;

/// Reason why accesses cannot be sampled.
#[derive(Debug, thiserror::Error)]
pub enum SamplerError {
    /// Sysfs shows no event by which the processor samples memory accesses.
    #[error("no processor of this host supports sampling of memory accesses (PEBS or IBS)")]
    None,
    /// A file in sysfs cannot be read or parsed.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// Perf reported an error.
    #[error("perf cannot sample {event_name}")]
    Perf {
        /// Description of the sampled event.
        event_name: &'static str,
        /// Error of perf.
        #[source]
        error: io::Error,
    },
}

/// Sampler of page accesses on all processors of this machine.
#[derive(Debug)]
pub struct Sampler {
    source: EventSource,
    processors: Vec<usize>,
    rings: Vec<RingBuffer>,
    started: Option<Instant>,
}

/// Perf event of one processor with its ring buffer of samples.
struct RingBuffer {
    samples: perf_event::Sampler,
    /// Enabled time and running time of the event at the start of sampling. The running time is
    /// shorter if perf multiplexes the counters.
    times: (Duration, Duration),
}

/// Samples of all processes in one period.
#[derive(Debug)]
pub struct SampleSet {
    source: AccessSource,
    /// Duration of the period, in seconds.
    seconds: f64,
    /// Sampled accesses of each process, sorted by page.
    accesses: BTreeMap<u32, Vec<Access>>,
}

/// Access rates of one tenant, estimated from samples.
#[derive(Debug)]
pub struct TenantSamples {
    source: AccessSource,
    rates: Vec<AccessRate>,
}

impl Sampler {
    /// Opens the event on all processors, without starting it. The ring buffers can hold the
    /// samples of one epoch. `sys` is the root of sysfs.
    ///
    /// # Errors
    /// [`SamplerError::None`] if the processor cannot sample accesses, [`SamplerError::Perf`] if
    /// the kernel rejects the event, or sysfs cannot be read.
    pub fn open(sys: &Sysfs, epoch: Duration) -> Result<Self, SamplerError> {
        Self::of(EventSource::find(sys)?, source::processors(sys)?, epoch)
    }

    fn of(source: EventSource, processors: Vec<usize>, epoch: Duration) -> Result<Self, SamplerError> {
        let allowed = fs::read_to_string(KERNEL_HZ_MAX_FILE).ok().and_then(|hz| hz.trim().parse().ok());
        let hz = (SAMPLE_BUFFER_BYTES_PER_CPU / SAMPLE_BYTES) as f64 * BUFFER_FILL_FRACTION_MAX
            / epoch.as_secs_f64();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most a thousand")]
        let hz = hz.min(allowed.unwrap_or(SAMPLE_HZ_MAX)).clamp(1.0, SAMPLE_HZ_MAX) as u64;
        let rings = processors.iter().map(|processor| RingBuffer::open(source, *processor, hz));
        let rings = rings.collect::<io::Result<Vec<RingBuffer>>>();
        let rings = rings.map_err(|error| SamplerError::Perf { event_name: source.event_name, error })?;
        Ok(Self { source, processors, rings, started: None })
    }

    /// Returns a description of the sampled event.
    pub const fn event_name(&self) -> &'static str {
        self.source.event_name
    }

    /// Returns whether the event was opened on exactly the processors that are now online.
    pub fn covers_processors_of(&self, sys: &Sysfs) -> bool {
        source::processors(sys).is_ok_and(|processors| processors == self.processors)
    }

    /// Starts sampling.
    ///
    /// # Errors
    /// Perf reports an error.
    pub fn begin(&mut self) -> Result<(), SamplerError> {
        if self.started.is_some() {
            self.take()?;
        }
        let result = self.rings.iter_mut().try_for_each(RingBuffer::begin);
        result.map_err(|error| self.perf_error(error))?;
        self.started = Some(Instant::now());
        Ok(())
    }

    /// Stops sampling, and returns the samples since the start.
    ///
    /// # Errors
    /// Perf reports an error, such as ENODEV if a processor went offline.
    pub fn take(&mut self) -> Result<SampleSet, SamplerError> {
        let seconds = self.started.take().map_or(0.0, |started| started.elapsed().as_secs_f64());
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

impl RingBuffer {
    fn open(source: EventSource, processor: usize, hz: u64) -> io::Result<Self> {
        let open = |excludes_guests| {
            let mut builder = source.event();
            builder.any_pid().one_cpu(processor).sample_frequency(hz).exclude_guest(excludes_guests);
            builder.sample(SampleFlag::TID | SampleFlag::ADDR | SampleFlag::PERIOD);
            // The samples are read at the end of the period, so no wakeup is needed before.
            builder.wakeup_watermark(SAMPLE_BUFFER_BYTES_PER_CPU);
            builder.build()?.sampled(SAMPLE_BUFFER_BYTES_PER_CPU)
        };
        // Some processors cannot exclude guests. `drain` drops the samples of guests in that case.
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

    /// Returns the number of all accesses since the start, sampled or not, and the enabled time and
    /// running time of the event.
    fn read(&mut self) -> io::Result<(f64, (Duration, Duration))> {
        let read = self.samples.read_full()?;
        let times = read.time_enabled().zip(read.time_running());
        Ok((read.count() as f64, times.unwrap_or_default()))
    }

    /// Reads the samples of one CPU. For each sampled access to the memory of a process, returns the
    /// PID of the process and the access.
    ///
    /// The weight of an access is the sampling period. While the kernel adapts the period, some
    /// periods are too large. The weights are therefore scaled so that their sum is the exact number
    /// of events.
    fn drain(&mut self, has_begun: bool) -> io::Result<Vec<(u32, Access)>> {
        let (mut accesses, mut weight_sum) = (Vec::new(), 0.0);
        // The size of the ring bounds this loop: no sample is added after the event was disabled.
        while let Some(record) = self.samples.next_record() {
            let is_of_guest = matches!(
                record.misc() & PERF_RECORD_MISC_CPUMODE_MASK,
                PERF_RECORD_MISC_GUEST_KERNEL | PERF_RECORD_MISC_GUEST_USER
            );
            let Ok(data::Record::Sample(sample)) = record.parse_record() else { continue };
            let (Some(process), Some(address), Some(period)) = (sample.pid(), sample.addr(), sample.period())
            else {
                continue;
            };
            let period = period as f64;
            weight_sum += period;
            // Perf reports pid 0 for processes outside of this pid namespace.
            if !is_of_guest && process > 0 && address > 0 && address <= USER_ADDRESS_MAX {
                accesses.push((process, Access { page: address / PAGE_BYTES, weight: period }));
            }
        }
        let (count, (enabled, running)) = self.read()?;
        let (enabled, running) = (enabled - self.times.0, running - self.times.1);
        if has_begun && enabled.is_zero() {
            // The event was removed because the processor went offline.
            return Err(Errno::NODEV.into());
        }
        let total = if running.is_zero() { 0.0 } else { count * enabled.div_duration_f64(running) };
        let scale = if weight_sum > 0.0 { total / weight_sum } else { 0.0 };
        accesses.iter_mut().for_each(|(_, access)| access.weight *= scale);
        Ok(accesses)
    }
}

impl fmt::Debug for RingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBuffer").field("times", &self.times).finish_non_exhaustive()
    }
}

impl SampleSet {
    /// Returns the access rates of a tenant with these processes and `bytes` bytes of memory;
    /// `None` if it has fewer than [`SAMPLES_MIN`] samples.
    pub fn tenant_samples(&self, processes: &[u32], bytes: u64) -> Option<TenantSamples> {
        let accesses = || processes.iter().filter_map(|process| self.accesses.get(process));
        let samples: usize = accesses().map(Vec::len).sum();
        if samples < SAMPLES_MIN || self.seconds <= 0.0 {
            return None;
        }
        let sampled: usize = accesses().map(|accesses| rates::group_by_page(accesses).count()).sum();
        let rates = accesses()
            .flat_map(|accesses| rates::estimate_rates(accesses, bytes / PAGE_BYTES, sampled, self.seconds));
        Some(TenantSamples { source: self.source, rates: rates.collect() })
    }
}

impl TenantSamples {
    /// Returns the access profile, given the number of accesses per burst.
    pub fn profile(&self, accesses_per_burst: f64) -> AccessProfile {
        AccessProfile {
            source: self.source,
            regions: self.rates.iter().map(|rate| rate.region(accesses_per_burst)).collect(),
        }
    }

    /// Returns the number of accesses per burst, at least 1, that makes the profile have this
    /// number of page accesses per second, as measured by DAMON.
    pub fn accesses_per_burst(&self, pages_per_second: f64) -> f64 {
        let (mut low, mut high) = (0.0, ACCESSES_PER_BURST_MAX.ln());
        for _ in 0..BISECTION_STEPS {
            let log_accesses = f64::midpoint(low, high);
            if self.profile(log_accesses.exp()).pages_per_second() > pages_per_second {
                low = log_accesses
            } else {
                high = log_accesses
            }
        }
        f64::midpoint(low, high).exp()
    }
}

/// Number of bisection steps. The result is then more precise than the measurements.
const BISECTION_STEPS: u32 = 16;

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
