//! What `cargo xtask guests` runs: stock Debian guests, booted by the VMM inside an emulated host: what they see of pool memory, and what becomes of what they
//! write. Pond, section 4.2: a node without cores is used last.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use std::{collections::BTreeMap, fmt::Write as _, process::Command};

use tests::emulated_host::{Host, Initrd, KERNELS};

/// Prints what a guest's kernel knows of its nodes, one line each, and of their tiers.
const TELL_NODES: &str = r#"
cd /sys/devices/system/node
for n in node*; do
  total=$(awk '/MemTotal/{print $4}' $n/meminfo); free=$(awk '/MemFree/{print $4}' $n/meminfo)
  echo "NODE ${n#node} cpus=$(cat $n/cpulist) total=$total free=$free distances=$(cat $n/distance | tr ' ' ',')"
done
for t in /sys/devices/virtual/memory_tiering/memory_tier*; do
  [ -e $t ] && echo "TIER ${t##*memory_tier} $(cat $t/nodelist)"
done
"#;

/// A node as a guest tells of it.
#[derive(Debug)]
struct Node {
    cpus: Vec<u32>,
    total_kib: u64,
    free_kib: u64,
    distances: Vec<u32>,
}

/// What a guest told: its nodes, and the nodes of each tier.
#[derive(Debug, Default)]
struct Told {
    nodes: Vec<Node>,
    tiers: BTreeMap<u32, Vec<u32>>,
}

/// "0-2,5" as numbers.
fn numbers(list: &str) -> Vec<u32> {
    let ranges = list.split(',').filter(|range| !range.is_empty()).map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().unwrap()..=last.parse().unwrap()
    });
    ranges.flatten().collect()
}

impl Told {
    fn of(said: &str) -> Self {
        let mut told = Self::default();
        for line in said.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let part = |name: &str| words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            match words[..] {
                ["NODE", ..] => told.nodes.push(Node {
                    cpus: numbers(part("cpus").unwrap()),
                    total_kib: part("total").unwrap().parse().unwrap(),
                    free_kib: part("free").unwrap().parse().unwrap(),
                    distances: part("distances").unwrap().split(',').map(|d| d.parse().unwrap()).collect(),
                }),
                ["TIER", tier, nodes] => drop(told.tiers.insert(tier.parse().unwrap(), numbers(nodes))),
                _ => {}
            }
        }
        told
    }
}

/// What lies between the line `BEGIN name` and the line `END name ...`, and the rest of that line.
fn part<'a>(said: &'a str, name: &str) -> (&'a str, &'a str) {
    let begin = format!("BEGIN {name}\n");
    let from = said.find(&begin).unwrap_or_else(|| panic!("no {begin:?} in:\n{said}")) + begin.len();
    let end = format!("END {name} ");
    let to = said[from..].find(&end).unwrap_or_else(|| panic!("no {end:?} in:\n{said}")) + from;
    (&said[from..to], said[to + end.len()..].lines().next().unwrap_or_default())
}

/// A line of a host's script that runs a guest.
fn launch(name: &str, kernel: &str, initrd: &str, options: &str) -> String {
    format!(
        "echo BEGIN {name}\nvmm-plugin run --vm {name} --standalone --kernel /guest/{kernel} --initrd /guest/{initrd} \
         --cmdline 'console=ttyS0 quiet panic=-1 pci=off' {options}\necho END {name} $?\n"
    )
}

/// Kernel, processors, and GiB of each pool node: every pair of choices is in one of them.
const SHAPES: [(&str, u32, &[u64]); 9] = [
    ("6.12", 1, &[1]),
    ("6.1", 1, &[2, 1]),
    ("6.12", 1, &[5]),
    ("6.1", 2, &[1]),
    ("6.12", 2, &[3]),
    ("6.1", 2, &[3, 2]),
    ("6.12", 4, &[1]),
    ("6.1", 4, &[3]),
    ("6.12", 4, &[1, 4]),
];

fn main() {
    pool_memory_is_nodes_without_cores_whatever_the_shape();
    println!("nodes: as they should be, in {} shapes", SHAPES.len());
    the_node_is_used_last_devices_keep_what_they_are_given_and_every_end_has_its_code();
    println!("memory, devices, tables, ends: as they should be");
}

