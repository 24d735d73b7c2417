//! Checks of the CXL memory devices and their slices. The checks are read-only: only the agent
//! creates and removes regions and slices.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use units::Bytes;

use super::{CxlBackend, Finding, Machine, RUN_AS_ROOT, problems_or_passed};
use crate::host::{
    blocks::Block,
    cxl::{self, CxlError, DeviceState, InspectedDevice, SliceName},
    slices::{self, Driver, PresentSlice, SliceError, Slices},
};

/// Physical address ranges of the regions on each NUMA node with pool memory.
pub(super) type Nodes = BTreeMap<u32, Vec<Range<u64>>>;

/// Settings for the check of each device.
struct DeviceCheck<'a> {
    backend: CxlBackend,
    /// Locations of the slices in the agent's VM records.
    recorded_slices: &'a BTreeSet<String>,
    /// Whether an agent runs, which may be changing slices at this moment.
    agent_is_running: bool,
}

/// Checks each device. Returns the findings, and the NUMA nodes of the usable devices.
pub(super) fn check_devices(
    machine: &Machine,
    backend: CxlBackend,
    recorded_slices: &BTreeSet<String>,
    agent_is_running: bool,
) -> (Vec<Finding>, Nodes) {
    let devices = match cxl::inspect(&machine.sys) {
        Ok(devices) => devices,
        Err(error) => return (vec![no_device_finding(machine, &error)], Nodes::new()),
    };
    let check = DeviceCheck { backend, recorded_slices, agent_is_running };
    let mut nodes = Nodes::new();
    for slices in devices.iter().filter_map(|device| slices_of(device)) {
        let region = slices.region();
        nodes.entry(slices.node()).or_default().push(region.base..region.base + region.bytes.get());
    }
    (devices.iter().flat_map(|device| check.check_device(device)).collect(), nodes)
}

fn slices_of(device: &InspectedDevice) -> Option<&Slices> {
    match &device.state {
        Ok(DeviceState::Present(slices)) => Some(slices),
        _ => None,
    }
}

/// Reports that there is no CXL device, and how much memory the firmware has reserved.
fn no_device_finding(machine: &Machine, error: &CxlError) -> Finding {
    let reserved = soft_reserved_bytes(&machine.proc.text("iomem").unwrap_or_default());
    let reserved = match reserved {
        None => String::new(),
        Some(bytes) => format!(
            "; the firmware has reserved memory ({bytes}, \"Soft Reserved\" in /proc/iomem), but without CXL drivers the kernel \
             offers it only as dax devices without a serial number (dax_hmem), which cannot be used"
        ),
    };
    Finding::problem(
        "devices",
        format!("{error}{reserved}"),
        "`modprobe -a cxl_acpi cxl_pci cxl_mem`, then `systemctl restart host-agent`",
    )
}

/// Returns the total size of the soft-reserved ranges in /proc/iomem, with lines such as
/// `  100000000-1ffffffff : Soft Reserved`. For users other than root all addresses read as 0.
fn soft_reserved_bytes(iomem: &str) -> Option<Bytes> {
    let ranges =
        iomem.lines().filter_map(|line| line.trim().strip_suffix(" : Soft Reserved")?.split_once('-'));
    let number = |digits| u64::from_str_radix(digits, 16).unwrap_or(0);
    let sizes: Vec<u64> =
        ranges.map(|(first, last)| number(last) + 1 - number(first).min(number(last))).collect();
    (!sizes.is_empty()).then(|| Bytes::new(sizes.iter().sum()))
}

