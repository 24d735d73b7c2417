//! Completion times of flows that are part of a continuous stream.

/// Completion times of flows of one size, each weighted by the number of flows.
#[derive(Clone, Debug)]
pub(super) struct FlowTimes {
    flow_bytes: f64,
    latency_s: f64,
    /// Completion time in seconds, and number of flows.
    times: Vec<(f64, f64)>,
}

impl FlowTimes {
    /// Creates an empty distribution of flows of this size. The latency is a part of each completion time.
    pub(super) fn new(flow_bytes: f64, latency_s: f64) -> Self {
        Self { flow_bytes, latency_s, times: Vec::new() }
    }

    /// Adds the flows that carry this memory, in bytes, at this rate, in bytes per second and more than 0.
    pub(super) fn add(&mut self, rate: f64, bytes: f64) {
        self.times.push((self.latency_s + self.flow_bytes / rate, bytes / self.flow_bytes));
    }

    /// Returns the mean time, in seconds. `None` without flows.
    pub(super) fn mean(&self) -> Option<f64> {
        let sum: f64 = self.times.iter().map(|(time, flows)| time * flows).sum();
        (!self.times.is_empty()).then(|| sum / self.flows())
    }

    /// Returns the time within which this part of the flows is complete, in seconds. `None` without flows.
    pub(super) fn quantile(mut self, part: f64) -> Option<f64> {
        let flows = self.flows();
        self.times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut until = 0.0;
        let reaches = |(_, flows_of_time): &&(f64, f64)| {
            until += flows_of_time;
            until >= part * flows
        };
        self.times.iter().find(reaches).or(self.times.last()).map(|(time, _)| *time)
    }

    fn flows(&self) -> f64 {
        self.times.iter().map(|(_, flows)| flows).sum()
    }
}
