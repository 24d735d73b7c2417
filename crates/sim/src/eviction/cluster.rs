//! Cluster of servers whose tasks evict memory to other servers over a leaf-spine network.

use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};
use units::Ns;

use super::{Flow, Network, Parameters, Tenant, Workload, flow_times::FlowTimes};

/// Duration of a step.
const STEP: Ns = Ns::ms(10);
/// Queue of all flows without classes.
const COMMON_QUEUE: usize = 1;

/// Parts of Glitter that a cluster uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionScheme {
    /// Fixed thresholds, and one queue for all flows (Fastswap).
    Fixed,
    /// Adaptive thresholds (A-ETAM).
    Thresholds,
    /// Queues by the class of the flow (EFSM).
    Classes,
    /// Adaptive thresholds and classes.
    Both,
}

impl EvictionScheme {
    /// All schemes.
    pub const ALL: [Self; 4] = [Self::Fixed, Self::Thresholds, Self::Classes, Self::Both];

    /// Returns the name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Thresholds => "thresholds",
            Self::Classes => "classes",
            Self::Both => "both",
        }
    }

    fn has_adaptive_thresholds(self) -> bool {
        matches!(self, Self::Thresholds | Self::Both)
    }

    fn has_classes(self) -> bool {
        matches!(self, Self::Classes | Self::Both)
    }
}

/// Measurement of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct ClusterReport {
    /// Mean time that a task of the workload needs, divided by the time if it never waits.
    pub normalized_time: f64,
    /// The same for the tasks of the other servers.
    pub others_normalized_time: f64,
    /// Mean completion time of the eviction flows of blocked tasks of the workload, in seconds. `None` if no
    /// task is blocked.
    pub urgent_mean_s: Option<f64>,
    /// 99th percentile of these times, in seconds.
    pub urgent_p99_s: Option<f64>,
    /// Memory that blocked tasks of the workload evicted, in GB (10⁹ bytes).
    pub urgent_gb: f64,
}

/// Servers and their tasks.
struct Cluster {
    network: Network,
    tasks: Vec<Task>,
    has_classes: bool,
}

/// Task of a server. It starts again when it is done.
struct Task {
    tenant: Tenant,
    is_intensive: bool,
    /// Rate at which the task touches new memory if it never waits, in bytes per second.
    growth_per_s: f64,
    route: Vec<usize>,
    /// Steps until the first start.
    delay: u32,
    queue: usize,
    /// Memory that was touched before the measurement, in bytes.
    progress_before: f64,
    urgent_before: f64,
}

/// Runs the tasks of a workload on the servers of a cluster, and measures them. The limit of each task is this
/// part of its working set. The result is deterministic.
///
/// # Panics
/// Panics if [`Parameters::check`] returns an error, or `local_ratio` is not more than 0.
pub fn simulate_cluster(
    parameters: &Parameters,
    workload: &Workload,
    local_ratio: f64,
    scheme: EvictionScheme,
) -> ClusterReport {
    let mut cluster = Cluster::new(parameters, workload, local_ratio, scheme);
    let step_s = STEP.as_duration().as_secs_f64();
    for _ in 0..steps(parameters.warm_up_s) {
        cluster.step(|_, _| {});
    }
    cluster.tasks.iter_mut().for_each(Task::start_measurement);
    // There and back over the four links between servers of different leaf switches.
    let latency_s = 2.0 * 4.0 * parameters.link_delay_us * 1e-6;
    let mut times = FlowTimes::new(parameters.flow_kib * 1024.0, latency_s);
    for _ in 0..steps(parameters.measured_s) {
        cluster.step(|task, rate| {
            if task.is_intensive {
                times.add(rate, rate * step_s);
            }
        });
    }
    let normalized_time = |is_intensive: bool| {
        let tasks = cluster.tasks.iter().filter(|task| task.is_intensive == is_intensive);
        let (wanted, done) = tasks.fold((0.0, 0.0), |(wanted, done), task| {
            let progress = task.tenant.progress() - task.progress_before;
            (wanted + task.growth_per_s * parameters.measured_s, done + progress)
        });
        wanted / done
    };
    let intensive = || cluster.tasks.iter().filter(|task| task.is_intensive);
    let urgent = intensive().map(|task| task.tenant.outcome().urgent_bytes - task.urgent_before).sum::<f64>();
    ClusterReport {
        normalized_time: normalized_time(true),
        others_normalized_time: normalized_time(false),
        urgent_mean_s: times.mean(),
        urgent_p99_s: times.quantile(0.99),
        urgent_gb: urgent / 1e9,
    }
}

/// Returns the number of steps of a time in seconds.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the parameters are checked")]
fn steps(seconds: f64) -> u32 {
    (seconds / STEP.as_duration().as_secs_f64()).round() as u32
}

