//! A slice's memory, mapped: a device-dax node knows no other way to be read and written. It is emptied past the caches, and
//! they can be made to forget it, as another host's writes do not reach them. Which slice it is, and what a byte that is not
//! zero means, is not known here. No reference into it is ever made, as another host may write it at any time.

use std::{
    arch::{
        asm,
        x86_64::{
            __m128i, _mm_clflush, _mm_cmpeq_epi8, _mm_mfence, _mm_movemask_epi8, _mm_or_si128,
            _mm_setzero_si128, _mm_sfence, _mm_stream_si128,
        },
    },
    cell::Cell,
    fs::{self, File},
    io,
    ops::Range,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

use units::limits::SCRUB_STEP_BYTES;
use vm_memory::{FileOffset, MmapRegion, mmap::MmapRegionBuilder};

use super::{bus_error, errno, throttle::Throttle};

/// What a processor's caches hold and write back at once.
#[repr(C, align(64))]
struct Line([u64; 8]);

const LINE: usize = size_of::<Line>();
/// What is read and written of it at once, in numbers of them.
const PARTS: usize = LINE / size_of::<__m128i>();

/// All of a device-dax node or a file, mapped shared. Of one thread at a time: what one of them lost, no other may believe.
#[derive(Debug)]
pub struct Mapped {
    region: MmapRegion<()>,
    evict: Evict,
    /// The error with which it went away; 0 while it is there.
    lost: Cell<i32>,
}

impl Mapped {
    /// Maps the first so many bytes, a positive multiple of 64, and for a device of what it is aligned to. The kernel chooses
    /// the address, and aligns it as a device demands.
    ///
    /// # Errors
    /// The kernel maps no such thing: for a device ENXIO, if no driver has it.
    pub fn map(file: &File, bytes: u64) -> io::Result<Self> {
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        if size == 0 || !size.is_multiple_of(LINE) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the length is no multiple of 64 bytes"));
        }
        bus_error::prepare()?;
        let region = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file.try_clone()?, 0))
            .build()
            .map_err(errno)?;
        Ok(Self { region, evict: Evict::best(), lost: Cell::new(0) })
    }

    /// Writes back what this host's caches have of it, and has them forget it: whoever reads it next reads the memory.
    ///
    /// # Errors
    /// It is gone (ENXIO) or broken (EHWPOISON).
    pub fn write_back(&self) -> io::Result<()> {
        fence();
        for step in self.steps() {
            self.touch(|| step.lines().for_each(|line| self.evict.line(line)))?;
        }
        fence();
        Ok(())
    }

    /// Where the first 64 bytes begin that are not all zero, as fast as the throttle lets it, if there is one. It reads by way of the caches: what another host has done since
    /// this one last had the memory shows only after [`Mapped::write_back`].
    ///
    /// # Errors
    /// It is gone (ENXIO) or broken (EHWPOISON).
    pub fn first_not_zero(&self, throttle: Option<&Throttle>) -> io::Result<Option<u64>> {
        for step in self.steps() {
            throttle.inspect(|throttle| throttle.wait_for(step.bytes()));
            let found = self.touch(|| step.first_not_zero())?;
            if let Some(line) = found {
                return Ok(Some((line as usize - self.region.as_ptr() as usize) as u64));
            }
        }
        Ok(None)
    }

    /// Makes it all zero, past the caches, as fast as the throttle lets it. Adds what is done to `progress`, in bytes.
    ///
    /// # Errors
    /// It is gone (ENXIO) or broken (EHWPOISON).
    pub fn zero(&self, throttle: &Throttle, progress: &AtomicU64) -> io::Result<()> {
        for step in self.steps() {
            throttle.wait_for(step.bytes());
            self.touch(|| step.stream_zeros())?;
            progress.fetch_add(step.bytes(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// So much is touched before it is asked whether it is still there.
    fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let (start, bytes) = (self.region.as_ptr(), self.region.size());
        (0..bytes).step_by(SCRUB_STEP_BYTES).map(move |offset| {
            let end = bytes.min(offset + SCRUB_STEP_BYTES);
            Step(start.wrapping_add(offset)..start.wrapping_add(end))
        })
    }

    /// Once it is gone there are empty pages in its place, which are not to be taken for it.
    fn touch<T>(&self, touch: impl FnOnce() -> T) -> io::Result<T> {
        if self.lost.get() != 0 {
            return Err(io::Error::from_raw_os_error(self.lost.get()));
        }
        let touched = bus_error::survive(&self.region, touch);
        if let Err(error) = &touched {
            self.lost.set(error.raw_os_error().unwrap_or(libc::ENXIO));
        }
        touched
    }
}

/// Whole lines of a mapping.
#[derive(Clone)]
struct Step(Range<*mut u8>);

impl Step {
    fn bytes(&self) -> u64 {
        (self.0.end as usize - self.0.start as usize) as u64
    }

    fn lines(&self) -> impl Iterator<Item = *mut Line> + use<> {
        let (start, bytes) = (self.0.start, self.0.end as usize - self.0.start as usize);
        (0..bytes).step_by(LINE).map(move |offset| start.wrapping_add(offset).cast())
    }

    fn first_not_zero(&self) -> Option<*mut Line> {
        // SAFETY: every processor with 64 bits has SSE2.
        self.lines().find(|line| !unsafe { is_zero(*line) })
    }

    fn stream_zeros(&self) {
        // SAFETY: every processor with 64 bits has SSE2.
        self.lines().for_each(|line| unsafe { stream_zero(line) });
        // SAFETY: as above. What was streamed has no place among the writes before and after, but for this.
        unsafe { _mm_sfence() };
    }
}

#[target_feature(enable = "sse2")]
fn is_zero(line: *const Line) -> bool {
    const ALL_EQUAL: i32 = 0xffff;
    let mut all = _mm_setzero_si128();
    for part in 0..PARTS {
        // SAFETY: the line is one of a mapping that can be read, and begins at a multiple of 64 bytes; if there is no memory
        // behind it, `survive` puts some there. Another host may write it meanwhile, hence volatile, and any bytes are numbers.
        let part = unsafe { line.cast::<__m128i>().wrapping_add(part).read_volatile() };
        all = _mm_or_si128(all, part);
    }
    _mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_setzero_si128())) == ALL_EQUAL
}

