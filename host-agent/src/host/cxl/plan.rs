//! Choice of the window of each new region, and order in which regions are created. Pure: it
//! changes nothing.

use std::{cmp::Reverse, collections::BTreeMap, path::PathBuf};

use units::{Bytes, SLICE};

use super::topology::{Decoder, Window};

/// Device without a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionPlan {
    /// Size of its future region: whole slices.
    pub(super) bytes: Bytes,
    pub(super) decoders: Vec<Decoder>,
    /// Windows that can contain its region, best first.
    pub(super) windows: Vec<Window>,
    /// Other windows, with the reason why they cannot.
    pub(super) rejected: Vec<String>,
}

/// Moves the chosen window of each device to the front, and orders the devices by window: decoders
/// of a bridge above several devices must be used in ascending order of addresses. The largest
/// device chooses first, because it has the fewest choices.
pub(super) fn assign_windows<T>(mut plans: Vec<(T, RegionPlan)>) -> Vec<(T, RegionPlan)> {
    plans.sort_by_key(|(_, device)| Reverse(device.bytes));
    let mut allocated = BTreeMap::<PathBuf, u64>::new();
    for (_, device) in &mut plans {
        let bytes = device.bytes.get();
        let has_room = |window: &Window| {
            window.free - allocated.get(&window.folder).unwrap_or(&0).min(&window.free) >= bytes
        };
        if let Some(chosen) = device.windows.iter().position(has_room) {
            device.windows[..=chosen].rotate_right(1);
            *allocated.entry(device.windows[0].folder.clone()).or_default() += bytes;
        }
    }
    plans.sort_by_key(|(_, device)| device.windows.first().map(|window| window.start));
    plans
}

/// Returns the windows that can contain a region of a device, best first, and the reason for each
/// other one. Windows aligned to whole GiB come first, so that slices can be mapped by huge pages,
/// and smaller ones before larger ones, so that larger devices find space.
pub(super) fn select_windows(
    windows: Vec<Window>,
    bridge: Option<u64>,
    bytes: Bytes,
) -> (Vec<Window>, Vec<String>) {
    let (mut selected, mut rejected) = (Vec::new(), Vec::new());
    for window in windows {
        match rejection_reason(&window, bridge, bytes) {
            None => selected.push(window),
            Some(reason) => rejected.push(format!("{} {reason}", window.name)),
        }
    }
    selected.sort_by_key(|window| (!window.start.is_multiple_of(SLICE.get()), window.free));
    (selected, rejected)
}

fn rejection_reason(window: &Window, bridge: Option<u64>, bytes: Bytes) -> Option<String> {
    if !bridge.is_some_and(|bridge| window.targets.contains(&bridge)) {
        Some("does not lead to it".to_owned())
    } else if window.targets.len() > 1 {
        Some(format!("interleaves {} host bridges", window.targets.len()))
    } else if !window.takes_ram {
        Some("is not for volatile memory".to_owned())
    } else if window.free < bytes.get() {
        Some(format!("has {} free", Bytes::new(window.free)))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn window(name: &str, start_mib: u64, gib: u64, targets: &[u64]) -> Window {
        Window {
            name: name.into(),
            folder: name.into(),
            start: start_mib << 20,
            free: gib << 30,
            takes_ram: name != "for pmem",
            targets: targets.to_vec(),
        }
    }

    fn names(windows: &[Window]) -> Vec<&str> {
        windows.iter().map(|window| &*window.name).collect()
    }

    #[test]
    fn windows_are_selected_by_properties_not_number() {
        let windows = vec![
            window("askew", 43 * 1024 + 256, 4, &[12]),
            window("small", 43 * 1024, 1, &[12]),
            window("elsewhere", 43 * 1024, 8, &[13]),
            window("wide", 43 * 1024, 8, &[12]),
            window("right", 51 * 1024, 4, &[12]),
            window("both", 59 * 1024, 8, &[12, 13]),
            window("for pmem", 67 * 1024, 8, &[12]),
        ];
        let (selected, rejected) = select_windows(windows, Some(12), Bytes::gib(4));
        assert_eq!(names(&selected), ["right", "wide", "askew"]);
        let reasons = [
            "small has 1GiB free",
            "elsewhere does not lead to it",
            "both interleaves 2 host bridges",
            "for pmem is not for volatile memory",
        ];
        assert_eq!(rejected, reasons);
    }

    /// Returns, for devices as `(name, GiB)` on one bridge, the window of each in order of
    /// creation.
    fn plan(windows: &[Window], devices: &[(&'static str, u64)]) -> Vec<String> {
        let plan = |(name, gib): &(&'static str, u64)| {
            let bytes = Bytes::gib(*gib);
            let (windows, rejected) = select_windows(windows.to_vec(), Some(12), bytes);
            (*name, RegionPlan { bytes, decoders: Vec::new(), windows, rejected })
        };
        let ordered = assign_windows(devices.iter().map(plan).collect());
        ordered.iter().map(|(name, plan)| format!("{name} in {}", plan.windows[0].name)).collect()
    }

    #[test]
    fn regions_are_created_in_ascending_order() {
        let low_and_high = |low, high| [window("low", 0, low, &[12]), window("high", 64 * 1024, high, &[12])];
        let devices = [("four", 4), ("two", 2)];
        assert_eq!(plan(&low_and_high(2, 4), &devices), ["two in low", "four in high"]);
        assert_eq!(plan(&low_and_high(4, 2), &devices), ["four in low", "two in high"]);
        assert_eq!(plan(&low_and_high(4, 4), &[("a", 4), ("b", 4)]), ["a in low", "b in high"]);
        assert_eq!(plan(&[window("one", 0, 8, &[12])], &devices), ["four in one", "two in one"]);
    }

    #[test]
    fn device_without_space_still_tries_its_windows() {
        assert_eq!(plan(&[window("one", 0, 4, &[12])], &[("a", 4), ("b", 4)]), ["a in one", "b in one"]);
    }
}
