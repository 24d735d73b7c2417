//! Simulation of a list of flows: completion times with the fair rates of [`Network`], and the same flows in the
//! format of the packet simulation in `tests/ns3`.
//!
//! Between events, the rates are constant. In addition to the fair rates, the model contains:
//!
//! - The headers of packets ([`PAYLOAD_BYTES`] of [`PACKET_BYTES`]) use capacity.
//! - The last packet crosses the links one after the other: propagation, and transmission at each link.
//! - Slow start: the rate is at most one congestion window per round trip. The window is [`INITIAL_WINDOW`]
//!   packets at the start, and doubles each time that the flow has transferred one window (RFC 6928, RFC 5681).
//!
//! Connections exist before the flows start. Queueing delays, and the time in which congestion control
//! converges to the fair rates, are not part of the model.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::{
    Flow, Network,
    topology::{FlowNetwork, RoutedFlow, RoutedLink},
};

/// Size of the largest IP packet, in bytes.
const PACKET_BYTES: f64 = 1500.0;
/// Payload of this packet, in bytes: 20 are for IP, and 32 for TCP with timestamps.
const PAYLOAD_BYTES: f64 = 1448.0;
/// Congestion window at the start of a flow, in packets.
const INITIAL_WINDOW: f64 = 10.0;
/// Data below this size is a rounding error, in bytes.
const ROUNDING_BYTES: f64 = 0.5;
/// Queue of all flows without classes.
const COMMON_QUEUE: usize = 1;
/// Queue of the flows of blocked tasks.
const URGENT_QUEUE: usize = 7;

/// Queues of the flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowScheme {
    /// One queue for all flows (Fastswap).
    OneQueue,
    /// Each flow in its queue (EFSM).
    Classes,
}

/// Completion times of the flows with a scheme.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct FlowReport {
    /// Scheme.
    pub scheme: FlowScheme,
    /// Number of flows.
    pub flows: usize,
    /// Mean completion time, in seconds.
    pub mean_s: f64,
    /// 99th percentile (nearest rank), in seconds.
    pub p99_s: f64,
    /// Mean completion time of the flows of queue 7, in seconds. `None` without such flows.
    pub urgent_mean_s: Option<f64>,
    /// Completion time per flow, in the order of the topology, in seconds.
    pub times_s: Vec<f64>,
}

impl FlowScheme {
    /// All schemes.
    pub const ALL: [Self; 2] = [Self::OneQueue, Self::Classes];

    /// Returns the name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneQueue => "one_queue",
            Self::Classes => "classes",
        }
    }

    fn queue(self, flow: &RoutedFlow) -> usize {
        match self {
            Self::OneQueue => COMMON_QUEUE,
            Self::Classes => flow.queue,
        }
    }
}

impl RoutedLink {
    /// Returns the time that the largest packet needs at this link, without propagation.
    fn transmission_s(&self) -> f64 {
        PACKET_BYTES * 8.0 / self.bits_per_s
    }
}

/// Started flow that is not complete.
struct ActiveFlow<'a> {
    index: usize,
    flow: &'a RoutedFlow,
    left_bytes: f64,
    /// Time between a packet and its acknowledgement in an empty network, in seconds.
    round_trip_s: f64,
    window_bytes: f64,
    /// Data until the window doubles, in bytes.
    window_left_bytes: f64,
}

impl ActiveFlow<'_> {
    /// Transfers data. Doubles the window at its end.
    fn advance(&mut self, bytes: f64) {
        self.left_bytes -= bytes;
        self.window_left_bytes -= bytes;
        if self.window_left_bytes < ROUNDING_BYTES {
            self.window_bytes *= 2.0;
            self.window_left_bytes = self.window_bytes;
        }
    }
}

impl FlowNetwork {
    /// Simulates all flows, and returns their completion times, in seconds. The result is deterministic.
    pub fn completion_times(&self, scheme: FlowScheme) -> Vec<f64> {
        let goodput = |link: &RoutedLink| link.bits_per_s / 8.0 * PAYLOAD_BYTES / PACKET_BYTES;
        let capacity = self.links.iter().flat_map(|link| [goodput(link); 2]).collect();
        let network = Network { capacity, weights: self.weights };
        let mut waiting: Vec<usize> = (0..self.flows.len()).collect();
        waiting.sort_by(|a, b| self.flows[*b].start_s.total_cmp(&self.flows[*a].start_s));
        let mut active: Vec<ActiveFlow<'_>> = Vec::new();
        let mut times_s = vec![0.0; self.flows.len()];
        let mut now = 0.0;
        while !active.is_empty() || !waiting.is_empty() {
            let rate_max = |it: &ActiveFlow<'_>| it.window_bytes / it.round_trip_s;
            let flows: Vec<Flow<'_>> = active
                .iter()
                .map(|it| Flow {
                    route: &it.flow.links,
                    queue: scheme.queue(it.flow),
                    rate_max: rate_max(it),
                })
                .collect();
            let rates = network.rates(&flows);
            let events =
                active.iter().zip(&rates).map(|(it, rate)| it.left_bytes.min(it.window_left_bytes) / rate);
            let first_event = now + events.fold(f64::INFINITY, f64::min);
            let next_start = waiting.last().map_or(f64::INFINITY, |flow| self.flows[*flow].start_s);
            let next = first_event.min(next_start);
            active.iter_mut().zip(&rates).for_each(|(it, rate)| it.advance(rate * (next - now)));
            now = next;
            active.retain(|it| {
                let is_complete = it.left_bytes < ROUNDING_BYTES;
                if is_complete {
                    times_s[it.index] = now - it.flow.start_s + self.latency_s(it.flow);
                }
                !is_complete
            });
            while let Some(index) = waiting.pop_if(|flow| self.flows[*flow].start_s <= now) {
                active.push(self.start(index));
            }
        }
        times_s
    }

