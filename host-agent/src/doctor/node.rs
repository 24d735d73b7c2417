//! Node whose memory is slices: it contains nothing else, and its pages are not migrated. VM memory
//! that does not fit overflows to local memory.

use std::ops::Range;

use units::{SLICE, limits::FOREIGN_MEMORY_ON_POOL_NODE_MAX};

use super::{Finding, Machine, RUN_AS_ROOT, problems_or};
use crate::host::{
    blocks::{self, Block},
    memory::usage,
    sysfs::SysfsError,
};

/// Folder of nodes.
const NODES: &str = "devices/system/node";
/// Zone whose pages can all be moved.
const MOVABLE: &str = "Movable";

/// Checks whether blocks are parts of a slice.
pub(super) fn block_size(machine: &Machine) -> Finding {
    match blocks::size(&machine.sys) {
        Ok(size) if SLICE.get().is_multiple_of(size.get()) => {
            Finding::passed("blocks", format!("of {size}: a slice of {SLICE} is a whole number of blocks"))
        }
        Ok(size) => Finding::problem(
            "blocks",
            format!("of {size}: a slice of {SLICE} cannot be added and removed alone"),
            "`kind = \"dax\"` under [backend] in host.toml",
        ),
        Err(error) => {
            Finding::problem("blocks", units::chain(&error), "boot a kernel with CONFIG_MEMORY_HOTPLUG")
        }
    }
}

/// Checks for automatic page migration between nodes.
pub(super) fn page_migration(machine: &Machine) -> Finding {
    let demotion = machine.sys.text("kernel/mm/numa/demotion_enabled").unwrap_or_default();
    if ["true", "1"].contains(&&*demotion) {
        return Finding::problem(
            "movers",
            "when local memory is short, the kernel demotes pages of all processes to the pool's node, which VMs then find full",
            "`echo 0 > /sys/kernel/mm/numa/demotion_enabled`",
        );
    }
    match machine.proc.text("sys/kernel/numa_balancing").as_deref() {
        Err(_) | Ok("0") => Finding::passed("movers", "the kernel does not move pages between nodes"),
        Ok(mode) => Finding::passed(
            "movers",
            format!("numa_balancing is {mode}: it does not move memory bound to a node, such as that of VMs"),
        ),
    }
}

/// Checks a node with slices. `regions` is their physical location.
pub(super) fn all(machine: &Machine, node: u32, regions: &[Range<u64>]) -> Vec<Finding> {
    let folder = format!("{NODES}/node{node}");
    if !machine.sys.has(&folder) {
        return vec![Finding::passed("node", "has no memory").of(format!("node {node}"))];
    }
    let mut problems: Vec<_> = processors(machine, &folder).into_iter().collect();
    match online(machine, &folder) {
        Ok(blocks) => problems.extend(blocks.iter().filter_map(|block| misplaced(machine, block, regions))),
        Err(error) => problems.push(Finding::problem("node", units::chain(&error), RUN_AS_ROOT)),
    }
    problems.extend(foreign_memory(machine, &folder));
    let passed = || {
        Finding::passed(
            "node",
            format!("has no processors, and no memory except slices; {}", overflow_effect(machine)),
        )
    };
    problems_or(problems, passed).into_iter().map(|finding| finding.of(format!("node {node}"))).collect()
}

fn processors(machine: &Machine, folder: &str) -> Option<Finding> {
    let list = machine.sys.text(format!("{folder}/cpulist")).unwrap_or_default();
    let fix = "change the firmware (SRAT, CEDT); until then `kind = \"dax\"` under [backend] in host.toml";
    let problem = || {
        Finding::problem(
            "node",
            format!("has processors {list}: processes on them allocate its memory first"),
            fix,
        )
    };
    (!list.is_empty()).then(problem)
}

fn online(machine: &Machine, folder: &str) -> Result<Vec<Block>, SysfsError> {
    let state = |name: String| {
        let state = machine.sys.text(format!("{}/{name}/state", blocks::FOLDER))?;
        Ok(Block { name, state })
    };
    let all: Result<Vec<_>, _> = machine.sys.numbered(folder, "memory")?.into_iter().map(state).collect();
    Ok(all?.into_iter().filter(|block| !block.is_offline()).collect())
}

/// Reports a block that belongs to no slice, or cannot leave again.
fn misplaced(machine: &Machine, block: &Block, regions: &[Range<u64>]) -> Option<Finding> {
    let (name, at) = (&block.name, blocks::range(&machine.sys, block).ok()?);
    let offline = format!("`echo offline > /sys/{}/{name}/state`", blocks::FOLDER);
    if !regions.iter().any(|region| region.start <= at.start && at.end <= region.end) {
        return Some(Finding::problem(
            "node",
            format!("{name} is online and belongs to no slice: VMs' pages would be in it"),
            offline,
        ));
    }
    let zone = machine.sys.text(format!("{}/{name}/valid_zones", blocks::FOLDER)).ok()?;
    let problem = || {
        let message =
            format!("{name} is online in zone {zone}: it may contain pages that can never be moved");
        Finding::problem(
            "node",
            message,
            format!("{offline}; if that fails, a reboot with memhp_default_state=offline"),
        )
    };
    (zone != MOVABLE).then(problem)
}

/// Pages of other processes use memory reserved for VMs.
fn foreign_memory(machine: &Machine, folder: &str) -> Option<Finding> {
    let meminfo = machine.sys.text(format!("{folder}/meminfo")).ok()?;
    let bytes = usage::foreign_memory(&meminfo)?;
    let problem = || {
        let message = format!(
            "processes other than VMs use {bytes} of it, which is reserved for VMs; {}",
            overflow_effect(machine)
        );
        Finding::problem(
            "node",
            message,
            "exclude them: `systemctl set-property system.slice user.slice AllowedMemoryNodes=0`, with the nodes of local memory",
        )
    };
    (bytes > FOREIGN_MEMORY_ON_POOL_NODE_MAX).then(problem)
}

/// Checks the effect of a VM's access to a full node.
fn overflow_effect(machine: &Machine) -> &'static str {
    let swaps = machine.proc.text("swaps").unwrap_or_default().lines().count();
    if swaps > 1 {
        "if it is full, VMs' pages are swapped out"
    } else {
        "if it is full, a VM that touches more memory is killed, because there is no swap"
    }
}
