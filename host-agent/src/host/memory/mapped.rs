//! Mapping of a slice's memory, with zeroing, search for non-zero bytes, and flushing of caches. A
//! dax device cannot be read or written without a mapping.
//!
//! Zeroing bypasses the caches. Caches have to be flushed explicitly, because writes of other hosts
//! do not invalidate them. No Rust reference into the mapping is created, because another host may
//! write to it at any time.

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

/// Cache line of 64 bytes.
#[repr(C, align(64))]
struct CacheLine([u64; 8]);

/// Size of a cache line, in bytes.
const LINE_BYTES: usize = size_of::<CacheLine>();
/// Number of 16-byte accesses per cache line.
const ACCESSES_PER_LINE: usize = LINE_BYTES / size_of::<__m128i>();

/// Shared mapping of a device node or file. Only one thread at a time may use it: if the memory is
/// lost, that thread replaces the pages, and other threads would read zeros without an error.
#[derive(Debug)]
pub struct MappedMemory {
    region: MmapRegion<()>,
    flush: FlushInstruction,
    /// Error number if the memory was lost; 0 if it is intact.
    loss_errno: Cell<i32>,
}

impl MappedMemory {
    /// Maps the first `bytes` bytes of a file: a positive multiple of 64 and, for a device, of its
    /// alignment. The kernel aligns the address as the device requires.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid size, or the error of the kernel: ENXIO for a device that is
    /// not bound to a driver.
    pub fn map(file: &File, bytes: u64) -> io::Result<Self> {
        let size = usize::try_from(bytes).map_err(io::Error::other)?;
        if size == 0 || !size.is_multiple_of(LINE_BYTES) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the size must be a positive multiple of 64 bytes",
            ));
        }
        bus_error::install_handler()?;
        let region = MmapRegionBuilder::new(size)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::new(file.try_clone()?, 0))
            .build()
            .map_err(errno)?;
        Ok(Self { region, flush: FlushInstruction::detect(), loss_errno: Cell::new(0) })
    }

    /// Writes back and invalidates all cache lines of the mapping, so that the next read accesses
    /// the memory.
    ///
    /// # Errors
    /// ENXIO if the memory was removed, EHWPOISON if it is damaged.
    pub fn flush_caches(&self) -> io::Result<()> {
        fence();
        for step in self.steps() {
            self.access(|| step.lines().for_each(|line| self.flush.flush_line(line)))?;
        }
        fence();
        Ok(())
    }

    /// Returns the offset of the first cache line that is not zero, if any. `throttle` limits the
    /// rate. Reads use the caches, so writes of other hosts are visible only after
    /// [`MappedMemory::flush_caches`].
    ///
    /// # Errors
    /// ENXIO if the memory was removed, EHWPOISON if it is damaged.
    pub fn first_nonzero_offset(&self, throttle: Option<&Throttle>) -> io::Result<Option<u64>> {
        for step in self.steps() {
            throttle.inspect(|throttle| throttle.wait_for(step.bytes()));
            let nonzero = self.access(|| step.first_nonzero_offset())?;
            if let Some(line) = nonzero {
                return Ok(Some((line as usize - self.region.as_ptr() as usize) as u64));
            }
        }
        Ok(None)
    }

    /// Zeroes the mapping by writes that bypass the caches. `throttle` limits the rate. The written
    /// bytes are added to `progress`.
    ///
    /// # Errors
    /// ENXIO if the memory was removed, EHWPOISON if it is damaged.
    pub fn zero(&self, throttle: &Throttle, progress: &AtomicU64) -> io::Result<()> {
        for step in self.steps() {
            throttle.wait_for(step.bytes());
            self.access(|| step.stream_zeros())?;
            progress.fetch_add(step.bytes(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Splits the mapping into steps. Each step ends with a check that the memory still exists.
    fn steps(&self) -> impl Iterator<Item = Step> + use<> {
        let (start, bytes) = (self.region.as_ptr(), self.region.size());
        (0..bytes).step_by(SCRUB_STEP_BYTES).map(move |offset| {
            let end = bytes.min(offset + SCRUB_STEP_BYTES);
            Step(start.wrapping_add(offset)..start.wrapping_add(end))
        })
    }

    /// Runs `access` unless the memory is lost. Empty pages replace lost memory, and their zeros
    /// must not be mistaken for its contents.
    fn access<T>(&self, access: impl FnOnce() -> T) -> io::Result<T> {
        if self.loss_errno.get() != 0 {
            return Err(io::Error::from_raw_os_error(self.loss_errno.get()));
        }
        let result = bus_error::catch_bus_errors(&self.region, access);
        if let Err(error) = &result {
            self.loss_errno.set(error.raw_os_error().unwrap_or(libc::ENXIO));
        }
        result
    }
}

/// Part of a mapping that consists of whole cache lines.
#[derive(Clone)]
struct Step(Range<*mut u8>);

impl Step {
    fn bytes(&self) -> u64 {
        (self.0.end as usize - self.0.start as usize) as u64
    }

    fn lines(&self) -> impl Iterator<Item = *mut CacheLine> + use<> {
        let (start, bytes) = (self.0.start, self.0.end as usize - self.0.start as usize);
        (0..bytes).step_by(LINE_BYTES).map(move |offset| start.wrapping_add(offset).cast())
    }

    fn first_nonzero_offset(&self) -> Option<*mut CacheLine> {
        // SAFETY: every x86-64 processor has SSE2.
        self.lines().find(|line| !unsafe { is_zero(*line) })
    }

    fn stream_zeros(&self) {
        // SAFETY: every x86-64 processor has SSE2.
        self.lines().for_each(|line| unsafe { stream_zero(line) });
        // SAFETY: every x86-64 processor has SSE. The fence orders the non-temporal stores before
        // later writes.
        unsafe { _mm_sfence() };
    }
}

#[target_feature(enable = "sse2")]
fn is_zero(line: *const CacheLine) -> bool {
    const ALL_EQUAL: i32 = 0xffff;
    let mut all = _mm_setzero_si128();
    for part in 0..ACCESSES_PER_LINE {
        // SAFETY: the line belongs to a readable mapping and is aligned to 64 bytes; if its memory
        // is lost, `catch_bus_errors` maps a page there. The access is volatile, because another
        // host may write the line meanwhile. All bit patterns are valid values.
        let part = unsafe { line.cast::<__m128i>().wrapping_add(part).read_volatile() };
        all = _mm_or_si128(all, part);
    }
    _mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_setzero_si128())) == ALL_EQUAL
}

#[target_feature(enable = "sse2")]
fn stream_zero(line: *mut CacheLine) {
    let zero = _mm_setzero_si128();
    for part in 0..ACCESSES_PER_LINE {
        let part = line.cast::<__m128i>().wrapping_add(part);
        // SAFETY: the line belongs to a writable mapping, is aligned to 64 bytes, and has no
        // references into it; if its memory is lost, `catch_bus_errors` maps a page there.
        unsafe { _mm_stream_si128(part, zero) };
    }
}

/// Orders all memory accesses before the call before all accesses after it.
fn fence() {
    // SAFETY: every x86-64 processor has SSE2, which includes `mfence`.
    unsafe { _mm_mfence() };
}

/// Instruction that flushes cache lines.
#[derive(Clone, Copy, Debug)]
enum FlushInstruction {
    /// `clflushopt`, which is weakly ordered and therefore faster.
    Clflushopt,
    /// `clflush`, for old processors.
    Clflush,
}

impl FlushInstruction {
    /// Returns the best instruction of this processor; reads the features only in the first call.
    fn detect() -> Self {
        static DETECTED: LazyLock<FlushInstruction> = LazyLock::new(|| {
            let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let has_clflushopt = cpuinfo.split_whitespace().any(|feature| feature == "clflushopt");
            if has_clflushopt { FlushInstruction::Clflushopt } else { FlushInstruction::Clflush }
        });
        *DETECTED
    }

    fn flush_line(self, line: *mut CacheLine) {
        match self {
            // SAFETY: the processor has the instruction, which accesses the bytes of a line like a
            // read; if its memory is lost, `catch_bus_errors` maps a page there.
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
