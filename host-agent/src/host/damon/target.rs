//! Process to be monitored by DAMON, with its address ranges: all its memory except device memory.

use std::ops::Range;

use units::SLICE;

use crate::host::{
    process::{Mapping, all_mappings},
    sysfs::Sysfs,
};

/// Process with the address ranges that may be monitored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Identifier of the process.
    pub pid: u32,
    /// Address ranges without device memory, in ascending order. A range may include unmapped gaps.
    pub ranges: Vec<Range<usize>>,
    /// Size of the mapped device memory, in bytes.
    pub device_bytes: u64,
}

impl Target {
    /// Returns a target for the whole memory of a process, on a host without device-dax memory.
    fn whole(pid: u32) -> Self {
        Self { pid, ranges: Vec::new(), device_bytes: 0 }
    }

    /// Returns a target with the current address ranges of a process; no ranges if the process has
    /// ended.
    pub fn of(pid: u32) -> Self {
        Self::from_mappings(pid, &all_mappings(pid).unwrap_or_default())
    }

    /// Returns the function that creates the target of a process. Mappings are examined only if processes
    /// may have device memory. `sys` is the root of sysfs.
    pub fn without_device_memory(sys: &Sysfs) -> fn(u32) -> Self {
        let devices = sys.numbered_names("bus/dax/devices", "dax").unwrap_or_default();
        if devices.is_empty() { Self::whole } else { Self::of }
    }

    /// Joins neighbouring mappings to ranges. Mappings are not joined across a gap that is large
    /// enough for a slice, because a slice may be mapped there later.
    fn from_mappings(pid: u32, mappings: &[Mapping]) -> Self {
        let mut target = Self { pid, ranges: Vec::new(), device_bytes: 0 };
        let mut is_after_device = true;
        for Mapping { addresses, is_device } in mappings {
            if *is_device {
                target.device_bytes += addresses.len() as u64;
            } else {
                let is_near = |last: &Range<usize>| {
                    ((addresses.start - last.end) as u64) < SLICE.get() && !is_after_device
                };
                match target.ranges.last_mut().filter(|last| is_near(last)) {
                    Some(last) => last.end = addresses.end,
                    None => target.ranges.push(addresses.clone()),
                }
            }
            is_after_device = *is_device;
        }
        target
    }

    /// Returns the `max` largest ranges, in ascending order of addresses.
    pub fn largest_ranges(&self, max: usize) -> Vec<Range<usize>> {
        let mut ranges = self.ranges.clone();
        ranges.sort_by_key(|range| std::cmp::Reverse(range.len()));
        ranges.truncate(max);
        ranges.sort_by_key(|range| range.start);
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn mapping(addresses: Range<usize>, is_device: bool) -> Mapping {
        Mapping { addresses, is_device }
    }

    #[test]
    fn ranges_end_at_device_memory_and_at_gaps_of_a_slice() {
        let target = Target::from_mappings(
            7,
            &[
                mapping(0x1000..0x2000, false),
                mapping(0x5000..0x6000, false),
                mapping(GIB..2 * GIB, true),
                mapping(2 * GIB..2 * GIB + 0x1000, false),
                mapping(3 * GIB + 0x1000..3 * GIB + 0x2000, false),
                mapping(4 * GIB..6 * GIB, true),
            ],
        );
        let ranges = vec![0x1000..0x6000, 2 * GIB..2 * GIB + 0x1000, 3 * GIB + 0x1000..3 * GIB + 0x2000];
        assert_eq!(target, Target { pid: 7, ranges, device_bytes: 3 * GIB as u64 });
    }

    #[test]
    fn largest_ranges_are_sorted_by_address() {
        let ranges = vec![0..10, 20..25, 30..50];
        let target = Target { pid: 7, ranges, device_bytes: 0 };
        assert_eq!(target.largest_ranges(2), [0..10, 30..50]);
    }

    #[test]
    fn own_process_has_ranges_to_monitor() {
        let target = Target::of(std::process::id());
        let address = std::ptr::from_ref(&target) as usize;
        assert!(target.ranges.iter().any(|range| range.contains(&address)), "{target:?}");
    }
}
