//! Tenants of Symbiosis, fair tiering and early eviction, each a cgroup (version 2): their names, the
//! kernel's counters, the limits on memory and I/O bandwidth that enforce a share, the request to demote
//! or evict pages, and the priority of I/O. Only the files `memory.high` and `io.max` (Symbiosis),
//! `memory.reclaim` (fair tiering or early eviction), and `io.bfq.weight` or `io.prio.class` (early
//! eviction) are written. Each file has one writer.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use rustix::io::Errno;
use units::Bytes;

use super::{
    memory::usage::PAGE_BYTES,
    sysfs::{Sysfs, SysfsError, parse_ranges},
};

/// Counters of demoted pages in `memory.stat`. Each kernel version has some of them.
const DEMOTION_KEYS: [&str; 4] =
    ["pgdemote_kswapd", "pgdemote_direct", "pgdemote_khugepaged", "pgdemote_proactive"];

/// Mount points of the unified hierarchy of cgroups, if the machine uses only version 2, and if it
/// uses both versions.
const UNIFIED_ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// File that exists in the root of the unified hierarchy.
const UNIFIED_ROOT_FILE: &str = "cgroup.controllers";

/// Number of cgroups of a tenant that are listed even if fewer processes are requested.
const CHILD_CGROUPS_MIN: usize = 1024;
/// File with the number of times that a cgroup, without its children, reached its own limits.
const LIMIT_EVENTS_FILE: &str = "memory.events.local";

/// Returns the root of the unified hierarchy of cgroups (version 2), if it is mounted.
pub fn find_unified_hierarchy() -> Option<Sysfs> {
    UNIFIED_ROOTS.map(Sysfs::at).into_iter().find(|root| root.has(UNIFIED_ROOT_FILE))
}

/// Parent directory of cgroups. Each of the cgroups is a tenant.
#[derive(Clone, Debug)]
pub struct Cgroups {
    folder: PathBuf,
    files: Sysfs,
}

/// Counters of a tenant since its creation, and its current usage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Current memory usage, without swap.
    pub memory: Bytes,
    /// Current usage of swap devices.
    pub swapped: Bytes,
    /// Hard limit `memory.max`, if the tenant's owner set one.
    pub memory_max: Option<Bytes>,
    /// Processor time, in microseconds.
    pub cpu_us: u64,
    /// Number of major page faults.
    pub major_faults: u64,
    /// Number of pages that were reclaimed and faulted back soon after.
    pub refaults: u64,
    /// Bytes read from the swap device.
    pub read: u64,
    /// Bytes written to the swap device.
    pub written: u64,
    /// Bytes read from and written to all other devices.
    pub other_device_bytes: u64,
    /// Microseconds in which some task was stalled on memory, and on I/O (pressure stall
    /// information); `None` if the kernel does not count stalls. A wait for a page can count as
    /// both: as a memory stall if the page was recently in use, and as an I/O stall while an I/O
    /// limit delays it.
    pub stalled_us: Option<(u64, u64)>,
}

impl Counters {
    /// Returns the current memory usage including swap.
    pub const fn memory_with_swap(&self) -> Bytes {
        Bytes::new(self.memory.get().saturating_add(self.swapped.get()))
    }
}

/// Memory of a tenant on each NUMA node, and page moves between nodes since its creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Memory that the kernel can move, by node: anonymous memory, and files in memory and in the page
    /// cache. Nodes without such memory may be missing.
    pub usage: BTreeMap<u32, Bytes>,
    /// The files in `usage`.
    pub files: BTreeMap<u32, Bytes>,
    /// Memory that the kernel demoted; `None` if the kernel does not count it per cgroup.
    pub demoted: Option<Bytes>,
    /// Memory that the kernel promoted because of NUMA balancing; `None` if the kernel does not count
    /// it per cgroup.
    pub promoted: Option<Bytes>,
    /// Memory that was reclaimed and faulted back soon after.
    pub refaulted: Bytes,
    /// Memory on active LRU lists; `None` if the kernel does not report it.
    pub active: Option<Bytes>,
}

