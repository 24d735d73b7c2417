//! Pending stops of machines: a host's machine must be stopped if an EMC cannot revoke the host's
//! access. The attempts are indexed by time, so that no event scans all of them. While a host's
//! agent is connected, its machine is not stopped, and its attempts are not in the index.

use std::collections::{BTreeMap, BTreeSet};

use units::{EmcId, HostId, Ns, UnixMs};

/// Pending stop of a machine, for an EMC that cannot revoke the host's access.
#[derive(Clone, Debug)]
pub(super) struct StopAttempt {
    /// Error of the latest attempt; `None` before the first error.
    pub(super) why: Option<String>,
    /// Time since which the machine must be stopped, wall clock; later attempts keep it.
    pub(super) since: UnixMs,
    /// Rack time of the next attempt; [`Ns::NEVER`] while an attempt is in progress or not needed.
    pub(super) retry_at: Ns,
}

/// Pending stops, by host and EMC.
#[derive(Debug, Default)]
pub(super) struct StopAttempts {
    entries: BTreeMap<(HostId, EmcId), StopAttempt>,
    /// Hosts with a connected agent.
    connected: BTreeSet<HostId>,
    /// Scheduled attempts, by EMC.
    attempts: BTreeMap<EmcId, BTreeSet<(Ns, HostId)>>,
}

impl StopAttempts {
    pub(super) fn get(&self, emc: EmcId, host: HostId) -> Option<&StopAttempt> {
        self.entries.get(&(host, emc))
    }

    pub(super) fn attempts_of_host(&self, host: HostId) -> impl Iterator<Item = (EmcId, &StopAttempt)> {
        let all = self.entries.range((host, EmcId(0))..=(host, EmcId(u32::MAX)));
        all.map(|((_, emc), attempt)| (*emc, attempt))
    }

    /// Sets whether the agent of a host is connected.
    pub(super) fn set_connected(&mut self, host: HostId, connected: bool) {
        if self.connected.contains(&host) == connected {
            return;
        }
        let of_host: Vec<(EmcId, Ns)> =
            self.attempts_of_host(host).map(|(emc, attempt)| (emc, attempt.retry_at)).collect();
        if connected {
            of_host.into_iter().for_each(|(emc, at)| self.unschedule_attempt(emc, host, at));
            self.connected.insert(host);
        } else {
            self.connected.remove(&host);
            of_host.into_iter().for_each(|(emc, at)| self.schedule_attempt(emc, host, at));
        }
    }

    pub(super) fn insert(&mut self, emc: EmcId, host: HostId, attempt: StopAttempt) {
        self.remove(emc, host);
        self.schedule_attempt(emc, host, attempt.retry_at);
        self.entries.insert((host, emc), attempt);
    }

    pub(super) fn set_retry(&mut self, emc: EmcId, host: HostId, retry_at: Ns) {
        let Some(attempt) = self.entries.get_mut(&(host, emc)) else { return };
        let before = std::mem::replace(&mut attempt.retry_at, retry_at);
        self.unschedule_attempt(emc, host, before);
        self.schedule_attempt(emc, host, retry_at);
    }

    pub(super) fn remove(&mut self, emc: EmcId, host: HostId) {
        if let Some(old) = self.entries.remove(&(host, emc)) {
            self.unschedule_attempt(emc, host, old.retry_at);
        }
    }

    pub(super) fn remove_host(&mut self, host: HostId) {
        let emcs: Vec<EmcId> = self.attempts_of_host(host).map(|(emc, _)| emc).collect();
        emcs.into_iter().for_each(|emc| self.remove(emc, host));
    }

    pub(super) fn remove_emc(&mut self, emc: EmcId) {
        self.entries.retain(|(_, of), _| *of != emc);
        self.attempts.remove(&emc);
    }

