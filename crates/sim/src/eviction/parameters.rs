//! Parameters of the simulated cluster.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tiering::evict::Settings;
use units::{Bytes, Fraction};

use super::{QUEUES, TenantSpec};
use crate::scenario_error::{ScenarioError, check_name, check_range};

/// Largest number of servers.
const SERVERS_MAX: u32 = 1024;
/// Largest number of tasks.
const TASKS_MAX: u32 = 4096;
/// Largest number of workloads.
const WORKLOADS_MAX: u32 = 16;

/// Parameters of the cluster (section IV-A). The defaults are in `parameters.json`, as published, except:
///
/// - `lower_threshold` and the growth rates of the workloads are fitted to the published results of one
///   host (section IV-C2), and to nothing else.
/// - `queue_weights`, `other_workload`, `flow_kib` and the times are not published. They were chosen before
///   the first simulation of the network.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Parameters {
    /// Number of spine switches.
    pub spines: u32,
    /// Number of leaf switches.
    pub leaves: u32,
    /// Servers per leaf switch.
    pub servers_per_leaf: u32,
    /// Capacity of a link between leaf and spine switches, in Gbit/s.
    pub core_gbit_per_s: f64,
    /// Capacity of the link of a server, in Gbit/s.
    pub server_gbit_per_s: f64,
    /// Propagation delay of a link, in microseconds.
    pub link_delay_us: f64,
    /// Weights of the queues of a port for weighted round robin.
    pub queue_weights: [f64; QUEUES],
    /// Tasks per server.
    pub tasks_per_server: u32,
    /// Servers whose tasks run the measured workload. They are spread evenly over the leaf switches.
    pub intensive_servers: u32,
    /// Largest eviction rate of a task (V_evict), in MB/s.
    pub eviction_mb_per_s: f64,
    /// Smallest threshold (T_lower), as a fraction of the limit.
    pub lower_threshold: f64,
    /// Workloads to measure.
    pub workloads: Vec<Workload>,
    /// Workload of the other servers.
    pub other_workload: Workload,
    /// Size of an eviction flow, in KiB.
    pub flow_kib: f64,
    /// Simulated time before the measurement, in seconds.
    pub warm_up_s: f64,
    /// Measured time, in seconds.
    pub measured_s: f64,
    /// Seed of the random numbers: servers that hold the evicted memory, paths, and starts of the tasks.
    pub seed: u64,
}

/// Workload of a task.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// Name.
    pub name: String,
    /// Memory that the task touches until it is done, in GB (10⁹ bytes).
    pub working_set_gb: f64,
    /// Mean rate at which the task touches new memory if it never waits (V_app), in MB/s.
    pub growth_mb_per_s: f64,
    /// If more than 0, the task touches memory at twice this rate for this time, and none for the same time,
    /// in seconds.
    #[serde(default)]
    pub burst_s: f64,
    /// Accesses to memory that was touched before, per access to new memory.
    #[serde(default)]
    pub accesses_again: f64,
    /// Time for which the task waits while evicted memory is fetched, in nanoseconds per byte. Fetches use
    /// no capacity of the network.
    #[serde(default)]
    pub fetch_ns_per_byte: f64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self::with(Map::new()).expect("the file has all parameters")
    }
}

impl Parameters {
    /// Returns the default parameters with these changes: names of parameters and their values.
    ///
    /// # Errors
    /// An error of JSON if there is no such parameter, or if the value has another type.
    pub fn with(changes: Map<String, Value>) -> Result<Self, serde_json::Error> {
        let mut all: Map<String, Value> = serde_json::from_str(include_str!("parameters.json"))?;
        all.extend(changes);
        serde_json::from_value(Value::Object(all))
    }

