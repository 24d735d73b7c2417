//! What goes wrong: programs and machines die, networks and devices fail, and all come back later, if not too soon.

use rand::Rng as _;
use units::{HostId, Ns, SliceId};

use super::{Happening, World};

/// Something that will be over.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    Network(HostId),
    Device(usize),
    Slice(usize, SliceId),
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
            0..25 => self.lose_manager(),
            25..43 => self.lose_agent(host),
            43..55 => self.lose_host(host),
            55..68 => self.freeze_agent(host),
            68..80 => self.lose_network(host),
            80..86 => self.break_session(host),
            86..88 => self.jump_wall_clock(),
            88..92 => self.fail_device(),
            92..95 => self.fail_slice(),
            95..96 if self.weather.days_pass => self.pass_a_day(),
            95..96 => self.fail_device(),
            96..97 => self.power_device_off(),
            _ => self.restore_backup(),
        }
    }

    /// Mostly soon, sometimes after everybody's patience.
    pub(super) fn a_while(&mut self) -> Ns {
        let most = if self.chance(0.3) { Ns::secs(4) } else { Ns::ms(300) };
        self.between(Ns::ms(1), most)
    }

    fn lose_manager(&mut self) {
        self.kill_manager();
        let span = self.a_while();
        self.after(span, Happening::ManagerStarts);
    }

    /// The store is lost, and its backup takes its place: often while a device is down.
    fn restore_backup(&mut self) {
        self.kill_manager();
        let restored = self.program.store.restore();
        self.story.counts.restored += u64::from(restored);
        self.say(|| format!("store is restored: {restored}"));
        if self.chance(0.5) {
            self.fail_device();
        }
        let span = self.a_while();
        self.after(span, Happening::ManagerStarts);
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

    /// Sometimes for longer than it takes until the slice is quarantined.
    fn fail_slice(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        let slices = self.devices[emc].slices();
        let Some(slice) = self.any(&slices) else { return };
        self.say(|| format!("slice {slice} fails"));
        self.devices[emc].bad.insert(slice);
        let span = if self.chance(0.4) { self.between(Ns::secs(1), Ns::secs(15)) } else { self.a_while() };
        self.after(span, Happening::TroubleEnds(Trouble::Slice(emc, slice)));
    }

    /// Only a device that cuts off by itself has grants to lose: those of the other kind are the ledger's alone.
    fn power_device_off(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        if self.devices[emc].is_shared() {
            return;
        }
        self.say(|| format!("emc {emc} loses its power"));
        for holding in self.devices[emc].lose_power() {
            self.lost_with_power(holding);
            self.cut_off(holding, "power");
        }
    }

    pub(super) fn trouble_ends(&mut self, trouble: Trouble) {
        match trouble {
            Trouble::Network(host) => self.machine(host).is_cut_off = false,
            Trouble::Device(emc) => self.devices[emc].failed = false,
            Trouble::Slice(emc, slice) => drop(self.devices[emc].bad.remove(&slice)),
        }
        self.say(|| format!("over: {trouble:?}"));
    }
}
