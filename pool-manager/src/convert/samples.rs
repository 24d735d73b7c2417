//! Validates samples of running VMs, which agents report.

use prediction::qos::{AccessedShare, LoadSource, PoolLoads};
use proto::v1 as wire;
use units::{
    Bytes, Fraction, Ns, ReservationId,
    limits::{QOS_PROBLEM_BYTES_MAX, QOS_SAMPLE_GAP_MAX},
    truncated,
};

use super::{InvalidField, agent::parse_reservation_id, profile::parse_counters};
use crate::records::forecast_rows::Counters;

/// Sample of a running VM, as reported by the agent of its host.
#[derive(Clone, Debug, PartialEq)]
pub struct ReportedSample {
    /// Reservation of the VM.
    pub reservation: ReservationId,
    /// Fraction of the pool memory that the VM accessed, or the reason why it is not observed.
    pub accessed: Result<AccessedShare, String>,
    /// Pool memory that the VM has touched since its start.
    pub touched_pool: Option<Bytes>,
    /// Processor counters of the VM, or the reason why they are not measured.
    pub counters: Result<Counters, String>,
    /// Loads from the pool.
    pub pool_loads: Option<PoolLoads>,
    /// Idle latency of the pool divided by the idle latency of local memory.
    pub latency_ratio: Option<f64>,
}

/// Largest ratio of the latency of pool memory to the latency of local memory.
const LATENCY_RATIO_MAX: f64 = 1000.0;

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
    let counters = match sample.counters.is_empty() {
        true => Err(truncated(sample.counter_problem, QOS_PROBLEM_BYTES_MAX)),
        false => Ok(parse_counters("counters", &sample.counters)?),
    };
    let accessed = match sample.accessed {
        None => Err(truncated(sample.access_problem, QOS_PROBLEM_BYTES_MAX)),
        Some(accessed) => Ok(parse_accessed(&accessed)?),
    };
    Ok(ReportedSample {
        reservation,
        accessed,
        touched_pool: sample.touched_pool_bytes.map(Bytes::new),
        counters,
        pool_loads: sample.pool_load_share.map(parse_pool_loads).transpose()?,
        latency_ratio: sample.latency_ratio.map(parse_latency_ratio).transpose()?,
    })
}

fn parse_accessed(pages: &wire::AccessedPages) -> Result<AccessedShare, InvalidField> {
    if pages.source() == wire::AccessedPagesSource::Unspecified {
        return Err(InvalidField::new("accessed.source", pages.source, "must be VMM"));
    }
    let share = AccessedShare::from_pages(pages.accessed_pages, pages.sampled_pages);
    share.map_err(|error| InvalidField::new("accessed.sampled_pages", "", error))
}

fn parse_pool_loads(share: f64) -> Result<PoolLoads, InvalidField> {
    let share = Fraction::new(share).map_err(|error| InvalidField::new("pool_load_share", "", error))?;
    Ok(PoolLoads { share, source: LoadSource::Events })
}

fn parse_latency_ratio(ratio: f64) -> Result<f64, InvalidField> {
    let rule = format!("must be greater than 0 and at most {LATENCY_RATIO_MAX}");
    let is_valid = ratio > 0.0 && ratio <= LATENCY_RATIO_MAX;
    if is_valid { Ok(ratio) } else { Err(InvalidField::new("latency_ratio", ratio, rule)) }
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
            ..Default::default()
        }
    }

    #[test]
    fn valid_sample_is_converted() {
        let parsed = parse_sample(sample()).unwrap();
        assert_eq!((parsed.reservation, parsed.latency_ratio), (ReservationId(1), Some(2.0)));
        assert_eq!(parsed.accessed.unwrap().estimate.get(), 0.25);
        assert_eq!(parsed.counters.unwrap()[prediction::sensitivity::IPC_INDEX], 1.5);
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
        let starts: [(Change, &str); 9] = [
            (|s| s.reservation = "x".into(), "reservation: "),
            (|s| s.interval_ms = 0, "interval_ms: 0 must be from 1 to 300000"),
            (|s| s.interval_ms = u64::MAX, "interval_ms: 18446744073709551615 must be"),
            (|s| s.accessed = pages(10, 11), "accessed.sampled_pages:  11 of 10 sampled pages"),
            (|s| s.accessed = pages(0, 0), "accessed.sampled_pages:  0 of 0 sampled pages"),
            (|s| s.accessed = Some(wire::AccessedPages::default()), "accessed.source: 0 must be VMM"),
            (|s| s.counters = [("ipc".to_owned(), f64::NAN)].into(), "counters"),
            (|s| s.pool_load_share = Some(1.5), "pool_load_share:  1.5 is not a fraction"),
            (|s| s.latency_ratio = Some(f64::NAN), "latency_ratio: NaN must be greater than 0"),
        ];
        for (change, start) in starts {
            let mut changed = sample();
            change(&mut changed);
            let error = parse_sample(changed).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error:?} does not start with {start:?}");
        }
    }
}
