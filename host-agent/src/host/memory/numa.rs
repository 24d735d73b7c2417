//! Placement of VMs' memory on NUMA nodes: memory policies of files, migration of pages to
//! permitted nodes, and sampling of the nodes of pages. Pages can be on other nodes than the policy
//! permits, because the kernel ignores policies when it offlines a memory block. Callers choose the
//! permitted nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    ops::Range,
    path::Path,
    ptr,
    time::Instant,
};

use rustix::mm::{Advice, madvise};
use units::{
    Fraction,
    limits::{
        PAGES_PER_MOVE_CALL_MAX, SAMPLED_MAPPINGS_PER_VM_MAX, SAMPLED_PAGES_PER_VM_MAX,
        SAMPLING_INTERVAL_PAGES,
    },
};
use vm_memory::{FileOffset, MmapRegion};

use super::{errno, usage::HUGE_PAGE_BYTES};
use crate::host::{
    process::{self, FileId},
    sysfs::parse_ranges,
    zero::next_data,
};

/// Page size of x86-64, in bytes.
const PAGE_BYTES: usize = 4096;
/// Largest number of nodes of x86-64 Linux.
const NODES_MAX: u32 = 1024;
/// Memory policy from linux/mempolicy.h: uses the given nodes, and other nodes when these are full.
const MPOL_PREFERRED_MANY: i32 = 5;
/// Flag from linux/mempolicy.h: requests the policy of an address.
const MPOL_F_ADDR: i32 = 1 << 1;
/// Flag from linux/mempolicy.h: moves only pages that no other process maps.
const MPOL_MF_MOVE: i32 = 1 << 1;
/// Flag from linux/mempolicy.h: also moves pages that other processes map; requires CAP_SYS_NICE.
const MPOL_MF_MOVE_ALL: i32 = 1 << 2;

/// Binds the first `bytes` bytes of a file in memory to nodes, for all processes. Existing pages
/// are not moved.
///
/// # Errors
/// The error of `mbind`: EINVAL if one of the nodes has no memory.
pub fn bind(file: &File, bytes: u64, nodes: &BTreeSet<u32>) -> io::Result<()> {
    set_policy(file, bytes, nodes, libc::MPOL_BIND)
}

/// Sets a policy like [`bind`], but the kernel uses other nodes when the given nodes are full. With
/// [`bind`], the kernel kills a process that touches more of the file than fits on the nodes, and
/// it keeps a reserve of pages on each node.
///
/// # Errors
/// The error of `mbind`: EINVAL if one of the nodes has no memory.
pub fn prefer_nodes(file: &File, bytes: u64, nodes: &BTreeSet<u32>) -> io::Result<()> {
    set_policy(file, bytes, nodes, MPOL_PREFERRED_MANY)
}

/// Returns the nodes of the memory policy that [`bind`] or [`prefer_nodes`] has set for the first `bytes`
/// bytes of a file in memory; empty if the file has the default policy.
///
/// # Errors
/// The error of `mmap` or `get_mempolicy`.
pub fn policy_nodes(file: &File, bytes: u64) -> io::Result<BTreeSet<u32>> {
    let mapping = map(file, bytes)?;
    let mut mask = [0_u64; (NODES_MAX / u64::BITS) as usize];
    let bits = mask.len() * u64::BITS as usize;
    let (mode, start) = (ptr::null_mut::<i32>(), mapping.as_ptr());
    // SAFETY: the mask has the given length, and the kernel writes only to the mask. The address belongs to
    // the mapping, which lives until the end of this function; the call does not access its contents.
    let done =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, mode, mask.as_mut_ptr(), bits, start, MPOL_F_ADDR) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_set = |node: &u32| mask[(node / u64::BITS) as usize] >> (node % u64::BITS) & 1 == 1;
    Ok((0..NODES_MAX).filter(is_set).collect())
}

