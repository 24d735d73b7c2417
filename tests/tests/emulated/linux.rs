//! Tests of stock Debian guests that the VMM boots inside an emulated host: NUMA nodes of pool
//! memory, devices and data. Guests use a zNUMA node last (Pond, section 4.2).

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use emulated_host::{
    Artifacts, KERNELS,
    nodes::{NumaReport, PRINT_NODES_SCRIPT},
};
use tests::linux_guests::{
    add_guest, artifacts, assert_nodes, create_host, guest_section, launch_script, pool_options, run_host,
    vmm_command, words_after,
};

/// Shapes of guests: kernel, number of CPUs, and GiB of each pool node. The list covers each pair
/// of values of different fields (pairwise testing).
const GUEST_SHAPES: [(&str, u32, &[u64]); 9] = [
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

#[test]
fn pool_memory_appears_as_nodes_without_cpus() {
    let mut script = String::new();
    for (n, (kernel, cpus, pools)) in GUEST_SHAPES.iter().enumerate() {
        script += &launch_script(
            &format!("s{n}"),
            kernel,
            kernel_initrd(kernel),
            &format!("--cpus {cpus} --memory size=512MiB{}", pool_options(pools)),
        );
    }
    let artifacts = artifacts();
    let host = create_host(&artifacts, &script);
    for kernel in KERNELS {
        add_guest(&host, &artifacts, kernel_initrd(kernel), kernel, PRINT_NODES_SCRIPT);
    }
    let output = run_host(host);
    for (n, (kernel, cpus, pools)) in GUEST_SHAPES.iter().enumerate() {
        let (guest, code) = guest_section(&output, &format!("s{n}"));
        assert_eq!(code, "0", "{guest}");
        assert_nodes(kernel, *cpus, pools, guest);
    }
}

fn kernel_initrd(kernel: &str) -> &'static str {
    if kernel == "6.1" { "nodes-6.1" } else { "nodes-6.12" }
}

/// Guest script that writes and reads memory, and prints the free memory of each node before and
/// after.
const USE_MEMORY_SCRIPT: &str = r#"
free() { for n in 0 1; do awk '/MemFree/{printf "%s ", $4}' /sys/devices/system/node/node$n/meminfo; done; }
mount -t tmpfs -o size=2g big /tmp
head -c 10485760 /dev/urandom > /tmp/block
echo "FREE before $(free)"
for n in $(seq 15); do cp /tmp/block /tmp/fits$n; done
echo "FREE fits $(free)"
for n in $(seq 40); do cp /tmp/block /tmp/spills$n; done
echo "FREE spills $(free)"
echo "SUMS $(md5sum /tmp/block /tmp/fits* /tmp/spills* | cut -c1-32 | sort | uniq -c)"
"#;

/// Guest script that writes and reads a disk, reads random numbers, and prints the ACPI tables.
const USE_DEVICES_SCRIPT: &str = r#"
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

#[test]
fn pool_node_is_used_last_and_devices_keep_data() {
    let sizes = "--cpus 2 --memory size=512MiB --pool size=1GiB";
    let disks = "--disk path=/tmp/disk --disk path=/tmp/fixed,readonly=on";
    let script = format!(
        "truncate -s 8M /tmp/disk\nprintf %-512s hello > /tmp/fixed\n{}{}{}\
         echo HOSTDISK $(head -c 4194304 /tmp/disk | md5sum | cut -c1-32)\n",
        launch_script("memory", "6.12", "memory", sizes),
        launch_script("devices", "6.12", "devices", &format!("{sizes} {disks}")),
        launch_script("reboot", "6.1", "reboot", sizes),
    );
    let artifacts = artifacts();
    let host = create_host(&artifacts, &script);
    add_guest(&host, &artifacts, "memory", "6.12", USE_MEMORY_SCRIPT);
    add_guest(&host, &artifacts, "devices", "6.12", USE_DEVICES_SCRIPT);
    add_guest(&host, &artifacts, "reboot", "6.1", "reboot -f");
    let output = run_host(host);
    assert_node_used_last(guest_section(&output, "memory"));
    let (guest, code) = guest_section(&output, "devices");
    assert_eq!(code, "0", "{guest}");
    let written = check_devices(&artifacts.tool_path("iasl"), guest);
    assert!(
        output.contains(&format!("HOSTDISK {written}")),
        "the disk file on the host must contain the data of the guest: {output}"
    );
    assert_eq!(guest_section(&output, "reboot").1, "10", "{output}");
}

