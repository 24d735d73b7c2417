//! Scrubs of slices on hosts. A scrub takes time and may fail or verify only a part of the slice.
//! The slice keeps its old data after an incomplete scrub.

use pool::{
    agent::{HostFailure, SliceOutcome},
    protocol::{FailureReason, Holding, ScrubReport},
};
use units::{HostId, Ns};

use super::{World, device::DataPattern, hosts::host_failure, machine::HostCall};

const SCRUB_DURATION: Ns = Ns::ms(5);

impl World {
    pub(super) fn start_scrub(&mut self, host: HostId, instance: u64, holding: Holding) {
        let started = self.wall_time();
        self.add_to_kernel(host, holding);
        if let Some(running) = self.machine(host).find_agent(instance) {
            running.scrubbing.insert(holding);
        }
        self.schedule_host_call(host, instance, SCRUB_DURATION, HostCall::Scrub { holding, started });
    }

    pub(super) fn complete_scrub(
        &mut self,
        host: HostId,
        instance: u64,
        holding: Holding,
        started: units::UnixMs,
    ) -> Result<SliceOutcome, HostFailure> {
        if let Some(running) = self.machine(host).find_agent(instance) {
            running.scrubbing.remove(&holding);
        }
        self.inject_host_failure()?;
        if !self.is_mapping_valid(holding, host) {
            return Err(host_failure(FailureReason::Host, "the slice is not granted to this host"));
        }
        // A partial scrub leaves the contents of the slice unchanged.
        let partial = !self.faults_stopped && self.random_bool(self.fault_model.partial_scrub_rate);
        if !partial {
            self.device(holding.slice).write(holding.slice, DataPattern::ZERO);
            self.run_log.counts.scrubbed += 1;
        } else {
            self.run_log.counts.partial_scrubs += 1;
        }
        self.machine(host).kernel.retain(|mapped| mapped.slice != holding.slice);
        let verified = if partial { units::Bytes::mib(1023) } else { units::SLICE };
        Ok(SliceOutcome::Scrubbed(ScrubReport { holding, started, ended: self.wall_time(), verified }))
    }
}
