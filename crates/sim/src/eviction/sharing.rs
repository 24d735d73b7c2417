//! Rates of flows that share the links of a network.

/// Number of queues of a port.
pub const QUEUES: usize = 8;

/// Flow of data over links.
#[derive(Clone, Copy, Debug)]
pub struct Flow<'a> {
    /// Indices of the links, without repetition. May be empty.
    pub route: &'a [usize],
    /// Queue of the flow at each link, below [`QUEUES`].
    pub queue: usize,
    /// Largest rate, in bytes per second, 0 or more.
    pub rate_max: f64,
}

/// Network of links. The port of each link has queues that it serves by weighted round robin. The flows of a
/// queue share its part equally. Congestion control is assumed to reach these rates at once, without losses
/// of capacity.
#[derive(Clone, Debug)]
pub struct Network {
    /// Capacity per link, in bytes per second.
    pub capacity: Vec<f64>,
    /// Weights of the queues, more than 0.
    pub weights: [f64; QUEUES],
}

/// Largest number of passes over the capacity that is left.
const PASSES_MAX: usize = 4;

impl Network {
    /// Returns the rate of each flow, in bytes per second. Each flow has its largest rate, or a link on its
    /// route is full. Capacity that is left because flows limit each other in a cycle is shared in further
    /// passes. Their number is limited, so that some of it can remain.
    pub fn rates(&self, flows: &[Flow<'_>]) -> Vec<f64> {
        let mut rates = vec![0.0; flows.len()];
        let mut left = self.clone();
        for _ in 0..PASSES_MAX {
            let wanted = flows.iter().zip(&rates).map(|(flow, rate)| flow.rate_max - rate).collect();
            let mut filling = Filling::new(&left, flows, wanted);
            while filling.open > 0 {
                filling.advance();
            }
            rates.iter_mut().zip(&filling.added).for_each(|(rate, added)| *rate += added);
            if !filling.is_approximate {
                break;
            }
            left.capacity = filling.links.iter().map(|link| link.left.max(0.0)).collect();
        }
        rates
    }
}

/// Link whose capacity is being shared.
#[derive(Clone, Debug, Default)]
struct Link {
    /// Flows over the link.
    flows: Vec<usize>,
    /// Capacity without the final rates.
    left: f64,
    queues: [Queue; QUEUES],
}

/// Flows of one queue of a link.
#[derive(Clone, Copy, Debug, Default)]
struct Queue {
    /// Number of flows without a final rate.
    open: u32,
    /// Sum of the final rates.
    fixed: f64,
    /// Rate that the link offers to each flow without a final rate. It does not decrease.
    offer: f64,
}

/// Rates that are being computed: an extension of progressive filling for weights that differ by link.
struct Filling<'a> {
    network: &'a Network,
    flows: &'a [Flow<'a>],
    wanted: Vec<f64>,
    links: Vec<Link>,
    added: Vec<f64>,
    is_open: Vec<bool>,
    /// Number of flows without a final rate.
    open: usize,
    /// Smallest offer of the links of each flow without a final rate.
    offers: Vec<f64>,
    /// Whether a final rate may be too small.
    is_approximate: bool,
}

