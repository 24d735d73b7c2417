//! Backend `memory_block`: slices are memory blocks of a NUMA node without processors, onlined in
//! the zone for movable pages.
//!
//! Such memory belongs to the node, not to a certain VM. Each VM gets one memfd per slice, bound to
//! the node, and the kernel chooses the slice of each page. A slice can be removed while VMs run:
//! the kernel migrates their pages to the node's other slices, if these have space. Before a slice
//! is added and after it is removed, it is bound to device_dax to verify zeros and to flush caches.

mod free_space;
mod removal_queue;
mod switch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use pool::{
    agent::VmRecord,
    protocol::{Handle, Holding, ObservedRehome, ObservedVm, SeenDevice},
};
use units::{Bytes, ReservationId, SLICE};

pub use self::switch::BlockSwitchError;
use self::{
    free_space::{FreeSpace, SliceRemoval},
    removal_queue::RemovalQueue,
    switch::{TargetState, switch},
};
use super::{
    Counters, Host, HostError, MemoryForm, MemoryRegion, Usage,
    blocks::{self, Block},
    file_owner,
    local_memory::LocalMemory,
    memory::{numa, usage},
    memory_file::allocated_bytes,
    open_slices::{OpenSlices, check_file_unused},
    process::{self, FileId},
    ranges::CxlSlices,
    slices::{Driver, Slices},
    sysfs::Sysfs,
};
use crate::user::current_user;

/// File with the flags of each physical page.
const PAGE_FLAGS_FILE: &str = "/proc/kpageflags";
/// Directory of NUMA nodes in sysfs.
const NODES_FOLDER: &str = "/sys/devices/system/node";

/// Maximum number of attempts to migrate the pages of a file back to the pool after a failed move.
const MOVE_BACK_ATTEMPTS_MAX: u32 = 30;
/// Delay between two of these attempts.
const MOVE_BACK_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Implementation of [`Host`] for the backend `memory_block`.
#[derive(Debug)]
pub struct MemoryBlock {
    sysfs: Sysfs,
    ranges: CxlSlices,
    local: LocalMemory,
    /// Memfds of VMs, one for each slice.
    open: OpenSlices,
    removals: RemovalQueue,
    /// Slices of VMs whose pages must not be migrated.
    pinned: Mutex<BTreeSet<Holding>>,
    /// Slices of VMs whose memfds are on local nodes. Their pages are not migrated back, and their VMs
    /// keep the memfds when the slices are removed.
    rehomed: Mutex<BTreeSet<Holding>>,
    /// Slices of VMs that are being moved to local nodes. Their pages are not migrated back.
    moving: Mutex<BTreeSet<Holding>>,
    /// Locked while the pages of one file are migrated back to the pool.
    migrating: Mutex<()>,
    pages_migrated: AtomicU64,
    page_migration_failures: AtomicU64,
}

/// Memory block with its number of pages in use.
#[derive(Debug)]
struct UsedBlock {
    block: Block,
    pages: u64,
}

impl MemoryBlock {
    /// Creates a host without open slices. If `local_dir` is set, local memory can be passed by
    /// path.
    pub fn new(sysfs: Sysfs, ranges: CxlSlices, local_dir: Option<PathBuf>) -> Self {
        Self {
            sysfs,
            local: LocalMemory::with_excluded_nodes(local_dir, ranges.nodes()),
            ranges,
            open: OpenSlices::default(),
            removals: RemovalQueue::default(),
            pinned: Mutex::default(),
            rehomed: Mutex::default(),
            moving: Mutex::default(),
            migrating: Mutex::default(),
            pages_migrated: AtomicU64::new(0),
            page_migration_failures: AtomicU64::new(0),
        }
    }

