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

/// The driver whose grants are files.
const EMULATED: &str = "emulated";
/// The file by which a manager has an EMC to itself.
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

/// A grant, as its file is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    /// Numbered over the rack.
    slice: u32,
    epoch: u64,
}

/// Result of one scan.
#[derive(Clone, Debug, Default)]
struct Look {
    /// Grants within reach of some process other than the manager.
    reach: BTreeSet<Grant>,
    /// EMCs whose manager was seen.
    managed: BTreeSet<usize>,
    /// Whether something could not be looked at that might reach a slice.
    blind: bool,
}

/// Result of all scans.
#[derive(Clone, Debug, Default)]
pub(super) struct Reach {
    looks: u64,
    managed: BTreeSet<usize>,
    emcs: usize,
    blind: bool,
    suspects: BTreeSet<Grant>,
    /// Slices with two owners.
    pub(super) double: BTreeSet<u32>,
}

/// Looks again and again in the background.
#[derive(Debug)]
pub(super) struct Looking {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Reach>,
}

impl Looking {
    /// Begins to look at these EMCs.
    pub(super) fn start(to: Connection, emcs: &[v1::Emc]) -> Self {
        let here: Vec<Emc> = emcs.iter().filter_map(Emc::here).collect();
        let reach = Reach { emcs: emcs.len(), ..Reach::default() };
        let (stop, stopped) = oneshot::channel();
        Self { stop, task: tokio::spawn(look_until(stopped, to, here, reach)) }
    }

    /// Looks twice more; then what all looks came to.
    pub(super) async fn end(self) -> Reach {
        // It ends on a dropped sender as well.
        drop(self.stop);
        self.task.await.unwrap_or_default()
    }
}

async fn look_until(
    mut stopped: oneshot::Receiver<()>,
    to: Connection,
    emcs: Vec<Emc>,
    mut reach: Reach,
) -> Reach {
    loop {
        reach.once(&to, &emcs).await;
        tokio::select! {
            _ = &mut stopped => break,
            () = tokio::time::sleep(REPLAY_CHECK_INTERVAL.as_duration()) => {}
        }
    }
    for _ in 0..2 {
        reach.once(&to, &emcs).await;
    }
    reach
}

impl Reach {
    async fn once(&mut self, to: &Connection, emcs: &[Emc]) {
        // While the manager is away there is no ledger to compare with; two grants at once are wrong without one.
        let ledger = lists::slices(to, 0, u32::MAX).await.unwrap_or_default();
        let emcs = emcs.to_vec();
        if let Ok(look) = tokio::task::spawn_blocking(move || look(&emcs)).await {
            let current = ledger.into_iter().map(|slice| (slice.slice, slice.epoch)).collect();
            self.add(look, current);
        }
    }

    /// A grant is over when a later one is in the ledger, or within reach.
    fn add(&mut self, look: Look, mut current: BTreeMap<u32, u64>) {
        for grant in &look.reach {
            let newest = current.entry(grant.slice).or_default();
            *newest = grant.epoch.max(*newest);
        }
        let over = look.reach.into_iter().filter(|grant| grant.epoch < current[&grant.slice]);
        let suspects: BTreeSet<Grant> = over.collect();
        self.double.extend(suspects.intersection(&self.suspects).map(|grant| grant.slice));
        self.suspects = suspects;
        self.managed.extend(look.managed);
        self.blind |= look.blind;
        self.looks += 1;
    }

    /// Returns the reason why owners cannot be checked.
    pub(super) fn unknown(&self) -> Option<&'static str> {
        if self.looks < 2 {
            Some("nobody looked twice")
        } else if self.managed.len() < self.emcs {
            Some("not every EMC is emulated and run by a manager on this machine whose /proc may be read")
        } else if self.blind {
            Some("some mappings in /proc may not be looked at; run as root")
        } else {
            None
        }
    }
}

impl Emc {
    fn here(emc: &v1::Emc) -> Option<Self> {
        let folder = fs::canonicalize(&emc.path).ok().filter(|_| emc.driver == EMULATED)?;
        Some(Self { folder, first: emc.first_slice, slices: emc.slices })
    }

    /// The grant behind a path, if it is one of this EMC.
    fn grant(&self, path: &Path) -> Option<Grant> {
        let name = path.strip_prefix(&self.folder).ok()?.strip_prefix("slices").ok()?.to_str()?;
        let mut parts = name.split('.');
        let index: u32 = parts.next()?.parse().ok().filter(|index| *index < self.slices)?;
        Some(Grant { slice: self.first + index, epoch: parts.next()?.parse().ok()? })
    }
}

/// Looks at every process once.
fn look(emcs: &[Emc]) -> Look {
    let mut look = Look::default();
    let Ok(processes) = fs::read_dir("/proc") else { return look };
    let is_process = |path: &Path| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    for process in processes.flatten().map(|entry| entry.path()).filter(|path| is_process(path)) {
        // Processes end, and those of other users are inaccessible: they are skipped.
        let _ = look.process(&process, emcs);
    }
    look
}

