//! Networks and lists of flows that users write as JSON. [`Topology::resolve`] checks them and computes the
//! routes. `flow_list.rs` simulates the result.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use units::QuotedText;

use super::{Parameters, QUEUES};
use crate::scenario_error::{ScenarioError, check_name, check_range};

/// Largest number of nodes.
const NODES_MAX: usize = 256;
/// Largest number of links.
const LINKS_MAX: usize = 512;
/// Largest number of flows.
const FLOWS_MAX: usize = 1024;
/// Largest size of a flow, in KiB.
const FLOW_KIB_MAX: u32 = 1 << 20;
/// Smallest and largest capacity of a link, in Gbit/s.
const GBIT_PER_S_RANGE: (f64, f64) = (0.1, 800.0);
/// Largest propagation delay of a link, in microseconds.
const DELAY_US_MAX: f64 = 1e4;
/// Largest start of a flow, in microseconds.
const START_US_MAX: f64 = 60e6;
/// Range of the weight of a queue.
const WEIGHT_RANGE: (f64, f64) = (1.0, 1e4);

/// Network, and flows over it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Links. The nodes are the ends of all links.
    pub links: Vec<LinkSpec>,
    /// Weights of the queues of each port for weighted round robin [default: as in [`Parameters`]].
    #[serde(default = "default_weights")]
    pub queue_weights: [f64; QUEUES],
    /// Flows.
    pub flows: Vec<FlowSpec>,
}

/// Link with the same capacity in both directions.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// Names of both nodes.
    pub between: [String; 2],
    /// Capacity in each direction, in Gbit/s.
    pub gbit_per_s: f64,
    /// Propagation delay, in microseconds.
    pub delay_us: f64,
}

/// Transfer of data from one node to another one.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct FlowSpec {
    /// Name of the source.
    pub from: String,
    /// Name of the destination.
    pub to: String,
    /// Nodes of the route between both, in order. By default, the route has the fewest links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Vec<String>>,
    /// Start, in microseconds.
    pub start_us: f64,
    /// Size, in KiB.
    pub size_kib: u32,
    /// Queue of the flow at each port, from 0 to 7. 7 is that of blocked tasks.
    pub queue: usize,
}

/// Checked topology whose flows have routes.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowNetwork {
    /// Links with the indices of their nodes. Link `i` has the directed links `2 i` (from the first to the second
    /// node) and `2 i + 1`.
    pub(super) links: Vec<RoutedLink>,
    pub(super) weights: [f64; QUEUES],
    pub(super) flows: Vec<RoutedFlow>,
}

/// Link between two nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RoutedLink {
    pub nodes: [usize; 2],
    pub bits_per_s: f64,
    pub delay_s: f64,
}

/// Flow with its route.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RoutedFlow {
    /// Nodes of the route, from the source to the destination.
    pub nodes: Vec<usize>,
    /// Directed links of the route.
    pub links: Vec<usize>,
    pub start_s: f64,
    pub bytes: f64,
    pub queue: usize,
}

fn default_weights() -> [f64; QUEUES] {
    Parameters::default().queue_weights
}

impl Topology {
    /// Checks all fields, and computes the route of each flow.
    ///
    /// # Errors
    /// [`ScenarioError`] for the first field that violates its rule.
    pub fn resolve(&self) -> Result<FlowNetwork, ScenarioError> {
        for (field, count, max) in [
            ("number of links", self.links.len(), LINKS_MAX),
            ("number of flows", self.flows.len(), FLOWS_MAX),
        ] {
            if count == 0 || count > max {
                return Err(ScenarioError::new(field, count, format!("must be from 1 to {max}")));
            }
        }
        for (queue, weight) in self.queue_weights.iter().enumerate() {
            check_range(&format!("queue_weights[{queue}]"), *weight, WEIGHT_RANGE.0, WEIGHT_RANGE.1)?;
        }
        let mut graph = Graph::default();
        let add_link = |(index, link): (usize, &LinkSpec)| graph.add(link, &format!("links[{index}]"));
        let links = self.links.iter().enumerate().map(add_link).collect::<Result<_, _>>()?;
        let route_flow = |(index, flow): (usize, &FlowSpec)| flow.resolve(&graph, &format!("flows[{index}]"));
        let flows = self.flows.iter().enumerate().map(route_flow).collect::<Result<_, _>>()?;
        Ok(FlowNetwork { links, weights: self.queue_weights, flows })
    }
}