    /// Onlines all memory blocks of a slice. With `check_zero`, verifies first that the slice is
    /// zero, except if some blocks are already online: these were verified before they were
    /// onlined.
    fn add_to_node(
        &self,
        slices: &Slices,
        index: u32,
        place: &str,
        check_zero: bool,
    ) -> Result<(), HostError> {
        let kmem =
            slices.present_slices()?.get(&index).is_some_and(|present| present.driver == Some(Driver::Kmem));
        let is_partly_online = kmem && slices.blocks(index)?.iter().any(|block| !block.is_offline());
        if check_zero && !is_partly_online {
            self.ranges.open_verified_slice(place)?;
        }
        slices.ensure_kmem(index)?;
        Ok(switch(&self.sysfs, &slices.blocks(index)?, TargetState::Online)?)
    }

    /// Returns the memfd of a slice. If a VM still has the memfd that an earlier agent created for
    /// the slice, it is reused unless `is_new`; otherwise a new memfd is created. If an earlier agent has
    /// moved a part of a memfd to local nodes, the policy is restored and the pages are moved back:
    /// the local memory may no longer be booked.
    fn find_or_create_memfd(&self, holding: Holding, node: u32, is_new: bool) -> Result<File, HostError> {
        let name = memfd_name(holding);
        let existing = if is_new { None } else { process::find_memfd(&name)? };
        let failed = |operation| {
            let name = &name;
            move |errno| HostError::io(operation, name, errno)
        };
        let permitted = BTreeSet::from([node]);
        let file = match existing {
            Some(existing) => {
                let policy = numa::policy_nodes(&existing, SLICE.get());
                if policy.map_err(failed("read the memory policy of"))? != permitted {
                    self.migrate_back_until_complete(&existing, &name, node);
                }
                existing
            }
            None => process::make_memfd(&name, SLICE.get()).map_err(failed("create"))?,
        };
        numa::prefer_nodes(&file, SLICE.get(), &permitted).map_err(failed("set the memory policy of"))?;
        Ok(file)
    }

    /// Returns the memfd of a slice, also if it was opened by an earlier agent and a VM still uses it.
    fn find_memfd(&self, holding: Holding) -> Result<Option<File>, HostError> {
        match self.memfd(holding) {
            Some(file) => Ok(Some(file)),
            None => Ok(process::find_memfd(&memfd_name(holding))?),
        }
    }

    /// Releases the memfd of a slice. With `verify`, checks first that no process has the memfd
    /// open or mapped. Otherwise truncates the memfd, so that its users lose the memory at once.
    fn remove_memfd(&self, holding: Holding, verify: bool) -> Result<(), HostError> {
        let name = memfd_name(holding);
        let Some(file) = self.find_memfd(holding)? else { return Ok(()) };
        if verify {
            check_memfd_unused(&file, &name)?;
        } else {
            file.set_len(0).map_err(|errno| HostError::io("truncate", &name, errno))?;
        }
        self.open.remove(holding); // closing the last descriptor frees the pages
        Ok(())
    }

    /// Waits for the slice's turn in the removal queue, and offlines its memory blocks. Does
    /// nothing if all of them are offline already.
    fn remove_from_node(&self, slices: &Slices, index: u32, place: &Arc<str>) -> Result<(), HostError> {
        if slices.blocks(index)?.iter().all(Block::is_offline) {
            return Ok(());
        }
        let pages = self.used_blocks(slices, index)?.iter().map(|used| used.pages).sum();
        let mut permit = self.removals.acquire(pages, Arc::clone(place));
        let result = self.take_slice_offline(slices, index);
        permit.finish(result.is_ok());
        result
    }

    /// Offlines all memory blocks of a slice or, after an error, none.
    fn take_slice_offline(&self, slices: &Slices, index: u32) -> Result<(), HostError> {
        let used_blocks = self.used_blocks(slices, index)?; // count again: earlier removals moved pages
        self.check_free_space(slices.node(), &used_blocks)?;
        let blocks: Vec<Block> = used_blocks.into_iter().map(|used| used.block).collect();
        // Count the pages of a failed block first: migrating pages back may fill the block again.
        let switched =
            switch(&self.sysfs, &blocks, TargetState::Offline).map_err(|error| self.with_page_count(error));
        self.migrate_pages_back(slices.node());
        Ok(switched?)
    }

