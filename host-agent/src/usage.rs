//! Periodic measurement of the memory that each VM has touched. The results are stored in the
//! [`UsageTable`].

use std::{collections::BTreeMap, sync::Arc};

use pool::{
    agent::Agent,
    protocol::{ObservedRehome, ObservedVm},
};
use tokio::time::MissedTickBehavior;
use units::{Bytes, ReservationId, limits::TOUCHED_MEMORY_SAMPLE_INTERVAL};

use crate::{
    driver::Handle,
    host::{Host, Usage},
    usage_table::UsageTable,
};

/// Measures all running VMs every [`TOUCHED_MEMORY_SAMPLE_INTERVAL`] until the driver ends.
pub async fn measure_periodically(driver: Handle, host: Arc<dyn Host>, table: Arc<UsageTable>) {
    let mut interval = tokio::time::interval(TOUCHED_MEMORY_SAMPLE_INTERVAL.as_duration());
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        // During a move, memory files contain pages and their copies.
        let measurable = |agent: &Agent| {
            let mut vms = agent.live_vms();
            vms.retain(|id, _| !agent.is_rehoming(*id));
            vms
        };
        let Ok(vms) = driver.inspect(measurable).await else { return };
        let (host, earlier) = (Arc::clone(&host), table.all());
        let measuring = move || {
            let measured = measure(&*host, &vms, &earlier);
            log_overflow(&vms, &earlier, &measured);
            measured
        };
        match tokio::task::spawn_blocking(measuring).await {
            Ok(mut measured) => {
                let table = Arc::clone(&table);
                let recorded = driver.inspect(move |agent| {
                    // VMs that ended meanwhile have a newer measurement from their end.
                    measured.retain(|id, _| agent.live_vm(*id).is_some() && !agent.is_rehoming(*id));
                    table.record_all(&measured);
                });
                if recorded.await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::error!(%error, "cannot measure the memory of VMs"),
        }
    }
}

/// Measures all VMs. The memory of a moved VM that cannot be measured any more keeps its earlier value,
/// so that the VM still has an outcome when it ends.
fn measure(
    host: &dyn Host,
    vms: &BTreeMap<ReservationId, ObservedVm>,
    earlier: &BTreeMap<ReservationId, Usage>,
) -> BTreeMap<ReservationId, Usage> {
    let measure = |(id, vm): (&ReservationId, &ObservedVm)| {
        let usage = host.usage(*id, vm);
        let earlier = earlier.get(id).filter(|_| vm.rehome == ObservedRehome::Done);
        let earlier = earlier.copied().unwrap_or_default();
        (*id, Usage { local: usage.local.or(earlier.local), pool: usage.pool.or(earlier.pool), ..usage })
    };
    vms.iter().map(measure).collect()
}

/// Logs when the pool memory of a VM begins or ceases to overflow to local nodes.
fn log_overflow(
    vms: &BTreeMap<ReservationId, ObservedVm>,
    earlier: &BTreeMap<ReservationId, Usage>,
    now: &BTreeMap<ReservationId, Usage>,
) {
    let overflow = |usage: Option<&Usage>| usage.and_then(|usage| usage.overflow).unwrap_or(Bytes::ZERO);
    for (id, vm) in vms {
        match (overflow(earlier.get(id)), overflow(now.get(id))) {
            (Bytes::ZERO, Bytes::ZERO) => {}
            (Bytes::ZERO, bytes) => {
                tracing::warn!(vm = %vm.vm, %bytes, "pool memory of VM overflows to local nodes");
            }
            (_, Bytes::ZERO) => {
                tracing::info!(vm = %vm.vm, "all pool memory of VM is on the pool's node again")
            }
            _ => {}
        }
    }
}
