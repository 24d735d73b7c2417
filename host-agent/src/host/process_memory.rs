//! Memory use of a process, from the counters of the kernel in /proc/PID/status. Reading the page tables
//! instead (/proc/PID/smaps) would take time in proportion to the memory, and would split the mappings of
//! device-dax memory in pages of 1 GiB.

use std::{fs, io};

use units::Bytes;

/// Lines of /proc/PID/status whose sum is the memory that a VMM allocates for its guest: anonymous memory,
/// shared memory and huge pages, in memory or swapped out. Device memory is in none of them.
const COUNTED: [&str; 4] = ["RssAnon:", "RssShmem:", "HugetlbPages:", "VmSwap:"];

/// Returns how much memory a process uses, without device memory, programs and other files on disk.
///
/// # Errors
/// The process has ended, or a line is missing.
pub(crate) fn used_memory(pid: u32) -> io::Result<Bytes> {
    // The name of the process may be invalid UTF-8.
    parse(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/status"))?))
}

fn parse(status: &str) -> io::Result<Bytes> {
    let kib = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB"));
        let kib = value.and_then(|value| value.parse::<u64>().ok());
        kib.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("no number of kB follows {name}"))
        })
    };
    let kib =
        COUNTED.iter().try_fold(0, |sum: u64, name| Ok::<_, io::Error>(sum.saturating_add(kib(name)?)))?;
    Ok(Bytes::new(kib.saturating_mul(1024)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_files_is_counted() {
        let status = "Name:\tqemu\nVmRSS:\t   90 kB\nRssAnon:\t   10 kB\nRssFile:\t   50 kB\nRssShmem:\t   30 kB\n\
            VmSwap:\t    1 kB\nHugetlbPages:\t 2048 kB\n";
        assert_eq!(parse(status).unwrap(), Bytes::new((10 + 30 + 1 + 2048) * 1024));
        let error = parse("Name:\tkthreadd\n").unwrap_err();
        assert_eq!(error.to_string(), "no number of kB follows RssAnon:");
    }

    #[test]
    fn touched_memory_of_this_process_is_counted() {
        let touched = vec![1_u8; 32 << 20];
        assert!(used_memory(std::process::id()).unwrap() >= Bytes::mib(32));
        drop(touched);
    }
}
