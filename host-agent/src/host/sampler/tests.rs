//! Tests with synthetic samples, whose true access rates are known, and with real samples of page
//! faults.

use std::fs;

use super::{faults::cause_faults, *};
use crate::host::sysfs::fake::FakeSysfs;

const EVENT_SOURCES: &str = "bus/event_source/devices";

#[test]
fn event_source_is_read_from_sysfs() {
    let source_of = |folder: &str, files: &[(&str, &str)]| {
        let tree = FakeSysfs::new(&[]);
        tree.files(&format!("{EVENT_SOURCES}/{folder}"), files);
        let source_of = EventSource::find(&tree.sysfs).map_err(|error| units::chain(&error));
        source_of.map(|source| (source.access_source, source.kind, source.config))
    };
    let loads = |event| source_of("cpu/events", &[("mem-loads", event)]);
    assert_eq!(loads("event=0xcd,umask=0x1,ldlat=3"), Ok((AccessSource::Pebs, 4, 0x20d1)));
    // A processor with only efficient cores uses the number of L3_MISS for another event.
    assert!(loads("event=0xd0,umask=0x5,ldlat=3").unwrap_err().contains("PEBS or IBS"));
    assert!(source_of("cpu/events", &[("cycles", "event=0x3c")]).unwrap_err().contains("PEBS or IBS"));
    assert_eq!(source_of("ibs_op", &[("type", "9")]), Ok((AccessSource::Ibs, 9, 0)));
    let tree = FakeSysfs::new(&[]);
    tree.files(&format!("{EVENT_SOURCES}/ibs_op"), &[("type", "9")]);
    tree.files(&format!("{EVENT_SOURCES}/ibs_op/format"), &[("cnt_ctl", "config:19")]);
    assert_eq!(EventSource::find(&tree.sysfs).unwrap().config, 1 << 19);
    tree.files(&format!("{EVENT_SOURCES}/ibs_op/format"), &[("cnt_ctl", "config:99")]);
    let error = units::chain(&EventSource::find(&tree.sysfs).unwrap_err());
    assert!(error.contains("cnt_ctl contains \"config:99\", expected config:BIT"), "{error}");
}

#[test]
fn online_processors_up_to_the_limit_are_sampled() {
    let of = |text| {
        let tree = FakeSysfs::new(&[]);
        tree.files("devices/system/cpu", &[("online", text)]);
        source::processors(&tree.sysfs).map_err(|error| units::chain(&error))
    };
    assert_eq!(of("0-2,8"), Ok(vec![0, 1, 2, 8]));
    assert_eq!(of("0-18446744073709551615").unwrap().len(), units::limits::SAMPLED_CPUS_MAX);
    assert!(of("all").unwrap_err().contains("online contains \"all\", expected a list of processors"));
}

/// Adjacent pages, each with the same number of access bursts per second.
struct PageGroup {
    pages: u64,
    bursts: f64,
}

/// Number of accesses per burst.
const ACCESSES_PER_BURST: f64 = 40.0;
/// Number of accesses per sample.
const ACCESSES_PER_SAMPLE: f64 = 1000.0;
/// Duration of sampling.
const SAMPLING_SECONDS: f64 = 30.0;
/// Identifier of the tenant's process.
const SAMPLED_PID: u32 = 7;

/// Returns the samples of a tenant whose memory consists of these groups, one after another.
fn sample_set(parts: &[PageGroup]) -> SampleSet {
    let (mut accesses, mut page) = (Vec::new(), 0x7f00_0000);
    for part in parts {
        for _ in 0..part.pages {
            page += 1;
            // Pseudorandom and reproducible rounding of the number of samples.
            let chance = (page as f64 * 0.618_033_988_749_895).fract();
            let mut due = part.bursts * ACCESSES_PER_BURST * SAMPLING_SECONDS / ACCESSES_PER_SAMPLE + chance;
            while due >= 1.0 {
                accesses.push(Access { page, weight: ACCESSES_PER_SAMPLE });
                due -= 1.0;
            }
        }
    }
    SampleSet {
        source: AccessSource::Pebs,
        seconds: SAMPLING_SECONDS,
        accesses: BTreeMap::from([(SAMPLED_PID, accesses)]),
    }
}

/// Returns the true number of page accesses per second, as counted by 20 samples per second.
fn accessed_pages_per_second(parts: &[PageGroup]) -> f64 {
    parts.iter().map(|part| part.pages as f64 * 20.0 * (1.0 - (-part.bursts / 20.0).exp())).sum()
}

fn bytes(parts: &[PageGroup]) -> u64 {
    parts.iter().map(|part| part.pages * PAGE_BYTES).sum()
}

