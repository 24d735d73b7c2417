//! Memory that the cgroup of a process may still use. The kernel may end a process that exceeds the limit
//! of its cgroup, so the limit is checked before a process receives a request that needs memory.

use units::Bytes;

use super::{
    cgroup::parse_value,
    sysfs::{Sysfs, SysfsError},
};

/// Memory that is free in the cgroup with the least free memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    /// Path of the cgroup below the root of the hierarchy.
    pub cgroup: String,
    /// Memory below the limit `memory.max`, and file cache that the kernel can reclaim.
    pub free: Bytes,
}

/// Returns how much more memory a process in this cgroup may use, considering the limits of the cgroup
/// and of all cgroups that contain it. `None` without a limit. `cgroups` is the root of the hierarchy,
/// and `cgroup` is a path below it that begins with a slash.
///
/// # Errors
/// A file of a cgroup cannot be read or parsed.
pub fn read_free_memory(cgroups: &Sysfs, cgroup: &str) -> Result<Option<FreeMemory>, SysfsError> {
    let mut least: Option<FreeMemory> = None;
    let mut folder = cgroup.trim_start_matches('/');
    while !folder.is_empty() {
        if let Some(free) = read_free_of(cgroups, folder)?
            && least.as_ref().is_none_or(|least| free < least.free)
        {
            least = Some(FreeMemory { cgroup: format!("/{folder}"), free });
        }
        folder = folder.rsplit_once('/').map_or("", |(parent, _)| parent);
    }
    Ok(least)
}

/// Returns the free memory of one cgroup; `None` without a limit.
fn read_free_of(cgroups: &Sysfs, folder: &str) -> Result<Option<Bytes>, SysfsError> {
    let file = format!("{folder}/memory.max");
    let text = match cgroups.text(&file) {
        Err(error) if error.is_gone() => return Ok(None), // without the controller
        read => read?,
    };
    if text == "max" {
        return Ok(None);
    }
    let max: u64 = text.parse().map_err(|_| cgroups.unreadable_error(file, text, "max or a number"))?;
    let used = cgroups.number(format!("{folder}/memory.current"))?;
    let stat = cgroups.text(format!("{folder}/memory.stat"))?;
    let cache = ["active_file", "inactive_file"].map(|name| parse_value(&stat, name).unwrap_or(0));
    let used = used.saturating_sub(cache.iter().sum());
    Ok(Some(Bytes::new(max.saturating_sub(used))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    fn fake() -> FakeSysfs {
        let fake = FakeSysfs::new(&[]);
        for (cgroup, max, current, cache) in
            [("vms", "1000", "600", 0), ("vms/a", "500", "450", 100), ("vms/b", "max", "100", 0)]
        {
            let stat = format!("anon 1\nactive_file {cache}\ninactive_file 0");
            fake.files(cgroup, &[("memory.max", max), ("memory.current", current), ("memory.stat", &stat)]);
        }
        fake
    }

    fn free(fake: &FakeSysfs, cgroup: &str) -> Option<(String, u64)> {
        read_free_memory(&fake.sysfs, cgroup).unwrap().map(|least| (least.cgroup, least.free.get()))
    }

    #[test]
    fn least_free_memory_of_all_containing_cgroups_counts() {
        let fake = fake();
        assert_eq!(free(&fake, "/vms/a"), Some(("/vms/a".into(), 150)));
        assert_eq!(free(&fake, "/vms/b"), Some(("/vms".into(), 400)));
        assert_eq!(free(&fake, "/"), None);
        assert_eq!(free(&fake, "/elsewhere"), None);
        fake.files("vms", &[("memory.current", "2000")]);
        assert_eq!(free(&fake, "/vms/a"), Some(("/vms".into(), 0)));
    }

    #[test]
    fn unexpected_limit_is_an_error() {
        let fake = fake();
        fake.files("vms", &[("memory.max", "much")]);
        let error = read_free_memory(&fake.sysfs, "/vms/a").unwrap_err().to_string();
        assert!(error.ends_with("memory.max contains \"much\", expected max or a number"), "{error}");
    }
}
