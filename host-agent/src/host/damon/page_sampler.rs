//! Sampling of accesses to the pool memory of a VM by DAMON, for VMMs that do not sample accesses
//! themselves. DAMON clears the accessed bit of one random page in each of many address ranges of
//! equal size, and checks after the window whether the bit is set again, for the page tables of the
//! guest, too. The result thus has the same meaning as the sampling of `vmm-plugin`.
//!
//! Only mappings of the slices' files are sampled. These are memfds or files, never device memory.

use std::{
    collections::BTreeSet,
    io,
    ops::Range,
    path::Path,
    time::{Duration, Instant},
};

use pool::agent::Process;
use units::limits::{ACCESS_SAMPLE_PAGES, DAMON_REGIONS_MAX, DAMON_WINDOW};

use super::{Damon, DamonError, Settings, Target};
use crate::host::{
    access_profile::AccessProfile,
    memory::usage::PAGE_BYTES,
    process::{FileId, FileMappings, ProcessError, ProcessHandle, mappings_of},
};

/// Time before the end of the window at which the result is requested. A request waits for the end
/// of the window; a request after the end would wait for the next window.
const REQUEST_LEAD: Duration = Duration::from_millis(300);
/// Time limit for reading a result. Some kernels return it one window late.
const RESULT_LIMIT: Duration = Duration::from_secs(20);

/// Reason why the accesses of a VM cannot be sampled.
#[derive(Debug, thiserror::Error)]
pub enum PageSamplerError {
    /// DAMON is missing, in use, or rejects a setting.
    #[error(transparent)]
    Damon(#[from] DamonError),
    /// The process of the VM cannot be inspected.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The pid belongs to no process, or to another process.
    #[error("process {pid} is not the process of the VM any more")]
    NotTheProcess {
        /// Registered pid.
        pid: u32,
    },
    /// The mappings of the process cannot be listed.
    #[error("cannot list the mappings of process {pid}")]
    Mappings {
        /// Registered pid.
        pid: u32,
        /// Cause.
        #[source]
        error: io::Error,
    },
    /// The process does not map the pool memory.
    #[error("process {pid} maps no pool memory")]
    NotMapped {
        /// Registered pid.
        pid: u32,
    },
    /// The process maps the pool memory in too many pieces.
    #[error("process {pid} maps its pool memory in more than {DAMON_REGIONS_MAX} pieces")]
    TooManyMappings {
        /// Registered pid.
        pid: u32,
    },
    /// DAMON returned no result.
    #[error("DAMON returned no result for process {pid}")]
    NoResult {
        /// Registered pid.
        pid: u32,
    },
}

/// Number of sampled pages, and of those that were accessed in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSample {
    /// Number of sampled pages.
    pub sampled: u32,
    /// Number of accessed pages.
    pub accessed: u32,
}

/// Sampler of page accesses by DAMON. The agent requires exclusive use of DAMON.
#[derive(Debug)]
pub struct PageSampler {
    damon: Damon,
}

impl PageSampler {
    /// Creates a sampler. `sys` is the root of sysfs. `is_own` means that an earlier agent started
    /// the kdamonds that exist.
    pub fn at(sys: &Path, is_own: bool) -> Self {
        let settings = Settings {
            sample_interval_us: DAMON_WINDOW.as_ms() * 1000,
            samples_per_result: 1,
            has_fixed_ranges: true,
        };
        Self { damon: Damon::with_settings(sys, is_own, settings) }
    }

    /// Stops sampling by this agent, and checks that no other program uses DAMON.
    ///
    /// # Errors
    /// [`PageSamplerError::Damon`].
    pub fn check_available(&mut self) -> Result<(), PageSamplerError> {
        Ok(self.damon.check_available()?)
    }

    /// Returns whether DAMON runs for this sampler.
    pub fn is_running(&self) -> bool {
        self.damon.is_running()
    }

    /// Starts to sample the mappings of these files by a process. [`PageSampler::finish`] must follow
    /// after [`PageSampler::wait_time`].
    ///
    /// # Errors
    /// [`PageSamplerError`]. Nothing is sampled after an error.
    pub fn start(
        &mut self,
        process: &Process,
        files: &BTreeSet<FileId>,
    ) -> Result<StartedSample, PageSamplerError> {
        let pid = process.pid;
        check_identity(process)?;
        let FileMappings { addresses, omitted } = mappings_of(pid, files, DAMON_REGIONS_MAX)
            .map_err(|error| PageSamplerError::Mappings { pid, error })?;
        if omitted > 0 {
            return Err(PageSamplerError::TooManyMappings { pid });
        }
        let ranges = divide(&addresses, ACCESS_SAMPLE_PAGES as usize);
        if ranges.is_empty() {
            return Err(PageSamplerError::NotMapped { pid });
        }
        let sampled = u32::try_from(ranges.len()).unwrap_or(u32::MAX);
        self.damon.start(&[vec![Target { pid, ranges, device_bytes: 0 }]])?;
        // DAMON refers to the process that had the pid at the start.
        if let Err(error) = check_identity(process) {
            self.damon.stop()?;
            return Err(error);
        }
        Ok(StartedSample { pid, sampled, started: Instant::now() })
    }

