//! Task that receives capacity snapshots of the manager, also across restarts of the manager. Each
//! snapshot is applied to [`FreeCapacity`] at once and wakes waiting tasks.

use std::sync::{Arc, Mutex, MutexGuard};

use cli_runtime::{Connection, Failure};
use proto::v1;
use sim::packing::Capacity;
use tokio::{sync::watch, task::JoinHandle};
use tonic::Streaming;

use super::{calls, capacity, capacity::FreeCapacity};

/// State of the watcher, published with each snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WatcherState {
    /// Number of times that the manager became available again.
    pub(super) reconnect_count: u64,
}

/// Handle by which tasks wait for newer snapshots.
#[derive(Clone, Debug)]
pub(super) struct SnapshotReceiver(watch::Receiver<WatcherState>);

impl SnapshotReceiver {
    /// Returns the number of times that the manager became available again.
    pub(super) fn reconnect_count(&self) -> u64 {
        self.0.borrow().reconnect_count
    }

    /// Marks all earlier snapshots as seen, so that [`Self::wait_for_newer_snapshot`] ignores them.
    pub(super) fn mark_snapshot_seen(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for a newer snapshot. Waits forever if the watcher has ended.
    pub(super) async fn wait_for_newer_snapshot(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Applies the first snapshot, and starts a task that applies all further snapshots. The task ends
/// if the manager is unavailable for too long.
pub(super) async fn start(
    manager: &Connection,
    free: &Arc<Mutex<FreeCapacity>>,
) -> Result<(JoinHandle<Failure>, SnapshotReceiver), Failure> {
    let snapshots = open_stream(manager).await?;
    let (mut sender, receiver) = watch::channel(WatcherState::default());
    let (manager, free) = (manager.clone(), Arc::clone(free));
    let mut snapshots = apply_first_snapshot(snapshots, |capacity| lock(&free).apply(capacity)).await?;
    let task = tokio::spawn(async move {
        loop {
            let failure = follow_stream(&mut snapshots, &free, &mut sender).await;
            let reopen = || async {
                apply_first_snapshot(open_stream(&manager).await?, |capacity| lock(&free).apply(capacity))
                    .await
            };
            snapshots = match calls::retry_while_unavailable(reopen).await {
                Ok(snapshots) => snapshots,
                Err(_) => return failure,
            };
            sender.send_modify(|state| state.reconnect_count += 1);
        }
    });
    Ok((task, SnapshotReceiver(receiver)))
}

/// Requests and applies a new snapshot, which reflects every acknowledged request.
pub(super) async fn apply_fresh_snapshot(
    manager: &Connection,
    free: &Mutex<FreeCapacity>,
) -> Result<(), Failure> {
    calls::retry_while_unavailable(|| async {
        apply_first_snapshot(open_stream(manager).await?, |capacity| lock(free).apply(capacity)).await
    })
    .await
    .map(drop)
}

/// Requests and applies a new snapshot while no call is in progress, so that it is exact.
pub(super) async fn apply_exact_snapshot(
    manager: &Connection,
    free: &Mutex<FreeCapacity>,
) -> Result<(), Failure> {
    calls::retry_while_unavailable(|| async {
        apply_first_snapshot(open_stream(manager).await?, |capacity| {
            lock(free).apply_exact_capacity(capacity)
        })
        .await
    })
    .await
    .map(drop)
}

fn lock(free: &Mutex<FreeCapacity>) -> MutexGuard<'_, FreeCapacity> {
    free.lock().expect("no holder of this lock panics")
}

async fn open_stream(manager: &Connection) -> Result<Streaming<v1::Capacity>, Failure> {
    manager.call(manager.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await
}

async fn apply_first_snapshot(
    mut snapshots: Streaming<v1::Capacity>,
    apply: impl FnOnce(Capacity),
) -> Result<Streaming<v1::Capacity>, Failure> {
    match snapshots.message().await? {
        Some(snapshot) => apply(capacity::from_snapshot(snapshot)?),
        None => return Err(Failure::Protocol("the stream of capacity snapshots is empty".to_owned())),
    }
    Ok(snapshots)
}

/// Applies all snapshots of a stream until it ends, and returns the error that ended it.
async fn follow_stream(
    snapshots: &mut Streaming<v1::Capacity>,
    free: &Mutex<FreeCapacity>,
    sender: &mut watch::Sender<WatcherState>,
) -> Failure {
    loop {
        let applied = match snapshots.message().await {
            Ok(Some(snapshot)) => {
                capacity::from_snapshot(snapshot).map(|capacity| lock(free).apply(capacity))
            }
            Ok(None) => Err(Failure::Protocol("the stream of capacity snapshots ended".to_owned())),
            Err(status) => Err(status.into()),
        };
        match applied {
            Ok(()) => sender.send_modify(|_| ()),
            Err(failure) => return failure,
        }
    }
}
