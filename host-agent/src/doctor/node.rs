//! Checks of the NUMA node that contains the slices (backend `memory_block`). The node must contain
//! no other memory and no processors, and the kernel must not demote pages of other processes to
//! it.

use std::ops::Range;

use units::{SLICE, limits::FOREIGN_MEMORY_ON_POOL_NODE_MAX};

use super::{Finding, Machine, RUN_AS_ROOT, problems_or_passed};
use crate::host::{
    blocks::{self, Block},
    memory::usage,
    sysfs::SysfsError,
};

/// Directory of NUMA nodes in sysfs.
const NODES_FOLDER: &str = "devices/system/node";
/// Kernel zone whose pages can all be migrated, so that its memory blocks can be offlined.
const MOVABLE_ZONE: &str = "Movable";

/// Checks whether a slice is a whole number of memory blocks.
pub(super) fn check_block_size(machine: &Machine) -> Finding {
    match blocks::size(&machine.sys) {
        Ok(size) if SLICE.get().is_multiple_of(size.get()) => Finding::passed(
            "blocks",
            format!("a slice of {SLICE} is a whole number of memory blocks of {size}"),
        ),
        Ok(size) => Finding::problem(
            "blocks",
            format!(
                "a slice of {SLICE} is not a whole number of memory blocks of {size}, so it cannot be onlined separately"
            ),
            "set `kind = \"dax\"` under [backend] in host.toml",
        ),
        Err(error) => {
            Finding::problem("blocks", units::chain(&error), "boot a kernel with CONFIG_MEMORY_HOTPLUG")
        }
    }
}

/// Checks whether the kernel migrates pages between nodes: by demotion or by NUMA balancing.
pub(super) fn check_page_migration(machine: &Machine) -> Finding {
    let demotion = machine.sys.text("kernel/mm/numa/demotion_enabled").unwrap_or_default();
    if ["true", "1"].contains(&&*demotion) {
        return Finding::problem(
            "migration",
            "demotion is enabled: when local memory is short, pages of any process fill the node with the slices",
            "`echo 0 > /sys/kernel/mm/numa/demotion_enabled`",
        );
    }
    match machine.proc.text("sys/kernel/numa_balancing").as_deref() {
        Err(_) | Ok("0") => Finding::passed("migration", "the kernel does not move pages between nodes"),
        Ok(mode) => Finding::passed(
            "migration",
            format!("numa_balancing is {mode}: it does not move memory of VMs, which is bound to nodes"),
        ),
    }
}

/// Checks a node with slices. `regions` are the physical address ranges of the slices.
pub(super) fn check_node(machine: &Machine, node: u32, regions: &[Range<u64>]) -> Vec<Finding> {
    let folder = format!("{NODES_FOLDER}/node{node}");
    if !machine.sys.has(&folder) {
        return vec![Finding::passed("node", "has no memory").with_subject(format!("node {node}"))];
    }
    let mut problems: Vec<_> = check_processors(machine, &folder).into_iter().collect();
    match online_blocks(machine, &folder) {
        Ok(blocks) => problems.extend(blocks.iter().filter_map(|block| check_block(machine, block, regions))),
        Err(error) => problems.push(Finding::problem("node", units::chain(&error), RUN_AS_ROOT)),
    }
    problems.extend(check_foreign_memory(machine, &folder));
    let passed = || {
        Finding::passed(
            "node",
            format!("has no processors, and no memory except slices; {}", describe_overflow_effect(machine)),
        )
    };
    problems_or_passed(problems, passed)
        .into_iter()
        .map(|finding| finding.with_subject(format!("node {node}")))
        .collect()
}

fn check_processors(machine: &Machine, folder: &str) -> Option<Finding> {
    let list = machine.sys.text(format!("{folder}/cpulist")).unwrap_or_default();
    let fix =
        "change the firmware (SRAT, CEDT); until then set `kind = \"dax\"` under [backend] in host.toml";
    let problem = || {
        Finding::problem(
            "node",
            format!("has processors {list}: processes that run on them use the memory of this node first"),
            fix,
        )
    };
    (!list.is_empty()).then(problem)
}

fn online_blocks(machine: &Machine, folder: &str) -> Result<Vec<Block>, SysfsError> {
    let state = |name: String| {
        let state = machine.sys.text(format!("{}/{name}/state", blocks::MEMORY_BLOCKS_FOLDER))?;
        Ok(Block { name, state })
    };
    let all: Result<Vec<_>, _> =
        machine.sys.numbered_names(folder, "memory")?.into_iter().map(state).collect();
    Ok(all?.into_iter().filter(|block| !block.is_offline()).collect())
}

/// Reports an online memory block that is outside of all slices, or that may never go offline again
/// because its zone can contain unmovable pages.
fn check_block(machine: &Machine, block: &Block, regions: &[Range<u64>]) -> Option<Finding> {
    let (name, at) = (&block.name, blocks::range(&machine.sys, block).ok()?);
    let offline = format!("`echo offline > /sys/{}/{name}/state`", blocks::MEMORY_BLOCKS_FOLDER);
    if !regions.iter().any(|region| region.start <= at.start && at.end <= region.end) {
        return Some(Finding::problem(
            "node",
            format!("{name} is online and belongs to no slice: the kernel would put pages of VMs into it"),
            offline,
        ));
    }
    let zone = machine.sys.text(format!("{}/{name}/valid_zones", blocks::MEMORY_BLOCKS_FOLDER)).ok()?;
    let problem = || {
        let message =
            format!("{name} is online in zone {zone}: it may contain pages that cannot be migrated");
        Finding::problem(
            "node",
            message,
            format!("{offline}; if that fails, reboot with memhp_default_state=offline"),
        )
    };
    (zone != MOVABLE_ZONE).then(problem)
}

/// Reports the memory of the node that processes other than VMs use, if it exceeds the tolerance.
fn check_foreign_memory(machine: &Machine, folder: &str) -> Option<Finding> {
    let meminfo = machine.sys.text(format!("{folder}/meminfo")).ok()?;
    let bytes = usage::foreign_memory(&meminfo)?;
    let problem = || {
        let message = format!(
            "processes other than VMs use {bytes} of this node, which is reserved for VMs; {}",
            describe_overflow_effect(machine)
        );
        Finding::problem(
            "node",
            message,
            "exclude them: `systemctl set-property system.slice user.slice AllowedMemoryNodes=0`, with the nodes of local memory",
        )
    };
    (bytes > FOREIGN_MEMORY_ON_POOL_NODE_MAX).then(problem)
}

/// Describes the effect of a full node on VMs: their pages are swapped out or, without swap, a VM
/// is killed.
fn describe_overflow_effect(machine: &Machine) -> &'static str {
    let swaps = machine.proc.text("swaps").unwrap_or_default().lines().count();
    if swaps > 1 {
        "if the node is full, pages of VMs are swapped out"
    } else {
        "if the node is full, a VM that touches more memory is killed, because there is no swap"
    }
}
