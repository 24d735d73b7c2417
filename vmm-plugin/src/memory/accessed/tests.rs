//! Tests of access sampling with mapped files, and with a guest that accesses a part of its memory.

use std::sync::Arc;

use proptest::prelude::*;
use units::Bytes;
use vm_memory::{Bytes as _, GuestAddress};

use super::*;
use crate::{
    layout::{Local, Performance, Pool, Shape},
    memory::{MemoryBackendOptions, MemoryBacking, MemoryBackings, MemoryOwner, create_memfd},
    vcpu::test_guest::{PAGE_BYTES, POOL_ADDRESS, POOL_BYTES, TestGuest},
};

const MIN_INTERVAL: Duration = ACCESS_SAMPLE_INTERVAL_MIN.as_duration();

/// Maps a guest with 64 MiB of local memory and one pool node per element of `pool`. Each pool node
/// has one slice.
fn map(pool: Vec<(File, MemoryBackendOptions)>) -> (Memory, Layout) {
    let local = Local { cpus: 1, memory: Bytes::mib(64), performance: Performance::LOCAL };
    let pool_shape = vec![Pool { slices: 1, performance: Performance::POOL }; pool.len()];
    let layout = Layout::new(&Shape { local: vec![local], pool: pool_shape }, 48).unwrap();
    let backing = |file| MemoryBacking { file: Arc::new(file), offset: 0, owner: MemoryOwner::Local };
    let local = backing(create_memfd("local", Bytes::mib(64), None).unwrap());
    let backings = MemoryBackings {
        local: vec![(local, MemoryBackendOptions::default())],
        pool: pool.into_iter().map(|(file, options)| (vec![backing(file)], options)).collect(),
        spare: None,
    };
    (Memory::map(&layout, &backings).unwrap(), layout)
}

fn slice_file() -> File {
    create_memfd("pool", Bytes::gib(1), None).unwrap()
}

/// Maps one pool node with ordinary pages, and creates its sampler.
fn map_sampled() -> (Memory, AccessSampler) {
    let (memory, layout) = map(vec![(slice_file(), MemoryBackendOptions::default())]);
    let mut sampler = AccessSampler::new(&memory, &layout).unwrap();
    // The counts below are exact only for base pages.
    sampler.nodes[0].page_bytes = BASE_PAGE_BYTES;
    (memory, sampler)
}

/// Converts an address of a selected page to a guest-physical address.
fn guest_address(memory: &Memory, page: usize) -> GuestAddress {
    GuestAddress(crate::memory::guest_address(memory.guest(), page).unwrap())
}

fn selected_pages(sampler: &AccessSampler) -> Vec<usize> {
    sampler.interval.as_ref().unwrap().selected[0].clone()
}

fn accessed_pages(sample: Option<AccessSample>) -> u32 {
    let sample = sample.expect("an interval was in progress");
    let [node] = sample.nodes[..] else { panic!("one node expected: {sample:?}") };
    assert_eq!((node.node, node.sampled_pages), (1, ACCESS_SAMPLE_PAGES));
    node.accessed_pages
}

#[test]
fn selected_pages_count_as_accessed_only_if_touched_in_the_interval() {
    let (memory, mut sampler) = map_sampled();
    memory.guest().write_slice(&vec![1; 64 << 20], GuestAddress(POOL_ADDRESS)).unwrap();
    let start = Instant::now();
    assert_eq!(sampler.sample(start).unwrap(), None);
    assert_eq!(accessed_pages(sampler.sample(start + MIN_INTERVAL).unwrap()), 0);
    for page in selected_pages(&sampler) {
        memory.guest().write_obj(2_u8, guest_address(&memory, page)).unwrap();
    }
    let all = sampler.sample(start + 2 * MIN_INTERVAL).unwrap();
    assert_eq!(accessed_pages(all), ACCESS_SAMPLE_PAGES);
    assert_eq!(accessed_pages(sampler.sample(start + 3 * MIN_INTERVAL).unwrap()), 0);
}

