//! Measurements of a VM's process that need no help of its VMM: processor counters of the vCPU
//! threads, and signs of a shortage of processors or memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Instant,
};

use pool::agent::Process;
use proto::v1 as wire;
use units::{ReservationId, limits::QOS_PROBLEM_BYTES_MAX, truncated};

use crate::{
    host::{
        sysfs::Sysfs,
        vm_counters::{CounterSource, CounterValues, PerfEvents, VmCounters},
        vm_pressure::{VmPressure, VmPressureReader},
    },
    metrics::{Measurement, Metrics},
};

/// Measurements of all VMs of this machine since their previous sample.
#[derive(Debug)]
pub struct Measurements {
    counters: VmCounters,
    pressure: VmPressureReader,
    /// VMs whose first interval has begun.
    begun: BTreeSet<ReservationId>,
    started: Instant,
    metrics: Arc<Metrics>,
}

/// Measurements of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Processor counters, or the reason why there are none.
    pub counters: Result<CounterValues, String>,
    /// Signs of a shortage.
    pub pressure: VmPressure,
}

impl Measurements {
    /// Creates measurements with the perf events of this machine. `sys` is the root of sysfs.
    pub fn new(sys: &Sysfs, metrics: Arc<Metrics>) -> Self {
        Self::with_source(sys, Box::new(PerfEvents), metrics)
    }

    fn with_source(sys: &Sysfs, source: Box<dyn CounterSource>, metrics: Arc<Metrics>) -> Self {
        let counters = VmCounters::new(sys, source);
        let (pressure, begun) = (VmPressureReader::new(), BTreeSet::new());
        Self { counters, pressure, begun, started: Instant::now(), metrics }
    }

    /// Measures those of `vms` that are due since their previous measurement, and begins the first interval
    /// of new VMs. VMs that are not among `vms` are forgotten.
    pub fn sample(
        &mut self,
        vms: &[(ReservationId, Process)],
        due: &BTreeSet<ReservationId>,
    ) -> BTreeMap<ReservationId, Measured> {
        let ids: BTreeSet<ReservationId> = vms.iter().map(|(id, _)| *id).collect();
        self.counters.retain(|id| ids.contains(&id));
        self.pressure.retain(|id| ids.contains(&id));
        let is_measured = |(id, _): &&(ReservationId, Process)| due.contains(id) || !self.begun.contains(id);
        let measured: Vec<_> = vms.iter().filter(is_measured).collect();
        self.begun = ids;
        measured.into_iter().map(|(id, process)| (*id, self.measure(*id, process))).collect()
    }

    fn measure(&mut self, id: ReservationId, process: &Process) -> Measured {
        let counters = self.counters.sample(id, process).map_err(|error| {
            if error.is_failure() {
                self.metrics.count_sampling_failure(Measurement::Counters);
                tracing::debug!(reservation = %id, error = units::chain(&error), "cannot measure counters of VM");
            }
            truncated(units::chain(&error), QOS_PROBLEM_BYTES_MAX)
        });
        let pressure = self.pressure.sample(id, process, self.started.elapsed()).unwrap_or_else(|error| {
            self.metrics.count_sampling_failure(Measurement::Pressure);
            tracing::debug!(reservation = %id, error = units::chain(&error), "cannot measure pressure of VM");
            None
        });
        Measured { counters, pressure: pressure.unwrap_or_default() }
    }
}

impl Measured {
    /// Writes the measurements into a sample.
    pub fn write_to(self, sample: &mut wire::VmSample) {
        match self.counters {
            Ok(CounterValues { values, missing }) => {
                sample.counters = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
                sample.counter_problem = truncated(missing, QOS_PROBLEM_BYTES_MAX);
            }
            Err(problem) => sample.counter_problem = problem,
        }
        let VmPressure { steal, memory_some, memory_full, major_faults_per_s } = self.pressure;
        sample.steal_share = steal;
        sample.memory_stalled_some = memory_some;
        sample.memory_stalled_full = memory_full;
        sample.major_faults_per_s = major_faults_per_s;
    }
}

#[cfg(test)]
mod tests {
    use units::Name;

    use super::*;
    use crate::host::{process::identify_process, sysfs::fake::FakeSysfs};

    #[test]
    fn ended_process_is_counted_as_failure_and_harms_no_other_vm() {
        let metrics = Arc::new(Metrics::new(&Name::new("h0").unwrap(), "dax"));
        let tree = FakeSysfs::new(&[]);
        let mut measurements = Measurements::new(&tree.sysfs, Arc::clone(&metrics));
        let own = identify_process(std::process::id()).unwrap();
        let other = Process { started: own.started + 1, ..own.clone() };
        let vms = [(ReservationId(1), own), (ReservationId(2), other)];
        let due = BTreeSet::from([ReservationId(1), ReservationId(2)]);
        measurements.sample(&vms, &due);
        let measured = measurements.sample(&vms, &due);
        // Other tests start threads, so steal is not always measured.
        assert_eq!(measured[&ReservationId(2)].pressure, VmPressure::default());
        let problem = measured[&ReservationId(1)].counters.as_ref().unwrap_err();
        assert!(problem.starts_with("no processor counters: "), "{problem}");
        let text = metrics.text().unwrap();
        let failures = |measurement: &str| {
            let name =
                format!("failures_total{{host=\"h0\",backend=\"dax\",measurement=\"{measurement}\"}} ");
            text.lines().find_map(|line| line.split_once(&name)?.1.parse::<u64>().ok())
        };
        assert_eq!((failures("pressure"), failures("counters")), (Some(2), None), "{text}");
        // Without a result of access sampling, the interval continues.
        assert_eq!(measurements.sample(&vms, &BTreeSet::new()), BTreeMap::new());
    }

    #[test]
    fn sample_has_counters_or_the_reason() {
        let mut sample = wire::VmSample::default();
        let pressure = VmPressure { steal: Some(0.5), ..VmPressure::default() };
        Measured { counters: Err("refused".to_owned()), pressure }.write_to(&mut sample);
        assert_eq!((sample.counter_problem.as_str(), sample.counters.len()), ("refused", 0));
        assert_eq!((sample.steal_share, sample.memory_stalled_some), (Some(0.5), None));
        let values = CounterValues { values: vec![("ipc", 1.5)], missing: "lacks dram_bound".to_owned() };
        let pressure = VmPressure { major_faults_per_s: Some(2.0), ..VmPressure::default() };
        Measured { counters: Ok(values), pressure }.write_to(&mut sample);
        assert_eq!((sample.counters["ipc"], sample.counter_problem.as_str()), (1.5, "lacks dram_bound"));
        assert_eq!((sample.steal_share, sample.major_faults_per_s), (None, Some(2.0)));
    }
}