    /// Checks that the node's other slices have enough free space for the VMs' pages in these
    /// blocks.
    fn check_free_space(&self, node: u32, blocks: &[UsedBlock]) -> Result<(), HostError> {
        let online = blocks.iter().filter(|used| !used.block.is_offline()).count() as u64;
        let pages: u64 = blocks.iter().map(|used| used.pages).sum();
        let space = FreeSpace::of(SliceRemoval {
            free: usage::read_node_memory(Path::new(NODES_FOLDER), node)?.free,
            online: Bytes::new(online * blocks::size(&self.sysfs)?.get()),
            in_use: Bytes::new(pages * usage::PAGE_BYTES),
            vms: self.open.files().iter().filter_map(|file| allocated_bytes(file)).sum(),
        });
        let node_full = HostError::NodeFull { node, needed: space.needed, available: space.available };
        if space.is_sufficient() { Ok(()) } else { Err(node_full) }
    }

    /// Returns the memory blocks of a slice, sorted by pages in use. The emptiest block is offlined
    /// first, because the other blocks still have the most space for its pages.
    fn used_blocks(&self, slices: &Slices, index: u32) -> Result<Vec<UsedBlock>, HostError> {
        let count = |block| self.count_pages_in_use(&block).map(|pages| UsedBlock { block, pages });
        let mut blocks = slices.blocks(index)?.into_iter().map(count).collect::<Result<Vec<_>, _>>()?;
        blocks.sort_by_key(|used| used.pages);
        Ok(blocks)
    }

    fn count_pages_in_use(&self, block: &Block) -> Result<u64, HostError> {
        if block.is_offline() {
            return Ok(0);
        }
        usage::pages_in_use(Path::new(PAGE_FLAGS_FILE), blocks::range(&self.sysfs, block)?)
    }

    fn with_page_count(&self, error: BlockSwitchError) -> BlockSwitchError {
        let block = Block { name: error.block.clone(), state: "online".to_owned() };
        BlockSwitchError { pages_in_use: self.count_pages_in_use(&block).ok(), ..error }
    }