/// Checks that a guest uses the pool node only after local memory is full. Pond measured that 0.06
/// % to 0.38 % of accesses go to the pool while the data fits into local memory.
fn assert_node_used_last((guest, code): (&str, &str)) {
    let free = |when: &str| {
        let line = guest.lines().find_map(|line| line.strip_prefix(&format!("FREE {when} ")));
        let line = line.unwrap_or_else(|| panic!("{guest}"));
        line.split_whitespace().map(|kib| kib.parse::<i64>().unwrap()).collect::<Vec<_>>()
    };
    let (before, fits, spills) = (free("before"), free("fits"), free("spills"));
    let (small, large) = (150 << 10, 400 << 10);
    let on_pool = before[1] - fits[1];
    assert!(on_pool * 1000 < small * 4, "{on_pool} KiB of {small} are on the pool node: {guest}");
    assert!(before[0] - fits[0] > small / 10 * 9, "at least 90 % must be in local memory: {guest}");
    assert!(fits[1] - spills[1] > large / 3, "data beyond local memory must be on the pool node: {guest}");
    let sums = words_after(guest, "SUMS");
    assert_eq!((sums.len(), sums[0]), (2, "56"), "all copies must be equal: {guest}");
    assert_eq!(code, "0", "{guest}");
}

/// Checks the output of the device script. Returns the checksum of the data written to the disk.
fn check_devices(iasl: &Path, guest: &str) -> String {
    let disk = words_after(guest, "DISK");
    assert_eq!((disk[0], disk[2]), (disk[1], "8388608"), "{guest}");
    assert_eq!(words_after(guest, "READONLY"), ["1", "hello"], "{guest}");
    assert!(!guest.contains("WRITTEN"), "{guest}");
    assert_eq!(words_after(guest, "RNG"), ["virtio_rng.0", "64"], "{guest}");
    let tables = guest.lines().filter_map(|line| line.strip_prefix("TABLE ")?.split_once(' '));
    let names: Vec<&str> = tables.clone().map(|(name, _)| name).collect();
    assert_eq!(names, ["APIC", "DSDT", "FACP", "HMAT", "SLIT", "SRAT"], "{guest}");
    tables.for_each(|(name, base64)| assert_table_compiles(iasl, name, base64));
    disk[0].to_owned()
}

/// Checks that iasl disassembles and compiles an ACPI table without errors.
fn assert_table_compiles(iasl: &Path, name: &str, base64: &str) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("table.b64"), base64).unwrap();
    let run_script = |script: &str| {
        let process = Command::new("sh")
            .args(["-c", script])
            .env("IASL", iasl)
            .current_dir(dir.path())
            .output()
            .unwrap();
        let output =
            String::from_utf8_lossy(&process.stdout).into_owned() + &String::from_utf8_lossy(&process.stderr);
        assert!(process.status.success(), "{name}: {script}: {output}");
        output
    };
    run_script("base64 -d table.b64 > table.dat");
    run_script("\"$IASL\" -d table.dat");
    let compiled = run_script("\"$IASL\" table.dsl");
    assert!(compiled.contains("Compilation successful. 0 Errors"), "{name}: {compiled}");
}

/// Guest script that waits for the power button. The script prints WAITING after it has opened the
/// device of the button, because an earlier press is lost.
const WAIT_FOR_BUTTON_SCRIPT: &str = r#"
exec 3< /dev/input/event0
echo "WAITING"
head -c 1 <&3 > /dev/null
echo "PRESSED"
"#;

/// Guest script that downloads a file over the network card, serves the file over HTTP, and waits
/// for the power button.
const USE_NETWORK_SCRIPT: &str = r#"
exec 3< /dev/input/event0
ifconfig eth0 10.9.0.2 netmask 255.255.255.0 up
mkdir /tmp/offered
until wget -q -O /tmp/fetched http://10.9.0.1/file; do sleep 0.2; done
mv /tmp/fetched /tmp/offered/file
httpd -h /tmp/offered
head -c 1 <&3 > /dev/null
"#;

