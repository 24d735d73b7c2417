//! Settings that a reload cannot change. The ledger decides on all other changes of the rack.

use units::Name;

use super::{Config, Emc, Host};

/// Changed setting that a reload cannot apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {rule}")]
pub struct ImmutableSetting {
    /// Path of the setting, such as `manager.store` or `host h0: emcs`.
    pub field: String,
    /// Violated rule, and how to change the setting instead.
    pub rule: &'static str,
}

const RESTART_REQUIRED: &str = "a change requires a restart of pool-manager";
const EMC_SETTING_FIXED: &str = "cannot change: drain the EMC, remove it, and add it under another name";
const EMC_REMOVED_FROM_HOST: &str =
    "cannot remove an EMC of a host: drain and remove the host, then add it again";

/// Returns the changed settings in `new` that a reload cannot apply. If there are any, the caller
/// must reject the whole reload.
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
    changed.map(|(field, _)| ImmutableSetting { field: field.to_owned(), rule: RESTART_REQUIRED }).collect()
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
        .map(|(field, _)| ImmutableSetting {
            field: format!("emc {}: {field}", after.name),
            rule: EMC_SETTING_FIXED,
        })
        .collect()
}

fn immutable_change_of_host(before: &Host, after: &Host) -> Option<ImmutableSetting> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    lost.then(|| ImmutableSetting {
        field: format!("host {}: emcs", after.name),
        rule: EMC_REMOVED_FROM_HOST,
    })
}
