//! CXL memory devices of the machine, with their slices. Nothing is created or removed: that is
//! left to the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use units::Bytes;

use super::{AS_ROOT, Finding, Machine, Use, each};
use crate::host::{
    blocks::Block,
    cxl::{self, CxlError, Seen, Sight, SliceName},
    slices::{self, Driver, Found, SliceError, Slices},
};

/// Regions of each node with pool memory.
pub(super) type Nodes = BTreeMap<u32, Vec<Range<u64>>>;

/// State common to all devices.
struct Look<'a> {
    used: Use,
    /// Slices in records of VMs.
    places: &'a BTreeSet<String>,
    /// An agent may be working on them.
    is_served: bool,
}

/// Checks each device, and returns the nodes of their memory.
pub(super) fn all(
    machine: &Machine,
    used: Use,
    places: &BTreeSet<String>,
    is_served: bool,
) -> (Vec<Finding>, Nodes) {
    let devices = match cxl::look(&machine.sys) {
        Ok(devices) => devices,
        Err(error) => return (vec![none(machine, &error)], Nodes::new()),
    };
    let look = Look { used, places, is_served };
    let mut nodes = Nodes::new();
    for slices in devices.iter().filter_map(|device| slices_of(device)) {
        let region = slices.region();
        nodes.entry(slices.node()).or_default().push(region.base..region.base + region.bytes.get());
    }
    (devices.iter().flat_map(|device| look.device(device)).collect(), nodes)
}

fn slices_of(device: &Seen) -> Option<&Slices> {
    match &device.sight {
        Ok(Sight::There(slices)) => Some(slices),
        _ => None,
    }
}

/// Reports that there is no device, with memory reserved for one by the firmware.
fn none(machine: &Machine, error: &CxlError) -> Finding {
    let aside = soft_reserved(&machine.proc.text("iomem").unwrap_or_default());
    let aside = match aside {
        None => String::new(),
        Some(bytes) => format!(
            "; yet the firmware has set memory aside ({bytes}, \"Soft Reserved\" in /proc/iomem): without its CXL drivers the kernel \
             shows that as dax devices without a serial (dax_hmem), and no rack knows which device they are of"
        ),
    };
    Finding::bad(
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

impl Look<'_> {
    fn device(&self, device: &Seen) -> Vec<Finding> {
        let again = "then `systemctl restart host-agent`: it looks for devices when it starts";
        let found = match &device.sight {
            Err(problem) => vec![Finding::bad("devices", units::chain(problem), again)],
            Ok(Sight::There(slices)) => self.slices(&device.serial, slices),
            Ok(Sight::Unused(name)) => vec![self.to_come(format!("{name} has no driver"))],
            Ok(Sight::Unfinished(name)) => vec![self.to_come(format!("{name} was never finished"))],
            Ok(Sight::Bare { window, start }) => vec![match slices::alignment(*start) {
                Ok(align) => self.to_come(format!(
                    "{} without a region; {window} is for one, aligned to {align}",
                    device.bytes
                )),
                Err(error) => Finding::bad(
                    "devices",
                    format!("{window}: {error}"),
                    "a matter of the firmware's settings",
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
    fn to_come(&self, what: String) -> Finding {
        match self.is_served {
            false => Finding::good("devices", format!("{what}: the agent sees to it when it starts")),
            true => Finding::bad(
                "devices",
                format!("{what}, and the agent has not seen to it"),
                "see why in its log (`journalctl -u host-agent`), then `systemctl restart host-agent`",
            ),
        }
    }

    fn slices(&self, serial: &str, slices: &Slices) -> Vec<Finding> {
        let looked = slices.to_clear().and_then(|left| Ok((left, slices.found()?)));
        let (left, found) = match looked {
            Ok(looked) => looked,
            Err(error) => return vec![Finding::bad("devices", units::chain(&error), mend(&error))],
        };
        let mut wrong: Vec<_> = left
            .into_iter()
            .filter(|name| !name.ends_with(".0"))
            .filter_map(|name| self.half(name, "has no memory"))
            .collect();
        for (index, found) in &found {
            let place = SliceName { serial: serial.to_owned(), index: *index }.to_string();
            wrong.extend(self.slice(slices, *index, found, &place));
        }
        let region = slices.region();
        each(wrong, || {
            let (name, at, node) = (&region.name, region.base, slices.node());
            let (count, align, here) = (slices.count(), slices.align(), found.len());
            Finding::good(
                "devices",
                format!(
                    "{name} at {at:#x} of node {node}: {count} slices aligned to {align}, {here} of them here"
                ),
            )
        })
    }

    /// Checks one slice that is present in the kernel.
    fn slice(&self, slices: &Slices, index: u32, found: &Found, place: &str) -> Option<Finding> {
        if found.driver.is_none() {
            return self.half(place.to_owned(), "has no driver");
        }
        let blocks = slices.blocks(index).unwrap_or_default();
        let online: Vec<&Block> = blocks.iter().filter(|block| !block.is_offline()).collect();
        match (self.used, found.driver) {
            (Use::Dax, Some(Driver::Kmem)) if !online.is_empty() => {
                let what = format!(
                    "{} blocks of it are memory of the kernel's, and this host is to have ranges of device-dax",
                    online.len()
                );
                let mend = format!(
                    "`echo offline > /sys/devices/system/memory/{}/state`, and so for the others",
                    online[0].name
                );
                Some(Finding::bad("slices", what, mend).of(place))
            }
            (Use::Blocks, Some(Driver::Kmem)) if (1..blocks.len()).contains(&online.len()) => self
                .half(place.to_owned(), &format!("has {} of {} blocks online", online.len(), blocks.len())),
            _ => None,
        }
    }

    /// Reports remains of a killed agent. A running agent is probably about to process them.
    fn half(&self, subject: String, what: &str) -> Option<Finding> {
        if self.is_served {
            return None;
        }
        let whose =
            if self.places.contains(&subject) { "a VM on record has it" } else { "no VM on record has it" };
        let mend = "`systemctl start host-agent`: it finishes or undoes this when it starts";
        Some(Finding::bad("slices", format!("half there: {what}; {whose}"), mend).of(subject))
    }
}

fn mend(error: &SliceError) -> &'static str {
    match error {
        SliceError::Online { .. } => "offline them, then `systemctl restart host-agent`",
        SliceError::Foreign { .. } => {
            "`daxctl list` shows it, `daxctl destroy-device` removes it; then `systemctl restart host-agent`"
        }
        _ => AS_ROOT,
    }
}
