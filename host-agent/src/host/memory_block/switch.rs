//! Onlining and offlining of all memory blocks of a slice. If one block fails, the blocks that were
//! already changed are restored, and the error contains the failed block, the reason, and the state
//! of the other blocks.

use std::{fmt, io, time::Duration};

use crate::host::{
    blocks::{Block, MEMORY_BLOCKS_FOLDER},
    interrupt::{self, StepCallback},
    sysfs::{Sysfs, SysfsError},
};

/// Time limit for offlining one block. The kernel migrates gigabytes per second, so 20 s are more
/// than sufficient. If a page cannot be migrated, the kernel retries forever.
const BLOCK_OFFLINE_TIMEOUT: Duration = Duration::from_secs(20);

/// Target state of a memory block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetState {
    /// The block is memory of the node, in the zone for movable pages.
    Online,
    /// The block is not used by the kernel.
    Offline,
}

impl TargetState {
    fn sysfs_value(self) -> &'static str {
        match self {
            Self::Online => "online_movable",
            Self::Offline => "offline",
        }
    }

    fn opposite(self) -> Self {
        match self {
            Self::Online => Self::Offline,
            Self::Offline => Self::Online,
        }
    }
}

impl fmt::Display for TargetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Online { "online" } else { "offline" })
    }
}

/// Error of a memory block that did not reach its target state.
#[derive(Debug, thiserror::Error)]
#[error("cannot {to} {block}{}; {done} of {block_count} blocks were {to}d, {}", format_page_count(*pages_in_use), format_restore_result(restored))]
pub struct BlockSwitchError {
    /// Name of the failed block, such as `memory344`.
    pub block: String,
    /// Target state of the slice's blocks.
    pub to: TargetState,
    /// Pages of the failed block that are in use, if known.
    pub pages_in_use: Option<u64>,
    /// Number of blocks that reached the target state before the failure.
    pub done: usize,
    /// Number of blocks of the slice.
    pub block_count: usize,
    /// Names of the blocks that were restored, or the error of the block that could not be
    /// restored.
    pub restored: Result<Vec<String>, Box<SysfsError>>,
    /// Cause of the failure.
    #[source]
    pub errno: io::Error,
}

fn format_page_count(pages_in_use: Option<u64>) -> String {
    pages_in_use.map_or_else(String::new, |pages| format!(", {pages} of its pages are in use"))
}

fn format_restore_result(restored: &Result<Vec<String>, Box<SysfsError>>) -> String {
    match restored {
        Ok(blocks) if blocks.is_empty() => "none had to be restored".to_owned(),
        Ok(blocks) => format!("restored: {}", blocks.join(" ")),
        Err(error) => format!("and not all could be restored: {}", units::chain(error)),
    }
}

/// Brings all blocks to the target state, in the given order. Blocks already in that state are
/// skipped.
///
/// # Errors
/// [`BlockSwitchError`] for the first block that fails, after the changed blocks were restored.
pub fn switch(sysfs: &Sysfs, blocks: &[Block], to: TargetState) -> Result<(), BlockSwitchError> {
    let arguments = (sysfs.clone(), blocks.to_vec());
    let switched = interrupt::run_interruptible(BLOCK_OFFLINE_TIMEOUT, move |steps| {
        switch_all_blocks(&arguments.0, &arguments.1, to, steps)
    });
    switched.unwrap_or_else(|errno| {
        let block = blocks.first().map_or_else(String::new, |block| block.name.clone());
        Err(BlockSwitchError {
            block,
            to,
            pages_in_use: None,
            done: 0,
            block_count: blocks.len(),
            restored: Ok(Vec::new()),
            errno,
        })
    })
}

fn switch_all_blocks(
    sysfs: &Sysfs,
    blocks: &[Block],
    to: TargetState,
    steps: &StepCallback<'_>,
) -> Result<(), BlockSwitchError> {
    let block_count = blocks.len();
    let failure = |block: &Block, errno| BlockSwitchError {
        block: block.name.clone(),
        to,
        pages_in_use: None,
        done: 0,
        block_count,
        restored: Ok(Vec::new()),
        errno,
    };
    if to == TargetState::Online {
        let online = blocks.iter().filter(|block| !block.is_offline());
        online
            .into_iter()
            .try_for_each(|block| check_movable(sysfs, block).map_err(|errno| failure(block, errno)))?;
    }
    let mut done: Vec<&Block> = Vec::new();
    for block in blocks.iter().filter(|block| block.is_offline() == (to == TargetState::Online)) {
        if let Err(error) = set_state(sysfs, block, to, steps) {
            let restored = restore(sysfs, &done, to.opposite(), steps);
            return Err(BlockSwitchError { done: done.len(), restored, ..failure(block, errno(error)) });
        }
        done.push(block);
    }
    Ok(())
}

