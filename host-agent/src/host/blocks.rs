//! Memory blocks of the kernel: size, blocks of a range, and state. Nothing is changed here.

use std::ops::Range;

use units::Bytes;

use super::sysfs::{Sysfs, SysfsError};

/// Folder of the blocks.
pub const FOLDER: &str = "devices/system/memory";

/// Unit of memory that the kernel takes online and offline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Name, such as `memory344`.
    pub name: String,
    /// State as shown by the kernel: `online`, `offline` or `going-offline`.
    pub state: String,
}

impl Block {
    /// Returns whether it is offline.
    pub fn is_offline(&self) -> bool {
        self.state == "offline"
    }
}

/// Returns the range of a block in physical memory.
///
/// # Errors
/// The kernel does not report it.
pub fn range(sysfs: &Sysfs, block: &Block) -> Result<Range<u64>, SysfsError> {
    let size = size(sysfs)?.get();
    let number = block.name.trim_start_matches("memory").parse::<u64>();
    let number = number.map_err(|_| sysfs.unreadable(FOLDER, block.name.clone(), "a numbered block"))?;
    Ok(number * size..(number + 1) * size)
}

/// Returns the size of a block.
///
/// # Errors
/// The kernel does not report it.
pub fn size(sysfs: &Sysfs) -> Result<Bytes, SysfsError> {
    let file = format!("{FOLDER}/block_size_bytes");
    let text = sysfs.text(&file)?;
    match u64::from_str_radix(&text, 16) {
        Ok(bytes) if bytes > 0 => Ok(Bytes::new(bytes)),
        _ => Err(sysfs.unreadable(file, text, "a size in hexadecimal")),
    }
}

/// Policy for added blocks: they stay `offline`, or come `online` by themselves in one of several
/// ways.
///
/// # Errors
/// The kernel does not report it.
pub fn policy(sysfs: &Sysfs) -> Result<String, SysfsError> {
    sysfs.text(format!("{FOLDER}/auto_online_blocks"))
}

/// Returns the existing blocks that overlap a physical range, lowest first.
///
/// # Errors
/// The kernel does not report it.
pub fn within(sysfs: &Sysfs, range: &Range<u64>) -> Result<Vec<Block>, SysfsError> {
    let size = size(sysfs)?.get();
    let states = (range.start / size..range.end.div_ceil(size)).map(|number| {
        let name = format!("memory{number}");
        match sysfs.text(format!("{FOLDER}/{name}/state")) {
            Ok(state) => Ok(Some(Block { name, state })),
            Err(error) if error.is_gone() => Ok(None),
            Err(error) => Err(error),
        }
    });
    states.filter_map(Result::transpose).collect()
}
