//! Page accesses of tenants, measured by DAMON of the Linux kernel through its sysfs interface.
//! DAMON samples regions of the tenants' processes, and reports how often each region was accessed.
//!
//! The agent requires exclusive use of DAMON, and does not start it while another program uses it.
//! Device memory is not monitored: DAMON does not see its pages, and sampling would split the 1 GiB
//! page table entries that map device-dax memory.

pub mod page_sampler;
mod target;

pub use self::target::Target;
use std::{
    ops::Range,
    path::Path,
    time::{Duration, Instant},
};

use units::limits::DAMON_REGIONS_MAX;

use super::{
    access_profile::{AccessProfile, AccessSource, Region, SAMPLE_INTERVAL_US, SAMPLES_PER_RESULT},
    sysfs::{Sysfs, SysfsError},
};

/// Directory of DAMON in sysfs.
const KDAMONDS_FOLDER: &str = "kernel/mm/damon/admin/kdamonds";
/// Settings for access profiles of tenants.
const PROFILE_SETTINGS: Settings = Settings {
    sample_interval_us: SAMPLE_INTERVAL_US,
    samples_per_result: SAMPLES_PER_RESULT,
    has_fixed_ranges: false,
};
/// Interval at which DAMON updates the processes' mappings, in microseconds.
const UPDATE_INTERVAL_US: u64 = 1_000_000;
/// Interval at which DAMON applies the scheme, in microseconds. A result is available after this
/// interval or, if the kernel does not support this setting, after the aggregation interval.
const APPLY_INTERVAL_US: u64 = 100_000;

/// Reason why processes cannot be monitored by DAMON.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// The kernel has no DAMON, or rejects a setting.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
    /// Another program uses DAMON.
    #[error("another program uses DAMON")]
    InUse,
    /// The kernel is too old to report the accesses that it has monitored.
    #[error("this kernel does not report monitored accesses; boot Linux 6.2 or newer")]
    NoResults,
}

/// Settings of DAMON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Settings {
    /// Interval between samples of a page, in microseconds. A sample detects an access since the
    /// previous one.
    sample_interval_us: u64,
    /// Number of samples per result (aggregation).
    samples_per_result: u32,
    /// Whether only the ranges of the targets are monitored. Otherwise, DAMON follows the mappings of
    /// processes without device memory.
    has_fixed_ranges: bool,
}

/// Interface to DAMON of the Linux kernel.
#[derive(Debug)]
pub struct Damon {
    files: Sysfs,
    settings: Settings,
    /// Number of monitored tenants, each with its own kdamond.
    monitored: usize,
}

impl Damon {
    /// Creates the interface. `sys` is the root of sysfs, `/sys`. `is_own` means that an earlier
    /// agent started the kdamonds that exist, so that this agent may stop them.
    pub fn at(sys: &Path, is_own: bool) -> Self {
        Self::with_settings(sys, is_own, PROFILE_SETTINGS)
    }

    fn with_settings(sys: &Path, is_own: bool, settings: Settings) -> Self {
        let files = Sysfs::at(sys.join(KDAMONDS_FOLDER));
        let existing = if is_own { files.number("nr_kdamonds").unwrap_or(0) } else { 0 };
        Self { files, settings, monitored: usize::try_from(existing).unwrap_or(0) }
    }

    /// Returns whether the kernel has DAMON.
    pub fn is_available(sys: &Sysfs) -> bool {
        sys.has(KDAMONDS_FOLDER)
    }

    /// Starts to monitor the processes of tenants until [`Damon::finish`]. Each tenant is monitored
    /// separately. Tenants with only device memory get an empty result, and tenants that cannot be
    /// monitored, such as those whose process has ended meanwhile, get none.
    ///
    /// # Errors
    /// [`DamonError`], also if no tenant can be monitored. No process is monitored after an error.
    pub fn start(&mut self, tenants: &[Vec<Target>]) -> Result<(), DamonError> {
        self.check_available()?;
        self.files.write("nr_kdamonds", &tenants.len().to_string())?;
        self.monitored = tenants.len();
        let mut results = tenants.iter().enumerate().map(|(at, processes)| self.configure(at, processes));
        let result = results.by_ref().reduce(|one, other| one.or(other)).unwrap_or(Ok(()));
        let lacks_results = |at: usize| {
            let scheme = format!("{at}/contexts/0/schemes/0");
            self.files.has(&scheme) && !self.files.has(format!("{scheme}/tried_regions"))
        };
        let has_results = !(0..tenants.len()).any(lacks_results);
        if result.is_err() || !has_results {
            self.stop()?;
        }
        result?;
        if has_results { Ok(()) } else { Err(DamonError::NoResults) }
    }

