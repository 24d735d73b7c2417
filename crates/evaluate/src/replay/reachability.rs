//! Processes that can reach each slice of an emulated EMC, found in /proc during the replay: a
//! slice that a process can reach through an ended grant has two owners. Devices on other machines
//! cannot be checked.
//!
//! A grant is a file `EMC/slices/NNNNN.EPOCH.hHOST`; a process reaches it through a descriptor or a
//! mapping. A revocation truncates the file, so an empty file is unreachable even if it is open.
//! The state changes during a scan, so a violation must appear in two consecutive scans. The
//! manager itself owns nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use cli_runtime::{Connection, lists};
use proto::v1;
use tokio::{sync::oneshot, task::JoinHandle};
use units::limits::REPLAY_CHECK_INTERVAL;

/// Driver whose grants are files.
const EMULATED: &str = "emulated";
/// File that the manager of an EMC locks.
const LOCK: &str = "lock";
/// Suffix of a deleted file's path in /proc.
const DELETED: &str = " (deleted)";

/// One pool device on this machine.
#[derive(Clone, Debug)]
struct Emc {
    folder: PathBuf,
    first: u32,
    slices: u32,
}

/// Grant, parsed from the name of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    /// Number within the rack.
    slice: u32,
    epoch: u64,
}

/// Result of one scan.
#[derive(Clone, Debug, Default)]
struct Scan {
    /// Grants reachable by a process other than the manager.
    reachable: BTreeSet<Grant>,
    /// EMCs whose manager was seen.
    managed: BTreeSet<usize>,
    /// Something that might reach a slice was not readable.
    is_incomplete: bool,
}

/// Result of all scans.
#[derive(Clone, Debug, Default)]
pub(super) struct Reachability {
    scans: u64,
    managed: BTreeSet<usize>,
    emcs: usize,
    is_incomplete: bool,
    suspects: BTreeSet<Grant>,
    /// Slices with two owners.
    pub(super) double_owned: BTreeSet<u32>,
}

/// Periodic scans in the background.
#[derive(Debug)]
pub(super) struct Scanner {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Reachability>,
}

impl Scanner {
    /// Starts to scan these EMCs.
    pub(super) fn start(manager: Connection, emcs: &[v1::Emc]) -> Self {
        let local: Vec<Emc> = emcs.iter().filter_map(Emc::local).collect();
        let reachability = Reachability { emcs: emcs.len(), ..Reachability::default() };
        let (stop, stopped) = oneshot::channel();
        Self { stop, task: tokio::spawn(scan_until_stopped(stopped, manager, local, reachability)) }
    }

    /// Scans twice more and returns the result of all scans.
    pub(super) async fn end(self) -> Reachability {
        // It ends on a dropped sender as well.
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
        // Without the manager there is no ledger to compare with; two grants of a slice are still
        // detected.
        let ledger = lists::slices(manager, 0, u32::MAX).await.unwrap_or_default();
        let emcs = emcs.to_vec();
        if let Ok(scan) = tokio::task::spawn_blocking(move || scan(&emcs)).await {
            let current = ledger.into_iter().map(|slice| (slice.slice, slice.epoch)).collect();
            self.add(scan, current);
        }
    }

    /// Adds a scan. A grant has ended when a later one is in the ledger, or reachable.
    fn add(&mut self, scan: Scan, mut current: BTreeMap<u32, u64>) {
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

    /// Returns the reason why owners cannot be checked.
    pub(super) fn unknown_reason(&self) -> Option<&'static str> {
        if self.scans < 2 {
            Some("there were fewer than two scans")
        } else if self.managed.len() < self.emcs {
            Some("not every EMC is emulated and managed on this machine by a manager with a readable /proc")
        } else if self.is_incomplete {
            Some("some mappings in /proc are not readable; run as root")
        } else {
            None
        }
    }
}

impl Emc {
    fn local(emc: &v1::Emc) -> Option<Self> {
        let folder = fs::canonicalize(&emc.path).ok().filter(|_| emc.driver == EMULATED)?;
        Some(Self { folder, first: emc.first_slice, slices: emc.slices })
    }

    /// Returns the grant at a path, if it belongs to this EMC.
    fn grant(&self, path: &Path) -> Option<Grant> {
        let name = path.strip_prefix(&self.folder).ok()?.strip_prefix("slices").ok()?.to_str()?;
        let mut parts = name.split('.');
        let index: u32 = parts.next()?.parse().ok().filter(|index| *index < self.slices)?;
        Some(Grant { slice: self.first + index, epoch: parts.next()?.parse().ok()? })
    }
}

/// Scans every process once.
fn scan(emcs: &[Emc]) -> Scan {
    let mut scan = Scan::default();
    let Ok(processes) = fs::read_dir("/proc") else { return scan };
    let is_process = |path: &Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    for process in processes.flatten().map(|entry| entry.path()).filter(|path| is_process(path)) {
        // Processes end, and those of other users are inaccessible: they are skipped.
        let _ = scan.process(&process, emcs);
    }
    scan
}

impl Scan {
    fn process(&mut self, process: &Path, emcs: &[Emc]) -> io::Result<()> {
        let mut open = Vec::new();
        for entry in fs::read_dir(process.join("fd"))?.flatten() {
            if let Ok(target) = fs::read_link(entry.path()) {
                open.push((target, entry.path()));
            }
        }
        let holds_lock = |(n, emc): (usize, &Emc)| {
            let lock = emc.folder.join(LOCK);
            open.iter().any(|(target, _)| *target == lock).then_some(n)
        };
        let managed: Vec<usize> = emcs.iter().enumerate().filter_map(holds_lock).collect();
        if !managed.is_empty() {
            self.managed.extend(managed);
            return Ok(());
        }
        for (target, link) in open {
            self.add_target(&target, &link, emcs);
        }
        self.mappings(process, &fs::read_to_string(process.join("maps"))?, emcs);
        Ok(())
    }

