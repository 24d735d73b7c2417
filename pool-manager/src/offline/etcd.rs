//! Commands for a store in etcd. Those that write take part in the election, so that no manager serves the rack
//! at the same time.

use std::{fs, path::Path, time::Duration};

use super::{OfflineError, RestoredStore, ledger_generation};
use crate::{
    config::{Config, Etcd},
    election::{self, Election, HandOver, Leader, ManagerEntry},
    etcd_connection,
    store::{
        backup::{self, BackupCopy, BackupError},
        disk::DATABASE_FILE,
        etcd::Cluster,
        is_empty,
    },
    store_folder,
};

/// Time after the end of the lease of an earlier manager in which the command must be elected.
const ELECTION_MARGIN: Duration = Duration::from_secs(3);
/// Time in which a leader completes its requests and another manager loads the ledger, in addition to two leases.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval at which a transfer looks for the new leader.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Name of the temporary copy of a backup in the folder of the manager.
const COPY_FILE: &str = "restore.partial";

/// Connects to the etcd of `rack.toml`.
pub(super) fn connect(path: &Path, etcd: &Etcd) -> Result<Cluster, OfflineError> {
    etcd_connection::connect(etcd).map_err(|error| OfflineError::Etcd { path: path.to_owned(), error })
}

/// Runs `write` as the elected manager, and ends the lease.
fn write_as_leader<T>(
    cluster: &Cluster,
    etcd: &Etcd,
    write: impl FnOnce(&Leader) -> Result<T, OfflineError>,
) -> Result<T, OfflineError> {
    let mut leader = elect(cluster, etcd)?;
    leader.ignore_hand_over();
    let written = write(&leader);
    cluster.block_on(leader.resign());
    written
}

/// Waits until this process is elected, for at most the lease of a manager that ended a moment ago.
fn elect(cluster: &Cluster, etcd: &Etcd) -> Result<Leader, OfflineError> {
    let entry = ManagerEntry::new(etcd.name.to_string(), etcd.advertise.clone(), 0);
    let election = Election::new(cluster.clone(), &entry, etcd.lease);
    let timeout = etcd.lease.as_duration() + ELECTION_MARGIN;
    let elected = cluster.block_on(async move {
        let mut campaign = election.campaign();
        let elected = tokio::time::timeout(timeout, election.win(&mut campaign)).await.ok();
        if elected.is_none() {
            election.withdraw(campaign).await;
        }
        elected
    });
    if let Some(leader) = elected.transpose()? {
        return Ok(leader);
    }
    let connection = cluster.clone();
    let leader = cluster.block_on(async move { election::find_leader(&connection).await })?;
    let leader = leader.map(|(leader, _)| format!("{} at {}", leader.name, leader.address));
    Err(OfflineError::InUse {
        store: cluster.location(),
        leader: leader.unwrap_or_else(|| "that is being elected".to_owned()),
    })
}

/// Creates a rack with UUID `uuid` in etcd.
pub(super) fn init(path: &Path, config: &Config, etcd: &Etcd, uuid: &str) -> Result<(), OfflineError> {
    let cluster = connect(path, etcd)?;
    cluster.check_prefix()?;
    write_as_leader(&cluster, etcd, |leader| {
        let mut store = leader.elected().open_store()?;
        let location = cluster.location();
        Ok(store_folder::init_in_etcd(&mut store, &location, &config.manager.folder, uuid, path)?)
    })
}