fn set_policy(file: &File, bytes: u64, nodes: &BTreeSet<u32>, mode: i32) -> io::Result<()> {
    let mapping = map(file, bytes)?;
    let mask = node_mask(nodes);
    let bits = mask.len() * u64::BITS as usize + 1; // Linux ignores the last bit
    let start = mapping.as_ptr();
    // SAFETY: the mapping and the mask have the given lengths. The call changes only the policy for
    // new pages, and no contents.
    let done = unsafe { libc::syscall(libc::SYS_mbind, start, mapping.size(), mode, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Maps the first `bytes` bytes of a file in memory.
fn map(file: &File, bytes: u64) -> io::Result<MmapRegion<()>> {
    let size = usize::try_from(bytes).map_err(io::Error::other)?;
    MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), size).map_err(errno)
}

/// Returns the nodes with memory. `nodes` is the directory `/sys/devices/system/node`.
///
/// # Errors
/// The file `has_memory` cannot be read or is not a list of nodes.
pub fn nodes_with_memory(nodes: &Path) -> io::Result<BTreeSet<u32>> {
    let list = std::fs::read_to_string(nodes.join("has_memory"))?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, format!("{list:?} is not a list of nodes"));
    Ok(parse_ranges(&list).ok_or_else(invalid)?.into_iter().flatten().collect())
}

/// Returns the bit mask of a set of nodes, with node 0 in the lowest bit of the first word.
fn node_mask(nodes: &BTreeSet<u32>) -> Vec<u64> {
    let word = |node: u32| (node / u64::BITS) as usize;
    let mut mask = vec![0; nodes.last().map_or(1, |last| word(*last) + 1)];
    nodes.iter().for_each(|node| mask[word(*node)] |= 1 << (node % u64::BITS));
    mask
}

/// Result of migrating misplaced pages: pages outside the permitted nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationResult {
    /// Number of pages that were misplaced.
    pub misplaced: u64,
    /// Number of misplaced pages that were migrated.
    pub moved: u64,
    /// Number of pages that were not migrated, by error number. EBUSY: the kernel or a device holds
    /// the page, or the kernel did not process it. ENOMEM: the target node is full.
    pub failed: BTreeMap<i32, u64>,
}

/// Migrates the pages of the first `bytes` bytes of a file in memory that are not on permitted nodes to the
/// node `to`. Maps the pages in this process, because the kernel finds pages only by the mappings of a
/// process, and other processes do not map all pages of the file. Pages that other processes map are
/// migrated only with CAP_SYS_NICE.
///
/// # Errors
/// The file cannot be mapped, or was truncated meanwhile.
pub fn migrate_file(
    file: &File,
    bytes: u64,
    permitted: &BTreeSet<u32>,
    to: u32,
) -> io::Result<MigrationResult> {
    let mapping = map(file, bytes)?;
    let process = Process(0); // this process
    let (mut moved, mut from) = (MigrationResult::default(), 0);
    while let Some(data) = next_data(file, from, bytes)? {
        from = data.end;
        let [start, end] =
            [data.start, data.end].map(|offset| usize::try_from(offset).map_err(io::Error::other));
        let addresses = populate(&mapping, start?..end?)?;
        let pages: Vec<usize> = addresses.step_by(PAGE_BYTES).collect();
        for batch in pages.chunks(PAGES_PER_MOVE_CALL_MAX) {
            process.migrate_misplaced_pages(batch, permitted, to, &mut moved)?;
        }
    }
    Ok(moved)
}

/// Maps the existing pages of a range of a mapping, and returns their addresses.
fn populate(mapping: &MmapRegion<()>, range: Range<usize>) -> io::Result<Range<usize>> {
    let range =
        range.start / PAGE_BYTES * PAGE_BYTES..range.end.next_multiple_of(PAGE_BYTES).min(mapping.size());
    let start = mapping.as_ptr().wrapping_add(range.start);
    // SAFETY: the range is part of the mapping, which lives longer than this call. The call reads the pages
    // and changes no contents. It returns an error instead of a signal if the file was truncated.
    unsafe { madvise(start.cast(), range.len(), Advice::LinuxPopulateRead) }?;
    let start = start as usize;
    Ok(start..start + range.len())
}

/// Maximum number of attempts to promote the pages of one batch.
const PROMOTION_ATTEMPTS_MAX: u32 = 4;

/// Limits of a call of [`promote_pages`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionLimits {
    /// Maximum number of moved pages.
    pub moved: usize,
    /// Maximum number of pages whose nodes are queried.
    pub examined: usize,
    /// Time after which no further pages are queried.
    pub deadline: Instant,
}

