//! Fault injection: crashes of programs and machines, and failures of networks, devices and disks,
//! with later recovery.

use rand::Rng as _;
use units::{HostId, Ns, SliceId};

use super::{ScheduledEvent, World, device::Device, store::BACKUPS_MAX};

/// Fault that ends after a time.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Network(HostId),
    Device(usize),
    Slice(usize, SliceId),
    FullDisk,
}

impl World {
    pub(super) fn start_fault(&mut self) {
        if self.faults_stopped {
            return;
        }
        let pause = self.random_duration_around(self.fault_model.fault_interval);
        self.schedule_after(pause, ScheduledEvent::FaultStart);
        self.run_log.counts.faults += 1;
        let Some(host) = self.pick_random(&self.hosts()) else { return };
        if !self.manager_process.formers.is_empty() && self.random_bool(0.3) {
            return self.break_session(host); // the agent may connect to another manager
        }
        match self.rng.random_range(0..100) {
            0..9 => self.crash_manager(),
            9..17 => self.depose_manager(),
            17..29 => self.crash_agent(host),
            29..38 => self.crash_host(host),
            38..48 => self.freeze_agent(host),
            48..56 => self.fail_network(host),
            56..61 => self.break_session(host),
            61..66 => self.jump_wall_clock(),
            66..69 => self.fail_device(),
            69..76 => self.fail_slice(),
            76..77 if self.fault_model.suspends_for_days => self.suspend_for_a_day(),
            76..80 => self.fail_device_power(),
            80..84 => self.roll_device_back(),
            84..89 => self.fill_disk(),
            89..94 => self.connect_duplicate_agent(host),
            _ => self.restore_backup(),
        }
    }

    /// Draws the duration of a fault: up to 300 ms in 70 % of cases, otherwise up to 4 s, which can
    /// exceed all timeouts.
    pub(super) fn random_fault_duration(&mut self) -> Ns {
        let max = if self.random_bool(0.3) { Ns::secs(4) } else { Ns::ms(300) };
        self.random_between(Ns::ms(1), max)
    }