/// Replaces the store in etcd by a backup. An existing store is first saved in a file.
pub(super) fn restore(
    path: &Path,
    config: &Config,
    etcd: &Etcd,
    (from, force, unix_seconds): (&Path, bool, u64),
) -> Result<RestoredStore, OfflineError> {
    let cluster = connect(path, etcd)?;
    cluster.check_prefix()?;
    let folder = &config.manager.folder;
    fs::create_dir_all(folder).map_err(|errno| BackupError::Io {
        operation: "create",
        path: folder.clone(),
        errno,
    })?;
    let mut copy = BackupCopy::open(from, &folder.join(COPY_FILE))?;
    write_as_leader(&cluster, etcd, |leader| {
        let mut existing = cluster.read_unchecked()?;
        let mut saved = None;
        if !is_empty(existing.as_mut())? {
            if !force {
                return Err(BackupError::Occupied { path: cluster.location() }.into());
            }
            let file = folder.join(format!("{DATABASE_FILE}.replaced-{unix_seconds}"));
            backup::backup(existing.as_mut(), &file)?;
            saved = Some(file);
        }
        let before = ledger_generation(existing.as_mut()).unwrap_or(0);
        drop(existing);
        let mut store = leader.elected().replace_store()?;
        let generation = copy.restore(&mut store, before, unix_seconds, &ledger_generation)?;
        Ok(RestoredStore { generation, replaced: saved })
    })
}

/// Requests that the manager `to`, or the first standby, takes over, and waits for it.
pub(super) fn transfer(path: &Path, etcd: &Etcd, to: Option<&str>) -> Result<ManagerEntry, OfflineError> {
    let cluster = connect(path, etcd)?;
    let (etcd, to, worker) = (etcd.clone(), to.map(str::to_owned), cluster.clone());
    worker.block_on(async move {
        let managers = election::list(&cluster).await?;
        let next = choose_next(&managers, to.as_deref()).map_err(OfflineError::Transfer)?.clone();
        // The leader completes its requests, and the other manager loads the ledger.
        let timeout = TRANSFER_TIMEOUT + 2 * etcd.lease.as_duration();
        let before = election::find_leader(&cluster).await?.map(|(_, token)| token);
        let request = HandOver::request(&cluster, &next.name, timeout).await?;
        let taken_over = tokio::time::timeout(timeout, wait_for_leader(&cluster, &next.name, before)).await;
        request.withdraw().await;
        let problem = || format!("{} did not take over within {timeout:?}: see its log", next.name);
        taken_over.unwrap_or_else(|_| Err(OfflineError::Transfer(problem())))
    })
}

/// Waits until the manager `next` serves requests as the leader. Ends early if it does not run any more, or if another
/// manager becomes the leader. `before` is the fencing token of the leader that hands over.
async fn wait_for_leader(
    cluster: &Cluster,
    next: &str,
    before: Option<i64>,
) -> Result<ManagerEntry, OfflineError> {
    let mut is_elected = false;
    loop {
        // A call that etcd does not answer in time is repeated.
        if let (Ok(leader), Ok(managers)) =
            (election::find_leader(cluster).await, election::list(cluster).await)
        {
            match leader {
                Some((leader, _)) if leader.name == next => {
                    if leader.is_serving != Some(false) {
                        return Ok(leader);
                    }
                    is_elected = true;
                }
                Some((leader, token)) if is_elected || Some(token) != before => {
                    let problem = format!("{next} could not take over, see its log: {} leads", leader.name);
                    return Err(OfflineError::Transfer(problem));
                }
                _ if !is_elected && !managers.iter().any(|(entry, _)| entry.name == next) => {
                    let problem = format!("{next} does not run any more, or does not answer");
                    return Err(OfflineError::Transfer(problem));
                }
                _ => {}
            }
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Returns the standby that must take over.
fn choose_next<'a>(
    managers: &'a [(ManagerEntry, bool)],
    to: Option<&str>,
) -> Result<&'a ManagerEntry, String> {
    let names = || managers.iter().map(|(entry, _)| entry.name.as_str()).collect::<Vec<_>>().join(", ");
    if !managers.iter().any(|(_, is_leader)| *is_leader) {
        return Err("there is no leader".to_owned());
    }
    let chosen = managers.iter().find(|(entry, is_leader)| to.map_or(!is_leader, |to| entry.name == to));
    match chosen {
        Some((entry, false)) => Ok(entry),
        Some((entry, true)) => Err(format!("{} is already the leader", entry.name)),
        None => Err(match to {
            Some(to) => {
                format!("manager {} does not run; running managers: {}", units::QuotedText(to), names())
            }
            None => "no other manager of this rack runs".to_owned(),
        }),
    }
}