/// Returns how many of these pages can be moved without exceeding the limit. Pages of a huge page are
/// moved together or not at all, because the kernel moves a transparent huge page as a whole.
fn count_movable(pages: &[usize], limit: usize) -> usize {
    let huge_page = |page: usize| page as u64 / HUGE_PAGE_BYTES;
    let mut count = 0;
    for together in pages.chunk_by(|one, next| huge_page(*one) == huge_page(*next)) {
        if count + together.len() > limit {
            break;
        }
        count += together.len();
    }
    count
}

/// Result of [`promote_pages`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromotionResult {
    /// Addresses of the pages that were moved.
    pub moved: Vec<usize>,
    /// Number of pages from the start of the ranges that were moved or need not be moved.
    pub examined: usize,
    /// Number of pages that were not moved, by error number. EBUSY: the kernel or a device holds the
    /// page, or the kernel did not process it. ENOMEM: the target node is full. EACCES: other processes
    /// map the page.
    pub failed: BTreeMap<i32, u64>,
}

/// Migrates pages of a process that are on the nodes `from` to the node `to`: the pages in `ranges`, in
/// their order, until one of the limits is reached. Pages that other processes map are not moved,
/// because they may belong to another tenant. The number of moved pages is exact only if the ranges begin
/// and end with huge pages, because a transparent huge page is moved as a whole.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn promote_pages(
    pid: u32,
    ranges: &[Range<usize>],
    from: &BTreeSet<u32>,
    to: u32,
    limits: PromotionLimits,
) -> io::Result<PromotionResult> {
    let process = Process(i32::try_from(pid).map_err(io::Error::other)?);
    let target = i32::try_from(to).map_err(io::Error::other)?;
    let mut result = PromotionResult::default();
    let mut pages = ranges.iter().flat_map(|range| range.clone().step_by(PAGE_BYTES)).take(limits.examined);
    let mut is_limited = false;
    let is_permitted = |result: &PromotionResult| {
        result.moved.len() < limits.moved
            && !result.failed.contains_key(&libc::ENOMEM)
            && Instant::now() < limits.deadline
    };
    while !is_limited && is_permitted(&result) {
        let batch: Vec<usize> = pages.by_ref().take(PAGES_PER_MOVE_CALL_MAX).collect();
        if batch.is_empty() {
            break;
        }
        let mut slow = process.pages_on(&batch, from)?;
        let movable = count_movable(&slow, limits.moved - result.moved.len());
        // The first page beyond the limit is the first one of the next call.
        let omitted = slow.get(movable).copied();
        let rest = omitted.and_then(|first| batch.iter().position(|page| *page == first));
        is_limited = rest.is_some();
        result.examined += rest.unwrap_or(batch.len());
        slow.truncate(movable);
        process.promote(slow, from, target, &mut result)?;
    }
    Ok(result)
}

/// Returns those of the given pages of a process that exist on one of the nodes, in their order.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn find_pages_on(pid: u32, pages: &[usize], nodes: &BTreeSet<u32>) -> io::Result<Vec<usize>> {
    let process = Process(i32::try_from(pid).map_err(io::Error::other)?);
    let found = pages.chunks(PAGES_PER_MOVE_CALL_MAX).map(|batch| process.pages_on(batch, nodes));
    Ok(found.collect::<io::Result<Vec<_>>>()?.concat())
}

/// Sample of the nodes of a process's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Number of sampled pages that exist.
    pub present: u64,
    /// Number of sampled pages outside the permitted nodes.
    pub misplaced: u64,
    /// Number of mappings that were not sampled because of the limit [`SAMPLED_MAPPINGS_PER_VM_MAX`].
    pub omitted: u64,
}

impl Placement {
    /// Returns the fraction of sampled pages outside the permitted nodes; 0 if no page was sampled.
    pub fn misplaced_fraction(self) -> Fraction {
        Fraction::new(self.misplaced as f64 / self.present.max(1) as f64)
            .expect("misplaced pages are at most all present pages")
    }
}

/// Limits of the work of [`sample_placement`]; tests use lower limits.
#[derive(Clone, Copy, Debug)]
struct SampleBounds {
    /// Maximum number of sampled mappings.
    mappings: usize,
    /// Approximate maximum number of sampled pages.
    pages: usize,
}

impl SampleBounds {
    const DEFAULT: Self = Self { mappings: SAMPLED_MAPPINGS_PER_VM_MAX, pages: SAMPLED_PAGES_PER_VM_MAX };