    /// Returns whether tenants are being monitored.
    pub fn is_running(&self) -> bool {
        self.monitored > 0
    }

    /// Stops monitoring by this agent, and checks that no other program uses DAMON.
    ///
    /// # Errors
    /// [`DamonError::InUse`], or the kernel has no DAMON.
    pub fn check_available(&mut self) -> Result<(), DamonError> {
        self.stop()?;
        if self.files.number("nr_kdamonds")? > 0 { Err(DamonError::InUse) } else { Ok(()) }
    }

    /// Stops monitoring, and returns the access profile of each tenant, in the order of
    /// [`Damon::start`]. The profile is `None` if the tenant's processes have ended, or if it was
    /// not read within the time limit: some kernels delay each result to the end of an aggregation
    /// interval.
    ///
    /// # Errors
    /// The kernel rejects the request to stop.
    pub fn finish(&mut self, limit: Duration) -> Result<Vec<Option<AccessProfile>>, DamonError> {
        let started = Instant::now();
        let result = |at| (started.elapsed() < limit).then(|| self.read_result(at).ok()).flatten();
        let results = (0..self.monitored).map(result).collect();
        self.stop()?;
        Ok(results)
    }

    /// Returns the address ranges of each entry of [`Damon::start`], the most accessed first, and
    /// continues to monitor. Each entry must consist of one process: DAMON does not report to which of
    /// several processes a range belongs. The result is `None` as in [`Damon::finish`]. The results are
    /// read from the entry `first` to the last entry. Also returns the first entry that was not read, or 0
    /// after the last.
    pub fn read_ranges(&self, first: usize, limit: Duration) -> (Vec<Option<Vec<MonitoredRange>>>, usize) {
        let started = Instant::now();
        let mut results = vec![None; self.monitored];
        for at in first..self.monitored {
            if at > first && started.elapsed() >= limit {
                return (results, at);
            }
            if let Ok(mut ranges) = self.read_regions(at) {
                ranges.sort_by_key(|range| std::cmp::Reverse(range.accesses));
                results[at] = Some(ranges);
            }
        }
        (results, 0)
    }

    /// Stops monitoring, and drops the results.
    ///
    /// # Errors
    /// The kernel rejects the request to stop.
    pub fn stop(&mut self) -> Result<(), DamonError> {
        for at in 0..self.monitored {
            // The write fails if the kdamond has stopped already, because all its processes ended.
            let _ = self.files.write(format!("{at}/state"), "off");
        }
        if self.monitored > 0 {
            self.files.write("nr_kdamonds", "0")?;
            self.monitored = 0;
        }
        Ok(())
    }

