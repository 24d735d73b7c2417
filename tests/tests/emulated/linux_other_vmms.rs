//! Tests of stock Debian guests under QEMU, started by `vmm-plugin` inside an emulated host. The
//! guests must have the same NUMA nodes as under the VMM of Tarn.

use emulated_host::nodes::PRINT_NODES_SCRIPT;
use tests::linux_guests::{
    add_guest, artifacts, assert_nodes, create_host, guest_section, pool_options, run_host, words_after,
};

/// Shapes of guests: kernel, number of CPUs, and GiB of each pool node. If a node has several
/// slices, some of them are memory devices.
const GUEST_SHAPES: [(&str, u32, &[u64]); 3] = [("6.12", 1, &[1]), ("6.1", 1, &[3]), ("6.12", 2, &[2, 1])];

/// Guest script that prints the first bytes of a disk and whether the disk is read-only.
const PRINT_DISK_SCRIPT: &str = "echo \"DISK $(head -c 5 /dev/vda) $(cat /sys/block/vda/ro)\"";

#[test]
fn qemu_guest_has_the_same_nodes() {
    let mut script = "printf %-512s hello > /tmp/disk\n".to_owned();
    for (n, (kernel, cpus, pools)) in GUEST_SHAPES.iter().enumerate() {
        script += &format!(
            "echo BEGIN s{n}\nvmm-plugin exec --vmm qemu --vm s{n} --standalone --kernel /guest/{kernel} \
             --initrd /guest/initrd-{kernel} --cmdline 'console=ttyS0 quiet panic=-1' --cpus {cpus} \
             --memory size=512MiB --disk path=/tmp/disk,readonly=on{}\necho END s{n} $?\n",
            pool_options(pools),
        );
    }
    let artifacts = artifacts();
    let host = create_host(&artifacts, &script);
    host.add_qemu().unwrap();
    for kernel in emulated_host::KERNELS {
        add_guest(
            &host,
            &artifacts,
            &format!("initrd-{kernel}"),
            kernel,
            &format!("{PRINT_NODES_SCRIPT}\n{PRINT_DISK_SCRIPT}"),
        );
    }
    let output = run_host(host);
    for (n, (kernel, cpus, pools)) in GUEST_SHAPES.iter().enumerate() {
        let (guest, code) = guest_section(&output, &format!("s{n}"));
        assert_eq!(code, "0", "{guest}");
        assert_eq!(words_after(guest, "DISK"), ["hello", "1"], "{guest}");
        assert_nodes(kernel, *cpus, pools, guest);
    }
}