#[test]
fn guests_boot_with_elf_kernel_multiple_cpu_nodes_and_huge_pages() {
    let script = format!(
        "export TARN_VMM_RUN_DIR=/run/vmm\necho 160 > /proc/sys/vm/nr_hugepages\n{}{}\
         {} > /tmp/huge 2>&1 &\nVMM=$!\nuntil grep -q WAITING /tmp/huge; do sleep 0.2; done\n\
         echo HUGEPAGES $(awk '/HugePages_(Total|Free)/{{print $2}}' /proc/meminfo)\n\
         echo TOUCHED $(vmm-plugin info huge -o json | awk -F '[:,]' '/touched_bytes/{{print $2}}')\n\
         vmm-plugin stop huge --timeout 10m\nwait $VMM\necho \"HUGE $?\"\n\
         {} > /tmp/button 2>&1 &\nVMM=$!\nuntil grep -q WAITING /tmp/button; do sleep 0.2; done\nkill $VMM\nwait $VMM\n\
         echo \"BUTTON $?\"\ncat /tmp/button\n",
        launch_script("elf", "vmlinux", "nodes-6.1", "--memory size=512MiB --pool size=1GiB"),
        launch_script(
            "two",
            "6.12",
            "nodes",
            "--cpus 3 --memory size=256MiB,cpus=1 --memory size=256MiB,cpus=2 --pool size=1GiB"
        ),
        vmm_command(
            "huge",
            "6.12",
            "button",
            "--memory size=320MiB,hugepages=on,prefault=on --pool size=1GiB"
        ),
        vmm_command("button", "6.12", "button", "--memory size=256MiB"),
    );
    let artifacts = artifacts();
    let host = create_host(&artifacts, &script);
    let dir = tempfile::tempdir().unwrap();
    let elf = extract_vmlinux(&artifacts, dir.path());
    host.add_file_copy(&elf, "guest/vmlinux").unwrap();
    add_guest(&host, &artifacts, "nodes-6.1", "6.1", PRINT_NODES_SCRIPT);
    add_guest(&host, &artifacts, "nodes", "6.12", PRINT_NODES_SCRIPT);
    add_guest(&host, &artifacts, "button", "6.12", WAIT_FOR_BUTTON_SCRIPT);
    let output = run_host(host);
    let report = |name| {
        let (guest, code) = guest_section(&output, name);
        assert_eq!(code, "0", "{guest}");
        NumaReport::parse(guest)
    };
    let elf = report("elf");
    assert_eq!((elf.nodes.len(), elf.nodes[1].cpus.len()), (2, 0), "{elf:?}");
    let two = report("two");
    let cpus: Vec<_> = two.nodes.iter().map(|node| &node.cpus[..]).collect();
    assert_eq!(cpus, [&[0][..], &[1, 2], &[]], "{two:?}");
    assert_eq!(two.nodes[0].distances, [10, 20, 18], "{two:?}");
    assert_eq!(words_after(&output, "HUGEPAGES"), ["160", "0"], "{output}");
    let touched: Vec<u64> =
        words_after(&output, "TOUCHED").iter().map(|bytes| bytes.parse().unwrap()).collect();
    assert_eq!(touched[0], 320 << 20, "prefaulted memory must be touched: {output}");
    assert!(touched[1] < 100 << 20, "other memory must not be touched: {output}");
    assert_eq!(words_after(&output, "HUGE"), ["0"], "{output}");
    assert_eq!(words_after(&output, "BUTTON"), ["0"], "SIGTERM must press the power button: {output}");
    assert!(output.contains("PRESSED"), "{output}");
}

/// Extracts the ELF file from the kernel of Debian 12. This ELF file has a PVH entry. The header of
/// the kernel contains the offset and length of the compressed ELF file (Linux x86 boot protocol).
/// The last four bytes of the compressed file are the uncompressed length and are skipped.
fn extract_vmlinux(artifacts: &Artifacts, into: &Path) -> PathBuf {
    let kernel = std::fs::read(artifacts.kernel_path("6.1")).unwrap();
    let number = |at: usize| u32::from_le_bytes(kernel[at..at + 4].try_into().unwrap()) as usize;
    let setup = (usize::from(kernel[0x1f1]) + 1) * 512;
    let (at, bytes) = (setup + number(0x248), number(0x24c));
    let (packed, elf) = (into.join("vmlinux.lz4"), into.join("vmlinux"));
    std::fs::write(&packed, &kernel[at..at + bytes - 4]).unwrap();
    let unpacked =
        Command::new(artifacts.tool_path("lz4")).args(["-q", "-d"]).arg(&packed).arg(&elf).status();
    assert!(unpacked.unwrap().success(), "the kernel of Debian 12 must be compressed with lz4");
    elf
}

#[test]
fn network_card_transfers_a_megabyte_both_ways() {
    let script = format!(
        "tunctl -t tap0\nifconfig tap0 10.9.0.1 netmask 255.255.255.0 up\nmkdir /tmp/offered\n\
         head -c 1048576 /dev/urandom > /tmp/offered/file\nhttpd -h /tmp/offered\n{} > /tmp/console 2>&1 &\nVMM=$!\nn=0\n\
         until wget -q -O /tmp/back http://10.9.0.2/file || [ $n -gt 200 ]; do n=$((n+1)); sleep 0.5; done\n\
         kill $VMM\nwait $VMM\necho \"CODE $?\"\n\
         echo \"SENT $(md5sum < /tmp/offered/file)\"\necho \"BACK $(md5sum < /tmp/back)\"\ncat /tmp/console\n",
        vmm_command("net", "6.12", "net", "--memory size=256MiB --net tap=tap0,mac=52:54:00:12:34:56"),
    );
    let artifacts = artifacts();
    let host = create_host(&artifacts, &script);
    add_guest(&host, &artifacts, "net", "6.12", USE_NETWORK_SCRIPT);
    let output = run_host(host);
    assert_eq!(words_after(&output, "CODE"), ["0"], "{output}");
    assert_eq!(words_after(&output, "SENT"), words_after(&output, "BACK"), "{output}");
}
