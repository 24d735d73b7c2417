//! Checks that the host has enough memory for a guest, and that the guest's memory regions do not
//! overlap in a file.

use rustix::fs::{FileType, Stat, fstat};
use units::Bytes;

use super::{MappedRegion, MemoryBackings, MemoryError, backing_for_region, is_device};
use crate::layout::Layout;

/// Checks that the host has enough memory available for the memory to prefault. Huge pages and
/// device memory are not counted, because they are not part of MemAvailable.
pub(super) fn check_available_memory(layout: &Layout, backings: &MemoryBackings) -> Result<(), MemoryError> {
    let prefaulted = layout.regions.iter().filter(|region| {
        let (backing, _, memory_options) = backing_for_region(region, backings);
        memory_options.prefault && memory_options.hugepage_size.is_none() && !is_device(&backing.file)
    });
    let requested: u64 = prefaulted.map(|region| region.range.end - region.range.start).sum();
    if requested == 0 {
        return Ok(());
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match parse_mem_available(&meminfo).filter(|available| available.get() < requested) {
        Some(available) => {
            Err(MemoryError::InsufficientMemory { requested: Bytes::new(requested), available })
        }
        None => Ok(()),
    }
}

/// Parses MemAvailable from the content of /proc/meminfo.
fn parse_mem_available(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(Bytes::new(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10))
}

/// Identity of the memory behind a file. A device may have several inodes, so its device number is
/// used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    File { device: u64, inode: u64 },
    Device(u64),
}

impl Identity {
    pub(super) fn from_stat(stat: &Stat) -> Self {
        if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
            Self::Device(stat.st_rdev)
        } else {
            Self::File { device: stat.st_dev, inode: stat.st_ino }
        }
    }
}

/// Checks that memory regions do not overlap in a file.
pub(super) fn check_disjoint(mapped: &[MappedRegion]) -> Result<(), MemoryError> {
    let location = |mapped: &MappedRegion| {
        let stat = fstat(&mapped.file).expect("fstat of an open file succeeds");
        (Identity::from_stat(&stat), mapped.file_range.clone(), mapped.owner.to_string())
    };
    let mut locations: Vec<_> = mapped.iter().map(location).collect();
    locations.sort_by_key(|(file, range, _)| (*file, range.start));
    let overlap = locations.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1.start < pair[0].1.end);
    overlap
        .map_or(Ok(()), |pair| Err(MemoryError::Overlap { one: pair[0].2.clone(), other: pair[1].2.clone() }))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, sync::Arc};

    use super::*;
    use crate::{
        layout::{Local, Performance, Pool, Shape},
        memory::{Memory, MemoryBackendOptions, MemoryBacking, MemoryOwner, create_memfd},
    };

    /// Maps a guest with two slices, which start at these offsets of one memfd.
    fn map(offsets: [u64; 2]) -> Result<Memory, MemoryError> {
        let pool = create_memfd("pool", Bytes::gib(2), None).unwrap();
        map_file(pool, offsets, MemoryBackendOptions::default())
    }

    fn map_file(
        pool: File,
        offsets: [u64; 2],
        memory_options: MemoryBackendOptions,
    ) -> Result<Memory, MemoryError> {
        let local = Local { cpus: 1, memory: Bytes::mib(64), performance: Performance::LOCAL };
        let shape =
            Shape { local: vec![local], pool: vec![Pool { slices: 2, performance: Performance::POOL }] };
        let layout = Layout::new(&shape, 48).unwrap();
        let own = Arc::new(create_memfd("local", Bytes::mib(64), None).unwrap());
        let pool = Arc::new(pool);
        let slice = |(slice, offset)| MemoryBacking {
            file: Arc::clone(&pool),
            offset,
            owner: MemoryOwner::Slice { slice, emc: "emc0".into() },
        };
        let slices = (3..).zip(offsets).map(slice).collect();
        let local = MemoryBacking { file: own, offset: 0, owner: MemoryOwner::Local };
        Memory::map(
            &layout,
            &MemoryBackings {
                local: vec![(local, MemoryBackendOptions::default())],
                pool: vec![(slices, memory_options)],
                spare: None,
            },
        )
    }

    #[test]
    fn overlapping_slices_of_one_file_are_rejected() {
        map([0, 1 << 30]).unwrap();
        let error = map([4096, 0]).unwrap_err().to_string();
        assert_eq!(error, "memory: slice 4 of EMC emc0 and slice 3 of EMC emc0 overlap");
        assert_eq!(
            map([0, (1 << 30) + 4096]).unwrap_err().to_string(),
            "memory: slice 4 of EMC emc0 has 2GiB, but 2097156KiB are needed"
        );
    }

    #[test]
    fn device_is_mapped_without_length_check_and_cannot_be_bound() {
        let device = || File::options().read(true).write(true).open("/dev/zero").unwrap();
        let slices = [0, 1 << 30];
        map_file(device(), slices, MemoryBackendOptions::default()).unwrap();
        let bound = MemoryBackendOptions { host_numa_node: Some(0), ..MemoryBackendOptions::default() };
        let error = units::chain(&map_file(device(), slices, bound).unwrap_err());
        assert!(error.ends_with(": device memory cannot be bound"), "{error}");
    }

    #[test]
    fn device_identity_ignores_the_inode() {
        let stat = |path: &str| fstat(File::open(path).unwrap()).unwrap();
        let (zero, mut other) = (stat("/dev/zero"), stat("/dev/zero"));
        other.st_ino += 1;
        assert!(Identity::from_stat(&zero) == Identity::from_stat(&other));
        assert!(Identity::from_stat(&zero) != Identity::from_stat(&stat("/dev/null")));
        assert!(Identity::from_stat(&stat("/proc/self/exe")) != Identity::from_stat(&stat("/etc/passwd")));
    }

    #[test]
    fn mem_available_is_parsed_from_meminfo() {
        assert_eq!(parse_mem_available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(Bytes::mib(2)));
        assert_eq!(parse_mem_available("MemTotal: 9 kB\n"), None);
    }
}
