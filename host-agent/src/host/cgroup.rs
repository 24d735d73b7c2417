//! Tenants of Symbiosis, each a cgroup (version 2): their names, the kernel's counters, and the
//! limits on memory and I/O bandwidth that enforce a share. Only the files `memory.high` and
//! `io.max` are written.

use std::{
    fs,
    path::{Path, PathBuf},
};

use units::Bytes;

use super::sysfs::{Sysfs, SysfsError};

/// Mount points of the unified hierarchy of cgroups, if the machine uses only version 2, and if it
/// uses both versions.
const UNIFIED_ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// File that exists in the root of the unified hierarchy.
const UNIFIED_ROOT_FILE: &str = "cgroup.controllers";

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
            memory: number("memory.current")?,
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

    /// Returns the identifiers of all processes of a tenant, including processes in its child
    /// cgroups.
    ///
    /// # Errors
    /// The tenant does not exist, or its files cannot be read.
    pub fn processes(&self, name: &str) -> Result<Vec<u32>, SysfsError> {
        let own = self.folder.join(name);
        let (mut pids, mut folders) = (Vec::new(), vec![own.clone()]);
        while let Some(folder) = folders.pop() {
            let text = match self.files.text(folder.join("cgroup.procs")) {
                Ok(text) => text,
                // A child cgroup was removed meanwhile, or is threaded, so that its processes are
                // listed in its parent.
                Err(error) if folder != own && (error.is_gone() || is_threaded_cgroup(&error)) => continue,
                Err(error) => return Err(error),
            };
            pids.extend(text.lines().filter_map(|pid| pid.parse::<u32>().ok()));
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            let inside = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            folders.extend(inside.map(|entry| entry.path()));
        }
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

    fn text(&self, name: &str, file: &str) -> Result<String, SysfsError> {
        self.files.text(format!("{name}/{file}"))
    }

    /// Reads a limit in bytes; `None` for `max`.
    fn read_limit(&self, name: &str, file: &str) -> Result<Option<Bytes>, SysfsError> {
        if self.text(name, file)? == "max" {
            return Ok(None);
        }
        Ok(Some(Bytes::new(self.files.number(format!("{name}/{file}"))?)))
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

fn is_threaded_cgroup(error: &SysfsError) -> bool {
    let code = rustix::io::Errno::OPNOTSUPP.raw_os_error();
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
        let stat = "anon 4096\npgfault 9\npgmajfault 0\nworkingset_refault_anon 0\nworkingset_refault_file 0";
        let files = [
            ("cgroup.events", "populated 1\nfrozen 0"),
            ("cgroup.procs", "1\n2"),
            ("memory.current", "0"),
            ("memory.swap.current", "0"),
            ("memory.max", "max"),
            ("memory.high", "max"),
            ("memory.stat", stat),
            (
                "memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0",
            ),
            ("io.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=0"),
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
    fn tenants_are_cgroups_with_processes() {
        let (fake, cgroups) = fake::cgroups(&["b", "a", "empty"]);
        fake.files("empty", &[("cgroup.events", "populated 0")]);
        fake.files("", &[("cgroup.procs", "")]);
        assert_eq!(cgroups.names().unwrap(), ["a", "b"]);
        fake.files("a/below", &[("cgroup.procs", "3")]);
        assert_eq!(cgroups.processes("a").unwrap(), [1, 2, 3]);
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
