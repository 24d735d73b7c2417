//! Regions of pool memory whose contents can be moved to spare local memory while the guest runs.
//! `rehome` copies the contents. This file logs the writes, and replaces the mappings.

use std::{fs::File, io, ops::Range, os::fd::AsRawFd as _, sync::Arc};

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use rustix::{
    fs::SeekFrom,
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap},
};
use vm_memory::{Bytes as _, GuestAddress};

use super::{GuestMemory, MappedRegion, Memory, MemoryOwner, SpareMemory, fault, write_log::WriteLog};

/// Reason why the pool memory of a guest cannot be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotMovable {
    /// The guest has no pool memory.
    #[error("the guest has no pool memory")]
    NoPoolMemory,
    /// A pool node is mapped privately, so its file does not contain its data.
    #[error("the pool memory is private")]
    Private,
    /// The spare local memory is missing or smaller than the pool memory.
    #[error("{spare} bytes of spare local memory are reserved for {pool} bytes of pool memory")]
    NoSpareMemory {
        /// Size of the spare local memory, in bytes.
        spare: u64,
        /// Size of the pool memory, in bytes.
        pool: u64,
    },
}

/// Region of pool memory, and its place in the spare memory.
#[derive(Debug)]
pub struct PoolRegion {
    slot: kvm_userspace_memory_region,
    addresses: Range<usize>,
    file: Arc<File>,
    file_offset: u64,
    log: WriteLog,
    /// Origin of the memory.
    pub owner: MemoryOwner,
    /// Offset in the spare memory, in bytes.
    pub spare_offset: u64,
}

impl Memory {
    /// Returns the regions of pool memory and the spare memory.
    ///
    /// # Errors
    /// [`NotMovable`] if the pool memory cannot be moved.
    pub fn movable_regions(&self) -> Result<(Vec<PoolRegion>, SpareMemory), NotMovable> {
        let pool = || self.mapped.iter().filter(|mapped| mapped.is_pool);
        let bytes: u64 = pool().map(MappedRegion::bytes).sum();
        let spare = self.spare.as_ref().map_or(0, |spare| spare.bytes);
        match &self.spare {
            _ if bytes == 0 => Err(NotMovable::NoPoolMemory),
            _ if pool().any(|mapped| !mapped.is_shared) => Err(NotMovable::Private),
            Some(memory) if bytes <= spare => Ok((self.pool_regions(), memory.clone())),
            _ => Err(NotMovable::NoSpareMemory { spare, pool: bytes }),
        }
    }

    /// Changes the size of the spare memory.
    #[cfg(test)]
    pub(crate) fn set_spare_bytes(&mut self, bytes: u64) {
        self.spare.as_mut().expect("the guest has spare memory").bytes = bytes;
    }

    fn pool_regions(&self) -> Vec<PoolRegion> {
        let mut spare_offset = 0;
        let pool = self.kvm_slots().zip(&self.mapped).filter(|(_, mapped)| mapped.is_pool);
        let to_region = |(slot, mapped): (_, &MappedRegion)| {
            spare_offset += mapped.bytes();
            PoolRegion {
                slot,
                addresses: mapped.addresses.clone(),
                file: Arc::clone(&mapped.file),
                file_offset: mapped.file_range.start,
                log: mapped.log.clone(),
                owner: mapped.owner.clone(),
                spare_offset: spare_offset - mapped.bytes(),
            }
        };
        pool.map(to_region).collect()
    }
}

impl PoolRegion {
    /// Returns the size of the region, in bytes.
    pub fn bytes(&self) -> u64 {
        self.slot.memory_size
    }

    /// Starts to log the writes of vCPUs and devices.
    ///
    /// # Errors
    /// The error returned by KVM_SET_USER_MEMORY_REGION.
    pub fn start_logging(&self, vm: &VmFd) -> io::Result<()> {
        self.log.enable(self.addresses.len());
        self.set_flags(vm, KVM_MEM_LOG_DIRTY_PAGES)
    }

    /// Stops the log of writes.
    ///
    /// # Errors
    /// The error returned by KVM_SET_USER_MEMORY_REGION.
    pub fn stop_logging(&self, vm: &VmFd) -> io::Result<()> {
        self.log.disable();
        self.set_flags(vm, 0)
    }