impl FlowSpec {
    fn resolve(&self, graph: &Graph, path: &str) -> Result<RoutedFlow, ScenarioError> {
        check_range(&format!("{path}.start_us"), self.start_us, 0.0, START_US_MAX)?;
        check_range(&format!("{path}.size_kib"), f64::from(self.size_kib), 1.0, f64::from(FLOW_KIB_MAX))?;
        if self.queue >= QUEUES {
            let rule = format!("must be from 0 to {}", QUEUES - 1);
            return Err(ScenarioError::new(format!("{path}.queue"), self.queue, rule));
        }
        let (from, to) =
            (graph.find(&format!("{path}.from"), &self.from)?, graph.find(&format!("{path}.to"), &self.to)?);
        if from == to {
            let rule = "must not be the source of the flow";
            return Err(ScenarioError::new(format!("{path}.to"), QuotedText(&self.to), rule));
        }
        let nodes = match &self.via {
            None => graph
                .shortest_route(from, to)
                .map_err(|rule| ScenarioError::new(format!("{path}.to"), QuotedText(&self.to), rule))?,
            Some(via) => {
                let field = |index: usize| format!("{path}.via[{index}]");
                let find = |(index, name): (usize, &String)| graph.find(&field(index), name);
                let between = via.iter().enumerate().map(find).collect::<Result<Vec<_>, _>>()?;
                [vec![from], between, vec![to]].concat()
            }
        };
        let links = graph.links_of(&nodes).map_err(|rule| {
            ScenarioError::new(
                format!("{path}.via"),
                format!("{:?}", self.via.as_deref().unwrap_or(&[])),
                rule,
            )
        })?;
        let (start_s, bytes) = (self.start_us * 1e-6, f64::from(self.size_kib) * 1024.0);
        Ok(RoutedFlow { nodes, links, start_s, bytes, queue: self.queue })
    }
}

/// Nodes and the directed links between them.
#[derive(Debug, Default)]
struct Graph {
    names: BTreeMap<String, usize>,
    /// Directed links by their source and destination.
    links: BTreeMap<(usize, usize), usize>,
}

impl Graph {
    /// Adds a link and its nodes.
    fn add(&mut self, link: &LinkSpec, path: &str) -> Result<RoutedLink, ScenarioError> {
        let (min, max) = GBIT_PER_S_RANGE;
        check_range(&format!("{path}.gbit_per_s"), link.gbit_per_s, min, max)?;
        check_range(&format!("{path}.delay_us"), link.delay_us, 0.0, DELAY_US_MAX)?;
        for (end, name) in link.between.iter().enumerate() {
            check_name(&format!("{path}.between[{end}]"), name)?;
        }
        let nodes = link.between.each_ref().map(|name| self.find_or_add(name));
        let invalid = |rule: &str| {
            let [a, b] = &link.between;
            let value = format!("[{}, {}]", QuotedText(a), QuotedText(b));
            Err(ScenarioError::new(format!("{path}.between"), value, rule))
        };
        let [a, b] = nodes;
        if a == b {
            return invalid("must be two nodes");
        }
        if self.names.len() > NODES_MAX {
            return invalid(&format!("must not make more than {NODES_MAX} nodes"));
        }
        let first = self.links.len();
        if self.links.insert((a, b), first).is_some() {
            return invalid("must be the only link between these nodes");
        }
        self.links.insert((b, a), first + 1);
        Ok(RoutedLink { nodes, bits_per_s: link.gbit_per_s * 1e9, delay_s: link.delay_us * 1e-6 })
    }

    fn find_or_add(&mut self, name: &str) -> usize {
        let next = self.names.len();
        *self.names.entry(name.to_owned()).or_insert(next)
    }

    fn find(&self, field: &str, name: &str) -> Result<usize, ScenarioError> {
        let error = || ScenarioError::new(field, QuotedText(name), "must be a node of a link");
        self.names.get(name).copied().ok_or_else(error)
    }

