//! Stock Debian guests inside an emulated host: script lines that start guests, and functions that
//! parse the console output.

use emulated_host::{Artifacts, Host, Initrd, nodes::NumaReport};

use crate::rack::programs_dir;

/// Setup of a host: huge pages for files in memory, as `host-agent doctor` recommends. Each page that a guest
/// touches takes nested page faults, so guests with small pages take several times as long.
pub const HUGE_PAGES_SCRIPT: &str = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled\n";

/// Returns the artifacts of emulated hosts.
pub fn artifacts() -> Artifacts {
    Artifacts::locate().unwrap_or_else(|error| panic!("{error}"))
}

/// Creates an emulated host that contains vmm-plugin, uses huge pages and runs a script.
pub fn create_host<'a>(artifacts: &'a Artifacts, script: &str) -> Host<'a> {
    let host = Host::new(artifacts, &format!("{HUGE_PAGES_SCRIPT}{script}")).expect("the host is created");
    host.add_program(&programs_dir().join("vmm-plugin")).expect("vmm-plugin is built");
    host
}

/// Adds the initrd of a guest to a host, as `/guest/NAME`. The guest runs `script`.
pub fn add_guest(host: &Host<'_>, artifacts: &Artifacts, name: &str, kernel: &str, script: &str) {
    let initrd = Initrd::for_guest(artifacts, kernel, script).expect("the file system is created");
    host.add_guest_initrd(name, &initrd).expect("the initrd is packed");
}

/// Boots a host, waits for the end of its script, and returns the console output.
pub fn run_host(host: Host<'_>) -> String {
    let output = host.run(|line| println!("{line}"), || true).unwrap_or_else(|error| panic!("{error}"));
    assert!(!output.contains("WAIT-TIMEOUT "), "a wait in the script timed out: {output}");
    output
}

/// Returns script lines that run a guest. The output of the guest is between the lines `BEGIN NAME`
/// and `END NAME EXIT_CODE`.
pub fn launch_script(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!("echo BEGIN {name}\n{}\necho END {name} $?\n", vmm_command(name, kernel, initrd, options))
}

/// Returns the vmm-plugin command that runs a guest.
pub fn vmm_command(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!(
        "vmm-plugin run --uid 65534 --gid 65534 --shutdown-timeout 10m --vm {name} --standalone --kernel /guest/{kernel} --initrd /guest/{initrd} \
         --cmdline 'console=ttyS0 quiet panic=-1 pci=off' {options}"
    )
}

/// Returns the output and the exit code of a guest. The output is between the lines `BEGIN NAME`
/// and `END NAME EXIT_CODE`.
pub fn guest_section<'a>(output: &'a str, name: &str) -> (&'a str, &'a str) {
    let begin = format!("BEGIN {name}\n");
    let from = output.find(&begin).unwrap_or_else(|| panic!("no {begin:?} in:\n{output}")) + begin.len();
    let end = format!("END {name} ");
    let to = output[from..].find(&end).unwrap_or_else(|| panic!("no {end:?} in:\n{output}")) + from;
    (&output[from..to], output[to + end.len()..].lines().next().unwrap_or_default())
}

/// Returns the words after `first` in the first line that starts with the word `first`.
pub fn words_after<'a>(output: &'a str, first: &str) -> Vec<&'a str> {
    let line = output.lines().find_map(|line| line.strip_prefix(first)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no line starts with {first:?} in:\n{output}")).split_whitespace().collect()
}

/// Returns the vmm-plugin options for pool nodes of these sizes, in GiB.
pub fn pool_options(pools: &[u64]) -> String {
    pools.iter().map(|gib| format!(" --pool size={gib}GiB")).collect()
}

/// Checks the NUMA nodes in the output of a guest with one local node. Pool nodes must have no
/// CPUs, a larger distance and 90 % free memory. Linux 6.1 must have one memory tier. Linux 6.12
/// must place pool nodes, which are slower in the HMAT, in a lower tier (with a higher number).
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
        assert!(
            node.total_kib <= all_kib && node.free_kib * 10 >= all_kib * 9,
            "pool memory must be 90 % free: {shape}"
        );
        let is_lower = report.tier_of(node.id) > report.tier_of(0);
        assert!(
            kernel == "6.1" || is_lower,
            "pool node must be in a lower tier: {:?}: {shape}",
            report.tiers
        );
    }
    assert!(
        kernel != "6.1" || report.tiers.len() == 1,
        "Linux 6.1 must have one tier: {:?}: {shape}",
        report.tiers
    );
}
