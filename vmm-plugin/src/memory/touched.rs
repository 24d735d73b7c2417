//! Measures how much memory of each node the guest has touched, from the allocated sizes of the
//! memory files. Page tables are not examined. Examining them would hold the lock of this process's
//! address space, and would split the 1 GiB page table entries of device-dax memory.

use std::{collections::BTreeMap, fs::File, io, sync::Arc};

use rustix::fs::{FileType, fstat};

use super::{MappedRegion, SpareMemory, check::Identity};

/// Unit of `st_blocks`, in bytes.
const STAT_BLOCK_BYTES: u64 = 512;

/// Number of bytes of each node that are backed by pages. `None` means that the node is not
/// measured.
pub type TouchedByNode = BTreeMap<u32, Option<u64>>;

/// Memory files of each node. `None` means that file sizes do not show how much of the node is
/// touched: the node has device memory or private mappings, or shares a file with another node.
#[derive(Debug)]
pub struct NodeFiles(BTreeMap<u32, Option<Vec<Arc<File>>>>);

/// Memory file of a node.
struct NodeFile {
    file: Arc<File>,
    identity: Identity,
    /// Number of bytes of the file that the node maps, and of spare memory in the file.
    mapped_bytes: u64,
    is_measurable: bool,
}

impl NodeFiles {
    /// Collects the files of each node from the mapped regions.
    ///
    /// # Errors
    /// The error returned by fstat(2).
    pub(super) fn new(mapped: &[MappedRegion], spare: Option<&SpareMemory>) -> io::Result<Self> {
        let spare =
            spare.map(|spare| io::Result::Ok((Identity::from_stat(&fstat(&spare.file)?), spare.bytes)));
        let spare = spare.transpose()?;
        let mut nodes: BTreeMap<u32, Vec<NodeFile>> = BTreeMap::new();
        for region in mapped {
            let status = fstat(&region.file)?;
            let identity = Identity::from_stat(&status);
            let files = nodes.entry(region.node).or_default();
            let bytes = region.file_range.end - region.file_range.start;
            let is_file = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
            match files.iter_mut().find(|file| file.identity == identity) {
                Some(file) => file.mapped_bytes += bytes,
                None => files.push(NodeFile {
                    file: Arc::clone(&region.file),
                    identity,
                    // Spare memory has no pages before the pool memory is moved.
                    mapped_bytes: bytes
                        + spare.filter(|spare| spare.0 == identity).map_or(0, |spare| spare.1),
                    is_measurable: is_file && region.is_shared,
                }),
            }
        }
        let measured = nodes.into_iter().map(|(node, files)| Ok((node, measurable_files(files)?)));
        measured.collect::<io::Result<_>>().map(Self)
    }

    /// Returns how many bytes of each node are currently backed by pages, in memory or in swap.
    ///
    /// # Errors
    /// The error returned by fstat(2).
    pub fn measure_touched_memory(&self) -> io::Result<TouchedByNode> {
        let of_node = |(node, files): (&u32, &Option<Vec<Arc<File>>>)| {
            let sum = files.as_ref().map(|files| files.iter().map(|file| allocated_bytes(file)).sum());
            Ok((*node, sum.transpose()?))
        };
        self.0.iter().map(of_node).collect()
    }
}

/// Returns the files of a node, or `None` if the node cannot be measured.
fn measurable_files(files: Vec<NodeFile>) -> io::Result<Option<Vec<Arc<File>>>> {
    for file in &files {
        let length = u64::try_from(fstat(&file.file)?.st_size).unwrap_or(0);
        if !file.is_measurable || file.mapped_bytes != length {
            return Ok(None);
        }
    }
    Ok(Some(files.into_iter().map(|file| file.file).collect()))
}

