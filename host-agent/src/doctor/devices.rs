//! CXL memory devices of the machine, with their slices. Nothing is created or removed: that is
//! left to the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use units::Bytes;

use super::{Finding, Machine, MemoryUse, RUN_AS_ROOT, problems_or};
use crate::host::{
    blocks::Block,
    cxl::{self, CxlError, DeviceState, InspectedDevice, SliceName},
    slices::{self, Driver, PresentSlice, SliceError, Slices},
};

/// Regions of each node with pool memory.
pub(super) type Nodes = BTreeMap<u32, Vec<Range<u64>>>;

/// State common to all devices.
struct DeviceCheck<'a> {
    used: MemoryUse,
    /// Slices in records of VMs.
    places: &'a BTreeSet<String>,
    /// An agent may be working on them.
    is_served: bool,
}

/// Checks each device, and returns the nodes of their memory.
pub(super) fn all(
    machine: &Machine,
    used: MemoryUse,
    places: &BTreeSet<String>,
    is_served: bool,
) -> (Vec<Finding>, Nodes) {
    let devices = match cxl::inspect(&machine.sys) {
        Ok(devices) => devices,
        Err(error) => return (vec![no_device(machine, &error)], Nodes::new()),
    };
    let check = DeviceCheck { used, places, is_served };
    let mut nodes = Nodes::new();
    for slices in devices.iter().filter_map(|device| slices_of(device)) {
        let region = slices.region();
        nodes.entry(slices.node()).or_default().push(region.base..region.base + region.bytes.get());
    }
    (devices.iter().flat_map(|device| check.device(device)).collect(), nodes)
}

fn slices_of(device: &InspectedDevice) -> Option<&Slices> {
    match &device.state {
        Ok(DeviceState::Present(slices)) => Some(slices),
        _ => None,
    }
}

/// Reports a missing device, and whether the firmware reserved memory for one.
fn no_device(machine: &Machine, error: &CxlError) -> Finding {
    let aside = soft_reserved(&machine.proc.text("iomem").unwrap_or_default());
    let aside = match aside {
        None => String::new(),
        Some(bytes) => format!(
            "; the firmware has reserved memory ({bytes}, \"Soft Reserved\" in /proc/iomem): without CXL drivers the kernel \
             shows it as dax devices without a serial (dax_hmem), which a rack cannot assign to a device"
        ),
    };
    Finding::problem(
        "devices",
        format!("{error}{aside}"),
        "`modprobe -a cxl_acpi cxl_pci cxl_mem`, then `systemctl restart host-agent`",
    )
}

/// Parses `  100000000-1ffffffff : Soft Reserved`; only root sees the addresses.
fn soft_reserved(iomem: &str) -> Option<Bytes> {
    let ranges =
        iomem.lines().filter_map(|line| line.trim().strip_suffix(" : Soft Reserved")?.split_once('-'));
    let number = |digits| u64::from_str_radix(digits, 16).unwrap_or(0);
    let sizes: Vec<u64> =
        ranges.map(|(first, last)| number(last) + 1 - number(first).min(number(last))).collect();
    (!sizes.is_empty()).then(|| Bytes::new(sizes.iter().sum()))
}

