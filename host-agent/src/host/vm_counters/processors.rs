//! Events that each supported processor counts, and formulas that derive the named counters from
//! them. The formulas are those of the manufacturers: Intel's top-down method (Yasin, ISPASS 2014,
//! and Intel's metric files for perf), and the pipeline utilization metrics of AMD.
//!
//! Servers with CXL memory have at least a processor of the generation Golden Cove (Intel) or Zen 4
//! (AMD).

use super::{
    VmCounterError,
    events::{Event, EventGroup, EventSource},
};
use crate::host::sysfs::Sysfs;

/// Events of the kernel's list that show that the processor has Intel's top-down metrics. Earlier
/// processors define events of the same names differently.
const TOPDOWN_EVENTS: [(&str, &str); 2] =
    [("slots", "event=0x00,umask=0x4"), ("topdown-retiring", "event=0x00,umask=0x80")];
/// Number of cache misses per 1000 instructions is this factor times misses per instruction.
const PER_KILO_INSTRUCTIONS: f64 = 1000.0;
/// Largest value of a fraction that the manager accepts: measured fractions can be slightly above 1.
const FRACTION_MAX: f64 = 1.2;
/// Largest value of any other counter that the manager accepts.
const COUNTER_MAX: f64 = 1e6;

const CYCLES: Event = Event { name: "cycles", fields: &[("event", 0x3c)] };
const INSTRUCTIONS: Event = Event { name: "instructions", fields: &[("event", 0xc0)] };
/// Top-down metrics of level 1. The leader must be `slots`.
const INTEL_TOPDOWN: [Event; 5] = [
    Event { name: "slots", fields: &[("umask", 0x04)] },
    Event { name: "topdown-retiring", fields: &[("umask", 0x80)] },
    Event { name: "topdown-bad-spec", fields: &[("umask", 0x81)] },
    Event { name: "topdown-fe-bound", fields: &[("umask", 0x82)] },
    Event { name: "topdown-be-bound", fields: &[("umask", 0x83)] },
];
const TOPDOWN_MEMORY_BOUND: Event = Event { name: "topdown-mem-bound", fields: &[("umask", 0x87)] };

/// Cycles in which execution waits for loads, by the cache level that they miss.
const GOLDEN_COVE_STALLS: [Event; 6] = [
    CYCLES,
    INSTRUCTIONS,
    Event { name: "bound_on_loads", fields: &[("event", 0xa6), ("umask", 0x21), ("cmask", 5)] },
    Event { name: "stalls_l1d_miss", fields: &[("event", 0x47), ("umask", 0x03), ("cmask", 3)] },
    Event { name: "stalls_l2_miss", fields: &[("event", 0x47), ("umask", 0x05), ("cmask", 5)] },
    Event { name: "stalls_l3_miss", fields: &[("event", 0x47), ("umask", 0x09), ("cmask", 9)] },
];
/// Cycles in which execution waits for the store buffer, and loads by the cache level that they
/// miss.
const GOLDEN_COVE_MISSES: [Event; 6] = [
    CYCLES,
    INSTRUCTIONS,
    Event { name: "bound_on_stores", fields: &[("event", 0xa6), ("umask", 0x40), ("cmask", 2)] },
    Event { name: "l1_miss", fields: &[("event", 0xd1), ("umask", 0x08)] },
    Event { name: "l2_miss", fields: &[("event", 0xd1), ("umask", 0x10)] },
    Event { name: "l3_miss", fields: &[("event", 0xd1), ("umask", 0x20)] },
];
/// Outstanding loads: per cycle, and cycles with at least one, or with at least four.
const GOLDEN_COVE_OUTSTANDING: [Event; 5] = [
    CYCLES,
    Event { name: "l1d_pending", fields: &[("event", 0x48), ("umask", 0x01)] },
    Event { name: "l1d_pending_cycles", fields: &[("event", 0x48), ("umask", 0x01), ("cmask", 1)] },
    Event { name: "data_rd_cycles", fields: &[("event", 0x20), ("umask", 0x08), ("cmask", 1)] },
    Event { name: "data_rd_four_cycles", fields: &[("event", 0x20), ("umask", 0x08), ("cmask", 4)] },
];

