//! NUMA nodes of a VM's memory where it comes from the host's allocator: bindings of files, and
//! pages on other nodes, for example after the kernel emptied a memory block, which ignores
//! bindings. The permitted nodes are decided elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    ops::Range,
    path::Path,
    ptr,
};

use units::{
    Fraction,
    limits::{PAGES_PER_MOVE_CALL_MAX, PAGES_PER_SAMPLE, PLACEMENT_MAPPINGS_MAX, PLACEMENT_PAGES_MAX},
};
use vm_memory::{FileOffset, MmapRegion};

use super::errno;
use crate::host::{
    process::{self, FileId},
    sysfs::parse_ranges,
};

/// Page size of x86-64.
const PAGE: usize = 4096;
/// From linux/mempolicy.h: these nodes, and others when they are full.
const MPOL_PREFERRED_MANY: i32 = 5;
/// From linux/mempolicy.h: moves pages mapped by one process only, or also others.
const MPOL_MF_MOVE: i32 = 1 << 1;
const MPOL_MF_MOVE_ALL: i32 = 1 << 2;

/// Binds the first bytes of a file in memory to these nodes, for every process. Existing pages are
/// not moved.
///
/// # Errors
/// The kernel rejects it: EINVAL, if one of the nodes has no memory.
pub fn bind(file: &File, bytes: u64, nodes: &BTreeSet<u32>) -> io::Result<()> {
    set_policy(file, bytes, nodes, libc::MPOL_BIND)
}

/// Like [`bind`], but uses other nodes when these are full. A node reserves its last pages, and a
/// process that touches more of a bound file than the node provides is killed.
///
/// # Errors
/// As [`bind`].
pub fn prefer(file: &File, bytes: u64, nodes: &BTreeSet<u32>) -> io::Result<()> {
    set_policy(file, bytes, nodes, MPOL_PREFERRED_MANY)
}

fn set_policy(file: &File, bytes: u64, nodes: &BTreeSet<u32>, mode: i32) -> io::Result<()> {
    let size = usize::try_from(bytes).map_err(io::Error::other)?;
    let mapping = FileOffset::new(file.try_clone()?, 0);
    let mapping = MmapRegion::<()>::from_file(mapping, size).map_err(errno)?;
    let mask = mask(nodes);
    let bits = mask.len() * u64::BITS as usize + 1; // Linux ignores the last bit
    let start = mapping.as_ptr();
    // SAFETY: the mapping and the mask have the given lengths; the call changes the source of
    // pages, and no byte.
    let done = unsafe { libc::syscall(libc::SYS_mbind, start, size, mode, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns the nodes with memory. `nodes` is the folder `/sys/devices/system/node`.
///
/// # Errors
/// The kernel does not report them.
pub fn nodes_with_memory(nodes: &Path) -> io::Result<BTreeSet<u32>> {
    let list = std::fs::read_to_string(nodes.join("has_memory"))?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, format!("{list:?} is no list of nodes"));
    Ok(parse_ranges(&list).ok_or_else(invalid)?.into_iter().flatten().collect())
}

/// Returns a bit mask of nodes, lowest first.
fn mask(nodes: &BTreeSet<u32>) -> Vec<u64> {
    let word = |node: u32| (node / u64::BITS) as usize;
    let mut mask = vec![0; nodes.last().map_or(1, |last| word(*last) + 1)];
    nodes.iter().for_each(|node| mask[word(*node)] |= 1 << (node % u64::BITS));
    mask
}

/// Result of moving pages from wrong nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationResult {
    /// Pages that were on a wrong node.
    pub misplaced: u64,
    /// Pages of these that were moved.
    pub moved: u64,
    /// Pages that were not moved, by error: EBUSY, if the kernel or a device holds them, or the
    /// kernel did not process them; ENOMEM, if the permitted node is full.
    pub failed: BTreeMap<i32, u64>,
}

/// Moves pages of a file mapped by a process from wrong nodes to one of the permitted ones.
///
/// # Errors
/// The process has ended, or may not be inspected.
pub fn migrate_back(
    pid: u32,
    file: FileId,
    permitted: &BTreeSet<u32>,
    to: u32,
) -> io::Result<MigrationResult> {
    let process = Process(i32::try_from(pid).map_err(io::Error::other)?);
    let mut moved = MigrationResult::default();
    for mapping in process::mappings(pid, file)? {
        let pages: Vec<usize> = mapping.step_by(PAGE).collect();
        for batch in pages.chunks(PAGES_PER_MOVE_CALL_MAX) {
            process.migrate_back(batch, permitted, to, &mut moved)?;
        }
    }
    Ok(moved)
}

/// Sample of the nodes of a process's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Sampled pages that exist.
    pub present: u64,
    /// Pages of these outside the permitted nodes.
    pub misplaced: u64,
    /// Mappings beyond [`PLACEMENT_MAPPINGS_MAX`], which were not sampled.
    pub omitted: u64,
}

