//! What a reload would change, and what a reload cannot.

use units::Name;

use super::{Config, Emc, Host, Lease, Policy};

/// What is new in a newer [`Config`]. Whether something may go is the ledger's business.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Diff {
    /// EMCs to be added, in order.
    pub emcs_added: Vec<Emc>,
    /// EMCs to be removed.
    pub emcs_removed: Vec<Name>,
    /// Hosts to be added, in order.
    pub hosts_added: Vec<Host>,
    /// Hosts as they are to be from now on.
    pub hosts_changed: Vec<Host>,
    /// Hosts to be removed.
    pub hosts_removed: Vec<Name>,
    /// How long silence is to be borne from now on.
    pub lease: Option<Lease>,
    /// How VMs are to be placed from now on.
    pub policy: Option<Policy>,
    /// What cannot change while the manager runs; if there is any, nothing of this is to be done.
    pub fixed: Vec<Fixed>,
}

/// A field that cannot change while the manager runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct Fixed {
    /// Which.
    pub field: String,
    /// What would have to be done instead.
    pub rule: &'static str,
}

const RESTART: &str = "changes only with a restart of pool-manager";
const NEVER: &str = "never changes: drain the EMC, remove it, and add it under another name";
const WIRING: &str = "a host is only ever wired to more EMCs: drain the host and remove it first";

/// What is new in `new`.
pub fn diff(old: &Config, new: &Config) -> Diff {
    let emc = |name: &Name, config: &Config| config.emcs.iter().find(|emc| emc.name == *name).cloned();
    let host = |name: &Name, config: &Config| config.hosts.iter().find(|host| host.name == *name).cloned();
    let hosts_kept = || new.hosts.iter().filter_map(|after| Some((host(&after.name, old)?, after)));
    let emcs_kept = new.emcs.iter().filter_map(|after| Some((emc(&after.name, old)?, after)));
    let mut fixed = fixed_of_manager(old, new);
    fixed.extend(emcs_kept.flat_map(|(before, after)| fixed_of_emc(&before, after)));
    fixed.extend(hosts_kept().filter_map(|(before, after)| fixed_of_host(&before, after)));
    Diff {
        emcs_added: new.emcs.iter().filter(|e| emc(&e.name, old).is_none()).cloned().collect(),
        emcs_removed: old.emcs.iter().map(|e| &e.name).filter(|n| emc(n, new).is_none()).cloned().collect(),
        hosts_added: new.hosts.iter().filter(|h| host(&h.name, old).is_none()).cloned().collect(),
        hosts_changed: hosts_kept().filter(|(b, a)| b != *a).map(|(_, after)| after.clone()).collect(),
        hosts_removed: old
            .hosts
            .iter()
            .map(|h| &h.name)
            .filter(|n| host(n, new).is_none())
            .cloned()
            .collect(),
        lease: (old.lease != new.lease).then_some(new.lease),
        policy: (old.policy != new.policy).then_some(new.policy),
        fixed,
    }
}

fn fixed_of_manager(old: &Config, new: &Config) -> Vec<Fixed> {
    let (before, after) = (&old.manager, &new.manager);
    let changed = [
        ("manager.listen", before.listen != after.listen),
        ("manager.store", before.store != after.store),
        ("manager.metrics_listen", before.metrics_listen != after.metrics_listen),
        ("tls", old.tls != new.tls),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed.map(|(field, _)| Fixed { field: field.to_owned(), rule: RESTART }).collect()
}

fn fixed_of_emc(before: &Emc, after: &Emc) -> Vec<Fixed> {
    let changed = [
        ("slices", before.slices != after.slices),
        ("driver", before.driver != after.driver),
        ("path", before.path != after.path),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed.map(|(field, _)| Fixed { field: format!("emc {}: {field}", after.name), rule: NEVER }).collect()
}

fn fixed_of_host(before: &Host, after: &Host) -> Option<Fixed> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    lost.then(|| Fixed { field: format!("host {}: emcs", after.name), rule: WIRING })
}
