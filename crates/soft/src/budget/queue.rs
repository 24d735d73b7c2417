//! Requests of clients that wait for the daemon, in the order in which it fulfils them.

use std::collections::{BTreeMap, VecDeque};

use units::UserId;

use super::sample::Pid;

/// Waiting requests, at most one per client. The users take turns (round robin), and the requests of a user are
/// fulfilled in the order of their arrival. So between two requests of a user, or between the arrival of its first
/// one and its fulfilment, at most one request of each other user is fulfilled: a request with `n` earlier requests
/// of its user waits for at most `n + (n + 1) · (u - 1)` others, where `u` is the number of users.
#[derive(Clone, Debug, Default)]
pub struct RequestQueue {
    /// Users with waiting requests. The first one is next.
    turns: VecDeque<UserId>,
    /// Clients with waiting requests by user, the oldest request first. No list is empty.
    waiting: BTreeMap<UserId, VecDeque<Pid>>,
}

impl RequestQueue {
    /// Adds the request of a client.
    pub fn push(&mut self, user: UserId, pid: Pid) {
        let requests = self.waiting.entry(user).or_default();
        if requests.is_empty() {
            self.turns.push_back(user);
        }
        requests.push_back(pid);
    }

    /// Removes the next request, and returns its client.
    pub fn pop(&mut self) -> Option<Pid> {
        let user = self.turns.pop_front()?;
        let requests = self.waiting.get_mut(&user)?;
        let next = requests.pop_front();
        if requests.is_empty() {
            self.waiting.remove(&user);
        } else {
            self.turns.push_back(user);
        }
        next
    }

    /// Removes the request of a client, if it has one.
    pub fn remove(&mut self, user: UserId, pid: Pid) {
        let Some(requests) = self.waiting.get_mut(&user) else { return };
        requests.retain(|other| *other != pid);
        if requests.is_empty() {
            self.waiting.remove(&user);
            self.turns.retain(|other| *other != user);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn user(uid: u32) -> UserId {
        UserId::new(uid).unwrap()
    }

    fn pop_all(queue: &mut RequestQueue) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop()).map(|pid| pid.0).collect()
    }

    #[test]
    fn users_take_turns() {
        let mut queue = RequestQueue::default();
        for (uid, pid) in [(1, 10), (1, 11), (1, 12), (2, 20), (3, 30), (2, 21)] {
            queue.push(user(uid), Pid(pid));
        }
        assert_eq!(pop_all(&mut queue), [10, 20, 30, 11, 21, 12]);
    }

    #[test]
    fn removed_requests_and_their_users_have_no_turn() {
        let mut queue = RequestQueue::default();
        for (uid, pid) in [(1, 10), (2, 20), (1, 11), (3, 30)] {
            queue.push(user(uid), Pid(pid));
        }
        queue.remove(user(2), Pid(20));
        queue.remove(user(1), Pid(10));
        queue.remove(user(4), Pid(40));
        assert_eq!(pop_all(&mut queue), [11, 30]);
        // The user is behind the others when it has a request again.
        queue.push(user(3), Pid(30));
        queue.push(user(2), Pid(20));
        assert_eq!(pop_all(&mut queue), [30, 20]);
    }

    /// Waiting request of the model.
    #[derive(Clone, Debug)]
    struct Waiting {
        uid: u32,
        pid: u32,
        /// Fulfilled requests of other users since the arrival or the last request of this user.
        others: BTreeMap<u32, u32>,
    }

    proptest! {
        #[test]
        fn other_users_have_one_request_each_between_two_of_a_user(
            events in prop::collection::vec((0..10_u32, 0..5_u32, 0..40_u32), 0..300),
        ) {
            let mut queue = RequestQueue::default();
            let mut model: Vec<Waiting> = Vec::new();
            for (kind, uid, number) in events {
                let pid = uid * 100 + number;
                match kind {
                    0..6 => {
                        if model.iter().all(|waiting| waiting.pid != pid) {
                            queue.push(user(uid), Pid(pid));
                            model.push(Waiting { uid, pid, others: BTreeMap::new() });
                        }
                    }
                    6 => {
                        queue.remove(user(uid), Pid(pid));
                        model.retain(|waiting| waiting.pid != pid);
                    }
                    _ => {
                        let next = queue.pop().map(|pid| pid.0);
                        prop_assert_eq!(next.is_none(), model.is_empty());
                        let Some(index) = model.iter().position(|waiting| Some(waiting.pid) == next) else {
                            prop_assert_eq!(next, None);
                            continue;
                        };
                        let served = model.remove(index);
                        let is_oldest = model[..index].iter().all(|waiting| waiting.uid != served.uid);
                        prop_assert!(is_oldest, "{:?} before an older request", served);
                        for waiting in &mut model {
                            if waiting.uid == served.uid {
                                waiting.others.clear();
                            } else {
                                *waiting.others.entry(served.uid).or_default() += 1;
                            }
                        }
                        // A request that is not the oldest one of its user may wait longer.
                        let mut users = BTreeSet::new();
                        for oldest in model.iter().filter(|waiting| users.insert(waiting.uid)) {
                            prop_assert!(oldest.others.values().all(|count| *count <= 1), "{:?}", oldest);
                        }
                    }
                }
            }
        }
    }
}
