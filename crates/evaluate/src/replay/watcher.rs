//! Follows the manager's capacity snapshots, across its restarts. Each is applied to [`Free`] at
//! once, and wakes waiting tasks.

use std::sync::{Arc, Mutex, MutexGuard};

use cli_runtime::{Connection, Failure};
use proto::v1;
use sim::packing::Capacity;
use tokio::{sync::watch, task::JoinHandle};
use tonic::Streaming;

use super::{calls, capacity, capacity::Free};

/// State of the watcher.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    /// Number of returns of the manager.
    pub(super) returns: u64,
}

/// Notifies waiting tasks of newer snapshots.
#[derive(Clone, Debug)]
pub(super) struct News(watch::Receiver<Heard>);

impl News {
    /// Returns the number of returns of the manager.
    pub(super) fn returns(&self) -> u64 {
        self.0.borrow().returns
    }

    /// Ignores snapshots before this call.
    pub(super) fn seen(&mut self) {
        self.0.mark_unchanged();
    }

    /// Waits for a newer snapshot; for ever once the watcher has ended.
    pub(super) async fn newer(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Follows the snapshots until its handle is aborted or the manager is away for too long. The first
/// snapshot exists already.
pub(super) async fn start(
    to: &Connection,
    free: &Arc<Mutex<Free>>,
) -> Result<(JoinHandle<Failure>, News), Failure> {
    let pictures = open(to).await?;
    let (mut tell, news) = watch::channel(Heard::default());
    let (to, free) = (to.clone(), Arc::clone(free));
    let mut pictures = first(pictures, |seen| lock(&free).adopt(seen)).await?;
    let following = tokio::spawn(async move {
        loop {
            let ended = follow(&mut pictures, &free, &mut tell).await;
            let again = || async { first(open(&to).await?, |seen| lock(&free).adopt(seen)).await };
            pictures = match calls::patiently(again).await {
                Ok(pictures) => pictures,
                Err(_) => return ended,
            };
            tell.send_modify(|heard| heard.returns += 1);
        }
    });
    Ok((following, News(news)))
}

/// Returns a snapshot that contains every acknowledged request.
pub(super) async fn fresh(to: &Connection, free: &Mutex<Free>) -> Result<(), Failure> {
    calls::patiently(|| async { first(open(to).await?, |seen| lock(free).adopt(seen)).await }).await.map(drop)
}

/// The same without calls in progress: the snapshot is exact.
pub(super) async fn calm(to: &Connection, free: &Mutex<Free>) -> Result<(), Failure> {
    calls::patiently(|| async { first(open(to).await?, |seen| lock(free).adopt_calm(seen)).await })
        .await
        .map(drop)
}

fn lock(free: &Mutex<Free>) -> MutexGuard<'_, Free> {
    free.lock().expect("no holder of this lock panics")
}

async fn open(to: &Connection) -> Result<Streaming<v1::Capacity>, Failure> {
    to.call(to.scheduler().watch_capacity(v1::WatchCapacityRequest {})).await
}

async fn first(
    mut pictures: Streaming<v1::Capacity>,
    adopt: impl FnOnce(Capacity),
) -> Result<Streaming<v1::Capacity>, Failure> {
    match pictures.message().await? {
        Some(picture) => adopt(capacity::seen(picture)?),
        None => return Err(Failure::Protocol("no picture of what is free".to_owned())),
    }
    Ok(pictures)
}

/// Follows a stream to its end, and returns the reason.
async fn follow(
    pictures: &mut Streaming<v1::Capacity>,
    free: &Mutex<Free>,
    tell: &mut watch::Sender<Heard>,
) -> Failure {
    loop {
        let adopted = match pictures.message().await {
            Ok(Some(picture)) => capacity::seen(picture).map(|seen| lock(free).adopt(seen)),
            Ok(None) => Err(Failure::Protocol("the pictures of what is free ended".to_owned())),
            Err(status) => Err(status.into()),
        };
        match adopted {
            Ok(()) => tell.send_modify(|_| ()),
            Err(ended) => return ended,
        }
    }
}