impl DeviceCheck<'_> {
    fn device(&self, device: &InspectedDevice) -> Vec<Finding> {
        let again = "then `systemctl restart host-agent`: it discovers devices when it starts";
        let found = match &device.state {
            Err(problem) => vec![Finding::problem("devices", units::chain(problem), again)],
            Ok(DeviceState::Present(slices)) => self.slices(&device.serial, slices),
            Ok(DeviceState::Unbound(name)) => vec![self.pending(format!("{name} has no driver"))],
            Ok(DeviceState::Incomplete(name)) => vec![self.pending(format!("{name} is incomplete"))],
            Ok(DeviceState::NoRegion { window, start }) => vec![match slices::alignment(*start) {
                Ok(align) => self.pending(format!(
                    "{} without a region; {window} can contain one, aligned to {align}",
                    device.bytes
                )),
                Err(error) => Finding::problem(
                    "devices",
                    format!("{window}: {error}"),
                    "change the settings of the firmware",
                ),
            }],
        };
        found
            .into_iter()
            .map(|finding| {
                if finding.subject == "this host" {
                    finding.of(format!("device {}", device.serial))
                } else {
                    finding
                }
            })
            .collect()
    }

    /// Reports a condition that a starting agent resolves. A running one should have done so.
    fn pending(&self, message: String) -> Finding {
        match self.is_served {
            false => Finding::passed("devices", format!("{message}: the agent resolves it when it starts")),
            true => Finding::problem(
                "devices",
                format!("{message}, and the agent has not resolved it"),
                "check its log (`journalctl -u host-agent`), then `systemctl restart host-agent`",
            ),
        }
    }

    fn slices(&self, serial: &str, slices: &Slices) -> Vec<Finding> {
        let inspected =
            slices.devices_to_remove().and_then(|leftover| Ok((leftover, slices.present_slices()?)));
        let (leftover, found) = match inspected {
            Ok(inspected) => inspected,
            Err(error) => return vec![Finding::problem("devices", units::chain(&error), fix(&error))],
        };
        let mut problems: Vec<_> = leftover
            .into_iter()
            .filter(|name| !name.ends_with(".0"))
            .filter_map(|name| self.partial_slice(name, "has no memory"))
            .collect();
        for (index, found) in &found {
            let place = SliceName { serial: serial.to_owned(), index: *index }.to_string();
            problems.extend(self.slice(slices, *index, found, &place));
        }
        let region = slices.region();
        problems_or(problems, || {
            let (name, at, node) = (&region.name, region.base, slices.node());
            let (count, align, present) = (slices.count(), slices.align(), found.len());
            Finding::passed(
                "devices",
                format!(
                    "{name} at {at:#x} of node {node}: {count} slices aligned to {align}, {present} of them present"
                ),
            )
        })
    }

    /// Checks one slice that is present in the kernel.
    fn slice(&self, slices: &Slices, index: u32, found: &PresentSlice, place: &str) -> Option<Finding> {
        if found.driver.is_none() {
            return self.partial_slice(place.to_owned(), "has no driver");
        }
        let blocks = slices.blocks(index).unwrap_or_default();
        let online: Vec<&Block> = blocks.iter().filter(|block| !block.is_offline()).collect();
        match (self.used, found.driver) {
            (MemoryUse::Dax, Some(Driver::Kmem)) if !online.is_empty() => {
                let message =
                    format!("{} blocks of it are memory of the kernel, but the backend is dax", online.len());
                let fix = format!(
                    "`echo offline > /sys/devices/system/memory/{}/state`, and the same for the other blocks",
                    online[0].name
                );
                Some(Finding::problem("slices", message, fix).of(place))
            }
            (MemoryUse::Blocks, Some(Driver::Kmem)) if (1..blocks.len()).contains(&online.len()) => self
                .partial_slice(
                    place.to_owned(),
                    &format!("has {} of {} blocks online", online.len(), blocks.len()),
                ),
            _ => None,
        }
    }

    /// Reports remains of a killed agent. A running agent is probably about to process them.
    fn partial_slice(&self, subject: String, message: &str) -> Option<Finding> {
        if self.is_served {
            return None;
        }
        let whose =
            if self.places.contains(&subject) { "a recorded VM uses it" } else { "no recorded VM uses it" };
        let fix = "`systemctl start host-agent`: it completes or reverts this when it starts";
        Some(Finding::problem("slices", format!("incomplete: {message}; {whose}"), fix).of(subject))
    }
}

fn fix(error: &SliceError) -> &'static str {
    match error {
        SliceError::BlocksOnline { .. } => "take them offline, then `systemctl restart host-agent`",
        SliceError::ForeignDevice { .. } => {
            "`daxctl list` shows it, `daxctl destroy-device` removes it; then `systemctl restart host-agent`"
        }
        _ => RUN_AS_ROOT,
    }
}