#[target_feature(enable = "sse2")]
fn stream_zero(line: *mut Line) {
    let zero = _mm_setzero_si128();
    for part in 0..PARTS {
        let part = line.cast::<__m128i>().wrapping_add(part);
        // SAFETY: the line is one of a mapping that can be written, begins at a multiple of 64 bytes, and nobody has references
        // into it; if there is no memory behind it, `survive` puts some there.
        unsafe { _mm_stream_si128(part, zero) };
    }
}

/// Nothing before it and after it is mixed up.
fn fence() {
    // SAFETY: every processor with 64 bits has the instruction.
    unsafe { _mm_mfence() };
}

/// How lines leave the caches.
#[derive(Clone, Copy, Debug)]
enum Evict {
    /// Many at a time.
    Weakly,
    /// One after the other, on processors of old.
    InOrder,
}

impl Evict {
    /// What the kernel says of the processor is asked once.
    fn best() -> Self {
        static BEST: LazyLock<Evict> = LazyLock::new(|| {
            let told = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let weakly = told.split_whitespace().any(|feature| feature == "clflushopt");
            if weakly { Evict::Weakly } else { Evict::InOrder }
        });
        *BEST
    }

    fn line(self, line: *mut Line) {
        match self {
            // SAFETY: the processor has the instruction, and what it does to the bytes of a line is what a read does; if
            // there is no memory behind it, `survive` puts some there.
            Self::Weakly => unsafe {
                asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags))
            },
            // SAFETY: as above; every processor with 64 bits has this one.
            Self::InOrder => unsafe { _mm_clflush(line.cast()) },
        }
    }
}

#[cfg(test)]
mod tests;
