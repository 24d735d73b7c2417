//! Optimal split of two goods between tenants on a grid, by dynamic programming. Both goods are
//! divided into the same number of steps. The split maximizes the sum of the tenants' values.
//!
//! The state after each tenant is the number of steps of both goods assigned so far.

/// Value to one tenant of each combination of memory steps and bandwidth steps. For each number of
/// memory steps, the table has a row of `steps + 1` entries, one for each number of bandwidth
/// steps. `-∞` marks a forbidden entry.
pub(super) type Table = Vec<f32>;

/// Returns the steps of memory and of bandwidth for each tenant that maximize the sum of values.
/// All steps are assigned. Returns `None` if there are no tenants or every split is forbidden.
///
/// Time grows linearly with the number of tenants and with the fourth power of the steps.
pub(super) fn best_split(tables: &[Table], steps: usize) -> Option<Vec<(usize, usize)>> {
    let side = steps + 1;
    let mut stages: Vec<Table> = vec![tables.first()?.clone()];
    for table in &tables[1..] {
        stages.push(combine_tables(&stages[stages.len() - 1], table, side));
    }
    let is_allowed = stages[stages.len() - 1][side * side - 1] > f32::NEG_INFINITY;
    is_allowed.then(|| trace_back_split(tables, &stages, side))
}

/// Returns the table of the largest sums of values if the steps are split between earlier tenants
/// (`earlier`) and one more tenant (`added`).
fn combine_tables(earlier: &Table, added: &Table, side: usize) -> Table {
    let mut best = vec![f32::NEG_INFINITY; side * side];
    for memory in 0..side {
        for added_memory in 0..=memory {
            let earlier_row = &earlier[(memory - added_memory) * side..][..side];
            let best_row = &mut best[memory * side..][..side];
            for bandwidth in 0..side {
                let value = added[added_memory * side + bandwidth];
                if value == f32::NEG_INFINITY {
                    continue;
                }
                let sums = best_row[bandwidth..].iter_mut().zip(earlier_row);
                sums.for_each(|(best, earlier)| *best = best.max(earlier + value));
            }
        }
    }
    best
}

/// Reconstructs the optimal split from the tables of the stages, from the last tenant to the first.
fn trace_back_split(tables: &[Table], stages: &[Table], side: usize) -> Vec<(usize, usize)> {
    let (mut memory, mut bandwidth) = (side - 1, side - 1);
    let mut split = vec![(0, 0); tables.len()];
    for at in (1..tables.len()).rev() {
        let (earlier, own) = (&stages[at - 1], &tables[at]);
        let cells = (0..=memory).flat_map(|m| (0..=bandwidth).map(move |b| (m, b)));
        let sum = |(m, b): &(usize, usize)| earlier[(memory - m) * side + bandwidth - b] + own[m * side + b];
        let (m, b) = cells
            .max_by(|one, other| sum(one).total_cmp(&sum(other)))
            .expect("the list of cells contains (0, 0)");
        split[at] = (m, b);
        (memory, bandwidth) = (memory - m, bandwidth - b);
    }
    split[0] = (memory, bandwidth);
    split
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const STEPS: usize = 4;
    const TABLE_SIDE: usize = STEPS + 1;

    /// Returns all pairs of memory and bandwidth steps.
    fn cells() -> impl Iterator<Item = (usize, usize)> {
        (0..TABLE_SIDE).flat_map(|memory| (0..TABLE_SIDE).map(move |bandwidth| (memory, bandwidth)))
    }

    /// Returns the largest sum of values of three tenants by enumerating all splits.
    fn exhaustive_best_value(tables: &[Table]) -> f32 {
        let value = |tenant: usize, (memory, bandwidth): (usize, usize)| {
            tables[tenant][memory * TABLE_SIDE + bandwidth]
        };
        let mut best = f32::NEG_INFINITY;
        for one in cells() {
            for two in cells().filter(|two| one.0 + two.0 <= STEPS && one.1 + two.1 <= STEPS) {
                let rest = (STEPS - one.0 - two.0, STEPS - one.1 - two.1);
                best = best.max(value(0, one) + value(1, two) + value(2, rest));
            }
        }
        best
    }

    proptest! {
        #[test]
        fn best_split_assigns_all_steps_and_is_optimal(
            tables in vec(vec(prop_oneof![1 => Just(f32::NEG_INFINITY), 3 => -5.0_f32..5.0], TABLE_SIDE * TABLE_SIDE), 3),
        ) {
            let split = best_split(&tables, STEPS);
            let best = exhaustive_best_value(&tables);
            prop_assert_eq!(split.is_some(), best > f32::NEG_INFINITY);
            if let Some(split) = split {
                let sum = |of: fn(&(usize, usize)) -> usize| split.iter().map(of).sum::<usize>();
                prop_assert_eq!((sum(|one| one.0), sum(|one| one.1)), (STEPS, STEPS));
                let value: f32 = split.iter().zip(&tables).map(|(one, table)| table[one.0 * TABLE_SIDE + one.1]).sum();
                prop_assert!((value - best).abs() <= 1e-4, "{value}, expected {best}: {split:?}");
            }
        }
    }
}
