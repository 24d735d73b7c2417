//! Choice of the window of each new region, and order in which regions are created. Pure: it
//! changes nothing.

use std::{cmp::Reverse, collections::BTreeMap, path::PathBuf};

use units::{Bytes, SLICE};

use super::topology::{Decoder, Window};

/// Device without a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Bare {
    /// Size of its future region: whole slices.
    pub(super) bytes: Bytes,
    pub(super) decoders: Vec<Decoder>,
    /// Windows that can contain its region, best first.
    pub(super) fit: Vec<Window>,
    /// Other windows, with the reason why they cannot.
    pub(super) others: Vec<String>,
}

/// Moves the chosen window of each device to the front, and orders the devices by window: decoders
/// of a bridge above several devices must be used in ascending order of addresses. The largest
/// device chooses first, because it has the fewest choices.
pub(super) fn in_order<T>(mut bare: Vec<(T, Bare)>) -> Vec<(T, Bare)> {
    bare.sort_by_key(|(_, device)| Reverse(device.bytes));
    let mut taken = BTreeMap::<PathBuf, u64>::new();
    for (_, device) in &mut bare {
        let bytes = device.bytes.get();
        let has_room = |window: &Window| {
            window.free - taken.get(&window.folder).unwrap_or(&0).min(&window.free) >= bytes
        };
        if let Some(chosen) = device.fit.iter().position(has_room) {
            device.fit[..=chosen].rotate_right(1);
            *taken.entry(device.fit[0].folder.clone()).or_default() += bytes;
        }
    }
    bare.sort_by_key(|(_, device)| device.fit.first().map(|window| window.start));
    bare
}

/// Returns the windows that can contain a region of a device, best first, and the reason for each
/// other one. Windows aligned to whole GiB come first, so that slices can be mapped by huge pages,
/// and smaller ones before larger ones, so that larger devices find space.
pub(super) fn fitting(windows: Vec<Window>, bridge: Option<u64>, bytes: Bytes) -> (Vec<Window>, Vec<String>) {
    let (mut fit, mut others) = (Vec::new(), Vec::new());
    for window in windows {
        match unfit(&window, bridge, bytes) {
            None => fit.push(window),
            Some(why) => others.push(format!("{} {why}", window.name)),
        }
    }
    fit.sort_by_key(|window| (!window.start.is_multiple_of(SLICE.get()), window.free));
    (fit, others)
}

fn unfit(window: &Window, bridge: Option<u64>, bytes: Bytes) -> Option<String> {
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
        let (fit, others) = fitting(windows, Some(12), Bytes::gib(4));
        assert_eq!(names(&fit), ["right", "wide", "askew"]);
        let why = [
            "small has 1GiB free",
            "elsewhere does not lead to it",
            "both interleaves 2 host bridges",
            "for pmem is not for volatile memory",
        ];
        assert_eq!(others, why);
    }

    /// Returns, for devices as `(name, GiB)` on one bridge, the window of each in order of
    /// creation.
    fn plan(windows: &[Window], devices: &[(&'static str, u64)]) -> Vec<String> {
        let bare = |(name, gib): &(&'static str, u64)| {
            let bytes = Bytes::gib(*gib);
            let (fit, others) = fitting(windows.to_vec(), Some(12), bytes);
            (*name, Bare { bytes, decoders: Vec::new(), fit, others })
        };
        let ordered = in_order(devices.iter().map(bare).collect());
        ordered.iter().map(|(name, bare)| format!("{name} in {}", bare.fit[0].name)).collect()
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
