//! Tests of the generated ACPI tables. The tests parse the tables in the same way as a kernel.

use units::Bytes;

use super::*;
use crate::layout::{Local, Performance, Pool, Shape};

fn layout() -> Layout {
    let local = |cpus| Local { cpus, memory: Bytes::gib(2), performance: Performance::LOCAL };
    let pool = |slices| Pool { slices, performance: Performance::POOL };
    Layout::new(&Shape { local: vec![local(3), local(1)], pool: vec![pool(1), pool(4)] }, 40).unwrap()
}

const DEVICE_WINDOWS: [MmioWindow; 2] = [
    MmioWindow { address: 0xd000_0000, bytes: 4096, line: 8 },
    MmioWindow { address: 0xd000_1000, bytes: 4096, line: 9 },
];

fn read_number(bytes: &[u8], at: usize, width: usize) -> u64 {
    bytes[at..at + width].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn checksum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

/// Returns the ACPI table at a guest-physical address.
fn table_at(all: &[u8], at: u64) -> &[u8] {
    let at = usize::try_from(at - ACPI_TABLES_START).unwrap();
    let bytes = usize::try_from(read_number(all, at + 4, 4)).unwrap();
    &all[at..at + bytes]
}

/// Returns the ACPI table with a signature, found through the XSDT.
fn find_table<'a>(all: &'a [u8], signature: &[u8]) -> &'a [u8] {
    let xsdt = table_at(all, read_number(all, 24, 8));
    let entries = xsdt[36..].chunks(8).map(|entry| table_at(all, read_number(entry, 0, 8)));
    let mut found = entries.filter(|table| &table[..4] == signature);
    let table = found.next().unwrap();
    assert!(found.next().is_none());
    table
}

/// Splits the body of an ACPI table into structures. Returns the type and the bytes of each. The
/// type field and the length field have `width` bytes each.
fn split_structures(mut rest: &[u8], width: usize) -> Vec<(u64, &[u8])> {
    let mut all = Vec::new();
    while !rest.is_empty() {
        let length = if width == 1 { read_number(rest, 1, 1) } else { read_number(rest, 4, 4) };
        let (structure, remainder) = rest.split_at(usize::try_from(length).unwrap());
        all.push((read_number(structure, 0, width), structure));
        rest = remainder;
    }
    all
}

#[test]
fn tables_are_linked_from_rsdp_with_valid_checksums() {
    let all = build_tables(&layout(), &DEVICE_WINDOWS).unwrap();
    assert_eq!(&all[..8], b"RSD PTR ");
    assert_eq!((checksum(&all[..20]), checksum(&all[..36])), (0, 0));
    assert_eq!(checksum(table_at(&all, read_number(&all, 24, 8))), 0);
    for signature in [b"FACP", b"APIC", b"SRAT", b"SLIT", b"HMAT"] {
        assert_eq!(checksum(find_table(&all, signature)), 0, "{signature:?}");
    }
    let dsdt = table_at(&all, read_number(find_table(&all, b"FACP"), 140, 8));
    assert_eq!((&dsdt[..4], checksum(dsdt)), (&b"DSDT"[..], 0));
}

#[test]
fn srat_assigns_cpus_to_local_nodes_and_slices_to_pool_nodes() {
    let all = build_tables(&layout(), &[]).unwrap();
    let srat = split_structures(&find_table(&all, b"SRAT")[48..], 1);
    let processors: Vec<_> = srat
        .iter()
        .filter(|(kind, _)| *kind == 2)
        .map(|(_, s)| (read_number(s, 8, 4), read_number(s, 4, 4)))
        .collect();
    assert_eq!(processors, [(0, 0), (1, 0), (2, 0), (4, 1)], "APIC ID and node of each CPU");
    let memory: Vec<_> = srat
        .iter()
        .filter(|(kind, _)| *kind == 1)
        .map(|(_, s)| {
            (
                read_number(s, 2, 4),
                read_number(s, 8, 8) >> 20,
                read_number(s, 16, 8) >> 20,
                read_number(s, 28, 4),
            )
        })
        .collect();
    let expected =
        [(0, 0, 2048, 1), (1, 2048, 1024, 1), (1, 4096, 1024, 1), (2, 5120, 1024, 3), (3, 6144, 4096, 3)];
    assert_eq!(memory, expected, "node, start and size in MiB, flags (1 enabled, 2 hot-pluggable)");
    let madt = split_structures(&find_table(&all, b"APIC")[44..], 1);
    let apic_ids: Vec<_> = madt.iter().filter(|(kind, _)| *kind == 0).map(|(_, s)| u64::from(s[3])).collect();
    assert_eq!(apic_ids, [0, 1, 2, 4]);
}

#[test]
fn slit_and_hmat_values_match_the_layout() {
    let layout = layout();
    let all = build_tables(&layout, &[]).unwrap();
    let slit = find_table(&all, b"SLIT");
    assert_eq!(read_number(slit, 36, 8), 4);
    assert_eq!(slit[44..], [10, 20, 18, 18, 20, 10, 18, 18, 18, 18, 10, 36, 18, 18, 36, 10]);
    let hmat = find_table(&all, b"HMAT");
    assert_eq!(hmat[8], 2, "the HMAT has revision 2, whose latencies are in picoseconds");
    let localities: Vec<_> =
        split_structures(&hmat[40..], 2).into_iter().filter(|(kind, _)| *kind == 1).collect();
    let matrix = |s: &[u8]| s[32 + 4 * (2 + 4)..].chunks(2).map(|e| read_number(e, 0, 2)).collect::<Vec<_>>();
    let [(_, latency), (_, bandwidth)] = localities[..] else { panic!("{localities:?}") };
    assert_eq!(
        (read_number(latency, 12, 4), read_number(latency, 16, 4), read_number(latency, 24, 8)),
        (2, 4, 1000)
    );
    assert_eq!(matrix(latency), [85, 170, 155, 155, 170, 85, 155, 155]);
    assert_eq!(matrix(bandwidth), [20_000, 10_000, 3000, 3000, 10_000, 20_000, 3000, 3000]);
}

#[test]
fn tables_for_too_many_devices_are_rejected() {
    let too_many = vec![DEVICE_WINDOWS[0]; 4000];
    assert!(
        build_tables(&layout(), &too_many).unwrap_err().to_string().contains("only 131056 are available")
    );
}