    /// Locks the set of pinned slices. A poisoned set is consistent, because each call changes it
    /// in one operation.
    fn pinned(&self) -> MutexGuard<'_, BTreeSet<Holding>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_pinned(&self, record: &VmRecord) {
        if record.pinned {
            self.pinned().extend(record.slices.keys());
        }
    }

    /// Estimates how much of a VM's pool memory is on nodes without pool memory, from a sample of
    /// its pages. `None` if the VM's process has ended or cannot be inspected.
    fn estimate_overflow(&self, vm: &ObservedVm, pool: Bytes) -> Option<Bytes> {
        if pool == Bytes::ZERO {
            return Some(Bytes::ZERO);
        }
        let files = vm.slices.iter().filter_map(|holding| self.open.file(*holding));
        let files: Vec<FileId> = files.filter_map(|file| FileId::of_descriptor(&file).ok()).collect();
        let placed = numa::sample_placement(vm.pid, &files, &self.ranges.nodes()).ok()?;
        if placed.omitted > 0 {
            tracing::debug!(vm = %vm.vm, pid = vm.pid, omitted = placed.omitted, "some mappings of a VM were not sampled");
        }
        Some(placed.misplaced_fraction().of(pool))
    }

    /// Locks the set of slices of moved VMs; see [`MemoryBlock::pinned`].
    fn rehomed(&self) -> MutexGuard<'_, BTreeSet<Holding>> {
        self.rehomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the set of slices of moving VMs; see [`MemoryBlock::pinned`].
    fn moving(&self) -> MutexGuard<'_, BTreeSet<Holding>> {
        self.moving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the pages of a slice's VM may be migrated: the VM is neither pinned nor moved to
    /// local memory.
    fn is_movable(&self, holding: Holding) -> bool {
        ![self.pinned(), self.rehomed(), self.moving()].iter().any(|excluded| excluded.contains(&holding))
    }

    /// Waits until no page is being migrated back to the pool, and prevents this while the guard lives.
    fn migrating(&self) -> MutexGuard<'_, ()> {
        self.migrating.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the memfds of a VM to local nodes. First their policies change, so that the VM's new pages
    /// are local, and then the kernel migrates the existing pages.
    fn move_to_local_nodes(&self, record: &VmRecord) -> Result<(), HostError> {
        let failed = |operation| move |errno| HostError::io(operation, record.vm.as_str(), errno);
        let local = self.local.local_nodes().map_err(failed("find local memory for VM"))?;
        let (mut pages, mut remaining, mut errors) = (0, 0, BTreeMap::new());
        for holding in record.slices.keys() {
            let file = self.memfd(*holding).ok_or(HostError::NotOpen(*holding))?;
            numa::bind(&file, SLICE.get(), &local).map_err(failed("set the memory policy of VM"))?;
            for (attempt, node) in (1..).zip(&local) {
                let moved = numa::migrate_file(&file, SLICE.get(), &local, *node)
                    .map_err(failed("migrate the pages of VM"))?;
                pages += if attempt == 1 { moved.misplaced } else { 0 };
                if moved.misplaced == moved.moved {
                    break;
                }
                if attempt == local.len() {
                    remaining += moved.misplaced - moved.moved;
                    moved.failed.into_iter().for_each(|(errno, n)| *errors.entry(errno).or_default() += n);
                }
            }
        }
        if remaining == 0 { Ok(()) } else { Err(HostError::PagesNotMoved { pages, remaining, errors }) }
    }

    fn memfd(&self, holding: Holding) -> Option<File> {
        self.open.file(holding).and_then(|file| file.try_clone().ok()).map(File::from)
    }

    /// Reverts a failed move to local nodes. Returns when all pages are on the pool's node again, or after
    /// [`MOVE_BACK_ATTEMPTS_MAX`] attempts: the local memory of the move is no longer booked afterwards.
    fn move_back_to_pool_node(&self, record: &VmRecord) {
        for (holding, handle) in &record.slices {
            let node = self.ranges.slice(&handle.place).map(|(slices, _)| slices.node());
            let (Ok(node), Some(file)) = (node, self.memfd(*holding)) else { continue };
            if let Err(error) = numa::prefer_nodes(&file, SLICE.get(), &BTreeSet::from([node])) {
                tracing::warn!(vm = %record.vm, %error, "cannot set the memory policy of a VM");
            }
            self.migrate_back_until_complete(&file, record.vm.as_str(), node);
        }
    }

    /// Migrates the pages of a file back to a node of the pool, repeatedly if necessary.
    fn migrate_back_until_complete(&self, file: &File, owner: &str, node: u32) {
        if !retry_move_back(MOVE_BACK_RETRY_DELAY, || self.migrate_file_back(file, owner, node)) {
            tracing::error!(
                owner,
                "a part of the pool memory remains in local memory that is not reserved for it"
            );
        }
    }

    /// Migrates the VMs' pages on other nodes back to a node of the pool. Linux ignores the memory
    /// policy of a file when it empties a block. Pages that cannot be migrated are counted and
    /// logged. Pages of pinned VMs are not migrated, because a device may be writing to them.
    fn migrate_pages_back(&self, node: u32) {
        for holding in self.open.holdings() {
            let _migrating = self.migrating();
            // A move to local nodes may have begun since the last file was migrated.
            if !self.is_movable(holding) {
                continue;
            }
            if let Some(file) = self.memfd(holding) {
                self.migrate_file_back(&file, &memfd_name(holding), node);
            }
        }
    }

    /// Migrates the pages of a file that are on other nodes to a node. Returns whether all pages are on
    /// this node now.
    fn migrate_file_back(&self, file: &File, owner: &str, node: u32) -> bool {
        match numa::migrate_file(file, SLICE.get(), &BTreeSet::from([node]), node) {
            Ok(moved) => self.record_migration(owner, &moved),
            Err(error) => {
                tracing::warn!(owner, %error, "cannot migrate pages back to the pool's node");
                false
            }
        }
    }

    /// Counts the migrated pages. Returns whether all misplaced pages were migrated.
    fn record_migration(&self, owner: &str, moved: &numa::MigrationResult) -> bool {
        self.pages_migrated.fetch_add(moved.moved, Ordering::Relaxed);
        let failed = moved.misplaced - moved.moved;
        self.page_migration_failures.fetch_add(failed, Ordering::Relaxed);
        if failed > 0 {
            tracing::warn!(owner, failed, errors = ?moved.failed, "cannot migrate pages back to the pool's node");
        }
        failed == 0
    }
}

