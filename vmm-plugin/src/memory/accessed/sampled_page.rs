//! Determines the size of the pages of a mapping that access sampling selects. A smaller size would
//! split the page table entries of the mapping.

use std::{fs::File, io};

use rustix::fs::{FileType, fstat, fstatfs, major, minor};
use units::Bytes;

use super::BASE_PAGE_BYTES;

/// File system type of hugetlbfs, from linux/magic.h.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// Size of a huge page, and the default alignment of device-dax.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Returns the size of the pages to sample in the mapping of `file` at `address`, in bytes. `smaps`
/// is the content of /proc/self/smaps. The size is:
/// - for device-dax, the alignment of the device
/// - for hugetlbfs, the size of its pages
/// - for a mapping that can have transparent huge pages, 2 MiB
/// - otherwise 4 KiB
///
/// # Errors
/// The error returned by fstat(2) or fstatfs(2).
pub(super) fn size(file: &File, address: usize, smaps: &str) -> io::Result<usize> {
    let status = fstat(file)?;
    if FileType::from_raw_mode(status.st_mode) == FileType::CharacterDevice {
        return Ok(device_alignment(status.st_rdev).unwrap_or(HUGE_PAGE_BYTES));
    }
    let file_system = fstatfs(file)?;
    if file_system.f_type == HUGETLBFS_MAGIC {
        return Ok(usize::try_from(file_system.f_bsize).unwrap_or(HUGE_PAGE_BYTES));
    }
    Ok(if is_eligible_for_huge_pages(smaps, address) { HUGE_PAGE_BYTES } else { BASE_PAGE_BYTES })
}

/// Returns the alignment of a device-dax device, or `None` if sysfs does not contain it.
fn device_alignment(device: u64) -> Option<usize> {
    let path = format!("/sys/dev/char/{}:{}/align", major(device), minor(device));
    let alignment = parse_alignment(&std::fs::read_to_string(path).ok()?)?;
    usize::try_from(alignment.get()).ok()
}

/// Parses the attribute `align` of a device.
fn parse_alignment(text: &str) -> Option<Bytes> {
    let bytes = text.trim().parse::<u64>().ok()?;
    (bytes.is_power_of_two() && bytes >= BASE_PAGE_BYTES as u64).then_some(Bytes::new(bytes))
}

/// Returns whether the mapping that contains an address can have transparent huge pages, according
/// to the content of /proc/PID/smaps. The kernel evaluates the settings of the system, of the file
/// system and of the mapping.
fn is_eligible_for_huge_pages(smaps: &str, address: usize) -> bool {
    let mut lines = smaps.lines().skip_while(|line| !is_header_of(line, address)).skip(1);
    let value = lines.find_map(|line| line.strip_prefix("THPeligible:"));
    value.is_some_and(|value| value.trim() != "0")
}

/// Returns whether a line of smaps begins the description of the mapping that contains an address.
fn is_header_of(line: &str, address: usize) -> bool {
    let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
    let bounds = range.map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)));
    matches!(bounds, Some((Ok(start), Ok(end))) if (start..end).contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-s 00000000 00:01 12 /memfd:pool (deleted)
Size:            1048576 kB
THPeligible:           1
VmFlags: rd wr sh mr mw me ms
7f0040000000-7f0080000000 rw-s 00000000 00:01 13 /memfd:pool (deleted)
Size:            1048576 kB
THPeligible:           0
VmFlags: rd wr sh mr mw me ms
";

    #[test]
    fn eligibility_is_read_from_the_mapping_of_the_address() {
        let is_eligible = |address| is_eligible_for_huge_pages(SMAPS, address);
        assert!(is_eligible(0x7f00_0000_0000) && is_eligible(0x7f00_3fff_ffff));
        assert!(!is_eligible(0x7f00_4000_0000), "the second mapping is not eligible");
        assert!(!is_eligible(0x7f00_8000_0000), "no mapping has this address");
    }

    #[test]
    fn alignment_must_be_a_power_of_two_of_at_least_a_page() {
        assert_eq!(parse_alignment("2097152\n"), Some(Bytes::mib(2)));
        assert_eq!(parse_alignment("4096"), Some(Bytes::new(4096)));
        for invalid in ["", "0", "2048", "12288", "x"] {
            assert_eq!(parse_alignment(invalid), None, "{invalid:?}");
        }
    }

    #[test]
    fn device_without_alignment_has_huge_pages() {
        let device = File::options().read(true).write(true).open("/dev/zero").unwrap();
        assert_eq!(size(&device, 0, "").unwrap(), HUGE_PAGE_BYTES);
    }
}