/// The pages are written, not read, because a read also maps adjacent pages.
#[test]
fn touched_part_of_the_selected_pages_is_counted_with_repetitions() {
    let (memory, mut sampler) = map_sampled();
    let start = Instant::now();
    sampler.sample(start).unwrap();
    let selected = selected_pages(&sampler);
    // The first two selected pages are the same page.
    sampler.interval.as_mut().unwrap().selected[0][1] = selected[0];
    let touched = &selected[2..52];
    for page in touched.iter().chain(&selected[..1]) {
        memory.guest().write_obj(1_u8, guest_address(&memory, *page)).unwrap();
    }
    let is_touched = |page: &&usize| touched.contains(page) || **page == selected[0];
    let expected = selected[2..].iter().filter(is_touched).count() + 2;
    let counted = accessed_pages(sampler.sample(start + MIN_INTERVAL).unwrap());
    assert_eq!(usize::try_from(counted).unwrap(), expected);
}

#[test]
fn sampling_does_not_change_the_contents_of_memory() {
    const BYTES: usize = 16 << 20;
    let (memory, mut sampler) = map_sampled();
    // All selected pages are in the range with data.
    sampler.nodes[0].ranges[0].end = sampler.nodes[0].ranges[0].start + BYTES;
    let pattern: Vec<u8> = (0..BYTES).map(|at| (at / BASE_PAGE_BYTES + at % 251).to_le_bytes()[0]).collect();
    memory.guest().write_slice(&pattern, GuestAddress(POOL_ADDRESS)).unwrap();
    let start = Instant::now();
    for interval in 0..4 {
        sampler.sample(start + interval * MIN_INTERVAL).unwrap();
        let mut read = vec![0; BYTES];
        memory.guest().read_slice(&mut read, GuestAddress(POOL_ADDRESS)).unwrap();
        assert!(read == pattern, "interval {interval} changed the contents");
    }
}

#[test]
fn interval_below_the_minimum_is_rejected_and_continues() {
    let (memory, mut sampler) = map_sampled();
    let start = Instant::now();
    sampler.sample(start).unwrap();
    let selected = selected_pages(&sampler);
    memory.guest().write_obj(1_u8, guest_address(&memory, selected[0])).unwrap();
    let early = sampler.sample(start + MIN_INTERVAL - Duration::from_nanos(1)).unwrap_err();
    assert!(matches!(early, SampleError::IntervalTooShort { .. }), "{early}");
    assert_eq!(selected_pages(&sampler), selected);
    let sample = sampler.sample(start + MIN_INTERVAL).unwrap().unwrap();
    assert_eq!(sample.interval, MIN_INTERVAL);
    assert!(accessed_pages(Some(sample)) >= 1);
}

#[test]
fn private_memory_is_never_sampled() {
    let private = MemoryBackendOptions { shared: false, ..MemoryBackendOptions::default() };
    let (memory, layout) =
        map(vec![(slice_file(), private), (slice_file(), MemoryBackendOptions::default())]);
    memory.guest().write_slice(&[7; 1 << 20], GuestAddress(POOL_ADDRESS)).unwrap();
    let mut sampler = AccessSampler::new(&memory, &layout).unwrap();
    let start = Instant::now();
    for interval in 0..3 {
        let sample = sampler.sample(start + interval * MIN_INTERVAL).unwrap();
        let nodes = sample.map(|sample| sample.nodes.iter().map(|node| node.node).collect::<Vec<_>>());
        assert!(nodes.is_none_or(|nodes| nodes == [2]));
    }
    let mut read = vec![0; 1 << 20];
    memory.guest().read_slice(&mut read, GuestAddress(POOL_ADDRESS)).unwrap();
    assert!(read.iter().all(|byte| *byte == 7));
}

