//! Reads the VMs of a trace in their order of arrival, and checks them: ids are unique, and each VM
//! fits on an empty socket.
//!
//! A trace in the order of arrival is read as a stream. Then only the ids of earlier VMs are stored:
//! ids of digits as ranges of numbers, which are few if the ids are dense, and other ids and owners as
//! hashes of 16 bytes. Other traces must be [sorted](sort_all) in memory.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::BufRead,
};

use rustc_hash::{FxHashMap, FxHashSet};
use units::{Ns, limits::PLAN_TRACE_ROWS_MAX};

use super::{Cluster, to_mib};
use crate::trace::{MalformedRow, TraceColumn, TraceError, TraceRow, TraceRows};

/// VM of a trace that is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedVm {
    /// Arrival time; 0 if the VM was running at the start of the trace.
    pub arrive: Ns,
    /// Departure time, not before the arrival; [`Ns::NEVER`] if the VM runs to the end.
    pub depart: Ns,
    /// Number of cores, at least 1.
    pub cores: u32,
    /// Memory in MiB, at least 1.
    pub mib: u64,
    /// Memory that the VM touched in MiB, if the trace contains it; at most `mib`.
    pub touched_mib: Option<u64>,
    /// Number of the VM's owner, if the trace contains the owner. Equal owners have equal numbers.
    pub owner: Option<u32>,
    /// Socket in the trace.
    pub socket: Option<u32>,
}

/// Error while reading the VMs of a trace.
#[derive(Debug, thiserror::Error)]
pub enum PlanInputError {
    /// The trace cannot be read, or a value is invalid.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace has no VM.
    #[error("the trace has no rows: must have at least one VM")]
    NoVms,
    /// A VM arrives before the VM of an earlier row, so that the trace must be sorted.
    #[error(
        "line {line}: arrives before the VM of an earlier row: a trace in another order must be a regular file"
    )]
    OutOfOrder {
        /// Line number of the VM.
        line: u64,
    },
}

impl From<MalformedRow> for PlanInputError {
    fn from(row: MalformedRow) -> Self {
        Self::Trace(row.into())
    }
}

/// Position of a VM in the order of arrivals. Ids of digits precede other ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OrderKey {
    arrive: Ns,
    id: IdOrder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum IdOrder {
    /// Number of an id of digits.
    Number(u64),
    /// Line of another id.
    Line(u64),
}

/// VMs of a trace, in file order, checked one after the other.
#[derive(Debug)]
pub struct VmStream<R> {
    rows: TraceRows<R>,
    limits: Cluster,
    ids: IdSet,
    /// Numbers of the owners by their hashes.
    owners: FxHashMap<u128, u32>,
    count: usize,
    last: Option<OrderKey>,
}

impl<R: BufRead> VmStream<R> {
    /// Starts to read a trace whose VMs must fit on an empty socket of the cluster.
    ///
    /// # Errors
    /// Returns [`PlanInputError::Trace`] if the input cannot be read or has an unknown layout.
    pub fn new(input: R, cluster: Cluster) -> Result<Self, PlanInputError> {
        Ok(Self {
            rows: TraceRows::new(input)?,
            limits: cluster,
            ids: IdSet::default(),
            owners: FxHashMap::default(),
            count: 0,
            last: None,
        })
    }

    /// Returns whether the trace has a column.
    pub fn has(&self, column: TraceColumn) -> bool {
        self.rows.has(column)
    }

    /// Replaces the content of `chunk` by the next VMs, at most `max`. It is empty at the end of the
    /// trace.
    ///
    /// # Errors
    /// Returns [`PlanInputError::OutOfOrder`] if a VM arrives before an earlier VM, and
    /// [`PlanInputError::Trace`] if the trace cannot be read or a value is invalid.
    pub fn read_chunk(&mut self, chunk: &mut Vec<PlannedVm>, max: usize) -> Result<(), PlanInputError> {
        chunk.clear();
        while chunk.len() < max {
            let Some((line, key, vm)) = self.read_vm()? else {
                return if self.count == 0 { Err(PlanInputError::NoVms) } else { Ok(()) };
            };
            if self.last > Some(key) {
                return Err(PlanInputError::OutOfOrder { line });
            }
            self.last = Some(key);
            chunk.push(vm);
        }
        Ok(())
    }