/// Counters of a tenant whose memory is evicted to a swap device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictionCounters {
    /// Current memory usage, without swap.
    pub memory: Bytes,
    /// The smaller one of the limits `memory.high` and `memory.max`, if there is one.
    pub limit: Option<Bytes>,
    /// Memory that was reclaimed since the creation of the cgroup, including page cache.
    pub reclaimed: Bytes,
    /// Number of page faults that read a device.
    pub major_faults: u64,
    /// Processor time, in microseconds.
    pub cpu_us: u64,
    /// Number of times that the usage reached one of these limits.
    pub limit_hits: u64,
    /// Microseconds in which no task could run because of memory (pressure stall information, `full`).
    pub memory_stalled_us: u64,
    /// Microseconds in which some task was stalled on memory.
    pub memory_some_stalled_us: u64,
    /// Microseconds in which no task could run because of I/O.
    pub io_stalled_us: u64,
}

/// Result of a request to reclaim memory of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReclaimResult {
    /// The kernel reclaimed or demoted the requested amount.
    Complete,
    /// The kernel reclaimed or demoted less than the requested amount (EAGAIN).
    Incomplete,
}

/// Limits of a tenant; `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Memory above which the kernel reclaims pages (`memory.high`), in bytes.
    pub memory: Option<u64>,
    /// Maximum rate of reads from the swap device, in bytes per second.
    pub read: Option<u64>,
    /// Maximum rate of writes to the swap device, in bytes per second.
    pub written: Option<u64>,
}

