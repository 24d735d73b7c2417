//! Measures soft memory against malloc of glibc and against mimalloc, with the allocations of the paper
//! (Soft Memory, section 5).
//!
//! Goals: 977,000 allocations of 1 KiB at least as fast as with malloc, with a constant budget and with budget of the
//! daemon, and half as fast as with mimalloc; 500,000 more allocations for which the daemon takes pages from another
//! process in at most 1.1 times the time without this pressure; reclamation of 2 MiB from 130,000 entries that own
//! ordinary memory in at most 50 ms, and at most 1.9 µs per evicted entry.
//!
//! Each measurement runs in a process of its own, so that it starts without free memory of the allocator. The daemon
//! is that of the agent, with its socket, in the process that starts the others.
//! All variants write all bytes of each allocation, and keep the allocations until the end. After the measurements,
//! the kernel's count of resident pages must match the pages that the pools hold.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    hint::black_box,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use mimalloc::MiMalloc;
use soft::{
    PAGE_BYTES, Pool, Priority, SoftCache, SoftList,
    budget::{Counters, Settings},
};
use tests::soft_daemon::SoftDaemon;
use units::Bytes;

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

/// Measurement in a process of its own, with the socket of the daemon. Returns times in seconds.
type Measurement = fn(&Path) -> Vec<f64>;

