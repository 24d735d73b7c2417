//! Describes a guest for clients of the control socket. `control` adds the values that change while
//! the guest runs.

use std::time::{SystemTime, UNIX_EPOCH};

use proto::v1 as wire;

use crate::{
    config::{Config, Disk, Net},
    layout::Layout,
    memory::Memory,
};

/// Returns the description of a guest, with an unspecified state and without touched bytes.
pub(super) fn describe(config: &Config, layout: &Layout, memory: &Memory) -> wire::Guest {
    let nodes = (0..).zip(&layout.nodes).map(|(number, _)| describe_node(number, layout, memory));
    wire::Guest {
        vm: config.vm.to_string(),
        pid: std::process::id(),
        state: wire::GuestState::Unspecified.into(),
        cpus: layout.cpus(),
        kernel: config.kernel.kernel.display().to_string(),
        started_unix_ms: now_unix_ms(),
        agent: config.agent.as_ref().map(|socket| socket.display().to_string()),
        nodes: nodes.collect(),
        disks: config.disks.iter().map(describe_disk).collect(),
        networks: config.nets.iter().map(describe_net).collect(),
    }
}

fn describe_node(number: u32, layout: &Layout, memory: &Memory) -> wire::GuestNode {
    let index = number as usize;
    let node = &layout.nodes[index];
    wire::GuestNode {
        node: number,
        pool: node.is_pool(),
        cpus: node.cpus.clone().collect(),
        bytes: node.memory.iter().map(|range| range.end - range.start).sum(),
        touched_bytes: None,
        distances: (0..layout.nodes.len()).map(|to| u32::from(layout.distance(index, to))).collect(),
        emc: memory.slices(number).next().map(|(_, emc)| emc.to_owned()),
        slices: memory.slices(number).map(|(slice, _)| slice).collect(),
    }
}

fn describe_disk(disk: &Disk) -> wire::GuestDisk {
    wire::GuestDisk { path: disk.path.display().to_string(), read_only: disk.read_only }
}

fn describe_net(net: &Net) -> wire::GuestNetwork {
    wire::GuestNetwork { tap: net.tap.clone(), mac: net.mac.to_string() }
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
