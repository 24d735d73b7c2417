//! What a processor is asked to sample: as perf's event, found by what the kernel shows of its counters.

use perf_event::{Builder, SampleSkid, events::Raw};
use units::limits::PROCESSORS_SAMPLED_MAX;

use super::SamplerError;
use crate::host::{
    sysfs::{Sysfs, SysfsError},
    watched::Eyes,
};

/// Where the kernel shows what can be counted.
const DEVICES: &str = "bus/event_source/devices";
/// Loads that missed the last cache (`MEM_LOAD_RETIRED.L3_MISS`), as Spirit counts them: of every server of Intel's since Haswell.
const L3_MISS: u64 = 0x20d1;
/// Software's number among perf's kinds of events, and that of page faults there: for tests, since every kernel can.
#[cfg(test)]
const SOFTWARE: u32 = 1;
#[cfg(test)]
const PAGE_FAULTS: u64 = 2;

/// An event whose samples have an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// Intel's.
    Pebs,
    /// AMD's, of this kind and with these bits.
    Ibs { kind: u32, config: u64 },
    /// Page faults.
    #[cfg(test)]
    Faults,
}

impl Source {
    /// What this machine has.
    pub fn find(sys: &Sysfs) -> Result<Self, SamplerError> {
        let ibs = format!("{DEVICES}/ibs_op");
        if sys.has(&ibs) {
            let kind = sys.number(format!("{ibs}/type"))?;
            let kind = u32::try_from(kind)
                .map_err(|_| sys.unreadable(format!("{ibs}/type"), kind.to_string(), "a kind of events"))?;
            // Instructions are counted, not cycles: who waits does not seem to touch more.
            let counts = format!("{ibs}/format/cnt_ctl");
            let config = if sys.has(&counts) { bit(sys, &counts)? } else { 0 };
            return Ok(Self::Ibs { kind, config });
        }
        // Shown where PEBS can tell addresses, and nowhere else.
        if sys.has(format!("{DEVICES}/cpu/events/mem-loads")) {
            Ok(Self::Pebs)
        } else {
            Err(SamplerError::None)
        }
    }

    pub const fn eyes(self) -> Eyes {
        match self {
            Self::Pebs => Eyes::Pebs,
            Self::Ibs { .. } => Eyes::Ibs,
            #[cfg(test)]
            Self::Faults => Eyes::Pebs,
        }
    }

    pub const fn what(self) -> &'static str {
        match self {
            Self::Pebs => "loads that miss the last cache (PEBS)",
            Self::Ibs { .. } => "instructions (IBS)",
            #[cfg(test)]
            Self::Faults => "page faults",
        }
    }

    /// The event, for perf.
    pub fn event(self) -> Builder<'static> {
        let (kind, config) = match self {
            Self::Pebs => (None, L3_MISS),
            Self::Ibs { kind, config } => (Some(kind), config),
            #[cfg(test)]
            Self::Faults => (Some(SOFTWARE), PAGE_FAULTS),
        };
        let mut builder = Builder::new(Raw::new(config));
        builder.attrs_mut().type_ = kind.unwrap_or(builder.attrs().type_);
        match self {
            Self::Pebs => builder.precise_ip(SampleSkid::RequestZero),
            // It cannot leave anybody out.
            Self::Ibs { .. } => builder.include_kernel().include_hv(),
            #[cfg(test)]
            Self::Faults => &mut builder,
        };
        builder
    }
}

/// The bit that a file such as `config:19` is about.
fn bit(sys: &Sysfs, file: &str) -> Result<u64, SysfsError> {
    let text = sys.text(file)?;
    let bit =
        text.strip_prefix("config:").and_then(|bit| bit.parse().ok()).and_then(|bit| 1_u64.checked_shl(bit));
    bit.ok_or_else(|| sys.unreadable(file, text, "config: and a bit"))
}

/// Which processors there are, as in `0-3,8`; no more than are sampled.
pub(super) fn processors(sys: &Sysfs) -> Result<Vec<usize>, SysfsError> {
    const ONLINE: &str = "devices/system/cpu/online";
    let text = sys.text(ONLINE)?;
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        Some(first.parse::<usize>().ok()?..=last.parse().ok()?)
    };
    let runs: Option<Vec<_>> = text.split(',').map(run).collect();
    let runs = runs.ok_or_else(|| sys.unreadable(ONLINE, text, "a list of processors"))?;
    Ok(runs.into_iter().flatten().take(PROCESSORS_SAMPLED_MAX).collect())
}
