//! Visibility of shared devices. rack.toml lists the EMCs to which each host is attached, but no
//! driver of the manager can check this. Each agent therefore reports the devices that it detects,
//! and a host gets no slices of a device that its agent does not report.

use std::collections::BTreeMap;

use units::{EmcId, HostId, limits::DEVICE_NOT_FOUND_ALARMS_MAX};

use super::{Alarm, Manager};
use crate::{
    audit::Subject,
    ledger::{Ledger, When},
    protocol::SeenDevice,
    record::Emc,
};

impl Manager {
    /// Compares the devices reported by a host's agent with rack.toml. Until the agent connects,
    /// all attached devices are assumed to be visible.
    pub(super) fn update_visibility(&mut self, when: When, host: HostId) {
        let Some(hello) = self.links.get(&host).and_then(|link| link.hello()) else { return };
        let unusable_emcs = find_unusable_emcs(&self.durable, host, &hello.devices);
        if unusable_emcs.is_empty() {
            self.unusable_emcs_since.remove(&host);
        } else {
            self.unusable_emcs_since.entry(host).or_insert(when.wall);
        }
        self.head.set_unusable_emcs(host, unusable_emcs.clone());
        self.durable.set_unusable_emcs(host, unusable_emcs);
        self.changed = true;
    }

    pub(super) fn visibility_alarms(&self) -> impl Iterator<Item = Alarm> {
        let count = self.durable.hosts().map(|(_, entry)| entry.unusable_emcs().len()).sum();
        let what = "devices are not visible to hosts that rack.toml attaches to them";
        let rest = self.summary_alarm("DEVICE_NOT_FOUND", count, DEVICE_NOT_FOUND_ALARMS_MAX, what);
        let unusable_emcs = self.durable.hosts().flat_map(move |(id, entry)| {
            entry.unusable_emcs().iter().filter_map(move |(emc, why)| {
                let (host, emc) = (&entry.host.name, &self.durable.emc(*emc)?.emc.name);
                Some(Alarm {
                    reason: "DEVICE_NOT_FOUND",
                    subject: Subject::Host(host.clone()),
                    message: format!("host {host} gets no slices of emc {emc}: {why}"),
                    since: self.unusable_emcs_since.get(&id).copied().unwrap_or(self.loaded_at),
                })
            })
        });
        unusable_emcs.take(DEVICE_NOT_FOUND_ALARMS_MAX).chain(rest)
    }
}

/// Returns the attached EMCs that a host cannot use, each with the reason.
fn find_unusable_emcs(ledger: &Ledger, host: HostId, visible: &[SeenDevice]) -> BTreeMap<EmcId, String> {
    let attached = ledger.host(host).into_iter().flat_map(|entry| &entry.host.emcs);
    attached.filter_map(|emc| Some((*emc, unusable_reason(&ledger.emc(*emc)?.emc, visible)?))).collect()
}

fn unusable_reason(emc: &Emc, visible: &[SeenDevice]) -> Option<String> {
    let serial = emc.serial.as_ref()?;
    match visible.iter().find(|device| device.serial == *serial) {
        None => Some(format!("the host reports no device with serial {serial}")),
        Some(SeenDevice { problem: Some(problem), .. }) => Some(format!("device {serial}: {problem}")),
        Some(device) if device.slices < emc.slices => Some(format!(
            "the host reports {} slices of device {serial}, rack.toml requires {}",
            device.slices, emc.slices
        )),
        Some(_) => None,
    }
}
