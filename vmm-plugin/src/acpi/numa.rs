//! Generates the SRAT (NUMA affinity), the SLIT (distances) and the HMAT (latencies and
//! bandwidths).

use acpi_tables::{
    hmat::{DataType, LocalityType, MemoryProximityDomain, MinTransferSize, SystemLocality},
    sdt::Sdt,
    srat::MemoryAffinity,
};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, aml_bytes};
use crate::layout::{DISTANCE_LOCAL, Layout, Node};

/// Size of the header of an ACPI table, in bytes.
const TABLE_HEADER_BYTES: u32 = 36;
/// Revision of the HMAT. In revision 2, latencies are in picoseconds and bandwidths in MB/s (ACPI
/// 6.5, section 5.2.28). Linux reads the values of revision 1 as ten times smaller.
const HMAT_REVISION: u8 = 2;
/// Unit of latencies in the HMAT, in picoseconds: 1 ns.
const LATENCY_UNIT_PS: u64 = 1000;
/// Unit of bandwidths in the HMAT, in MB/s. With this unit, 16-bit entries reach 655 GB/s.
const BANDWIDTH_UNIT_MBPS: u64 = 10;

/// Returns the SRAT, which assigns each CPU and each memory range to a NUMA node.
///
/// Pool memory is marked as hot-pluggable and enabled at boot. Of 1 GiB of such memory, user space
/// can use 98 % with Linux 6.1 and 97 % with Linux 6.12, and all of it with `movable_node`. Without
/// the hot-pluggable flag, user space can use 94 % with Linux 6.1 and 97 % with Linux 6.12, with or
/// without `movable_node`. Pool memory is not an ACPI memory device: Linux 6.12 would assign such a
/// device to the memory tier of local memory, and Linux 6.1 would leave it offline.
pub(super) fn srat(layout: &Layout) -> Sdt {
    let mut srat = Sdt::new(*b"SRAT", TABLE_HEADER_BYTES + 12, 3, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    srat.write_u32(36, 1); // reserved; must be 1 for compatibility
    for (number, node) in numbered_nodes(layout) {
        for cpu in node.cpus.clone() {
            srat.append_slice(&x2apic_affinity(layout.apic_id(cpu), number));
        }
        for range in &node.memory {
            let memory = MemoryAffinity::new(number, range.start, range.end - range.start).enabled();
            srat.append_slice(&aml_bytes(&if node.is_pool() { memory.hotpluggable() } else { memory }));
        }
    }
    srat.update_checksum();
    srat
}

/// Returns a Processor Local x2APIC Affinity structure (ACPI 6.5, table 5.62).
fn x2apic_affinity(apic_id: u32, node: u32) -> [u8; 24] {
    const X2APIC_AFFINITY_KIND: u8 = 2;
    const CPU_ENABLED_FLAG: u32 = 1;
    let mut entry = [0; 24];
    entry[0] = X2APIC_AFFINITY_KIND;
    entry[1] = 24;
    entry[4..8].copy_from_slice(&node.to_le_bytes());
    entry[8..12].copy_from_slice(&apic_id.to_le_bytes());
    entry[12..16].copy_from_slice(&CPU_ENABLED_FLAG.to_le_bytes());
    entry
}

/// Returns the SLIT, which contains the relative distances between all NUMA nodes.
pub(super) fn slit(layout: &Layout) -> Vec<u8> {
    let nodes = layout.nodes.len();
    let mut slit = Sdt::new(*b"SLIT", TABLE_HEADER_BYTES + 8, 1, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    slit.write_u64(36, nodes as u64);
    let row = |from| (0..nodes).map(move |to| layout.distance(from, to));
    let matrix: Vec<u8> = (0..nodes).flat_map(row).collect();
    debug_assert!((0..nodes).all(|node| matrix[node * nodes + node] == DISTANCE_LOCAL));
    slit.append_slice(&matrix);
    slit.as_slice().to_vec()
}

/// Returns the HMAT, which contains the latency and the bandwidth from each node with CPUs to the
/// memory of each node.
pub(super) fn hmat(layout: &Layout) -> Sdt {
    let mut hmat =
        Sdt::new(*b"HMAT", TABLE_HEADER_BYTES + 4, HMAT_REVISION, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for (number, _) in numbered_nodes(layout) {
        let initiator = u32::try_from(layout.nearest_initiator(number as usize))
            .expect("the number of a node fits into u32");
        hmat.append_slice(&aml_bytes(&MemoryProximityDomain::new(initiator, number)));
    }
    let latency = |from, to| layout.latency_ns(from, to);
    let bandwidth = |from, to| layout.bandwidth_mbps(from, to).div_ceil(BANDWIDTH_UNIT_MBPS);
    hmat.append_slice(&aml_bytes(&locality_matrix(
        layout,
        DataType::AccessLatency,
        LATENCY_UNIT_PS,
        latency,
    )));
    hmat.append_slice(&aml_bytes(&locality_matrix(
        layout,
        DataType::AccessBandwidth,
        BANDWIDTH_UNIT_MBPS,
        bandwidth,
    )));
    hmat
}

fn locality_matrix(
    layout: &Layout,
    data_type: DataType,
    unit: u64,
    value: impl Fn(usize, usize) -> u64,
) -> SystemLocality {
    let with_cpus = layout.nodes.iter().filter(|node| !node.is_pool()).count();
    let nodes = layout.nodes.len();
    let kind = LocalityType::Memory;
    let mut matrix =
        SystemLocality::new(kind, data_type, MinTransferSize::SizeByteAligned, unit, with_cpus, nodes);
    for (number, node) in numbered_nodes(layout) {
        let at = number as usize;
        if !node.is_pool() {
            matrix.set_initiator_value(at, number);
        }
        matrix.set_target_value(at, number);
    }
    for (from, to) in (0..with_cpus).flat_map(|from| (0..nodes).map(move |to| (from, to))) {
        let value = u16::try_from(value(from, to)).unwrap_or(u16::MAX - 1);
        // acpi_tables computes the index of an entry as row * rows + column, which is wrong for a
        // matrix that is not square. In row 0, the column equals the index.
        matrix.set_entry_value(0, from * nodes + to, value);
    }
    matrix
}

fn numbered_nodes(layout: &Layout) -> impl Iterator<Item = (u32, &Node)> {
    (0..).zip(&layout.nodes)
}
