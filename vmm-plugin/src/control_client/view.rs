//! Formats the output of the command `info` as a table or as JSON. The names of JSON fields must
//! not change, because scripts use these names.

use comfy_table::{ContentArrangement, Table, presets};
use proto::v1 as wire;
use serde::Serialize;
use units::{Bytes, UnixMs};

#[derive(Serialize)]
struct Guest<'a> {
    vm: &'a str,
    pid: u32,
    state: &'static str,
    cpus: u32,
    kernel: &'a str,
    started_unix_ms: u64,
    agent: Option<&'a str>,
    nodes: Vec<Node<'a>>,
    disks: Vec<Disk<'a>>,
    #[serde(rename = "cards")]
    networks: Vec<Network<'a>>,
}

#[derive(Serialize)]
struct Node<'a> {
    node: u32,
    kind: &'static str,
    cpus: &'a [u32],
    bytes: u64,
    /// Number of bytes that the guest has touched. `null` if the node is not measured.
    touched_bytes: Option<u64>,
    distances: &'a [u32],
    emc: Option<&'a str>,
    slices: &'a [u32],
}

#[derive(Serialize)]
struct Disk<'a> {
    path: &'a str,
    read_only: bool,
}

#[derive(Serialize)]
struct Network<'a> {
    tap: &'a str,
    mac: &'a str,
}

/// Formats a guest as JSON.
pub(super) fn to_json(guest: &wire::Guest) -> String {
    let view = Guest {
        vm: &guest.vm,
        pid: guest.pid,
        state: state_name(guest),
        cpus: guest.cpus,
        kernel: &guest.kernel,
        started_unix_ms: guest.started_unix_ms,
        agent: guest.agent.as_deref(),
        nodes: guest.nodes.iter().map(to_node).collect(),
        disks: guest.disks.iter().map(|disk| Disk { path: &disk.path, read_only: disk.read_only }).collect(),
        networks: guest
            .networks
            .iter()
            .map(|network| Network { tap: &network.tap, mac: &network.mac })
            .collect(),
    };
    serde_json::to_string_pretty(&view).expect("a view serializes to JSON") + "\n"
}

fn to_node(node: &wire::GuestNode) -> Node<'_> {
    Node {
        node: node.node,
        kind: node_kind(node),
        cpus: &node.cpus,
        bytes: node.bytes,
        touched_bytes: node.touched_bytes,
        distances: &node.distances,
        emc: node.emc.as_deref(),
        slices: &node.slices,
    }
}

fn node_kind(node: &wire::GuestNode) -> &'static str {
    if node.pool { "pool" } else { "local" }
}

fn state_name(guest: &wire::Guest) -> &'static str {
    match guest.state() {
        wire::GuestState::Running => "running",
        wire::GuestState::Paused => "paused",
        wire::GuestState::Stopping => "stopping",
        wire::GuestState::Unspecified => "unknown",
    }
}

/// Formats a guest as a table for people.
pub(super) fn to_table(guest: &wire::Guest) -> String {
    let mut properties = borderless_table();
    properties.add_row(["VM:", &guest.vm]);
    properties.add_row(["STATE:", state_name(guest)]);
    properties.add_row(["PID:", &guest.pid.to_string()]);
    properties.add_row(["STARTED:", &UnixMs(guest.started_unix_ms).to_string()]);
    properties.add_row(["CPUS:", &guest.cpus.to_string()]);
    properties.add_row(["KERNEL:", &guest.kernel]);
    properties.add_row(["AGENT:", guest.agent.as_deref().unwrap_or("none: memory of this host")]);
    for disk in &guest.disks {
        properties.add_row([
            "DISK:",
            &format!("{}{}", disk.path, if disk.read_only { " (read only)" } else { "" }),
        ]);
    }
    for network in &guest.networks {
        properties.add_row(["NET:", &format!("{} {}", network.tap, network.mac)]);
    }
    replace_control_characters(&format!(
        "{}\n{}",
        to_left_aligned_text(&properties),
        to_left_aligned_text(&node_table(guest))
    ))
}

fn node_table(guest: &wire::Guest) -> Table {
    let mut table = borderless_table();
    table.set_header(["NODE", "KIND", "CPUS", "MEMORY", "TOUCHED", "DISTANCES", "EMC", "SLICES"]);
    for node in &guest.nodes {
        table.add_row([
            node.node.to_string(),
            node_kind(node).to_owned(),
            format_ranges(&node.cpus),
            Bytes::new(node.bytes).to_string(),
            format_touched_memory(node),
            node.distances.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
            node.emc.clone().unwrap_or_else(|| "-".to_owned()),
            format_ranges(&node.slices),
        ]);
    }
    table
}

