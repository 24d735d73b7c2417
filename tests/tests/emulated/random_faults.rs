//! Random operations on a rack in a box: three hosts, two devices that nothing fences, and VMs that come, go, die and lose memory
//! while agents and managers are killed, hosts are paused and networks are cut. The kernels are watched all the while.

use rand::{Rng as _, SeedableRng as _, seq::IndexedRandom as _};
use rand_pcg::Pcg64;
use tests::real_rack::{RealRack, plan};

/// The seed of a failure reproduces it, except for timing.
const SEED: u64 = 1;
const OPERATIONS: usize = 30;
const HOSTS: usize = 3;
/// Of each device. QEMU emulates each access to the first of two devices, as if it were no memory: a slice of it takes minutes.
const SLICES: [u32; 2] = [1, 4];
/// Memory that a VM writes into each slice, in MiB.
const TOUCH_MIB: u32 = 16;

/// Fault of a host, until it is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Paused,
    CutOff,
}

#[derive(Clone, Debug)]
struct Vm {
    host: usize,
    name: String,
}

struct Story {
    rack: RealRack,
    random: Pcg64,
    vms: Vec<Vm>,
    troubles: [Option<Trouble>; HOSTS],
    manager_is_gone: bool,
}

impl Story {
    fn say(&self, what: &str) {
        println!(
            "{what}; {} VMs, {:?}, manager gone: {}",
            self.vms.len(),
            self.troubles,
            self.manager_is_gone
        );
    }

    fn step(&mut self, number: usize) {
        let host = self.random.random_range(0..HOSTS);
        match self.random.random_range(0..16) {
            0..=5 => self.reserve(host, &format!("vm{number}")),
            6..=7 => self.end_one(),
            8 => self.kill_one(),
            9 => self.force_one(),
            10 => self.kill_agent(host),
            11 => self.trouble(host, Trouble::Paused),
            12 => self.trouble(host, Trouble::CutOff),
            13 => self.toggle_manager(),
            _ => self.mend_one(),
        }
    }

    fn reserve(&mut self, host: usize, name: &str) {
        if self.manager_is_gone || self.troubles[host].is_some() {
            return;
        }
        let slices = self.random.random_range(1..=2);
        let words =
            format!("reserve --host h{host} --vm {name} --pool {slices}GiB --cores 1 --request-id {name}");
        let reserved = self.rack.try_tarn(&words).status.success(); // all may be in use, or the host just be back
        self.say(&format!("{name} of {slices} slices on h{host}: {reserved}"));
        if reserved {
            self.rack.tarn(&format!("wait-ready {name}"));
            self.rack.tarn(&format!("commit {name}"));
            assert_eq!(self.rack.start_vm(host, name, TOUCH_MIB), [0; 0], "{name} found bytes of another's");
            self.vms.push(Vm { host, name: name.to_owned() });
        }
    }

    /// One of the VMs on hosts that are not paused.
    fn take_one(&mut self) -> Option<Vm> {
        let able = |vm: &&Vm| self.troubles[vm.host] != Some(Trouble::Paused);
        let able: Vec<Vm> = self.vms.iter().filter(able).cloned().collect();
        let one = able.choose(&mut self.random)?.clone();
        self.vms.retain(|vm| vm.name != one.name);
        Some(one)
    }

    fn end_one(&mut self) {
        let Some(vm) = self.take_one() else { return };
        self.say(&format!("{} ends", vm.name));
        assert_eq!(self.rack.end_vm(vm.host, &vm.name), [0; 0], "{}: another's bytes over its own", vm.name);
    }

    fn kill_one(&mut self) {
        let Some(vm) = self.take_one() else { return };
        self.say(&format!("{} is killed", vm.name));
        self.rack.kill_vm(vm.host, &vm.name);
    }

    /// Its memory is taken away as soon as its host hears of it; its process may live until then, and is ended by it.
    fn force_one(&mut self) {
        if self.manager_is_gone {
            return;
        }
        let Some(vm) = self.take_one() else { return };
        self.say(&format!("{} loses its memory", vm.name));
        self.rack.tarn(&format!("release {} --force --reason random", vm.name));
    }

    fn kill_agent(&self, host: usize) {
        if self.troubles[host] != Some(Trouble::Paused) {
            self.say(&format!("the agent of h{host} is killed"));
            self.rack.run(host, "kill -9 $(pidof host-agent) || true");
        }
    }

    fn trouble(&mut self, host: usize, trouble: Trouble) {
        if self.troubles[host].is_some() {
            return self.mend(host);
        }
        self.say(&format!("h{host} is to be {trouble:?}"));
        match trouble {
            Trouble::Paused => self.rack.host(host).pause().unwrap(),
            Trouble::CutOff => self.rack.host(host).set_link(false).unwrap(),
        }
        self.troubles[host] = Some(trouble);
    }

    /// The manager, or else the first host that is in trouble.
    fn mend_one(&mut self) {
        match self.troubles.iter().position(Option::is_some) {
            _ if self.manager_is_gone => self.toggle_manager(),
            Some(host) => self.mend(host),
            None => {}
        }
    }

    fn mend(&mut self, host: usize) {
        match self.troubles[host].take() {
            None => return,
            Some(Trouble::Paused) => self.rack.host(host).resume().unwrap(),
            Some(Trouble::CutOff) => self.rack.host(host).set_link(true).unwrap(),
        }
        self.say(&format!("h{host} is mended"));
    }

    fn toggle_manager(&mut self) {
        match self.manager_is_gone {
            true => {
                self.rack.rack.start_manager().unwrap();
                self.rack.until("the manager answers", |rack| rack.try_tarn("get rack").status.success());
            }
            false => self.rack.rack.kill_manager(),
        }
        self.manager_is_gone = !self.manager_is_gone;
        self.say("the manager is killed, or started again");
    }

    /// Repairs all faults and ends all VMs.
    fn calm(&mut self) {
        (0..HOSTS).for_each(|host| self.mend(host));
        if self.manager_is_gone {
            self.toggle_manager();
        }
        self.rack.rack.wait_hosts_up(|| true).unwrap();
        while !self.vms.is_empty() {
            self.end_one();
        }
        self.rack.until_free();
    }
}

#[test]
fn after_thirty_random_operations_and_faults_every_slice_is_free_and_zero_and_no_kernel_has_any() {
    let rack = RealRack::start(plan(HOSTS, &SLICES, "dax"));
    let watch = rack.watch();
    let mut story = Story {
        rack,
        random: Pcg64::seed_from_u64(SEED),
        vms: Vec::new(),
        troubles: [None; HOSTS],
        manager_is_gone: false,
    };
    (0..OPERATIONS).for_each(|number| story.step(number));
    story.calm();
    let looks = watch.end();
    println!("no slice was on two hosts in {looks} looks");
    story.rack.assert_agreed();
    story.rack.assert_zero();
}