impl Cgroups {
    /// Returns the tenants below a directory, such as `/sys/fs/cgroup/tenants`.
    pub fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), files: Sysfs::at(folder) }
    }

    /// Returns the names of all tenants in alphabetical order. Cgroups without a process are
    /// skipped.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn names(&self) -> Result<Vec<String>, SysfsError> {
        let failed = |errno| SysfsError::Read { path: self.folder.clone(), errno };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let Some(name) = entry.file_name().to_str().filter(|_| is_folder).map(str::to_owned) else {
                continue;
            };
            // A cgroup that was removed meanwhile is also skipped.
            if self
                .files
                .text(format!("{name}/cgroup.events"))
                .is_ok_and(|text| parse_value(&text, "populated") == Some(1))
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Returns the inode of a tenant's cgroup. It differs from that of an earlier cgroup of the same name.
    ///
    /// # Errors
    /// The tenant does not exist.
    pub fn inode(&self, name: &str) -> Result<u64, SysfsError> {
        let path = self.folder.join(name);
        match fs::symlink_metadata(&path) {
            Ok(metadata) => Ok(metadata.ino()),
            Err(errno) => Err(SysfsError::Read { path, errno }),
        }
    }

    /// Returns whether a tenant of this name exists.
    pub fn exists(&self, name: &str) -> bool {
        self.folder.join(name).is_dir()
    }

    /// Returns the counters of a tenant. `device` is the number of the swap device, such as
    /// `253:0`.
    ///
    /// # Errors
    /// The tenant does not exist, or lacks one of the controllers `memory`, `cpu` and `io`.
    pub fn counters(&self, name: &str, device: &str) -> Result<Counters, SysfsError> {
        let number = |file: &str| self.files.number(format!("{name}/{file}")).map(Bytes::new);
        let swapped = match number("memory.swap.current") {
            Err(error) if error.is_gone() => Bytes::ZERO, // a kernel without swap
            read => read?,
        };
        let io = self.text(name, "io.stat")?;
        let byte_count =
            |line: &str, key| find_value(line, key).and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
        let other_device_bytes = io.lines().filter(|line| !has_first_word(line, device));
        let other_device_bytes =
            other_device_bytes.map(|line| byte_count(line, "rbytes") + byte_count(line, "wbytes")).sum();
        let io = find_line(&io, device).unwrap_or_default();
        let stalled = |file| {
            let text = self.text(name, file).ok()?;
            find_value(find_line(&text, "some")?, "total")?.parse().ok()
        };
        let memory = self.text(name, "memory.stat")?;
        let memory_stat = |key| self.parse(name, "memory.stat", &memory, key);
        Ok(Counters {
            memory: self.memory(name)?,
            swapped,
            memory_max: self.read_limit(name, "memory.max")?,
            cpu_us: self.parse(name, "cpu.stat", &self.text(name, "cpu.stat")?, "usage_usec")?,
            major_faults: memory_stat("pgmajfault")?,
            refaults: memory_stat("workingset_refault_anon")? + memory_stat("workingset_refault_file")?,
            read: byte_count(io, "rbytes"),
            written: byte_count(io, "wbytes"),
            other_device_bytes,
            stalled_us: stalled("memory.pressure").zip(stalled("io.pressure")),
        })
    }

    /// Returns the name of the tenant to which a process belongs, also if the process is in a child cgroup;
    /// `None` if it belongs to none, or has ended. `proc` is the root of procfs. Owners of cgroups cannot
    /// delay the answer by creating many processes or cgroups.
    ///
    /// # Errors
    /// The cgroup of a running process cannot be read.
    pub fn tenant_of(&self, proc: &Sysfs, pid: u32) -> Result<Option<String>, SysfsError> {
        let text = match proc.text(format!("{pid}/cgroup")) {
            Err(error) if error.is_gone() => return Ok(None),
            read => read?,
        };
        let path = text.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or_default();
        let below = Path::new(path.trim_start_matches('/')).strip_prefix(self.path_below_root());
        let name = below.ok().and_then(|below| below.components().next()?.as_os_str().to_str());
        Ok(name.map(str::to_owned))
    }

    /// Returns the path of the tenants' directory relative to the root of the hierarchy.
    fn path_below_root(&self) -> PathBuf {
        let folder = fs::canonicalize(&self.folder).unwrap_or_else(|_| self.folder.clone());
        let is_cgroup = |folder: &Path| folder.join(UNIFIED_ROOT_FILE).exists();
        let mut root = match folder.parent() {
            Some(parent) if is_cgroup(parent) || !is_cgroup(&folder) => parent,
            _ => &folder, // the tenants' directory is the root itself
        };
        while let Some(parent) = root.parent().filter(|parent| is_cgroup(parent)) {
            root = parent;
        }
        folder.strip_prefix(root).unwrap_or(&folder).to_owned()
    }

    /// Returns the nodes on which the kernel may place memory of a tenant; `None` if they are not limited.
    pub fn memory_nodes(&self, name: &str) -> Option<BTreeSet<u32>> {
        let text = self.files.text(format!("{name}/cpuset.mems.effective")).ok()?;
        Some(parse_ranges::<u32>(&text)?.into_iter().flatten().collect())
    }

    /// Returns the identifiers of at most `max` processes of a tenant, including processes in its child
    /// cgroups. At most `max` and [`CHILD_CGROUPS_MIN`] cgroups are listed.
    ///
    /// # Errors
    /// The tenant does not exist, or its files cannot be read.
    pub fn processes(&self, name: &str, max: usize) -> Result<Vec<u32>, SysfsError> {
        let own = self.folder.join(name);
        let (mut pids, mut folders, mut visited) = (Vec::new(), vec![own.clone()], 0);
        while let Some(folder) = folders.pop() {
            visited += 1;
            let text = match self.files.text(folder.join("cgroup.procs")) {
                Ok(text) => text,
                // A child cgroup was removed meanwhile, or is threaded, so that its processes are
                // listed in its parent.
                Err(error) if folder != own && (error.is_gone() || is_threaded_cgroup(&error)) => continue,
                Err(error) => return Err(error),
            };
            // Processes in another PID namespace are listed as 0.
            pids.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()).filter(|pid| *pid > 0));
            let rest = max.max(CHILD_CGROUPS_MIN).saturating_sub(visited + folders.len());
            if pids.len() >= max {
                break;
            }
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            let inside = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            folders.extend(inside.map(|entry| entry.path()).take(rest));
        }
        pids.truncate(max);
        Ok(pids)
    }

    /// Returns the limits of a tenant. `device` is the number of the swap device.
    ///
    /// # Errors
    /// The tenant does not exist, or its files cannot be read.
    pub fn limits(&self, name: &str, device: &str) -> Result<Limits, SysfsError> {
        let io = self.text(name, "io.max")?;
        let of = |key| Some(find_value(find_line(&io, device)?, key)?.parse().ok());
        let (read, written): (Option<u64>, Option<u64>) = (of("rbps").flatten(), of("wbps").flatten());
        Ok(Limits { memory: self.read_limit(name, "memory.high")?.map(Bytes::get), read, written })
    }

    /// Sets `memory.high`, above which the kernel reclaims pages, in bytes; `None` removes the
    /// limit. The call may block until the pages above the limit are reclaimed.
    ///
    /// # Errors
    /// The tenant does not exist, or the kernel rejects the limit.
    pub fn limit_memory(&self, name: &str, to: Option<u64>) -> Result<(), SysfsError> {
        self.files.write(format!("{name}/memory.high"), &format_limit(to))
    }

    /// Sets the limits for reads from and writes to a device, in bytes per second; `None` removes a
    /// limit.
    ///
    /// # Errors
    /// The tenant does not exist, or the kernel rejects the limits.
    pub fn limit_bandwidth(
        &self,
        name: &str,
        device: &str,
        read: Option<u64>,
        written: Option<u64>,
    ) -> Result<(), SysfsError> {
        let limits = format!("{device} rbps={} wbps={}", format_limit(read), format_limit(written));
        self.files.write(format!("{name}/io.max"), &limits)
    }

    /// Returns the memory of a tenant on each NUMA node, and its page moves.
    ///
    /// # Errors
    /// The tenant does not exist, or lacks the controller `memory`.
    pub fn tier_counters(&self, name: &str) -> Result<TierCounters, SysfsError> {
        let nodes = self.text(name, "memory.numa_stat")?;
        let (mut usage, mut files) = (BTreeMap::new(), BTreeMap::new());
        for kind in ["anon", "file"] {
            let line = find_line(&nodes, kind).and_then(parse_node_values);
            let line = line.ok_or_else(|| {
                self.files.unreadable_error(format!("{name}/memory.numa_stat"), truncate(&nodes), kind)
            })?;
            for (node, bytes) in line {
                *usage.entry(node).or_insert(0) += bytes;
                if kind == "file" {
                    files.insert(node, Bytes::new(bytes));
                }
            }
        }
        let memory = self.text(name, "memory.stat")?;
        let sum = |keys: &[&str], unit: u64| {
            let counts: Vec<u64> = keys.iter().filter_map(|key| parse_value(&memory, key)).collect();
            let sum = counts.iter().fold(0, |sum: u64, count| sum.saturating_add(*count));
            (!counts.is_empty()).then(|| Bytes::new(sum.saturating_mul(unit)))
        };
        let pages = |keys: &[&str]| sum(keys, PAGE_BYTES);
        Ok(TierCounters {
            usage: usage.into_iter().map(|(node, bytes)| (node, Bytes::new(bytes))).collect(),
            files,
            demoted: pages(&DEMOTION_KEYS),
            promoted: pages(&["pgpromote_success"]),
            refaulted: pages(&["workingset_refault_anon", "workingset_refault_file"]).unwrap_or_default(),
            active: sum(&["active_anon", "active_file"], 1),
        })
    }

    /// Returns the counters of a tenant whose memory is evicted.
    ///
    /// # Errors
    /// The tenant does not exist, lacks one of the controllers `memory` and `cpu`, or the kernel does not
    /// count stalls.
    pub fn eviction_counters(&self, name: &str) -> Result<EvictionCounters, SysfsError> {
        let memory = self.text(name, "memory.stat")?;
        let memory_stat = |key| self.parse(name, "memory.stat", &memory, key);
        let limits = [self.read_limit(name, "memory.high")?, self.read_limit(name, "memory.max")?];
        let events = self.text(name, LIMIT_EVENTS_FILE)?;
        let event = |key| self.parse(name, LIMIT_EVENTS_FILE, &events, key);
        let stalled = |file: &str, tasks: &'static str| {
            let text = self.text(name, file)?;
            let stalled = find_line(&text, tasks).and_then(|line| find_value(line, "total")?.parse().ok());
            stalled
                .ok_or_else(|| self.files.unreadable_error(format!("{name}/{file}"), truncate(&text), tasks))
        };
        Ok(EvictionCounters {
            memory: self.memory(name)?,
            limit: limits.into_iter().flatten().min(),
            reclaimed: Bytes::new(memory_stat("pgsteal")?.saturating_mul(PAGE_BYTES)),
            major_faults: memory_stat("pgmajfault")?,
            cpu_us: self.parse(name, "cpu.stat", &self.text(name, "cpu.stat")?, "usage_usec")?,
            limit_hits: event("high")?.saturating_add(event("max")?),
            memory_stalled_us: stalled("memory.pressure", "full")?,
            memory_some_stalled_us: stalled("memory.pressure", "some")?,
            io_stalled_us: stalled("io.pressure", "full")?,
        })
    }

    /// Returns the memory of a tenant that was reclaimed since the creation of its cgroup.
    ///
    /// # Errors
    /// The tenant does not exist.
    pub fn reclaimed(&self, name: &str) -> Result<Bytes, SysfsError> {
        let pages = self.parse(name, "memory.stat", &self.text(name, "memory.stat")?, "pgsteal")?;
        Ok(Bytes::new(pages.saturating_mul(PAGE_BYTES)))
    }

    /// Returns the current memory usage of a tenant, without swap.
    ///
    /// # Errors
    /// The tenant does not exist.
    pub fn memory(&self, name: &str) -> Result<Bytes, SysfsError> {
        self.files.number(format!("{name}/memory.current")).map(Bytes::new)
    }

    /// Sets the priority of a tenant's I/O in a file such as `io.bfq.weight`.
    ///
    /// # Errors
    /// The tenant does not exist, or the kernel rejects the value.
    pub fn set_io_priority(&self, name: &str, file: &str, value: &str) -> Result<(), SysfsError> {
        self.files.write(format!("{name}/{file}"), value)
    }

    /// Requests the kernel to reclaim memory of a tenant. With demotion, the kernel moves the least
    /// recently used pages to a lower tier. The call blocks until the kernel has finished.
    ///
    /// # Errors
    /// The tenant does not exist, or the kernel rejects the request.
    pub fn reclaim(&self, name: &str, bytes: Bytes) -> Result<ReclaimResult, SysfsError> {
        match self.files.write(format!("{name}/memory.reclaim"), &bytes.get().to_string()) {
            Ok(()) => Ok(ReclaimResult::Complete),
            Err(SysfsError::Write { errno, .. }) if errno.kind() == io::ErrorKind::WouldBlock => {
                Ok(ReclaimResult::Incomplete)
            }
            Err(error) => Err(error),
        }
    }

    /// Returns whether the kernel can reclaim memory of a tenant on request.
    pub fn can_reclaim(&self, name: &str) -> bool {
        self.files.has(format!("{name}/memory.reclaim"))
    }

    fn text(&self, name: &str, file: &str) -> Result<String, SysfsError> {
        self.files.text(format!("{name}/{file}"))
    }

    /// Reads a limit in bytes; `None` for `max`.
    fn read_limit(&self, name: &str, file: &str) -> Result<Option<Bytes>, SysfsError> {
        let text = self.text(name, file)?;
        if text == "max" {
            return Ok(None);
        }
        let bytes = text.parse().map(|bytes| Some(Bytes::new(bytes)));
        bytes.map_err(|_| self.files.unreadable_error(format!("{name}/{file}"), truncate(&text), "a number"))
    }

    fn parse(&self, name: &str, file: &str, text: &str, key: &'static str) -> Result<u64, SysfsError> {
        parse_value(text, key)
            .ok_or_else(|| self.files.unreadable_error(format!("{name}/{file}"), truncate(text), key))
    }
}

