//! Detection of slices of emulated EMCs that two owners can access. The scanner searches /proc for
//! processes with access to a slice through a superseded grant. Devices on other machines cannot be
//! checked.
//!
//! A grant is a file `EMC/slices/NNNNN.EPOCH.hHOST`. A process has access through a file descriptor
//! or a mapping. A revocation truncates the file, so an empty file gives no access even if it is
//! open. Grants change during a scan, so a violation counts only if two consecutive scans find it.
//! Access by the manager is ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use cli_runtime::{Connection, lists};
use proto::v1;
use tokio::{sync::oneshot, task::JoinHandle};
use units::limits::REPLAY_CHECK_INTERVAL;

/// Name of the driver whose grants are files.
const EMULATED_DRIVER: &str = "emulated";
/// Name of the file in an EMC's directory that the manager keeps locked.
const LOCK_FILE: &str = "lock";
/// Suffix that /proc adds to the path of a deleted file.
const DELETED_SUFFIX: &str = " (deleted)";

/// Emulated pool device on this machine.
#[derive(Clone, Debug)]
struct Emc {
    folder: PathBuf,
    first: u32,
    slices: u32,
}

/// Grant of a slice, parsed from the name of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    /// Number of the slice within the rack.
    slice: u32,
    epoch: u64,
}

/// Result of one scan of /proc.
#[derive(Clone, Debug, Default)]
struct ScanResult {
    /// Grants that a process other than the manager can access.
    reachable: BTreeSet<Grant>,
    /// Indexes of EMCs whose manager runs on this machine.
    managed: BTreeSet<usize>,
    /// Whether a mapping that could give access to a slice was not readable.
    is_incomplete: bool,
}

/// Combined result of all scans.
#[derive(Clone, Debug, Default)]
pub(super) struct Reachability {
    scans: u64,
    managed: BTreeSet<usize>,
    emcs: usize,
    is_incomplete: bool,
    /// Superseded grants that were reachable in the latest scan.
    suspects: BTreeSet<Grant>,
    /// Slices with a superseded grant that was reachable in two consecutive scans.
    pub(super) double_owned: BTreeSet<u32>,
}

/// Task that scans /proc periodically.
#[derive(Debug)]
pub(super) struct ReachabilityScanner {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Reachability>,
}

impl ReachabilityScanner {
    /// Starts the periodic scans for these EMCs.
    pub(super) fn start(manager: Connection, emcs: &[v1::Emc]) -> Self {
        let local: Vec<Emc> = emcs.iter().filter_map(Emc::from_local_emc).collect();
        let reachability = Reachability { emcs: emcs.len(), ..Reachability::default() };
        let (stop, stopped) = oneshot::channel();
        Self { stop, task: tokio::spawn(scan_until_stopped(stopped, manager, local, reachability)) }
    }

    /// Stops the periodic scans after two more scans, and returns the combined result.
    pub(super) async fn stop(self) -> Reachability {
        // Dropping the sender stops the task.
        drop(self.stop);
        self.task.await.unwrap_or_default()
    }
}

async fn scan_until_stopped(
    mut stopped: oneshot::Receiver<()>,
    manager: Connection,
    emcs: Vec<Emc>,
    mut reachability: Reachability,
) -> Reachability {
    loop {
        reachability.scan_once(&manager, &emcs).await;
        tokio::select! {
            _ = &mut stopped => break,
            () = tokio::time::sleep(REPLAY_CHECK_INTERVAL.as_duration()) => {}
        }
    }
    for _ in 0..2 {
        reachability.scan_once(&manager, &emcs).await;
    }
    reachability
}

impl Reachability {
    async fn scan_once(&mut self, manager: &Connection, emcs: &[Emc]) {
        // If the manager is unavailable, grants are not compared with the ledger. Two reachable
        // grants of one slice are still detected.
        let ledger = lists::slices(manager, 0, u32::MAX).await.unwrap_or_default();
        let emcs = emcs.to_vec();
        if let Ok(scan) = tokio::task::spawn_blocking(move || scan(&emcs)).await {
            let current = ledger.into_iter().map(|slice| (slice.slice, slice.epoch)).collect();
            self.add(scan, current);
        }
    }