    /// Returns the time after [`PageSampler::start`] at which to call [`PageSampler::finish`].
    pub fn wait_time() -> Duration {
        DAMON_WINDOW.as_duration().saturating_sub(REQUEST_LEAD)
    }

    /// Waits for the end of the window and returns the result. Stops DAMON also after an error.
    ///
    /// # Errors
    /// [`PageSamplerError::NoResult`], or the kernel rejects a request.
    pub fn finish(&mut self, sample: StartedSample) -> Result<PageSample, PageSamplerError> {
        let profile = self.damon.finish(RESULT_LIMIT)?.pop().flatten();
        profile
            .and_then(|profile| count_pages(&profile, sample.sampled))
            .ok_or(PageSamplerError::NoResult { pid: sample.pid })
    }

    /// Stops DAMON, if this sampler uses it.
    ///
    /// # Errors
    /// The kernel rejects the request.
    pub fn stop(&mut self) -> Result<(), PageSamplerError> {
        Ok(self.damon.stop()?)
    }
}

/// Sampling that has started.
#[derive(Debug)]
pub struct StartedSample {
    pid: u32,
    sampled: u32,
    started: Instant,
}

impl StartedSample {
    /// Returns the time since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

fn check_identity(process: &Process) -> Result<(), PageSamplerError> {
    match ProcessHandle::open(process)? {
        Some(_) => Ok(()),
        None => Err(PageSamplerError::NotTheProcess { pid: process.pid }),
    }
}

/// Divides address ranges into about `count` ranges of whole pages, of equal size except for the last
/// one of each range.
fn divide(ranges: &[Range<usize>], count: usize) -> Vec<Range<usize>> {
    let page = usize::try_from(PAGE_BYTES).expect("a page fits into the address space");
    let total: usize = ranges.iter().map(Range::len).sum();
    let step = total.div_ceil(count).next_multiple_of(page).max(page);
    // Each range adds at most one smaller piece, so their number must remain bounded.
    let step = if ranges.len() + count > DAMON_REGIONS_MAX { usize::MAX } else { step };
    let divide = |range: &Range<usize>| {
        let end = range.end;
        range.clone().step_by(step).map(move |start| start..start.saturating_add(step).min(end))
    };
    ranges.iter().flat_map(divide).collect()
}

/// Converts the accessed part of the address ranges to a number of pages. `None` if DAMON reported
/// no ranges.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is between 0 and 1")]
fn count_pages(profile: &AccessProfile, sampled: u32) -> Option<PageSample> {
    let total: u64 = profile.regions.iter().map(|region| region.bytes).sum();
    let share = profile.touched_bytes() as f64 / total as f64;
    let accessed = (share * f64::from(sampled)).round() as u32;
    (total > 0).then_some(PageSample { sampled, accessed: accessed.min(sampled) })
}

#[cfg(test)]
mod tests {
    use std::{fs::File, process::Command};

    use super::*;
    use crate::host::{
        damon::{KDAMONDS_FOLDER, fake},
        process::{identify_process, make_memfd},
        sysfs::fake::FakeSysfs,
    };

    const PAGE: usize = 4096;

    /// The pieces cover exactly the ranges, consist of whole pages, and are bounded in number.
    #[test]
    fn divided_ranges_cover_the_memory() {
        let mut state = 7_u64;
        let mut random = |max: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap() % max
        };
        for _ in 0..500 {
            let (mut ranges, mut at) = (Vec::new(), 0);
            for _ in 0..=random(DAMON_REGIONS_MAX) {
                let start = at + random(3) * PAGE;
                at = start + (1 + random(5000)) * PAGE;
                ranges.push(start..at);
            }
            let pieces = divide(&ranges, 200);
            assert!(pieces.len() <= DAMON_REGIONS_MAX && pieces.len() >= ranges.len(), "{}", pieces.len());
            assert!(pieces.iter().all(|piece| !piece.is_empty() && piece.len() % PAGE == 0));
            let mut rest = pieces.iter();
            for range in &ranges {
                let mut at = range.start;
                while at < range.end {
                    let piece = rest.next().unwrap();
                    assert_eq!(piece.start, at);
                    at = piece.end;
                }
                assert_eq!(at, range.end);
            }
            assert!(rest.next().is_none());
        }
    }

    #[test]
    fn one_slice_is_divided_into_as_many_ranges_as_pages_are_sampled() {
        let divide_one = |bytes: usize| divide(&vec![0..bytes; 1], 200);
        assert_eq!(divide_one(1 << 30).len(), 200);
        assert_eq!(divide_one(PAGE), vec![0..PAGE; 1]);
        assert!(divide(&[], 200).is_empty());
    }

