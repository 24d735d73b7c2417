//! Tests of the generated arguments. The arguments for each VMM describe the same guest as the ACPI
//! tables, or the guest is rejected with a reason.

use cloud_hypervisor_client::models::VmConfig;
use proptest::prelude::*;
use serde_json::Value;
use units::{Bytes, limits::GUEST_SHUTDOWN_TIMEOUT};

use super::{guest::Location, *};
use crate::{
    boot::Kernel,
    config::{Config, Console, Disk, LocalNode, Net},
    layout::Performance,
    memory::MemoryBackendOptions,
};

const POOL: Performance = Performance::POOL;

fn config(local: &[(u32, Bytes)]) -> Config {
    let node = |(cpus, size): &(u32, Bytes)| LocalNode {
        size: Some(*size),
        cpus: *cpus,
        memory_options: MemoryBackendOptions::default(),
        performance: Performance::LOCAL,
    };
    let kernel =
        Kernel { kernel: "/k".into(), initrd: Some("/i".into()), command_line: "console=ttyS0".into() };
    Config {
        vm: units::Name::new("web-1").unwrap(),
        agent: None,
        local: local.iter().map(node).collect(),
        pool: Vec::new(),
        kernel,
        disks: Vec::new(),
        nets: Vec::new(),
        console: Console::Null,
        nested: false,
        shutdown_timeout: GUEST_SHUTDOWN_TIMEOUT.as_duration(),
    }
}

fn slice_location(n: u32) -> Location {
    Location::File(format!("/emc/{n}"), 0)
}

/// Returns a guest with one pool node per element of `pool`, which is the number of slices of the
/// node.
fn guest(config: Config, pool: &[u32]) -> Guest {
    let sizes = config.local.iter().map(|node| node.size.unwrap()).collect();
    let node =
        |slices: &u32| (POOL, MemoryBackendOptions::default(), (0..*slices).map(slice_location).collect());
    Guest::new(config, sizes, pool.iter().map(node).collect(), Vec::new()).unwrap()
}

fn small_guest(pool: &[u32]) -> Guest {
    guest(config(&[(2, Bytes::mib(512))]), pool)
}

/// Returns a guest that uses all options.
fn guest_with_all_options() -> Guest {
    let mut config = config(&[(2, Bytes::mib(512))]);
    config.disks = vec![
        Disk { path: "/d,isk".into(), read_only: false },
        Disk { path: "/fixed".into(), read_only: true },
    ];
    config.nets = vec![Net { tap: "tap0".into(), mac: "52:54:00:12:34:56".parse().unwrap() }];
    config.local[0].memory_options = MemoryBackendOptions {
        shared: false,
        prefault: true,
        hugepage_size: Some(Bytes::mib(2)),
        host_numa_node: Some(1),
    };
    let sizes = vec![Bytes::mib(512)];
    let memory_options =
        MemoryBackendOptions { prefault: true, host_numa_node: Some(3), ..MemoryBackendOptions::default() };
    let pool = vec![(POOL, memory_options, vec![slice_location(0), Location::File("/emc/1".into(), 4096)])];
    Guest::new(config, sizes, pool, Vec::new()).unwrap()
}

fn join_lines(options: &[Vec<String>]) -> String {
    options.iter().map(|arguments| arguments.join(" ") + "\n").collect()
}

#[test]
fn qemu_arguments_cover_the_whole_guest() {
    let expected = "\
-name guest=web-1
-machine q35,accel=kvm,hmat=on,max-ram-below-4g=512M
-cpu host
-smp 2,sockets=1,cores=2,threads=1
-m size=1536M,slots=1,maxmem=2560M
-no-user-config
-nodefaults
-no-reboot
-display none
-object memory-backend-memfd,id=node0-0,size=512M,share=off,hugetlb=on,hugetlbsize=2097152,prealloc=on,host-nodes=1,policy=bind
-numa node,nodeid=0,cpus=0-1,memdev=node0-0,initiator=0
-object memory-backend-file,id=node1-0,mem-path=/emc/0,align=1024M,size=1024M,share=on,prealloc=on,host-nodes=3,policy=bind
-numa node,nodeid=1,memdev=node1-0,initiator=0
-object memory-backend-file,id=node1-1,mem-path=/emc/1,offset=4096,align=1024M,size=1024M,share=on,prealloc=on,host-nodes=3,policy=bind
-device pc-dimm,id=dimm-node1-1,memdev=node1-1,node=1
-numa dist,src=0,dst=1,val=18
-numa dist,src=1,dst=0,val=18
-numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-latency,latency=85
-numa hmat-lb,initiator=0,target=0,hierarchy=memory,data-type=access-bandwidth,bandwidth=200000M
-numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=155
-numa hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=30000M
-object rng-builtin,id=rng
-device virtio-rng-pci,rng=rng
-drive if=none,id=disk0,format=raw,readonly=off,file=/d,,isk
-device virtio-blk-pci,drive=disk0
-drive if=none,id=disk1,format=raw,readonly=on,file=/fixed
-device virtio-blk-pci,drive=disk1
-netdev tap,id=net0,ifname=tap0,script=no,downscript=no
-device virtio-net-pci,netdev=net0,mac=52:54:00:12:34:56
-serial null
-kernel /k
-initrd /i
-append console=ttyS0 memhp_default_state=online_movable
";
    assert_eq!(join_lines(&qemu::options(&guest_with_all_options()).unwrap()), expected);
}