    /// Checks all parameters.
    ///
    /// # Errors
    /// [`ScenarioError`] for the first parameter that violates its rule.
    pub fn check(&self) -> Result<(), ScenarioError> {
        check_range("spines", f64::from(self.spines), 1.0, 64.0)?;
        check_range("leaves", f64::from(self.leaves), 1.0, 64.0)?;
        check_range("servers_per_leaf", f64::from(self.servers_per_leaf), 1.0, f64::from(SERVERS_MAX))?;
        let servers = f64::from(self.leaves) * f64::from(self.servers_per_leaf);
        check_range("leaves x servers_per_leaf", servers, 2.0, f64::from(SERVERS_MAX))?;
        for (field, rate) in [
            ("core_gbit_per_s", self.core_gbit_per_s),
            ("server_gbit_per_s", self.server_gbit_per_s),
            ("eviction_mb_per_s", self.eviction_mb_per_s),
        ] {
            check_range(field, rate, 0.001, 1e6)?;
        }
        check_range("link_delay_us", self.link_delay_us, 0.0, 1e6)?;
        for (queue, weight) in self.queue_weights.iter().enumerate() {
            check_range(&format!("queue_weights[{queue}]"), *weight, 1.0, 1e4)?;
        }
        check_range("tasks_per_server", f64::from(self.tasks_per_server), 1.0, 256.0)?;
        check_range("tasks", servers * f64::from(self.tasks_per_server), 1.0, f64::from(TASKS_MAX))?;
        check_range("intensive_servers", f64::from(self.intensive_servers), 1.0, servers)?;
        check_range("lower_threshold", self.lower_threshold, 0.01, 1.0)?;
        check_range("flow_kib", self.flow_kib, 4.0, 1e6)?;
        check_range("warm_up_s", self.warm_up_s, 0.0, 600.0)?;
        check_range("measured_s", self.measured_s, 1.0, 600.0)?;
        let workloads = u32::try_from(self.workloads.len()).unwrap_or(u32::MAX);
        check_range("number of workloads", f64::from(workloads), 1.0, f64::from(WORKLOADS_MAX))?;
        for (index, workload) in self.workloads.iter().enumerate() {
            workload.check(&format!("workloads[{index}]"))?;
        }
        self.other_workload.check("other_workload")
    }

    /// Returns the number of servers.
    pub fn servers(&self) -> u32 {
        self.leaves * self.servers_per_leaf
    }

    /// Returns the settings of early eviction.
    ///
    /// # Panics
    /// Panics if `lower_threshold` is invalid.
    pub(super) fn settings(&self) -> Settings {
        let lower = Fraction::new(self.lower_threshold).expect("the parameters are checked");
        let nominal = self.eviction_mb_per_s * 1e6;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
        let nominal_eviction_bytes_per_s = Bytes::new(nominal as u64);
        Settings { lower, nominal_eviction_bytes_per_s, ..Settings::default() }
    }
}

impl Workload {
    fn check(&self, path: &str) -> Result<(), ScenarioError> {
        let field = |name: &str| format!("{path}.{name}");
        check_name(&field("name"), &self.name)?;
        check_range(&field("working_set_gb"), self.working_set_gb, 0.1, 1000.0)?;
        check_range(&field("growth_mb_per_s"), self.growth_mb_per_s, 1.0, 1e5)?;
        check_range(&field("burst_s"), self.burst_s, 0.0, 600.0)?;
        check_range(&field("accesses_again"), self.accesses_again, 0.0, 1e6)?;
        check_range(&field("fetch_ns_per_byte"), self.fetch_ns_per_byte, 0.0, 1e6)
    }

    /// Returns the tenant that runs this workload with this part of its working set as its limit.
    pub(super) fn tenant(&self, local_ratio: f64, eviction_mb_per_s: f64) -> TenantSpec {
        let working_set = self.working_set_gb * 1e9;
        TenantSpec {
            working_set,
            growth_per_s: self.growth_mb_per_s * 1e6,
            burst_s: self.burst_s,
            accesses_again: self.accesses_again,
            fetch_s_per_byte: self.fetch_ns_per_byte * 1e-9,
            limit: working_set * local_ratio,
            eviction_per_s: eviction_mb_per_s * 1e6,
        }
    }
}