    fn start(&self, index: usize) -> ActiveFlow<'_> {
        let flow = &self.flows[index];
        let round_trip_s = self.route(flow).map(|link| 2.0 * link.delay_s + link.transmission_s()).sum();
        let window_bytes = INITIAL_WINDOW * PAYLOAD_BYTES;
        let left_bytes = flow.bytes;
        ActiveFlow { index, flow, left_bytes, round_trip_s, window_bytes, window_left_bytes: window_bytes }
    }

    fn route<'a>(&'a self, flow: &'a RoutedFlow) -> impl Iterator<Item = &'a RoutedLink> {
        flow.links.iter().map(|link| &self.links[link / 2])
    }

    /// Returns the time that the last packet needs after the slowest link has started to serve the next one:
    /// propagation at all links, and transmission at all links but the slowest.
    fn latency_s(&self, flow: &RoutedFlow) -> f64 {
        let slowest = self.route(flow).map(RoutedLink::transmission_s).fold(0.0, f64::max);
        self.route(flow).map(|link| link.delay_s + link.transmission_s()).sum::<f64>() - slowest
    }

    /// Returns the network and the flows in the format that `tests/ns3/flows.cc` documents.
    pub fn to_ns3(&self, scheme: FlowScheme) -> String {
        let join = |nodes: &[usize]| nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
        let weights = self.weights.map(|weight| weight.to_string()).join(" ");
        let mut text = format!("weights {weights}\n");
        for link in &self.links {
            let (nodes, delay_ns) = (join(&link.nodes), (link.delay_s * 1e9).round());
            let _ = writeln!(text, "link {nodes} {} {delay_ns}", link.bits_per_s);
        }
        for flow in &self.flows {
            let (start_ns, nodes) = ((flow.start_s * 1e9).round(), join(&flow.nodes));
            let _ = writeln!(text, "flow {start_ns} {} {} {nodes}", flow.bytes, scheme.queue(flow));
        }
        text
    }

    /// Summarizes the completion times of all flows with a scheme, in seconds.
    ///
    /// # Panics
    /// Panics if the number of times is not the number of flows.
    pub fn report(&self, scheme: FlowScheme, times_s: Vec<f64>) -> FlowReport {
        assert_eq!(times_s.len(), self.flows.len(), "each flow has a time");
        let all = self.flows.iter().zip(&times_s);
        let urgent: Vec<f64> =
            all.filter(|(flow, _)| flow.queue == URGENT_QUEUE).map(|(_, time)| *time).collect();
        let mut sorted = times_s.clone();
        sorted.sort_by(f64::total_cmp);
        let p99_s = sorted[(sorted.len() * 99).div_ceil(100) - 1];
        let mean_s = mean(&times_s).expect("a checked topology has a flow");
        FlowReport { scheme, flows: times_s.len(), mean_s, p99_s, urgent_mean_s: mean(&urgent), times_s }
    }
}