const ZEN_CYCLES: Event = Event { name: "ls_not_halted_cyc", fields: &[("event", 0x76)] };
/// Dispatch slots by their use.
const ZEN_SLOTS: [Event; 5] = [
    ZEN_CYCLES,
    Event { name: "no_ops_from_frontend", fields: &[("event", 0x1a0), ("umask", 0x01)] },
    Event { name: "backend_stalls", fields: &[("event", 0x1a0), ("umask", 0x1e)] },
    Event { name: "dispatched_ops", fields: &[("event", 0xaa), ("umask", 0x07)] },
    Event { name: "retired_ops", fields: &[("event", 0xc1)] },
];
/// Cycles in which no operation retires, because the oldest operation, or a load, is not complete.
const ZEN_STALLS: [Event; 4] = [
    ZEN_CYCLES,
    INSTRUCTIONS,
    Event { name: "not_complete", fields: &[("event", 0xd6), ("umask", 0x02)] },
    Event { name: "load_not_complete", fields: &[("event", 0xd6), ("umask", 0xa2)] },
];
/// Demand fills of the L1 data cache: all, from outside of the L2 cache, and from memory (DRAM and
/// extension memory, including other NUMA nodes).
const ZEN_FILLS: [Event; 4] = [
    INSTRUCTIONS,
    Event { name: "fills", fields: &[("event", 0x43), ("umask", 0xdf)] },
    Event { name: "fills_beyond_l2", fields: &[("event", 0x43), ("umask", 0xde)] },
    Event { name: "fills_from_memory", fields: &[("event", 0x43), ("umask", 0xc8)] },
];

/// Supported processor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Processor {
    /// Intel, Golden Cove and later: Sapphire Rapids, Emerald Rapids, Granite Rapids.
    GoldenCove,
    /// Other Intel processor with top-down metrics, whose other events are unknown.
    IntelTopdown,
    /// AMD Zen 4 or Zen 5, with the number of dispatch slots per cycle.
    Zen { slots_per_cycle: f64 },
}

/// Events to count on this machine, and the formulas for the named counters.
#[derive(Clone, Debug)]
pub(super) struct CounterPlan {
    processor: Processor,
    pub groups: Vec<EventGroup>,
}

/// Counts of a group, scaled for multiplexing; `None` if the group ran for too short a time.
pub(super) type GroupCounts = Option<Vec<f64>>;

/// Named counters, and a list of the counters that are missing with the reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CounterValues {
    /// Name and value of each measured counter. The manager defines the names.
    pub values: Vec<(&'static str, f64)>,
    /// Counters that this processor does not measure, or that were not measured in the interval.
    /// Empty if there are none.
    pub missing: String,
}

impl CounterPlan {
    /// Chooses the events of this machine's processors. `cpuinfo` is the text of /proc/cpuinfo.
    ///
    /// # Errors
    /// [`VmCounterError::Unsupported`] or [`VmCounterError::Sysfs`].
    pub fn find(sys: &Sysfs, cpuinfo: &str) -> Result<Self, VmCounterError> {
        let unsupported = VmCounterError::Unsupported;
        let Some(source) = EventSource::open(sys, "cpu")? else {
            let is_hybrid = EventSource::open(sys, "cpu_core")?.is_some();
            return Err(unsupported(if is_hybrid {
                "the processor has cores of several kinds"
            } else {
                "the kernel shows no performance counters of the processor"
            }));
        };
        let has_topdown = TOPDOWN_EVENTS.iter().all(|(name, definition)| source.defines(name, definition));
        let processor = match (identify(cpuinfo), has_topdown) {
            (Some(Processor::GoldenCove), false) | (None, false) => {
                return Err(unsupported("the events of this processor model are unknown"));
            }
            (None, true) => Processor::IntelTopdown,
            (Some(processor), _) => processor,
        };
        let groups: &[&[Event]] = match processor {
            Processor::GoldenCove => {
                let [a, b, c, d, e] = INTEL_TOPDOWN;
                &[
                    &[a, b, c, d, e, TOPDOWN_MEMORY_BOUND],
                    &GOLDEN_COVE_STALLS,
                    &GOLDEN_COVE_MISSES,
                    &GOLDEN_COVE_OUTSTANDING,
                ]
            }
            Processor::IntelTopdown => &[&INTEL_TOPDOWN, &[CYCLES, INSTRUCTIONS]],
            Processor::Zen { .. } => &[&ZEN_SLOTS, &ZEN_STALLS, &ZEN_FILLS],
        };
        let groups = groups.iter().map(|events| source.encode_group(events)).collect::<Result<_, _>>()?;
        Ok(Self { processor, groups })
    }

