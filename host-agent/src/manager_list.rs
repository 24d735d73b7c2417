//! Selects the manager for the next session. One of the managers of a rack is the leader, and the others reject
//! agents.

use std::time::{Duration, Instant};

/// Time for which a manager that did not respond is tried only after all others.
const SILENCE_PENALTY: Duration = Duration::from_secs(10);

/// Managers of a rack.
#[derive(Debug)]
pub struct ManagerList {
    managers: Vec<Manager>,
    /// Index of the manager of the current session.
    current: usize,
    /// Number of managers that were tried since the last delay.
    tried: usize,
}

#[derive(Debug)]
struct Manager {
    address: String,
    /// Time until which the manager is tried only after all others.
    penalty_until: Option<Instant>,
}

/// Reason for the end of a session, for the selection of the next manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// The manager responded, or its machine refused the connection.
    Responded,
    /// The manager did not respond in time.
    Silent,
}

impl ManagerList {
    /// Creates the list; `addresses` is not empty.
    pub fn new(addresses: &[String]) -> Self {
        let manager = |address: &String| Manager { address: address.clone(), penalty_until: None };
        Self { managers: addresses.iter().map(manager).collect(), current: 0, tried: 0 }
    }

    /// Returns the address of the manager for the next session.
    pub fn current(&self) -> &str {
        &self.managers[self.current].address
    }

    /// Returns whether another manager can take the place of the current one.
    pub fn has_several(&self) -> bool {
        self.managers.len() > 1
    }

    /// Selects the next manager after a session has ended. Returns whether it was not tried since the last delay, so
    /// that it must be tried at once.
    pub fn advance(&mut self, end: SessionEnd, now: Instant) -> bool {
        let penalty = (end == SessionEnd::Silent).then_some(now + SILENCE_PENALTY);
        self.managers[self.current].penalty_until = penalty;
        let is_penalized =
            |index: &usize| self.managers[*index].penalty_until.is_some_and(|until| until > now);
        let len = self.managers.len();
        let others: Vec<usize> = (1..=len).map(|step| (self.current + step) % len).collect();
        let usable = others.iter().filter(|index| !is_penalized(index)).count();
        self.current = others.iter().copied().find(|index| !is_penalized(index)).unwrap_or(others[0]);
        self.tried += 1;
        if self.tried < usable {
            return true;
        }
        self.tried = 0;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(len: usize) -> ManagerList {
        ManagerList::new(&(0..len).map(|index| index.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn all_managers_are_tried_before_a_delay() {
        let (mut list, now) = (list(3), Instant::now());
        let mut tried = Vec::new();
        for _ in 0..6 {
            tried.push(list.current().to_owned());
            let is_immediate = list.advance(SessionEnd::Responded, now);
            tried.push(if is_immediate { "at once" } else { "delay" }.to_owned());
        }
        let round = ["0", "at once", "1", "at once", "2", "delay"];
        assert_eq!(tried, [round, round].concat());
    }

    #[test]
    fn silent_manager_is_tried_after_the_others() {
        let (mut list, now) = (list(2), Instant::now());
        list.advance(SessionEnd::Silent, now);
        for _ in 0..3 {
            assert_eq!(list.current(), "1");
            assert!(
                !list.advance(SessionEnd::Responded, now),
                "the only other manager was tried again at once"
            );
        }
        let later = now + SILENCE_PENALTY + Duration::from_secs(1);
        list.advance(SessionEnd::Responded, later);
        assert_eq!(list.current(), "0");
    }

    #[test]
    fn single_or_silent_managers_are_still_tried() {
        let (mut single, now) = (list(1), Instant::now());
        assert!(!single.advance(SessionEnd::Silent, now));
        assert_eq!(single.current(), "0");
        let mut all = list(2);
        for expected in ["1", "0", "1"] {
            all.advance(SessionEnd::Silent, now);
            assert_eq!(all.current(), expected);
        }
    }
}