/// Checks that no other process has the memfd of a slice open or mapped.
fn check_memfd_unused(file: &File, name: &str) -> Result<(), HostError> {
    let metadata = file.metadata().map_err(|errno| HostError::io("stat", name, errno))?;
    check_file_unused(Path::new(name), FileId::of(&metadata))
}

/// Repeats a migration back to the pool's node until all pages are on it: other pages can occupy the node
/// for a while. Returns false after [`MOVE_BACK_ATTEMPTS_MAX`] attempts.
fn retry_move_back(delay: Duration, mut migrate: impl FnMut() -> bool) -> bool {
    for attempt in 1..=MOVE_BACK_ATTEMPTS_MAX {
        if attempt > 1 {
            std::thread::sleep(delay);
        }
        if migrate() {
            return true;
        }
    }
    false
}

impl Host for MemoryBlock {
    fn online(&self, holding: Holding, handle: &Handle, check_zero: bool) -> Result<(), HostError> {
        if self.open.has(holding) {
            return Ok(());
        }
        let (slices, index) = self.ranges.slice(&handle.place)?;
        self.add_to_node(slices, index, &handle.place, check_zero)?;
        let file = self.find_or_create_memfd(holding, slices.node(), check_zero)?;
        self.open.insert_memfd(holding, file);
        Ok(())
    }

    fn check_slices_unused(&self, record: &VmRecord) -> Result<(), HostError> {
        record.slices.keys().try_for_each(|holding| {
            let file = self.find_memfd(*holding)?;
            file.map_or(Ok(()), |file| check_memfd_unused(&file, &memfd_name(*holding)))
        })
    }

    fn offline(&self, holding: Holding, handle: &Handle, verify: bool) -> Result<(), HostError> {
        let (slices, index) = self.ranges.slice(&handle.place)?;
        if self.rehomed().contains(&holding) {
            self.open.remove(holding); // the VM keeps the memfd, which is on local nodes
        } else {
            self.remove_memfd(holding, verify)?;
        }
        self.pinned().remove(&holding);
        self.remove_from_node(slices, index, &handle.place)?;
        self.ranges.close(&handle.place)?;
        self.rehomed().remove(&holding);
        Ok(())
    }

    fn devices(&self) -> Vec<SeenDevice> {
        self.ranges.devices()
    }

    fn present_slices(&self) -> Result<Vec<Arc<str>>, HostError> {
        self.ranges.present_slices()
    }

    fn close_orphaned_slice(&self, place: &str) -> Result<(), HostError> {
        let (slices, index) = self.ranges.slice(place)?;
        self.remove_from_node(slices, index, &place.into())?;
        self.ranges.close(place)
    }

    fn scrub(&self, _: Holding, handle: &Handle) -> Result<Bytes, HostError> {
        self.ranges.scrub(&handle.place)
    }