    fn read_vm(&mut self) -> Result<Option<(u64, OrderKey, PlannedVm)>, PlanInputError> {
        let Some(row) = self.rows.next_row()? else { return Ok(None) };
        let row = row?;
        if self.count == PLAN_TRACE_ROWS_MAX {
            return Err(TraceError::TooManyRows { max: PLAN_TRACE_ROWS_MAX }.into());
        }
        self.count += 1;
        check_size(&row, &self.limits)?;
        let id = self.ids.insert(row.id, row.line);
        let id = id.ok_or_else(|| row.violation(TraceColumn::Id, "must not be the id of an earlier row"))?;
        let owner = row.owner.filter(|owner| !owner.is_empty());
        let vm = PlannedVm {
            arrive: row.arrive.unwrap_or(Ns::ZERO),
            depart: row.depart.unwrap_or(Ns::NEVER),
            cores: row.cores,
            mib: to_mib(row.memory),
            touched_mib: row.touched.map(to_mib),
            owner: owner.map(|owner| number_of(&mut self.owners, owner)),
            socket: row.socket,
        };
        Ok(Some((row.line, OrderKey { arrive: vm.arrive, id }, vm)))
    }
}

/// Reads a whole trace and sorts its VMs by their order of arrival.
///
/// # Errors
/// Returns [`PlanInputError::Trace`] if the trace cannot be read or a value is invalid, and
/// [`PlanInputError::NoVms`] if it has no rows.
pub fn sort_all(mut stream: VmStream<impl BufRead>) -> Result<Vec<PlannedVm>, PlanInputError> {
    let mut vms = Vec::new();
    while let Some((_, key, vm)) = stream.read_vm()? {
        vms.push((key, vm));
    }
    if vms.is_empty() {
        return Err(PlanInputError::NoVms);
    }
    vms.sort_unstable_by_key(|(key, _)| *key);
    Ok(vms.into_iter().map(|(_, vm)| vm).collect())
}

fn check_size(row: &TraceRow<'_>, cluster: &Cluster) -> Result<(), MalformedRow> {
    if row.cores > cluster.cores_per_socket {
        return Err(row.violation(TraceColumn::Cores, "must be at most the cores of a socket"));
    }
    if row.memory > cluster.memory_per_socket {
        return Err(row.violation(TraceColumn::Memory, "must be at most the memory of a socket"));
    }
    if row.socket.is_some_and(|socket| socket >= cluster.sockets) {
        return Err(row.violation(TraceColumn::Socket, "must be less than the number of sockets"));
    }
    Ok(())
}

/// Returns the number of an owner, and assigns the next number to a new owner.
fn number_of(numbers: &mut FxHashMap<u128, u32>, owner: &str) -> u32 {
    let next = u32::try_from(numbers.len()).expect("a trace has fewer rows than 2^32");
    *numbers.entry(hash_128(owner)).or_insert(next)
}

/// Ids of the VMs that were read.
#[derive(Debug, Default)]
struct IdSet {
    /// First and last number of each range of ids. Ranges do not touch.
    ranges: BTreeMap<u64, u64>,
    hashes: FxHashSet<u128>,
}

impl IdSet {
    /// Adds an id, and returns its position among VMs that arrive at the same time. Returns `None`
    /// if the id was added before.
    fn insert(&mut self, id: &str, line: u64) -> Option<IdOrder> {
        match number(id) {
            Some(number) => self.insert_number(number).then_some(IdOrder::Number(number)),
            None => self.hashes.insert(hash_128(id)).then_some(IdOrder::Line(line)),
        }
    }

    fn insert_number(&mut self, id: u64) -> bool {
        let before = self.ranges.range(..=id).next_back().map(|(first, last)| (*first, *last));
        if before.is_some_and(|(_, last)| id <= last) {
            return false;
        }
        let first = before.filter(|(_, last)| last + 1 == id).map_or(id, |(first, _)| first);
        let after = id.checked_add(1).and_then(|next| self.ranges.remove(&next));
        self.ranges.insert(first, after.unwrap_or(id));
        true
    }
}

/// Returns the number of an id that consists of digits only.
fn number(id: &str) -> Option<u64> {
    id.bytes().all(|byte| byte.is_ascii_digit()).then(|| id.parse().ok()).flatten()
}