fn pool_memory_is_nodes_without_cores_whatever_the_shape() {
    let mut script = String::new();
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        let pools: String = pools.iter().fold(String::new(), |mut all, gib| {
            let _ = write!(all, " --pool size={gib}GiB");
            all
        });
        script += &launch(
            &format!("s{n}"),
            kernel,
            kernel_initrd(kernel),
            &format!("--cpus {cpus} --memory size=512MiB{pools}"),
        );
    }
    let host = Host::new(&script);
    for kernel in KERNELS {
        host.guest(kernel_initrd(kernel), &Initrd::of_guest(kernel, TELL_NODES));
    }
    let said = host.run();
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        let (guest, code) = part(&said, &format!("s{n}"));
        let told = Told::of(guest);
        let shape = format!("{kernel}, {cpus} processors, {pools:?} GiB:\n{guest}");
        assert_eq!((code, told.nodes.len()), ("0", 1 + pools.len()), "{shape}");
        assert_eq!(told.nodes[0].cpus, (0..*cpus).collect::<Vec<_>>(), "{shape}");
        assert_eq!(told.nodes[0].distances[..2], [10, 18], "{shape}");
        for (number, (node, gib)) in (1..).zip(told.nodes[1..].iter().zip(*pools)) {
            assert_eq!(
                (&node.cpus[..], node.distances[0], node.distances[number]),
                (&[][..], 18, 10),
                "{shape}"
            );
            assert!(
                node.total_kib <= gib << 20 && node.free_kib * 10 >= (gib << 20) * 9,
                "90 % is free: {shape}"
            );
        }
        are_tiers_right(kernel, &told, &shape);
    }
}

fn kernel_initrd(kernel: &str) -> &'static str {
    if kernel == "6.1" { "nodes-6.1" } else { "nodes-6.12" }
}

/// Linux 6.1 has one tier for all memory of that kind; 6.12 takes what HMAT says is slower for a lower tier, which has a
/// higher number.
fn are_tiers_right(kernel: &str, told: &Told, shape: &str) {
    let tier_of =
        |node: u32| told.tiers.iter().find(|(_, nodes)| nodes.contains(&node)).map(|(tier, _)| *tier);
    let pool_nodes = 1..u32::try_from(told.nodes.len()).unwrap();
    match kernel {
        "6.1" => assert_eq!(told.tiers.len(), 1, "{shape}"),
        _ => assert!(
            pool_nodes.into_iter().all(|node| tier_of(node) > tier_of(0)),
            "{:?}: {shape}",
            told.tiers
        ),
    }
}

/// Writes and reads what is asked for, and tells how much was free on each node before and after.
const USE_MEMORY: &str = r#"
free() { for n in 0 1; do awk '/MemFree/{printf "%s ", $4}' /sys/devices/system/node/node$n/meminfo; done; }
mount -t tmpfs -o size=2g big /tmp
echo "FREE before $(free)"
head -c 157286400 /dev/zero | tr '\0' 'x' > /tmp/fits
echo "FREE fits $(free)"
head -c 629145600 /dev/zero | tr '\0' 'y' > /tmp/spills
echo "FREE spills $(free)"
echo "SUM $(cat /tmp/fits /tmp/spills | md5sum | cut -c1-32)"
"#;

/// Writes a disk and reads it again, asks for random numbers, and shows the tables.
const USE_DEVICES: &str = r#"
head -c 4194304 /dev/urandom > /tmp/content
dd if=/tmp/content of=/dev/vda bs=64k conv=fsync 2>/dev/null
echo 3 > /proc/sys/vm/drop_caches
echo "DISK $(head -c 4194304 /dev/vda | md5sum | cut -c1-32) $(md5sum < /tmp/content | cut -c1-32) $(wc -c < /dev/vda)"
echo "READONLY $(cat /sys/block/vdb/ro) $(head -c 5 /dev/vdb)"
dd if=/dev/zero of=/dev/vdb bs=512 count=1 2>/dev/null && echo "WRITTEN"
echo "RNG $(cat /sys/class/misc/hw_random/rng_current) $(dd if=/dev/hwrng bs=64 count=1 2>/dev/null | wc -c)"
for t in APIC DSDT FACP HMAT SLIT SRAT; do
  echo "TABLE $t $(base64 -w 0 /sys/firmware/acpi/tables/$t)"
done
"#;

