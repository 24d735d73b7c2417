//! Spare local memory: a range of a file that is reserved for moving the pool memory of a guest. The
//! range has no pages until pool memory is copied to it.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt as _, FileTypeExt as _},
    sync::Arc,
};

use rustix::fs::{FallocateFlags, fallocate};
use units::Bytes;
use vm_memory::{FileOffset, MmapRegion, mmap::MmapRegionBuilder};

use super::{MemoryError, bind_to_numa_node};

/// Spare local memory of a guest.
#[derive(Clone, Debug)]
pub struct SpareMemory {
    /// File that contains the spare memory.
    pub file: Arc<File>,
    /// Offset of the spare memory in the file, in bytes.
    pub offset: u64,
    /// Size of the spare memory, in bytes.
    pub bytes: u64,
    /// NUMA node of the host that the memory is bound to, if any.
    pub host_numa_node: Option<u32>,
}

impl SpareMemory {
    /// Checks that the file contains the spare memory, and sets its allocation policy.
    ///
    /// # Errors
    /// [`MemoryError::FileTooShort`] if the file is too short or is a device, and
    /// [`MemoryError::System`] if the memory cannot be bound.
    pub(super) fn prepare(&self) -> Result<(), MemoryError> {
        let metadata = self.file.metadata().ok().filter(|metadata| !metadata.file_type().is_char_device());
        let (has, needs) = (metadata.map_or(0, |metadata| metadata.len()), self.offset + self.bytes);
        if has < needs {
            let (has, needs) = (Bytes::new(has), Bytes::new(needs));
            return Err(MemoryError::FileTooShort { owner: "spare local memory".into(), has, needs });
        }
        self.bind().map_err(|errno| MemoryError::System {
            operation: "bind to a host NUMA node",
            bytes: Bytes::new(self.bytes),
            node: 0,
            hint: "; does the node exist and have memory?",
            errno,
        })
    }

    /// Sets the NUMA policy of the range. The kernel stores the policy in the file, so it also
    /// applies to later mappings and to write(2).
    fn bind(&self) -> io::Result<()> {
        let Some(node) = self.host_numa_node else { return Ok(()) };
        let bytes = usize::try_from(self.bytes).expect("usize has 64 bits");
        let mapping: MmapRegion<()> = MmapRegionBuilder::new(bytes)
            .with_mmap_prot(libc::PROT_NONE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_file_offset(FileOffset::from_arc(Arc::clone(&self.file), self.offset))
            .build()
            .map_err(io::Error::other)?;
        bind_to_numa_node((mapping.as_ptr(), bytes), node, &self.file)
    }

    /// Writes bytes at an offset in the spare memory. In contrast to an access through a mapping,
    /// a lack of memory is an error and not a SIGBUS.
    ///
    /// # Errors
    /// The error returned by pwrite(2).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert!(offset + bytes.len() as u64 <= self.bytes, "the write exceeds the spare memory");
        self.file.write_all_at(bytes, self.offset + offset)
    }

    /// Frees all pages of the spare memory, which then contains zeros.
    ///
    /// # Errors
    /// The error returned by fallocate(2).
    pub fn clear(&self) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, self.offset, self.bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::memory::create_memfd;

    const BYTES: u64 = 1 << 20;

    fn spare(offset: u64, host_numa_node: Option<u32>) -> SpareMemory {
        let file = Arc::new(create_memfd("spare", Bytes::new(2 * BYTES), None).unwrap());
        SpareMemory { file, offset, bytes: BYTES, host_numa_node }
    }

    #[test]
    fn range_must_be_in_the_file_and_numa_node_must_exist() {
        spare(BYTES, None).prepare().unwrap();
        let error = spare(BYTES + 4096, None).prepare().unwrap_err().to_string();
        assert_eq!(error, "memory: spare local memory has 2MiB, but 2052KiB are needed");
        let error = spare(0, Some(77)).prepare().unwrap_err().to_string();
        assert!(error.contains("cannot bind to a host NUMA node"), "{error}");
    }

    #[test]
    fn only_the_spare_range_is_cleared() {
        let spare = spare(BYTES, None);
        spare.file.write_all_at(&[1; 4096], 0).unwrap();
        spare.write(4096, &[2; 4096]).unwrap();
        let allocated_bytes = || spare.file.metadata().unwrap().blocks() * 512;
        assert_eq!(allocated_bytes(), 2 * 4096);
        spare.clear().unwrap();
        assert_eq!(allocated_bytes(), 4096);
        let mut first = [0; 4096];
        spare.file.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first, [1; 4096]);
    }
}