    fn set_flags(&self, vm: &VmFd, flags: u32) -> io::Result<()> {
        let slot = kvm_userspace_memory_region { flags, ..self.slot };
        // SAFETY: the slot has the same addresses as the existing slot, so only its flags change.
        unsafe { vm.set_user_memory_region(slot) }.map_err(io::Error::from)
    }

    /// Adds the pages written since the previous call to a bitmap with one bit per page, and clears
    /// the log.
    ///
    /// # Errors
    /// The error returned by KVM_GET_DIRTY_LOG.
    pub fn move_log_to(&self, vm: &VmFd, bitmap: &mut [u64]) -> io::Result<()> {
        let written = vm.get_dirty_log(self.slot.slot, self.addresses.len())?;
        bitmap.iter_mut().zip(&written).for_each(|(to, word)| *to |= word);
        self.log.move_to(bitmap);
        Ok(())
    }

    /// Reads from the region at an offset. If the memory was revoked, the SIGBUS handler ends the
    /// process.
    pub fn read(&self, memory: &GuestMemory, offset: u64, bytes: &mut [u8]) {
        memory
            .read_slice(bytes, GuestAddress(self.slot.guest_phys_addr + offset))
            .expect("the region is in guest memory");
    }

    /// Returns the ranges of the region that may contain data, as offsets in the region. The other
    /// ranges were never touched and contain zeros. A file without information about holes, such as
    /// a device, is returned as one range.
    pub fn data_ranges(&self) -> Vec<Range<u64>> {
        if super::is_device(&self.file) {
            return std::iter::once(0..self.bytes()).collect(); // lseek(2) does not report data of devices
        }
        let end = self.file_offset + self.bytes();
        let mut ranges = Vec::new();
        let mut at = self.file_offset;
        while at < end {
            let start = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(start) if start >= end => break,
                Err(Errno::NXIO) => break, // no data up to the end of the file
                Ok(start) => start.max(at),
                Err(_) => at,
            };
            let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(start)).unwrap_or(end).min(end);
            ranges.push(start - self.file_offset..hole - self.file_offset);
            at = hole.max(start + 1);
        }
        ranges
    }

    fn map_at_addresses(&self, file: &File, offset: u64) -> io::Result<()> {
        let (start, bytes) =
            (std::ptr::with_exposed_provenance_mut(self.addresses.start), self.addresses.len());
        let flags = MapFlags::FIXED | MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: the addresses are a mapping of guest memory, which no other part of the process
        // uses and which stays mapped until the process ends. Both files have the same contents, and
        // no vCPU or device accesses guest memory during the call. No Rust reference to guest memory
        // exists.
        unsafe { mmap(start, bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, offset) }?;
        // SAFETY: the region is mapped. The advice does not change the content of the region.
        unsafe { madvise(start, bytes, Advice::LinuxDontDump) }?;
        // SAFETY: as above. The error of a kernel without huge pages is ignored.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxHugepage) };
        Ok(())
    }

    /// Replaces the descriptor of the region's file by the spare memory's file, in all users of the
    /// descriptor.
    fn close_file(&self, spare: &SpareMemory) -> io::Result<()> {
        // SAFETY: the region's file is open, and its descriptor is replaced atomically by an open
        // file. All other users of the descriptor only call fstat(2) and close(2).
        let done = unsafe { libc::dup3(spare.file.as_raw_fd(), self.file.as_raw_fd(), libc::O_CLOEXEC) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Maps the spare memory in place of all regions and closes the files of the regions. The spare
/// memory must have the same contents, and no vCPU or device may access guest memory. On an error,
/// all regions are mapped as before.
///
/// # Errors
/// The error of the system call that failed.
pub fn replace_mappings(regions: &[PoolRegion], spare: &SpareMemory) -> io::Result<()> {
    let replaced = regions
        .iter()
        .try_for_each(|region| region.map_at_addresses(&spare.file, spare.offset + region.spare_offset));
    if let Err(errno) = replaced {
        for region in regions {
            if let Err(errno) = region.map_at_addresses(&region.file, region.file_offset) {
                fault::exit_on_lost_mapping(&errno); // the guest cannot run without its memory
            }
        }
        return Err(errno);
    }
    let addresses: Vec<_> = regions.iter().map(|region| region.addresses.clone()).collect();
    fault::mark_as_local(&addresses);
    // dup3(2) fails only if the arguments are invalid, or while another thread opens a file with the
    // same descriptor. The descriptor is open, so neither is possible.
    for region in regions {
        region.close_file(spare).expect("both descriptors are open");
    }
    Ok(())
}