impl Placement {
    /// Returns the fraction of pages outside the permitted nodes; 0 without pages.
    pub fn misplaced_fraction(self) -> Fraction {
        Fraction::new(self.misplaced as f64 / self.present.max(1) as f64).expect("a part of a whole")
    }
}

/// Bounds of [`sample_placement`].
#[derive(Clone, Copy, Debug)]
struct SampleBounds {
    mappings: usize,
    pages: usize,
}

impl SampleBounds {
    const DEFAULT: Self = Self { mappings: PLACEMENT_MAPPINGS_MAX, pages: PLACEMENT_PAGES_MAX };

    /// Returns the distance between sampled pages, in bytes. The first page of each mapping is
    /// sampled, so at most `pages + mappings` pages are.
    fn stride(self, mappings: &[Range<usize>]) -> usize {
        let pages = mappings.iter().map(|mapping| mapping.len() / PAGE).sum::<usize>();
        PAGE * PAGES_PER_SAMPLE.max(pages.div_ceil(self.pages))
    }
}

/// Samples the pages of some files mapped by a process: one in [`PAGES_PER_SAMPLE`], or fewer if
/// that exceeds [`PLACEMENT_PAGES_MAX`], in at most [`PLACEMENT_MAPPINGS_MAX`] mappings. The kernel
/// examines only these addresses, and holds the lock of the address space for a few pages at a
/// time.
///
/// # Errors
/// The process has ended, or may not be inspected.
pub fn sample_placement(pid: u32, files: &[FileId], permitted: &BTreeSet<u32>) -> io::Result<Placement> {
    sample_within(SampleBounds::DEFAULT, pid, files, permitted)
}

fn sample_within(
    bounds: SampleBounds,
    pid: u32,
    files: &[FileId],
    permitted: &BTreeSet<u32>,
) -> io::Result<Placement> {
    let process = Process(i32::try_from(pid).map_err(io::Error::other)?);
    let mappings = process::mappings_of(pid, &files.iter().copied().collect(), bounds.mappings)?;
    let stride = bounds.stride(&mappings.addresses);
    let mut pages = mappings.addresses.into_iter().flat_map(|mapping| mapping.step_by(stride));
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

/// Process to be inspected, by its pid.
#[derive(Clone, Copy)]
struct Process(i32);

impl Process {
    /// Repeats while it helps: a page that cannot be moved may make the kernel skip those after it.
    fn migrate_back(
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

    /// Returns existing pages outside these nodes.
    fn misplaced(self, pages: &[usize], permitted: &BTreeSet<u32>) -> io::Result<Vec<usize>> {
        let nodes = self.move_pages(pages, None, 0)?;
        let is_misplaced = |node: i32| u32::try_from(node).is_ok_and(|node| !permitted.contains(&node));
        Ok(pages.iter().zip(nodes).filter(|(_, node)| is_misplaced(*node)).map(|(page, _)| *page).collect())
    }

    /// Moves also pages mapped by other processes, if permitted.
    fn move_to(self, pages: &[usize], node: u32) -> io::Result<Vec<i32>> {
        let to = vec![i32::try_from(node).map_err(io::Error::other)?; pages.len()];
        match self.move_pages(pages, Some(&to), MPOL_MF_MOVE_ALL) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                self.move_pages(pages, Some(&to), MPOL_MF_MOVE)
            }
            done => done,
        }
    }

    /// Returns the node of each page, or a negative error if it has none or was not moved.
    fn move_pages(self, pages: &[usize], to: Option<&[i32]>, flags: i32) -> io::Result<Vec<i32>> {
        let mut status = vec![-libc::EBUSY; pages.len()];
        let to = to.map_or(ptr::null(), |nodes| {
            assert_eq!(nodes.len(), pages.len(), "a node for each page");
            nodes.as_ptr()
        });
        let (first, status_out) = (pages.as_ptr(), status.as_mut_ptr());
        // SAFETY: pages, statuses and optional nodes have the given length; contents of pages do
        // not change, and their addresses stay the same for the owner.
        let done =
            unsafe { libc::syscall(libc::SYS_move_pages, self.0, pages.len(), first, to, status_out, flags) };
        if done >= 0 { Ok(status) } else { Err(io::Error::last_os_error()) }
    }
}

/// Counts the errors of pages that were not moved.
fn failure_errors(attempt: io::Result<Vec<i32>>, count: usize) -> impl Iterator<Item = i32> {
    let status = attempt.unwrap_or_else(|error| vec![-error.raw_os_error().unwrap_or(libc::EBUSY); count]);
    status.into_iter().map(|status| if status < 0 { -status } else { libc::EBUSY })
}

