//! Idle latency of pool memory relative to local memory, as the kernel reports it. The kernel takes the
//! latencies from the firmware (HMAT) and from CXL devices (CDAT).

use units::LATENCY_RATIO_RANGE;

use std::{ops::RangeInclusive, path::PathBuf};

use super::sysfs::{Sysfs, SysfsError, parse_ranges};

/// Access class whose initiators are processors only. Class 0 contains devices, too.
const ACCESS_CLASS: &str = "access1";
/// Directory of NUMA nodes in sysfs.
const NODES_FOLDER: &str = "devices/system/node";

/// Returns the largest read latency of the nodes without processors, divided by the smallest read
/// latency of the nodes with processors. Each latency is seen from the node's closest processors.
/// `None` if the kernel reports no latency for one of both kinds of nodes, or if the ratio is not in
/// [`LATENCY_RATIO_RANGE`].
///
/// # Errors
/// A file of sysfs cannot be read, or has unexpected contents.
pub fn read_latency_ratio(sys: &Sysfs) -> Result<Option<f64>, SysfsError> {
    let nodes_with = |list: &str| -> Result<Vec<RangeInclusive<u32>>, SysfsError> {
        let file = PathBuf::from(NODES_FOLDER).join(list);
        let text = sys.text(&file)?;
        parse_ranges(&text).ok_or_else(|| sys.unreadable_error(file, text, "a list of nodes"))
    };
    let (with_memory, with_cpu) = (nodes_with("has_memory")?, nodes_with("has_cpu")?);
    let (mut local, mut pool) = (Vec::new(), Vec::new());
    for node in with_memory.into_iter().flatten() {
        let file = format!("{NODES_FOLDER}/node{node}/{ACCESS_CLASS}/initiators/read_latency");
        match sys.number(file) {
            Ok(0) => {} // unknown
            Ok(latency) if with_cpu.iter().any(|nodes| nodes.contains(&node)) => local.push(latency),
            Ok(latency) => pool.push(latency),
            Err(error) if error.is_gone() => {}
            Err(error) => return Err(error),
        }
    }
    let latencies = pool.iter().max().zip(local.iter().min());
    let ratio = latencies.map(|(pool, local)| *pool as f64 / *local as f64);
    Ok(ratio.filter(|ratio| LATENCY_RATIO_RANGE.contains(ratio)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::sysfs::fake::FakeSysfs;

    fn sysfs(latencies: &[(u32, &str)]) -> FakeSysfs {
        let fake = FakeSysfs::new(&[]);
        fake.files(NODES_FOLDER, &[("has_memory", "0-3"), ("has_cpu", "0-1,4")]);
        for (node, latency) in latencies {
            let file = format!("node{node}/{ACCESS_CLASS}/initiators/read_latency");
            fake.files(NODES_FOLDER, &[(&file, latency)]);
        }
        fake
    }

    #[test]
    fn ratio_is_computed_from_nodes_with_and_without_processors() {
        let ratio = |latencies: &[(u32, &str)]| read_latency_ratio(&sysfs(latencies).sysfs).unwrap();
        assert_eq!(ratio(&[(0, "100"), (1, "110"), (2, "220"), (3, "250")]), Some(2.5));
        assert_eq!(ratio(&[(0, "0"), (1, "110"), (2, "220")]), Some(2.0));
        let impossible = &[(0, "1"), (2, "5000")][..];
        for latencies in [&[][..], &[(0, "100")], &[(2, "250")], &[(0, "100"), (2, "0")], impossible] {
            assert_eq!(ratio(latencies), None, "{latencies:?}");
        }
    }

    #[test]
    fn unexpected_contents_are_an_error() {
        let error = read_latency_ratio(&sysfs(&[(2, "slow")]).sysfs).unwrap_err().to_string();
        assert!(error.ends_with("read_latency contains \"slow\", expected a number"), "{error}");
        assert!(read_latency_ratio(&FakeSysfs::new(&[]).sysfs).is_err());
    }
}
