//! Settings that a reload cannot change. The ledger decides on all other changes of the rack.

use std::fmt::Display;

use units::Name;

use super::{Config, Emc, Host};

/// Changed setting that a reload cannot apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {after}: was {before}: {rule}")]
pub struct ImmutableSetting {
    /// Path of the setting, such as `manager.store` or `host h0: emcs`.
    pub field: String,
    /// Value in use.
    pub before: String,
    /// Rejected new value.
    pub after: String,
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
    let presence = |config: &Config| if config.tls.is_some() { "set" } else { "unset" };
    let settings = [
        ("manager.listen", before.listen.to_string(), after.listen.to_string()),
        ("manager.store", before.store.display().to_string(), after.store.display().to_string()),
        ("manager.metrics_listen", optional(before.metrics_listen), optional(after.metrics_listen)),
        ("access.group", optional(old.access.group), optional(new.access.group)),
        ("tls", presence(old).to_owned(), presence(new).to_owned()),
    ];
    changed(settings, "", RESTART_REQUIRED)
}

fn immutable_changes_of_emc(before: &Emc, after: &Emc) -> Vec<ImmutableSetting> {
    let settings = [
        ("slices", before.slices.to_string(), after.slices.to_string()),
        ("driver", before.driver.name().to_owned(), after.driver.name().to_owned()),
        ("path", before.path.display().to_string(), after.path.display().to_string()),
        ("serial", optional(before.serial.as_ref()), optional(after.serial.as_ref())),
    ];
    changed(settings, &format!("emc {}: ", after.name), EMC_SETTING_FIXED)
}

/// Returns the settings whose values differ. Each setting has a name, its value in use and its new
/// value.
fn changed<const N: usize>(
    settings: [(&str, String, String); N],
    prefix: &str,
    rule: &'static str,
) -> Vec<ImmutableSetting> {
    let changed = settings.into_iter().filter(|(_, before, after)| before != after);
    changed
        .map(|(name, before, after)| ImmutableSetting {
            field: format!("{prefix}{name}"),
            before,
            after,
            rule,
        })
        .collect()
}

fn optional(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unset".to_owned(), |value| value.to_string())
}

fn immutable_change_of_host(before: &Host, after: &Host) -> Option<ImmutableSetting> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    let list =
        |host: &Host| format!("[{}]", host.emcs.iter().map(Name::as_str).collect::<Vec<_>>().join(", "));
    lost.then(|| ImmutableSetting {
        field: format!("host {}: emcs", after.name),
        before: list(before),
        after: list(after),
        rule: EMC_REMOVED_FROM_HOST,
    })
}