/// Formats a limit for a file of a cgroup; `max` means unlimited.
fn format_limit(limit: Option<u64>) -> String {
    limit.map_or_else(|| "max".to_owned(), |limit| limit.to_string())
}

/// Shortens a text to 100 characters for an error message.
fn truncate(text: &str) -> String {
    text.chars().take(100).collect()
}

/// Returns the value of a key in lines such as `pgmajfault 17`.
pub(super) fn parse_value(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    rest.trim().parse().ok()
}

/// Returns the line whose first word is `word`.
fn find_line<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find(|line| has_first_word(line, word))
}

fn has_first_word(line: &str, word: &str) -> bool {
    line.split_whitespace().next() == Some(word)
}

/// Returns the value of a key in a line such as `253:0 rbytes=4096 wbytes=0`.
fn find_value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

/// Parses the values of a line such as `anon N0=4096 N2=0`, by node.
fn parse_node_values(line: &str) -> Option<Vec<(u32, u64)>> {
    let value = |word: &str| {
        let (node, bytes) = word.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().ok()?, bytes.parse().ok()?))
    };
    line.split_whitespace().skip(1).map(value).collect()
}

fn is_threaded_cgroup(error: &SysfsError) -> bool {
    let code = Errno::OPNOTSUPP.raw_os_error();
    matches!(error, SysfsError::Read { errno, .. } if errno.raw_os_error() == Some(code))
}

