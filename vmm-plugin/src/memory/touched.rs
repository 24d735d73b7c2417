//! How much of a guest's memory has pages of the host behind it: the kernel's own account of this process, node by node. What
//! is done with the numbers is left to others.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufRead, BufReader, Seek as _},
    ops::Range,
    sync::{Mutex, PoisonError},
};

/// What counts as touched: pages that are here, pages that were put aside, and huge pages, which count among neither.
const COUNTED: [&str; 4] = ["Rss:", "Swap:", "Shared_Hugetlb:", "Private_Hugetlb:"];

/// Looks up how much of each node was touched.
#[derive(Debug)]
pub struct Touched {
    /// Opened once: later this process may not find it any more.
    smaps: Mutex<File>,
    places: Places,
    /// Bytes of each node that are a device's, and so are there whether touched or not: the kernel says nothing of them.
    devices: BTreeMap<u32, u64>,
}

impl Touched {
    /// Of files and of devices that are mapped, each with its node.
    pub(super) fn new(
        files: impl Iterator<Item = (Range<usize>, u32)>,
        devices: impl Iterator<Item = (Range<usize>, u32)>,
    ) -> io::Result<Self> {
        let smaps = Mutex::new(File::open("/proc/self/smaps")?);
        let places = Places(files.map(|(at, node)| (at.start, (at.end, node))).collect());
        let mut whole = BTreeMap::new();
        devices.for_each(|(at, node)| *whole.entry(node).or_default() += at.len() as u64);
        Ok(Self { smaps, places, devices: whole })
    }

    /// Bytes touched so far of each node. The kernel looks at every page that is there.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn by_node(&self) -> io::Result<BTreeMap<u32, u64>> {
        let mut smaps = self.smaps.lock().unwrap_or_else(PoisonError::into_inner);
        smaps.rewind()?;
        let mut sums = add_up(BufReader::new(&*smaps), &self.places)?;
        self.devices.iter().for_each(|(node, bytes)| *sums.entry(*node).or_default() += bytes);
        Ok(sums)
    }
}

/// Where memory of the guest is in this process: from each start to its end, and the node.
#[derive(Debug)]
struct Places(BTreeMap<usize, (usize, u32)>);

impl Places {
    fn node_at(&self, at: usize) -> Option<u32> {
        let (_, (end, node)) = self.0.range(..=at).next_back()?;
        (at < *end).then_some(*node)
    }
}

/// One line of an account: where the next mapping begins, or so many bytes of the last one.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Mapping(usize),
    Bytes(u64),
    Other,
}

impl Line {
    fn read(line: &[u8]) -> Option<Self> {
        let line = String::from_utf8_lossy(line);
        let mut words = line.split_ascii_whitespace();
        let first = words.next()?;
        if COUNTED.contains(&first) {
            let kib: u64 = words.next()?.parse().ok()?;
            return Some(Self::Bytes(kib << 10));
        }
        match first.split_once('-') {
            Some((start, _)) => Some(Self::Mapping(usize::from_str_radix(start, 16).ok()?)),
            None => Some(Self::Other),
        }
    }
}

/// A mapping counts for the node that it begins in. Where the kernel joins neighbours of one file they are of one node, but for
/// local nodes that share a file, should it ever lay these in order.
fn add_up(smaps: impl BufRead, places: &Places) -> io::Result<BTreeMap<u32, u64>> {
    let mut sums: BTreeMap<u32, u64> = places.0.values().map(|(_, node)| (*node, 0)).collect();
    let mut node = None;
    for line in smaps.split(b'\n') {
        match Line::read(&line?).ok_or(io::ErrorKind::InvalidData)? {
            Line::Mapping(at) => node = places.node_at(at),
            Line::Bytes(bytes) => {
                node.and_then(|node| sums.get_mut(&node)).into_iter().for_each(|sum| *sum += bytes);
            }
            Line::Other => {}
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCOUNT: &str = "\
55d0c8a00000-55d0c8a01000 r--p 00000000 fe:01 77 /usr/bin/a b-c Rss: 9 kB
Size:                  4 kB
Rss:                   4 kB
VmFlags: rd mr mw me sd
7f0000000000-7f0040000000 rw-s 00000000 00:01 11 /memfd:pool (deleted)
Size:            1048576 kB
KernelPageSize:        4 kB
Rss:                 512 kB
Pss:                 512 kB
Swap:                  8 kB
SwapPss:               0 kB
7f0040000000-7f0080000000 rw-s 40000000 00:01 11 /memfd:pool (deleted)
Rss:                   4 kB
7f00c0000000-7f0100000000 rw-s 00000000 00:10 12 /memfd:local (deleted)
Rss:                   0 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    4096 kB
";

    fn places() -> Places {
        let at = |start: usize, node| (start, (start + (1 << 30), node));
        Places([at(0x7f00_0000_0000, 1), at(0x7f00_4000_0000, 1), at(0x7f00_c000_0000, 0)].into())
    }

    #[test]
    fn pages_count_for_the_node_they_are_of_and_others_for_none() {
        let sums = add_up(ACCOUNT.as_bytes(), &places()).unwrap();
        assert_eq!(sums, [(0, 6 << 20), (1, 524 << 10)].into());
    }

    #[test]
    fn a_node_that_was_never_touched_is_told_too() {
        assert_eq!(add_up(&b""[..], &places()).unwrap(), [(0, 0), (1, 0)].into());
    }

    #[test]
    fn an_account_that_makes_no_sense_is_an_error() {
        for wrong in ["Rss: many kB\n", "Rss:\n", "7f00x-7f01 rw-s\n", "\n"] {
            assert!(add_up(wrong.as_bytes(), &places()).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_this_process_touches_shows_however_often_it_looks() {
        let mut page = vec![0_u8; 64 << 20];
        let at = page.as_ptr() as usize;
        let device = (0..1 << 30, 8);
        let file = (at & !0xfff..at + page.len(), 7);
        let touched = Touched::new([file].into_iter(), [device].into_iter()).unwrap();
        assert_eq!(touched.by_node().unwrap()[&8], 1 << 30, "all of a device is there");
        let before = touched.by_node().unwrap()[&7];
        page[..32 << 20].fill(1);
        let after = touched.by_node().unwrap()[&7];
        assert!(after >= before + (31 << 20), "{before} {after}");
    }
}
