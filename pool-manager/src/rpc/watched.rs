//! Streams of the current state and its changes. A slow watcher sees the newest state, not every
//! intermediate one, and delays no other.

use std::{collections::BTreeMap, pin::Pin, time::Duration};

use pool::manager::Manager;
use proto::v1 as wire;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Response, Status};

use super::{Shared, refused::stopping};

/// Stream of messages.
pub(super) type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Messages queued for a slow watcher.
const WATCH_QUEUED_MAX: usize = 16;
/// Minimum interval between two reads of the ledger for one watcher: many changes share one.
const WATCH_PAUSE: Duration = Duration::from_millis(50);

/// Watched object.
pub(super) trait Watched: Clone + Send + Sync + 'static {
    /// Identity while the rest changes.
    fn id(&self) -> String;
    /// Returns whether a watcher need not receive the newer state.
    fn is_as(&self, newer: &Self) -> bool;
    /// Order of the first messages: lower ones first.
    fn rank(&self) -> u8 {
        0
    }
    /// Returns the message for an object that has disappeared.
    fn gone(self) -> Option<Self> {
        None
    }
}

impl Watched for wire::Capacity {
    fn id(&self) -> String {
        String::new() // there is one object
    }

    fn is_as(&self, newer: &Self) -> bool {
        self.hosts == newer.hosts && self.emcs == newer.emcs
    }
}

impl Watched for wire::Migration {
    fn id(&self) -> String {
        self.reservation.clone()
    }

    fn is_as(&self, newer: &Self) -> bool {
        self == newer
    }

    fn rank(&self) -> u8 {
        u8::from(self.state() != wire::MigrationState::Open)
    }

    fn gone(self) -> Option<Self> {
        Some(Self { state: wire::MigrationState::Withdrawn.into(), ..self })
    }
}

type Shown<T> = BTreeMap<String, T>;

/// Streams the current state, and again whenever it changes. `look` copies it under the ledger's
/// lock, for each watcher after each change but at most once in [`WATCH_PAUSE`]; `show` does the
/// rest.
pub(super) fn watch<V: Send + 'static, T: Watched>(
    shared: &Shared,
    look: impl Fn(&Manager) -> V + Copy + Send + Sync + 'static,
    show: impl Fn(V) -> Vec<T> + Copy + Send + Sync + 'static,
) -> Result<Response<Streamed<T>>, Status> {
    let permit = shared.watch_permit()?;
    let mut changed = shared.driver.changed();
    let (sender, receiver) = mpsc::channel(WATCH_QUEUED_MAX);
    let shared = shared.clone();
    tokio::spawn(async move {
        let _permit = permit;
        let mut shown = Shown::new();
        loop {
            changed.mark_unchanged();
            let Ok(now) = shared.driver.look(|manager, _| look(manager)) else { return };
            let now: Shown<T> = show(now).into_iter().map(|thing| (thing.id(), thing)).collect();
            for thing in news(shown, &now) {
                if sender.send(Ok(thing)).await.is_err() {
                    return;
                }
            }
            shown = now;
            let next_change = async {
                tokio::time::sleep(WATCH_PAUSE).await;
                changed.changed().await
            };
            tokio::select! {
                woken = next_change => if woken.is_err() { return },
                () = sender.closed() => return,
                () = shared.stopped() => return drop(sender.send(Err(stopping())).await),
            }
        }
    });
    Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
}

/// Returns the messages for a watcher that has seen a state.
fn news<T: Watched>(mut seen: Shown<T>, now: &Shown<T>) -> Vec<T> {
    let mut news: Vec<T> = Vec::new();
    for (id, thing) in now {
        if !seen.remove(id).is_some_and(|old| old.is_as(thing)) {
            news.push(thing.clone());
        }
    }
    news.extend(seen.into_values().filter_map(Watched::gone));
    news.sort_by_key(Watched::rank);
    news
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::MigrationState::{self, Accepted, Open, Withdrawn};

    fn shown(migrations: &[(&str, MigrationState)]) -> Shown<wire::Migration> {
        let migration = |(reservation, state): &(&str, MigrationState)| {
            let reservation = (*reservation).to_owned();
            (
                reservation.clone(),
                wire::Migration { reservation, state: (*state).into(), ..Default::default() },
            )
        };
        migrations.iter().map(migration).collect()
    }

    fn told(
        seen: &[(&str, MigrationState)],
        now: &[(&str, MigrationState)],
    ) -> Vec<(String, MigrationState)> {
        let news = news(shown(seen), &shown(now));
        news.into_iter().map(|m| (m.reservation.clone(), m.state())).collect()
    }

    #[test]
    fn a_watcher_is_told_what_is_there_open_requests_first_then_changes_and_withdrawals() {
        let of = |id: &str, state| (id.to_owned(), state);
        let first = [("r-1", Accepted), ("r-2", Open)];
        assert_eq!(told(&[], &first), [of("r-2", Open), of("r-1", Accepted)]);
        assert_eq!(told(&first, &first), []);
        assert_eq!(told(&first, &[("r-2", Accepted)]), [of("r-2", Accepted), of("r-1", Withdrawn)]);
    }

    #[test]
    fn capacity_is_told_again_only_when_something_is_more_or_less_free() {
        let capacity = |revision, free| {
            let emcs = vec![wire::EmcCapacity { emc: "e".into(), free_slices: free, slices: 9 }];
            let capacity = wire::Capacity { revision, hosts: Vec::new(), emcs };
            Shown::from([(capacity.id(), capacity)])
        };
        assert_eq!(news(capacity(1, 4), &capacity(2, 4)).len(), 0);
        assert_eq!(news(capacity(1, 4), &capacity(2, 3)).len(), 1);
    }
}