    fn configure(&self, at: usize, processes: &[Target]) -> Result<(), SysfsError> {
        // With device memory, the address ranges are fixed (`fvaddr`); otherwise DAMON itself
        // follows the processes' mappings (`vaddr`).
        let Settings { sample_interval_us, samples_per_result, has_fixed_ranges } = self.settings;
        let is_fixed = has_fixed_ranges || processes.iter().any(|target| target.device_bytes > 0);
        let is_monitored = |target: &&Target| !is_fixed || !target.ranges.is_empty();
        let processes: Vec<&Target> = processes.iter().filter(is_monitored).collect();
        if processes.is_empty() {
            return Ok(());
        }
        let set = |file: &str, value: &str| self.files.write(format!("{at}/contexts/{file}"), value);
        let number = |file: &str, value: u64| set(file, &value.to_string());
        set("nr_contexts", "1")?;
        set("0/operations", if is_fixed { "fvaddr" } else { "vaddr" })?;
        number("0/monitoring_attrs/intervals/sample_us", sample_interval_us)?;
        let aggregation_us = u64::from(samples_per_result) * sample_interval_us;
        number("0/monitoring_attrs/intervals/aggr_us", aggregation_us)?;
        number("0/monitoring_attrs/intervals/update_us", UPDATE_INTERVAL_US)?;
        number("0/monitoring_attrs/nr_regions/max", DAMON_REGIONS_MAX as u64)?;
        number("0/targets/nr_targets", processes.len() as u64)?;
        let ranges_max = (DAMON_REGIONS_MAX / processes.len()).max(1);
        for (nth, target) in processes.iter().enumerate() {
            number(&format!("0/targets/{nth}/pid_target"), u64::from(target.pid))?;
            let ranges = if is_fixed { target.largest_ranges(ranges_max) } else { Vec::new() };
            number(&format!("0/targets/{nth}/regions/nr_regions"), ranges.len() as u64)?;
            for (region, range) in ranges.iter().enumerate() {
                let below = format!("0/targets/{nth}/regions/{region}");
                number(&format!("{below}/start"), range.start as u64)?;
                number(&format!("{below}/end"), range.end as u64)?;
            }
        }
        // A scheme with the action `stat` changes nothing, and applies to all regions. Its tried
        // regions are the result.
        number("0/schemes/nr_schemes", 1)?;
        set("0/schemes/0/action", "stat")?;
        let apply = format!("{at}/contexts/0/schemes/0/apply_interval_us");
        if self.files.has(&apply) {
            self.files.write(apply, &APPLY_INTERVAL_US.max(sample_interval_us).to_string())?;
        }
        for (file, max) in
            [("sz", u64::MAX), ("nr_accesses", u64::from(u32::MAX)), ("age", u64::from(u32::MAX))]
        {
            number(&format!("0/schemes/0/access_pattern/{file}/min"), 0)?;
            number(&format!("0/schemes/0/access_pattern/{file}/max"), max)?;
        }
        self.files.write(format!("{at}/state"), "on")
    }

    fn read_result(&self, at: usize) -> Result<AccessProfile, SysfsError> {
        let samples = f64::from(self.settings.samples_per_result);
        let regions = self.read_regions(at)?.iter().map(|range| range.region_of(samples)).collect();
        Ok(AccessProfile { source: AccessSource::Damon, regions })
    }

    fn read_regions(&self, at: usize) -> Result<Vec<MonitoredRange>, SysfsError> {
        self.files.write(format!("{at}/state"), "update_schemes_tried_regions")?;
        let folder = format!("{at}/contexts/0/schemes/0/tried_regions");
        let region = |name: &String| {
            let of = |file: &str| self.files.number(format!("{folder}/{name}/{file}"));
            let address = |file: &str| Ok(usize::try_from(of(file)?).unwrap_or(usize::MAX));
            let start = address("start")?;
            let addresses = start..address("end")?.max(start);
            Ok(MonitoredRange { addresses, accesses: of("nr_accesses")? })
        };
        self.files.numbered_names(&folder, "")?.iter().map(region).collect()
    }
}

/// Address range of a process in a result of DAMON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitoredRange {
    /// Addresses. The range may include unmapped gaps.
    pub addresses: Range<usize>,
    /// Number of samples of the last result in which a page of the range was accessed, at most
    /// [`SAMPLES_PER_RESULT`].
    pub accesses: u64,
}

impl MonitoredRange {
    /// Returns the range as a region of an access profile of a tenant.
    pub fn region(&self) -> Region {
        self.region_of(f64::from(SAMPLES_PER_RESULT))
    }

    fn region_of(&self, samples: f64) -> Region {
        Region { bytes: self.addresses.len() as u64, touched: (self.accesses as f64 / samples).min(1.0) }
    }
}

#[cfg(test)]
pub(crate) mod fake {
    use super::KDAMONDS_FOLDER;
    use crate::host::sysfs::fake::FakeSysfs;

