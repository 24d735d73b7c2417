//! Samples: synthetic ones with known truth, and real ones of page faults.

use std::fs;

use super::{faults::cause_faults, *};
use crate::host::sysfs::fake::FakeSysfs;

const DEVICES: &str = "bus/event_source/devices";

#[test]
fn event_source_is_read_from_sysfs() {
    let source_of = |folder: &str, files: &[(&str, &str)]| {
        let tree = FakeSysfs::new(&[]);
        tree.files(&format!("{DEVICES}/{folder}"), files);
        let source_of = Source::find(&tree.sysfs).map_err(|error| units::chain(&error));
        source_of.map(|source| (source.access_source, source.kind, source.config))
    };
    let loads = |event| source_of("cpu/events", &[("mem-loads", event)]);
    assert_eq!(loads("event=0xcd,umask=0x1,ldlat=3"), Ok((AccessSource::Pebs, 4, 0x20d1)));
    // Efficient cores only: the number denotes another event.
    assert!(loads("event=0xd0,umask=0x5,ldlat=3").unwrap_err().contains("PEBS or IBS"));
    assert!(source_of("cpu/events", &[("cycles", "event=0x3c")]).unwrap_err().contains("PEBS or IBS"));
    assert_eq!(source_of("ibs_op", &[("type", "9")]), Ok((AccessSource::Ibs, 9, 0)));
    let tree = FakeSysfs::new(&[]);
    tree.files(&format!("{DEVICES}/ibs_op"), &[("type", "9")]);
    tree.files(&format!("{DEVICES}/ibs_op/format"), &[("cnt_ctl", "config:19")]);
    assert_eq!(Source::find(&tree.sysfs).unwrap().config, 1 << 19);
    tree.files(&format!("{DEVICES}/ibs_op/format"), &[("cnt_ctl", "config:99")]);
    let error = units::chain(&Source::find(&tree.sysfs).unwrap_err());
    assert!(error.contains("cnt_ctl holds \"config:99\", which is not config: and a bit"), "{error}");
}

#[test]
fn sampled_processors_are_the_online_ones() {
    let of = |text| {
        let tree = FakeSysfs::new(&[]);
        tree.files("devices/system/cpu", &[("online", text)]);
        source::processors(&tree.sysfs).map_err(|error| units::chain(&error))
    };
    assert_eq!(of("0-2,8"), Ok(vec![0, 1, 2, 8]));
    assert_eq!(of("0-18446744073709551615").unwrap().len(), units::limits::SAMPLED_CPUS_MAX);
    assert!(of("all").unwrap_err().contains("online holds \"all\", which is not a list of processors"));
}

/// Adjacent pages with the same number of visits per second.
struct PageGroup {
    pages: u64,
    visits: f64,
}

/// Accesses per visit, and accesses per sample.
const VISIT: f64 = 40.0;
const PERIOD: f64 = 1000.0;
const SECONDS: f64 = 30.0;
const PROCESS: u32 = 7;

/// Returns the samples of a tenant whose parts are adjacent.
fn sample_set(parts: &[PageGroup]) -> SampleSet {
    let (mut accesses, mut page) = (Vec::new(), 0x7f00_0000);
    for part in parts {
        for _ in 0..part.pages {
            page += 1;
            // Pseudorandom and reproducible.
            let chance = (page as f64 * 0.618_033_988_749_895).fract();
            let mut due = part.visits * VISIT * SECONDS / PERIOD + chance;
            while due >= 1.0 {
                accesses.push(Access { page, weight: PERIOD });
                due -= 1.0;
            }
        }
    }
    SampleSet {
        source: AccessSource::Pebs,
        seconds: SECONDS,
        accesses: BTreeMap::from([(PROCESS, accesses)]),
    }
}

/// Returns the true number of accessed pages per second, with 20 samples per second.
fn accessed_pages_per_second(parts: &[PageGroup]) -> f64 {
    parts.iter().map(|part| part.pages as f64 * 20.0 * (1.0 - (-part.visits / 20.0).exp())).sum()
}

fn bytes(parts: &[PageGroup]) -> u64 {
    parts.iter().map(|part| part.pages * PAGE).sum()
}

