//! Tests of the layout: invariants for arbitrary shapes, and examples.

use proptest::prelude::*;

use super::*;

fn local(cpus: u32, mib: u64) -> Local {
    Local { cpus, memory: Bytes::mib(mib), performance: Performance::LOCAL }
}

fn pool(slices: u32) -> Pool {
    Pool { slices, performance: Performance::POOL }
}

fn shape(local: &[Local], pool: &[Pool]) -> Shape {
    Shape { local: local.to_vec(), pool: pool.to_vec() }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let locals = prop::collection::vec((1..=8_u32, 64..=9_000_u64), 1..=4);
    let pools = prop::collection::vec(1..=40_u32, 0..=4);
    (locals, pools).prop_map(|(locals, pools)| Shape {
        local: locals.into_iter().map(|(cpus, mib)| local(cpus, mib)).collect(),
        pool: pools.into_iter().map(pool).collect(),
    })
}

proptest! {
    #[test]
    fn regions_are_ordered_and_avoid_the_mmio_hole(shape in shapes()) {
        let layout = Layout::new(&shape, 46).unwrap();
        let mut end = 0;
        for region in &layout.regions {
            prop_assert!(region.range.start >= end && region.range.end > region.range.start);
            prop_assert!(region.range.end <= MMIO_HOLE_START || region.range.start >= MMIO_HOLE_END);
            end = region.range.end;
        }
    }

    #[test]
    fn node_sizes_match_the_shape_and_their_regions(shape in shapes()) {
        let layout = Layout::new(&shape, 46).unwrap();
        let sizes: Vec<u64> = layout.nodes.iter().map(|node| node.memory.iter().map(|r| r.end - r.start).sum()).collect();
        let requested = shape.local.iter().map(|node| node.memory.get());
        let requested: Vec<u64> = requested.chain(shape.pool.iter().map(|node| Bytes::slices(node.slices).get())).collect();
        prop_assert_eq!(sizes, requested);
        for (number, node) in layout.nodes.iter().enumerate() {
            let regions = layout.regions.iter().filter(|region| region.node as usize == number);
            let inside = |region: &MemoryRegion| node.memory.iter().any(|r| r.start <= region.range.start && region.range.end <= r.end);
            prop_assert_eq!(regions.clone().map(|p| p.range.end - p.range.start).sum::<u64>(),
                node.memory.iter().map(|r| r.end - r.start).sum::<u64>());
            prop_assert!(regions.clone().all(inside));
        }
    }

    #[test]
    fn slices_are_gib_aligned_and_above_local_memory(shape in shapes()) {
        let layout = Layout::new(&shape, 46).unwrap();
        let locals = layout.regions.iter().filter(|region| matches!(region.kind, RegionKind::Local { .. }));
        let local_end = locals.map(|region| region.range.end).max().unwrap();
        for region in layout.regions.iter().filter(|region| matches!(region.kind, RegionKind::Slice { .. })) {
            prop_assert!(region.range.start.is_multiple_of(SLICE.get()) && region.range.start >= local_end);
            prop_assert_eq!(region.range.end - region.range.start, SLICE.get());
        }
    }

    #[test]
    fn each_cpu_is_in_one_node_and_pool_nodes_have_no_cpus(shape in shapes()) {
        let layout = Layout::new(&shape, 46).unwrap();
        let cpus: u32 = shape.local.iter().map(|node| node.cpus).sum();
        prop_assert_eq!(layout.cpus(), cpus);
        for cpu in 0..cpus {
            let nodes = layout.nodes.iter().filter(|node| node.cpus.contains(&cpu)).count();
            prop_assert_eq!(nodes, 1);
            prop_assert!(layout.nodes[layout.node_of_cpu(cpu) as usize].cpus.contains(&cpu));
        }
        let ids: std::collections::BTreeSet<u32> = (0..cpus).map(|cpu| layout.apic_id(cpu)).collect();
        prop_assert_eq!(ids.len(), cpus as usize);
        prop_assert!(ids.last().is_some_and(|id| *id < 255));
        prop_assert_eq!(layout.nodes.iter().filter(|node| node.is_pool()).count(), shape.pool.len());
    }

    #[test]
    fn distances_are_symmetric_and_smallest_to_self(shape in shapes()) {
        let layout = Layout::new(&shape, 46).unwrap();
        for from in 0..layout.nodes.len() {
            for to in 0..layout.nodes.len() {
                prop_assert_eq!(layout.distance(from, to), layout.distance(to, from));
                prop_assert_eq!(layout.distance(from, to) == DISTANCE_LOCAL, from == to);
            }
        }
    }
}

fn pool_range(layout: &Layout, node: usize) -> Range<u64> {
    let [range] = &layout.nodes[node].memory[..] else { panic!("{layout:?}") };
    range.clone()
}

#[test]
fn local_memory_continues_above_the_mmio_hole() {
    let layout = Layout::new(&shape(&[local(2, 5 * 1024)], &[pool(1)]), 40).unwrap();
    assert_eq!(layout.nodes[0].memory, [0..MMIO_HOLE_START, MMIO_HOLE_END..6 << 30]);
    assert_eq!(pool_range(&layout, 1), 6 << 30..7 << 30);
    assert_eq!(layout.memory(), [0..MMIO_HOLE_START, MMIO_HOLE_END..7 << 30]);
    assert_eq!(layout.regions[1].kind, RegionKind::Local { node: 0, offset: MMIO_HOLE_START });
}

#[test]
fn pool_of_a_small_guest_starts_above_the_mmio_hole() {
    let layout = Layout::new(&shape(&[local(1, 256)], &[pool(1), pool(2)]), 40).unwrap();
    assert_eq!(pool_range(&layout, 1), 4 << 30..5 << 30);
    assert_eq!(pool_range(&layout, 2), 5 << 30..7 << 30);
}

#[test]
fn distances_are_proportional_to_latencies() {
    let layout = Layout::new(&shape(&[local(1, 256), local(1, 256)], &[pool(1)]), 40).unwrap();
    let row = |from| (0..3).map(|to| layout.distance(from, to)).collect::<Vec<_>>();
    assert_eq!((row(0), row(1), row(2)), (vec![10, 20, 18], vec![20, 10, 18], vec![18, 18, 10]));
}

#[test]
fn invalid_shape_error_names_value_and_rule() {
    let error = |shape: &Shape| Layout::new(shape, 36).unwrap_err().to_string();
    assert_eq!(error(&shape(&[], &[])), "nodes with cpus: 0 is out of range: must be 1 to 4");
    assert_eq!(error(&shape(&[local(65, 256)], &[])), "cpus: 65 is out of range: must be 1 to 64");
    assert_eq!(
        error(&shape(&[local(1, 256)], &[pool(0)])),
        "slices of a pool node: 0 is out of range: must be 1 to 4096"
    );
    assert_eq!(
        error(&shape(&[local(1, 32)], &[])),
        "--memory: 32MiB for node 0 is invalid: must be a multiple of 1MiB, at least 64MiB"
    );
    let beyond_address_space = error(&shape(&[local(1, 256)], &[pool(100)]));
    assert_eq!(
        beyond_address_space,
        "memory: the guest's memory ends at 0x1a00000000, beyond the 36-bit address space of this host"
    );
    let mut without_latency = shape(&[local(1, 256)], &[pool(1)]);
    without_latency.pool[0].performance.latency_ns = 0;
    assert_eq!(error(&without_latency), "latency_ns: 0 is out of range: must be 1 to 30000");
}