impl Cluster {
    fn new(parameters: &Parameters, workload: &Workload, local_ratio: f64, scheme: EvictionScheme) -> Self {
        let mut random = Pcg64::seed_from_u64(parameters.seed);
        let links = Links(parameters);
        let settings = parameters.settings();
        let servers = parameters.servers();
        let mut tasks = Vec::new();
        for server in 0..servers {
            // Spreads the servers evenly: their number increases by 1 at this server.
            let count =
                |until: u32| u64::from(until) * u64::from(parameters.intensive_servers) / u64::from(servers);
            let is_intensive = count(server + 1) > count(server);
            let workload = if is_intensive { workload } else { &parameters.other_workload };
            for _ in 0..parameters.tasks_per_server {
                let other = (server + random.random_range(1..servers)) % servers;
                let route = links.route(server, other, random.random_range(0..parameters.spines));
                let spec = workload.tenant(local_ratio, parameters.eviction_mb_per_s);
                let tenant = Tenant::new(spec, &settings, scheme.has_adaptive_thresholds())
                    .expect("the parameters are checked");
                let start: f64 = random.random_range(0.0..1.0);
                tasks.push(Task {
                    tenant,
                    is_intensive,
                    growth_per_s: spec.growth_per_s,
                    route,
                    delay: steps(
                        start * (spec.working_set / spec.growth_per_s).min(parameters.warm_up_s / 2.0),
                    ),
                    queue: COMMON_QUEUE,
                    progress_before: 0.0,
                    urgent_before: 0.0,
                });
            }
        }
        let network = Network { capacity: links.capacity(), weights: parameters.queue_weights };
        Self { network, tasks, has_classes: scheme.has_classes() }
    }

    /// Simulates a step. Calls `on_urgent` for each blocked task, with its eviction rate.
    fn step(&mut self, mut on_urgent: impl FnMut(&Task, f64)) {
        for task in &mut self.tasks {
            let class = task.tenant.decide();
            task.queue = if self.has_classes { usize::from(class.queue()) } else { COMMON_QUEUE };
        }
        let is_active = |task: &Task| task.delay == 0 && task.tenant.desired_eviction_per_s() > 0.0;
        let active: Vec<usize> = (0..self.tasks.len()).filter(|task| is_active(&self.tasks[*task])).collect();
        let flow = |task: &Task| task.tenant.desired_eviction_per_s();
        let flows: Vec<Flow<'_>> = active
            .iter()
            .map(|task| &self.tasks[*task])
            .map(|task| Flow { route: &task.route, queue: task.queue, rate_max: flow(task) })
            .collect();
        let mut rates = vec![0.0; self.tasks.len()];
        for (task, rate) in active.iter().zip(self.network.rates(&flows)) {
            rates[*task] = rate;
        }
        for (task, rate) in self.tasks.iter_mut().zip(rates) {
            task.advance(rate);
            if task.tenant.is_blocked() && rate > 0.0 {
                on_urgent(task, rate);
            }
        }
    }
}

impl Task {
    fn start_measurement(&mut self) {
        self.progress_before = self.tenant.progress();
        self.urgent_before = self.tenant.outcome().urgent_bytes;
    }

    fn advance(&mut self, eviction_per_s: f64) {
        if self.delay > 0 {
            self.delay -= 1;
            return;
        }
        self.tenant.advance(eviction_per_s, STEP);
        if self.tenant.is_done() {
            self.tenant.restart();
        }
    }
}

/// Links of a leaf-spine network, in this order: from and to each server, from each leaf to each spine
/// switch, and from each spine to each leaf switch.
struct Links<'a>(&'a Parameters);

impl Links<'_> {
    /// Returns the capacities, in bytes per second.
    fn capacity(&self) -> Vec<f64> {
        let gbit = 1e9 / 8.0;
        let servers = vec![self.0.server_gbit_per_s * gbit; 2 * self.0.servers() as usize];
        let core = vec![self.0.core_gbit_per_s * gbit; 2 * (self.0.leaves * self.0.spines) as usize];
        [servers, core].concat()
    }

    /// Returns the links from one server to another one.
    fn route(&self, from: u32, to: u32, spine: u32) -> Vec<usize> {
        let servers = self.0.servers();
        let (from_leaf, to_leaf) = (from / self.0.servers_per_leaf, to / self.0.servers_per_leaf);
        let core = |direction: u32, leaf: u32| {
            let switches = self.0.leaves * self.0.spines;
            2 * servers + direction * switches + leaf * self.0.spines + spine
        };
        let links = match from_leaf == to_leaf {
            true => vec![from, servers + to],
            false => vec![from, core(0, from_leaf), core(1, to_leaf), servers + to],
        };
        links.into_iter().map(|link| link as usize).collect()
    }
}