#[test]
fn access_rates_are_estimated_from_sparse_samples() {
    let tenants = [
        // Uniform: rarely accessed, and accessed in nearly every sample.
        vec![PageGroup { pages: 200_000, visits: 0.2 }],
        vec![PageGroup { pages: 20_000, visits: 40.0 }],
        // Few hot pages, more warm ones, and many that are rarely accessed.
        vec![
            PageGroup { pages: 64, visits: 400.0 },
            PageGroup { pages: 1000, visits: 5.0 },
            PageGroup { pages: 20_000, visits: 0.05 },
        ],
    ];
    for parts in tenants {
        let sampled = sample_set(&parts).tenant(&[PROCESS, 99], bytes(&parts)).unwrap();
        let profile = sampled.profile(VISIT);
        assert_eq!(profile.source, AccessSource::Pebs);
        let off = profile.pages_per_second() / accessed_pages_per_second(&parts);
        assert!((0.85..1.15).contains(&off), "{off} of {} pages a second", accessed_pages_per_second(&parts));
        let touched = profile.touched_bytes() as f64 / bytes(&parts) as f64;
        assert!((0.8..1.1).contains(&touched), "{touched} of its memory");
        // A known number of pages determines the accesses per visit.
        let visit = sampled.accesses_per_visit(profile.pages_per_second());
        assert!((visit / VISIT - 1.0).abs() < 1e-3, "{visit}");
    }
}

#[test]
fn scattered_hot_pages_are_counted_exactly() {
    // Every tenth of 10,000 pages is accessed in every sample, the others nearly never.
    let one =
        |at| [PageGroup { pages: 1, visits: 200.0 }, PageGroup { pages: 9, visits: 0.1 * f64::from(at % 2) }];
    let parts: Vec<PageGroup> = (0..1000).flat_map(one).collect();
    let profile = sample_set(&parts).tenant(&[PROCESS], bytes(&parts)).unwrap().profile(VISIT);
    let hot: u64 = profile.regions.iter().filter(|one| one.touched > 0.9).map(|one| one.bytes / PAGE).sum();
    assert_eq!(hot, 1000);
    let looks = profile.histogram(16 * PAGE).samples();
    assert!((2500..3500).contains(&looks), "{looks}: 63 blocks of 16 pages, 40 times, and hardly any others");
}

#[test]
fn gap_between_mappings_is_not_memory() {
    let mut sample_set = sample_set(&[PageGroup { pages: 4000, visits: 2.5 }]);
    let accesses = sample_set.accesses.get_mut(&PROCESS).unwrap();
    let elsewhere: Vec<_> =
        accesses.iter().map(|access| Access { page: access.page + (1 << 30), ..*access }).collect();
    accesses.extend(elsewhere);
    let profile = sample_set.tenant(&[PROCESS], 8000 * PAGE).unwrap().profile(VISIT);
    assert!(profile.touched_bytes() <= 8000 * PAGE);
}

#[test]
fn distant_samples_do_not_count_the_gap_as_memory() {
    // Two hot pages, and a few samples of others that are far apart, of a tenant that has 64 MiB.
    let mut sample_set = sample_set(&[PageGroup { pages: 2, visits: 1000.0 }]);
    let far = (1..5).map(|at| Access { page: 0x7f00_0000 + at * 0x1_0000, weight: PERIOD });
    sample_set.accesses.get_mut(&PROCESS).unwrap().extend(far);
    let profile = sample_set.tenant(&[PROCESS], 64 << 20).unwrap().profile(VISIT);
    assert_eq!(profile.touched_bytes(), 6 * PAGE);
}

#[test]
fn tenant_with_few_samples_has_no_result() {
    let sample_set = sample_set(&[PageGroup { pages: 900, visits: 0.9 }]);
    assert!(sample_set.tenant(&[PROCESS], 900 * PAGE).is_none());
    assert!(sample_set.tenant(&[99], 900 * PAGE).is_none());
}

/// Returns the number of page faults of this process.
fn fault_count() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[test]
fn perf_samples_have_process_page_and_weight() {
    let _lock = faults::lock_faults();
    let Some(mut sampler) = faults::sampler(Duration::from_secs(5)) else { return };
    sampler.begin().unwrap();
    let before = fault_count();
    let pages = cause_faults(Duration::from_secs(1));
    let fault_count = fault_count() - before;
    let sample_set = sampler.take().unwrap();
    let own = &sample_set.accesses[&std::process::id()];
    let weight_sum = |is_counted: &dyn Fn(&&Access) -> bool| {
        own.iter().filter(is_counted).map(|access| access.weight).sum::<f64>()
    };
    let all = weight_sum(&|_| true);
    assert!((0.5..2.0).contains(&(all / fault_count)), "{all} of {fault_count}");
    let there = weight_sum(&|access| pages.contains(&access.page));
    assert!(there > 0.5 * all, "{there} of {all} are in the written pages");
    cause_faults(Duration::from_millis(50));
    assert!(sampler.take().unwrap().accesses.is_empty(), "the stopped sampler took samples");
}
