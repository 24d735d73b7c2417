//! Runs the operator's fence command for EMCs that cannot revoke access. The command runs outside
//! the threads of the EMCs, so that other calls do not wait for it. EMCs that request the fence of
//! a host while the command runs share its result.

use std::sync::Arc;

use pool::{
    manager::{DeviceCall, DeviceFailure, DeviceReply},
    record::Fence,
};
use tokio::runtime::Handle as Runtime;
use units::{EmcId, HostId, UnixMs};

use super::{DriverCore, SharedDriver};
use crate::{convert, emc_thread::EmcSender, fence_command};

/// EMC that waits until a host is powered off, with the sender to the EMC's thread.
pub(super) type WaitingEmc = (EmcId, EmcSender);

/// Starts the fence command for a host, unless the command is already running. The result is
/// reported to `emc`.
pub(super) fn start_fence_command(
    shared: &Arc<SharedDriver>,
    runtime: &Runtime,
    host: HostId,
    emc: WaitingEmc,
) {
    let mut core = shared.lock();
    let waiting = core.pending_fences.entry(host).or_default();
    waiting.push(emc);
    if waiting.len() > 1 {
        return; // the command is already running
    }
    let (command, name) = (core.fence_command.clone(), convert::host_name(core.manager.durable(), host));
    let since = core.manager.stop_start_time(host);
    drop(core);
    let shared = Arc::clone(shared);
    runtime.spawn(async move {
        let result = match (command, shared.fencing_token()) {
            (_, Err(error)) => Err(error.to_string()),
            (Some(command), Ok(token)) => fence_command::run(&command, &name, token).await,
            (None, Ok(_)) => Err("rack.toml has no [fence] command".to_owned()),
        };
        report_fence_result(&shared, host, since, result);
    });
}

/// Reports the result of a fence command to the waiting EMCs. A success does not count if the host
/// reconnected in the meantime, because the host can have new grants or be fenced again.
fn report_fence_result(
    shared: &SharedDriver,
    host: HostId,
    since: Option<UnixMs>,
    result: Result<(), String>,
) {
    let mut core = shared.lock();
    let waiting = core.pending_fences.remove(&host).unwrap_or_default();
    let is_same_fence = is_fencing(&core, host) && core.manager.stop_start_time(host) == since;
    let result = result.and_then(|()| {
        is_same_fence.then_some(()).ok_or("the host reconnected before the fence command ended".to_owned())
    });
    let Err(problem) = result else {
        let call = DeviceCall::Fence { host, powered_off: true };
        return waiting.into_iter().for_each(|(_, mut calls)| calls.send(call.clone()));
    };
    drop(core);
    for (emc, _) in waiting {
        let call = DeviceCall::Fence { host, powered_off: false };
        let failure = DeviceFailure::NotFenced(problem.clone());
        let _ = shared.handle_device_results(emc, vec![DeviceReply::Failed { call, failure }]); // fails only if the manager is stopping
    }
}

fn is_fencing(core: &DriverCore, host: HostId) -> bool {
    let entry = core.manager.durable().host(host);
    entry.is_some_and(|entry| matches!(entry.host.fence, Fence::Fencing { .. }))
}