    /// Returns the number of events, which is the number of file descriptors per thread.
    pub fn event_count(&self) -> usize {
        self.groups.iter().map(|group| group.events.len()).sum()
    }

    /// Derives the named counters from the counts of [`CounterPlan::groups`], in the same order.
    pub fn compute(&self, counts: &[GroupCounts]) -> CounterValues {
        let counts = Counts { groups: &self.groups, counts };
        let derived = match self.processor {
            Processor::GoldenCove => golden_cove(&counts),
            Processor::IntelTopdown => intel_topdown(&counts),
            Processor::Zen { slots_per_cycle } => zen(&counts, slots_per_cycle),
        };
        let mut result = CounterValues::default();
        let mut unmeasured = Vec::new();
        for (name, value) in derived {
            match value {
                Some(value) => result.values.push((name, value)),
                None => unmeasured.push(name),
            }
        }
        result.missing = self.describe_missing(&unmeasured);
        result
    }

    /// Describes the counters that are missing from a sample. `unmeasured` are counters of this
    /// processor that were not measured in the interval.
    fn describe_missing(&self, unmeasured: &[&str]) -> String {
        let absent: &[&str] = match self.processor {
            Processor::GoldenCove => &[],
            Processor::IntelTopdown => &["memory_bound", "dram_bound", "stalls and misses by cache level"],
            Processor::Zen { .. } => {
                &["dram_bound", "stalls by cache level", "store_bound", "memory_level_parallelism"]
            }
        };
        let absent = (!absent.is_empty()).then(|| format!("this processor lacks {}", absent.join(", ")));
        let unmeasured = (!unmeasured.is_empty())
            .then(|| format!("not measured in the interval: {}", unmeasured.join(", ")));
        absent.into_iter().chain(unmeasured).collect::<Vec<_>>().join("; ")
    }
}

/// Identifies the processor from /proc/cpuinfo; `None` if it is unknown.
fn identify(cpuinfo: &str) -> Option<Processor> {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim())
    };
    let number = |name| field(name).and_then(|value| value.parse::<u32>().ok());
    match (field("vendor_id")?, number("cpu family")?, number("model")?) {
        ("GenuineIntel", 6, 143 | 173 | 174 | 207) => Some(Processor::GoldenCove),
        ("AuthenticAMD", 0x19, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf) => {
            Some(Processor::Zen { slots_per_cycle: 6.0 })
        }
        ("AuthenticAMD", 0x1a, 0x00..=0x2f | 0x40..=0x4f | 0x60..=0x7f) => {
            Some(Processor::Zen { slots_per_cycle: 8.0 })
        }
        _ => None,
    }
}

/// Counts of all groups, by the name of the event.
#[derive(Clone, Copy)]
struct Counts<'a> {
    groups: &'a [EventGroup],
    counts: &'a [GroupCounts],
}

impl Counts<'_> {
    /// Returns a function that returns the counts of a group by event name.
    fn group(&self, group: usize) -> impl Fn(&str) -> Option<f64> {
        move |name| {
            let at = self.groups[group].events.iter().position(|event| event.name == name)?;
            self.counts[group].as_ref().map(|counts| counts[at])
        }
    }
}

