//! Access of this process to pool memory: mapping, zeroing, verification, and placement on NUMA
//! nodes. The backends choose the memory.

mod bus_error;
pub mod mapped;
pub mod numa;
pub mod throttle;
pub mod usage;

use std::io;

use vm_memory::mmap::MmapRegionError;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "host/memory/mapped.rs flushes caches with x86-64 instructions: add the instructions of this architecture"
);

/// Converts an error of vm-memory to the error of the operating system.
fn errno(error: MmapRegionError) -> io::Error {
    match error {
        MmapRegionError::Mmap(errno) => errno,
        other => io::Error::other(other),
    }
}