/// Simulated cgroups in a temporary directory, for tests. Their counters do not change, and all
/// writes succeed.
#[cfg(test)]
pub(crate) mod fake {
    use super::Cgroups;
    use crate::host::sysfs::fake::FakeSysfs;

    /// Creates a tenant without usage for each name.
    pub(crate) fn cgroups(names: &[&str]) -> (FakeSysfs, Cgroups) {
        let fake = FakeSysfs::new(&[]);
        names.iter().for_each(|name| add(&fake, name));
        let cgroups = Cgroups::at(&fake.path(""));
        (fake, cgroups)
    }

    /// Adds a tenant without usage.
    pub(crate) fn add(fake: &FakeSysfs, name: &str) {
        let stat = "anon 4096\npgfault 9\npgmajfault 0\npgsteal 0\nworkingset_refault_anon 0\nworkingset_refault_file 0";
        let files = [
            ("cgroup.events", "populated 1\nfrozen 0"),
            ("cgroup.procs", "1\n2"),
            ("memory.current", "0"),
            ("memory.swap.current", "0"),
            ("memory.max", "max"),
            ("memory.high", "max"),
            ("memory.stat", stat),
            ("memory.numa_stat", "anon N0=4096\nfile N0=0\nshmem N0=0"),
            ("memory.events.local", "low 0\nhigh 0\nmax 0"),
            ("memory.reclaim", ""),
            (
                "memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0",
            ),
            ("io.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 total=0"),
            ("cpu.stat", "usage_usec 0\nuser_usec 0"),
            ("io.stat", ""),
            ("io.max", ""),
        ];
        fake.files(name, &files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    #[test]
    fn cgroup_counters_are_parsed() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        let files = [
            ("memory.current", "104857600"),
            ("memory.swap.current", "4096"),
            ("memory.max", "209715200"),
            ("memory.stat", "anon 1\npgmajfault 17\nworkingset_refault_anon 5\nworkingset_refault_file 6"),
            ("cpu.stat", "usage_usec 1500000\nuser_usec 1"),
            (
                "io.stat",
                "253:1 rbytes=1 wbytes=2\n253:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0",
            ),
            (
                "memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=777\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1",
            ),
            ("io.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=888"),
        ];
        fake.files("db", &files);
        let counters = Counters {
            memory: Bytes::mib(100),
            swapped: Bytes::new(4096),
            memory_max: Some(Bytes::mib(200)),
            cpu_us: 1_500_000,
            major_faults: 17,
            refaults: 11,
            read: 4096,
            written: 8192,
            other_device_bytes: 3,
            stalled_us: Some((777, 888)),
        };
        assert_eq!(cgroups.counters("db", "253:0").unwrap(), counters);
    }

    #[test]
    fn eviction_counters_are_parsed() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        let files = [
            ("memory.current", "104857600"),
            ("memory.max", "209715200"),
            ("memory.stat", "anon 1\npgsteal 3\npgsteal_direct 2\npgmajfault 17"),
            ("cpu.stat", "usage_usec 1500000\nuser_usec 1"),
            ("memory.events.local", "low 1\nhigh 20\nmax 300\noom 4000"),
            ("memory.pressure", "some avg10=0.00 total=777\nfull avg10=0.00 total=333"),
            ("io.pressure", "some avg10=0.00 total=888\nfull avg10=0.00 total=222"),
        ];
        fake.files("db", &files);
        let mut counters = EvictionCounters {
            memory: Bytes::mib(100),
            limit: Some(Bytes::mib(200)),
            reclaimed: Bytes::new(3 * 4096),
            major_faults: 17,
            cpu_us: 1_500_000,
            limit_hits: 320,
            memory_stalled_us: 333,
            memory_some_stalled_us: 777,
            io_stalled_us: 222,
        };
        assert_eq!(cgroups.eviction_counters("db").unwrap(), counters);
        fake.files("db", &[("memory.high", "157286400")]);
        counters.limit = Some(Bytes::mib(150));
        assert_eq!(cgroups.eviction_counters("db").unwrap(), counters);
        fake.files("db", &[("memory.pressure", "some avg10=0.00 total=777")]);
        let error = cgroups.eviction_counters("db").unwrap_err().to_string();
        assert!(error.ends_with("expected full"), "{error}");
    }

