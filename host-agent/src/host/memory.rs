//! Pool memory as accessed by this process: mapping, zeroing and verification, and NUMA nodes. The
//! backends decide which memory.

mod bus_error;
pub mod mapped;
pub mod numa;
pub mod throttle;
pub mod usage;

use std::io;

use vm_memory::mmap::MmapRegionError;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "caches are written back by instructions of x86-64: another processor's belong into host/memory/mapped.rs"
);

/// Why the kernel mapped something not.
fn errno(error: MmapRegionError) -> io::Error {
    match error {
        MmapRegionError::Mmap(errno) => errno,
        other => io::Error::other(other),
    }
}