impl DeviceCheck<'_> {
    fn check_device(&self, device: &InspectedDevice) -> Vec<Finding> {
        let restart =
            "after the fix, `systemctl restart host-agent`: the agent discovers devices when it starts";
        let found = match &device.state {
            Err(problem) => vec![Finding::problem("devices", units::chain(problem), restart)],
            Ok(DeviceState::Present(slices)) => self.check_slices(&device.serial, slices),
            Ok(DeviceState::Unbound(name)) => vec![self.pending_finding(format!("{name} has no driver"))],
            Ok(DeviceState::Incomplete(name)) => vec![self.pending_finding(format!("{name} is incomplete"))],
            Ok(DeviceState::NoRegion { window, start }) => vec![match slices::alignment(*start) {
                Ok(align) => self.pending_finding(format!(
                    "{} have no region; {window} has space for a region aligned to {align}",
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
                    finding.with_subject(format!("device {}", device.serial))
                } else {
                    finding
                }
            })
            .collect()
    }

    /// Reports a condition that the agent resolves when it starts. The condition is a problem only
    /// if an agent runs already.
    fn pending_finding(&self, message: String) -> Finding {
        match self.agent_is_running {
            false => Finding::passed("devices", format!("{message}: the agent fixes this when it starts")),
            true => Finding::problem(
                "devices",
                format!("{message}, and the running agent has not fixed this"),
                "read the agent's log (`journalctl -u host-agent`), then `systemctl restart host-agent`",
            ),
        }
    }

    fn check_slices(&self, serial: &str, slices: &Slices) -> Vec<Finding> {
        let inspected =
            slices.devices_to_remove().and_then(|to_remove| Ok((to_remove, slices.present_slices()?)));
        let (to_remove, found) = match inspected {
            Ok(inspected) => inspected,
            Err(error) => {
                return vec![Finding::problem("devices", units::chain(&error), suggest_fix(&error))];
            }
        };
        let mut problems: Vec<_> = to_remove
            .into_iter()
            .filter(|name| !name.ends_with(".0"))
            .filter_map(|name| self.partial_slice_finding(name, "it has no memory"))
            .collect();
        for (index, found) in &found {
            let place = SliceName { serial: serial.to_owned(), index: *index }.to_string();
            problems.extend(self.check_slice(slices, *index, found, &place));
        }
        let region = slices.region();
        problems_or_passed(problems, || {
            let (name, at, node) = (&region.name, region.base, slices.node());
            let (count, align, present) = (slices.count(), slices.align(), found.len());
            Finding::passed(
                "devices",
                format!(
                    "{name} at address {at:#x} on node {node} has {count} slices aligned to {align}, {present} of them in use"
                ),
            )
        })
    }

    /// Checks one slice that has a dax device.
    fn check_slice(&self, slices: &Slices, index: u32, found: &PresentSlice, place: &str) -> Option<Finding> {
        if found.driver.is_none() {
            return self.partial_slice_finding(place.to_owned(), "it has no driver");
        }
        let blocks = slices.blocks(index).unwrap_or_default();
        let online: Vec<&Block> = blocks.iter().filter(|block| !block.is_offline()).collect();
        match (self.backend, found.driver) {
            (CxlBackend::Dax, Some(Driver::Kmem)) if !online.is_empty() => {
                let message =
                    format!("{} memory blocks of the slice are online, but the backend is dax", online.len());
                let fix = format!(
                    "`echo offline > /sys/devices/system/memory/{}/state`, and the same for the other blocks",
                    online[0].name
                );
                Some(Finding::problem("slices", message, fix).with_subject(place))
            }
            (CxlBackend::Blocks, Some(Driver::Kmem)) if (1..blocks.len()).contains(&online.len()) => self
                .partial_slice_finding(
                    place.to_owned(),
                    &format!("{} of {} memory blocks are online", online.len(), blocks.len()),
                ),
            _ => None,
        }
    }

    /// Reports a slice that a killed agent left half added or half removed. Returns `None` while an
    /// agent runs, because the agent may be adding or removing the slice at this moment.
    fn partial_slice_finding(&self, subject: String, message: &str) -> Option<Finding> {
        if self.agent_is_running {
            return None;
        }
        let user = if self.recorded_slices.contains(&subject) {
            "a recorded VM uses it"
        } else {
            "no recorded VM uses it"
        };
        let fix = "`systemctl start host-agent`: the agent completes or removes the slice when it starts";
        Some(
            Finding::problem("slices", format!("incomplete slice: {message}; {user}"), fix)
                .with_subject(subject),
        )
    }
}

fn suggest_fix(error: &SliceError) -> &'static str {
    match error {
        SliceError::BlocksOnline { .. } => "offline these memory blocks, then `systemctl restart host-agent`",
        SliceError::ForeignDevice { .. } => {
            "remove the dax device (`daxctl list`, `daxctl destroy-device`), then `systemctl restart host-agent`"
        }
        _ => RUN_AS_ROOT,
    }
}
