//! Test with random operations on a rack of three emulated hosts and a device that cannot revoke
//! access. VMs start, end, are killed and lose memory. Meanwhile, agents and the manager are
//! killed, hosts are paused, and network links fail. No slice may be in two kernels.

use rand::{Rng as _, SeedableRng as _, seq::IndexedRandom as _};
use rand_pcg::Pcg64;
use tests::emulated_rack::{EmulatedRack, plan};

/// Seed of the random operations. A run with the same seed repeats the operations, except for their
/// timing.
const SEED: u64 = 1;
const OPERATION_COUNT: usize = 30;
const RACK_HOST_COUNT: usize = 3;
const SLICE_COUNT: u32 = 5;
/// Memory that a VM writes to each slice, in MiB.
const TOUCH_MIB: u32 = 16;

/// Fault of a host that lasts until the host is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostFault {
    Paused,
    CutOff,
}

#[derive(Clone, Debug)]
struct Vm {
    host: usize,
    name: String,
}

struct Scenario {
    rack: EmulatedRack,
    random: Pcg64,
    vms: Vec<Vm>,
    faults: [Option<HostFault>; RACK_HOST_COUNT],
    is_manager_down: bool,
}

impl Scenario {
    fn log_state(&self, event: &str) {
        println!(
            "{event}; {} VMs, {:?}, manager down: {}",
            self.vms.len(),
            self.faults,
            self.is_manager_down
        );
    }

    fn run_operation(&mut self, number: usize) {
        let host = self.random.random_range(0..RACK_HOST_COUNT);
        match self.random.random_range(0..16) {
            0..=5 => self.reserve(host, &format!("vm{number}")),
            6..=7 => self.end_random_vm(),
            8 => self.kill_random_vm(),
            9 => self.force_release_random_vm(),
            10 => self.kill_agent(host),
            11 => self.inject_fault(host, HostFault::Paused),
            12 => self.inject_fault(host, HostFault::CutOff),
            13 => self.toggle_manager(),
            _ => self.repair_random_host(),
        }
    }

    fn reserve(&mut self, host: usize, name: &str) {
        if self.is_manager_down || self.faults[host].is_some() {
            return;
        }
        let slices = self.random.random_range(1..=2);
        let words =
            format!("reserve --host h{host} --vm {name} --pool {slices}GiB --cores 1 --request-id {name}");
        // The command may fail: all slices may be in use, or the host may not be ready.
        let reserved = self.rack.try_tarn(&words).status.success();
        self.log_state(&format!("{name} of {slices} slices on h{host}: {reserved}"));
        if reserved {
            self.rack.tarn(&format!("wait-ready {name}"));
            self.rack.tarn(&format!("commit {name}"));
            assert_eq!(self.rack.start_vm(host, name, TOUCH_MIB), [0; 0], "{name} found data of another VM");
            self.vms.push(Vm { host, name: name.to_owned() });
        }
    }

    /// Removes and returns a random VM on a host that is not paused.
    fn remove_random_vm(&mut self) -> Option<Vm> {
        let is_reachable = |vm: &&Vm| self.faults[vm.host] != Some(HostFault::Paused);
        let reachable: Vec<Vm> = self.vms.iter().filter(is_reachable).cloned().collect();
        let chosen = reachable.choose(&mut self.random)?.clone();
        self.vms.retain(|vm| vm.name != chosen.name);
        Some(chosen)
    }

    fn end_random_vm(&mut self) {
        let Some(vm) = self.remove_random_vm() else { return };
        self.log_state(&format!("{} ends", vm.name));
        assert_eq!(
            self.rack.end_vm(vm.host, &vm.name),
            [0; 0],
            "{}: found data of another VM in the slices",
            vm.name
        );
    }

    fn kill_random_vm(&mut self) {
        let Some(vm) = self.remove_random_vm() else { return };
        self.log_state(&format!("{} is killed", vm.name));
        self.rack.kill_vm(vm.host, &vm.name);
    }

    /// Releases the memory of a VM by force. The process of the VM ends when the host receives the
    /// release.
    fn force_release_random_vm(&mut self) {
        if self.is_manager_down {
            return;
        }
        let Some(vm) = self.remove_random_vm() else { return };
        self.log_state(&format!("{} loses its memory", vm.name));
        self.rack.tarn(&format!("release {} --force --reason random", vm.name));
    }

    fn kill_agent(&self, host: usize) {
        if self.faults[host] != Some(HostFault::Paused) {
            self.log_state(&format!("the agent of h{host} is killed"));
            self.rack.run(host, "kill -9 $(pidof host-agent) || true");
        }
    }

    fn inject_fault(&mut self, host: usize, fault: HostFault) {
        if self.faults[host].is_some() {
            return self.repair_host(host);
        }
        self.log_state(&format!("fault {fault:?} of h{host} starts"));
        match fault {
            HostFault::Paused => self.rack.host(host).pause().unwrap(),
            HostFault::CutOff => self.rack.host(host).set_link(false).unwrap(),
        }
        self.faults[host] = Some(fault);
    }

    /// Restarts the manager if the manager is down. Otherwise, repairs the first faulty host.
    fn repair_random_host(&mut self) {
        match self.faults.iter().position(Option::is_some) {
            _ if self.is_manager_down => self.toggle_manager(),
            Some(host) => self.repair_host(host),
            None => {}
        }
    }

    fn repair_host(&mut self, host: usize) {
        match self.faults[host].take() {
            None => return,
            Some(HostFault::Paused) => self.rack.host(host).resume().unwrap(),
            Some(HostFault::CutOff) => self.rack.host(host).set_link(true).unwrap(),
        }
        self.log_state(&format!("h{host} is repaired"));
    }

    fn toggle_manager(&mut self) {
        match self.is_manager_down {
            true => {
                self.rack.rack.start_manager().unwrap();
                self.rack
                    .wait_until("the manager replies", |rack| rack.try_tarn("get rack").status.success());
            }
            false => self.rack.rack.kill_manager(),
        }
        self.is_manager_down = !self.is_manager_down;
        self.log_state("the manager was started or killed");
    }

    /// Repairs all faults and ends all VMs.
    fn repair_all_hosts(&mut self) {
        (0..RACK_HOST_COUNT).for_each(|host| self.repair_host(host));
        if self.is_manager_down {
            self.toggle_manager();
        }
        self.rack.rack.wait_hosts_up(|| true).unwrap();
        while !self.vms.is_empty() {
            self.end_random_vm();
        }
        self.rack.wait_all_slices_free();
    }
}

#[test]
fn slices_are_free_and_zero_after_random_faults() {
    let rack = EmulatedRack::start(plan(RACK_HOST_COUNT, &[SLICE_COUNT], "dax"));
    let watch = rack.watch_owners();
    let mut scenario = Scenario {
        rack,
        random: Pcg64::seed_from_u64(SEED),
        vms: Vec::new(),
        faults: [None; RACK_HOST_COUNT],
        is_manager_down: false,
    };
    (0..OPERATION_COUNT).for_each(|number| scenario.run_operation(number));
    scenario.repair_all_hosts();
    let checks = watch.finish();
    println!("no slice was on two hosts in {checks} checks");
    scenario.rack.assert_kernels_match_manager();
    scenario.rack.assert_devices_zeroed();
}
