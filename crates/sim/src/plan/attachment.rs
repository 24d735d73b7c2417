//! EMCs of a pool, and the hosts that are attached to each of them.

use std::collections::BTreeSet;

use units::limits::EMCS_MAX;

/// Attachment of the hosts of a pool to its EMCs: all hosts to all EMCs, or, in a *sparse* pool, each
/// host to some of them.
///
/// A sparse pool of `k` hosts has `m = k * emcs_per_host / hosts_per_emc` EMCs. Host `i` is attached to
/// the EMCs `(i + d) mod m` for each of `emcs_per_host` distances `d`, so that all EMCs have the same
/// number of hosts. The distances are chosen one after the other, so that their differences are as
/// different as possible: then two hosts have few EMCs in common, and more pairs of hosts have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Number of EMCs to which each host is attached, at least 1.
    pub emcs_per_host: u32,
    /// Number of hosts that are attached to each EMC of a sparse pool; `None` for all hosts of the pool.
    pub hosts_per_emc: Option<u32>,
}

/// Rule that an attachment violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachmentRule {
    /// More hosts are attached to each EMC than the pool has.
    TooManyHosts,
    /// The hosts of the pool cannot be attached to EMCs evenly.
    Uneven,
    /// The pool has more EMCs than a rack can have ([`EMCS_MAX`]).
    TooManyEmcs,
}

impl Attachment {
    /// Checks whether pools of `hosts` hosts can be attached in this way.
    ///
    /// # Errors
    /// Returns the violated rule.
    pub fn check(&self, hosts: u32) -> Result<(), AttachmentRule> {
        let Self { emcs_per_host, hosts_per_emc } = *self;
        let Some(attached) = hosts_per_emc.filter(|attached| *attached != hosts) else { return Ok(()) };
        if attached > hosts {
            return Err(AttachmentRule::TooManyHosts);
        }
        let is_even = attached > 0
            && attached.is_multiple_of(emcs_per_host)
            && hosts.is_multiple_of(attached / emcs_per_host);
        if !is_even {
            return Err(AttachmentRule::Uneven);
        }
        if self.emcs(hosts) as usize > EMCS_MAX { Err(AttachmentRule::TooManyEmcs) } else { Ok(()) }
    }

    /// Returns the number of EMCs of a pool of `hosts` hosts, which must pass the [check](Self::check).
    pub fn emcs(&self, hosts: u32) -> u32 {
        let attached = u64::from(self.hosts_per_emc.unwrap_or(hosts));
        let emcs = u64::from(hosts) * u64::from(self.emcs_per_host) / attached;
        u32::try_from(emcs).unwrap_or(u32::MAX)
    }

    /// Returns the EMCs of each host, as different numbers from 0, in a pool of `hosts` hosts, which must pass
    /// the [check](Self::check).
    pub fn emcs_by_host(&self, hosts: u32) -> Vec<Vec<u32>> {
        let emcs = self.emcs(hosts);
        let distances = distances(self.emcs_per_host, emcs);
        let of_host = |host| distances.iter().map(|distance| (host + distance) % emcs).collect();
        (0..hosts).map(of_host).collect()
    }
}

/// Returns `count` different numbers below `emcs`.
fn distances(count: u32, emcs: u32) -> BTreeSet<u32> {
    let mut chosen = BTreeSet::from([0]);
    let mut differences = BTreeSet::new();
    let of = |candidate: u32, chosen: &BTreeSet<u32>| -> BTreeSet<u32> {
        let both = |other: &u32| [(candidate + emcs - other) % emcs, (other + emcs - candidate) % emcs];
        chosen.iter().flat_map(both).collect()
    };
    while chosen.len() < count as usize {
        let candidates = (0..emcs).rev().filter(|candidate| !chosen.contains(candidate));
        // Of several best candidates, the last one is taken: the smallest.
        let best =
            candidates.max_by_key(|candidate| of(*candidate, &chosen).difference(&differences).count());
        let Some(best) = best else { break };
        differences.extend(of(best, &chosen));
        chosen.insert(best);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sparse(emcs_per_host: u32, hosts_per_emc: u32) -> Attachment {
        Attachment { emcs_per_host, hosts_per_emc: Some(hosts_per_emc) }
    }

    #[test]
    fn all_hosts_have_all_emcs_by_default() {
        for hosts_per_emc in [None, Some(8)] {
            let attachment = Attachment { emcs_per_host: 3, hosts_per_emc };
            assert_eq!((attachment.check(8), attachment.emcs(8)), (Ok(()), 3));
            for mut emcs in attachment.emcs_by_host(8) {
                emcs.sort_unstable();
                assert_eq!(emcs, [0, 1, 2]);
            }
        }
    }

    #[test]
    fn sparse_pool_is_connected() {
        let emcs = sparse(2, 4).emcs_by_host(8);
        assert_eq!(emcs, [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1], [1, 2], [2, 3], [3, 0]]);
    }

    #[test]
    fn two_hosts_share_one_of_three_emcs() {
        // A perfect difference set: each pair of the 7 hosts has one EMC in common.
        assert_eq!(distances(3, 7), BTreeSet::from([0, 1, 3]));
    }

    #[test]
    fn uneven_and_large_pools_are_rejected() {
        assert_eq!(sparse(2, 16).check(8), Err(AttachmentRule::TooManyHosts));
        for hosts_per_emc in [0, 1, 3, 6] {
            assert_eq!(sparse(2, hosts_per_emc).check(8), Err(AttachmentRule::Uneven));
        }
        assert_eq!(sparse(2, 2).check(256), Ok(()));
        assert_eq!(sparse(2, 2).check(257), Err(AttachmentRule::TooManyEmcs));
        assert_eq!(sparse(16, 16).check(u32::MAX), Err(AttachmentRule::TooManyEmcs));
    }

    proptest! {
        #[test]
        fn all_emcs_have_the_same_number_of_hosts(
            emcs_per_host in 1..=8_u32,
            quotient in 1..=8_u32,
            emcs_per_quotient in 1..=12_u32,
        ) {
            let hosts = quotient * emcs_per_quotient;
            let attachment = sparse(emcs_per_host, quotient * emcs_per_host);
            prop_assume!(attachment.check(hosts).is_ok());
            let mut hosts_of_emc = vec![0; attachment.emcs(hosts) as usize];
            for emcs in attachment.emcs_by_host(hosts) {
                prop_assert_eq!(emcs.len(), emcs_per_host as usize);
                prop_assert_eq!(emcs.iter().collect::<BTreeSet<_>>().len(), emcs.len());
                emcs.iter().for_each(|emc| hosts_of_emc[*emc as usize] += 1);
            }
            prop_assert!(hosts_of_emc.iter().all(|count| *count == quotient * emcs_per_host));
        }
    }
}
