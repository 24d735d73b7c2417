//! Mapping of a slice's memory: a device-dax node can only be mapped. Zeroing bypasses the caches,
//! and caches can be invalidated, because other hosts' writes do not reach them. The meaning of the
//! contents is left to the caller. No reference into the mapping is created, because another host
//! may write it at any time.

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

/// Size of a cache line.
#[repr(C, align(64))]
struct Line([u64; 8]);

const LINE: usize = size_of::<Line>();
/// Cache lines per read or write.
const PARTS: usize = LINE / size_of::<__m128i>();

/// Shared mapping of a whole device-dax node or file. For one thread at a time: a loss seen by one
/// thread is invisible to others.
#[derive(Debug)]
pub struct Mapped {
    region: MmapRegion<()>,
    flush: FlushInstruction,
    /// Error with which the memory was lost; 0 while it exists.
    lost: Cell<i32>,
}

impl Mapped {
    /// Maps a number of bytes from the start, a positive multiple of 64, and for a device of its
    /// alignment. The kernel chooses an address aligned as the device requires.
    ///
    /// # Errors
    /// The kernel rejects it: for a device without driver by ENXIO.
    pub fn map(file: &File, bytes: u64) -> io::Result<Self> {
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        if size == 0 || !size.is_multiple_of(LINE) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the length is no multiple of 64 bytes"));
        }
        bus_error::install_handler()?;
        let region = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file.try_clone()?, 0))
            .build()
            .map_err(errno)?;
        Ok(Self { region, flush: FlushInstruction::detect(), lost: Cell::new(0) })
    }

    /// Writes back and invalidates this host's cache lines of it: the next reader reads the memory.
    ///
    /// # Errors
    /// It was removed (ENXIO) or is damaged (EHWPOISON).
    pub fn write_back(&self) -> io::Result<()> {
        fence();
        for step in self.steps() {
            self.access(|| step.lines().for_each(|line| self.flush.line(line)))?;
        }
        fence();
        Ok(())
    }

    /// Returns the offset of the first 64 bytes that are not all zero, if any, as fast as the
    /// throttle permits. Reads use the caches: writes of other hosts are visible only after
    /// [`Mapped::write_back`].
    ///
    /// # Errors
    /// It was removed (ENXIO) or is damaged (EHWPOISON).
    pub fn first_not_zero(&self, throttle: Option<&Throttle>) -> io::Result<Option<u64>> {
        for step in self.steps() {
            throttle.inspect(|throttle| throttle.wait_for(step.bytes()));
            let nonzero = self.access(|| step.first_not_zero())?;
            if let Some(line) = nonzero {
                return Ok(Some((line as usize - self.region.as_ptr() as usize) as u64));
            }
        }
        Ok(None)
    }

    /// Writes zeros, bypassing the caches, as fast as the throttle permits. Adds the bytes written
    /// to `progress`.
    ///
    /// # Errors
    /// It was removed (ENXIO) or is damaged (EHWPOISON).
    pub fn zero(&self, throttle: &Throttle, progress: &AtomicU64) -> io::Result<()> {
        for step in self.steps() {
            throttle.wait_for(step.bytes());
            self.access(|| step.stream_zeros())?;
            progress.fetch_add(step.bytes(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Bytes accessed between two checks that the memory still exists.
    fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let (start, bytes) = (self.region.as_ptr(), self.region.size());
        (0..bytes).step_by(SCRUB_STEP_BYTES).map(move |offset| {
            let end = bytes.min(offset + SCRUB_STEP_BYTES);
            Step(start.wrapping_add(offset)..start.wrapping_add(end))
        })
    }

    /// Lost memory is replaced by empty pages, which must not be mistaken for it.
    fn access<T>(&self, access: impl FnOnce() -> T) -> io::Result<T> {
        if self.lost.get() != 0 {
            return Err(io::Error::from_raw_os_error(self.lost.get()));
        }
        let result = bus_error::survive(&self.region, access);
        if let Err(error) = &result {
            self.lost.set(error.raw_os_error().unwrap_or(libc::ENXIO));
        }
        result
    }
}

/// Whole cache lines of a mapping.
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
        // SAFETY: every x86-64 processor has SSE2.
        self.lines().find(|line| !unsafe { is_zero(*line) })
    }

    fn stream_zeros(&self) {
        // SAFETY: every x86-64 processor has SSE2.
        self.lines().for_each(|line| unsafe { stream_zero(line) });
        // SAFETY: as above. Non-temporal stores are ordered with other writes only by this fence.
        unsafe { _mm_sfence() };
    }
}

#[target_feature(enable = "sse2")]
fn is_zero(line: *const Line) -> bool {
    const ALL_EQUAL: i32 = 0xffff;
    let mut all = _mm_setzero_si128();
    for part in 0..PARTS {
        // SAFETY: the line belongs to a readable mapping and is aligned to 64 bytes; if its memory
        // is lost, `survive` maps a page there. Another host may write it meanwhile, hence the
        // volatile access, and any bytes are valid numbers.
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
        // SAFETY: the line belongs to a writable mapping, is aligned to 64 bytes, and has no
        // references into it; if its memory is lost, `survive` maps a page there.
        unsafe { _mm_stream_si128(part, zero) };
    }
}

/// Orders all accesses before and after it.
fn fence() {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { _mm_mfence() };
}

/// Instruction that flushes cache lines.
#[derive(Clone, Copy, Debug)]
enum FlushInstruction {
    /// Weakly ordered: `clflushopt`.
    Clflushopt,
    /// Serialized: `clflush`, on old processors.
    Clflush,
}

impl FlushInstruction {
    /// The processor's features are read once.
    fn detect() -> Self {
        static DETECTED: LazyLock<FlushInstruction> = LazyLock::new(|| {
            let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let has_clflushopt = cpuinfo.split_whitespace().any(|feature| feature == "clflushopt");
            if has_clflushopt { FlushInstruction::Clflushopt } else { FlushInstruction::Clflush }
        });
        *DETECTED
    }

    fn line(self, line: *mut Line) {
        match self {
            // SAFETY: the processor has the instruction, which accesses the bytes of a line like a
            // read; if its memory is lost, `survive` maps a page there.
            Self::Clflushopt => unsafe {
                asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags))
            },
            // SAFETY: as above; every x86-64 processor has this instruction.
            Self::Clflush => unsafe { _mm_clflush(line.cast()) },
        }
    }
}

#[cfg(test)]
mod tests;
