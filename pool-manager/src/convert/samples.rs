//! Validates samples of running VMs, which agents report.

use prediction::qos::{AccessedShare, LoadSource, PoolLoads};
use proto::v1 as wire;
use units::{
    Bytes, Fraction, LATENCY_RATIO_RANGE, LATENCY_RATIO_RULE, Ns, ReservationId,
    limits::{QOS_PAGES_PER_SAMPLE_MAX, QOS_PROBLEM_BYTES_MAX, QOS_SAMPLE_GAP_MAX},
    single_line,
};

use super::{InvalidField, agent::parse_reservation_id, profile::parse_counters};
use crate::records::forecast_rows::Counters;

/// Sample of a running VM, as reported by the agent of its host.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedSample {
    /// Reservation of the VM.
    pub reservation: ReservationId,
    /// Fraction of the pool memory that the VM accessed, or the reason why it is not observed.
    pub accessed: Result<SourcedShare, String>,
    /// Pool memory that the VM has touched since its start.
    pub touched_pool: Option<Bytes>,
    /// Processor counters of the VM, or the reason why they are not measured.
    pub counters: Result<Counters, String>,
    /// Loads from the pool.
    pub pool_loads: Option<PoolLoads>,
    /// Idle latency of the pool divided by the idle latency of local memory.
    pub latency_ratio: Option<f64>,
    /// Signs of a shortage of processors or memory of the host.
    pub pressure: HostPressure,
}

/// Result of access sampling with its source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourcedShare {
    /// Fraction of the pool memory that the VM accessed.
    pub share: AccessedShare,
    /// Name of the source, such as `vmm`.
    pub source: &'static str,
}

/// Signs of a shortage of processors or memory of a VM's host, since the previous sample. They are
/// reasons for a slowdown that pool memory does not cause. `None` means not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostPressure {
    /// Fraction of the time in which a vCPU waited for a processor, on average over the vCPUs.
    pub steal: Option<Fraction>,
    /// Fraction of the time in which at least one task of the VM's cgroup was stalled on memory.
    pub memory_some: Option<Fraction>,
    /// Fraction of the time in which all tasks of the VM's cgroup were stalled on memory.
    pub memory_full: Option<Fraction>,
    /// Page faults that required I/O, per second.
    pub major_faults_per_s: Option<f64>,
}

/// Largest number of major page faults per second. No storage device serves more.
const MAJOR_FAULTS_PER_S_MAX: f64 = 1e9;

/// Validates a sample.
///
/// # Errors
/// [`InvalidField`] if a field is malformed or out of range.
pub fn parse_sample(sample: wire::VmSample) -> Result<ReportedSample, InvalidField> {
    let reservation = parse_reservation_id(&sample.reservation)?;
    let interval = Ns::ms(sample.interval_ms);
    if sample.accessed.is_some() && (interval == Ns::ZERO || interval > QOS_SAMPLE_GAP_MAX) {
        let rule = format!("must be from 1 to {}", QOS_SAMPLE_GAP_MAX.as_ms());
        return Err(InvalidField::new("interval_ms", sample.interval_ms, rule));
    }
    let pressure = parse_pressure(&sample)?;
    let counters = match sample.counters.is_empty() {
        true => Err(single_line(&sample.counter_problem, QOS_PROBLEM_BYTES_MAX)),
        false => Ok(parse_counters("counters", &sample.counters)?),
    };
    let accessed = match sample.accessed {
        None => Err(single_line(&sample.access_problem, QOS_PROBLEM_BYTES_MAX)),
        Some(accessed) => Ok(parse_accessed(&accessed)?),
    };
    Ok(ReportedSample {
        reservation,
        pressure,
        accessed,
        touched_pool: sample.touched_pool_bytes.map(Bytes::new),
        counters,
        pool_loads: sample.pool_load_share.map(parse_pool_loads).transpose()?,
        latency_ratio: sample.latency_ratio.map(parse_latency_ratio).transpose()?,
    })
}

