//! Node whose memory is slices: it contains nothing else, and its pages are not migrated. VM memory
//! that does not fit overflows to local memory.

use std::ops::Range;

use units::{SLICE, limits::FOREIGN_MEMORY_ON_POOL_NODE_MAX};

use super::{AS_ROOT, Finding, Machine, each};
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
            Finding::good("blocks", format!("of {size}: a slice of {SLICE} is whole blocks"))
        }
        Ok(size) => Finding::bad(
            "blocks",
            format!("of {size}: a slice of {SLICE} cannot come and go on its own"),
            "`kind = \"dax\"` under [backend] in host.toml",
        ),
        Err(error) => {
            Finding::bad("blocks", units::chain(&error), "boot a kernel with CONFIG_MEMORY_HOTPLUG")
        }
    }
}

/// Checks for automatic page migration between nodes.
pub(super) fn movers(machine: &Machine) -> Finding {
    let demotion = machine.sys.text("kernel/mm/numa/demotion_enabled").unwrap_or_default();
    if ["true", "1"].contains(&&*demotion) {
        return Finding::bad(
            "movers",
            "where local memory is short, the kernel pushes anybody's pages to the pool's node, and VMs find that full",
            "`echo 0 > /sys/kernel/mm/numa/demotion_enabled`",
        );
    }
    match machine.proc.text("sys/kernel/numa_balancing").as_deref() {
        Err(_) | Ok("0") => Finding::good("movers", "the kernel moves no pages between nodes by itself"),
        Ok(mode) => Finding::good(
            "movers",
            format!(
                "numa_balancing is {mode}: it leaves alone what is bound to a node, as the VMs' memory is"
            ),
        ),
    }
}

/// Checks a node with slices. `regions` is their physical location.
pub(super) fn all(machine: &Machine, node: u32, regions: &[Range<u64>]) -> Vec<Finding> {
    let folder = format!("{NODES}/node{node}");
    if !machine.sys.has(&folder) {
        return vec![Finding::good("node", "has no memory yet").of(format!("node {node}"))];
    }
    let mut wrong: Vec<_> = processors(machine, &folder).into_iter().collect();
    match online(machine, &folder) {
        Ok(blocks) => wrong.extend(blocks.iter().filter_map(|block| misplaced(machine, block, regions))),
        Err(error) => wrong.push(Finding::bad("node", units::chain(&error), AS_ROOT)),
    }
    wrong.extend(strangers(machine, &folder));
    let good = || {
        Finding::good("node", format!("has no processors, and no memory but slices; {}", when_full(machine)))
    };
    each(wrong, good).into_iter().map(|finding| finding.of(format!("node {node}"))).collect()
}

fn processors(machine: &Machine, folder: &str) -> Option<Finding> {
    let list = machine.sys.text(format!("{folder}/cpulist")).unwrap_or_default();
    let mend =
        "a matter of the firmware (SRAT, CEDT); until then `kind = \"dax\"` under [backend] in host.toml";
    let bad = || {
        Finding::bad(
            "node",
            format!("has processors {list}: the programs on these take its memory first"),
            mend,
        )
    };
    (!list.is_empty()).then(bad)
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
        return Some(Finding::bad(
            "node",
            format!("{name} is online and of no slice: VMs' pages would be in it"),
            offline,
        ));
    }
    let zone = machine.sys.text(format!("{}/{name}/valid_zones", blocks::FOLDER)).ok()?;
    let bad = || {
        let what =
            format!("{name} is online in zone {zone}: the kernel may have in it what can never be moved");
        Finding::bad(
            "node",
            what,
            format!("{offline}; if that fails, a reboot with memhp_default_state=offline"),
        )
    };
    (zone != MOVABLE).then(bad)
}

/// Pages of other processes use memory reserved for VMs.
fn strangers(machine: &Machine, folder: &str) -> Option<Finding> {
    let meminfo = machine.sys.text(format!("{folder}/meminfo")).ok()?;
    let bytes = usage::strangers(&meminfo)?;
    let bad = || {
        let what = format!(
            "processes that are no VMs have {bytes} of it, which VMs were promised; {}",
            when_full(machine)
        );
        Finding::bad(
            "node",
            what,
            "keep them off it: `systemctl set-property system.slice user.slice AllowedMemoryNodes=0`, with the nodes of local memory",
        )
    };
    (bytes > FOREIGN_MEMORY_ON_POOL_NODE_MAX).then(bad)
}

/// Checks the effect of a VM's access to a full node.
fn when_full(machine: &Machine) -> &'static str {
    let swaps = machine.proc.text("swaps").unwrap_or_default().lines().count();
    if swaps > 1 {
        "were it full, VMs' pages would be swapped out"
    } else {
        "were it full, a VM that touches more would be killed, as there is no swap"
    }
}