    /// Returns the nodes of the only route with the fewest links.
    ///
    /// # Errors
    /// The violated rule if there is no route, or if there are several.
    fn shortest_route(&self, from: usize, to: usize) -> Result<Vec<usize>, &'static str> {
        // Distance and number of shortest routes from the source, and the previous node.
        let mut reached: BTreeMap<usize, (u32, u32, usize)> = BTreeMap::from([(from, (0, 1, from))]);
        let mut queue = VecDeque::from([from]);
        while let Some(node) = queue.pop_front() {
            let (distance, routes, _) = reached[&node];
            for ((_, next), _) in self.links.range((node, 0)..(node + 1, 0)) {
                let entry = reached.entry(*next).or_insert_with(|| {
                    queue.push_back(*next);
                    (distance + 1, 0, node)
                });
                if entry.0 == distance + 1 {
                    entry.1 = entry.1.saturating_add(routes);
                }
            }
        }
        match reached.get(&to) {
            None => return Err("must be connected to the source of the flow"),
            Some((_, routes, _)) if *routes > 1 => {
                return Err("must have one shortest route, or `via` must list its nodes");
            }
            Some(_) => {}
        }
        let previous = |node: &usize| (*node != from).then(|| reached[node].2);
        let mut nodes: Vec<usize> = std::iter::successors(Some(to), previous).collect();
        nodes.reverse();
        Ok(nodes)
    }

    /// Returns the directed links between consecutive nodes.
    ///
    /// # Errors
    /// The violated rule if there is no such link, or if a node occurs twice.
    fn links_of(&self, nodes: &[usize]) -> Result<Vec<usize>, &'static str> {
        let mut sorted = nodes.to_vec();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("must not contain a node of the route twice");
        }
        let link = |pair: &[usize]| self.links.get(&(pair[0], pair[1])).copied();
        let links: Option<Vec<usize>> = nodes.windows(2).map(link).collect();
        links.ok_or("must be connected by links")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Two routes from a to b over s and t, one host c behind b.
    fn diamond() -> Value {
        let link = |a: &str, b: &str| json!({"between": [a, b], "gbit_per_s": 10, "delay_us": 3});
        json!({
            "links": [link("a", "s"), link("a", "t"), link("s", "b"), link("t", "b"), link("b", "c")],
            "flows": [{"from": "b", "to": "c", "start_us": 0, "size_kib": 64, "queue": 7}],
        })
    }

    fn resolve(topology: Value) -> Result<FlowNetwork, String> {
        let topology: Topology = serde_json::from_value(topology).map_err(|error| error.to_string())?;
        topology.resolve().map_err(|error| error.to_string())
    }

    fn with_flow(changes: &Value) -> Value {
        let mut topology = diamond();
        let flow = topology["flows"][0].as_object_mut().unwrap();
        flow.extend(changes.as_object().unwrap().clone());
        topology
    }

    #[test]
    fn route_is_the_shortest_or_as_listed() {
        let flow = |topology: Value| resolve(topology).unwrap().flows.remove(0);
        // Links from the second to the first node are odd.
        assert_eq!(flow(with_flow(&json!({"from": "s", "to": "c"}))).links, [4, 8]);
        assert_eq!(flow(with_flow(&json!({"from": "c", "to": "a", "via": ["b", "t"]}))).links, [9, 7, 3]);
        assert_eq!(flow(with_flow(&json!({"from": "a", "to": "s", "via": ["t", "b"]}))).links, [2, 6, 5]);
    }

    #[test]
    fn weights_are_those_of_the_parameters_by_default() {
        assert_eq!(resolve(diamond()).unwrap().weights, [64.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
    }

    #[test]
    fn invalid_flows_are_rejected_by_field() {
        for (changes, message) in [
            (
                json!({"from": "a"}),
                "invalid flows[0].to = \"c\": must have one shortest route, or `via` must list its nodes",
            ),
            (json!({"from": "x"}), "invalid flows[0].from = \"x\": must be a node of a link"),
            (json!({"from": "c"}), "invalid flows[0].to = \"c\": must not be the source of the flow"),
            (json!({"via": ["s"]}), "invalid flows[0].via = [\"s\"]: must be connected by links"),
            (
                json!({"via": ["s", "b"]}),
                "invalid flows[0].via = [\"s\", \"b\"]: must not contain a node of the route twice",
            ),
            (json!({"via": ["x"]}), "invalid flows[0].via[0] = \"x\": must be a node of a link"),
            (json!({"queue": 8}), "invalid flows[0].queue = 8: must be from 0 to 7"),
            (json!({"size_kib": 0}), "invalid flows[0].size_kib = 0.0: must be a number from 1 to 1048576"),
            (
                json!({"start_us": -1}),
                "invalid flows[0].start_us = -1.0: must be a number from 0 to 60000000",
            ),
            (json!({"size": 1}), "unknown field `size`"),
        ] {
            let error = resolve(with_flow(&changes)).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn invalid_links_are_rejected_by_field() {
        for (changes, message) in [
            (json!({"gbit_per_s": 0}), "invalid links[0].gbit_per_s = 0.0: must be a number from 0.1 to 800"),
            (json!({"delay_us": -1}), "invalid links[0].delay_us = -1.0: must be a number from 0 to 10000"),
            (json!({"between": ["a", "a"]}), "invalid links[0].between = [\"a\", \"a\"]: must be two nodes"),
            (json!({"between": ["", "a"]}), "invalid links[0].between[0] = \"\": must have from 1 to"),
            (
                json!({"between": ["t", "a"]}),
                "invalid links[1].between = [\"a\", \"t\"]: must be the only link between these nodes",
            ),
        ] {
            let mut topology = diamond();
            topology["links"][0].as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let error = resolve(topology).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn numbers_of_links_nodes_and_flows_are_limited() {
        let mut topology = diamond();
        topology["flows"] = json!([]);
        assert_eq!(resolve(topology).unwrap_err(), "invalid number of flows = 0: must be from 1 to 1024");
        let mut topology = diamond();
        topology["flows"] = vec![topology["flows"][0].clone(); 1025].into();
        assert_eq!(resolve(topology).unwrap_err(), "invalid number of flows = 1025: must be from 1 to 1024");
        let link =
            |node: usize| json!({"between": ["a", format!("h{node}")], "gbit_per_s": 10, "delay_us": 3});
        let mut topology = diamond();
        topology["links"] = (0..256).map(link).collect();
        let rule = "invalid links[255].between = [\"a\", \"h255\"]: must not make more than 256 nodes";
        assert_eq!(resolve(topology).unwrap_err(), rule);
        let mut topology = diamond();
        topology["queue_weights"] = json!([1, 1, 1, 1, 1, 1, 1, 0.5]);
        let rule = "invalid queue_weights[7] = 0.5: must be a number from 1 to 10000";
        assert_eq!(resolve(topology).unwrap_err(), rule);
    }
}
