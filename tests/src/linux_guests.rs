//! Stock Debian guests inside an emulated host: how a host's script launches them, and where in its words theirs are.

use emulated_host::{Artifacts, Host, Initrd, nodes::NumaReport};

use crate::rack::programs;

/// Artifacts of emulated hosts.
pub fn bed() -> Artifacts {
    Artifacts::locate().unwrap_or_else(|missing| panic!("{missing}"))
}

/// Returns a host with vmm-plugin that runs a script.
pub fn host<'a>(bed: &'a Artifacts, script: &str) -> Host<'a> {
    let host = Host::new(bed, script).expect("a host is made");
    host.program(&programs().join("vmm-plugin")).expect("it is built");
    host
}

/// Adds a guest's file system to a host, as `/guest/NAME`.
pub fn add_guest(host: &Host<'_>, bed: &Artifacts, name: &str, kernel: &str, script: &str) {
    let initrd = Initrd::for_guest(bed, kernel, script).expect("a file system is made");
    host.guest(name, &initrd).expect("it is packed");
}

/// Boots a host and returns its console output.
pub fn run(host: Host<'_>) -> String {
    let said = host.run(|line| println!("{line}"), || true).unwrap_or_else(|error| panic!("{error}"));
    assert!(!said.contains("NEVER "), "something did not come about: {said}");
    said
}

/// A line of a host's script that runs a guest.
pub fn launch(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!("echo BEGIN {name}\n{}\necho END {name} $?\n", command(name, kernel, initrd, options))
}

/// The command that runs a guest.
pub fn command(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!(
        "vmm-plugin run --uid 65534 --gid 65534 --vm {name} --standalone --kernel /guest/{kernel} --initrd /guest/{initrd} \
         --cmdline 'console=ttyS0 quiet panic=-1 pci=off' {options}"
    )
}

/// Returns the text between the lines `BEGIN name` and `END name ...`, and the remainder of the
/// latter.
pub fn part<'a>(said: &'a str, name: &str) -> (&'a str, &'a str) {
    let begin = format!("BEGIN {name}\n");
    let from = said.find(&begin).unwrap_or_else(|| panic!("no {begin:?} in:\n{said}")) + begin.len();
    let end = format!("END {name} ");
    let to = said[from..].find(&end).unwrap_or_else(|| panic!("no {end:?} in:\n{said}")) + from;
    (&said[from..to], said[to + end.len()..].lines().next().unwrap_or_default())
}

/// The words after a line's first one.
pub fn words<'a>(said: &'a str, first: &str) -> Vec<&'a str> {
    let line = said.lines().find_map(|line| line.strip_prefix(first)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {first} in:\n{said}")).split_whitespace().collect()
}

/// Options for a pool node of each of these sizes, in GiB.
pub fn pool_options(pools: &[u64]) -> String {
    pools.iter().map(|gib| format!(" --pool size={gib}GiB")).collect()
}

/// Nodes are as a guest with one local node asked for them: those of the pool without cores, farther away, and free. Linux 6.1 has
/// one tier for all memory of that kind; 6.12 takes what HMAT says is slower for a lower tier, which has a higher number.
pub fn assert_nodes(kernel: &str, cpus: u32, pools: &[u64], guest: &str) {
    let told = NumaReport::parse(guest);
    let shape = format!("{kernel}, {cpus} processors, {pools:?} GiB:\n{guest}");
    assert_eq!(told.nodes.len(), 1 + pools.len(), "{shape}");
    assert_eq!(told.nodes[0].cpus, (0..cpus).collect::<Vec<_>>(), "{shape}");
    assert_eq!(told.nodes[0].distances[..2], [10, 18], "{shape}");
    for (number, (node, gib)) in (1..).zip(told.nodes[1..].iter().zip(pools)) {
        let distances = (node.distances[0], node.distances[number]);
        assert_eq!((&node.cpus[..], distances), (&[][..], (18, 10)), "{shape}");
        let all_kib = gib << 20;
        assert!(node.total_kib <= all_kib && node.free_kib * 10 >= all_kib * 9, "90 % is free: {shape}");
        let is_lower = told.tier_of(node.id) > told.tier_of(0);
        assert!(kernel == "6.1" || is_lower, "a lower tier: {:?}: {shape}", told.tiers);
    }
    assert!(kernel != "6.1" || told.tiers.len() == 1, "one tier: {:?}: {shape}", told.tiers);
}