impl Look {
    fn process(&mut self, process: &Path, emcs: &[Emc]) -> io::Result<()> {
        let mut open = Vec::new();
        for entry in fs::read_dir(process.join("fd"))?.flatten() {
            if let Ok(target) = fs::read_link(entry.path()) {
                open.push((target, entry.path()));
            }
        }
        let locks = |(n, emc): (usize, &Emc)| {
            let lock = emc.folder.join(LOCK);
            open.iter().any(|(target, _)| *target == lock).then_some(n)
        };
        let managed: Vec<usize> = emcs.iter().enumerate().filter_map(locks).collect();
        if !managed.is_empty() {
            self.managed.extend(managed);
            return Ok(());
        }
        for (target, link) in open {
            self.reaches(&target, &link, emcs);
        }
        self.mappings(process, &fs::read_to_string(process.join("maps"))?, emcs);
        Ok(())
    }

    fn mappings(&mut self, process: &Path, maps: &str, emcs: &[Emc]) {
        for line in maps.lines() {
            let mut columns = line.splitn(6, ' ');
            if let (Some(range), Some(path)) = (columns.next(), columns.nth(4)) {
                let target = Path::new(path.trim_start());
                self.reaches(target, &process.join("map_files").join(range), emcs);
            }
        }
    }

    /// Notes a grant behind `target` if it still has bytes, which `link` shows.
    fn reaches(&mut self, target: &Path, link: &Path, emcs: &[Emc]) {
        let text = target.to_str().unwrap_or_default();
        let (path, deleted) = match text.strip_suffix(DELETED) {
            Some(path) => (Path::new(path), true),
            None => (target, false),
        };
        let Some(grant) = emcs.iter().find_map(|emc| emc.grant(path)) else { return };
        match fs::metadata(link) {
            Ok(file) if file.len() > 0 => drop(self.reach.insert(grant)),
            Ok(_) => {}
            // A file that has a name has its bytes: only a revocation takes both.
            Err(errno) if errno.kind() == io::ErrorKind::PermissionDenied && deleted => self.blind = true,
            Err(errno) if errno.kind() == io::ErrorKind::PermissionDenied => drop(self.reach.insert(grant)),
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with these files, and this process as the one that opens them.
    fn device() -> (tempfile::TempDir, Vec<Emc>) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("slices")).unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let emc =
            v1::Emc { path, driver: EMULATED.into(), first_slice: 100, slices: 8, ..Default::default() };
        let here = Emc::here(&emc).unwrap();
        (folder, vec![here])
    }

    fn grant(folder: &tempfile::TempDir, name: &str) -> fs::File {
        let file = fs::File::create_new(folder.path().join("slices").join(name)).unwrap();
        file.set_len(4096).unwrap();
        file
    }

    fn reach(emcs: &[Emc]) -> Vec<(u32, u64)> {
        look(emcs).reach.into_iter().map(|grant| (grant.slice, grant.epoch)).collect()
    }

    #[test]
    fn an_open_grant_is_within_reach_until_it_is_revoked() {
        let (folder, emcs) = device();
        let file = grant(&folder, "00003.7.h1");
        assert_eq!(reach(&emcs), [(103, 7)]);
        fs::remove_file(folder.path().join("slices/00003.7.h1")).unwrap();
        assert_eq!(reach(&emcs), [(103, 7)], "without a name it is still there");
        file.set_len(0).unwrap();
        assert_eq!(reach(&emcs), []);
    }

    #[test]
    fn a_mapped_grant_is_within_reach_after_its_descriptor_is_closed() {
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
    fn a_manager_owns_nothing_and_is_known_by_its_lock() {
        let (folder, emcs) = device();
        let _grant = grant(&folder, "00003.7.h1");
        assert!(look(&emcs).managed.is_empty());
        let _lock = fs::File::create(folder.path().join(LOCK)).unwrap();
        assert_eq!(look(&emcs).managed.len(), 1);
        assert_eq!(reach(&emcs), []);
    }

    fn looks(looks: &[&[(u32, u64)]], ledger: &[(u32, u64)]) -> Vec<u32> {
        let mut reach = Reach::default();
        for look in looks {
            let grants = look.iter().map(|(slice, epoch)| Grant { slice: *slice, epoch: *epoch });
            let look = Look { reach: grants.collect(), ..Look::default() };
            reach.add(look, ledger.iter().copied().collect());
        }
        reach.double.into_iter().collect()
    }

    #[test]
    fn two_grants_of_a_slice_within_reach_are_two_owners() {
        assert_eq!(looks(&[&[(1, 4), (1, 5)], &[(1, 4), (1, 5)]], &[]), [1]);
        assert_eq!(looks(&[&[(1, 4), (2, 5)], &[(1, 4), (2, 5)]], &[]), [0; 0]);
    }

    #[test]
    fn a_grant_that_the_ledger_has_replaced_is_a_second_owner() {
        assert_eq!(looks(&[&[(1, 4)], &[(1, 4)]], &[(1, 5)]), [1]);
        assert_eq!(looks(&[&[(1, 5)], &[(1, 5)]], &[(1, 5)]), [0; 0]);
    }

    #[test]
    fn a_change_of_hands_seen_half_way_is_no_second_owner() {
        assert_eq!(looks(&[&[(1, 4), (1, 5)], &[(1, 5)], &[(1, 5), (1, 6)]], &[]), [0; 0]);
    }

    #[test]
    fn nothing_is_said_of_a_device_that_is_not_here() {
        let far = v1::Emc { path: "/nowhere".into(), driver: EMULATED.into(), ..Default::default() };
        assert!(Emc::here(&far).is_none());
        let reach = Reach { looks: 9, emcs: 1, ..Reach::default() };
        assert!(reach.unknown().is_some());
        assert!(Reach { managed: [0].into(), ..reach }.unknown().is_none());
    }
}