/// Value of a counter by name; `None` if it was not measured.
type Derived = Vec<(&'static str, Option<f64>)>;

/// Divides two counts. Returns `None` if a count is missing, if the divisor is zero, or if the
/// manager would reject the result.
fn ratio(count: Option<f64>, divisor: Option<f64>) -> Option<f64> {
    let ratio = count? / divisor?;
    (0.0..=COUNTER_MAX).contains(&ratio).then_some(ratio) // false for NaN
}

/// Divides two counts like [`ratio`]. Returns `None` if the result is not a fraction.
fn fraction(count: Option<f64>, divisor: Option<f64>) -> Option<f64> {
    ratio(count, divisor).filter(|fraction| *fraction <= FRACTION_MAX)
}

/// Subtracts two counts. Negative differences, which multiplexing causes, count as 0.
fn minus(count: Option<f64>, subtrahend: Option<f64>) -> Option<f64> {
    Some((count? - subtrahend?).max(0.0))
}

fn per_kilo(misses: Option<f64>, instructions: Option<f64>) -> Option<f64> {
    ratio(misses, instructions).map(|misses| misses * PER_KILO_INSTRUCTIONS)
}

/// Returns the counters of top-down level 1, as fractions of the sum of the four categories.
fn topdown_level_1(of: &impl Fn(&str) -> Option<f64>) -> (Option<f64>, Derived) {
    let names = ["topdown-retiring", "topdown-fe-bound", "topdown-bad-spec", "topdown-be-bound"];
    let slots: Option<f64> = names.iter().map(|name| of(name)).sum();
    let level_1 = [("retiring", names[0]), ("frontend_bound", names[1]), ("bad_speculation", names[2])];
    (slots, level_1.map(|(counter, event)| (counter, fraction(of(event), slots))).into())
}

fn intel_topdown(counts: &Counts<'_>) -> Derived {
    let (topdown, core) = (counts.group(0), counts.group(1));
    let (_, mut derived) = topdown_level_1(&topdown);
    derived.push(("ipc", ratio(core("instructions"), core("cycles"))));
    derived
}

fn golden_cove(counts: &Counts<'_>) -> Derived {
    let [topdown, stalls, misses, outstanding] = [0, 1, 2, 3].map(|group| counts.group(group));
    let (slots, mut derived) = topdown_level_1(&topdown);
    let memory_bound = topdown("topdown-mem-bound");
    let core_bound = minus(topdown("topdown-be-bound"), memory_bound);
    derived.extend([
        ("core_bound", fraction(core_bound, slots)),
        ("memory_bound", fraction(memory_bound, slots)),
    ]);
    let cycles = stalls("cycles");
    let (l1, l2, l3) = (stalls("stalls_l1d_miss"), stalls("stalls_l2_miss"), stalls("stalls_l3_miss"));
    derived.extend([
        ("l1_bound", fraction(minus(stalls("bound_on_loads"), l1), cycles)),
        ("l2_bound", fraction(minus(l1, l2), cycles)),
        ("l3_bound", fraction(minus(l2, l3), cycles)),
        ("dram_bound", fraction(l3, cycles)),
        ("ipc", ratio(stalls("instructions"), cycles)),
    ]);
    let instructions = misses("instructions");
    derived.extend([
        ("store_bound", fraction(misses("bound_on_stores"), misses("cycles"))),
        ("l1_mpki", per_kilo(misses("l1_miss"), instructions)),
        ("l2_mpki", per_kilo(misses("l2_miss"), instructions)),
        ("l3_mpki", per_kilo(misses("l3_miss"), instructions)),
    ]);
    let cycles = outstanding("cycles");
    // Cycles with at least four outstanding loads wait for bandwidth, the other ones for latency.
    let bandwidth = outstanding("data_rd_four_cycles");
    let latency = minus(outstanding("data_rd_cycles"), bandwidth);
    derived.extend([
        ("dram_bandwidth_bound", fraction(bandwidth, cycles)),
        ("dram_latency_bound", fraction(latency, cycles)),
        ("memory_level_parallelism", ratio(outstanding("l1d_pending"), outstanding("l1d_pending_cycles"))),
    ]);
    derived
}

fn zen(counts: &Counts<'_>, slots_per_cycle: f64) -> Derived {
    let [slots, stalls, fills] = [0, 1, 2].map(|group| counts.group(group));
    let total = slots("ls_not_halted_cyc").map(|cycles| cycles * slots_per_cycle);
    let backend_bound = fraction(slots("backend_stalls"), total);
    // Without any cycle in which an operation is incomplete, nothing waits for memory.
    let memory_share = match (stalls("load_not_complete"), stalls("not_complete")) {
        (Some(_), Some(0.0)) => Some(0.0),
        (load, any) => fraction(load, any).map(|share| share.min(1.0)),
    };
    let instructions = fills("instructions");
    vec![
        ("retiring", fraction(slots("retired_ops"), total)),
        ("frontend_bound", fraction(slots("no_ops_from_frontend"), total)),
        ("bad_speculation", fraction(minus(slots("dispatched_ops"), slots("retired_ops")), total)),
        ("core_bound", backend_bound.zip(memory_share).map(|(bound, share)| bound * (1.0 - share))),
        ("memory_bound", backend_bound.zip(memory_share).map(|(bound, share)| bound * share)),
        ("ipc", ratio(stalls("instructions"), stalls("ls_not_halted_cyc"))),
        ("l1_mpki", per_kilo(fills("fills"), instructions)),
        ("l2_mpki", per_kilo(fills("fills_beyond_l2"), instructions)),
        ("l3_mpki", per_kilo(fills("fills_from_memory"), instructions)),
    ]
}
