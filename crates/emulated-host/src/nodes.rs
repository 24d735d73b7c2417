//! NUMA nodes as reported by the kernel of a Linux guest: a script that prints the nodes, and a
//! parser for the output of the script.

use std::collections::BTreeMap;

/// Shell script that prints the NUMA nodes of a guest, one per line, then its memory tiers, and
/// finally its kernel release.
pub const PRINT_NODES_SCRIPT: &str = r#"
for n in /sys/devices/system/node/node*; do
  total=$(awk '/MemTotal/{print $4}' $n/meminfo); free=$(awk '/MemFree/{print $4}' $n/meminfo)
  echo "NODE ${n##*node} cpus=$(cat $n/cpulist) total=$total free=$free distances=$(cat $n/distance | tr ' ' ',')"
done
for t in /sys/devices/virtual/memory_tiering/memory_tier*; do
  [ -e $t ] && echo "TIER ${t##*memory_tier} $(cat $t/nodelist)"
done
echo "KERNEL $(uname -r)"
"#;

/// NUMA node, as reported by the kernel of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Number of the node.
    pub id: u32,
    /// Numbers of the CPUs of the node. The list is empty for pool memory.
    pub cpus: Vec<u32>,
    /// Total memory of the node, in KiB.
    pub total_kib: u64,
    /// Free memory of the node, in KiB.
    pub free_kib: u64,
    /// Distances (SLIT) from this node to all nodes, by node number.
    pub distances: Vec<u32>,
}

/// Parsed output of [`PRINT_NODES_SCRIPT`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaReport {
    /// Kernel release. Empty if the output is incomplete, because the script prints the release
    /// last.
    pub kernel: String,
    /// NUMA nodes, in ascending order of their numbers.
    pub nodes: Vec<Node>,
    /// Node numbers of each memory tier. A higher tier number means slower memory. Linux before 6.3
    /// has only one tier.
    pub tiers: BTreeMap<u32, Vec<u32>>,
}

impl NumaReport {
    /// Parses the output of [`PRINT_NODES_SCRIPT`] in a console log. Ignores other lines and an
    /// incomplete last line.
    pub fn parse(console: &str) -> Self {
        let mut report = Self::default();
        let complete_lines = console.rfind('\n').map_or("", |end| &console[..end]);
        for line in complete_lines.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            match fields[..] {
                ["NODE", id, ..] => report.nodes.extend(parse_node(id, &fields)),
                ["TIER", tier, nodes] => report.tiers.extend(tier.parse().ok().zip(parse_number_list(nodes))),
                ["KERNEL", name] => name.clone_into(&mut report.kernel),
                _ => {}
            }
        }
        report.nodes.sort_by_key(|node| node.id);
        report
    }

    /// Returns the number of the memory tier that contains a node, if any.
    pub fn tier_of(&self, node: u32) -> Option<u32> {
        self.tiers.iter().find(|(_, nodes)| nodes.contains(&node)).map(|(tier, _)| *tier)
    }
}

fn parse_node(id: &str, fields: &[&str]) -> Option<Node> {
    let field = |name: &str| fields.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some(Node {
        id: id.parse().ok()?,
        cpus: parse_number_list(field("cpus")?)?,
        total_kib: field("total")?.parse().ok()?,
        free_kib: field("free")?.parse().ok()?,
        distances: parse_number_list(field("distances")?)?,
    })
}

/// Parses a list of numbers and ranges, such as "0-2,5".
fn parse_number_list(list: &str) -> Option<Vec<u32>> {
    let mut all = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        all.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numa_report_parses_amid_other_console_output() {
        let console = "[    0.1] Linux\nNODE 1 cpus= total=1048576 free=1000000 distances=18,10\n\
                    NODE 0 cpus=0-1,3 total=500000 free=400000 distances=10,18\nTIER 4 0\nTIER 22 1\nNODE half\n\
                    KERNEL 6.12.0\n";
        assert_eq!(
            NumaReport::parse(&console[..console.len() - 3]).kernel,
            "",
            "an incomplete last line must be ignored"
        );
        let report = NumaReport::parse(console);
        assert_eq!((report.nodes.len(), report.kernel.as_str()), (2, "6.12.0"));
        assert_eq!((&report.nodes[0].cpus[..], &report.nodes[1].cpus[..]), (&[0, 1, 3][..], &[][..]));
        assert_eq!((report.nodes[1].id, report.nodes[1].total_kib), (1, 1_048_576));
        assert_eq!((report.nodes[1].free_kib, &report.nodes[1].distances[..]), (1_000_000, &[18, 10][..]));
        assert_eq!((report.tier_of(1), report.tier_of(7)), (Some(22), None));
    }
}
