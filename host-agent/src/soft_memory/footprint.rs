//! Measured memory of clients.

use std::collections::BTreeMap;

use units::Bytes;

use super::pressure::PAGE_BYTES;
use crate::host::{process_memory::used_memory, sysfs::Sysfs};

/// Returns the number of pages that each process uses: the memory of its cgroup, which includes its children, or, if
/// several of the processes share the cgroup or it is the root, the memory of the process. Processes that have ended
/// are omitted. `proc` is the root of procfs, and `cgroups` the root of the unified hierarchy.
pub fn measure(proc: &Sysfs, cgroups: Option<&Sysfs>, pids: &[u32]) -> Vec<(u32, u64)> {
    let paths: Vec<Option<String>> = pids.iter().map(|pid| cgroup_path(proc, *pid)).collect();
    let mut members: BTreeMap<&str, usize> = BTreeMap::new();
    paths.iter().flatten().for_each(|path| *members.entry(path).or_default() += 1);
    let measured = pids.iter().zip(&paths).filter_map(|(pid, path)| {
        let own = path.as_deref().filter(|path| members[path] == 1 && !path.is_empty());
        let of_cgroup = own.zip(cgroups).and_then(|(path, cgroups)| memory_of_cgroup(cgroups, path));
        let bytes = of_cgroup.or_else(|| used_memory(*pid).ok())?;
        Some((*pid, bytes.get() / PAGE_BYTES))
    });
    measured.collect()
}

/// Returns the path of the cgroup of a process relative to the root, which is empty.
fn cgroup_path(proc: &Sysfs, pid: u32) -> Option<String> {
    let text = proc.text(format!("{pid}/cgroup")).ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(path.to_owned())
}

/// Returns the memory of the processes of a cgroup, also swapped memory, without its cached files; `None` without the
/// memory controller.
fn memory_of_cgroup(cgroups: &Sysfs, path: &str) -> Option<Bytes> {
    let text = cgroups.text(format!("{path}/memory.stat")).ok()?;
    let value = |name: &str| -> Option<u64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.parse().ok()
    };
    let swapped = cgroups.number(format!("{path}/memory.swap.current")).unwrap_or(0); // no file without swap
    Some(Bytes::new(value("anon")?.saturating_add(value("shmem")?).saturating_add(swapped)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Root with the files of a cgroup or process per path.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = Sysfs::at(dir.path());
        (dir, root)
    }

    #[test]
    fn memory_of_an_own_cgroup_counts() {
        let pid = std::process::id();
        let (_proc_dir, proc) = tree(&[(&format!("{pid}/cgroup"), "0::/db\n"), ("9/cgroup", "0::/gone\n")]);
        let stat = "anon 8192\nfile 999999\nshmem 4096\nfile_thp 1\n";
        let (_dir, cgroups) = tree(&[("db/memory.stat", stat), ("db/memory.swap.current", "4096\n")]);
        // The process with the ID 9 has no cgroup with a memory controller, and does not exist.
        assert_eq!(measure(&proc, Some(&cgroups), &[pid, u32::MAX]), [(pid, 4)]);
    }

    #[test]
    fn processes_that_share_a_cgroup_are_measured_themselves() {
        let pid = std::process::id();
        let (_proc_dir, proc) = tree(&[(&format!("{pid}/cgroup"), "0::/db\n"), ("9/cgroup", "0::/db\n")]);
        let (_dir, cgroups) = tree(&[("db/memory.stat", "anon 8192\nshmem 0\n")]);
        let touched = vec![1_u8; 32 << 20];
        let measured = measure(&proc, Some(&cgroups), &[pid, 9]);
        assert!(measured[0].0 == pid && measured[0].1 >= (32 << 20) / 4096, "{measured:?}");
        drop(touched);
        let (_proc_dir, root) = tree(&[(&format!("{pid}/cgroup"), "0::/\n")]);
        let (_dir, cgroups) = tree(&[("memory.stat", "anon 0\nshmem 0\n")]);
        assert!(measure(&root, Some(&cgroups), &[pid])[0].1 > 0, "the root has the memory of all processes");
    }
}
