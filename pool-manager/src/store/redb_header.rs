//! Detects a damaged header of a redb file. After an unclean stop, redb regards a damaged newest
//! commit as a torn write, and silently uses the commit before it. The header is shorter than a
//! sector, which disks write atomically. Therefore a power failure cannot tear it, and a wrong
//! checksum of the newest commit means that an acknowledged commit is damaged.
//!
//! The header begins with 64 bytes of properties of the file. Two commit slots of 128 bytes follow,
//! each with an XXH3-128 checksum. redb overwrites the older slot in each commit, and sets the bit
//! of the newest slot in the same write. See `tree_store/page_store/header.rs` in redb 4.

use std::io;

use ::redb::StorageBackend;
use twox_hash::XxHash3_128;

/// Number of bytes before the first commit slot.
const PROPERTIES_BYTES: usize = 64;
/// Size of a commit slot in bytes, including its checksum.
const SLOT_BYTES: usize = 128;
/// Size of a checksum in bytes. The checksum ends the slot.
const CHECKSUM_BYTES: usize = size_of::<u128>();
/// Size of the header in bytes.
const HEADER_BYTES: usize = PROPERTIES_BYTES + 2 * SLOT_BYTES;
/// Size of a sector, which disks write atomically.
const SECTOR_BYTES: usize = 512;
const _: () = assert!(HEADER_BYTES <= SECTOR_BYTES);
/// Offset of the byte with the flags.
const FLAGS_OFFSET: usize = 9;
/// Flag that is set if the second slot has the newest commit.
const SECOND_SLOT_IS_NEWEST: u8 = 1;
/// All flags of redb 4: newest slot, unclean stop, two-phase commit.
const ALL_FLAGS: u8 = 0b111;

/// Returns a description of the damage to the flags or to the newest commit slot of a file. Returns
/// `None` if they are intact or the file is shorter than a header.
///
/// # Errors
/// Returns the error of the operating system if the header cannot be read.
pub(super) fn find_damage(backend: &impl StorageBackend) -> io::Result<Option<String>> {
    if backend.len()? < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mut header = [0; HEADER_BYTES];
    backend.read(0, &mut header)?;
    let flags = header[FLAGS_OFFSET];
    if flags & !ALL_FLAGS != 0 {
        return Ok(Some(format!(
            "the flags of the header are {flags:#04x}: must be at most {ALL_FLAGS:#04x}"
        )));
    }
    let newest = usize::from(flags & SECOND_SLOT_IS_NEWEST);
    let slot = &header[PROPERTIES_BYTES + newest * SLOT_BYTES..][..SLOT_BYTES];
    let (contents, checksum) = slot.split_at(SLOT_BYTES - CHECKSUM_BYTES);
    let is_intact = XxHash3_128::oneshot(contents).to_le_bytes() == *checksum;
    Ok((!is_intact).then(|| format!("commit slot {newest} with the newest commit has a wrong checksum")))
}
