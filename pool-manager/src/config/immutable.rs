//! Settings that a reload cannot change. Changes of the rack are decided by the ledger.

use units::Name;

use super::{Config, Emc, Host};

/// Setting that cannot change while the manager runs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct ImmutableSetting {
    /// Name.
    pub field: String,
    /// Rule, with the way to change the setting.
    pub rule: &'static str,
}

const RESTART: &str = "can change only with a restart of pool-manager";
const NEVER: &str = "cannot change: drain the EMC, remove it, and add it under another name";
const WIRING: &str = "EMCs can only be added to a host: drain the host and remove it first";

/// Returns the settings in `new` that cannot change while the manager runs; if there are any,
/// nothing is changed.
pub fn immutable_changes(old: &Config, new: &Config) -> Vec<ImmutableSetting> {
    let emc = |name: &Name| old.emcs.iter().find(|emc| emc.name == *name);
    let host = |name: &Name| old.hosts.iter().find(|host| host.name == *name);
    let emcs = new.emcs.iter().filter_map(|after| Some(immutable_changes_of_emc(emc(&after.name)?, after)));
    let hosts = new.hosts.iter().filter_map(|after| immutable_change_of_host(host(&after.name)?, after));
    immutable_changes_of_manager(old, new).into_iter().chain(emcs.flatten()).chain(hosts).collect()
}

fn immutable_changes_of_manager(old: &Config, new: &Config) -> Vec<ImmutableSetting> {
    let (before, after) = (&old.manager, &new.manager);
    let changed = [
        ("manager.listen", before.listen != after.listen),
        ("manager.store", before.store != after.store),
        ("manager.metrics_listen", before.metrics_listen != after.metrics_listen),
        ("access.group", old.access.group != new.access.group),
        ("tls", old.tls.is_some() != new.tls.is_some()),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed.map(|(field, _)| ImmutableSetting { field: field.to_owned(), rule: RESTART }).collect()
}

fn immutable_changes_of_emc(before: &Emc, after: &Emc) -> Vec<ImmutableSetting> {
    let changed = [
        ("slices", before.slices != after.slices),
        ("driver", before.driver != after.driver),
        ("path", before.path != after.path),
        ("serial", before.serial != after.serial),
    ];
    let changed = changed.into_iter().filter(|(_, changed)| *changed);
    changed
        .map(|(field, _)| ImmutableSetting { field: format!("emc {}: {field}", after.name), rule: NEVER })
        .collect()
}

fn immutable_change_of_host(before: &Host, after: &Host) -> Option<ImmutableSetting> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    lost.then(|| ImmutableSetting { field: format!("host {}: emcs", after.name), rule: WIRING })
}