#[cfg(test)]
mod tests {
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
    fn node_mask_has_any_size() {
        assert_eq!(mask(&nodes([0, 2])), [0b101]);
        assert_eq!(mask(&nodes([63, 64, 200])), [1 << 63, 1, 0, 1 << 8]);
    }

    #[test]
    fn file_is_bound_to_nodes_with_memory() {
        bind(&memfd(), BYTES, &nodes([local_node()])).unwrap();
        let nowhere = bind(&memfd(), BYTES, &nodes([1023])).unwrap_err();
        assert_eq!(nowhere.raw_os_error(), Some(libc::EINVAL), "{nowhere}");
    }

    /// A single process maps the file: this one.
    fn touched() -> (File, FileId, MmapRegion<()>) {
        let file = memfd();
        let mapping = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), 16 << 20).unwrap();
        for page in 7..10 {
            mapping.as_volatile_slice().write_obj(1_u8, page * PAGE).unwrap();
        }
        let id = FileId::of(&file.metadata().unwrap());
        (file, id, mapping)
    }

    #[test]
    fn pages_on_permitted_node_are_not_moved() {
        let (_file, id, _mapping) = touched();
        let moved = migrate_back(std::process::id(), id, &nodes([local_node()]), local_node()).unwrap();
        assert_eq!(moved, MigrationResult::default());
    }

    #[test]
    fn immovable_pages_are_counted_by_error() {
        let (_file, id, _mapping) = touched();
        let moved = migrate_back(std::process::id(), id, &nodes([1000]), 1000).unwrap();
        assert_eq!((moved.misplaced, moved.moved), (3, 0));
        assert_eq!(moved.failed, [(libc::ENODEV, 3)].into());
    }

    #[test]
    fn misplaced_fraction_of_pages_is_sampled() {
        let (_file, id, mapping) = touched();
        let placement = |permitted| sample_placement(std::process::id(), &[id], &nodes([permitted])).unwrap();
        assert_eq!(placement(1000), Placement::default(), "no sampled page exists");
        for page in 0..mapping.size() / PAGE {
            mapping.as_volatile_slice().write_obj(1_u8, page * PAGE).unwrap();
        }
        let present = BYTES / (PAGE * PAGES_PER_SAMPLE) as u64;
        assert_eq!(placement(local_node()), Placement { present, ..Placement::default() });
        assert_eq!(placement(1000), Placement { present, misplaced: present, omitted: 0 });
        assert_eq!(placement(1000).misplaced_fraction().get(), 1.0);
    }

    /// The work for one sample grew without limit with the number of mappings.
    #[test]
    fn sample_of_many_mappings_is_bounded() {
        let file = memfd();
        let map =
            || MmapRegion::<()>::from_file(FileOffset::new(file.try_clone().unwrap(), 0), PAGE).unwrap();
        let mappings: Vec<_> = (0..300).map(|_| map()).collect();
        // The kernel does not merge adjacent mappings of the same offset.
        mappings[0].as_volatile_slice().write_obj(1_u8, 0).unwrap();
        mappings
            .iter()
            .for_each(|mapping| assert_eq!(mapping.as_volatile_slice().read_obj::<u8>(0).unwrap(), 1));
        let id = FileId::of(&file.metadata().unwrap());
        let sample = |bounds| sample_within(bounds, std::process::id(), &[id], &nodes([1000])).unwrap();
        let all = sample(SampleBounds::DEFAULT);
        assert_eq!(all, Placement { present: 300, misplaced: 300, omitted: 0 });
        let part = sample(SampleBounds { mappings: 100, ..SampleBounds::DEFAULT });
        assert_eq!(part, Placement { present: 100, misplaced: 100, omitted: 200 });
    }

    #[test]
    fn sample_of_large_memory_is_bounded_and_evenly_spread() {
        let gib = |from: usize, to: usize| from << 30..to << 30;
        let bounds = SampleBounds { mappings: 4, pages: 1 << 10 };
        assert_eq!(bounds.stride(&[gib(1, 2)]), PAGE << 8, "one page in 256 instead of 64");
        assert_eq!(bounds.stride(&[gib(1, 2), gib(4, 5)]), PAGE << 9);
        assert_eq!(SampleBounds::DEFAULT.stride(&[gib(1, 2)]), PAGE * PAGES_PER_SAMPLE);
        let samples: usize =
            [gib(1, 2), gib(4, 5)].map(|mapping| mapping.step_by(PAGE << 9).count()).iter().sum();
        assert_eq!(samples, bounds.pages);
    }

    #[test]
    fn migration_fails_for_ended_process() {
        let (_file, id, _mapping) = touched();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        migrate_back(child.id(), id, &nodes([0]), 0).unwrap_err();
    }
}