    fn memory(&self, record: &VmRecord, form: MemoryForm) -> Result<Vec<MemoryRegion>, HostError> {
        let uid = file_owner(record);
        if form != MemoryForm::Descriptors && uid != current_user() && !record.slices.is_empty() {
            return Err(HostError::NoPath { uid });
        }
        self.record_pinned(record);
        let local = self.local.region(record, form)?;
        local.into_iter().map(Ok).chain(self.open.regions(record, form)).collect()
    }

    fn free_local_memory(&self, reservation: ReservationId) -> Result<(), HostError> {
        self.local.free(reservation)
    }

    fn rehome(&self, record: &VmRecord) -> Option<Result<(), HostError>> {
        self.moving().extend(record.slices.keys());
        drop(self.migrating()); // a migration back to the pool that began earlier has ended now
        let result = self.move_to_local_nodes(record);
        match &result {
            Ok(()) => self.rehomed().extend(record.slices.keys()),
            Err(_) => self.move_back_to_pool_node(record),
        }
        self.moving().retain(|holding| !record.slices.contains_key(holding));
        Some(result)
    }

    fn adopt_running_vm(&self, record: &VmRecord) {
        self.record_pinned(record);
        if record.is_rehomed {
            self.rehomed().extend(record.slices.keys());
        }
    }

    fn usage(&self, reservation: ReservationId, vm: &ObservedVm) -> Usage {
        if vm.rehome == ObservedRehome::Done {
            return Usage::default(); // the memfds of the slices are no longer open
        }
        let pool = self.open.allocated_bytes(&vm.slices);
        let local = self.local.allocated_bytes(reservation, vm, self.open.shared_bytes(&vm.slices));
        Usage { local, pool, overflow: pool.and_then(|pool| self.estimate_overflow(vm, pool)) }
    }

    fn observable_files(&self, slices: &[Holding]) -> Result<BTreeSet<FileId>, &'static str> {
        self.open.observable_files(slices)
    }

    fn counters(&self) -> Counters {
        let pages = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            pages_migrated: pages(&self.pages_migrated),
            page_migration_failures: pages(&self.page_migration_failures),
            scrubbed: self.ranges.scrubbed_bytes(),
            slices_changing: self.ranges.changing_slice_count(),
        }
    }
}