#[expect(clippy::cast_precision_loss, reason = "the number of flows is limited")]
fn mean(times: &[f64]) -> Option<f64> {
    (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64)
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::eviction::Topology;

    fn network(links: &[(&str, &str, f64)], flows: &[(&str, &str, u32, usize)]) -> FlowNetwork {
        let link = |(a, b, gbit): &(&str, &str, f64)| serde_json::json!({"between": [a, b], "gbit_per_s": gbit, "delay_us": 3});
        let flow = |(from, to, kib, queue): &(&str, &str, u32, usize)| serde_json::json!({"from": from, "to": to, "start_us": 5, "size_kib": kib, "queue": queue});
        let links: Vec<_> = links.iter().map(link).collect();
        let flows: Vec<_> = flows.iter().map(flow).collect();
        let topology: Topology =
            serde_json::from_value(serde_json::json!({"links": links, "flows": flows})).unwrap();
        topology.resolve().unwrap()
    }

    fn microseconds(network: &FlowNetwork, scheme: FlowScheme) -> Vec<f64> {
        network.completion_times(scheme).iter().map(|time| (time * 1e7).round() / 10.0).collect()
    }

    #[test]
    fn flow_alone_takes_latency_and_size_by_goodput() {
        // 8 MiB at 0.1 Gbit/s with 1448 of 1500 bytes, 6 us of propagation, and 12 us for a packet at 1 Gbit/s.
        let slow = network(&[("a", "s", 1.0), ("s", "b", 0.1)], &[("a", "b", 8192, 7)]);
        assert_eq!(microseconds(&slow, FlowScheme::Classes), [695_206.5]);
    }

    #[test]
    fn slow_start_limits_a_flow_to_a_window_per_round_trip() {
        // Round trip of 14.4 us: 10 packets, then 20 of 45.3 packets, before the window exceeds the capacity.
        let fast = network(&[("a", "s", 10.0), ("s", "b", 10.0)], &[("a", "b", 64, 7)]);
        assert_eq!(microseconds(&fast, FlowScheme::Classes), [63.9]);
    }

    #[test]
    fn classes_serve_the_urgent_flow_first() {
        let links = [("a", "s", 1.0), ("b", "s", 1.0), ("s", "c", 1.0)];
        let shared = network(&links, &[("a", "c", 1024, 7), ("b", "c", 1024, 1)]);
        // 2 MiB take 17,379.7 us, and 1 MiB with 64/65 of the capacity 8825.6 us. The latency is 18 us.
        assert_eq!(microseconds(&shared, FlowScheme::OneQueue), [17_397.7, 17_397.7]);
        assert_eq!(microseconds(&shared, FlowScheme::Classes), [8843.6, 17_397.7]);
    }

    #[test]
    fn percentile_is_the_nearest_rank_and_urgent_flows_are_of_queue_7() {
        let flows = network(&[("a", "b", 10.0)], &[("a", "b", 64, 7), ("a", "b", 64, 7), ("b", "a", 64, 1)]);
        let report = flows.report(FlowScheme::Classes, vec![1.0, 2.0, 6.0]);
        assert_eq!((report.mean_s, report.p99_s, report.urgent_mean_s), (3.0, 6.0, Some(1.5)));
    }

    #[test]
    fn ns3_input_has_queues_of_the_scheme() {
        let flows = network(&[("a", "s", 10.0), ("s", "b", 2.5)], &[("b", "a", 1, 6)]);
        let expected = "weights 64 1 2 4 8 16 32 64\nlink 0 1 10000000000 3000\nlink 1 2 2500000000 3000\n";
        assert_eq!(flows.to_ns3(FlowScheme::Classes), format!("{expected}flow 5000 1024 6 2 1 0\n"));
        assert_eq!(flows.to_ns3(FlowScheme::OneQueue), format!("{expected}flow 5000 1024 1 2 1 0\n"));
    }

    proptest! {
        /// No flow completes before its size by the goodput of the slowest link and its latency, and all complete
        /// before the time in which the links transfer all data one after the other. The order does not matter.
        #[test]
        fn times_are_bounded_and_independent_of_the_order(
            mut specs in vec((0..4_usize, 0..4_usize, 1..4096_u32, 0..8_usize, 0..3000_u32), 1..20),
            gbit in vec(0.5..40.0, 5),
        ) {
            specs.retain(|(from, to, ..)| from != to);
            prop_assume!(!specs.is_empty());
            let resolve = |specs: &[(usize, usize, u32, usize, u32)]| {
                let names = ["a", "b", "c", "d"];
                let links: Vec<_> = names.iter().zip(&gbit).map(|(name, gbit)| serde_json::json!({"between": [name, "s"], "gbit_per_s": gbit, "delay_us": 3})).collect();
                let flows: Vec<_> = specs.iter().map(|(from, to, kib, queue, start)| serde_json::json!({"from": names[*from], "to": names[*to], "size_kib": kib, "queue": queue, "start_us": start})).collect();
                serde_json::from_value::<Topology>(serde_json::json!({"links": links, "flows": flows})).unwrap().resolve().unwrap()
            };
            let network = resolve(&specs);
            let slowest = gbit.iter().copied().fold(f64::INFINITY, f64::min);
            let kib: u32 = specs.iter().map(|(_, _, kib, ..)| kib).sum();
            let reversed: Vec<_> = specs.iter().copied().rev().collect();
            for scheme in FlowScheme::ALL {
                let times = network.completion_times(scheme);
                for ((from, to, kib, ..), time) in specs.iter().zip(&times) {
                    let (from, to) = (gbit[*from], gbit[*to]);
                    let least = 6e-6 + 12e-6 / from.max(to) + f64::from(*kib) * 1024.0 * 8e-9 / from.min(to) * 1500.0 / 1448.0;
                    prop_assert!(*time > least - 1e-8, "{time} s, at least {least} s");
                }
                // The last start is at 3 ms, and slow start costs less than 1 ms.
                let most = 0.004 + f64::from(kib) * 1024.0 * 8e-9 / slowest * 1500.0 / 1448.0;
                prop_assert!(times.iter().all(|time| *time < most), "{times:?}, at most {most} s");
                let back = resolve(&reversed).completion_times(scheme);
                for (time, other) in times.iter().zip(back.iter().rev()) {
                    prop_assert!((time / other - 1.0).abs() < 1e-6);
                }
            }
        }
    }
}
