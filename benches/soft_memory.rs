//! Measures soft memory against malloc of glibc and against mimalloc, with the allocations of the paper
//! (Soft Memory, section 5).
//!
//! Goals: 977,000 allocations of 1 KiB at least as fast as with malloc, and half as fast as with
//! mimalloc; 500,000 more allocations that first revoke the pages of another structure in at most 1.1
//! times the time without this pressure; reclamation of 2 MiB from 130,000 entries that own ordinary
//! memory in at most 50 ms, and at most 1.9 µs per evicted entry.
//!
//! Each measurement runs in a process of its own, so that it starts without free memory of the allocator.
//! All variants write all bytes of each allocation, and keep the allocations until the end. After the measurements
//! with revocations, the kernel's count of resident pages must match the pages that the pools hold.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    process::{Command, ExitCode},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Sender, channel},
    },
    time::Instant,
};

use mimalloc::MiMalloc;
use soft::{BudgetSource, PAGE_BYTES, Pool, Priority, SoftCache, SoftList};

/// Number of allocations without pressure.
const ALLOCATIONS: usize = 977_000;
/// Number of further allocations, without and with pressure.
const MORE_ALLOCATIONS: usize = 500_000;
/// Number of entries of the cache of which a part is reclaimed.
const ENTRIES: usize = 130_000;
/// Reclaimed pages (2 MiB).
const RECLAIMED_PAGES: usize = (2 << 20) / PAGE_BYTES;
/// Number of runs of each measurement. The median counts.
const ROUNDS: usize = 7;
/// Goal of the time of a reclamation in milliseconds.
const RECLAIM_MS_GOAL: f64 = 50.0;
/// Goal of the time per evicted entry in microseconds.
const RECLAIM_ENTRY_US_GOAL: f64 = 1.9;
/// Goal of the time with pressure, relative to the time without.
const PRESSURE_GOAL: f64 = 1.1;
/// Goal of the speed relative to mimalloc.
const MIMALLOC_GOAL: f64 = 0.5;

/// Allocation of the paper's measurements.
type Value = [u8; 1024];

/// Measurement in a process of its own. Returns times in seconds.
type Measurement = fn() -> Vec<f64>;