    /// Simulated DAMON that accepts the ranges of one process.
    fn damon(results: &[(&str, &str, &str)]) -> FakeSysfs {
        let tree = fake::damon(1, results);
        for at in 0..DAMON_REGIONS_MAX {
            let region = format!("{KDAMONDS_FOLDER}/0/contexts/0/targets/0/regions/{at}");
            tree.files(&region, &[("start", ""), ("end", "")]);
        }
        tree
    }

    fn identify_file(file: &File) -> BTreeSet<FileId> {
        [FileId::of(&file.metadata().unwrap())].into()
    }

    fn map(file: File) -> vm_memory::MmapRegion<()> {
        use vm_memory::{FileOffset, mmap::MmapRegionBuilder};
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let builder = MmapRegionBuilder::new(bytes).with_mmap_prot(libc::PROT_READ);
        builder.with_mmap_flags(libc::MAP_SHARED).with_file_offset(FileOffset::new(file, 0)).build().unwrap()
    }

    #[test]
    fn only_mappings_of_the_slices_are_sampled() {
        let (slice, other) = (make_memfd("tarn-a", 1 << 20).unwrap(), make_memfd("tarn-b", 1 << 20).unwrap());
        let files = identify_file(&slice);
        let (slice, _other) = (map(slice), map(other));
        // A quarter of the memory was accessed.
        let tree = damon(&[("0", "262144", "1"), ("262144", "1048576", "0")]);
        let mut sampler = PageSampler::at(&tree.path(""), false);
        let process = identify_process(std::process::id()).unwrap();
        let started = sampler.start(&process, &files).unwrap();
        let text = |file: &str| tree.sysfs.text(format!("{KDAMONDS_FOLDER}/{file}")).unwrap();
        let number = |file: &str| -> usize { text(&format!("0/contexts/0/{file}")).parse().unwrap() };
        assert_eq!(text("0/contexts/0/operations"), "fvaddr");
        let regions = number("targets/0/regions/nr_regions");
        assert_eq!(regions, 128, "pieces of two pages");
        let start = slice.as_ptr() as usize;
        assert_eq!(number("targets/0/regions/0/start"), start);
        assert_eq!(number("targets/0/regions/127/end"), start + (1 << 20));
        assert_eq!(number("monitoring_attrs/intervals/sample_us"), 5_000_000);
        assert_eq!(number("monitoring_attrs/intervals/aggr_us"), 5_000_000);
        assert_eq!(sampler.finish(started).unwrap(), PageSample { sampled: 128, accessed: 32 });
        assert_eq!(text("nr_kdamonds"), "0");
    }

    #[test]
    fn damon_of_another_program_is_not_used() {
        let tree = damon(&[]);
        tree.files(KDAMONDS_FOLDER, &[("nr_kdamonds", "1")]);
        let slice = make_memfd("tarn-c", 1 << 20).unwrap();
        let (files, _mapped) = (identify_file(&slice), map(slice));
        let process = identify_process(std::process::id()).unwrap();
        let error = PageSampler::at(&tree.path(""), false).start(&process, &files).unwrap_err();
        assert_eq!(error.to_string(), "another program uses DAMON");
        assert_eq!(tree.sysfs.number(format!("{KDAMONDS_FOLDER}/nr_kdamonds")).unwrap(), 1);
    }

    #[test]
    fn other_processes_and_unmapped_memory_are_refused() {
        let tree = damon(&[]);
        let mut sampler = PageSampler::at(&tree.path(""), false);
        let files = identify_file(&make_memfd("tarn-d", 1 << 20).unwrap());
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = identify_process(child.id()).unwrap();
        let error = sampler.start(&process, &files).unwrap_err();
        assert!(matches!(error, PageSamplerError::NotMapped { .. }), "{error}");
        let other = Process { started: process.started + 1, ..process.clone() };
        assert!(matches!(sampler.start(&other, &files), Err(PageSamplerError::NotTheProcess { .. })));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(sampler.start(&process, &files), Err(PageSamplerError::NotTheProcess { .. })));
        assert_eq!(tree.sysfs.number(format!("{KDAMONDS_FOLDER}/nr_kdamonds")).unwrap(), 0);
    }

    #[test]
    fn empty_result_is_an_error() {
        let tree = damon(&[]);
        let slice = make_memfd("tarn-e", 1 << 20).unwrap();
        let (files, _mapped) = (identify_file(&slice), map(slice));
        let mut sampler = PageSampler::at(&tree.path(""), false);
        let started = sampler.start(&identify_process(std::process::id()).unwrap(), &files).unwrap();
        assert!(matches!(sampler.finish(started), Err(PageSamplerError::NoResult { .. })));
    }
}
