//! Runs the operator's fence command where EMCs cannot revoke access. It runs beside the threads of
//! the EMCs, so that other grants do not wait for it, and once for all EMCs that request it
//! meanwhile.

use std::sync::Arc;

use pool::{
    manager::{DeviceCall, DeviceFailure, DeviceReply},
    record::Fence,
};
use tokio::runtime::Handle as Runtime;
use units::{EmcId, HostId, UnixMs};

use super::{Core, Shared};
use crate::{convert, emc_thread::EmcSender, fence_command};

/// EMC that waits for a machine to be stopped, with the sender to its thread.
pub(super) type WaitingEmc = (EmcId, EmcSender);

/// Runs the fence command for a host, unless it is running, and reports the result to the EMC.
pub(super) fn start(shared: &Arc<Shared>, runtime: &Runtime, host: HostId, emc: WaitingEmc) {
    let mut core = shared.lock();
    let waiting = core.pending_fences.entry(host).or_default();
    waiting.push(emc);
    if waiting.len() > 1 {
        return; // the command is running already
    }
    let (command, name) = (core.fence_command.clone(), convert::host_name(core.manager.durable(), host));
    let since = core.manager.stopping_since(host);
    drop(core);
    let shared = Arc::clone(shared);
    runtime.spawn(async move {
        let result = match command {
            Some(command) => fence_command::run(&command, &name).await,
            None => Err("rack.toml has no [fence] command".to_owned()),
        };
        report(&shared, host, since, result);
    });
}

/// Reports the result of a fence command to the waiting EMCs. A host that has returned meanwhile
/// may have new grants, and may even be fenced again: an earlier result does not apply to it.
fn report(shared: &Shared, host: HostId, since: Option<UnixMs>, result: Result<(), String>) {
    let mut core = shared.lock();
    let waiting = core.pending_fences.remove(&host).unwrap_or_default();
    let is_same_fence = is_fencing(&core, host) && core.manager.stopping_since(host) == since;
    let result = result.and_then(|()| {
        is_same_fence.then_some(()).ok_or("the host returned before its machine was stopped".to_owned())
    });
    let Err(problem) = result else {
        let call = DeviceCall::Fence { host, powered_off: true };
        return waiting.into_iter().for_each(|(_, mut calls)| calls.send(call.clone()));
    };
    drop(core);
    for (emc, _) in waiting {
        let call = DeviceCall::Fence { host, powered_off: false };
        let failure = DeviceFailure::NotFenced(problem.clone());
        let _ = shared.handle_device_results(emc, vec![DeviceReply::Failed { call, failure }]); // no receiver exists after the end
    }
}

fn is_fencing(core: &Core, host: HostId) -> bool {
    let entry = core.manager.durable().host(host);
    entry.is_some_and(|entry| matches!(entry.host.fence, Fence::Fencing { .. }))
}
