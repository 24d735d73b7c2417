//! What a Linux guest's kernel knows of its memory: a script for a guest that prints it, and the reading of what it printed.

use std::collections::BTreeMap;

/// Prints what a guest's kernel knows of its nodes, one line each, and of their tiers, and its own name at the end.
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

/// A node as a guest tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: u32,
    /// Its processors; empty for pool memory.
    pub cpus: Vec<u32>,
    /// Its memory, in KiB.
    pub total_kib: u64,
    /// What of it is free, in KiB.
    pub free_kib: u64,
    /// How far each node's memory is, by their numbers.
    pub distances: Vec<u32>,
}

/// What a guest told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaReport {
    /// What its kernel calls itself; empty until it has told everything.
    pub kernel: String,
    /// In the order of their numbers.
    pub nodes: Vec<Node>,
    /// The nodes of each tier: a higher number is a lower tier. Linux before 6.3 has one tier for all.
    pub tiers: BTreeMap<u32, Vec<u32>>,
}

impl NumaReport {
    /// Reads what [`PRINT_NODES_SCRIPT`] has printed so far; lines of anybody else are not minded, and neither is half a line.
    pub fn parse(console: &str) -> Self {
        let mut report = Self::default();
        let whole = console.rfind('\n').map_or("", |end| &console[..end]);
        for line in whole.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                ["NODE", id, ..] => report.nodes.extend(node(id, &words)),
                ["TIER", tier, nodes] => report.tiers.extend(tier.parse().ok().zip(numbers(nodes))),
                ["KERNEL", name] => name.clone_into(&mut report.kernel),
                _ => {}
            }
        }
        report.nodes.sort_by_key(|node| node.id);
        report
    }

    /// The tier of a node.
    pub fn tier_of(&self, node: u32) -> Option<u32> {
        self.tiers.iter().find(|(_, nodes)| nodes.contains(&node)).map(|(tier, _)| *tier)
    }
}

fn node(id: &str, words: &[&str]) -> Option<Node> {
    let part = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Some(Node {
        id: id.parse().ok()?,
        cpus: numbers(part("cpus")?)?,
        total_kib: part("total")?.parse().ok()?,
        free_kib: part("free")?.parse().ok()?,
        distances: numbers(part("distances")?)?,
    })
}

/// "0-2,5" as numbers.
fn numbers(list: &str) -> Option<Vec<u32>> {
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
        assert_eq!(NumaReport::parse(&console[..console.len() - 3]).kernel, "", "half a line");
        let report = NumaReport::parse(console);
        assert_eq!((report.nodes.len(), report.kernel.as_str()), (2, "6.12.0"));
        assert_eq!((&report.nodes[0].cpus[..], &report.nodes[1].cpus[..]), (&[0, 1, 3][..], &[][..]));
        assert_eq!((report.nodes[1].id, report.nodes[1].total_kib), (1, 1_048_576));
        assert_eq!((report.nodes[1].free_kib, &report.nodes[1].distances[..]), (1_000_000, &[18, 10][..]));
        assert_eq!((report.tier_of(1), report.tier_of(7)), (Some(22), None));
    }
}
