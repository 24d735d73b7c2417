//! Settings that a reload cannot change. The ledger decides on all other changes of the rack.

use std::{fmt::Display, path::PathBuf};

use units::Name;

use super::{Config, Emc, Host, Manager};

/// Changed setting that a reload cannot apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {after}: was {before}: {rule}")]
pub struct ImmutableSettingChange {
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
pub fn changed_immutable_settings(old: &Config, new: &Config) -> Vec<ImmutableSettingChange> {
    let emc = |name: &Name| old.emcs.iter().find(|emc| emc.name == *name);
    let host = |name: &Name| old.hosts.iter().find(|host| host.name == *name);
    let emcs =
        new.emcs.iter().filter_map(|after| Some(changed_immutable_emc_settings(emc(&after.name)?, after)));
    let hosts =
        new.hosts.iter().filter_map(|after| changed_immutable_host_setting(host(&after.name)?, after));
    changed_immutable_manager_settings(old, new).into_iter().chain(emcs.flatten()).chain(hosts).collect()
}

fn changed_immutable_manager_settings(old: &Config, new: &Config) -> Vec<ImmutableSettingChange> {
    let (before, after) = (&old.manager, &new.manager);
    let presence = |config: &Config| if config.tls.is_some() { "set" } else { "unset" };
    let settings = [
        ("manager.listen", before.listen.to_string(), after.listen.to_string()),
        ("manager.store", before.store(), after.store()),
        ("manager.state_dir", state_dir(before), state_dir(after)),
        (
            "manager.metrics_listen",
            display_or_unset(before.metrics_listen),
            display_or_unset(after.metrics_listen),
        ),
        ("access.group", display_or_unset(old.access.group), display_or_unset(new.access.group)),
        ("tls", presence(old).to_owned(), presence(new).to_owned()),
    ];
    let etcd = etcd_settings(before).into_iter().zip(etcd_settings(after));
    let etcd = etcd.map(|((name, before), (_, after))| (name, before, after));
    collect_changed_settings(settings.into_iter().chain(etcd), "", RESTART_REQUIRED)
}

fn state_dir(manager: &Manager) -> String {
    display_or_unset(manager.etcd.as_ref().map(|_| manager.folder.display()))
}

/// Returns the names and values of the settings of section `[etcd]`.
fn etcd_settings(manager: &Manager) -> [(&'static str, String); 9] {
    let etcd = manager.etcd.as_ref();
    let path = |path: Option<&PathBuf>| display_or_unset(path.map(|path| path.display()));
    let tls = etcd.and_then(|etcd| etcd.tls.as_ref());
    let identity = tls.and_then(|tls| tls.identity.as_ref());
    let user = etcd.and_then(|etcd| etcd.user.as_ref());
    [
        ("etcd.name", display_or_unset(etcd.map(|etcd| &etcd.name))),
        ("etcd.advertise", display_or_unset(etcd.map(|etcd| &etcd.advertise))),
        ("etcd.lease_s", display_or_unset(etcd.map(|etcd| etcd.lease.as_duration().as_secs_f64()))),
        ("etcd.quota_mib", display_or_unset(etcd.map(|etcd| etcd.quota.get() >> 20))),
        ("etcd.ca", path(tls.map(|tls| &tls.ca))),
        ("etcd.certificate", path(identity.map(|(certificate, _)| certificate))),
        ("etcd.key", path(identity.map(|(_, key)| key))),
        ("etcd.user", display_or_unset(user.map(|user| &user.name))),
        ("etcd.password_file", path(user.map(|user| &user.password_file))),
    ]
}

fn changed_immutable_emc_settings(before: &Emc, after: &Emc) -> Vec<ImmutableSettingChange> {
    let settings = [
        ("slices", before.slices.to_string(), after.slices.to_string()),
        ("driver", before.driver.name().to_owned(), after.driver.name().to_owned()),
        ("path", before.path.display().to_string(), after.path.display().to_string()),
        ("serial", display_or_unset(before.serial.as_ref()), display_or_unset(after.serial.as_ref())),
    ];
    collect_changed_settings(settings.into_iter(), &format!("emc {}: ", after.name), EMC_SETTING_FIXED)
}

/// Returns the settings whose values differ. Each tuple in `settings` contains a name, the value in
/// use and the new value.
fn collect_changed_settings<'a>(
    settings: impl Iterator<Item = (&'a str, String, String)>,
    prefix: &str,
    rule: &'static str,
) -> Vec<ImmutableSettingChange> {
    let changed = settings.filter(|(_, before, after)| before != after);
    changed
        .map(|(name, before, after)| ImmutableSettingChange {
            field: format!("{prefix}{name}"),
            before,
            after,
            rule,
        })
        .collect()
}

fn display_or_unset(value: Option<impl Display>) -> String {
    value.map_or_else(|| "unset".to_owned(), |value| value.to_string())
}

fn changed_immutable_host_setting(before: &Host, after: &Host) -> Option<ImmutableSettingChange> {
    let lost = before.emcs.iter().any(|emc| !after.emcs.contains(emc));
    let list =
        |host: &Host| format!("[{}]", host.emcs.iter().map(Name::as_str).collect::<Vec<_>>().join(", "));
    lost.then(|| ImmutableSettingChange {
        field: format!("host {}: emcs", after.name),
        before: list(before),
        after: list(after),
        rule: EMC_REMOVED_FROM_HOST,
    })
}