    #[test]
    fn memory_of_each_node_is_parsed() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        let nodes = "anon N0=8192 N2=4096\nfile N0=4096 N2=0\nkernel_stack N0=1 N2=1\nshmem N0=4096 N2=0";
        let stat = "anon 1\nactive_anon 4096\nactive_file 8192\npgdemote_kswapd 1\npgdemote_direct 2\nworkingset_refault_anon 1\nworkingset_refault_file 1";
        fake.files("db", &[("memory.numa_stat", nodes), ("memory.stat", stat)]);
        let expected = TierCounters {
            usage: [(0, Bytes::new(12_288)), (2, Bytes::new(4096))].into(),
            files: [(0, Bytes::new(4096)), (2, Bytes::ZERO)].into(),
            demoted: Some(Bytes::new(3 * 4096)),
            promoted: None,
            refaulted: Bytes::new(2 * 4096),
            active: Some(Bytes::new(12_288)),
        };
        assert_eq!(cgroups.tier_counters("db").unwrap(), expected);
        for invalid in ["anon N0=x\nfile N0=0", "file N0=0", "anon 0=1\nfile N0=0"] {
            fake.files("db", &[("memory.numa_stat", invalid)]);
            let error = cgroups.tier_counters("db").unwrap_err().to_string();
            assert!(error.ends_with("expected anon"), "{invalid}: {error}");
        }
        assert!(cgroups.tier_counters("cache").unwrap_err().is_gone());
    }

    #[test]
    fn reclaim_requests_bytes_of_an_existing_tenant() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        assert_eq!(cgroups.reclaim("db", Bytes::mib(16)).unwrap(), ReclaimResult::Complete);
        assert_eq!(fake.sysfs.text("db/memory.reclaim").unwrap(), "16777216");
        assert!(cgroups.can_reclaim("db") && !cgroups.can_reclaim("cache"));
        cgroups.reclaim("cache", Bytes::mib(16)).unwrap_err();
    }

    #[test]
    fn tenants_are_cgroups_with_processes() {
        let (fake, cgroups) = fake::cgroups(&["b", "a", "empty"]);
        fake.files("empty", &[("cgroup.events", "populated 0")]);
        fake.files("", &[("cgroup.procs", "")]);
        assert_eq!(cgroups.names().unwrap(), ["a", "b"]);
        fake.files("a/below", &[("cgroup.procs", "3")]);
        assert_eq!(cgroups.processes("a", 9).unwrap(), [1, 2, 3]);
        assert_eq!(cgroups.processes("a", 2).unwrap(), [1, 2]);
        for at in 0..CHILD_CGROUPS_MIN + 9 {
            fake.files(&format!("a/below/{at}"), &[("cgroup.procs", "4")]);
        }
        assert_eq!(cgroups.processes("a", 9).unwrap().len(), 9);
        assert_eq!(cgroups.processes("a", 5000).unwrap().len(), 3 + CHILD_CGROUPS_MIN + 9);
        fake.files("a/below", &[("cgroup.procs", "")]);
        fake.files("a", &[("cgroup.procs", "")]);
        let listed = cgroups.processes("a", CHILD_CGROUPS_MIN).unwrap().len();
        assert_eq!(listed, CHILD_CGROUPS_MIN - 2, "the tenant's cgroup and its child have no process");
    }

    #[test]
    fn tenant_of_a_process_is_found_by_its_cgroup() {
        let proc = FakeSysfs::new(&[
            ("7/cgroup", "9:memory:/x\n0::/tenants/db/below/it"),
            ("8/cgroup", "0::/tenants"),
            ("9/cgroup", "0::/others/db"),
        ]);
        let cgroups = Cgroups::at(Path::new("/sys/fs/cgroup/tenants"));
        let tenant = |pid: u32| cgroups.tenant_of(&proc.sysfs, pid).unwrap();
        assert_eq!(tenant(7).as_deref(), Some("db"));
        assert_eq!([8, 9, 10].map(tenant), [None, None, None]);
        // The directory of the tenants can be the root of the hierarchy.
        let fake = FakeSysfs::new(&[("cgroup.controllers", "")]);
        let all = Cgroups::at(&fake.path(""));
        assert_eq!(all.tenant_of(&proc.sysfs, 9).unwrap().as_deref(), Some("others"));
        fs::create_dir_all(proc.path("11/cgroup")).unwrap();
        cgroups.tenant_of(&proc.sysfs, 11).unwrap_err();
    }

    #[test]
    fn memory_of_a_tenant_is_limited_to_nodes_by_its_cpuset() {
        let (fake, cgroups) = fake::cgroups(&["a", "b"]);
        fake.files("a", &[("cpuset.mems.effective", "0,2-3")]);
        assert_eq!(cgroups.memory_nodes("a"), Some([0, 2, 3].into()));
        assert_eq!(cgroups.memory_nodes("b"), None);
    }

    #[test]
    fn limits_are_read_back_as_written() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        assert_eq!(cgroups.limits("db", "253:0").unwrap(), Limits::default());
        cgroups.limit_memory("db", Some(64 << 20)).unwrap();
        fake.files("db", &[("io.max", "253:0 rbps=5000000 wbps=max riops=max wiops=max")]);
        let limits = Limits { memory: Some(64 << 20), read: Some(5_000_000), written: None };
        assert_eq!(cgroups.limits("db", "253:0").unwrap(), limits);
    }

    #[test]
    fn missing_cgroup_differs_from_invalid_file() {
        let (fake, cgroups) = fake::cgroups(&["db"]);
        assert!(cgroups.counters("cache", "253:0").unwrap_err().is_gone());
        let gone = units::chain(&cgroups.limit_memory("cache", Some(1 << 20)).unwrap_err());
        assert!(
            gone.ends_with("No such file or directory (os error 2)") && !cgroups.exists("cache"),
            "{gone}"
        );
        fake.files("db", &[("cpu.stat", "invalid")]);
        let error = cgroups.counters("db", "253:0").unwrap_err();
        assert!(!error.is_gone());
        assert!(
            error.to_string().ends_with("db/cpu.stat contains \"invalid\", expected usage_usec"),
            "{error}"
        );
    }
}