#[test]
fn access_rates_are_estimated_from_sparse_samples() {
    let tenants = [
        // Uniform access: each page rarely, or in nearly every sample.
        vec![PageGroup { pages: 200_000, bursts: 0.2 }],
        vec![PageGroup { pages: 20_000, bursts: 40.0 }],
        // Skewed access: few hot pages, more warm pages, and many cold pages.
        vec![
            PageGroup { pages: 64, bursts: 400.0 },
            PageGroup { pages: 1000, bursts: 5.0 },
            PageGroup { pages: 20_000, bursts: 0.05 },
        ],
    ];
    for parts in tenants {
        let sampled = sample_set(&parts).tenant_samples(&[SAMPLED_PID, 99], bytes(&parts)).unwrap();
        let profile = sampled.profile(ACCESSES_PER_BURST);
        assert_eq!(profile.source, AccessSource::Pebs);
        let ratio = profile.pages_per_second() / accessed_pages_per_second(&parts);
        assert!(
            (0.85..1.15).contains(&ratio),
            "estimate / truth is {ratio} for {} per second",
            accessed_pages_per_second(&parts)
        );
        let touched = profile.touched_bytes() as f64 / bytes(&parts) as f64;
        assert!((0.8..1.1).contains(&touched), "touched fraction {touched}");
        // The number of accesses per burst is derived from the page access rate.
        let burst = sampled.accesses_per_burst(profile.pages_per_second());
        assert!((burst / ACCESSES_PER_BURST - 1.0).abs() < 1e-3, "{burst}");
    }
}

#[test]
fn scattered_hot_pages_are_counted_exactly() {
    // Every tenth of 10,000 pages is accessed in every sample; the other pages are hardly accessed.
    let ten_pages =
        |at| [PageGroup { pages: 1, bursts: 200.0 }, PageGroup { pages: 9, bursts: 0.1 * f64::from(at % 2) }];
    let parts: Vec<PageGroup> = (0..1000).flat_map(ten_pages).collect();
    let profile =
        sample_set(&parts).tenant_samples(&[SAMPLED_PID], bytes(&parts)).unwrap().profile(ACCESSES_PER_BURST);
    let hot: u64 = profile
        .regions
        .iter()
        .filter(|region| region.touched > 0.9)
        .map(|region| region.bytes / PAGE_BYTES)
        .sum();
    assert_eq!(hot, 1000);
    let samples = profile.histogram(16 * PAGE_BYTES).samples();
    assert!((2500..3500).contains(&samples), "{samples}: expected 40 each of 63 hot blocks of 16 pages");
}

#[test]
fn gap_between_mappings_is_not_memory() {
    let mut sample_set = sample_set(&[PageGroup { pages: 4000, bursts: 2.5 }]);
    let accesses = sample_set.accesses.get_mut(&SAMPLED_PID).unwrap();
    let second_mapping: Vec<_> =
        accesses.iter().map(|access| Access { page: access.page + (1 << 30), ..*access }).collect();
    accesses.extend(second_mapping);
    let profile =
        sample_set.tenant_samples(&[SAMPLED_PID], 8000 * PAGE_BYTES).unwrap().profile(ACCESSES_PER_BURST);
    assert!(profile.touched_bytes() <= 8000 * PAGE_BYTES);
}

#[test]
fn distant_samples_do_not_count_the_gap_as_memory() {
    // A tenant with 64 MiB has two hot pages, and four samples of pages that are 256 MiB apart.
    let mut sample_set = sample_set(&[PageGroup { pages: 2, bursts: 1000.0 }]);
    let far = (1..5).map(|at| Access { page: 0x7f00_0000 + at * 0x1_0000, weight: ACCESSES_PER_SAMPLE });
    sample_set.accesses.get_mut(&SAMPLED_PID).unwrap().extend(far);
    let profile = sample_set.tenant_samples(&[SAMPLED_PID], 64 << 20).unwrap().profile(ACCESSES_PER_BURST);
    assert_eq!(profile.touched_bytes(), 6 * PAGE_BYTES);
}

#[test]
fn tenant_with_few_samples_has_no_result() {
    let sample_set = sample_set(&[PageGroup { pages: 900, bursts: 0.9 }]);
    assert!(sample_set.tenant_samples(&[SAMPLED_PID], 900 * PAGE_BYTES).is_none());
    assert!(sample_set.tenant_samples(&[99], 900 * PAGE_BYTES).is_none());
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
    assert!((0.5..2.0).contains(&(all / fault_count)), "estimated {all} of {fault_count} faults");
    let in_written_pages = weight_sum(&|access| pages.contains(&access.page));
    assert!(in_written_pages > 0.5 * all, "{in_written_pages} of {all} faults are in written pages");
    cause_faults(Duration::from_millis(50));
    assert!(sampler.take().unwrap().accesses.is_empty(), "the stopped sampler took samples");
}
