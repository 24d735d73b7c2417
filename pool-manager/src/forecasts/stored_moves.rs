//! Index of the measured moves in the store. The entries of a program are limited in number, because a
//! guest can influence its own measurements.

use std::collections::BTreeMap;

use units::{
    UnixMs,
    limits::{MEASURED_MOVES_MAX, MEASURED_MOVES_PER_PROGRAM_MAX},
};

use crate::{
    records::forecast_rows::{self, MeasuredMove},
    store::Write,
};

/// Measured moves in the store by number, without their contents.
#[derive(Debug, Default)]
pub struct StoredMoves {
    entries: BTreeMap<u64, Entry>,
    /// Highest number so far. Numbers are not reused, so that a client that lists the moves misses none.
    last: u64,
}

#[derive(Debug)]
struct Entry {
    program: String,
    measured: UnixMs,
}

impl StoredMoves {
    /// Adds a measured move. Returns the entries that the caller must write, which may delete older
    /// moves.
    pub fn add(&mut self, moved: &MeasuredMove) -> Vec<Write> {
        let number = self.last.saturating_add(1);
        self.load(number, moved);
        let of_program = || self.entries.iter().filter(|(_, entry)| entry.program == moved.program);
        let of_program_surplus = of_program().count() > MEASURED_MOVES_PER_PROGRAM_MAX;
        let surplus = match of_program_surplus {
            true => of_program().next().map(|(number, _)| *number),
            false if self.entries.len() > MEASURED_MOVES_MAX => {
                self.entries.first_key_value().map(|(number, _)| *number)
            }
            false => None,
        };
        let deleted = surplus.map(|number| {
            self.entries.remove(&number);
            forecast_rows::delete_measured_move(number)
        });
        [forecast_rows::put_measured_move(number, moved)].into_iter().chain(deleted).collect()
    }

    /// Adds a move that was read from the store.
    pub fn load(&mut self, number: u64, moved: &MeasuredMove) {
        self.last = self.last.max(number);
        self.entries.insert(number, Entry { program: moved.program.clone(), measured: moved.measured });
    }

    /// Removes moves that were measured earlier than `before`. Returns the deletions that the caller must
    /// write.
    pub fn expire(&mut self, before: UnixMs) -> Vec<Write> {
        let mut deletions = Vec::new();
        self.entries.retain(|number, entry| {
            let is_kept = entry.measured >= before;
            if !is_kept {
                deletions.push(forecast_rows::delete_measured_move(*number));
            }
            is_kept
        });
        deletions
    }

    /// Returns the number of stored moves.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use prediction::{
        qos::{Evidence, MeasuredLoss, Placement},
        sensitivity::COUNTER_NAMES,
    };

    use super::*;
    use crate::store::Table;

    fn moved(program: &str, measured: u64) -> MeasuredMove {
        let counters = [0.5; COUNTER_NAMES.len()];
        let before = Evidence { counters, pool_loads: 0.5, latency_ratio: 2.5 };
        let (placement, after) = (Placement::Split, counters);
        let loss = MeasuredLoss { placement, before, after, loss: 0.1, standard_error: 0.01 };
        MeasuredMove { vm: "v".into(), program: program.into(), measured: UnixMs(measured), loss }
    }

    fn deleted(writes: &[Write]) -> Vec<u64> {
        let number = |write: &Write| match write {
            Write::Delete { table: Table::MeasuredMoves, key } => {
                Some(u64::from_be_bytes(key.as_slice().try_into().unwrap()))
            }
            _ => None,
        };
        writes.iter().filter_map(number).collect()
    }

    #[test]
    fn oldest_move_of_a_program_with_too_many_is_deleted() {
        let mut stored = StoredMoves::default();
        assert_eq!(deleted(&stored.add(&moved("other", 1))), [0; 0]);
        for at in 0..MEASURED_MOVES_PER_PROGRAM_MAX as u64 {
            assert_eq!(deleted(&stored.add(&moved("p", at))), [0; 0], "{at}");
        }
        assert_eq!(deleted(&stored.add(&moved("p", 9))), [2], "the first of p");
        assert_eq!(stored.len(), MEASURED_MOVES_PER_PROGRAM_MAX + 1);
    }

    #[test]
    fn numbers_continue_after_stored_and_expired_moves() {
        let mut stored = StoredMoves::default();
        stored.load(7, &moved("p", 1));
        assert_eq!(deleted(&stored.expire(UnixMs(2))), [7]);
        let writes = stored.add(&moved("p", 3));
        assert_eq!(writes, [forecast_rows::put_measured_move(8, &moved("p", 3))]);
        stored.load(u64::MAX, &moved("p", 3));
        stored.add(&moved("p", 4)); // replaces the last one
        assert_eq!(stored.len(), 2);
    }

    #[test]
    fn oldest_move_of_all_programs_is_deleted_when_there_are_too_many() {
        let mut stored = StoredMoves::default();
        (1..=MEASURED_MOVES_MAX as u64).for_each(|n| stored.load(n, &moved(&format!("p{n}"), n)));
        assert_eq!(deleted(&stored.add(&moved("new", 9))), [1]);
        assert_eq!(deleted(&stored.expire(UnixMs(5))), [2, 3, 4]);
        assert_eq!(stored.len(), MEASURED_MOVES_MAX - 3);
    }
}
