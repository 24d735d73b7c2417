//! Stock Debian guests under QEMU, which `vmm-plugin` has become inside an emulated host: they see the nodes that they see under
//! our own VMM.
#![allow(clippy::unwrap_used, reason = "the whole file is tests: what cannot go on fails")]

use emulated_host::nodes::{TELL_NODES, Told};
use tests::linux_guests::{add_guest, bed, host, part, run, words};

/// Kernel, processors, and GiB of each pool node. A node of several slices has some as devices.
const SHAPES: [(&str, u32, &[u64]); 3] = [("6.12", 1, &[1]), ("6.1", 1, &[3]), ("6.12", 2, &[2, 1])];

/// Whether a disk can be read, too.
const TELL_DISK: &str = "echo \"DISK $(head -c 5 /dev/vda) $(cat /sys/block/vda/ro)\"";

fn options(pools: &[u64]) -> String {
    pools.iter().map(|gib| format!(" --pool size={gib}GiB")).collect()
}

#[test]
fn qemu_boots_the_same_nodes() {
    let mut script = "printf %-512s hello > /tmp/disk\n".to_owned();
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        script += &format!(
            "echo BEGIN s{n}\nvmm-plugin exec --vmm qemu --vm s{n} --standalone --kernel /guest/{kernel} \
             --initrd /guest/initrd-{kernel} --cmdline 'console=ttyS0 quiet panic=-1' --cpus {cpus} \
             --memory size=512MiB --disk path=/tmp/disk,readonly=on{}\necho END s{n} $?\n",
            options(pools),
        );
    }
    let bed = bed();
    let host = host(&bed, &script);
    host.qemu().unwrap();
    for kernel in emulated_host::KERNELS {
        add_guest(&host, &bed, &format!("initrd-{kernel}"), kernel, &format!("{TELL_NODES}\n{TELL_DISK}"));
    }
    let said = run(host);
    for (n, (kernel, cpus, pools)) in SHAPES.iter().enumerate() {
        let (guest, code) = part(&said, &format!("s{n}"));
        assert_eq!(code, "0", "{guest}");
        assert_eq!(words(guest, "DISK"), ["hello", "1"], "{guest}");
        are_nodes_right(kernel, *cpus, pools, &Told::of(guest));
    }
}

fn are_nodes_right(kernel: &str, cpus: u32, pools: &[u64], told: &Told) {
    assert_eq!(told.nodes.len(), 1 + pools.len(), "{told:?}");
    assert_eq!(told.nodes[0].cpus, (0..cpus).collect::<Vec<_>>(), "{told:?}");
    for (number, (node, gib)) in (1..).zip(told.nodes[1..].iter().zip(pools)) {
        assert_eq!(
            (&node.cpus[..], node.distances[0], node.distances[number]),
            (&[][..], 18, 10),
            "{told:?}"
        );
        let all = gib << 20;
        assert!(node.total_kib <= all && node.free_kib * 10 >= all * 9, "90 % is free: {told:?}");
        if kernel == "6.12" {
            assert!(told.tier_of(node.id) > told.tier_of(0), "a lower tier: {told:?}");
        }
    }
}