    /// Returns the distance between sampled pages, in bytes. The first page of each mapping is
    /// always sampled, so that at most `pages + mappings` pages are sampled.
    fn sampling_stride(self, mappings: &[Range<usize>]) -> usize {
        let pages = mappings.iter().map(|mapping| mapping.len() / PAGE_BYTES).sum::<usize>();
        PAGE_BYTES * SAMPLING_INTERVAL_PAGES.max(pages.div_ceil(self.pages))
    }
}

/// Counts the pages of `files` that are outside the NUMA nodes `permitted`, in a sample of the
/// pages that the process `pid` maps.
///
/// Samples one in [`SAMPLING_INTERVAL_PAGES`] pages, but approximately [`SAMPLED_PAGES_PER_VM_MAX`] pages at
/// most, in at most [`SAMPLED_MAPPINGS_PER_VM_MAX`] mappings. The kernel examines only the sampled
/// pages, and holds the lock of the process's address space for a few pages at a time.
///
/// # Errors
/// The process has ended, or the caller may not inspect it.
pub fn sample_placement(pid: u32, files: &[FileId], permitted: &BTreeSet<u32>) -> io::Result<Placement> {
    sample_bounded_placement(SampleBounds::DEFAULT, pid, files, permitted)
}

fn sample_bounded_placement(
    bounds: SampleBounds,
    pid: u32,
    files: &[FileId],
    permitted: &BTreeSet<u32>,
) -> io::Result<Placement> {
    let process = Process(i32::try_from(pid).map_err(io::Error::other)?);
    let mappings = process::mappings_of(pid, &files.iter().copied().collect(), bounds.mappings)?;
    let sampling_stride = bounds.sampling_stride(&mappings.addresses);
    let mut pages = mappings.addresses.into_iter().flat_map(|mapping| mapping.step_by(sampling_stride));
    let mut placement = Placement { omitted: mappings.omitted, ..Placement::default() };
    loop {
        let batch: Vec<usize> = pages.by_ref().take(PAGES_PER_MOVE_CALL_MAX).collect();
        if batch.is_empty() {
            break;
        }
        for node in process.move_pages(&batch, None, 0)? {
            let Ok(node) = u32::try_from(node) else { continue }; // the page does not exist
            placement.present += 1;
            placement.misplaced += u64::from(!permitted.contains(&node));
        }
    }
    Ok(placement)
}

/// Identifier of a process whose pages are inspected or migrated.
#[derive(Clone, Copy)]
struct Process(i32);

impl Process {
    /// Migrates pages until all are on permitted nodes, or an attempt moves none. Several attempts
    /// can be necessary, because the kernel may skip the pages after a page that it cannot migrate.
    fn migrate_misplaced_pages(
        self,
        pages: &[usize],
        permitted: &BTreeSet<u32>,
        to: u32,
        moved: &mut MigrationResult,
    ) -> io::Result<()> {
        let mut remaining = self.misplaced(pages, permitted)?;
        moved.misplaced += remaining.len() as u64;
        while !remaining.is_empty() {
            let attempt = self.move_to(&remaining, to);
            let still_misplaced = self.misplaced(&remaining, permitted)?;
            moved.moved += (remaining.len() - still_misplaced.len()) as u64;
            if still_misplaced.len() == remaining.len() {
                failure_errors(attempt, still_misplaced.len())
                    .for_each(|errno| *moved.failed.entry(errno).or_default() += 1);
                break;
            }
            remaining = still_misplaced;
        }
        Ok(())
    }

    /// Moves pages from the nodes `from` to another node until an attempt moves none, at most
    /// [`PROMOTION_ATTEMPTS_MAX`] times: the kernel may skip the pages after one that it cannot move.
    fn promote(
        self,
        mut pages: Vec<usize>,
        from: &BTreeSet<u32>,
        to: i32,
        result: &mut PromotionResult,
    ) -> io::Result<()> {
        for attempt in 1..=PROMOTION_ATTEMPTS_MAX {
            if pages.is_empty() {
                break;
            }
            let moved = self.move_pages(&pages, Some(&vec![to; pages.len()]), MPOL_MF_MOVE);
            let remaining: BTreeSet<usize> = self.pages_on(&pages, from)?.into_iter().collect();
            result.moved.extend(pages.iter().filter(|page| !remaining.contains(page)));
            if attempt == PROMOTION_ATTEMPTS_MAX || remaining.len() == pages.len() {
                for (page, errno) in pages.iter().zip(failure_errors(moved, pages.len())) {
                    if remaining.contains(page) {
                        *result.failed.entry(errno).or_default() += 1;
                    }
                }
                break;
            }
            pages.retain(|page| remaining.contains(page));
        }
        Ok(())
    }