#[test]
fn memhp_default_state_is_added_only_for_memory_devices() {
    let command_line = |guest: &Guest| qemu::options(guest).unwrap().concat().pop().unwrap();
    assert_eq!(command_line(&small_guest(&[])), "console=ttyS0");
    assert_eq!(command_line(&small_guest(&[1, 1])), "console=ttyS0");
    assert_eq!(command_line(&small_guest(&[2])), "console=ttyS0 memhp_default_state=online_movable");
    let mut guest = small_guest(&[2]);
    guest.config.kernel.command_line = "memhp_default_state=offline".into();
    assert_eq!(command_line(&guest), "memhp_default_state=offline");
}

#[test]
fn slices_are_placed_above_4g_for_any_local_size() {
    let machine = |local, pool: &[u32]| {
        let guest = guest(config(&[(1, local)]), pool);
        qemu::options(&guest).unwrap()[1][1].clone()
    };
    assert_eq!(machine(Bytes::mib(512), &[]), "q35,accel=kvm,hmat=on");
    assert_eq!(machine(Bytes::mib(512), &[1]), "q35,accel=kvm,hmat=on,max-ram-below-4g=512M");
    assert_eq!(machine(Bytes::gib(2), &[1]), "q35,accel=kvm,hmat=on");
}

#[test]
fn unsupported_guest_is_rejected_with_the_reason() {
    let error = |result: Result<String, BackendError>| result.unwrap_err().to_string();
    let too_many_slices = small_guest(&[200, 59]);
    let reason = "257 slices need memory devices, but QEMU has 256 slots";
    assert!(error(qemu::options(&too_many_slices).map(|_| String::new())).ends_with(reason));
    assert!(qemu::options(&small_guest(&[200, 58])).is_ok());
    assert!(error(libvirt::domain_xml(&small_guest(&[257]))).ends_with(reason));
    let offset = error(cloud_hypervisor::vm_config(&guest_with_all_options()).map(|_| String::new()));
    assert!(offset.contains("slice node1-1 is at offset 4096 of /emc/1"), "{offset}");
    let mut without_pci = small_guest(&[1]);
    without_pci.config.kernel.command_line = "pci=off quiet".into();
    assert!(qemu::options(&without_pci).is_ok(), "a guest without PCI devices may disable PCI");
    without_pci.config.disks = vec![Disk { path: "/d".into(), read_only: false }];
    for result in [
        qemu::options(&without_pci).map(|_| String::new()),
        cloud_hypervisor::options(&without_pci).map(|_| String::new()),
        libvirt::domain_xml(&without_pci),
    ] {
        assert!(error(result).contains("cmdline: pci=off hides its disks and network devices"));
    }
    let mut two_nodes = config(&[(1, Bytes::mib(64)), (1, Bytes::mib(64))]);
    two_nodes.local[1].memory_options.prefault = true;
    assert!(
        error(libvirt::domain_xml(&guest(two_nodes, &[]))).contains("prefault=on must be set for all nodes")
    );
}

#[test]
fn shell_command_quotes_special_characters() {
    let arguments = vec![vec!["-append".to_owned(), "it's $HOME, \"so\"".to_owned()], vec!["-x".to_owned()]];
    let command = to_shell_command("printf '%s|'", &arguments);
    let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "-append|it's $HOME, \"so\"|-x|");
}

#[test]
fn cloud_hypervisor_options_match_the_api_body() {
    let mut config = config(&[(2, Bytes::mib(512))]);
    config.disks = vec![Disk { path: "/d".into(), read_only: true }];
    config.console = Console::File("/c".into());
    let expected = "\
--cpus boot=2,topology=1:2:1:1
--memory size=0
--memory-zone id=node0-0,prefault=off,shared=on,size=536870912 file=/emc/0,id=node1-0,prefault=off,shared=on,size=1073741824
--numa guest_numa_id=0,cpus=[0,1],distances=[1@18],memory_zones=[node0-0] guest_numa_id=1,distances=[0@18],memory_zones=[node1-0]
--kernel /k
--cmdline console=ttyS0
--rng src=/dev/urandom
--serial file=/c
--console off
--initramfs /i
--disk image_type=raw,path=/d,readonly=on
";
    assert_eq!(join_lines(&cloud_hypervisor::options(&guest(config, &[1])).unwrap()), expected);
}

/// Returns the value of a key in a comma-separated option.
fn option_value<'a>(option: &'a str, name: &str) -> Option<&'a str> {
    option.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='))
}

fn parse_number(text: Option<&str>) -> u64 {
    text.unwrap().trim_end_matches('M').parse().unwrap()
}