    /// Adds the result of a scan. A grant is superseded if the ledger or another reachable grant of
    /// the slice has a higher epoch.
    fn add(&mut self, scan: ScanResult, mut current: BTreeMap<u32, u64>) {
        for grant in &scan.reachable {
            let latest = current.entry(grant.slice).or_default();
            *latest = grant.epoch.max(*latest);
        }
        let superseded = scan.reachable.into_iter().filter(|grant| grant.epoch < current[&grant.slice]);
        let suspects: BTreeSet<Grant> = superseded.collect();
        self.double_owned.extend(suspects.intersection(&self.suspects).map(|grant| grant.slice));
        self.suspects = suspects;
        self.managed.extend(scan.managed);
        self.is_incomplete |= scan.is_incomplete;
        self.scans += 1;
    }

    /// Returns the reason why the check is incomplete, or `None` if it is complete.
    pub(super) fn incomplete_reason(&self) -> Option<&'static str> {
        if self.scans < 2 {
            Some("fewer than two scans were completed")
        } else if self.managed.len() < self.emcs {
            Some(
                "an EMC is not emulated, or the open files of its manager are not readable in /proc of this machine",
            )
        } else if self.is_incomplete {
            Some("some mappings of processes are not readable in /proc; run as root")
        } else {
            None
        }
    }
}

impl Emc {
    fn from_local_emc(emc: &v1::Emc) -> Option<Self> {
        let folder = fs::canonicalize(&emc.path).ok().filter(|_| emc.driver == EMULATED_DRIVER)?;
        Some(Self { folder, first: emc.first_slice, slices: emc.slices })
    }

    /// Parses a path as a grant of this EMC. Returns `None` for other paths.
    fn parse_grant(&self, path: &Path) -> Option<Grant> {
        let name = path.strip_prefix(&self.folder).ok()?.strip_prefix("slices").ok()?.to_str()?;
        let mut parts = name.split('.');
        let index: u32 = parts.next()?.parse().ok().filter(|index| *index < self.slices)?;
        Some(Grant { slice: self.first + index, epoch: parts.next()?.parse().ok()? })
    }
}

/// Scans all processes once.
fn scan(emcs: &[Emc]) -> ScanResult {
    let mut scan = ScanResult::default();
    let Ok(processes) = fs::read_dir("/proc") else { return scan };
    let is_process = |path: &Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    for process in processes.flatten().map(|entry| entry.path()).filter(|path| is_process(path)) {
        // A process that has ended, or that belongs to another user, is skipped.
        let _ = scan.scan_process(&process, emcs);
    }
    scan
}

impl ScanResult {
    fn scan_process(&mut self, process: &Path, emcs: &[Emc]) -> io::Result<()> {
        let mut open = Vec::new();
        for entry in fs::read_dir(process.join("fd"))?.flatten() {
            if let Ok(target) = fs::read_link(entry.path()) {
                open.push((target, entry.path()));
            }
        }
        let holds_lock = |(n, emc): (usize, &Emc)| {
            let lock = emc.folder.join(LOCK_FILE);
            open.iter().any(|(target, _)| *target == lock).then_some(n)
        };
        let managed: Vec<usize> = emcs.iter().enumerate().filter_map(holds_lock).collect();
        if !managed.is_empty() {
            self.managed.extend(managed);
            return Ok(());
        }
        for (target, link) in open {
            self.add_reachable_grant(&target, &link, emcs);
        }
        self.scan_mappings(process, &fs::read_to_string(process.join("maps"))?, emcs);
        Ok(())
    }

    fn scan_mappings(&mut self, process: &Path, maps: &str, emcs: &[Emc]) {
        for line in maps.lines() {
            let mut columns = line.splitn(6, ' ');
            if let (Some(range), Some(path)) = (columns.next(), columns.nth(4)) {
                let target = Path::new(path.trim_start());
                self.add_reachable_grant(target, &process.join("map_files").join(range), emcs);
            }
        }
    }