#[test]
fn device_is_sampled_in_pages_of_its_alignment() {
    let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let (memory, layout) = map(vec![(device, MemoryBackendOptions::default())]);
    let mut sampler = AccessSampler::new(&memory, &layout).unwrap();
    let start = Instant::now();
    sampler.sample(start).unwrap();
    for page in selected_pages(&sampler) {
        // An access to any part of the page counts.
        memory.guest().write_obj(1_u8, guest_address(&memory, page + (1 << 20))).unwrap();
    }
    let sample = sampler.sample(start + MIN_INTERVAL).unwrap().unwrap();
    assert_eq!(sample.nodes[0].page_bytes, 2 << 20);
    assert_eq!(accessed_pages(Some(sample)), ACCESS_SAMPLE_PAGES);
    // Many pages of this interval were accessed in the previous one.
    assert_eq!(accessed_pages(sampler.sample(start + 2 * MIN_INTERVAL).unwrap()), 0);
}

#[test]
fn refused_system_calls_are_errors_without_an_interval() {
    let (_memory, mut sampler) = map_sampled();
    let range = sampler.nodes[0].ranges[0].clone();
    sampler.nodes[0].ranges[0] = range.start + 1..range.end; // madvise needs aligned addresses
    let error = units::chain(&sampler.sample(Instant::now()).unwrap_err());
    assert!(error.starts_with("cannot unmap a page of pool memory: "), "{error}");
    sampler.nodes[0].ranges[0] = range;
    let start = Instant::now();
    assert_eq!(sampler.sample(start).unwrap(), None, "the failed call began no interval");
    sampler.pagemap = File::open("/dev/null").unwrap();
    let error = units::chain(&sampler.sample(start + MIN_INTERVAL).unwrap_err());
    assert!(error.starts_with("cannot read /proc/self/pagemap: "), "{error}");
    assert_eq!(sampler.sample(start + MIN_INTERVAL).unwrap(), None, "the failed call began no interval");
}

/// The guest accesses a quarter of its pool memory. The bounds are five standard deviations of the
/// binomial distribution, which is exceeded once in two million runs.
#[test]
fn measured_fraction_is_near_the_fraction_that_a_guest_accesses() {
    let Some(guest) = TestGuest::start(1, POOL_BYTES / PAGE_BYTES / 4) else { return };
    let mut sampler = AccessSampler::new(&guest.memory, &guest.layout).unwrap();
    if sampler.nodes[0].page_bytes != BASE_PAGE_BYTES {
        sampler.nodes[0].page_bytes = sampled_page::HUGE_PAGE_BYTES;
    }
    guest.wait_for_rounds(1);
    let start = Instant::now();
    for interval in 0..3 {
        let sample = sampler.sample(start + interval * MIN_INTERVAL).unwrap();
        guest.wait_for_rounds(1);
        if sample.is_some() {
            let accessed = accessed_pages(sample);
            assert!((20..=80).contains(&accessed), "{accessed} of {ACCESS_SAMPLE_PAGES}");
        }
    }
    guest.assert_healthy();
}

proptest! {
    #[test]
    fn page_numbers_map_to_distinct_pages_within_the_ranges(
        ranges in prop::collection::vec((0..64_usize, 0..64_usize), 1..5),
        shift in 12..22_u32,
    ) {
        let page_bytes = 1_usize << shift;
        let base = |index: usize| (index + 1) << 40;
        let bounds: Vec<_> = ranges.iter().enumerate()
            .map(|(index, (from, length))| base(index) + from * 4096..base(index) + (from + length) * 4096)
            .collect();
        let ranges: Vec<_> = bounds.iter().map(|range| whole_pages(range, page_bytes)).collect();
        let node = SampledNode { node: 1, page_bytes, ranges: ranges.clone() };
        let pages: usize = ranges.iter().map(|range| range.len() / page_bytes).sum();
        let mut addresses: Vec<_> = (0..pages).map(|page| node.page_address(page)).collect();
        for address in &addresses {
            prop_assert_eq!(address % page_bytes, 0);
            prop_assert!(bounds.iter().any(|range| range.start <= *address && address + page_bytes <= range.end));
        }
        addresses.dedup();
        prop_assert_eq!(addresses.len(), pages);
        if pages > 0 {
            for address in node.select_pages().unwrap() {
                prop_assert!(addresses.contains(&address));
            }
        }
    }
}
