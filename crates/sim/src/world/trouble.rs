//! Fault injection: programs and machines crash, networks and devices fail, and recover later.

use rand::Rng as _;
use units::{HostId, Ns, SliceId};

use super::{Happening, World, device::Device, store::BACKUPS_MAX};

/// A fault with an end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    Network(HostId),
    Device(usize),
    Slice(usize, SliceId),
    FullDisk,
}

impl World {
    pub(super) fn trouble_comes(&mut self) {
        if self.calm {
            return;
        }
        let pause = self.about(self.weather.trouble_every);
        self.after(pause, Happening::TroubleComes);
        self.story.counts.troubles += 1;
        let Some(host) = self.any(&self.hosts()) else { return };
        match self.rng.random_range(0..100) {
            0..17 => self.lose_manager(),
            17..29 => self.lose_agent(host),
            29..38 => self.lose_host(host),
            38..48 => self.freeze_agent(host),
            48..56 => self.lose_network(host),
            56..61 => self.break_session(host),
            61..66 => self.jump_wall_clock(),
            66..69 => self.fail_device(),
            69..76 => self.fail_slice(),
            76..77 if self.weather.days_pass => self.pass_a_day(),
            76..80 => self.power_device_off(),
            80..84 => self.roll_device_back(),
            84..89 => self.run_out_of_disk(),
            89..94 => self.contest_host(host),
            _ => self.restore_backup(),
        }
    }

    /// Returns the duration of a fault: mostly short, sometimes longer than all timeouts.
    pub(super) fn a_while(&mut self) -> Ns {
        let most = if self.chance(0.3) { Ns::secs(4) } else { Ns::ms(300) };
        self.between(Ns::ms(1), most)
    }

    fn lose_manager(&mut self) {
        self.kill_manager();
        let span = self.a_while();
        self.after(span, Happening::ManagerStarts);
    }

    /// Replaces the store by its backup, often while a device is down. Epochs never repeat as long as the
    /// store or the record of the device has them: a world loses only one of the two.
    fn restore_backup(&mut self) {
        if self.weather.devices_forget {
            return self.lose_manager();
        }
        self.kill_manager();
        let age = self.backup_age();
        let restored = self.program.store.restore(age);
        self.story.counts.restored += u64::from(restored);
        self.say(|| format!("store is restored: {restored}"));
        if self.chance(0.5) {
            self.fail_device();
        }
        let span = self.a_while();
        self.after(span, Happening::ManagerStarts);
    }

    /// Returns the number of backups newer than the restored one. It is 0 where no backup may lack a
    /// change of rack.toml.
    fn backup_age(&mut self) -> usize {
        let any = self.weather.old_backups && self.chance(0.5);
        if any { self.rng.random_range(0..BACKUPS_MAX) } else { 0 }
    }

    fn lose_agent(&mut self, host: HostId) {
        self.kill_agent(host, true);
        let (boot, span) = (self.machine(host).boot, self.a_while());
        self.after(span, Happening::AgentStarts(host, boot));
    }

    fn lose_host(&mut self, host: HostId) {
        self.power_off(host);
        let span = self.a_while();
        self.after(span, Happening::Boots(host));
    }

    fn freeze_agent(&mut self, host: HostId) {
        let until = self.now.after(self.a_while());
        self.say(|| format!("agent of {host} is frozen until {until}"));
        self.machine(host).frozen_until = until;
    }

    fn lose_network(&mut self, host: HostId) {
        self.say(|| format!("network of {host} is out"));
        self.machine(host).is_cut_off = true;
        let span = self.a_while();
        self.after(span, Happening::TroubleEnds(Trouble::Network(host)));
    }

    fn fail_device(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        self.say(|| format!("emc {emc} fails"));
        self.devices[emc].failed = true;
        let span = self.a_while();
        self.after(span, Happening::TroubleEnds(Trouble::Device(emc)));
    }

    /// Lets a slice fail, sometimes until it is quarantined.
    fn fail_slice(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        let slices = self.devices[emc].slices();
        let Some(slice) = self.any(&slices) else { return };
        self.say(|| format!("slice {slice} fails"));
        self.story.counts.slice_faults += 1;
        self.devices[emc].bad.insert(slice);
        let span = if self.chance(0.4) { self.between(Ns::secs(1), Ns::secs(15)) } else { self.a_while() };
        self.after(span, Happening::TroubleEnds(Trouble::Slice(emc, slice)));
    }

    /// Fails the power of an emulated device and its machine. Its directory survives unless it is on a
    /// tmpfs. A shared device keeps its record beside the manager's store.
    fn power_device_off(&mut self) {
        let Some(emc) = self.some_device(|device| !device.is_shared()) else { return };
        let emptied = self.weather.devices_forget && self.chance(0.5);
        self.say(|| format!("emc {emc} loses its power, its record too: {emptied}"));
        self.story.counts.devices_off += 1;
        self.story.counts.devices_emptied += u64::from(emptied);
        if emptied {
            self.lose_manager(); // a running manager keeps the old directory open
            let of_machine = self.hosts().into_iter().filter(|_| self.rng.random_bool(0.5));
            of_machine.collect::<Vec<_>>().into_iter().for_each(|host| self.lose_host(host));
        }
        for holding in self.devices[emc].lose_power(emptied) {
            self.lost_with_power(holding);
            self.cut_off(holding, "power");
        }
    }

    /// Loses the record of a shared device, or replaces it by an older copy. The manager is stopped for
    /// that, because it locks the record.
    fn roll_device_back(&mut self) {
        let Some(emc) = self.some_device(Device::is_shared).filter(|_| self.weather.devices_forget) else {
            return;
        };
        self.lose_manager();
        let copies = self.devices[emc].snapshots();
        let version =
            (copies > 0).then(|| self.rng.random_range(0..copies)).filter(|_| self.rng.random_bool(0.8));
        self.say(|| format!("emc {emc} has record {version:?} of {copies}"));
        self.devices[emc].roll_back(version);
        self.story.counts.records_rolled_back += 1;
    }

    fn some_device(&mut self, fits: fn(&Device) -> bool) -> Option<usize> {
        let fitting = (0..self.devices.len()).filter(|emc| fits(&self.devices[*emc]));
        self.any(&fitting.collect::<Vec<_>>())
    }

    /// Fills the store's disk. Mostly the manager has noticed before that space is short.
    fn run_out_of_disk(&mut self) {
        self.say(|| "the store's disk is full".into());
        self.story.counts.full_disks += 1;
        if self.chance(0.8) {
            self.set_store_low(true);
        }
        self.program.set_disk_full(true);
        let span = self.a_while();
        self.after(span, Happening::TroubleEnds(Trouble::FullDisk));
    }

    pub(super) fn trouble_ends(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Network(host) => self.machine(host).is_cut_off = false,
            Trouble::Device(emc) => self.devices[emc].failed = false,
            Trouble::Slice(emc, slice) => drop(self.devices[emc].bad.remove(&slice)),
            Trouble::FullDisk => self.program.set_disk_full(false),
        }
        self.say(|| format!("over: {trouble:?}"));
    }
}