    /// Adds the grant with the path `target` if its file is not empty. `link` is the link to the
    /// file in /proc.
    fn add_reachable_grant(&mut self, target: &Path, link: &Path, emcs: &[Emc]) {
        let text = target.to_str().unwrap_or_default();
        let (path, deleted) = match text.strip_suffix(DELETED_SUFFIX) {
            Some(path) => (Path::new(path), true),
            None => (target, false),
        };
        let Some(grant) = emcs.iter().find_map(|emc| emc.parse_grant(path)) else { return };
        match fs::metadata(link) {
            Ok(file) if file.len() > 0 => drop(self.reachable.insert(grant)),
            Ok(_) => {}
            // A revocation also deletes the file, so a file that still exists is not empty.
            Err(errno) if errno.kind() == io::ErrorKind::PermissionDenied && deleted => {
                self.is_incomplete = true
            }
            Err(errno) if errno.kind() == io::ErrorKind::PermissionDenied => {
                self.reachable.insert(grant);
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates the directory of an emulated device with 8 slices, numbered from 100.
    fn create_device() -> (tempfile::TempDir, Vec<Emc>) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("slices")).unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let emc = v1::Emc {
            path,
            driver: EMULATED_DRIVER.into(),
            first_slice: 100,
            slices: 8,
            ..Default::default()
        };
        let local = Emc::from_local_emc(&emc).unwrap();
        (folder, vec![local])
    }

    fn create_grant(folder: &tempfile::TempDir, name: &str) -> fs::File {
        let file = fs::File::create_new(folder.path().join("slices").join(name)).unwrap();
        file.set_len(4096).unwrap();
        file
    }

    fn reachable(emcs: &[Emc]) -> Vec<(u32, u64)> {
        scan(emcs).reachable.into_iter().map(|grant| (grant.slice, grant.epoch)).collect()
    }

    #[test]
    fn open_grant_is_reachable_until_revoked() {
        let (folder, emcs) = create_device();
        let file = create_grant(&folder, "00003.7.h1");
        assert_eq!(reachable(&emcs), [(103, 7)]);
        fs::remove_file(folder.path().join("slices/00003.7.h1")).unwrap();
        assert_eq!(reachable(&emcs), [(103, 7)], "an unlinked file is still reachable");
        file.set_len(0).unwrap();
        assert_eq!(reachable(&emcs), []);
    }

    #[test]
    fn mapped_grant_is_reachable_after_descriptor_is_closed() {
        let (folder, emcs) = create_device();
        let path = folder.path().join("slices/00001.2.h0");
        let file = fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(4096).unwrap();
        let mapping =
            vm_memory::MmapRegion::<()>::from_file(vm_memory::FileOffset::new(file, 0), 4096).unwrap();
        assert_eq!(reachable(&emcs), [(101, 2)]);
        drop(mapping);
        assert_eq!(reachable(&emcs), []);
    }

    #[test]
    fn process_that_opens_the_lock_is_ignored_as_manager() {
        let (folder, emcs) = create_device();
        let _grant = create_grant(&folder, "00003.7.h1");
        assert!(scan(&emcs).managed.is_empty());
        let _lock = fs::File::create(folder.path().join(LOCK_FILE)).unwrap();
        assert_eq!(scan(&emcs).managed.len(), 1);
        assert_eq!(reachable(&emcs), []);
    }

    fn double_owned_slices_after(scans: &[&[(u32, u64)]], ledger: &[(u32, u64)]) -> Vec<u32> {
        let mut reachability = Reachability::default();
        for scan in scans {
            let grants = scan.iter().map(|(slice, epoch)| Grant { slice: *slice, epoch: *epoch });
            let scan = ScanResult { reachable: grants.collect(), ..ScanResult::default() };
            reachability.add(scan, ledger.iter().copied().collect());
        }
        reachability.double_owned.into_iter().collect()
    }

    #[test]
    fn slice_with_two_reachable_grants_has_two_owners() {
        assert_eq!(double_owned_slices_after(&[&[(1, 4), (1, 5)], &[(1, 4), (1, 5)]], &[]), [1]);
        assert_eq!(double_owned_slices_after(&[&[(1, 4), (2, 5)], &[(1, 4), (2, 5)]], &[]), [0; 0]);
    }

    #[test]
    fn reachable_grant_superseded_in_ledger_is_second_owner() {
        assert_eq!(double_owned_slices_after(&[&[(1, 4)], &[(1, 4)]], &[(1, 5)]), [1]);
        assert_eq!(double_owned_slices_after(&[&[(1, 5)], &[(1, 5)]], &[(1, 5)]), [0; 0]);
    }

    #[test]
    fn grant_superseded_during_one_scan_is_not_second_owner() {
        assert_eq!(
            double_owned_slices_after(&[&[(1, 4), (1, 5)], &[(1, 5)], &[(1, 5), (1, 6)]], &[]),
            [0; 0]
        );
    }

    #[test]
    fn check_is_incomplete_for_device_on_other_machine() {
        let remote =
            v1::Emc { path: "/nowhere".into(), driver: EMULATED_DRIVER.into(), ..Default::default() };
        assert!(Emc::from_local_emc(&remote).is_none());
        let reachability = Reachability { scans: 9, emcs: 1, ..Reachability::default() };
        assert!(reachability.incomplete_reason().is_some());
        assert!(Reachability { managed: [0].into(), ..reachability }.incomplete_reason().is_none());
    }
}