    fn mappings(&mut self, process: &Path, maps: &str, emcs: &[Emc]) {
        for line in maps.lines() {
            let mut columns = line.splitn(6, ' ');
            if let (Some(range), Some(path)) = (columns.next(), columns.nth(4)) {
                let target = Path::new(path.trim_start());
                self.add_target(target, &process.join("map_files").join(range), emcs);
            }
        }
    }

    /// Adds the grant at `target` if its file, opened through `link`, is not empty.
    fn add_target(&mut self, target: &Path, link: &Path, emcs: &[Emc]) {
        let text = target.to_str().unwrap_or_default();
        let (path, deleted) = match text.strip_suffix(DELETED) {
            Some(path) => (Path::new(path), true),
            None => (target, false),
        };
        let Some(grant) = emcs.iter().find_map(|emc| emc.grant(path)) else { return };
        match fs::metadata(link) {
            Ok(file) if file.len() > 0 => drop(self.reachable.insert(grant)),
            Ok(_) => {}
            // A file with a name is not empty: a revocation removes both.
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

    /// Creates a device whose files this process opens.
    fn device() -> (tempfile::TempDir, Vec<Emc>) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("slices")).unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let emc =
            v1::Emc { path, driver: EMULATED.into(), first_slice: 100, slices: 8, ..Default::default() };
        let local = Emc::local(&emc).unwrap();
        (folder, vec![local])
    }

    fn grant(folder: &tempfile::TempDir, name: &str) -> fs::File {
        let file = fs::File::create_new(folder.path().join("slices").join(name)).unwrap();
        file.set_len(4096).unwrap();
        file
    }

    fn reach(emcs: &[Emc]) -> Vec<(u32, u64)> {
        scan(emcs).reachable.into_iter().map(|grant| (grant.slice, grant.epoch)).collect()
    }

    #[test]
    fn open_grant_is_reachable_until_revoked() {
        let (folder, emcs) = device();
        let file = grant(&folder, "00003.7.h1");
        assert_eq!(reach(&emcs), [(103, 7)]);
        fs::remove_file(folder.path().join("slices/00003.7.h1")).unwrap();
        assert_eq!(reach(&emcs), [(103, 7)], "an unlinked file is still reachable");
        file.set_len(0).unwrap();
        assert_eq!(reach(&emcs), []);
    }

    #[test]
    fn mapped_grant_is_reachable_after_descriptor_is_closed() {
        let (folder, emcs) = device();
        let path = folder.path().join("slices/00001.2.h0");
        let file = fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(4096).unwrap();
        let mapping =
            vm_memory::MmapRegion::<()>::from_file(vm_memory::FileOffset::new(file, 0), 4096).unwrap();
        assert_eq!(reach(&emcs), [(101, 2)]);
        drop(mapping);
        assert_eq!(reach(&emcs), []);
    }

    #[test]
    fn manager_is_recognized_by_lock_and_owns_nothing() {
        let (folder, emcs) = device();
        let _grant = grant(&folder, "00003.7.h1");
        assert!(scan(&emcs).managed.is_empty());
        let _lock = fs::File::create(folder.path().join(LOCK)).unwrap();
        assert_eq!(scan(&emcs).managed.len(), 1);
        assert_eq!(reach(&emcs), []);
    }

    fn scans(scans: &[&[(u32, u64)]], ledger: &[(u32, u64)]) -> Vec<u32> {
        let mut reachability = Reachability::default();
        for scan in scans {
            let grants = scan.iter().map(|(slice, epoch)| Grant { slice: *slice, epoch: *epoch });
            let scan = Scan { reachable: grants.collect(), ..Scan::default() };
            reachability.add(scan, ledger.iter().copied().collect());
        }
        reachability.double_owned.into_iter().collect()
    }

    #[test]
    fn two_reachable_grants_of_slice_are_two_owners() {
        assert_eq!(scans(&[&[(1, 4), (1, 5)], &[(1, 4), (1, 5)]], &[]), [1]);
        assert_eq!(scans(&[&[(1, 4), (2, 5)], &[(1, 4), (2, 5)]], &[]), [0; 0]);
    }

    #[test]
    fn grant_superseded_in_ledger_is_second_owner() {
        assert_eq!(scans(&[&[(1, 4)], &[(1, 4)]], &[(1, 5)]), [1]);
        assert_eq!(scans(&[&[(1, 5)], &[(1, 5)]], &[(1, 5)]), [0; 0]);
    }

    #[test]
    fn ownership_change_during_scan_is_not_second_owner() {
        assert_eq!(scans(&[&[(1, 4), (1, 5)], &[(1, 5)], &[(1, 5), (1, 6)]], &[]), [0; 0]);
    }

    #[test]
    fn remote_device_has_unknown_owners() {
        let remote = v1::Emc { path: "/nowhere".into(), driver: EMULATED.into(), ..Default::default() };
        assert!(Emc::local(&remote).is_none());
        let reachability = Reachability { scans: 9, emcs: 1, ..Reachability::default() };
        assert!(reachability.unknown_reason().is_some());
        assert!(Reachability { managed: [0].into(), ..reachability }.unknown_reason().is_none());
    }
}