    /// Creates a simulated DAMON that accepts all settings. It reports these regions of the first
    /// tenant, given as start, end and number of accesses.
    pub(crate) fn damon(tenants: usize, regions: &[(&str, &str, &str)]) -> FakeSysfs {
        let fake = FakeSysfs::new(&[]);
        fake.files(KDAMONDS_FOLDER, &[("nr_kdamonds", "0")]);
        for at in 0..tenants {
            let below = format!("{KDAMONDS_FOLDER}/{at}");
            let files = "state contexts/nr_contexts contexts/0/operations contexts/0/monitoring_attrs/intervals/sample_us \
                contexts/0/monitoring_attrs/intervals/aggr_us contexts/0/monitoring_attrs/intervals/update_us \
                contexts/0/monitoring_attrs/nr_regions/max contexts/0/targets/nr_targets contexts/0/targets/0/pid_target \
                contexts/0/targets/0/regions/nr_regions contexts/0/targets/1/regions/nr_regions \
                contexts/0/targets/1/pid_target contexts/0/schemes/nr_schemes contexts/0/schemes/0/action \
                contexts/0/schemes/0/access_pattern/sz/min contexts/0/schemes/0/access_pattern/sz/max \
                contexts/0/schemes/0/access_pattern/nr_accesses/min contexts/0/schemes/0/access_pattern/nr_accesses/max \
                contexts/0/schemes/0/access_pattern/age/min contexts/0/schemes/0/access_pattern/age/max";
            files.split_whitespace().for_each(|file| fake.files(&below, &[(file, "")]));
            std::fs::create_dir_all(fake.path(&below).join("contexts/0/schemes/0/tried_regions")).unwrap();
        }
        for (at, (start, end, touched)) in regions.iter().enumerate() {
            let below = format!("{KDAMONDS_FOLDER}/0/contexts/0/schemes/0/tried_regions/{at}");
            fake.files(&below, &[("start", start), ("end", end), ("nr_accesses", touched), ("age", "3")]);
        }
        fake
    }
}

#[cfg(test)]
mod tests {
    use super::{fake::damon, *};
    use crate::host::sysfs::fake::FakeSysfs;

    fn targets(pids: &[u32]) -> Vec<Target> {
        pids.iter().map(|pid| Target { pid: *pid, ranges: Vec::new(), device_bytes: 0 }).collect()
    }

    #[test]
    fn device_memory_is_not_monitored() {
        let fake = damon(2, &[]);
        let below = format!("{KDAMONDS_FOLDER}/0/contexts/0/targets/0/regions");
        for region in ["0", "1"] {
            fake.files(&format!("{below}/{region}"), &[("start", ""), ("end", "")]);
        }
        let vmm = Target { pid: 7, ranges: vec![0x1000..0x3000, 0x9000..0xa000], device_bytes: 1 << 30 };
        let nothing_else = Target { pid: 8, ranges: Vec::new(), device_bytes: 1 << 30 };
        let mut damon = Damon::at(&fake.path(""), false);
        damon.start(&[vec![nothing_else.clone(), vmm], vec![nothing_else]]).unwrap();
        let text = |file: &str| fake.sysfs.text(format!("{KDAMONDS_FOLDER}/{file}")).unwrap();
        assert_eq!(text("0/contexts/0/operations"), "fvaddr");
        assert_eq!(
            (text("0/contexts/0/targets/nr_targets"), text("0/contexts/0/targets/0/pid_target")),
            ("1".into(), "7".into())
        );
        let region = |file: &str| fake.sysfs.text(format!("{below}/{file}")).unwrap();
        let regions = ["nr_regions", "0/start", "0/end", "1/start", "1/end"].map(region);
        assert_eq!(regions, ["2", "4096", "12288", "36864", "40960"]);
        assert_eq!((text("0/state"), text("1/state")), ("on".into(), String::new()));
    }

