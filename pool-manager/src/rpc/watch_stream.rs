//! Streams the current state and its changes to watchers. A slow watcher misses intermediate states
//! but receives the newest state. Slow watchers do not delay others.

use std::{collections::BTreeMap, pin::Pin, time::Duration};

use pool::manager::Manager;
use proto::v1 as wire;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Response, Status};

use super::{ServiceContext, status::stopping_status};
use crate::driver::WatchService;

/// Stream of messages to one watcher.
pub(super) type MessageStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Maximum number of messages queued for one watcher.
const QUEUED_MESSAGES_MAX: usize = 16;
/// Minimum interval between two reads of the ledger for one watcher, so that one read covers many
/// changes.
const WATCH_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// Object whose changes are streamed to watchers.
pub(super) trait WatchedObject: Clone + Send + Sync + 'static {
    /// Returns the identity of the object, which does not change.
    fn id(&self) -> String;
    /// Returns whether `newer` has no change that a watcher needs to receive.
    fn is_same(&self, newer: &Self) -> bool;
    /// Returns the rank in a batch of messages; messages with lower ranks are sent first.
    fn rank(&self) -> u8 {
        0
    }
    /// Returns the message that is sent after the object was removed, if any.
    fn removal_message(self) -> Option<Self> {
        None
    }
}

impl WatchedObject for wire::Capacity {
    fn id(&self) -> String {
        String::new() // the stream has only one object
    }

    fn is_same(&self, newer: &Self) -> bool {
        self.hosts == newer.hosts && self.emcs == newer.emcs
    }
}

impl WatchedObject for wire::Migration {
    fn id(&self) -> String {
        format!("{} {} {}", self.reservation, self.kind, self.id)
    }

    /// The list of hosts with free memory changes often, and is sent only with other changes.
    fn is_same(&self, newer: &Self) -> bool {
        let without_hosts = |migration: &Self| {
            let slowdown = migration.slowdown.clone();
            Self { slowdown: slowdown.map(|s| wire::Slowdown { hosts: vec![], ..s }), ..migration.clone() }
        };
        without_hosts(self) == without_hosts(newer)
    }

    fn rank(&self) -> u8 {
        u8::from(self.state() != wire::MigrationState::Open)
    }

    fn removal_message(self) -> Option<Self> {
        Some(Self { state: wire::MigrationState::Withdrawn.into(), ..self })
    }
}

type ObjectsById<T> = BTreeMap<String, T>;

/// Streams the current objects, and each object again when it changes. `copy` copies the state
/// under the ledger's lock, after each change but at most once per [`WATCH_INTERVAL_MIN`].
/// `convert` creates the messages without the lock.
pub(super) fn watch_objects<V: Send + 'static, T: WatchedObject>(
    shared: &ServiceContext,
    copy: impl Fn(&Manager) -> V + Copy + Send + Sync + 'static,
    convert: impl Fn(V) -> Vec<T> + Copy + Send + Sync + 'static,
) -> Result<Response<MessageStream<T>>, Status> {
    let permit = shared.acquire_watch_permit(WatchService::Scheduler)?;
    let mut changed = shared.driver.subscribe_to_notifications();
    let (sender, receiver) = mpsc::channel(QUEUED_MESSAGES_MAX);
    let shared = shared.clone();
    tokio::spawn(async move {
        let _permit = permit;
        let mut seen = ObjectsById::new();
        loop {
            changed.mark_unchanged();
            let Ok(now) = shared.driver.read(|manager, _| copy(manager)) else { return };
            let now: ObjectsById<T> = convert(now).into_iter().map(|object| (object.id(), object)).collect();
            for object in pending_messages(seen, &now) {
                if sender.send(Ok(object)).await.is_err() {
                    return;
                }
            }
            seen = now;
            let next_change = async {
                tokio::time::sleep(WATCH_INTERVAL_MIN).await;
                changed.changed().await
            };
            tokio::select! {
                woken = next_change => if woken.is_err() { return },
                () = sender.closed() => return,
                () = shared.wait_until_stopping() => return drop(sender.send(Err(stopping_status())).await),
            }
        }
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
}

/// Returns the messages that bring a watcher from the state `seen` to the state `now`.
fn pending_messages<T: WatchedObject>(mut seen: ObjectsById<T>, now: &ObjectsById<T>) -> Vec<T> {
    let mut messages: Vec<T> = Vec::new();
    for (id, object) in now {
        if !seen.remove(id).is_some_and(|old| old.is_same(object)) {
            messages.push(object.clone());
        }
    }
    messages.extend(seen.into_values().filter_map(WatchedObject::removal_message));
    messages.sort_by_key(WatchedObject::rank);
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::MigrationState::{self, Accepted, Open, Withdrawn};

    fn objects(migrations: &[(&str, MigrationState)]) -> ObjectsById<wire::Migration> {
        let migration = |(reservation, state): &(&str, MigrationState)| {
            let reservation = (*reservation).to_owned();
            (
                reservation.clone(),
                wire::Migration { reservation, state: (*state).into(), ..Default::default() },
            )
        };
        migrations.iter().map(migration).collect()
    }

    fn messages(
        seen: &[(&str, MigrationState)],
        now: &[(&str, MigrationState)],
    ) -> Vec<(String, MigrationState)> {
        let pending = pending_messages(objects(seen), &objects(now));
        pending.into_iter().map(|m| (m.reservation.clone(), m.state())).collect()
    }

    #[test]
    fn watcher_receives_open_requests_first_and_then_changes() {
        let of = |id: &str, state| (id.to_owned(), state);
        let first = [("r-1", Accepted), ("r-2", Open)];
        assert_eq!(messages(&[], &first), [of("r-2", Open), of("r-1", Accepted)]);
        assert_eq!(messages(&first, &first), []);
        assert_eq!(messages(&first, &[("r-2", Accepted)]), [of("r-2", Accepted), of("r-1", Withdrawn)]);
    }

    #[test]
    fn capacity_is_sent_only_when_it_changes() {
        let capacity = |revision, free| {
            let emcs = vec![wire::EmcCapacity { emc: "e".into(), free_slices: free, slices: 9 }];
            let capacity = wire::Capacity { revision, hosts: Vec::new(), emcs };
            ObjectsById::from([(capacity.id(), capacity)])
        };
        assert_eq!(pending_messages(capacity(1, 4), &capacity(2, 4)).len(), 0);
        assert_eq!(pending_messages(capacity(1, 4), &capacity(2, 3)).len(), 1);
    }
}
