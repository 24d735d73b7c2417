//! Scrubs on hosts: they take time, fail, or verify only a part. An incomplete scrub leaves old data.

use pool::{
    agent::{Done, HostFailure},
    protocol::{FailedReason, Holding, Scrubbed},
};
use units::{HostId, Ns};

use super::{World, device::Mark, hosts::failed, machine::Job};

const SCRUB_TAKES: Ns = Ns::ms(5);

impl World {
    pub(super) fn begin_scrub(&mut self, host: HostId, instance: u64, holding: Holding) {
        let started = self.wall();
        self.kernel_takes(host, holding);
        if let Some(running) = self.machine(host).running(instance) {
            running.scrubbing.insert(holding);
        }
        self.host_job(host, instance, SCRUB_TAKES, Job::Scrub { holding, started });
    }

    pub(super) fn scrub(
        &mut self,
        host: HostId,
        instance: u64,
        holding: Holding,
        started: units::UnixMs,
    ) -> Result<Done, HostFailure> {
        if let Some(running) = self.machine(host).running(instance) {
            running.scrubbing.remove(&holding);
        }
        self.host_call()?;
        if !self.reaches(holding, host) {
            return Err(failed(FailedReason::Host, "no such grant"));
        }
        // The host verified only a part: the remainder is unchanged.
        let partial = !self.calm && self.chance(self.weather.partial_scrubs);
        if !partial {
            self.device(holding.slice).write(holding.slice, Mark::ZERO);
            self.story.counts.scrubbed += 1;
        } else {
            self.story.counts.partial_scrubs += 1;
        }
        self.machine(host).kernel.retain(|had| had.slice != holding.slice);
        let verified = if partial { units::Bytes::mib(1023) } else { units::SLICE };
        Ok(Done::Scrubbed(Scrubbed { holding, started, ended: self.wall(), verified }))
    }
}
