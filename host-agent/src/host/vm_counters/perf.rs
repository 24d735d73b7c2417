//! Source of processor counters on this machine: perf events of single threads.

use std::io;

use perf_event::{Builder, Counter, ReadFormat, events::Raw};

use super::{
    CounterSource, GroupReading, ThreadCounters,
    events::{EncodedEvent, EventGroup},
};

/// Perf events of the Linux kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct PerfEvents;

/// Open event groups of a thread.
#[derive(Debug)]
struct PerfThread(Vec<PerfGroup>);

#[derive(Debug)]
struct PerfGroup {
    leader: Counter,
    members: Vec<Counter>,
}

impl CounterSource for PerfEvents {
    fn open(&self, thread: u32, groups: &[EventGroup]) -> io::Result<Box<dyn ThreadCounters>> {
        let thread = i32::try_from(thread).map_err(io::Error::other)?;
        let groups = groups.iter().map(|group| PerfGroup::open(thread, group));
        Ok(Box::new(PerfThread(groups.collect::<io::Result<_>>()?)))
    }
}

impl PerfGroup {
    fn open(thread: i32, group: &EventGroup) -> io::Result<Self> {
        let builder = |event: &EncodedEvent| {
            let mut builder = Builder::new(Raw::new(event.config));
            builder.attrs_mut().type_ = group.kind;
            builder.observe_pid(thread).any_cpu();
            // Count the guest, and the host's work for it in this thread.
            builder.exclude_kernel(false).exclude_hv(false).exclude_guest(false).exclude_host(false);
            builder.read_format(
                ReadFormat::GROUP | ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING,
            );
            builder
        };
        let named = |event: &EncodedEvent| {
            let name = event.name;
            move |error: io::Error| io::Error::new(error.kind(), format!("event {name}: {error}"))
        };
        let (first, others) = group.events.split_first().ok_or_else(|| io::Error::other("no events"))?;
        let mut leader = builder(first).build().map_err(named(first))?;
        let open = |event| builder(event).build_with_group(&mut leader).map_err(named(event));
        let members = others.iter().map(open).collect::<io::Result<_>>()?;
        leader.enable_group()?;
        Ok(Self { leader, members })
    }

    fn read(&mut self) -> io::Result<GroupReading> {
        let data = self.leader.read_group()?;
        let count = |counter: &Counter| data.get(counter).map(|entry| entry.value());
        let counts: Option<Vec<u64>> =
            std::iter::once(&self.leader).chain(&self.members).map(count).collect();
        let (Some(counts), Some(enabled), Some(running)) = (counts, data.time_enabled(), data.time_running())
        else {
            return Err(io::Error::other("perf omitted an event of a group"));
        };
        Ok(GroupReading { enabled, running, counts })
    }
}

impl ThreadCounters for PerfThread {
    fn read(&mut self) -> io::Result<Vec<GroupReading>> {
        self.0.iter_mut().map(PerfGroup::read).collect()
    }
}

#[cfg(test)]
mod tests {
    use rustix::{io::Errno, thread::gettid};

    use super::*;
    use crate::skipped::report_skipped;

    /// Type of software events (PERF_TYPE_SOFTWARE), which also exist on machines without counters.
    const SOFTWARE: u32 = 1;

    #[test]
    fn counts_of_a_thread_grow_with_its_page_faults() {
        let event = |name, config| EncodedEvent { name, config };
        let group = EventGroup { kind: SOFTWARE, events: vec![event("faults", 2), event("clock", 1)] };
        let thread = gettid().as_raw_nonzero().get().cast_unsigned();
        let mut counters = match PerfEvents.open(thread, &[group.clone(), group]) {
            Err(error) if is_forbidden(&error) => {
                return report_skipped(&format!("perf events of a thread: {error}"));
            }
            opened => opened.unwrap(),
        };
        let before = counters.read().unwrap();
        std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = counters.read().unwrap();
        assert_eq!((before.len(), before[0].counts.len()), (2, 2));
        for (before, after) in before.iter().zip(&after) {
            assert!(after.counts[0] > before.counts[0] && after.counts[1] > before.counts[1], "{after:?}");
            assert!(after.enabled > before.enabled && after.enabled == after.running, "{after:?}");
        }
    }

    #[test]
    fn refused_event_is_named() {
        let events = vec![EncodedEvent { name: "stalls_l3_miss", config: u64::MAX }];
        let error = PerfEvents.open(1, &[EventGroup { kind: u32::MAX - 1, events }]).unwrap_err();
        assert!(error.to_string().starts_with("event stalls_l3_miss: "), "{error}");
    }

    fn is_forbidden(error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::PermissionDenied
            || error.raw_os_error() == Some(Errno::NOSYS.raw_os_error())
    }
}