    /// Returns the pages that exist and are outside the permitted nodes.
    fn misplaced(self, pages: &[usize], permitted: &BTreeSet<u32>) -> io::Result<Vec<usize>> {
        let nodes = self.move_pages(pages, None, 0)?;
        let is_misplaced = |node: i32| u32::try_from(node).is_ok_and(|node| !permitted.contains(&node));
        Ok(pages.iter().zip(nodes).filter(|(_, node)| is_misplaced(*node)).map(|(page, _)| *page).collect())
    }

    /// Returns the pages that exist on one of the nodes.
    fn pages_on(self, pages: &[usize], nodes: &BTreeSet<u32>) -> io::Result<Vec<usize>> {
        let on = self.move_pages(pages, None, 0)?;
        let is_on = |node: i32| u32::try_from(node).is_ok_and(|node| nodes.contains(&node));
        Ok(pages.iter().zip(on).filter(|(_, node)| is_on(*node)).map(|(page, _)| *page).collect())
    }

    /// Migrates pages to a node, including pages that other processes map if this process has the
    /// capability for it.
    fn move_to(self, pages: &[usize], node: u32) -> io::Result<Vec<i32>> {
        let to = vec![i32::try_from(node).map_err(io::Error::other)?; pages.len()];
        match self.move_pages(pages, Some(&to), MPOL_MF_MOVE_ALL) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.move_pages(pages, Some(&to), MPOL_MF_MOVE)
            }
            done => done,
        }
    }

    /// Calls `move_pages`. Returns for each page its node, or a negative error number if the page
    /// does not exist or was not migrated.
    fn move_pages(self, pages: &[usize], to: Option<&[i32]>, flags: i32) -> io::Result<Vec<i32>> {
        let mut status = vec![-libc::EBUSY; pages.len()];
        let to = to.map_or(ptr::null(), |nodes| {
            assert_eq!(nodes.len(), pages.len(), "each page needs one target node");
            nodes.as_ptr()
        });
        let (first, status_out) = (pages.as_ptr(), status.as_mut_ptr());
        // SAFETY: the arrays of pages, statuses and optional nodes have the given length. The call
        // changes neither the contents nor the virtual addresses of pages.
        let done =
            unsafe { libc::syscall(libc::SYS_move_pages, self.0, pages.len(), first, to, status_out, flags) };
        if done >= 0 { Ok(status) } else { Err(io::Error::last_os_error()) }
    }
}

