//! Memory blocks of the kernel in sysfs: their size, address range and state. This module only
//! reads sysfs.

use std::ops::Range;

use units::Bytes;

use super::sysfs::{Sysfs, SysfsError};

/// Directory of the memory blocks in sysfs.
pub const MEMORY_BLOCKS_FOLDER: &str = "devices/system/memory";

/// Memory block: unit of memory that the kernel onlines and offlines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Name of the block, such as `memory344`.
    pub name: String,
    /// State of the block in sysfs: `online`, `offline` or `going-offline`.
    pub state: String,
}

impl Block {
    /// Returns whether the block is offline. A block that is going offline is not.
    pub fn is_offline(&self) -> bool {
        self.state == "offline"
    }
}

/// Returns the physical address range of a block.
///
/// # Errors
/// The block size cannot be read, or the block's name has no number.
pub fn range(sysfs: &Sysfs, block: &Block) -> Result<Range<u64>, SysfsError> {
    let size = size(sysfs)?.get();
    let number = block.name.trim_start_matches("memory").parse::<u64>();
    let number = number.map_err(|_| {
        sysfs.unreadable_error(MEMORY_BLOCKS_FOLDER, block.name.clone(), "the name of a memory block")
    })?;
    Ok(number * size..(number + 1) * size)
}

/// Returns the size of all memory blocks.
///
/// # Errors
/// The size cannot be read or is invalid.
pub fn size(sysfs: &Sysfs) -> Result<Bytes, SysfsError> {
    let file = format!("{MEMORY_BLOCKS_FOLDER}/block_size_bytes");
    let text = sysfs.text(&file)?;
    match u64::from_str_radix(&text, 16) {
        Ok(bytes) if bytes > 0 => Ok(Bytes::new(bytes)),
        _ => Err(sysfs.unreadable_error(file, text, "a size in hexadecimal bytes")),
    }
}

/// Returns the kernel's policy for added memory blocks, such as `offline`, or `online_movable` if
/// they come online automatically.
///
/// # Errors
/// The policy cannot be read.
pub fn online_policy(sysfs: &Sysfs) -> Result<String, SysfsError> {
    sysfs.text(format!("{MEMORY_BLOCKS_FOLDER}/auto_online_blocks"))
}

/// Returns the existing blocks that overlap a physical address range, in ascending order.
///
/// # Errors
/// The block size or a state cannot be read.
pub fn blocks_in_range(sysfs: &Sysfs, range: &Range<u64>) -> Result<Vec<Block>, SysfsError> {
    let size = size(sysfs)?.get();
    let states = (range.start / size..range.end.div_ceil(size)).map(|number| {
        let name = format!("memory{number}");
        match sysfs.text(format!("{MEMORY_BLOCKS_FOLDER}/{name}/state")) {
            Ok(state) => Ok(Some(Block { name, state })),
            Err(error) if error.is_gone() => Ok(None),
            Err(error) => Err(error),
        }
    });
    states.filter_map(Result::transpose).collect()
}