/// Formats the touched bytes of a node. Some nodes, such as device memory, are not measured.
fn format_touched_memory(node: &wire::GuestNode) -> String {
    node.touched_bytes.map_or_else(|| "not measured".to_owned(), |bytes| Bytes::new(bytes).to_string())
}

/// Formats numbers in the given order, such as "0-3,7". Consecutive numbers become a range.
fn format_ranges(numbers: &[u32]) -> String {
    let ranges = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b)).map(|range| match range {
        [only] => only.to_string(),
        _ => format!("{}-{}", range[0], range[range.len() - 1]),
    });
    let ranges = ranges.collect::<Vec<_>>().join(",");
    if ranges.is_empty() { "-".to_owned() } else { ranges }
}

fn borderless_table() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn to_left_aligned_text(table: &Table) -> String {
    table.lines().map(|line| format!("{}\n", line.strip_prefix(" ").unwrap_or(&line).trim_end())).collect()
}

/// Replaces control characters, because a path could contain terminal escape sequences.
fn replace_control_characters(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> wire::Guest {
        let local = wire::GuestNode {
            cpus: vec![0, 1, 2, 3],
            bytes: 12 << 30,
            touched_bytes: Some(300 << 20),
            distances: vec![10, 18],
            ..Default::default()
        };
        let pool = wire::GuestNode {
            node: 1,
            pool: true,
            bytes: 4 << 30,
            touched_bytes: Some(0),
            distances: vec![18, 10],
            emc: Some("emc0".into()),
            slices: vec![3, 4, 5, 9],
            ..Default::default()
        };
        wire::Guest {
            vm: "web-1".into(),
            pid: 4711,
            state: wire::GuestState::Running.into(),
            cpus: 4,
            kernel: "/boot/vmlinuz".into(),
            started_unix_ms: 1_700_000_000_000,
            agent: Some("/run/tarn/host-memory.sock".into()),
            nodes: vec![local, pool],
            disks: vec![wire::GuestDisk { path: "web-1\u{1b}[2J.raw".into(), read_only: true }],
            networks: vec![wire::GuestNetwork { tap: "tap0".into(), mac: "52:54:00:12:34:56".into() }],
        }
    }

    #[test]
    fn table_shows_nodes_and_replaces_control_characters() {
        let expected = "\
VM:       web-1
STATE:    running
PID:      4711
STARTED:  2023-11-14T22:13:20Z
CPUS:     4
KERNEL:   /boot/vmlinuz
AGENT:    /run/tarn/host-memory.sock
DISK:     web-1\u{fffd}[2J.raw (read only)
NET:      tap0 52:54:00:12:34:56

NODE  KIND   CPUS  MEMORY  TOUCHED  DISTANCES  EMC   SLICES
0     local  0-3   12GiB   300MiB   10 18      -     -
1     pool   -     4GiB    0B       18 10      emc0  3-5,9
";
        assert_eq!(to_table(&guest()), expected);
    }

    #[test]
    fn node_without_measurement_is_shown_as_not_measured() {
        let mut guest = guest();
        guest.nodes[1].touched_bytes = None;
        let text = to_table(&guest);
        assert!(text.contains("4GiB    not measured  18 10"), "{text}");
        let value: serde_json::Value = serde_json::from_str(&to_json(&guest)).unwrap();
        assert_eq!(value["nodes"][1]["touched_bytes"], serde_json::Value::Null);
    }

    #[test]
    fn start_time_beyond_rfc_3339_is_shown_in_ms() {
        let guest = wire::Guest { started_unix_ms: u64::MAX, ..guest() };
        assert!(to_table(&guest).contains("STARTED:  18446744073709551615ms\n"), "{}", to_table(&guest));
    }

    #[test]
    fn json_has_all_fields_with_sizes_in_bytes() {
        let value: serde_json::Value = serde_json::from_str(&to_json(&guest())).unwrap();
        assert_eq!((&value["state"], &value["pid"]), (&"running".into(), &4711.into()));
        let pool = serde_json::json!({
            "node": 1, "kind": "pool", "cpus": [], "bytes": 4_u64 << 30, "touched_bytes": 0, "distances": [18, 10],
            "emc": "emc0", "slices": [3, 4, 5, 9],
        });
        assert_eq!(value["nodes"][1], pool);
        assert_eq!(value["nodes"][0]["emc"], serde_json::Value::Null);
        assert_eq!(value["cards"][0]["mac"], "52:54:00:12:34:56");
    }
}
