//! Detects a damaged header of a redb file. After an unclean stop, redb regards a damaged newest
//! commit as a torn write, and silently uses the commit before it. The header is shorter than a
//! sector, which disks write atomically. Therefore a power failure cannot tear it, and a wrong
//! checksum of the newest commit means that an acknowledged commit is damaged. Damaged flags can
//! select the older commit; the transaction numbers of the slots show which commit is newer.
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
/// Flag that is set while the file is open for writing.
const RECOVERY_REQUIRED: u8 = 1 << 1;
/// Flag that is set if the pages of the newest commit were synced before its slot was selected.
const TWO_PHASE_COMMIT: u8 = 1 << 2;
/// All flags of redb 4.
const ALL_FLAGS: u8 = SECOND_SLOT_IS_NEWEST | RECOVERY_REQUIRED | TWO_PHASE_COMMIT;
/// Offset of the transaction number in a commit slot. Each commit has a higher number than the
/// commits before it.
const TRANSACTION_OFFSET: usize = 104;

/// Header of a redb file.
pub(super) struct Header([u8; HEADER_BYTES]);

impl Header {
    /// Reads the header of a file. Returns `None` if the file is shorter than a header.
    ///
    /// # Errors
    /// Returns the error of the operating system if the header cannot be read.
    pub(super) fn read(backend: &impl StorageBackend) -> io::Result<Option<Self>> {
        if backend.len()? < HEADER_BYTES as u64 {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        backend.read(0, &mut header)?;
        Ok(Some(Self(header)))
    }

    /// Returns a description of the damage to the flags or to the commit slot that they select.
    /// Returns `None` if both are intact.
    pub(super) fn find_damage(&self) -> Option<String> {
        let flags = self.flags();
        if flags & !ALL_FLAGS != 0 {
            return Some(format!(
                "the flags of the header are {flags:#04x}: must be at most {ALL_FLAGS:#04x}"
            ));
        }
        let selected = self.selected_slot();
        (!self.is_intact(selected))
            .then(|| format!("commit slot {selected} with the newest commit has a wrong checksum"))
    }

    /// Selects the newer commit if the flags claim that the older one is the newest and was written
    /// in two phases: redb then does not read the other slot. Either the flags are damaged, or a
    /// commit after a two-phase commit was interrupted. With the written flags, redb verifies the
    /// pages of the newer commit, and returns to the older one if they are incomplete. Returns
    /// whether the flags were changed.
    ///
    /// # Errors
    /// Returns the error of the operating system if the flags cannot be written.
    pub(super) fn select_newer_commit(&self, backend: &impl StorageBackend) -> io::Result<bool> {
        let (selected, other) = (self.selected_slot(), 1 - self.selected_slot());
        let must_select = self.flags() & TWO_PHASE_COMMIT != 0
            && self.is_intact(other)
            && self.transaction(other) > self.transaction(selected);
        if must_select {
            let newest = if other == 1 { SECOND_SLOT_IS_NEWEST } else { 0 };
            backend.write(FLAGS_OFFSET as u64, &[newest | RECOVERY_REQUIRED])?;
        }
        Ok(must_select)
    }

    fn flags(&self) -> u8 {
        self.0[FLAGS_OFFSET]
    }

    /// Returns the number of the commit slot that the flags select, 0 or 1.
    fn selected_slot(&self) -> usize {
        usize::from(self.flags() & SECOND_SLOT_IS_NEWEST)
    }

    fn slot(&self, number: usize) -> &[u8] {
        &self.0[PROPERTIES_BYTES + number * SLOT_BYTES..][..SLOT_BYTES]
    }

    fn is_intact(&self, slot: usize) -> bool {
        let (contents, checksum) = self.slot(slot).split_at(SLOT_BYTES - CHECKSUM_BYTES);
        XxHash3_128::oneshot(contents).to_le_bytes() == *checksum
    }

    fn transaction(&self, slot: usize) -> u64 {
        let (number, _) =
            self.slot(slot)[TRANSACTION_OFFSET..].split_first_chunk().expect("a slot contains the number");
        u64::from_le_bytes(*number)
    }
}
