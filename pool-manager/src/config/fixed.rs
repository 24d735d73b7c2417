//! Settings that a reload cannot change. Changes of the rack are decided by the ledger.

use units::Name;

use super::{Config, Emc, Host};

/// Setting that cannot change while the manager runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct Fixed {
    /// Name.
    pub field: String,
    /// How to change it.
    pub rule: &'static str,
}

const RESTART: &str = "changes only with a restart of pool-manager";
const NEVER: &str = "never changes: drain the EMC, remove it, and add it under another name";
const WIRING: &str = "a host is only ever wired to more EMCs: drain the host and remove it first";

/// Returns the settings in `new` that cannot change while the manager runs; if there are any,
/// nothing is changed.
pub fn fixed(old: &Config, new: &Config) -> Vec<Fixed> {
    let emc = |name: &Name| old.emcs.iter().find(|emc| emc.name == *name);
    let host = |name: &Name| old.hosts.iter().find(|host| host.name == *name);
    let emcs = new.emcs.iter().filter_map(|after| Some(fixed_of_emc(emc(&after.name)?, after)));
    let hosts = new.hosts.iter().filter_map(|after| fixed_of_host(host(&after.name)?, after));
    fixed_of_manager(old, new).into_iter().chain(emcs.flatten()).chain(hosts).collect()
}

fn fixed_of_manager(old: &Config, new: &Config) -> Vec<Fixed> {
    let (before, after) = (&old.manager, &new.manager);
    let changed = [
        ("manager.listen", before.listen != after.listen),
        ("manager.store", before.store != after.store),
        ("manager.metrics_listen", before.metrics_listen != after.metrics_listen),
        ("access.group", old.access.group != new.access.group),
        ("tls", old.tls.is_some() != new.tls.is_some()),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed.map(|(field, _)| Fixed { field: field.to_owned(), rule: RESTART }).collect()
}

fn fixed_of_emc(before: &Emc, after: &Emc) -> Vec<Fixed> {
    let changed = [
        ("slices", before.slices != after.slices),
        ("driver", before.driver != after.driver),
        ("path", before.path != after.path),
        ("serial", before.serial != after.serial),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed.map(|(field, _)| Fixed { field: format!("emc {}: {field}", after.name), rule: NEVER }).collect()
}

fn fixed_of_host(before: &Host, after: &Host) -> Option<Fixed> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    lost.then(|| Fixed { field: format!("host {}: emcs", after.name), rule: WIRING })
}