/// Returns the allocated size of a file, in bytes.
fn allocated_bytes(file: &File) -> io::Result<u64> {
    Ok(u64::try_from(fstat(file)?.st_blocks).unwrap_or(0) * STAT_BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use units::Bytes;
    use vm_memory::{Bytes as _, GuestAddress};

    use super::*;
    use crate::{
        layout::{Layout, Local, Performance, Pool, Shape},
        memory::{Memory, MemoryBackendOptions, MemoryBacking, MemoryBackings, MemoryOwner, create_memfd},
    };

    const MIB: u64 = 1 << 20;

    fn local(file: &Arc<File>, offset: u64, shared: bool) -> (MemoryBacking, MemoryBackendOptions) {
        let backing = MemoryBacking { file: Arc::clone(file), offset, owner: MemoryOwner::Local };
        (backing, MemoryBackendOptions { shared, ..MemoryBackendOptions::default() })
    }

    /// Maps a guest that has local nodes of 64 MiB each, and one pool node with one slice.
    fn map(local: Vec<(MemoryBacking, MemoryBackendOptions)>, slice: File) -> Memory {
        let node = Local { cpus: 1, memory: Bytes::mib(64), performance: Performance::LOCAL };
        let shape = Shape {
            local: vec![node; local.len()],
            pool: vec![Pool { slices: 1, performance: Performance::POOL }],
        };
        let owner = MemoryOwner::Slice { slice: 3, emc: "emc0".into() };
        let slice = MemoryBacking { file: Arc::new(slice), offset: 0, owner };
        let backings =
            MemoryBackings { local, pool: vec![(vec![slice], MemoryBackendOptions::default())], spare: None };
        Memory::map(&Layout::new(&shape, 48).unwrap(), &backings).unwrap()
    }

    fn file(mib: u64) -> Arc<File> {
        Arc::new(create_memfd("local", Bytes::mib(mib), None).unwrap())
    }

    #[test]
    fn touched_pages_are_counted_for_the_node_of_their_file() {
        let memory = map(vec![local(&file(64), 0, true)], create_memfd("pool", Bytes::gib(1), None).unwrap());
        let files = memory.node_files().unwrap();
        assert_eq!(files.measure_touched_memory().unwrap(), [(0, Some(0)), (1, Some(0))].into());
        memory.guest().write_slice(&vec![1; 3 << 20], GuestAddress(2 * MIB)).unwrap();
        let touched = files.measure_touched_memory().unwrap()[&0].unwrap();
        assert!((3 * MIB..=6 * MIB).contains(&touched), "{touched}");
        assert_eq!(files.measure_touched_memory().unwrap()[&1], Some(0));
    }

    /// The agent reserves the spare memory in the file of the local memory.
    #[test]
    fn spare_memory_in_the_file_of_a_node_is_not_counted_as_missing() {
        let local_file = file(64 + 1024);
        let mut memory =
            map(vec![local(&local_file, 0, true)], create_memfd("pool", Bytes::gib(1), None).unwrap());
        let spare =
            SpareMemory { file: local_file, offset: 64 * MIB, bytes: 1024 * MIB, host_numa_node: None };
        memory.spare = Some(spare);
        memory.guest().write_slice(&[1; 4096], GuestAddress(2 * MIB)).unwrap();
        let touched = memory.node_files().unwrap().measure_touched_memory().unwrap();
        assert!(touched[&0].is_some_and(|bytes| bytes > 0), "{touched:?}");
    }

    #[test]
    fn device_memory_is_not_measured() {
        let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
        let memory = map(vec![local(&file(64), 0, true)], device);
        assert_eq!(
            memory.node_files().unwrap().measure_touched_memory().unwrap(),
            [(0, Some(0)), (1, None)].into()
        );
    }

    #[test]
    fn nodes_with_partial_file_or_private_memory_are_not_measured() {
        let whole = file(128);
        let nodes = vec![local(&whole, 0, true), local(&whole, 64 * MIB, true), local(&file(64), 0, false)];
        let memory = map(nodes, create_memfd("pool", Bytes::gib(1), None).unwrap());
        let touched = memory.node_files().unwrap().measure_touched_memory().unwrap();
        assert_eq!(touched, [(0, None), (1, None), (2, None), (3, Some(0))].into());
    }

    /// The kernel uses huge pages only if a mapping is advised before its first page is allocated.
    #[test]
    fn mapped_files_are_advised_for_huge_pages_and_devices_are_not() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            eprintln!("SKIPPED: this kernel has no transparent huge pages");
            return;
        }
        let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
        let memory = map(vec![local(&file(64), 0, true)], device);
        let has_flag = |at: usize| {
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{at:x}-")));
            let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
            flags.split_whitespace().any(|flag| flag == "hg")
        };
        let advised: Vec<bool> =
            memory.mapped.iter().map(|mapped| has_flag(mapped.addresses.start)).collect();
        assert_eq!(advised, [true, false]);
    }
}
