//! Choice of the window for each new region, and the order in which regions are created. This
//! module only computes; `region` performs the changes.

use std::{cmp::Reverse, collections::BTreeMap, path::PathBuf};

use units::{Bytes, SLICE};

use super::topology::{Decoder, Window};

/// Plan for the region of a device that has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionPlan {
    /// Size of the planned region, a multiple of the slice size.
    pub(super) bytes: Bytes,
    pub(super) decoders: Vec<Decoder>,
    /// Windows that can contain the region, in order of preference.
    pub(super) windows: Vec<Window>,
    /// Other windows, each with the reason why it cannot contain the region.
    pub(super) rejected: Vec<String>,
}

/// Moves the chosen window of each device to the front, and sorts the devices by the address of
/// their window: a host bridge with several devices requires that its decoders are programmed in
/// ascending order of addresses. The windows of large devices are chosen first, because few windows
/// have enough space for them.
pub(super) fn assign_windows<T>(mut plans: Vec<(T, RegionPlan)>) -> Vec<(T, RegionPlan)> {
    plans.sort_by_key(|(_, device)| Reverse(device.bytes));
    let mut allocated = BTreeMap::<PathBuf, u64>::new();
    for (_, device) in &mut plans {
        let bytes = device.bytes.get();
        let has_space = |window: &Window| {
            window.free - allocated.get(&window.folder).unwrap_or(&0).min(&window.free) >= bytes
        };
        if let Some(chosen) = device.windows.iter().position(has_space) {
            device.windows[..=chosen].rotate_right(1);
            *allocated.entry(device.windows[0].folder.clone()).or_default() += bytes;
        }
    }
    plans.sort_by_key(|(_, device)| device.windows.first().map(|window| window.start));
    plans
}

/// Returns the windows that can contain a region of `bytes`, in order of preference, and the other
/// windows with the reason for their rejection.
///
/// Windows aligned to 1 GiB come first, so that slices can be mapped by huge pages. Among these,
/// windows with less free space come first, so that larger devices still find space.
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
        Some("does not include the device's host bridge".to_owned())
    } else if window.targets.len() > 1 {
        Some(format!("interleaves {} host bridges", window.targets.len()))
    } else if !window.supports_ram {
        Some("does not support volatile memory".to_owned())
    } else if window.free < bytes.get() {
        Some(format!("has only {} free", Bytes::new(window.free)))
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
            supports_ram: name != "for pmem",
            targets: targets.to_vec(),
        }
    }

    fn names(windows: &[Window]) -> Vec<&str> {
        windows.iter().map(|window| &*window.name).collect()
    }

    #[test]
    fn windows_are_ordered_by_alignment_then_free_space() {
        let windows = vec![
            window("misaligned", 43 * 1024 + 256, 4, &[12]),
            window("small", 43 * 1024, 1, &[12]),
            window("other bridge", 43 * 1024, 8, &[13]),
            window("large", 43 * 1024, 8, &[12]),
            window("exact", 51 * 1024, 4, &[12]),
            window("interleaved", 59 * 1024, 8, &[12, 13]),
            window("for pmem", 67 * 1024, 8, &[12]),
        ];
        let (selected, rejected) = select_windows(windows, Some(12), Bytes::gib(4));
        assert_eq!(names(&selected), ["exact", "large", "misaligned"]);
        let reasons = [
            "small has only 1GiB free",
            "other bridge does not include the device's host bridge",
            "interleaved interleaves 2 host bridges",
            "for pmem does not support volatile memory",
        ];
        assert_eq!(rejected, reasons);
    }

    /// Plans the regions of devices on one host bridge, each given as name and size in GiB. Returns
    /// `DEVICE in WINDOW` in the order of creation.
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
    fn regions_are_created_in_ascending_order_of_addresses() {
        let low_and_high = |low, high| [window("low", 0, low, &[12]), window("high", 64 * 1024, high, &[12])];
        let devices = [("four", 4), ("two", 2)];
        assert_eq!(plan(&low_and_high(2, 4), &devices), ["two in low", "four in high"]);
        assert_eq!(plan(&low_and_high(4, 2), &devices), ["four in low", "two in high"]);
        assert_eq!(plan(&low_and_high(4, 4), &[("a", 4), ("b", 4)]), ["a in low", "b in high"]);
        assert_eq!(plan(&[window("one", 0, 8, &[12])], &devices), ["four in one", "two in one"]);
    }

    #[test]
    fn device_keeps_its_window_when_other_devices_fill_it() {
        assert_eq!(plan(&[window("one", 0, 4, &[12])], &[("a", 4), ("b", 4)]), ["a in one", "b in one"]);
    }
}