/// Returns the name of a slice's memfd, as shown in /proc/PID/fd.
fn memfd_name(holding: Holding) -> String {
    format!("tarn-slice-{}.{}", holding.slice, holding.epoch)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, num::NonZeroU64};

    use pool::agent::Process;
    use units::{Epoch, Name, SliceId};

    use super::*;
    use crate::host::{cxl::CxlMemory, sysfs::fake::FakeSysfs};

    const SLICE_1: Holding = Holding { slice: SliceId(1), epoch: Epoch(1) };

    /// Returns a host with one open slice. Its CXL device is too small to be used, so that all
    /// nodes of this machine count as nodes without pool memory.
    fn host(fake: &FakeSysfs) -> MemoryBlock {
        fake.files("devices/mem0", &[("serial", "0x1")]);
        fake.files("devices/mem0/ram", &[("size", "0x10000000")]);
        fake.link("bus/cxl/devices/mem0", "devices/mem0");
        let cxl = CxlMemory::discover_devices(&fake.sysfs).unwrap();
        let host = MemoryBlock::new(fake.sysfs.clone(), CxlSlices::new(cxl, NonZeroU64::MAX), None);
        host.open.insert_memfd(SLICE_1, process::make_memfd("tarn-test", SLICE.get()).unwrap());
        host
    }

    fn record(pinned: bool) -> VmRecord {
        VmRecord {
            reservation: ReservationId(7),
            vm: Name::new("a").unwrap(),
            process: Process { pid: std::process::id(), started: 1, cgroup: String::new() },
            local: Bytes::ZERO,
            pinned,
            uid: None,
            slices: BTreeMap::from([(SLICE_1, Handle::new("emc", "cxl:0x1:0"))]),
            control_socket: None,
            is_rehomed: false,
        }
    }

    #[test]
    fn move_back_is_retried_until_it_is_complete() {
        let attempts_until = |complete_at: u32| {
            let mut attempts = 0;
            let is_complete = retry_move_back(Duration::ZERO, || {
                attempts += 1;
                attempts == complete_at
            });
            (is_complete, attempts)
        };
        assert_eq!(attempts_until(1), (true, 1));
        assert_eq!(attempts_until(MOVE_BACK_ATTEMPTS_MAX), (true, MOVE_BACK_ATTEMPTS_MAX));
        assert_eq!(attempts_until(0), (false, MOVE_BACK_ATTEMPTS_MAX));
    }

    #[test]
    fn memfd_in_use_is_found() {
        use std::process::{Command, Stdio};
        let host = host(&FakeSysfs::new(&[]));
        let file = host.memfd(SLICE_1).unwrap();
        host.check_slices_unused(&record(false)).unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::from(file)).spawn().unwrap();
        let error = host.check_slices_unused(&record(false)).unwrap_err();
        assert!(matches!(&error, HostError::InUse { pids, .. } if *pids == [child.id()]), "{error:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        host.check_slices_unused(&record(false)).unwrap();
    }

    #[test]
    fn pool_memory_on_local_node_is_reported_as_overflow() {
        use vm_memory::{Bytes as _, FileOffset, MmapRegion, VolatileMemory as _};
        const TOUCHED_BYTES: usize = 8 << 20;
        let host = host(&FakeSysfs::new(&[]));
        let slices = vec![SLICE_1];
        let vm = ObservedVm {
            vm: Name::new("a").unwrap(),
            pid: std::process::id(),
            slices,
            local: Bytes::ZERO,
            pinned: false,
            uid: None,
            rehome: pool::protocol::ObservedRehome::None,
        };
        let overflow = || host.usage(ReservationId(7), &vm).overflow;
        assert_eq!(overflow(), Some(Bytes::ZERO));
        let file = File::from(host.open.file(SLICE_1).unwrap().try_clone().unwrap());
        let mapping = MmapRegion::<()>::from_file(FileOffset::new(file, 0), 1 << 30).unwrap();
        mapping.as_volatile_slice().write_slice(&vec![1; TOUCHED_BYTES], 0).unwrap();
        assert_eq!(overflow(), host.open.allocated_bytes(&[SLICE_1]));
        assert!(overflow() >= Some(Bytes::new(TOUCHED_BYTES as u64)));
        let ended = ObservedVm { pid: u32::MAX, ..vm.clone() };
        assert_eq!(host.usage(ReservationId(7), &ended).overflow, None);
    }

    #[test]
    fn memfds_of_pinned_vms_are_not_migrated() {
        let host = host(&FakeSysfs::new(&[]));
        host.memory(&record(false), MemoryForm::Descriptors).unwrap();
        let movable = || host.open.holdings().iter().filter(|holding| host.is_movable(**holding)).count();
        assert_eq!(movable(), 1);
        host.adopt_running_vm(&record(true));
        assert_eq!(movable(), 0);
        host.pinned().clear();
        host.memory(&record(true), MemoryForm::Descriptors).unwrap();
        assert_eq!(movable(), 0);
    }

    /// A removal of another slice must not move the pages of a VM back that is being moved to local memory.
    #[test]
    fn move_waits_for_migrations_that_began_earlier() {
        let host = host(&FakeSysfs::new(&[]));
        host.memory(&record(false), MemoryForm::Descriptors).unwrap();
        let [first] = host.open.holdings()[..] else { panic!("one slice is open") };
        std::thread::scope(|threads| {
            let migrating = host.migrating();
            assert!(host.is_movable(first));
            let moved = threads.spawn(|| host.rehome(&record(false)));
            while host.is_movable(first) {
                std::thread::yield_now();
            }
            assert!(!moved.is_finished(), "the move must wait for the migration");
            drop(migrating);
            moved.join().unwrap().unwrap().unwrap();
        });
        assert!(!host.is_movable(first), "the VM was moved");
    }
}