const MEASUREMENTS: [(&str, Measurement); 6] = [
    ("malloc", || vec![allocate_all(&System)]),
    ("mimalloc", || vec![allocate_all(&MiMalloc)]),
    ("soft", || vec![fill(&soft_list(pages(ALLOCATIONS)).1, ALLOCATIONS)]),
    ("more", more_allocations),
    ("pressure", more_allocations_under_pressure),
    ("reclaim", reclaim),
];

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    if let Some((_, measure)) = MEASUREMENTS.iter().find(|(other, _)| *other == name) {
        measure().iter().for_each(|time| println!("{time}"));
        return ExitCode::SUCCESS;
    }
    let mut rounds: Vec<Vec<Vec<f64>>> = vec![Vec::new(); MEASUREMENTS.len()];
    for _ in 0..ROUNDS {
        for ((name, _), times) in MEASUREMENTS.iter().zip(&mut rounds) {
            match run_in_process(name) {
                Ok(measured) => times.push(measured),
                Err(error) => {
                    eprintln!("soft_memory: cannot measure {name}: {error}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    report(&rounds);
    ExitCode::SUCCESS
}

fn run_in_process(name: &str) -> Result<Vec<f64>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program).arg(name).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let times = text.lines().map(str::parse).collect::<Result<Vec<f64>, _>>();
    times
        .ok()
        .filter(|times| output.status.success() && !times.is_empty())
        .ok_or_else(|| format!("{}, {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

fn report(rounds: &[Vec<Vec<f64>>]) {
    let time = |measurement: usize| spread(&rounds[measurement], 0, 1e3);
    let [malloc, mimalloc, soft, more, pressure, reclaim] = std::array::from_fn(time);
    let entry = spread(&rounds[5], 1, 1e6);
    let requests = spread(&rounds[4], 1, 1.0);
    for (name, [minimum, median, maximum], unit) in [
        ("977k_malloc", malloc, "ms"),
        ("977k_mimalloc", mimalloc, "ms"),
        ("977k", soft, "ms"),
        ("500k", more, "ms"),
        ("500k_pressure", pressure, "ms"),
        ("500k_pressure_requests", requests, "requests"),
        ("reclaim_2mib", reclaim, "ms"),
        ("reclaim_entry", entry, "us"),
    ] {
        println!("time soft_{name} {median:.3} {unit} (minimum {minimum:.3}, maximum {maximum:.3})");
    }
    for (name, ratio) in [
        ("977k_vs_malloc", malloc[1] / soft[1]),
        ("977k_vs_mimalloc", mimalloc[1] / soft[1] / MIMALLOC_GOAL),
        ("500k_pressure", PRESSURE_GOAL * more[1] / pressure[1]),
        ("reclaim_2mib", RECLAIM_MS_GOAL / reclaim[1]),
        ("reclaim_entry", RECLAIM_ENTRY_US_GOAL / entry[1]),
    ] {
        println!("ratio soft_{name} {ratio:.2}");
    }
}

/// Returns minimum, median and maximum of a result of all rounds, in the unit of `scale` per second.
fn spread(rounds: &[Vec<f64>], result: usize, scale: f64) -> [f64; 3] {
    let mut times: Vec<f64> = rounds.iter().map(|times| times[result] * scale).collect();
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2], times[times.len() - 1]]
}

/// Returns the pages of this number of allocations.
fn pages(allocations: usize) -> usize {
    (allocations * size_of::<Value>()).div_ceil(PAGE_BYTES)
}

/// Returns the value of an allocation, of which all bytes depend on its number.
#[inline]
fn value(number: usize) -> Value {
    [number.to_le_bytes()[0]; 1024]
}

fn allocate_all(allocator: &impl GlobalAlloc) -> f64 {
    let layout = Layout::new::<Value>();
    let mut addresses = Vec::with_capacity(ALLOCATIONS);
    let start = Instant::now();
    for number in 0..ALLOCATIONS {
        // SAFETY: the size of the layout is not 0.
        let address = unsafe { allocator.alloc(layout) };
        assert!(!address.is_null());
        // SAFETY: the allocation has the layout of a value.
        unsafe { address.cast::<Value>().write(value(number)) };
        addresses.push(address);
    }
    let time = start.elapsed().as_secs_f64();
    black_box(addresses);
    time
}

fn soft_list(budget: usize) -> (Arc<Pool>, SoftList<Value>) {
    let pool = Pool::new(budget).expect("the address space is available");
    let list = SoftList::new(&pool, Priority(0)).expect("values of 1 KiB are allowed");
    (pool, list)
}

/// Returns the time in seconds to append values to a list.
fn fill(list: &SoftList<Value>, count: usize) -> f64 {
    let start = Instant::now();
    for number in 0..count {
        list.push_back(value(number)).expect("the budget suffices");
    }
    start.elapsed().as_secs_f64()
}

/// Appends values to a list with sufficient budget, beside another list.
fn more_allocations() -> Vec<f64> {
    let (pool, first) = soft_list(pages(ALLOCATIONS) + pages(MORE_ALLOCATIONS) + 16);
    fill(&first, ALLOCATIONS);
    let second = SoftList::new(&pool, Priority(1)).expect("values of 1 KiB are allowed");
    vec![fill(&second, MORE_ALLOCATIONS)]
}

/// Source of budget that revokes pages of another pool, as the daemon does with another process. Requests
/// ahead of need are answered by a thread of their own.
struct OtherPool {
    pool: Arc<Pool>,
    requests: AtomicUsize,
    ahead: Sender<usize>,
}

impl BudgetSource for OtherPool {
    fn request(&self, pages: usize) -> usize {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.pool.revoke(pages)
    }

    fn request_ahead(&self, pages: usize) {
        let _ = self.ahead.send(pages);
    }

    fn give_back(&self, pages: usize) {
        self.pool.grant(pages);
    }
}

/// Appends values to a list whose pool has no budget, so that each page is revoked from another list.
fn more_allocations_under_pressure() -> Vec<f64> {
    let (other_pool, other) = soft_list(pages(ALLOCATIONS));
    fill(&other, ALLOCATIONS);
    let (ahead, requests_ahead) = channel();
    let source = Arc::new(OtherPool { pool: other_pool, requests: AtomicUsize::new(0), ahead });
    let address_space = 2 * pages(MORE_ALLOCATIONS);
    let pool = Pool::with_source(0, address_space, source.clone()).expect("the address space is available");
    let list = SoftList::new(&pool, Priority(0)).expect("values of 1 KiB are allowed");
    let is_done = AtomicBool::new(false);
    let time = std::thread::scope(|scope| {
        let (pool, source, is_done) = (&pool, &source, &is_done);
        scope.spawn(move || {
            let pages = requests_ahead.iter().take_while(|_| !is_done.load(Ordering::Relaxed));
            pages.for_each(|pages| pool.grant(source.request(pages)));
        });
        let time = fill(&list, MORE_ALLOCATIONS);
        is_done.store(true, Ordering::Relaxed);
        source.request_ahead(0);
        time
    });
    assert!(other.len() <= ALLOCATIONS - MORE_ALLOCATIONS, "all pages come from the other list");
    assert_held_pages_are_resident(&source.pool);
    assert_held_pages_are_resident(&pool);
    vec![time, source.requests.load(Ordering::Relaxed) as f64]
}

/// Reclaims pages of a cache whose entries own ordinary memory, half of them used recently. Returns the
/// time and the time per evicted entry.
fn reclaim() -> Vec<f64> {
    let pool = Pool::new(pages(ENTRIES)).expect("the address space is available");
    let freed = Arc::new(AtomicUsize::new(0));
    let counted = freed.clone();
    let cache = SoftCache::with_callback(&pool, Priority(0), move |key: Box<[u8]>, value: Box<[u8]>| {
        counted.fetch_add(key.len() + value.len(), Ordering::Relaxed);
    })
    .expect("the entries are small");
    let key = |number: usize| format!("key:{number:012}").into_bytes().into_boxed_slice();
    for number in 0..ENTRIES {
        cache.insert(key(number), vec![number.to_le_bytes()[0]; 32].into()).expect("the budget suffices");
    }
    for number in (0..ENTRIES).filter(|number| number.wrapping_mul(0x9E37_79B9) >> 7 & 1 == 0) {
        cache.get(&key(number), |value| black_box(value[0]));
    }
    let start = Instant::now();
    let pages = cache.reclaim(RECLAIMED_PAGES);
    let time = start.elapsed().as_secs_f64();
    assert!(pages >= RECLAIMED_PAGES && freed.load(Ordering::Relaxed) > 0);
    assert_held_pages_are_resident(&pool);
    vec![time, time / (ENTRIES - cache.len()) as f64]
}

/// Checks that the kernel backs exactly the pages that the structures of a pool hold.
fn assert_held_pages_are_resident(pool: &Pool) {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps is readable");
    let mut is_in_pool = false;
    let mut resident_kib = 0;
    for line in maps.lines() {
        let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
        if let Some((start, _)) = first.split_once('-') {
            is_in_pool =
                usize::from_str_radix(start, 16).is_ok_and(|start| pool.address_range().contains(&start));
        } else if first == "Rss:" && is_in_pool {
            let kib = rest.trim().trim_end_matches(" kB").parse::<usize>();
            resident_kib += kib.expect("the kernel prints a number");
        }
    }
    assert_eq!(resident_kib * 1024, pool.stats().held * PAGE_BYTES, "held pages are resident");
}