    #[test]
    fn each_monitored_tenant_has_its_own_result() {
        let fake = damon(2, &[("4096", "12288", "40"), ("1048576", "2097152", "0")]);
        let mut damon = Damon::at(&fake.path(""), false);
        damon.start(&[targets(&[7, 8]), targets(&[9])]).unwrap();
        let text = |file: &str| fake.sysfs.text(format!("{KDAMONDS_FOLDER}/{file}")).unwrap();
        assert_eq!(text("0/contexts/0/targets/1/pid_target"), "8");
        assert_eq!((text("nr_kdamonds"), text("1/state")), ("2".to_owned(), "on".to_owned()));
        let results = damon.finish(Duration::from_secs(60)).unwrap();
        let first = results[0].as_ref().unwrap();
        assert_eq!(first.touched_bytes(), 8192);
        assert_eq!(first.pages_per_second(), 40.0, "two pages, each accessed 40 times in two seconds");
        assert_eq!(first.regions[0].touched, 1.0);
        assert_eq!(results[1], Some(AccessProfile { source: AccessSource::Damon, regions: Vec::new() }));
        assert_eq!((text("nr_kdamonds"), text("1/state")), ("0".to_owned(), "off".to_owned()));
        damon.start(&[targets(&[7, 8]), targets(&[9])]).unwrap();
        assert_eq!(damon.finish(Duration::ZERO).unwrap(), [None, None], "the time limit is zero");
        assert!(!damon.is_running());
    }

    #[test]
    fn ranges_are_sorted_by_accesses_and_monitoring_continues() {
        let fake = damon(1, &[("4096", "12288", "3"), ("12288", "16384", "0"), ("1048576", "2097152", "40")]);
        let mut damon = Damon::at(&fake.path(""), false);
        damon.start(&[targets(&[7])]).unwrap();
        let range = |addresses, accesses| MonitoredRange { addresses, accesses };
        let ranges = vec![range(1 << 20..2 << 20, 40), range(4096..12_288, 3), range(12_288..16_384, 0)];
        assert_eq!(damon.read_ranges(0, Duration::from_secs(60)), (vec![Some(ranges)], 0));
        assert!(damon.is_running());
    }

    #[test]
    fn ranges_are_read_in_turn_to_the_last_entry() {
        let fake = damon(3, &[]);
        let mut damon = Damon::at(&fake.path(""), false);
        damon.start(&[targets(&[7]), targets(&[8]), targets(&[9])]).unwrap();
        let is_read = |first, limit| {
            let (results, next) = damon.read_ranges(first, limit);
            (results.iter().map(Option::is_some).collect::<Vec<_>>(), next)
        };
        assert_eq!(is_read(0, Duration::ZERO), (vec![true, false, false], 1), "at least one is read");
        assert_eq!(is_read(1, Duration::from_secs(60)), (vec![false, true, true], 0));
        assert_eq!(is_read(2, Duration::ZERO), (vec![false, false, true], 0));
    }

    #[test]
    fn process_that_cannot_be_monitored_does_not_affect_the_others() {
        let fake = damon(2, &[]);
        std::fs::remove_dir_all(fake.path(&format!("{KDAMONDS_FOLDER}/0/contexts"))).unwrap();
        let mut damon = Damon::at(&fake.path(""), false);
        damon.start(&[targets(&[7]), targets(&[8])]).unwrap();
        assert_eq!(fake.sysfs.text(format!("{KDAMONDS_FOLDER}/1/state")).unwrap(), "on");
        std::fs::remove_dir_all(fake.path(&format!("{KDAMONDS_FOLDER}/1/contexts"))).unwrap();
        assert!(matches!(damon.start(&[targets(&[7]), targets(&[8])]), Err(DamonError::Sysfs(_))));
        assert!(!damon.is_running());
    }

    #[test]
    fn damon_of_another_program_is_not_stopped() {
        let fake = damon(1, &[]);
        fake.files(KDAMONDS_FOLDER, &[("nr_kdamonds", "1")]);
        let error = Damon::at(&fake.path(""), false).start(&[targets(&[7])]).unwrap_err();
        assert!(matches!(error, DamonError::InUse), "{error}");
        assert_eq!(fake.sysfs.text(format!("{KDAMONDS_FOLDER}/0/state")).unwrap(), "");
        Damon::at(&fake.path(""), true).start(&[targets(&[7])]).unwrap();
    }

    #[test]
    fn missing_damon_is_an_error() {
        let fake = FakeSysfs::new(&[]);
        let error = Damon::at(&fake.path(""), false).start(&[targets(&[7])]).unwrap_err();
        assert!(error.to_string().contains("nr_kdamonds"), "{error}");
    }
}