/// Measurements, with the size of soft memory in allocations, or 0 if they do not use the daemon.
const MEASUREMENTS: [(&str, usize, Measurement); 7] = [
    ("malloc", 0, |_| vec![allocate_all(&System)]),
    ("mimalloc", 0, |_| vec![allocate_all(&MiMalloc)]),
    ("soft", 0, |_| vec![fill(&soft_list(pages(ALLOCATIONS)).1, ALLOCATIONS)]),
    ("daemon", 2 * ALLOCATIONS, |socket| fill_with_daemon(socket)),
    ("more", 2 * ALLOCATIONS + 2 * MORE_ALLOCATIONS, |socket| more_allocations(socket)),
    (PRESSURE, 2 * ALLOCATIONS, |socket| more_allocations(socket)),
    ("reclaim", 0, |_| reclaim()),
];
/// Measurement for which the daemon takes pages from another process.
const PRESSURE: &str = "pressure";
/// Argument of a process that fills its budget and waits.
const HOLDER: &str = "holder";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, name, socket] = &arguments[..] {
        let socket = Path::new(socket);
        if name == HOLDER {
            hold(socket);
            return ExitCode::SUCCESS;
        }
        if let Some((.., measure)) = MEASUREMENTS.iter().find(|(other, ..)| other == name) {
            measure(socket).iter().for_each(|time| println!("{time}"));
            return ExitCode::SUCCESS;
        }
    }
    let mut rounds: Vec<Vec<Vec<f64>>> = vec![Vec::new(); MEASUREMENTS.len()];
    for _ in 0..ROUNDS {
        for ((name, allocations, _), times) in MEASUREMENTS.iter().zip(&mut rounds) {
            match measure_once(name, *allocations) {
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

/// Measures once, and appends the number of answered requests and of reclaimed pages of the daemon.
fn measure_once(name: &str, allocations: usize) -> Result<Vec<f64>, String> {
    if allocations == 0 {
        return run_in_process(name, Path::new("none"));
    }
    let daemon = SoftDaemon::start(Bytes::pages(pages(allocations) as u64), Settings::default());
    let holder = Holder::start(&daemon.socket())?;
    let mut times = run_in_process(name, &daemon.socket())?;
    let Counters { requests, reclaimed, .. } = daemon.next_report().counters;
    holder.end()?;
    if requests == 0 {
        return Err("the daemon answered no requests".to_owned());
    }
    if name == PRESSURE && reclaimed == 0 {
        return Err("the daemon reclaimed no pages".to_owned());
    }
    times.extend([requests as f64, reclaimed as f64]);
    Ok(times)
}

/// Process that fills a list, and keeps it until it ends.
struct Holder(Child);

impl Holder {
    fn start(socket: &Path) -> Result<Self, String> {
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.arg(HOLDER).arg(socket).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().map_err(|error| error.to_string())?;
        let mut line = String::new();
        let stdout = process.stdout.take().ok_or("no output")?;
        BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
        if line.trim_end() == "full" {
            Ok(Self(process))
        } else {
            Err(format!("the holder printed {line:?}"))
        }
    }

    /// Ends the process, which checks its resident pages.
    fn end(mut self) -> Result<(), String> {
        drop(self.0.stdin.take());
        let status = self.0.wait().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("the holder ended with {status}")) }
    }
}

fn hold(socket: &Path) {
    let (pool, list) = connected_list(socket);
    fill(&list, ALLOCATIONS);
    pool.give_back_unused();
    println!("full");
    std::io::stdin().lines().for_each(drop);
    assert_held_pages_are_resident(&pool);
}

fn run_in_process(name: &str, socket: &Path) -> Result<Vec<f64>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program).arg(name).arg(socket).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let times = text.lines().map(str::parse).collect::<Result<Vec<f64>, _>>();
    times
        .ok()
        .filter(|times| output.status.success() && !times.is_empty())
        .ok_or_else(|| format!("{}, {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

fn report(rounds: &[Vec<Vec<f64>>]) {
    let time = |measurement: usize| spread(&rounds[measurement], 0, 1e3);
    let [malloc, mimalloc, soft, daemon, more, pressure, reclaim] = std::array::from_fn(time);
    let count = |name: &str, result: usize| spread(results_of(rounds, name), result, 1.0);
    let entry = spread(results_of(rounds, "reclaim"), 1, 1e6);
    for (name, [minimum, median, maximum], unit) in [
        ("977k_malloc", malloc, "ms"),
        ("977k_mimalloc", mimalloc, "ms"),
        ("977k", soft, "ms"),
        ("977k_daemon", daemon, "ms"),
        ("977k_daemon_requests", count("daemon", 1), "requests"),
        ("500k", more, "ms"),
        ("500k_pressure", pressure, "ms"),
        ("500k_pressure_requests", count(PRESSURE, 1), "requests"),
        ("500k_pressure_reclaimed", count(PRESSURE, 2), "pages"),
        ("reclaim_2mib", reclaim, "ms"),
        ("reclaim_entry", entry, "us"),
    ] {
        println!("time soft_{name} {median:.3} {unit} (minimum {minimum:.3}, maximum {maximum:.3})");
    }
    for (name, ratio) in [
        ("977k_vs_malloc", malloc[1] / soft[1]),
        ("977k_daemon_vs_malloc", malloc[1] / daemon[1]),
        ("977k_vs_mimalloc", mimalloc[1] / soft[1] / MIMALLOC_GOAL),
        ("500k_pressure", PRESSURE_GOAL * more[1] / pressure[1]),
        ("reclaim_2mib", RECLAIM_MS_GOAL / reclaim[1]),
        ("reclaim_entry", RECLAIM_ENTRY_US_GOAL / entry[1]),
    ] {
        println!("ratio soft_{name} {ratio:.2}");
    }
}

/// Returns the results of all rounds of a measurement.
fn results_of<'a>(rounds: &'a [Vec<Vec<f64>>], name: &str) -> &'a [Vec<f64>] {
    let index = MEASUREMENTS.iter().position(|(other, ..)| *other == name);
    &rounds[index.expect("the measurement exists")]
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

/// Connects to the daemon, and creates a list.
fn connected_list(socket: &Path) -> (Arc<Pool>, SoftList<Value>) {
    let pool =
        soft::client::connect(socket, 2 * pages(ALLOCATIONS + MORE_ALLOCATIONS)).expect("the daemon runs");
    let list = SoftList::new(&pool, Priority(0)).expect("values of 1 KiB are allowed");
    (pool, list)
}

/// Appends values to a list whose budget grows by requests to the daemon.
fn fill_with_daemon(socket: &Path) -> Vec<f64> {
    let (pool, list) = connected_list(socket);
    let time = fill(&list, ALLOCATIONS);
    assert_held_pages_are_resident(&pool);
    vec![time]
}

/// Appends values to a list, and returns the time of further values, for which the daemon has free pages, or takes
/// the pages from another process.
fn more_allocations(socket: &Path) -> Vec<f64> {
    let (pool, list) = connected_list(socket);
    fill(&list, ALLOCATIONS);
    let time = fill(&list, MORE_ALLOCATIONS);
    assert_held_pages_are_resident(&pool);
    vec![time]
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