fn parse_accessed(pages: &wire::AccessedPages) -> Result<SourcedShare, InvalidField> {
    // A source of a later version of the protocol counts as unspecified.
    let source = match pages.source() {
        wire::AccessedPagesSource::Unspecified => {
            return Err(InvalidField::new("accessed.source", pages.source, "must be VMM or DAMON"));
        }
        wire::AccessedPagesSource::Vmm => "vmm",
        wire::AccessedPagesSource::Damon => "damon",
    };
    let share = AccessedShare::from_pages(pages.accessed_pages, pages.sampled_pages).map_err(|_| {
        let pages = format!("{} of {}", pages.accessed_pages, pages.sampled_pages);
        let rule =
            format!("sampled pages must be 1 to {QOS_PAGES_PER_SAMPLE_MAX}, and include the accessed ones");
        InvalidField::new("accessed", pages, rule)
    })?;
    Ok(SourcedShare { share, source })
}

fn parse_pool_loads(share: f64) -> Result<PoolLoads, InvalidField> {
    Ok(PoolLoads { share: parse_fraction("pool_load_share", share)?, source: LoadSource::Events })
}

fn parse_fraction(field: &'static str, value: f64) -> Result<Fraction, InvalidField> {
    Fraction::new(value).map_err(|_| InvalidField::new(field, value, "must be a fraction from 0 to 1"))
}

fn parse_pressure(sample: &wire::VmSample) -> Result<HostPressure, InvalidField> {
    let fraction = |field, value: Option<f64>| value.map(|value| parse_fraction(field, value)).transpose();
    let faults = sample.major_faults_per_s;
    if let Some(invalid) = faults.filter(|rate| !(0.0..=MAJOR_FAULTS_PER_S_MAX).contains(rate)) {
        let rule = format!("must be from 0 to {MAJOR_FAULTS_PER_S_MAX}");
        return Err(InvalidField::new("major_faults_per_s", invalid, rule));
    }
    Ok(HostPressure {
        steal: fraction("steal_share", sample.steal_share)?,
        memory_some: fraction("memory_stalled_some", sample.memory_stalled_some)?,
        memory_full: fraction("memory_stalled_full", sample.memory_stalled_full)?,
        major_faults_per_s: faults,
    })
}

