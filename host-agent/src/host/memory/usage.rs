//! Memory usage of a NUMA node, and the number of used pages in a physical address range. Offlining
//! a memory block takes longer the more pages are in use.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt as _, path::Path};

use units::Bytes;

use crate::host::HostError;

/// Page size of x86-64, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Size of a huge page of x86-64, in bytes. The kernel moves a transparent huge page as a whole.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Size of a page's entry in /proc/kpageflags, in bytes.
const FLAG_BYTES: usize = size_of::<u64>();
/// Number of page entries read by one call, which limits the buffer to 256 KiB.
const PAGES_PER_READ: usize = 32 << 10;
/// Page flag KPF_BUDDY from linux/kernel-page-flags.h: the page is free.
const KPF_BUDDY: u64 = 1 << 10;
/// Page flag KPF_NOPAGE from linux/kernel-page-flags.h: the page is absent or offline.
const KPF_NOPAGE: u64 = 1 << 20;

/// Memory of one NUMA node of this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Online memory of the node.
    pub total: Bytes,
    /// Free memory of the node.
    pub free: Bytes,
    /// Page cache that was not used recently.
    pub inactive_files: Bytes,
}

/// Returns the memory of a node. `nodes` is the directory `/sys/devices/system/node`.
///
/// # Errors
/// The node does not exist, or the file has an unexpected format.
pub fn read_node_memory(nodes: &Path, node: u32) -> Result<NodeMemory, HostError> {
    let path = nodes.join(format!("node{node}/meminfo"));
    let failed = |errno| HostError::io("read", &path, errno);
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    let part = |name| parse_kib(&text, name).ok_or_else(|| failed(missing_number_error(name)));
    let inactive_files = parse_kib(&text, "Inactive(file):").unwrap_or_default();
    Ok(NodeMemory { total: part("MemTotal:")?, free: part("MemFree:")?, inactive_files })
}

/// Returns how much of a node's memory is not used by VMs: anonymous memory and the page cache,
/// from the node's `meminfo`. Memory of VMs consists of files in memory (`Shmem`) and is not
/// counted. `None` if a line is missing.
pub fn foreign_memory(meminfo: &str) -> Option<Bytes> {
    let part = |name| parse_kib(meminfo, name).map(Bytes::get);
    let files = part("FilePages:")?.saturating_sub(part("Shmem:")?);
    Some(Bytes::new(part("AnonPages:")? + files))
}

/// Returns the value of the line `name`, such as `Node 1 MemFree:         1015808 kB`.
fn parse_kib(text: &str, name: &str) -> Option<Bytes> {
    let words = text.lines().map(|line| line.split_whitespace().skip(2).collect::<Vec<_>>());
    let kib = words.into_iter().find_map(|words| match words[..] {
        [first, kib, "kB"] if first == name => kib.parse::<u64>().ok(),
        _ => None,
    });
    Some(Bytes::new(kib?.checked_mul(1024)?))
}

fn missing_number_error(name: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no number of kB follows {name}"))
}

/// Returns the number of 4 KiB pages in use in a physical address range of movable memory: pages
/// that are neither free, nor offline, nor absent. A page without any flag is also free: it is in a
/// per-CPU list of the allocator, and movable pages in use always have flags. `flags` is the file
/// `/proc/kpageflags`, which only root can read.
///
/// # Errors
/// The file cannot be read.
pub fn pages_in_use(flags: &Path, range: Range<u64>) -> Result<u64, HostError> {
    let failed = |errno| HostError::io("read", flags, errno);
    let file = File::open(flags).map_err(failed)?;
    let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
    let mut used = 0;
    for first in pages.clone().step_by(PAGES_PER_READ) {
        let remaining = usize::try_from(pages.end - first).unwrap_or(usize::MAX);
        used += count_used_pages(&file, first, remaining.min(PAGES_PER_READ)).map_err(failed)?;
    }
    Ok(used)
}

fn count_used_pages(flags: &File, first: u64, count: usize) -> io::Result<u64> {
    let mut bytes = vec![0; count * FLAG_BYTES];
    flags.read_exact_at(&mut bytes, first * FLAG_BYTES as u64)?;
    let (words, _) = bytes.as_chunks::<FLAG_BYTES>();
    let is_used = |word: u64| word != 0 && word & (KPF_BUDDY | KPF_NOPAGE) == 0;
    Ok(words.iter().filter(|word| is_used(u64::from_ne_bytes(**word))).count() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_memory_is_parsed() {
        let nodes = tempfile::tempdir().unwrap();
        std::fs::create_dir(nodes.path().join("node2")).unwrap();
        let meminfo = nodes.path().join("node2/meminfo");
        std::fs::write(&meminfo, "Node 2 MemTotal:    1048576 kB\nNode 2 MemFree:  1015808 kB\n").unwrap();
        let node = read_node_memory(nodes.path(), 2).unwrap();
        assert_eq!((node.total, node.free), (Bytes::gib(1), Bytes::mib(992)));
        std::fs::write(&meminfo, "Node 2 MemTotal:    1048576 kB\nNode 2 MemFree: much kB\n").unwrap();
        let error = units::chain(&read_node_memory(nodes.path(), 2).unwrap_err());
        assert!(error.ends_with("node2/meminfo: no number of kB follows MemFree:"), "{error}");
        read_node_memory(nodes.path(), 3).unwrap_err();
    }

    #[test]
    fn node_of_this_machine_has_memory() {
        let node = read_node_memory(Path::new("/sys/devices/system/node"), 0).unwrap();
        assert!(node.total > node.free && node.free > Bytes::ZERO, "{node:?}");
    }

    #[test]
    fn free_cached_offline_and_absent_pages_are_unused() {
        const LRU: u64 = 1 << 5;
        let flags = tempfile::NamedTempFile::new().unwrap();
        let pages = PAGES_PER_READ as u64 + 100;
        let word = |page| match page % 4 {
            0 => KPF_BUDDY,
            1 => KPF_NOPAGE,
            2 => LRU,
            _ => 0, // free, in a per-CPU list of the allocator
        };
        let bytes: Vec<u8> = (0..pages).flat_map(|page| word(page).to_ne_bytes()).collect();
        flags.as_file().write_all_at(&bytes, 0).unwrap();
        assert_eq!(pages_in_use(flags.path(), 0..pages * PAGE_BYTES).unwrap(), pages / 4);
        assert_eq!(pages_in_use(flags.path(), 2 * PAGE_BYTES..3 * PAGE_BYTES).unwrap(), 1);
        assert_eq!(pages_in_use(flags.path(), 4 * PAGE_BYTES..6 * PAGE_BYTES).unwrap(), 0);
        pages_in_use(flags.path(), 0..(pages + 1) * PAGE_BYTES).unwrap_err();
    }
}