/// Returns a hash that differs for different ids: with 2^28 ids, two are equal with a probability of
/// 10^-22.
fn hash_128(id: &str) -> u128 {
    let hash = |part: u8| {
        let mut hasher = DefaultHasher::new();
        (part, id).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    hash(0) << 64 | hash(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use units::Bytes;

    use super::*;

    const CLUSTER: Cluster = Cluster { sockets: 4, cores_per_socket: 8, memory_per_socket: Bytes::gib(16) };

    fn stream(rows: &str) -> VmStream<std::io::Cursor<String>> {
        let text = format!("vm_id,arrive_s,depart_s,cores,mem_gb,batch_id,socket\n{rows}");
        VmStream::new(std::io::Cursor::new(text), CLUSTER).unwrap()
    }

    fn error(rows: &str) -> String {
        stream(rows).read_chunk(&mut Vec::new(), 100).unwrap_err().to_string()
    }

    /// Returns the cores of all VMs, which distinguish the VMs of these tests, in order of arrival.
    fn sorted_cores(rows: &str) -> Vec<u32> {
        sort_all(stream(rows)).unwrap().iter().map(|vm| vm.cores).collect()
    }

    #[test]
    fn vms_are_read_in_chunks() {
        let mut stream = stream("1,0,,1,0.5,b,\n2,0,9,2,1,,3\n3,7.5,8,3,2,b,0\n");
        let mut chunk = Vec::new();
        stream.read_chunk(&mut chunk, 2).unwrap();
        let vm = |arrive: Ns, depart: Ns, cores: u32, mib: u64, owner: Option<u32>, socket: Option<u32>| {
            PlannedVm { arrive, depart, cores, mib, touched_mib: None, owner, socket }
        };
        let expected = [
            vm(Ns::ZERO, Ns::NEVER, 1, 512, Some(0), None),
            vm(Ns::ZERO, Ns::secs(9), 2, 1024, None, Some(3)),
        ];
        assert_eq!(chunk, expected);
        stream.read_chunk(&mut chunk, 2).unwrap();
        assert_eq!(chunk, [vm(Ns::ms(7500), Ns::secs(8), 3, 2048, Some(0), Some(0))]);
        stream.read_chunk(&mut chunk, 2).unwrap();
        assert!(chunk.is_empty());
    }

    #[test]
    fn vms_are_sorted_by_arrival_and_number() {
        assert_eq!(sorted_cores("9,5,,1,1,,\n10,5,,2,1,,\n8,6,,3,1,,\n7,,,4,1,,\n"), [4, 1, 2, 3]);
        assert_eq!(sorted_cores("b,5,,1,1,,\na,5,,2,1,,\n10,5,,3,1,,\n9,5,,4,1,,\n"), [4, 3, 1, 2]);
        assert_eq!(
            error("9,5,,1,1,,\n8,5,,1,1,,\n"),
            "line 3: arrives before the VM of an earlier row: a trace in another order must be a regular file"
        );
    }

    #[test]
    fn invalid_vms_are_errors_with_line_column_value_and_rule() {
        let cases = [
            ("1,0,,9,1,,\n", "line 2: cores = \"9\": must be at most the cores of a socket"),
            ("1,0,,1,16.1,,\n", "line 2: mem_gb = \"16.1\": must be at most the memory of a socket"),
            ("1,0,,1,1,,4\n", "line 2: socket = \"4\": must be less than the number of sockets"),
            ("1,0,,1,1,,\n01,0,,1,1,,\n", "line 3: vm_id = \"01\": must not be the id of an earlier row"),
            (
                "a,0,,1,1,,\nb,0,,1,1,,\na,7,,1,1,,\n",
                "line 4: vm_id = \"a\": must not be the id of an earlier row",
            ),
            ("1,9,8,1,1,,\n", "line 2: depart_s = \"8\": must not be before the arrival"),
            ("", "the trace has no rows: must have at least one VM"),
        ];
        for (rows, expected) in cases {
            assert_eq!(error(rows), expected, "{rows}");
        }
        assert!(matches!(sort_all(stream("")), Err(PlanInputError::NoVms)));
    }

    #[test]
    fn dense_ids_are_stored_as_one_range() {
        let mut ids = IdSet::default();
        for id in (0..1000_u64).rev().chain(1000..2000) {
            assert!(ids.insert_number(id));
        }
        assert_eq!(ids.ranges, BTreeMap::from([(0, 1999)]));
        assert!(ids.insert_number(u64::MAX) && !ids.insert_number(u64::MAX));
    }

    proptest! {
        #[test]
        fn id_is_added_once(numbers in prop::collection::vec(0..40_u64, 0..60)) {
            let (mut ids, mut expected) = (IdSet::default(), std::collections::BTreeSet::new());
            for id in numbers {
                prop_assert_eq!(ids.insert_number(id), expected.insert(id));
            }
        }
    }
}