fn parse_latency_ratio(ratio: f64) -> Result<f64, InvalidField> {
    let is_valid = LATENCY_RATIO_RANGE.contains(&ratio);
    if is_valid { Ok(ratio) } else { Err(InvalidField::new("latency_ratio", ratio, LATENCY_RATIO_RULE)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> wire::VmSample {
        let source = wire::AccessedPagesSource::Vmm.into();
        wire::VmSample {
            reservation: "r-1".into(),
            interval_ms: 30_000,
            accessed: Some(wire::AccessedPages { source, sampled_pages: 200, accessed_pages: 50 }),
            counters: [("ipc".to_owned(), 1.5)].into(),
            pool_load_share: Some(0.5),
            latency_ratio: Some(2.0),
            steal_share: Some(0.125),
            memory_stalled_some: Some(1.0),
            memory_stalled_full: Some(0.0),
            major_faults_per_s: Some(3.5),
            ..Default::default()
        }
    }

    #[test]
    fn valid_sample_is_converted() {
        let parsed = parse_sample(sample()).unwrap();
        assert_eq!((parsed.reservation, parsed.latency_ratio), (ReservationId(1), Some(2.0)));
        let accessed = parsed.accessed.unwrap();
        assert_eq!((accessed.share.estimate.get(), accessed.source), (0.25, "vmm"));
        let HostPressure { steal, memory_some, memory_full, major_faults_per_s } = parsed.pressure;
        assert_eq!([steal, memory_some, memory_full].map(|share| share.unwrap().get()), [0.125, 1.0, 0.0]);
        assert_eq!(major_faults_per_s, Some(3.5));
        assert_eq!(parsed.counters.unwrap()[prediction::sensitivity::IPC_INDEX], 1.5);
    }

    #[test]
    fn source_of_accesses_is_stored() {
        let source = wire::AccessedPagesSource::Damon.into();
        let accessed = Some(wire::AccessedPages { source, sampled_pages: 200, accessed_pages: 0 });
        let parsed = parse_sample(wire::VmSample { accessed, ..sample() }).unwrap();
        assert_eq!(parsed.accessed.unwrap().source, "damon");
    }

    #[test]
    fn sample_of_an_earlier_agent_has_no_pressure() {
        let parsed = parse_sample(wire::VmSample { reservation: "r-1".into(), ..Default::default() });
        assert_eq!(parsed.unwrap().pressure, HostPressure::default());
    }

    #[test]
    fn absent_measurements_have_a_reason_of_bounded_length() {
        let parsed = parse_sample(wire::VmSample {
            accessed: None,
            access_problem: "ä".repeat(1000),
            counters: [].into(),
            counter_problem: "no perf events".into(),
            ..sample()
        });
        let parsed = parsed.unwrap();
        assert_eq!(parsed.accessed, Err("ä".repeat(128)));
        assert_eq!(parsed.counters, Err("no perf events".to_owned()));
    }

    #[test]
    fn invalid_sample_is_rejected_with_field_and_rule() {
        fn pages(sampled_pages: u32, accessed_pages: u32) -> Option<wire::AccessedPages> {
            let source = wire::AccessedPagesSource::Vmm.into();
            Some(wire::AccessedPages { source, sampled_pages, accessed_pages })
        }
        type Change = fn(&mut wire::VmSample);
        fn of_later_version() -> Option<wire::AccessedPages> {
            Some(wire::AccessedPages { source: 99, ..pages(10, 1).unwrap() })
        }
        let starts: [(Change, &str); 17] = [
            (|s| s.reservation = "x".into(), "reservation: "),
            (|s| s.interval_ms = 0, "interval_ms: 0 must be from 1 to 300000"),
            (|s| s.interval_ms = u64::MAX, "interval_ms: 18446744073709551615 must be"),
            (|s| s.accessed = pages(10, 11), "accessed: 11 of 10 sampled pages must be 1 to 4096"),
            (|s| s.accessed = pages(0, 0), "accessed: 0 of 0 sampled pages must be"),
            (
                |s| s.accessed = Some(wire::AccessedPages::default()),
                "accessed.source: 0 must be VMM or DAMON",
            ),
            (|s| s.accessed = of_later_version(), "accessed.source: 99 must be VMM or DAMON"),
            (|s| s.counters = [("ipc".to_owned(), f64::NAN)].into(), "counters"),
            (|s| s.pool_load_share = Some(1.5), "pool_load_share: 1.5 must be a fraction from 0 to 1"),
            (|s| s.steal_share = Some(f64::NAN), "steal_share: NaN must be a fraction"),
            (|s| s.steal_share = Some(1.1), "steal_share: 1.1 must be a fraction"),
            (|s| s.memory_stalled_some = Some(-0.1), "memory_stalled_some: -0.1 must be a fraction"),
            (|s| s.memory_stalled_full = Some(f64::INFINITY), "memory_stalled_full: inf must be a fraction"),
            (|s| s.major_faults_per_s = Some(-1.0), "major_faults_per_s: -1 must be from 0 to"),
            (|s| s.major_faults_per_s = Some(f64::NAN), "major_faults_per_s: NaN must be from 0 to"),
            (|s| s.major_faults_per_s = Some(1e10), "major_faults_per_s: 10000000000 must be from 0 to"),
            (|s| s.latency_ratio = Some(f64::NAN), "latency_ratio: NaN must be a number from 0.01 to 1000"),
        ];
        for (change, start) in starts {
            let mut changed = sample();
            change(&mut changed);
            let error = parse_sample(changed).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error:?} does not start with {start:?}");
        }
    }
}