/// Checks that an online block is in the zone `Movable`. A block that another program onlined may
/// be in another zone and contain pages that cannot be migrated.
fn check_movable(sysfs: &Sysfs, block: &Block) -> io::Result<()> {
    let zone = sysfs.text(format!("{MEMORY_BLOCKS_FOLDER}/{}/valid_zones", block.name)).map_err(errno)?;
    match zone.as_str() {
        "Movable" => Ok(()),
        zone => Err(io::Error::other(format!("the block is online in zone {zone}, not Movable"))),
    }
}

fn set_state(
    sysfs: &Sysfs,
    block: &Block,
    to: TargetState,
    steps: &StepCallback<'_>,
) -> Result<(), SysfsError> {
    steps.begin_step();
    sysfs.write(format!("{MEMORY_BLOCKS_FOLDER}/{}/state", block.name), to.sysfs_value())
}

fn restore(
    sysfs: &Sysfs,
    blocks: &[&Block],
    to: TargetState,
    steps: &StepCallback<'_>,
) -> Result<Vec<String>, Box<SysfsError>> {
    blocks
        .iter()
        .rev()
        .map(|block| set_state(sysfs, block, to, steps).map(|()| block.name.clone()))
        .collect::<Result<_, _>>()
        .map_err(Box::new)
}

fn errno(error: SysfsError) -> io::Error {
    match error {
        SysfsError::Write { errno, .. } if errno.kind() == io::ErrorKind::Interrupted => {
            let seconds = BLOCK_OFFLINE_TIMEOUT.as_secs();
            io::Error::new(io::ErrorKind::TimedOut, format!("timed out after {seconds} s"))
        }
        SysfsError::Write { errno, .. } | SysfsError::Read { errno, .. } => errno,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    fn block(number: u32, state: &str) -> Block {
        Block { name: format!("memory{number}"), state: state.to_owned() }
    }

    fn state(fake: &FakeSysfs, number: u32) -> String {
        fake.sysfs.text(format!("{MEMORY_BLOCKS_FOLDER}/memory{number}/state")).unwrap()
    }

    /// Creates three blocks in a state. The third has no file, so that writes to it fail.
    fn machine(state: &str) -> (FakeSysfs, Vec<Block>) {
        let fake = FakeSysfs::new(&[]);
        for number in [1, 2] {
            fake.files(&format!("{MEMORY_BLOCKS_FOLDER}/memory{number}"), &[("state", state)]);
        }
        (fake, [1, 2, 3].map(|number| block(number, state)).to_vec())
    }

    #[test]
    fn switch_skips_blocks_already_in_target_state() {
        let (fake, mut blocks) = machine("offline");
        blocks[2].state = "online".to_owned();
        fake.files(&format!("{MEMORY_BLOCKS_FOLDER}/memory3"), &[("valid_zones", "Movable")]);
        switch(&fake.sysfs, &blocks, TargetState::Online).unwrap();
        assert_eq!(
            (state(&fake, 1).as_str(), state(&fake, 2).as_str()),
            ("online_movable", "online_movable")
        );
    }

    #[test]
    fn block_online_in_unmovable_zone_is_rejected() {
        let (fake, mut blocks) = machine("offline");
        blocks[2].state = "online".to_owned();
        fake.files(&format!("{MEMORY_BLOCKS_FOLDER}/memory3"), &[("valid_zones", "Normal")]);
        let message = units::chain(&switch(&fake.sysfs, &blocks, TargetState::Online).unwrap_err());
        assert!(message.ends_with("the block is online in zone Normal, not Movable"), "{message}");
        assert_eq!(state(&fake, 1), "offline");
    }

    #[test]
    fn failed_switch_restores_blocks_and_reports_the_cause() {
        let (fake, blocks) = machine("online");
        let error = switch(&fake.sysfs, &blocks, TargetState::Offline).unwrap_err();
        assert!(
            state(&fake, 1).starts_with("online_movable") && state(&fake, 2).starts_with("online_movable")
        );
        let message = units::chain(&BlockSwitchError { pages_in_use: Some(17), ..error });
        assert_eq!(
            message,
            "cannot offline memory3, 17 of its pages are in use; 2 of 3 blocks were offlined, restored: memory2 \
             memory1: No such file or directory (os error 2)"
        );
    }
}
