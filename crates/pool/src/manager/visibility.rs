//! Visibility of shared devices. rack.toml lists the attached hosts of each device, but no driver
//! of the manager can check this list. Each agent therefore reports the devices of its machine, and
//! a host gets no slices of a device that it does not report.

use std::collections::BTreeMap;

use units::{EmcId, HostId, limits::SIGHT_ALARMS_MAX};

use super::{Alarm, Manager};
use crate::{
    audit::Subject,
    ledger::{Ledger, When},
    protocol::SeenDevice,
    record::Emc,
};

impl Manager {
    /// Compares the devices reported by a host's agent with rack.toml. Without a report, all
    /// devices in rack.toml are assumed to be visible.
    pub(super) fn update_visibility(&mut self, when: When, host: HostId) {
        let Some(hello) = self.links.get(&host).and_then(|link| link.hello()) else { return };
        let unseen = unseen_emcs(&self.durable, host, &hello.devices);
        if unseen.is_empty() {
            self.unseen_since.remove(&host);
        } else {
            self.unseen_since.entry(host).or_insert(when.wall);
        }
        self.head.set_unseen(host, unseen.clone());
        self.durable.set_unseen(host, unseen);
        self.changed = true;
    }

    pub(super) fn visibility_alarms(&self) -> impl Iterator<Item = Alarm> {
        let count = self.durable.hosts().map(|(_, entry)| entry.unseen().len()).sum();
        let what = "devices are not visible to hosts that rack.toml attaches to them";
        let rest = self.summary_alarm("DEVICE_NOT_FOUND", count, SIGHT_ALARMS_MAX, what);
        let unseen = self.durable.hosts().flat_map(move |(id, entry)| {
            entry.unseen().iter().filter_map(move |(emc, why)| {
                let (host, emc) = (&entry.host.name, &self.durable.emc(*emc)?.emc.name);
                Some(Alarm {
                    reason: "DEVICE_NOT_FOUND",
                    subject: Subject::Host(host.clone()),
                    message: format!("host {host} gets no slices of emc {emc}: {why}"),
                    since: self.unseen_since.get(&id).copied().unwrap_or(self.loaded_at),
                })
            })
        });
        unseen.take(SIGHT_ALARMS_MAX).chain(rest)
    }
}

/// Returns the attached EMCs that a host cannot use, each with the reason.
fn unseen_emcs(ledger: &Ledger, host: HostId, visible: &[SeenDevice]) -> BTreeMap<EmcId, String> {
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
