//! The best of all splits on a grid: two goods, a table of what counts of both are worth to each tenant, and the split with the largest sum.
//!
//! Tenant by tenant: the best that the first so many can do with so many steps of both. A sum needs to know no more of them.

/// What so many steps of memory and of bandwidth are worth, rows by memory, `steps + 1` of each. `-∞` where that must not be.
pub type Table = Vec<f32>;

/// Steps of memory and of bandwidth for each tenant, with the largest sum of worths; all steps are given to somebody. None if no split is allowed.
///
/// Time grows with the tenants and the fourth power of the steps.
pub fn best_split(tables: &[Table], steps: usize) -> Option<Vec<(usize, usize)>> {
    let side = steps + 1;
    let mut stages: Vec<Table> = vec![tables.first()?.clone()];
    for table in &tables[1..] {
        stages.push(joined(&stages[stages.len() - 1], table, side));
    }
    let is_allowed = stages[stages.len() - 1][side * side - 1] > f32::NEG_INFINITY;
    is_allowed.then(|| traced(tables, &stages, side))
}

/// The best that all of both tables can do together, for each count of steps.
fn joined(sum: &Table, one: &Table, side: usize) -> Table {
    let mut best = vec![f32::NEG_INFINITY; side * side];
    for memory in 0..side {
        for ours in 0..=memory {
            let theirs = &sum[(memory - ours) * side..][..side];
            let row = &mut best[memory * side..][..side];
            for bandwidth in 0..side {
                let value = one[ours * side + bandwidth];
                if value == f32::NEG_INFINITY {
                    continue;
                }
                let reached = row[bandwidth..].iter_mut().zip(theirs);
                reached.for_each(|(best, theirs)| *best = best.max(theirs + value));
            }
        }
    }
    best
}

/// Back from all steps: what each tenant had of the best.
fn traced(tables: &[Table], stages: &[Table], side: usize) -> Vec<(usize, usize)> {
    let (mut memory, mut bandwidth) = (side - 1, side - 1);
    let mut split = vec![(0, 0); tables.len()];
    for at in (1..tables.len()).rev() {
        let (before, own) = (&stages[at - 1], &tables[at]);
        let cells = (0..=memory).flat_map(|ours| (0..=bandwidth).map(move |theirs| (ours, theirs)));
        let sum = |(m, b): &(usize, usize)| before[(memory - m) * side + bandwidth - b] + own[m * side + b];
        let (m, b) = cells.max_by(|one, other| sum(one).total_cmp(&sum(other))).expect("there is a cell");
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
    const SIDE: usize = STEPS + 1;

    fn cells() -> impl Iterator<Item = (usize, usize)> {
        (0..SIDE).flat_map(|memory| (0..SIDE).map(move |bandwidth| (memory, bandwidth)))
    }

    /// The best of three by looking at all splits.
    fn of_all(tables: &[Table]) -> f32 {
        let worth =
            |tenant: usize, (memory, bandwidth): (usize, usize)| tables[tenant][memory * SIDE + bandwidth];
        let mut best = f32::NEG_INFINITY;
        for one in cells() {
            for two in cells().filter(|two| one.0 + two.0 <= STEPS && one.1 + two.1 <= STEPS) {
                let rest = (STEPS - one.0 - two.0, STEPS - one.1 - two.1);
                best = best.max(worth(0, one) + worth(1, two) + worth(2, rest));
            }
        }
        best
    }

    proptest! {
        #[test]
        fn no_split_is_better_and_all_steps_are_given_to_somebody(
            tables in vec(vec(prop_oneof![1 => Just(f32::NEG_INFINITY), 3 => -5.0_f32..5.0], SIDE * SIDE), 3),
        ) {
            let split = best_split(&tables, STEPS);
            let best = of_all(&tables);
            prop_assert_eq!(split.is_some(), best > f32::NEG_INFINITY);
            if let Some(split) = split {
                let sum = |of: fn(&(usize, usize)) -> usize| split.iter().map(of).sum::<usize>();
                prop_assert_eq!((sum(|one| one.0), sum(|one| one.1)), (STEPS, STEPS));
                let worth: f32 = split.iter().zip(&tables).map(|(one, table)| table[one.0 * SIDE + one.1]).sum();
                prop_assert!((worth - best).abs() <= 1e-4, "{worth} is not {best}: {split:?}");
            }
        }
    }
}