/// Returns the error numbers of `count` pages that were not migrated.
fn failure_errors(attempt: io::Result<Vec<i32>>, count: usize) -> impl Iterator<Item = i32> {
    let status = attempt.unwrap_or_else(|error| vec![-error.raw_os_error().unwrap_or(libc::EBUSY); count]);
    status.into_iter().map(|status| if status < 0 { -status } else { libc::EBUSY })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    use rustix::fs::{MemfdFlags, memfd_create};
    use vm_memory::{Bytes as _, VolatileMemory as _};

    use super::*;

    const BYTES: u64 = 16 << 20;

    fn memfd() -> File {
        let file = File::from(memfd_create("tarn-test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(BYTES).unwrap();
        file
    }

    fn nodes(nodes: impl IntoIterator<Item = u32>) -> BTreeSet<u32> {
        nodes.into_iter().collect()
    }

    /// Returns the first node of this machine with memory.
    fn local_node() -> u32 {
        *nodes_with_memory(Path::new("/sys/devices/system/node")).unwrap().first().unwrap()
    }

    #[test]
    fn node_list_accepts_numbers_and_ranges() {
        let dir = tempfile::tempdir().unwrap();
        for (list, expected) in [("0\n", &[0][..]), ("0-2,5\n", &[0, 1, 2, 5]), ("\n", &[])] {
            std::fs::write(dir.path().join("has_memory"), list).unwrap();
            assert_eq!(nodes_with_memory(dir.path()).unwrap(), nodes(expected.iter().copied()), "{list:?}");
        }
        std::fs::write(dir.path().join("has_memory"), "many\n").unwrap();
        nodes_with_memory(dir.path()).unwrap_err();
    }

    #[test]
    fn node_mask_has_a_bit_for_every_node() {
        assert_eq!(node_mask(&nodes([0, 2])), [0b101]);
        assert_eq!(node_mask(&nodes([63, 64, 200])), [1 << 63, 1, 0, 1 << 8]);
    }

    #[test]
    fn file_is_bound_to_nodes_with_memory() {
        let file = memfd();
        assert_eq!(policy_nodes(&file, BYTES).unwrap(), nodes([]));
        bind(&file, BYTES, &nodes([local_node()])).unwrap();
        assert_eq!(policy_nodes(&file, BYTES).unwrap(), nodes([local_node()]));
        let error = bind(&memfd(), BYTES, &nodes([1023])).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
    }

    /// Creates a file, maps all its pages, and touches three of them.
    fn touched_file() -> (File, FileId, MmapRegion<()>) {
        let file = memfd();
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 16 << 20).unwrap();
        for page in 7..10 {
            mapping.as_volatile_slice().write_obj(1_u8, page * PAGE_BYTES).unwrap();
        }
        let id = FileId::of(&file.metadata().unwrap());
        (file, id, mapping)
    }

    #[test]
    fn pages_on_permitted_node_are_not_moved() {
        let (file, _, _mapping) = touched_file();
        let moved = migrate_file(&file, BYTES, &nodes([local_node()]), local_node()).unwrap();
        assert_eq!(moved, MigrationResult::default());
    }

    #[test]
    fn immovable_pages_are_counted_by_error() {
        let (file, _, _mapping) = touched_file();
        let moved = migrate_file(&file, BYTES, &nodes([1000]), 1000).unwrap();
        assert_eq!((moved.misplaced, moved.moved), (3, 0));
        assert_eq!(moved.failed, [(libc::ENODEV, 3)].into());
    }

    /// A VMM drops its mappings of pages to find out whether the guest accesses them. The pages still
    /// exist.
    #[test]
    fn pages_that_no_process_maps_are_migrated() {
        let file = memfd();
        for page in [0, 1, 9] {
            file.write_all_at(b"data", page * PAGE_BYTES as u64).unwrap();
        }
        let moved = migrate_file(&file, BYTES, &nodes([1000]), 1000).unwrap();
        assert_eq!((moved.misplaced, moved.failed), (3, [(libc::ENODEV, 3)].into()));
        assert_eq!(file.metadata().unwrap().blocks() * 512, 3 * PAGE_BYTES as u64, "holes remain holes");
    }

    #[test]
    fn truncated_file_is_an_error() {
        let file = memfd();
        file.write_all_at(b"data", 0).unwrap();
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 16 << 20).unwrap();
        file.set_len(0).unwrap();
        let error = populate(&mapping, 0..PAGE_BYTES).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{error}");
        assert_eq!(migrate_file(&file, BYTES, &nodes([1000]), 1000).unwrap(), MigrationResult::default());
    }

    #[test]
    fn sample_counts_existing_and_misplaced_pages() {
        let (_file, id, mapping) = touched_file();
        let placement = |permitted| sample_placement(std::process::id(), &[id], &nodes([permitted])).unwrap();
        assert_eq!(placement(1000), Placement::default(), "the three touched pages are not sampled");
        for page in 0..mapping.size() / PAGE_BYTES {
            mapping.as_volatile_slice().write_obj(1_u8, page * PAGE_BYTES).unwrap();
        }
        let present = BYTES / (PAGE_BYTES * SAMPLING_INTERVAL_PAGES) as u64;
        assert_eq!(placement(local_node()), Placement { present, ..Placement::default() });
        assert_eq!(placement(1000), Placement { present, misplaced: present, omitted: 0 });
        assert_eq!(placement(1000).misplaced_fraction().get(), 1.0);
    }

    /// Regression test: the work for one sample grew without limit with the number of mappings.
    #[test]
    fn sample_of_many_mappings_is_bounded() {
        let file = memfd();
        let map = || {
            MmapRegion::<()>::from_file(FileOffset::new(file.try_clone().unwrap(), 0), PAGE_BYTES).unwrap()
        };
        let mappings: Vec<_> = (0..300).map(|_| map()).collect();
        // The kernel does not merge adjacent mappings of the same offset.
        mappings[0].as_volatile_slice().write_obj(1_u8, 0).unwrap();
        mappings
            .iter()
            .for_each(|mapping| assert_eq!(mapping.as_volatile_slice().read_obj::<u8>(0).unwrap(), 1));
        let id = FileId::of(&file.metadata().unwrap());
        let sample =
            |bounds| sample_bounded_placement(bounds, std::process::id(), &[id], &nodes([1000])).unwrap();
        let all = sample(SampleBounds::DEFAULT);
        assert_eq!(all, Placement { present: 300, misplaced: 300, omitted: 0 });
        let part = sample(SampleBounds { mappings: 100, ..SampleBounds::DEFAULT });
        assert_eq!(part, Placement { present: 100, misplaced: 100, omitted: 200 });
    }

    #[test]
    fn sample_of_large_memory_is_bounded_and_evenly_spread() {
        let gib = |from: usize, to: usize| from << 30..to << 30;
        let bounds = SampleBounds { mappings: 4, pages: 1 << 10 };
        assert_eq!(
            bounds.sampling_stride(&[gib(1, 2)]),
            PAGE_BYTES << 8,
            "1 GiB has 256 times the limit of 1024 pages"
        );
        assert_eq!(bounds.sampling_stride(&[gib(1, 2), gib(4, 5)]), PAGE_BYTES << 9);
        assert_eq!(SampleBounds::DEFAULT.sampling_stride(&[gib(1, 2)]), PAGE_BYTES * SAMPLING_INTERVAL_PAGES);
        let samples: usize =
            [gib(1, 2), gib(4, 5)].map(|mapping| mapping.step_by(PAGE_BYTES << 9).count()).iter().sum();
        assert_eq!(samples, bounds.pages);
    }

    fn limits_of(moved: usize, examined: usize) -> PromotionLimits {
        PromotionLimits { moved, examined, deadline: Instant::now() + std::time::Duration::from_secs(60) }
    }

    fn promote(mapping: &MmapRegion<()>, from: u32, to: u32, limits: PromotionLimits) -> PromotionResult {
        let start = mapping.as_ptr() as usize;
        let range = start..start + mapping.size();
        promote_pages(std::process::id(), std::slice::from_ref(&range), &nodes([from]), to, limits).unwrap()
    }

    #[test]
    fn only_pages_on_slow_nodes_are_promoted() {
        let (_file, _, mapping) = touched_file();
        let limits = limits_of(100, 1 << 20);
        let examined = mapping.size() / PAGE_BYTES;
        let result = promote(&mapping, 1000, local_node(), limits);
        assert_eq!(result, PromotionResult { examined, ..PromotionResult::default() });
        let result = promote(&mapping, local_node(), 1000, limits);
        let failed = [(libc::ENODEV, 3)].into();
        assert_eq!(
            result,
            PromotionResult { moved: Vec::new(), examined, failed },
            "node 1000 does not exist"
        );
    }

    #[test]
    fn promotion_stops_at_its_limits() {
        let (_file, _, mapping) = touched_file();
        let start = mapping.as_ptr() as usize;
        let result = promote(&mapping, local_node(), 1000, limits_of(100, 9));
        assert_eq!((result.examined, result.failed), (9, [(libc::ENODEV, 2)].into()));
        let result = promote(&mapping, local_node(), 1000, limits_of(0, 9));
        assert_eq!(result, PromotionResult::default());
        // Two pages of one huge page, and a page of the next.
        assert_eq!([1, 2, 3].map(|limit| count_movable(&[4096, 8192, 2 << 20], limit)), [0, 2, 3]);
        let late = PromotionLimits { deadline: Instant::now(), ..limits_of(100, 9) };
        assert_eq!(promote(&mapping, local_node(), 1000, late), PromotionResult::default());
        let pages = [6, 7, 9, 10].map(|page| start + page * PAGE_BYTES);
        let found = find_pages_on(std::process::id(), &pages, &nodes([local_node()])).unwrap();
        assert_eq!(found, pages[1..3]);
    }
}
