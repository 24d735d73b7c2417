//! Follows the manager's capacity snapshots, across its restarts. Each is applied to
//! [`FreeCapacity`] at once, and wakes waiting tasks.

use std::sync::{Arc, Mutex, MutexGuard};

use cli_runtime::{Connection, Failure};
use proto::v1;
use sim::packing::Capacity;
use tokio::{sync::watch, task::JoinHandle};
use tonic::Streaming;

use super::{calls, capacity, capacity::FreeCapacity};

/// State of the watcher.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WatcherState {
    /// Number of returns of the manager.
    pub(super) returns: u64,
}

/// Notifies waiting tasks of newer snapshots.
#[derive(Clone, Debug)]
pub(super) struct SnapshotReceiver(watch::Receiver<WatcherState>);

impl SnapshotReceiver {
    /// Returns the number of returns of the manager.
    pub(super) fn returns(&self) -> u64 {
        self.0.borrow().returns
    }

    /// Ignores snapshots before this call.
    pub(super) fn mark_seen(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for a newer snapshot; for ever once the watcher has ended.
    pub(super) async fn wait_for_newer(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Follows the snapshots until its handle is aborted or the manager is away for too long. The first
/// snapshot exists already.
pub(super) async fn start(
    manager: &Connection,
    free: &Arc<Mutex<FreeCapacity>>,
) -> Result<(JoinHandle<Failure>, SnapshotReceiver), Failure> {
    let snapshots = open(manager).await?;
    let (mut sender, receiver) = watch::channel(WatcherState::default());
    let (manager, free) = (manager.clone(), Arc::clone(free));
    let mut snapshots = first(snapshots, |capacity| lock(&free).apply(capacity)).await?;
    let task = tokio::spawn(async move {
        loop {
            let failure = follow(&mut snapshots, &free, &mut sender).await;
            let reopen =
                || async { first(open(&manager).await?, |capacity| lock(&free).apply(capacity)).await };
            snapshots = match calls::retry_while_unavailable(reopen).await {
                Ok(snapshots) => snapshots,
                Err(_) => return failure,
            };
            sender.send_modify(|state| state.returns += 1);
        }
    });
    Ok((task, SnapshotReceiver(receiver)))
}

/// Returns a snapshot that contains every acknowledged request.
pub(super) async fn fresh(manager: &Connection, free: &Mutex<FreeCapacity>) -> Result<(), Failure> {
    calls::retry_while_unavailable(|| async {
        first(open(manager).await?, |capacity| lock(free).apply(capacity)).await
    })
    .await
    .map(drop)
}

/// The same without calls in progress: the snapshot is exact.
pub(super) async fn exact(manager: &Connection, free: &Mutex<FreeCapacity>) -> Result<(), Failure> {
    calls::retry_while_unavailable(|| async {
        first(open(manager).await?, |capacity| lock(free).apply_exact(capacity)).await
    })
    .await
    .map(drop)
}

fn lock(free: &Mutex<FreeCapacity>) -> MutexGuard<'_, FreeCapacity> {
    free.lock().expect("no holder of this lock panics")
}

async fn open(manager: &Connection) -> Result<Streaming<v1::Capacity>, Failure> {
    manager.call(manager.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await
}

async fn first(
    mut snapshots: Streaming<v1::Capacity>,
    apply: impl FnOnce(Capacity),
) -> Result<Streaming<v1::Capacity>, Failure> {
    match snapshots.message().await? {
        Some(snapshot) => apply(capacity::from_snapshot(snapshot)?),
        None => return Err(Failure::Protocol("no capacity snapshot".to_owned())),
    }
    Ok(snapshots)
}

/// Follows a stream to its end, and returns the reason.
async fn follow(
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
