//! Stops machines by the operator's fence command where EMCs cannot revoke access. The command runs
//! beside the threads of the EMCs, so that other grants do not wait for it, and once for all EMCs
//! that request it meanwhile.

use std::sync::Arc;

use pool::{
    manager::{DeviceCall, DeviceDone, DeviceFailure},
    record::Fence,
};
use tokio::runtime::Handle as Runtime;
use units::{EmcId, HostId, UnixMs};

use super::{Core, Shared};
use crate::{convert, emc::EmcCalls, power_off};

/// EMC that waits for a machine to be stopped, with the sender to its thread.
pub(super) type Waiting = (EmcId, EmcCalls);

/// Stops a machine and informs the EMC.
pub(super) fn stop(shared: &Arc<Shared>, runtime: &Runtime, host: HostId, emc: Waiting) {
    let mut core = shared.lock();
    let waiting = core.stopping.entry(host).or_default();
    waiting.push(emc);
    if waiting.len() > 1 {
        return; // the command is running already
    }
    let (command, name) = (core.stop.clone(), convert::host_name(core.manager.durable(), host));
    let since = core.manager.stopping_since(host);
    drop(core);
    let shared = Arc::clone(shared);
    runtime.spawn(async move {
        let stopped = match command {
            Some(command) => power_off::stop(&command, &name).await,
            None => Err("rack.toml has no [fence] command".to_owned()),
        };
        tell(&shared, host, since, stopped);
    });
}

/// A host that has returned meanwhile may have new grants, and may even be fenced again: an earlier
/// result does not apply to it.
fn tell(shared: &Shared, host: HostId, since: Option<UnixMs>, stopped: Result<(), String>) {
    let mut core = shared.lock();
    let waiting = core.stopping.remove(&host).unwrap_or_default();
    let is_same = is_fencing(&core, host) && core.manager.stopping_since(host) == since;
    let stopped =
        stopped.and_then(|()| is_same.then_some(()).ok_or("it returned before it was stopped".to_owned()));
    let Err(why) = stopped else {
        let call = DeviceCall::Fence { host, powered_off: true };
        return waiting.into_iter().for_each(|(_, mut calls)| calls.send(call.clone()));
    };
    drop(core);
    for (emc, _) in waiting {
        let call = DeviceCall::Fence { host, powered_off: false };
        let failure = DeviceFailure::NotFenced(why.clone());
        let _ = shared.device_answers(emc, vec![DeviceDone::Failed { call, failure }]); // no receiver exists after the end
    }
}

fn is_fencing(core: &Core, host: HostId) -> bool {
    let entry = core.manager.durable().host(host);
    entry.is_some_and(|entry| matches!(entry.host.fence, Fence::Fencing { .. }))
}
