//! Memory of the host that is available for soft memory.

use units::Bytes;

use crate::host::sysfs::{Sysfs, SysfsError};

/// Bytes of a page.
pub const PAGE_BYTES: u64 = soft::PAGE_BYTES as u64;
/// If processes wait for memory, this part of the soft memory in use is taken at once.
const STALLED_DIVISOR: u64 = 64;
/// If processes wait for memory, this number of pages is taken at least (4 MiB).
const STALLED_PAGES_MIN: u64 = 1024;

/// Memory of the host at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Memory that is available without swapping.
    available: Bytes,
    /// Microseconds in which some process waited for memory, if the kernel measures it.
    stalled_us: Option<u64>,
}

impl Sample {
    /// Reads the state of the host below the root of procfs.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(proc: &Sysfs) -> Result<Self, SysfsError> {
        let meminfo = proc.text("meminfo")?;
        let available = parse_meminfo(&meminfo, "MemAvailable")
            .ok_or_else(|| proc.unreadable_error("meminfo", meminfo, "a line MemAvailable"))?;
        // Without pressure stall information, only the available memory counts.
        let stalled_us = proc.text("pressure/memory").ok().and_then(|text| stalled_us(&text));
        Ok(Self { available, stalled_us })
    }

    /// Returns the pages that soft memory can grow by; negative if it must shrink. `used` is the number of pages of
    /// soft memory in use, and `interval_us` the time since the sample `last`.
    pub fn headroom(&self, last: Option<&Self>, interval_us: u64, rules: Rules, used: u64) -> i64 {
        let pages = |bytes: Bytes| i64::try_from(bytes.get() / PAGE_BYTES).unwrap_or(i64::MAX);
        let headroom = pages(self.available).saturating_sub(pages(rules.reserve));
        let stalled = last.and_then(|last| Some(self.stalled_us?.saturating_sub(last.stalled_us?)));
        let limit = interval_us.saturating_mul(rules.stalled_percent.into()) / 100;
        // Processes also wait at the limits of their own cgroups, which the memory of the host does not shorten.
        let is_near_reserve = self.available.get() < rules.reserve.get().saturating_mul(2);
        if !is_near_reserve || stalled.is_none_or(|stalled| interval_us == 0 || stalled < limit) {
            return headroom;
        }
        let taken = (used / STALLED_DIVISOR).max(STALLED_PAGES_MIN).min(used);
        headroom.min(-i64::try_from(taken).unwrap_or(i64::MAX))
    }
}

/// Rules for the memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Memory that must stay available.
    pub reserve: Bytes,
    /// Part of the time, in percent, from which on waiting processes show a shortage.
    pub stalled_percent: u8,
}

/// Returns a value of /proc/meminfo, such as `MemAvailable`.
pub fn parse_meminfo(meminfo: &str, name: &str) -> Option<Bytes> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(Bytes::new(kib.saturating_mul(1024)))
}

fn stalled_us(pressure: &str) -> Option<u64> {
    let line = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split_once("total=")?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules { reserve: Bytes::mib(100), stalled_percent: 10 };

    fn sample(mib: u64, stalled_us: Option<u64>) -> Sample {
        Sample { available: Bytes::mib(mib), stalled_us }
    }

    #[test]
    fn files_of_the_kernel_are_read() {
        let meminfo = "MemTotal:  100 kB\nMemFree:   10 kB\nMemAvailable:   70 kB\n";
        assert_eq!(parse_meminfo(meminfo, "MemAvailable"), Some(Bytes::new(70 * 1024)));
        assert_eq!(parse_meminfo(meminfo, "Mem"), None);
        let pressure = "some avg10=0.00 avg60=0.10 avg300=0.00 total=12345\nfull avg10=0.00 total=7\n";
        assert_eq!(stalled_us(pressure), Some(12_345));
        Sample::read(&Sysfs::at("/proc")).unwrap();
    }

    #[test]
    fn headroom_is_the_available_memory_less_the_reserve() {
        assert_eq!(sample(101, None).headroom(None, 0, RULES, 0), 256);
        assert_eq!(sample(90, Some(5)).headroom(Some(&sample(1, None)), 1000, RULES, 9000), -2560);
    }

    #[test]
    fn waiting_processes_show_a_shortage() {
        let last = sample(500, Some(1000));
        let headroom = |stalled, used| sample(199, Some(stalled)).headroom(Some(&last), 250_000, RULES, used);
        assert_eq!(headroom(25_999, 128_000), 25_344);
        assert_eq!(headroom(26_000, 128_000), -2000);
        assert_eq!(headroom(26_000, 2000), -1024);
        assert_eq!(headroom(26_000, 10), -10);
        let stalled = sample(200, Some(250_000)).headroom(Some(&last), 250_000, RULES, 128_000);
        assert_eq!(
            stalled, 25_600,
            "enough memory is available: the processes have reached their own limits"
        );
    }
}
