//! What must hold of a guest's memory as a whole before it is used: that it is there, and that each piece is its own.

use rustix::fs::{FileType, Stat, fstat};
use units::Bytes;

use super::{Backings, Mapped, MemoryError, backing_of, is_device};
use crate::layout::Layout;

/// What is to be there before the guest starts fits into what this host has, huge pages and devices aside: those are
/// counted elsewhere, or there already.
pub(super) fn available_memory(layout: &Layout, backings: &Backings) -> Result<(), MemoryError> {
    let prefaulted = layout.pieces.iter().filter(|piece| {
        let (backing, _, taking) = backing_of(piece, backings);
        taking.prefault && taking.hugepage_size.is_none() && !is_device(&backing.file)
    });
    let wanted: u64 = prefaulted.map(|piece| piece.range.end - piece.range.start).sum();
    if wanted == 0 {
        return Ok(());
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available(&meminfo).filter(|available| available.get() < wanted) {
        Some(available) => Err(MemoryError::Unavailable { wanted: Bytes::new(wanted), available }),
        None => Ok(()),
    }
}

/// What Linux says of memory that can be had without swapping.
fn available(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(Bytes::new(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10))
}

/// Which memory a file is. A device may have several nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Identity {
    File { device: u64, inode: u64 },
    Device(u64),
}

impl Identity {
    pub(super) fn of(stat: &Stat) -> Self {
        if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice {
            Self::Device(stat.st_rdev)
        } else {
            Self::File { device: stat.st_dev, inode: stat.st_ino }
        }
    }
}

/// No byte of a file is at two places of a guest.
pub(super) fn apart(mapped: &[Mapped]) -> Result<(), MemoryError> {
    let place = |mapped: &Mapped| {
        let stat = fstat(&mapped.file).expect("it was mapped");
        (Identity::of(&stat), mapped.part.clone(), mapped.owner.to_string())
    };
    let mut places: Vec<_> = mapped.iter().map(place).collect();
    places.sort_by_key(|(file, range, _)| (*file, range.start));
    let same = places.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1.start < pair[0].1.end);
    same.map_or(Ok(()), |pair| Err(MemoryError::Overlap { one: pair[0].2.clone(), other: pair[1].2.clone() }))
}

#[cfg(test)]
mod tests {
    use std::{fs::File, sync::Arc};

    use super::*;
    use crate::{
        layout::{Local, Performance, Pool, Shape},
        memory::{Backing, Memory, Owner, Taking, own_file},
    };

    /// Two slices that lie in one file from these offsets on.
    fn map(offsets: [u64; 2]) -> Result<Memory, MemoryError> {
        let pool = own_file("pool", Bytes::gib(2), None).unwrap();
        map_file(pool, offsets, Taking::default())
    }

    fn map_file(pool: File, offsets: [u64; 2], taking: Taking) -> Result<Memory, MemoryError> {
        let local = Local { cpus: 1, memory: Bytes::mib(64), performance: Performance::LOCAL };
        let shape =
            Shape { local: vec![local], pool: vec![Pool { slices: 2, performance: Performance::POOL }] };
        let layout = Layout::of(&shape, 48).unwrap();
        let own = Arc::new(own_file("local", Bytes::mib(64), None).unwrap());
        let pool = Arc::new(pool);
        let slice = |(slice, offset)| Backing {
            file: Arc::clone(&pool),
            offset,
            owner: Owner::Slice { slice, emc: "emc0".into() },
        };
        let slices = (3..).zip(offsets).map(slice).collect();
        let local = Backing { file: own, offset: 0, owner: Owner::Local };
        Memory::map(
            &layout,
            &Backings { local: vec![(local, Taking::default())], pool: vec![(slices, taking)] },
        )
    }

    #[test]
    fn slices_of_one_file_are_apart_or_refused() {
        map([0, 1 << 30]).unwrap();
        let refused = map([4096, 0]).unwrap_err().to_string();
        assert_eq!(
            refused,
            "memory: slice 4 of EMC emc0 and slice 3 of EMC emc0 are the same memory: each must be its own"
        );
        assert_eq!(
            map([0, (1 << 30) + 4096]).unwrap_err().to_string(),
            "memory: slice 4 of EMC emc0 has 2GiB, and 2097156KiB were promised"
        );
    }

    #[test]
    fn a_device_needs_no_length_and_is_of_no_node_but_its_own() {
        let device = || File::options().read(true).write(true).open("/dev/zero").unwrap();
        let slices = [0, 1 << 30];
        map_file(device(), slices, Taking::default()).unwrap();
        let bound = Taking { host_numa_node: Some(0), ..Taking::default() };
        let refused = units::chain(&map_file(device(), slices, bound).unwrap_err());
        assert!(refused.ends_with(": a device's memory is where it is"), "{refused}");
    }

    #[test]
    fn a_device_is_the_same_memory_by_whichever_node() {
        let stat = |path: &str| fstat(File::open(path).unwrap()).unwrap();
        let (zero, mut other) = (stat("/dev/zero"), stat("/dev/zero"));
        other.st_ino += 1;
        assert!(Identity::of(&zero) == Identity::of(&other));
        assert!(Identity::of(&zero) != Identity::of(&stat("/dev/null")));
        assert!(Identity::of(&stat("/proc/self/exe")) != Identity::of(&stat("/etc/passwd")));
    }

    #[test]
    fn what_linux_says_is_available_is_read() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(Bytes::mib(2)));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
    }
}