/// Returns the size of each node in MiB, according to QEMU options.
fn qemu_sizes(options: &[Vec<String>], nodes: usize) -> Vec<u64> {
    let values = |name: &'static str| {
        options.iter().filter(move |arguments| arguments[0] == name).map(|arguments| &arguments[1])
    };
    let size = |id: &str| {
        parse_number(option_value(
            values("-object").find(|object| option_value(object, "id") == Some(id)).unwrap(),
            "size",
        ))
    };
    let mut sizes = vec![0; nodes];
    for option in values("-numa").filter(|option| option.starts_with("node")) {
        sizes[usize::try_from(parse_number(option_value(option, "nodeid"))).unwrap()] +=
            size(option_value(option, "memdev").unwrap());
    }
    for option in values("-device").filter(|option| option.starts_with("pc-dimm")) {
        sizes[usize::try_from(parse_number(option_value(option, "node"))).unwrap()] +=
            size(option_value(option, "memdev").unwrap());
    }
    sizes
}

fn arbitrary_shapes() -> impl Strategy<Value = (Vec<(u32, u64)>, Vec<u32>)> {
    let locals = prop::collection::vec((1..=8_u32, 64..=9_000_u64), 1..=4);
    (locals, prop::collection::vec(1..=40_u32, 0..=4))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn all_vmms_have_the_nodes_sizes_and_distances_of_the_layout((local, pool) in arbitrary_shapes()) {
        let local: Vec<_> = local.into_iter().map(|(cpus, mib)| (cpus, Bytes::mib(mib))).collect();
        let guest = guest(config(&local), &pool);
        let layout = &guest.layout;
        let mib: Vec<u64> = layout.nodes.iter().map(|node| node.bytes().get() >> 20).collect();

        let options = qemu::options(&guest).unwrap();
        prop_assert_eq!(&qemu_sizes(&options, mib.len()), &mib);
        for (from, to) in guest.node_pairs().filter(|(from, to)| from != to) {
            let value = ["-numa".to_owned(), format!("dist,src={from},dst={to},val={}", layout.distance(from, to))];
            prop_assert!(options.iter().any(|option| *option == value));
        }

        let body = cloud_hypervisor::vm_config(&guest).unwrap();
        let parsed: VmConfig = serde_json::from_value(body.clone()).unwrap();
        prop_assert_eq!(&serde_json::to_value(&parsed).unwrap(), &body, "all fields must be part of the API");
        let zones = parsed.memory.unwrap().zones.unwrap();
        for (number, node) in parsed.numa.unwrap().iter().enumerate() {
            let ids = node.memory_zones.as_ref().unwrap();
            let bytes: i64 = zones.iter().filter(|zone| ids.contains(&zone.id)).map(|zone| zone.size).sum();
            prop_assert_eq!(u64::try_from(bytes).unwrap() >> 20, mib[number]);
            prop_assert_eq!(node.cpus.is_none(), layout.nodes[number].is_pool());
            for other in node.distances.as_ref().unwrap() {
                let to = usize::try_from(other.destination).unwrap();
                prop_assert_eq!(other.distance, i32::from(layout.distance(number, to)));
            }
            prop_assert_eq!(node.distances.as_ref().unwrap().len() + 1, mib.len());
        }

        let domain = libvirt::domain_xml(&guest).unwrap();
        prop_assert_eq!(domain.matches("<cell ").count(), mib.len());
        prop_assert_eq!(domain.matches("pc-dimm,").count(), pool.iter().map(|slices| *slices as usize).sum::<usize>());
        for (from, to) in guest.initiator_pairs() {
            let latency = layout.latency_ns(from, to);
            let value = format!(r#"<latency initiator="{from}" target="{to}" type="access" value="{latency}"/>"#);
            prop_assert!(domain.contains(&value));
        }
    }

    #[test]
    fn qemu_bandwidth_is_rounded_up_to_one_step(local_mbps in 1..=655_340_u32, pool_mbps in 1..=655_340_u32) {
        let mut guest = small_guest(&[1]);
        guest.layout.nodes[0].performance.bandwidth_mbps = local_mbps;
        guest.layout.nodes[1].performance.bandwidth_mbps = pool_mbps;
        for (to, mbps_of_layout) in [(0, local_mbps), (1, pool_mbps)] {
            let qemu_mbps = qemu::bandwidth_mbps(&guest, 0, to);
            prop_assert!(qemu_mbps >= u64::from(mbps_of_layout) && qemu_mbps < u64::from(mbps_of_layout) + 16 && qemu_mbps / 16 <= u64::from(u16::MAX));
        }
    }
}

#[test]
fn json_arguments_are_strings() {
    let array: Value =
        serde_json::from_str(&to_json_text(&qemu::options(&small_guest(&[1])).unwrap().concat().into()))
            .unwrap();
    assert_eq!(array[0], "-name");
    assert!(array.as_array().unwrap().iter().all(Value::is_string));
}
