//! Encoding of processor events for perf. Sysfs describes for each source of events which bits of
//! `perf_event_attr.config` contain the fields of an event, such as `event` and `umask`.

use crate::host::sysfs::{Sysfs, SysfsError, parse_ranges};

/// Directory of perf event sources in sysfs.
const EVENT_SOURCES_FOLDER: &str = "bus/event_source/devices";
/// Number of bits of `perf_event_attr.config`.
const CONFIG_BITS: u32 = u64::BITS;

/// Processor event: its name in the manufacturer's documentation, and its fields, such as
/// `("umask", 0x04)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Event {
    pub name: &'static str,
    pub fields: &'static [(&'static str, u64)],
}

/// Event as perf expects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodedEvent {
    /// Name of the event.
    pub name: &'static str,
    /// Value of `perf_event_attr.config`.
    pub config: u64,
}

/// Events that the processor counts at the same time, so that their ratios are exact even if perf
/// multiplexes the counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventGroup {
    /// Type of the event source (`perf_event_attr.type`).
    pub kind: u32,
    /// Events; the first is the leader of the group.
    pub events: Vec<EncodedEvent>,
}

/// Source of perf events in sysfs: the performance monitoring unit of the processor's cores.
#[derive(Clone, Debug)]
pub(super) struct EventSource<'a> {
    sys: &'a Sysfs,
    folder: String,
    kind: u32,
}

impl<'a> EventSource<'a> {
    /// Opens the source `name`; `None` if the machine has no such source.
    ///
    /// # Errors
    /// The source's type cannot be read.
    pub fn open(sys: &'a Sysfs, name: &str) -> Result<Option<Self>, SysfsError> {
        let folder = format!("{EVENT_SOURCES_FOLDER}/{name}");
        if !sys.has(&folder) {
            return Ok(None);
        }
        let file = format!("{folder}/type");
        let kind = sys.number(&file)?;
        let unreadable = |_| sys.unreadable_error(&file, kind.to_string(), "an event type");
        Ok(Some(Self { sys, kind: u32::try_from(kind).map_err(unreadable)?, folder }))
    }

    /// Returns whether the kernel lists an event of this name with exactly this definition.
    pub fn defines(&self, name: &str, definition: &str) -> bool {
        self.sys.text(format!("{}/events/{name}", self.folder)).is_ok_and(|text| text == definition)
    }

    /// Encodes a group of events.
    ///
    /// # Errors
    /// The kernel does not describe a field of an event, or the field is too narrow for its value.
    pub fn encode_group(&self, events: &[Event]) -> Result<EventGroup, SysfsError> {
        let events = events.iter().map(|event| self.encode(event)).collect::<Result<_, _>>()?;
        Ok(EventGroup { kind: self.kind, events })
    }

    fn encode(&self, event: &Event) -> Result<EncodedEvent, SysfsError> {
        let mut config = 0;
        for (field, value) in event.fields {
            let file = format!("{}/format/{field}", self.folder);
            let format = self.sys.text(&file)?;
            let bits = place_bits(&format, *value);
            config |= bits.ok_or_else(|| {
                self.sys.unreadable_error(file, format, "config: and enough bits for the value of the field")
            })?;
        }
        Ok(EncodedEvent { name: event.name, config })
    }
}

/// Places the bits of a value according to a format such as `config:0-7,32-35`, lowest bits first.
/// Returns `None` if the format is invalid, or has too few bits for the value.
fn place_bits(format: &str, value: u64) -> Option<u64> {
    let ranges = parse_ranges::<u32>(format.strip_prefix("config:")?)?;
    let (mut config, mut rest) = (0, value);
    for range in ranges {
        if *range.end() >= CONFIG_BITS {
            return None;
        }
        for bit in range {
            config |= (rest & 1) << bit;
            rest >>= 1;
        }
    }
    (rest == 0).then_some(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    #[test]
    fn bits_of_a_split_field_are_placed_in_order() {
        assert_eq!(place_bits("config:0-7,32-35", 0x1a0), Some(0x01_0000_00a0));
        assert_eq!(place_bits("config:8-15", 0x80), Some(0x8000));
        assert_eq!(place_bits("config:24-31", 9), Some(9 << 24));
        assert_eq!(place_bits("config:23", 1), Some(1 << 23));
    }

    /// Each value that fits is recovered from the placed bits, and no other bit is set.
    #[test]
    fn placed_bits_contain_exactly_the_value() {
        for value in 0..0x1000_u64 {
            let config = place_bits("config:4-9,20-22,61-63", value).unwrap();
            let bits = (4..=9).chain(20..=22).chain(61..=63);
            let read = bits.enumerate().fold(0, |read, (at, bit)| read | ((config >> bit) & 1) << at);
            assert_eq!((read, config.count_ones()), (value, value.count_ones()));
        }
        assert_eq!(place_bits("config:4-9,20-22,61-63", 0x1000), None);
    }

    #[test]
    fn invalid_format_is_rejected() {
        for format in ["", "config", "config1:0-7", "config:0-64", "config:a-b"] {
            assert_eq!(place_bits(format, 1), None, "{format}");
        }
    }

    #[test]
    fn group_is_encoded_with_the_type_of_its_source() {
        let tree = FakeSysfs::new(&[]);
        tree.files(&format!("{EVENT_SOURCES_FOLDER}/cpu"), &[("type", "4")]);
        tree.files(&format!("{EVENT_SOURCES_FOLDER}/cpu/format"), &[("event", "config:0-7")]);
        tree.files(&format!("{EVENT_SOURCES_FOLDER}/cpu/events"), &[("slots", "event=0x00,umask=0x4")]);
        let source = EventSource::open(&tree.sysfs, "cpu").unwrap().unwrap();
        let event = Event { name: "cycles", fields: &[("event", 0x3c)] };
        let events = vec![EncodedEvent { name: "cycles", config: 0x3c }];
        assert_eq!(source.encode_group(&[event]).unwrap(), EventGroup { kind: 4, events });
        let error = source.encode(&Event { name: "wide", fields: &[("event", 0x13c)] }).unwrap_err();
        assert!(error.to_string().contains("format/event contains \"config:0-7\""), "{error}");
        assert!(source.encode(&Event { name: "odd", fields: &[("umask", 1)] }).unwrap_err().is_gone());
        assert!(source.defines("slots", "event=0x00,umask=0x4") && !source.defines("slots", "event=0x00"));
        assert!(EventSource::open(&tree.sysfs, "cpu_core").unwrap().is_none());
    }
}
