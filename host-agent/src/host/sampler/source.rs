//! Perf event by which a processor samples memory accesses, as found in sysfs.

use perf_event::{Builder, SampleSkid, events::Raw};
use units::limits::SAMPLED_CPUS_MAX;

use super::SamplerError;
use crate::host::{
    access_profile::AccessSource,
    sysfs::{Sysfs, SysfsError, parse_ranges},
};

/// Directory of perf event sources in sysfs.
const EVENT_SOURCES_FOLDER: &str = "bus/event_source/devices";
/// Definition of the event `mem-loads` in sysfs on Intel processors that support [`L3_MISS_EVENT`].
/// Processors with only efficient cores have a different definition, and use the number of
/// [`L3_MISS_EVENT`] for another event.
const MEM_LOADS_EVENT: &str = "event=0xcd";
/// Event type PERF_TYPE_RAW from linux/perf_event.h.
const PERF_TYPE_RAW: u32 = 4;
/// Event number of `MEM_LOAD_RETIRED.L3_MISS`: loads that miss the last-level cache, as in Spirit.
const L3_MISS_EVENT: u64 = 0x20d1;

/// Perf event whose samples contain the accessed address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventSource {
    pub access_source: AccessSource,
    /// Description of the event for messages.
    pub event_name: &'static str,
    /// Type of the event (`perf_event_attr.type`).
    pub kind: u32,
    /// Configuration of the event (`perf_event_attr.config`).
    pub config: u64,
    /// Whether samples must contain the exact instruction (`precise_ip`), which PEBS requires.
    pub is_precise: bool,
    /// Whether perf excludes accesses of the kernel; IBS cannot exclude them.
    pub excludes_kernel: bool,
}

impl EventSource {
    /// Finds the event of this machine's processors.
    pub fn find(sys: &Sysfs) -> Result<Self, SamplerError> {
        if sys.has(format!("{EVENT_SOURCES_FOLDER}/ibs_op")) {
            return Ok(Self::ibs(sys)?);
        }
        let loads = format!("{EVENT_SOURCES_FOLDER}/cpu/events/mem-loads");
        if !(sys.has(&loads) && sys.text(&loads)?.starts_with(MEM_LOADS_EVENT)) {
            return Err(SamplerError::None);
        }
        Ok(Self {
            access_source: AccessSource::Pebs,
            event_name: "loads that miss the last-level cache (PEBS)",
            kind: PERF_TYPE_RAW,
            config: L3_MISS_EVENT,
            is_precise: true,
            excludes_kernel: true,
        })
    }

    fn ibs(sys: &Sysfs) -> Result<Self, SysfsError> {
        let file = format!("{EVENT_SOURCES_FOLDER}/ibs_op/type");
        let kind = sys.number(&file)?;
        let kind =
            u32::try_from(kind).map_err(|_| sys.unreadable_error(file, kind.to_string(), "an event type"))?;
        // Count instructions instead of cycles, so that stalls do not count as accesses.
        let counts = format!("{EVENT_SOURCES_FOLDER}/ibs_op/format/cnt_ctl");
        let config = if sys.has(&counts) { read_config_bit(sys, &counts)? } else { 0 };
        let event_name = "instructions that load or store (IBS)";
        Ok(Self {
            access_source: AccessSource::Ibs,
            event_name,
            kind,
            config,
            is_precise: false,
            excludes_kernel: false,
        })
    }

    /// Returns the builder of the perf event.
    pub fn event(self) -> Builder<'static> {
        let mut builder = Builder::new(Raw::new(self.config));
        builder.attrs_mut().type_ = self.kind;
        if self.is_precise {
            builder.precise_ip(SampleSkid::RequestZero);
        }
        builder.exclude_kernel(self.excludes_kernel).exclude_hv(self.excludes_kernel);
        builder
    }
}

/// Reads the number of a bit from a file with contents such as `config:19`, and returns a value in
/// which only this bit is set.
fn read_config_bit(sys: &Sysfs, file: &str) -> Result<u64, SysfsError> {
    let text = sys.text(file)?;
    let bit = text.strip_prefix("config:").and_then(|bit| bit.parse().ok());
    bit.and_then(|bit| 1_u64.checked_shl(bit)).ok_or_else(|| sys.unreadable_error(file, text, "config:BIT"))
}

/// Returns the online processors, at most [`SAMPLED_CPUS_MAX`], from a list such as `0-3,8`.
pub(super) fn processors(sys: &Sysfs) -> Result<Vec<usize>, SysfsError> {
    const ONLINE_CPUS_FILE: &str = "devices/system/cpu/online";
    let text = sys.text(ONLINE_CPUS_FILE)?;
    let ranges = parse_ranges(&text).filter(|ranges| !ranges.is_empty());
    let ranges =
        ranges.ok_or_else(|| sys.unreadable_error(ONLINE_CPUS_FILE, text, "a list of processors"))?;
    Ok(ranges.into_iter().flatten().take(SAMPLED_CPUS_MAX).collect())
}
