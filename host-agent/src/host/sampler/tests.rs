//! What is promised of samples: of made-up ones, whose truth is known, and of real ones of page faults.

use std::fs;

use super::{faults::fault, *};
use crate::host::{sysfs::made_up::MadeUp, watched::Eyes};

const DEVICES: &str = "bus/event_source/devices";

#[test]
fn what_a_processor_can_sample_is_what_its_kernel_shows() {
    let found = |folder: &str, files: &[(&str, &str)]| {
        let tree = MadeUp::new(&[]);
        tree.files(&format!("{DEVICES}/{folder}"), files);
        Source::find(&tree.sysfs).map_err(|error| units::chain(&error))
    };
    assert_eq!(found("cpu/events", &[("mem-loads", "event=0xcd,umask=0x1,ldlat=3")]), Ok(Source::Pebs));
    assert_eq!(found("ibs_op", &[("type", "9")]), Ok(Source::Ibs { kind: 9, config: 0 }));
    let tree = MadeUp::new(&[]);
    tree.files(&format!("{DEVICES}/ibs_op"), &[("type", "9")]);
    tree.files(&format!("{DEVICES}/ibs_op/format"), &[("cnt_ctl", "config:19")]);
    assert_eq!(Source::find(&tree.sysfs).unwrap(), Source::Ibs { kind: 9, config: 1 << 19 });
    tree.files(&format!("{DEVICES}/ibs_op/format"), &[("cnt_ctl", "config:99")]);
    let error = units::chain(&Source::find(&tree.sysfs).unwrap_err());
    assert!(error.contains("cnt_ctl holds \"config:99\", which is not config: and a bit"), "{error}");
    assert!(found("cpu/events", &[("cycles", "event=0x3c")]).unwrap_err().contains("PEBS or IBS"));
}

#[test]
fn processors_are_those_that_are_online() {
    let of = |text| {
        let tree = MadeUp::new(&[]);
        tree.files("devices/system/cpu", &[("online", text)]);
        source::processors(&tree.sysfs).map_err(|error| units::chain(&error))
    };
    assert_eq!(of("0-2,8"), Ok(vec![0, 1, 2, 8]));
    assert_eq!(of("0-18446744073709551615").unwrap().len(), units::limits::PROCESSORS_SAMPLED_MAX);
    assert!(of("all").unwrap_err().contains("online holds \"all\", which is not a list of processors"));
}

/// Some pages, side by side, each accessed so often in a second.
struct Part {
    pages: u64,
    per_second: f64,
}

/// One in so many accesses is sampled.
const PERIOD: f64 = 1000.0;
const SECONDS: f64 = 30.0;
const PROCESS: u32 = 7;

/// A tenant's samples, pages of a part in a row, and how many pages are in looks each second, in truth.
fn sampled(parts: &[Part]) -> (Sampled, f64) {
    let (mut accesses, mut page, mut in_looks) = (Vec::new(), 0x7f00_0000, 0.0);
    for part in parts {
        let samples = part.per_second * SECONDS / PERIOD;
        for _ in 0..part.pages {
            page += 1;
            // As if by chance, and the same each time.
            let chance = (page as f64 * 0.618_033_988_749_895).fract();
            let mut due = samples + chance;
            while due >= 1.0 {
                accesses.push(Access { page, stands_for: PERIOD });
                due -= 1.0;
            }
        }
        in_looks += part.pages as f64 * (1.0 - (-part.per_second * 0.05).exp()) / 0.05;
    }
    let accesses = BTreeMap::from([(PROCESS, accesses)]);
    (Sampled { source: Source::Pebs, seconds: SECONDS, accesses }, in_looks)
}

fn bytes(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.pages * PAGE).sum()
}

#[test]
fn how_often_pages_are_touched_is_known_from_one_access_in_a_thousand() {
    let tenants = [
        // All alike: seldom, and in every look.
        vec![Part { pages: 200_000, per_second: 2.0 }],
        vec![Part { pages: 20_000, per_second: 500.0 }],
        // Few that are hot, more that are warm, and most seldom touched.
        vec![
            Part { pages: 64, per_second: 10_000.0 },
            Part { pages: 1000, per_second: 50.0 },
            Part { pages: 20_000, per_second: 0.5 },
        ],
    ];
    for parts in tenants {
        let (sampled, in_looks) = sampled(&parts);
        let seen = sampled.of(&[PROCESS, 99], bytes(&parts)).unwrap();
        assert_eq!(seen.by, Eyes::Pebs);
        let off = seen.pages_per_second() / in_looks;
        assert!((0.85..1.15).contains(&off), "{off} of {in_looks} pages a second");
        let touched = seen.touched_bytes() as f64 / bytes(&parts) as f64;
        assert!((0.8..1.1).contains(&touched), "{touched} of its memory");
    }
}

#[test]
fn what_is_between_mappings_is_no_memory() {
    let (mut sampled, _) = sampled(&[Part { pages: 4000, per_second: 100.0 }]);
    let accesses = sampled.accesses.get_mut(&PROCESS).unwrap();
    let elsewhere: Vec<_> =
        accesses.iter().map(|access| Access { page: access.page + (1 << 30), ..*access }).collect();
    accesses.extend(elsewhere);
    let seen = sampled.of(&[PROCESS], 8000 * PAGE).unwrap();
    assert!(seen.touched_bytes() <= 8000 * PAGE);
}

#[test]
fn of_whom_there_are_few_samples_nothing_is_said() {
    let (sampled, _) = sampled(&[Part { pages: 900, per_second: 34.0 }]);
    assert_eq!(sampled.of(&[PROCESS], 900 * PAGE), None);
    assert_eq!(sampled.of(&[99], 900 * PAGE), None);
}

/// Page faults of this process so far.
fn faults() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(7).unwrap().parse().unwrap()
}

#[test]
fn perf_tells_whose_accesses_were_sampled_where_and_how_many_they_stand_for() {
    let Some(mut sampler) = Sampler::of_faults(Duration::from_secs(5)) else { return };
    sampler.begin().unwrap();
    let before = faults();
    let pages = fault(Duration::from_secs(1));
    let faults = faults() - before;
    let sampled = sampler.take().unwrap();
    let own = &sampled.accesses[&std::process::id()];
    let stand_for = |is_counted: &dyn Fn(&&Access) -> bool| {
        own.iter().filter(is_counted).map(|access| access.stands_for).sum::<f64>()
    };
    let all = stand_for(&|_| true);
    assert!((0.5..2.0).contains(&(all / faults)), "{all} of {faults}");
    let there = stand_for(&|access| pages.contains(&access.page));
    assert!(there > 0.5 * all, "{there} of {all} were where it wrote");
    fault(Duration::from_millis(50));
    assert!(sampler.take().unwrap().accesses.is_empty(), "it no longer looked");
}