    /// Removes all pending stops, but not the record of connected agents.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.attempts.clear();
    }

    /// Returns the rack time of the earliest scheduled attempt for each EMC.
    pub(super) fn earliest(&self) -> impl Iterator<Item = (EmcId, Ns)> {
        self.attempts.iter().filter_map(|(emc, attempts)| Some((*emc, attempts.first()?.0)))
    }

    /// Returns the scheduled attempts for an EMC, earliest first.
    pub(super) fn attempts(&self, emc: EmcId) -> impl Iterator<Item = (Ns, HostId)> {
        self.attempts.get(&emc).into_iter().flatten().copied()
    }

    /// Checks the index against an index computed from all entries.
    #[cfg(test)]
    pub(super) fn check_indexes(&self, connected: &BTreeSet<HostId>) {
        assert_eq!(&self.connected, connected, "hosts with a connected agent");
        let mut computed = Self { connected: connected.clone(), ..Self::default() };
        self.entries
            .iter()
            .for_each(|((host, emc), attempt)| computed.schedule_attempt(*emc, *host, attempt.retry_at));
        assert_eq!(self.attempts, computed.attempts, "attempts by EMC");
    }

    fn schedule_attempt(&mut self, emc: EmcId, host: HostId, retry_at: Ns) {
        if retry_at < Ns::NEVER && !self.connected.contains(&host) {
            self.attempts.entry(emc).or_default().insert((retry_at, host));
        }
    }

    fn unschedule_attempt(&mut self, emc: EmcId, host: HostId, retry_at: Ns) {
        if let Some(attempts) = self.attempts.get_mut(&emc) {
            attempts.remove(&(retry_at, host));
            if attempts.is_empty() {
                self.attempts.remove(&emc);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMC: EmcId = EmcId(7);

    fn attempt(retry_at: u64) -> StopAttempt {
        StopAttempt { why: None, since: UnixMs(0), retry_at: Ns(retry_at) }
    }

    fn attempts(hosts: &StopAttempts) -> Vec<(u64, u32)> {
        hosts.attempts(EMC).map(|(at, host)| (at.0, host.0)).collect()
    }

    #[test]
    fn attempts_follow_insertions_changes_and_removals() {
        let mut hosts = StopAttempts::default();
        hosts.insert(EMC, HostId(1), attempt(30));
        hosts.insert(EMC, HostId(2), attempt(20));
        hosts.insert(EMC, HostId(2), attempt(40));
        assert_eq!(attempts(&hosts), [(30, 1), (40, 2)]);
        hosts.set_retry(EMC, HostId(1), Ns::NEVER);
        hosts.set_retry(EmcId(8), HostId(1), Ns(1));
        assert_eq!(attempts(&hosts), [(40, 2)]);
        hosts.set_retry(EMC, HostId(1), Ns(50));
        hosts.remove_host(HostId(2));
        assert_eq!((attempts(&hosts), hosts.earliest().collect()), (vec![(50, 1)], vec![(EMC, Ns(50))]));
        hosts.remove(EMC, HostId(1));
        assert_eq!((attempts(&hosts), hosts.earliest().count()), (vec![], 0));
    }

    #[test]
    fn removed_emc_has_no_attempts() {
        let mut hosts = StopAttempts::default();
        hosts.insert(EMC, HostId(1), attempt(30));
        hosts.insert(EmcId(8), HostId(1), attempt(20));
        hosts.remove_emc(EmcId(8));
        assert_eq!(hosts.earliest().collect::<Vec<_>>(), [(EMC, Ns(30))]);
        assert_eq!(hosts.attempts_of_host(HostId(1)).map(|(emc, _)| emc).collect::<Vec<_>>(), [EMC]);
    }

    #[test]
    fn attempts_of_connected_hosts_wait_for_disconnection() {
        let mut hosts = StopAttempts::default();
        hosts.insert(EMC, HostId(1), attempt(30));
        hosts.set_connected(HostId(1), true);
        hosts.set_connected(HostId(2), true);
        hosts.insert(EMC, HostId(2), attempt(20));
        hosts.set_retry(EMC, HostId(1), Ns(40));
        assert_eq!((attempts(&hosts), hosts.earliest().count()), (vec![], 0));
        hosts.set_connected(HostId(1), false);
        hosts.set_connected(HostId(2), false);
        assert_eq!(attempts(&hosts), [(20, 2), (40, 1)]);
        hosts.set_connected(HostId(2), true);
        hosts.clear();
        hosts.insert(EMC, HostId(2), attempt(20));
        assert_eq!(attempts(&hosts), [], "the agent of the host is still connected");
    }
}
