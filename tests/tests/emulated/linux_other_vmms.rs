//! Stock Debian guests under QEMU, which `vmm-plugin` has become inside an emulated host: they see the nodes that they see under
//! our own VMM.

use emulated_host::nodes::PRINT_NODES_SCRIPT;
use tests::linux_guests::{add_guest, assert_nodes, bed, host, part, pool_options, run, words};

/// Kernel, CPUs, and GiB of each pool node. A node of several slices has some as memory devices.
const SHAPES: [(&str, u32, &[u64]); 3] = [("6.12", 1, &[1]), ("6.1", 1, &[3]), ("6.12", 2, &[2, 1])];

/// Whether a disk can be read, too.
const TELL_DISK: &str = "echo \"DISK $(head -c 5 /dev/vda) $(cat /sys/block/vda/ro)\"";

#[test]
fn qemu_boots_the_same_nodes() {
    let mut script = "printf %-512s hello > /tmp/disk\n".to_owned();
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        script += &format!(
            "echo BEGIN s{n}\nvmm-plugin exec --vmm qemu --vm s{n} --standalone --kernel /guest/{kernel} \
             --initrd /guest/initrd-{kernel} --cmdline 'console=ttyS0 quiet panic=-1' --cpus {cpus} \
             --memory size=512MiB --disk path=/tmp/disk,readonly=on{}\necho END s{n} $?\n",
            pool_options(pools),
        );
    }
    let bed = bed();
    let host = host(&bed, &script);
    host.qemu().unwrap();
    for kernel in emulated_host::KERNELS {
        add_guest(
            &host,
            &bed,
            &format!("initrd-{kernel}"),
            kernel,
            &format!("{PRINT_NODES_SCRIPT}\n{TELL_DISK}"),
        );
    }
    let said = run(host);
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        let (guest, code) = part(&said, &format!("s{n}"));
        assert_eq!(code, "0", "{guest}");
        assert_eq!(words(guest, "DISK"), ["hello", "1"], "{guest}");
        assert_nodes(kernel, *cpus, pools, guest);
    }
}
