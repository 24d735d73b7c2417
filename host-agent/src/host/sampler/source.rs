//! Sampled event of a processor as perf event, found by the kernel's description of its counters.

use perf_event::{Builder, SampleSkid, events::Raw};
use units::limits::SAMPLED_CPUS_MAX;

use super::SamplerError;
use crate::host::{
    access_profile::AccessSource,
    sysfs::{Sysfs, SysfsError, parse_ranges},
};

/// Folder of event sources.
const DEVICES: &str = "bus/event_source/devices";
/// Event of Intel processors that sample addresses of loads, and event number of loads that miss
/// the last cache, as in Spirit (`MEM_LOAD_RETIRED.L3_MISS`). Processors with efficient cores only
/// use that number for another event, and have a different event for loads.
const LOADS: &str = "event=0xcd";
const RAW: u32 = 4;
const L3_MISS: u64 = 0x20d1;

/// Event with addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub access_source: AccessSource,
    /// Description.
    pub event_name: &'static str,
    /// Type and configuration in perf.
    pub kind: u32,
    pub config: u64,
    /// Whether perf must be precise.
    pub is_precise: bool,
    /// Whether the kernel can be excluded.
    pub is_of_users: bool,
}

impl Source {
    /// Returns the event of this machine.
    pub fn find(sys: &Sysfs) -> Result<Self, SamplerError> {
        if sys.has(format!("{DEVICES}/ibs_op")) {
            return Ok(Self::ibs(sys)?);
        }
        let loads = format!("{DEVICES}/cpu/events/mem-loads");
        if !(sys.has(&loads) && sys.text(&loads)?.starts_with(LOADS)) {
            return Err(SamplerError::None);
        }
        Ok(Self {
            access_source: AccessSource::Pebs,
            event_name: "loads that miss the last cache (PEBS)",
            kind: RAW,
            config: L3_MISS,
            is_precise: true,
            is_of_users: true,
        })
    }

    fn ibs(sys: &Sysfs) -> Result<Self, SysfsError> {
        let file = format!("{DEVICES}/ibs_op/type");
        let kind = sys.number(&file)?;
        let kind =
            u32::try_from(kind).map_err(|_| sys.unreadable(file, kind.to_string(), "a kind of events"))?;
        // Instructions are counted instead of cycles, so that stalls do not count as accesses.
        let counts = format!("{DEVICES}/ibs_op/format/cnt_ctl");
        let config = if sys.has(&counts) { bit(sys, &counts)? } else { 0 };
        let event_name = "instructions that load or store (IBS)";
        Ok(Self {
            access_source: AccessSource::Ibs,
            event_name,
            kind,
            config,
            is_precise: false,
            is_of_users: false,
        })
    }

    /// Returns the event for perf.
    pub fn event(self) -> Builder<'static> {
        let mut builder = Builder::new(Raw::new(self.config));
        builder.attrs_mut().type_ = self.kind;
        if self.is_precise {
            builder.precise_ip(SampleSkid::RequestZero);
        }
        builder.exclude_kernel(self.is_of_users).exclude_hv(self.is_of_users);
        builder
    }
}

/// Parses the bit of a file such as `config:19`.
fn bit(sys: &Sysfs, file: &str) -> Result<u64, SysfsError> {
    let text = sys.text(file)?;
    let bit = text.strip_prefix("config:").and_then(|bit| bit.parse().ok());
    bit.and_then(|bit| 1_u64.checked_shl(bit)).ok_or_else(|| sys.unreadable(file, text, "config: and a bit"))
}

/// Parses the processors of a list such as `0-3,8`, at most the number that is sampled.
pub(super) fn processors(sys: &Sysfs) -> Result<Vec<usize>, SysfsError> {
    const ONLINE: &str = "devices/system/cpu/online";
    let text = sys.text(ONLINE)?;
    let ranges = parse_ranges(&text).filter(|ranges| !ranges.is_empty());
    let ranges = ranges.ok_or_else(|| sys.unreadable(ONLINE, text, "a list of processors"))?;
    Ok(ranges.into_iter().flatten().take(SAMPLED_CPUS_MAX).collect())
}