impl<'a> Filling<'a> {
    fn new(network: &'a Network, flows: &'a [Flow<'a>], wanted: Vec<f64>) -> Self {
        let new_link = |capacity: &f64| Link { left: *capacity, ..Link::default() };
        let mut links: Vec<Link> = network.capacity.iter().map(new_link).collect();
        for (index, flow) in flows.iter().enumerate() {
            for link in flow.route {
                links[*link].flows.push(index);
                links[*link].queues[flow.queue].open += 1;
            }
        }
        let (added, is_open) = (vec![0.0; flows.len()], vec![true; flows.len()]);
        let offers = vec![f64::INFINITY; flows.len()];
        let open = flows.len();
        Self { network, flows, wanted, links, added, is_open, open, offers, is_approximate: false }
    }

    /// Sets the final rates of at least one flow: of those that get all that they want, else of all flows of
    /// the links that offer their flows less than other links. If there is no such link, sets that of the
    /// flow with the smallest offer.
    fn advance(&mut self) {
        self.update_offers();
        let before = self.open;
        for flow in 0..self.flows.len() {
            if self.is_open[flow] && self.wanted[flow] <= self.offers[flow] {
                self.fix(flow, self.wanted[flow]);
            }
        }
        if self.open < before {
            return;
        }
        let is_bottleneck = |link: &Link| link.flows.iter().all(|flow| self.is_limited_by(*flow, link));
        let bottlenecks: Vec<usize> =
            (0..self.links.len()).filter(|link| is_bottleneck(&self.links[*link])).collect();
        for link in bottlenecks {
            for flow in std::mem::take(&mut self.links[link].flows) {
                if self.is_open[flow] {
                    self.fix(flow, self.offers[flow]);
                }
            }
        }
        if self.open == before {
            self.is_approximate = true;
            let open = (0..self.flows.len()).filter(|flow| self.is_open[*flow]);
            let smallest = open.min_by(|a, b| self.offers[*a].total_cmp(&self.offers[*b]));
            smallest.into_iter().for_each(|flow| self.fix(flow, self.offers[flow]));
        }
    }

    /// Computes the offers of all links: a queue without open flows uses less than its part, which the other
    /// queues share by weight.
    fn update_offers(&mut self) {
        for link in &mut self.links {
            let queues = link.queues.iter().zip(self.network.weights).filter(|(queue, _)| queue.open > 0);
            let (mut weights, mut capacity) = (0.0, link.left);
            for (queue, weight) in queues {
                weights += weight;
                capacity += queue.fixed;
            }
            for (queue, weight) in link.queues.iter_mut().zip(self.network.weights) {
                if queue.open > 0 {
                    let part = capacity * weight / weights;
                    queue.offer = ((part - queue.fixed) / f64::from(queue.open)).max(0.0);
                }
            }
        }
        for (flow, offer) in self.flows.iter().zip(&mut self.offers) {
            let offers = flow.route.iter().map(|link| self.links[*link].queues[flow.queue].offer);
            *offer = offers.fold(f64::INFINITY, f64::min);
        }
    }

    fn is_limited_by(&self, flow: usize, link: &Link) -> bool {
        let is_smallest = || link.queues[self.flows[flow].queue].offer <= self.offers[flow];
        !self.is_open[flow] || is_smallest()
    }

    /// Sets the final rate of a flow.
    fn fix(&mut self, flow: usize, rate: f64) {
        self.added[flow] = rate;
        self.is_open[flow] = false;
        self.open -= 1;
        for link in self.flows[flow].route {
            self.links[*link].left -= rate;
            let queue = &mut self.links[*link].queues[self.flows[flow].queue];
            queue.open -= 1;
            queue.fixed += rate;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const WEIGHTS: [f64; QUEUES] = [64.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

    fn rates(capacity: &[f64], flows: &[(&[usize], usize, f64)]) -> Vec<f64> {
        let network = Network { capacity: capacity.to_vec(), weights: WEIGHTS };
        let flows: Vec<Flow<'_>> = flows
            .iter()
            .map(|(route, queue, rate_max)| Flow { route, queue: *queue, rate_max: *rate_max })
            .collect();
        network.rates(&flows).iter().map(|rate| (rate * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn flows_of_a_queue_share_a_link_equally() {
        let flows: [(&[usize], usize, f64); 3] = [(&[0], 1, 9e9), (&[0], 1, 9e9), (&[0], 1, 10.0)];
        assert_eq!(rates(&[100.0], &flows), [45.0, 45.0, 10.0]);
    }

    #[test]
    fn queues_share_a_link_by_weight_and_use_what_others_leave() {
        let both: [(&[usize], usize, f64); 3] = [(&[0], 7, 9e9), (&[0], 6, 9e9), (&[0], 6, 9e9)];
        assert_eq!(rates(&[96.0], &both), [64.0, 16.0, 16.0]);
        let limited: [(&[usize], usize, f64); 2] = [(&[0], 7, 6.0), (&[0], 1, 9e9)];
        assert_eq!(rates(&[96.0], &limited), [6.0, 90.0]);
    }

    #[test]
    fn max_min_rates_on_several_links() {
        // The first flow uses both links. The second link is the bottleneck of flows 0, 2 and 3.
        let flows: [(&[usize], usize, f64); 4] =
            [(&[0, 1], 1, 9e9), (&[0], 1, 9e9), (&[1], 1, 9e9), (&[1], 1, 9e9)];
        assert_eq!(rates(&[100.0, 60.0], &flows), [20.0, 80.0, 20.0, 20.0]);
        assert_eq!(rates(&[1.0], &[(&[], 0, 7.0)]), [7.0]);
    }

    proptest! {
        /// No link carries more than its capacity, and each flow has its largest rate or a full link.
        #[test]
        fn rates_are_feasible_and_leave_no_capacity(
            flows in vec((proptest::sample::subsequence(vec![0, 1, 2, 3], 1..=3), 0..QUEUES, 0.0..200.0), 1..40),
            capacity in vec(1.0..100.0, 4),
        ) {
            let network = Network { capacity, weights: WEIGHTS };
            let all: Vec<Flow<'_>> =
                flows.iter().map(|(route, queue, rate_max)| Flow { route, queue: *queue, rate_max: *rate_max }).collect();
            let rates = network.rates(&all);
            let load = |link: usize| -> f64 {
                all.iter().zip(&rates).filter(|(flow, _)| flow.route.contains(&link)).map(|(_, rate)| rate).sum()
            };
            let is_full = |link: &usize| load(*link) > network.capacity[*link] * (1.0 - 1e-9);
            for link in 0..4 {
                prop_assert!(load(link) <= network.capacity[link] * (1.0 + 1e-9));
            }
            for (flow, rate) in all.iter().zip(&rates) {
                prop_assert!(*rate >= 0.0 && *rate <= flow.rate_max * (1.0 + 1e-9));
                prop_assert!(*rate > flow.rate_max * (1.0 - 1e-9) || flow.route.iter().any(is_full));
            }
        }
    }
}
