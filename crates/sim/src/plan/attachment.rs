//! EMCs of a pool, and the hosts that are attached to each of them.

use std::collections::BTreeSet;

/// Attachment of the hosts of a pool to its EMCs: all hosts to all EMCs, or, in a *sparse* pool, each host to
/// some of them.
///
/// A sparse pool of `k` hosts has `m = k * emcs_per_host / hosts_per_emc` EMCs. Host `i` is attached to the EMCs
/// `(i + d) mod m` for each of `emcs_per_host` distances `d`, so that all EMCs have the same number of
/// hosts. The distances are chosen one after the other, so that their differences are as different as possible: then
/// two hosts have few EMCs in common, and more pairs of hosts have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Number of EMCs to which each host is attached, at least 1.
    pub emcs_per_host: u32,
    /// Number of hosts that are attached to each EMC of a sparse pool; `None` for all hosts of the pool.
    pub hosts_per_emc: Option<u32>,
}

/// Rule that a sparse pool violates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SparseRule {
    /// More hosts are attached to each EMC than the pool has.
    #[error("must be at most the number of hosts of a pool ({hosts})")]
    TooManyHosts {
        /// Number of hosts.
        hosts: u32,
    },
    /// The hosts of a pool cannot be attached to EMCs evenly.
    #[error(
        "must be a multiple of the EMCs of a host ({emcs_per_host}), and the quotient must divide the hosts of a \
         pool ({hosts})"
    )]
    Uneven {
        /// Number of EMCs to which each host is attached.
        emcs_per_host: u32,
        /// Number of hosts.
        hosts: u32,
    },
}

impl Attachment {
    /// Checks whether pools of `hosts` hosts can be attached in this way.
    ///
    /// # Errors
    /// Returns the rule that [`hosts_per_emc`](Self::hosts_per_emc) violates.
    pub fn check(&self, hosts: u32) -> Result<(), SparseRule> {
        let Self { emcs_per_host, hosts_per_emc } = *self;
        match hosts_per_emc {
            None => Ok(()),
            Some(attached) if attached > hosts => Err(SparseRule::TooManyHosts { hosts }),
            Some(attached) if attached == hosts => Ok(()),
            Some(attached)
                if attached.is_multiple_of(emcs_per_host)
                    && attached > 0
                    && hosts.is_multiple_of(attached / emcs_per_host) =>
            {
                Ok(())
            }
            Some(_) => Err(SparseRule::Uneven { emcs_per_host, hosts }),
        }
    }

    /// Returns the number of EMCs of a pool of `hosts` hosts, which must pass the [check](Self::check).
    pub fn emcs(&self, hosts: u32) -> u32 {
        self.hosts_per_emc.map_or(self.emcs_per_host, |attached| hosts * self.emcs_per_host / attached)
    }

    /// Returns the different EMCs of a host, as numbers from 0, in a pool of `hosts` hosts, which must pass the
    /// [check](Self::check).
    pub fn emcs_of_host(&self, host: u32, hosts: u32) -> Vec<u32> {
        let emcs = self.emcs(hosts);
        distances(self.emcs_per_host, emcs).into_iter().map(|distance| (host + distance) % emcs).collect()
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
        let attachment = Attachment { emcs_per_host: 3, hosts_per_emc: None };
        assert_eq!((attachment.check(8), attachment.emcs(8)), (Ok(()), 3));
        for host in 0..8 {
            let mut emcs = attachment.emcs_of_host(host, 8);
            emcs.sort_unstable();
            assert_eq!(emcs, [0, 1, 2]);
        }
    }

    #[test]
    fn sparse_pool_is_connected() {
        let emcs = |host| sparse(2, 4).emcs_of_host(host, 8);
        assert_eq!([0, 1, 2, 3, 4].map(emcs), [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]);
    }

    #[test]
    fn two_hosts_share_one_of_three_emcs() {
        // A perfect difference set: each pair of the 7 hosts has one EMC in common.
        assert_eq!(distances(3, 7), BTreeSet::from([0, 1, 3]));
    }

    #[test]
    fn uneven_pool_is_rejected() {
        let rule = |attachment: Attachment, hosts| attachment.check(hosts).unwrap_err().to_string();
        assert_eq!(rule(sparse(2, 16), 8), "must be at most the number of hosts of a pool (8)");
        let uneven = "must be a multiple of the EMCs of a host (2), and the quotient must divide the hosts of a \
                      pool (8)";
        for hosts_per_emc in [0, 1, 3, 6] {
            assert_eq!(rule(sparse(2, hosts_per_emc), 8), uneven);
        }
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
            for host in 0..hosts {
                let emcs = attachment.emcs_of_host(host, hosts);
                prop_assert_eq!(emcs.len(), emcs_per_host as usize);
                prop_assert_eq!(emcs.iter().collect::<BTreeSet<_>>().len(), emcs.len());
                emcs.iter().for_each(|emc| hosts_of_emc[*emc as usize] += 1);
            }
            prop_assert!(hosts_of_emc.iter().all(|count| *count == quotient * emcs_per_host));
        }
    }
}