fn the_node_is_used_last_devices_keep_what_they_are_given_and_every_end_has_its_code() {
    let sizes = "--cpus 2 --memory size=512MiB --pool size=1GiB";
    let disks = "--disk path=/tmp/disk --disk path=/tmp/fixed,readonly=on";
    let script = format!(
        "truncate -s 8M /tmp/disk\nprintf %-512s hello > /tmp/fixed\n{}{}{}md5sum < /tmp/disk\n\
         echo HOSTDISK $(head -c 4194304 /tmp/disk | md5sum | cut -c1-32)\n",
        launch("memory", "6.12", "memory", sizes),
        launch("devices", "6.12", "devices", &format!("{sizes} {disks}")),
        launch("reboot", "6.1", "reboot", sizes),
    );
    let host = Host::new(&script);
    host.guest("memory", &Initrd::of_guest("6.12", USE_MEMORY));
    host.guest("devices", &Initrd::of_guest("6.12", USE_DEVICES));
    host.guest("reboot", &Initrd::of_guest("6.1", "reboot -f"));
    let said = host.run();
    is_used_last(part(&said, "memory"));
    let (guest, code) = part(&said, "devices");
    assert_eq!(code, "0", "{guest}");
    let written = devices_work(guest);
    assert!(
        said.contains(&format!("HOSTDISK {written}")),
        "the host's file has what the guest wrote: {said}"
    );
    assert_eq!(part(&said, "reboot").1, "10", "{said}");
}

/// Pond measured 0.06 % to 0.38 % of accesses on the pool while memory fits.
fn is_used_last((guest, code): (&str, &str)) {
    let free = |when: &str| {
        let line = guest
            .lines()
            .find_map(|line| line.strip_prefix(&format!("FREE {when} ")))
            .unwrap_or_else(|| panic!("{guest}"));
        line.split_whitespace().map(|kib| kib.parse::<i64>().unwrap()).collect::<Vec<_>>()
    };
    let (before, fits, spills) = (free("before"), free("fits"), free("spills"));
    let (small, large) = (157_286_400 / 1024, 629_145_600 / 1024);
    let on_pool = before[1] - fits[1];
    assert!(on_pool * 1000 < small * 4, "{on_pool} KiB of {small} are on the pool node: {guest}");
    assert!(before[0] - fits[0] > small / 10 * 9, "the rest is local: {guest}");
    assert!(fits[1] - spills[1] > large / 2, "what does not fit spills: {guest}");
    let sum = "(head -c 157286400 /dev/zero | tr '\\0' x; head -c 629145600 /dev/zero | tr '\\0' y) | md5sum | cut -c1-32";
    let sum = Command::new("sh").args(["-c", sum]).output().unwrap();
    let sum = String::from_utf8(sum.stdout).unwrap();
    assert!(guest.contains(&format!("SUM {sum}")), "{sum}: {guest}");
    assert_eq!(code, "0", "{guest}");
}

/// Returns the sum of what was written to the disk.
fn devices_work(guest: &str) -> String {
    let line = |what: &str| {
        let line = guest.lines().find_map(|line| line.strip_prefix(&format!("{what} ")));
        line.unwrap_or_else(|| panic!("no {what}: {guest}")).split_whitespace().collect::<Vec<_>>()
    };
    let disk = line("DISK");
    assert_eq!((disk[0], disk[2]), (disk[1], "8388608"), "{guest}");
    assert_eq!(line("READONLY"), ["1", "hello"], "{guest}");
    assert!(!guest.contains("WRITTEN"), "{guest}");
    assert_eq!(line("RNG"), ["virtio_rng.0", "64"], "{guest}");
    for table in guest.lines().filter_map(|line| line.strip_prefix("TABLE ")) {
        let (name, base64) = table.split_once(' ').unwrap();
        is_sound(name, base64);
    }
    disk[0].to_owned()
}

/// Intel's own compiler takes a table apart, and puts it together again, without an error.
fn is_sound(name: &str, base64: &str) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("table.b64"), base64).unwrap();
    let run = |what: &str| {
        let ran = Command::new("sh").args(["-c", what]).current_dir(dir.path()).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success(), "{name}: {what}: {said}");
        said
    };
    run("base64 -d table.b64 > table.dat");
    run("iasl -d table.dat");
    let compiled = run("iasl table.dsl");
    assert!(compiled.contains("Compilation successful. 0 Errors"), "{name}: {compiled}");
}