    pub(super) fn crash_manager(&mut self) {
        self.kill_manager();
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::ManagerStart);
    }

    /// Replaces the store by a backup; in half of the cases a device also fails. In worlds where
    /// devices lose their records, this function only crashes the manager. Epochs could repeat if
    /// the store and the record of a device were both lost.
    fn restore_backup(&mut self) {
        if self.fault_model.devices_lose_records {
            return self.crash_manager();
        }
        self.kill_manager();
        let age = self.backup_age();
        let restored = self.manager_process.store.restore(age);
        self.run_log.counts.restored += u64::from(restored);
        self.log(|| format!("store is restored: {restored}"));
        if self.random_bool(0.5) {
            self.fail_device();
        }
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::ManagerStart);
    }

    /// Returns the number of backups that are newer than the backup to restore. It is 0 in worlds
    /// where a backup must contain all changes of rack.toml.
    fn backup_age(&mut self) -> usize {
        let may_be_older = self.fault_model.old_backups && self.random_bool(0.5);
        if may_be_older { self.rng.random_range(0..BACKUPS_MAX) } else { 0 }
    }

    fn crash_agent(&mut self, host: HostId) {
        self.kill_agent(host, true);
        let (boot, span) = (self.machine(host).boot, self.random_fault_duration());
        self.schedule_after(span, ScheduledEvent::AgentStart(host, boot));
    }

    fn crash_host(&mut self, host: HostId) {
        self.power_off(host);
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::HostBoot(host));
    }

    fn freeze_agent(&mut self, host: HostId) {
        let until = self.now.after(self.random_fault_duration());
        self.log(|| format!("agent of {host} is frozen until {until}"));
        self.machine(host).frozen_until = until;
    }

    fn fail_network(&mut self, host: HostId) {
        self.log(|| format!("network of {host} fails"));
        self.machine(host).is_network_down = true;
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::FaultEnd(Fault::Network(host)));
    }

    fn fail_device(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        self.log(|| format!("emc {emc} fails"));
        self.devices[emc].failed = true;
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::FaultEnd(Fault::Device(emc)));
    }

    /// Makes all calls for a slice fail for some time. In 40 % of cases, this time is long enough
    /// for the manager to quarantine the slice.
    fn fail_slice(&mut self) {
        let emc = self.rng.random_range(0..self.devices.len());
        let slices = self.devices[emc].slices();
        let Some(slice) = self.pick_random(&slices) else { return };
        self.log(|| format!("slice {slice} fails"));
        self.run_log.counts.slice_faults += 1;
        self.devices[emc].failing_slices.insert(slice);
        let span = if self.random_bool(0.4) {
            self.random_between(Ns::secs(1), Ns::secs(15))
        } else {
            self.random_fault_duration()
        };
        self.schedule_after(span, ScheduledEvent::FaultEnd(Fault::Slice(emc, slice)));
    }

    /// Simulates a power failure of an emulated device. The directory of the device survives,
    /// unless it is on a tmpfs. A shared device is not affected, because its record is next to the
    /// store of the manager.
    fn fail_device_power(&mut self) {
        let Some(emc) = self.pick_device(|device| !device.is_shared()) else { return };
        let record_lost = self.fault_model.devices_lose_records && self.random_bool(0.5);
        self.log(|| format!("emc {emc} loses power, record lost: {record_lost}"));
        self.run_log.counts.device_power_failures += 1;
        self.run_log.counts.devices_emptied += u64::from(record_lost);
        if record_lost {
            self.end_former_leaders(); // a running manager would keep the old directory open
            self.crash_manager();
            let affected_hosts = self.hosts().into_iter().filter(|_| self.rng.random_bool(0.5));
            affected_hosts.collect::<Vec<_>>().into_iter().for_each(|host| self.crash_host(host));
        }
        for holding in self.devices[emc].lose_power(record_lost) {
            self.end_lost_grant(holding);
            self.invalidate_mappings(holding, "power");
        }
    }

    /// Empties the record of a shared device, or replaces the record by an older copy. The manager
    /// is crashed first, because a running manager locks the record.
    fn roll_device_back(&mut self) {
        let Some(emc) = self.pick_device(Device::is_shared).filter(|_| self.fault_model.devices_lose_records)
        else {
            return;
        };
        self.end_former_leaders();
        self.crash_manager();
        let copies = self.devices[emc].snapshot_count();
        let version =
            (copies > 0).then(|| self.rng.random_range(0..copies)).filter(|_| self.rng.random_bool(0.8));
        self.log(|| format!("emc {emc} is rolled back to record {version:?} of {copies}"));
        self.devices[emc].roll_back(version);
        self.run_log.counts.records_rolled_back += 1;
    }

    fn pick_device(&mut self, condition: fn(&Device) -> bool) -> Option<usize> {
        let matching = (0..self.devices.len()).filter(|emc| condition(&self.devices[*emc]));
        self.pick_random(&matching.collect::<Vec<_>>())
    }

    /// Fills the disk of the store. In 80 % of cases, low disk space is reported to the manager
    /// first.
    fn fill_disk(&mut self) {
        self.log(|| "the store's disk is full".into());
        self.run_log.counts.full_disks += 1;
        if self.random_bool(0.8) {
            self.set_disk_space_low(true);
        }
        self.manager_process.set_disk_full(true);
        let span = self.random_fault_duration();
        self.schedule_after(span, ScheduledEvent::FaultEnd(Fault::FullDisk));
    }

    pub(super) fn end_fault(&mut self, fault: Fault) {
        match fault {
            Fault::Network(host) => self.machine(host).is_network_down = false,
            Fault::Device(emc) => self.devices[emc].failed = false,
            Fault::Slice(emc, slice) => drop(self.devices[emc].failing_slices.remove(&slice)),
            Fault::FullDisk => self.manager_process.set_disk_full(false),
        }
        self.log(|| format!("fault ends: {fault:?}"));
    }
}
