//! Stock Debian guests inside an emulated host: script lines that launch them, and their part of
//! the console output.

use emulated_host::{Artifacts, Host, Initrd, nodes::NumaReport};

use crate::rack::programs;

/// Returns the artifacts of emulated hosts.
pub fn artifacts() -> Artifacts {
    Artifacts::locate().unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a host with vmm-plugin that runs a script.
pub fn host<'a>(artifacts: &'a Artifacts, script: &str) -> Host<'a> {
    let host = Host::new(artifacts, script).expect("the host is created");
    host.program(&programs().join("vmm-plugin")).expect("vmm-plugin is built");
    host
}

/// Adds a guest's file system to a host, as `/guest/NAME`.
pub fn add_guest(host: &Host<'_>, artifacts: &Artifacts, name: &str, kernel: &str, script: &str) {
    let initrd = Initrd::for_guest(artifacts, kernel, script).expect("the file system is created");
    host.guest(name, &initrd).expect("the initrd is packed");
}

/// Boots a host and returns its console output.
pub fn run(host: Host<'_>) -> String {
    let output = host.run(|line| println!("{line}"), || true).unwrap_or_else(|error| panic!("{error}"));
    assert!(!output.contains("WAIT-TIMEOUT "), "a wait in the script timed out: {output}");
    output
}

/// Returns lines of a host's script that run a guest.
pub fn launch(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!("echo BEGIN {name}\n{}\necho END {name} $?\n", command(name, kernel, initrd, options))
}

/// Returns the command that runs a guest.
pub fn command(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!(
        "vmm-plugin run --uid 65534 --gid 65534 --vm {name} --standalone --kernel /guest/{kernel} --initrd /guest/{initrd} \
         --cmdline 'console=ttyS0 quiet panic=-1 pci=off' {options}"
    )
}

/// Returns the text between the lines `BEGIN name` and `END name ...`, and the remainder of the
/// latter.
pub fn section<'a>(output: &'a str, name: &str) -> (&'a str, &'a str) {
    let begin = format!("BEGIN {name}\n");
    let from = output.find(&begin).unwrap_or_else(|| panic!("no {begin:?} in:\n{output}")) + begin.len();
    let end = format!("END {name} ");
    let to = output[from..].find(&end).unwrap_or_else(|| panic!("no {end:?} in:\n{output}")) + from;
    (&output[from..to], output[to + end.len()..].lines().next().unwrap_or_default())
}

/// Returns the words after the first one of the line that starts with it.
pub fn words<'a>(output: &'a str, first: &str) -> Vec<&'a str> {
    let line = output.lines().find_map(|line| line.strip_prefix(first)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {first} in:\n{output}")).split_whitespace().collect()
}

/// Returns options for pool nodes of these sizes, in GiB.
pub fn pool_options(pools: &[u64]) -> String {
    pools.iter().map(|gib| format!(" --pool size={gib}GiB")).collect()
}

/// Checks the nodes of a guest with one local node: pool nodes have no CPUs, a larger distance, and
/// free memory. Linux 6.1 has one tier for all such memory; 6.12 puts memory that is slower
/// according to HMAT into a lower tier, which has a higher number.
pub fn assert_nodes(kernel: &str, cpus: u32, pools: &[u64], guest: &str) {
    let report = NumaReport::parse(guest);
    let shape = format!("{kernel}, {cpus} CPUs, {pools:?} GiB:\n{guest}");
    assert_eq!(report.nodes.len(), 1 + pools.len(), "{shape}");
    assert_eq!(report.nodes[0].cpus, (0..cpus).collect::<Vec<_>>(), "{shape}");
    assert_eq!(report.nodes[0].distances[..2], [10, 18], "{shape}");
    for (number, (node, gib)) in (1..).zip(report.nodes[1..].iter().zip(pools)) {
        let distances = (node.distances[0], node.distances[number]);
        assert_eq!((&node.cpus[..], distances), (&[][..], (18, 10)), "{shape}");
        let all_kib = gib << 20;
        assert!(node.total_kib <= all_kib && node.free_kib * 10 >= all_kib * 9, "90 % is free: {shape}");
        let is_lower = report.tier_of(node.id) > report.tier_of(0);
        assert!(kernel == "6.1" || is_lower, "a lower tier: {:?}: {shape}", report.tiers);
    }
    assert!(kernel != "6.1" || report.tiers.len() == 1, "one tier: {:?}: {shape}", report.tiers);
}
