//! Samples running VMs with pool memory for the manager's monitor (Pond, section 4.5 B). The VMM of a
//! VM samples the accesses to the pool memory, see [`crate::vmm_client`]. Other VMMs than
//! `vmm-plugin` have no such socket, so accesses of their guests are not observed.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use pool::agent::{Agent, Process};
use proto::v1 as wire;
use tokio::{sync::Semaphore, task::JoinSet, time::MissedTickBehavior};
use units::{
    Ns, ReservationId,
    limits::{QOS_PROBLEM_BYTES_MAX, VMM_CALLS_IN_FLIGHT_MAX, VMM_RESPONSE_TIMEOUT},
    truncated,
};

use crate::{driver::Handle, outbox::SampleOutbox, usage_table::UsageTable, vmm_client::VmmClient};

/// VM to be sampled.
#[derive(Clone, Debug)]
struct Target {
    reservation: ReservationId,
    process: Process,
    control_socket: Option<PathBuf>,
}

/// Samples all running VMs with pool memory at this interval until the driver ends.
pub async fn sample_periodically(
    interval: Ns,
    driver: Handle,
    usage: Arc<UsageTable>,
    outbox: Arc<SampleOutbox>,
) {
    let mut ticks = tokio::time::interval(interval.as_duration());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sampler = Sampler::default();
    loop {
        ticks.tick().await;
        let Ok(targets) = driver.inspect(targets).await else { return };
        let samples = sampler.sample_all(targets, &usage).await;
        if !samples.is_empty() {
            outbox.put(wire::VmSamples { samples });
        }
    }
}

fn targets(agent: &Agent) -> Vec<Target> {
    let vms = agent.live_records().filter(|record| !record.slices.is_empty());
    let target = |record: &pool::agent::VmRecord| Target {
        reservation: record.reservation,
        process: record.process.clone(),
        control_socket: record.control_socket.clone().map(PathBuf::from),
    };
    vms.map(target).collect()
}

/// Connections to the VMMs.
#[derive(Debug, Default)]
struct Sampler {
    /// Open connections; a connection is dropped after an error.
    clients: BTreeMap<ReservationId, VmmClient>,
}

/// Result of an interval of access sampling.
#[derive(Debug, PartialEq)]
struct Interval {
    length_ms: u64,
    accessed: Option<wire::AccessedPages>,
}

impl Sampler {
    /// Samples all VMs, several at the same time. A VM has no sample if its interval has just begun.
    async fn sample_all(&mut self, targets: Vec<Target>, usage: &UsageTable) -> Vec<wire::VmSample> {
        let permits = Arc::new(Semaphore::new(VMM_CALLS_IN_FLIGHT_MAX));
        let mut calls = JoinSet::new();
        // Connections to VMs that have ended are dropped.
        let mut clients = std::mem::take(&mut self.clients);
        for target in targets {
            let (client, permits) = (clients.remove(&target.reservation), Arc::clone(&permits));
            calls.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let reservation = target.reservation;
                let called =
                    tokio::time::timeout(VMM_RESPONSE_TIMEOUT.as_duration(), call_vmm(client, target));
                let late = |_| Err(format!("the VMM did not reply within {VMM_RESPONSE_TIMEOUT}"));
                (reservation, called.await.unwrap_or_else(late))
            });
        }
        let (mut samples, usage) = (Vec::new(), usage.all());
        while let Some(called) = calls.join_next().await {
            let Ok((reservation, called)) = called else { continue }; // a panicked call has no sample
            let result = called.map(|(client, interval)| {
                self.clients.insert(reservation, client);
                interval
            });
            if let Some(mut sample) = to_sample(result) {
                sample.reservation = reservation.to_string();
                let touched = usage.get(&reservation).and_then(|usage| usage.pool);
                sample.touched_pool_bytes = touched.map(units::Bytes::get);
                samples.push(sample);
            }
        }
        samples
    }
}

async fn call_vmm(
    client: Option<VmmClient>,
    target: Target,
) -> Result<(VmmClient, Option<Interval>), String> {
    let path = target.control_socket.ok_or("the VMM has no control socket")?;
    let mut client = match client {
        Some(client) => client,
        None => VmmClient::connect(path, target.process).await.map_err(|error| units::chain(&error))?,
    };
    let response = client.sample_access().await.map_err(|error| units::chain(&error))?;
    let interval =
        response.interval_ms.map(|length_ms| Interval { length_ms, accessed: combine(&response.nodes) });
    Ok((client, interval))
}

/// Combines the results of all pool nodes of a VM, weighted by the sizes of the nodes. Returns `None`
/// if no node could be sampled, or if the reported numbers are invalid.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the share is between 0 and 1")]
fn combine(nodes: &[wire::NodeAccess]) -> Option<wire::AccessedPages> {
    let total: u64 = nodes.iter().try_fold(0_u64, |sum, node| sum.checked_add(node.bytes))?;
    let sampled: u32 = nodes.iter().try_fold(0_u32, |sum, node| sum.checked_add(node.sampled_pages))?;
    let is_valid =
        |node: &wire::NodeAccess| node.sampled_pages > 0 && node.accessed_pages <= node.sampled_pages;
    if total == 0 || !nodes.iter().all(is_valid) {
        return None;
    }
    let share = |node: &wire::NodeAccess| {
        let weight = node.bytes as f64 / total as f64;
        weight * f64::from(node.accessed_pages) / f64::from(node.sampled_pages)
    };
    let share: f64 = nodes.iter().map(share).sum();
    Some(wire::AccessedPages {
        source: wire::AccessedPagesSource::Vmm.into(),
        sampled_pages: sampled,
        accessed_pages: (share * f64::from(sampled)).round().min(f64::from(sampled)) as u32,
    })
}

/// Converts the result of an interval to a sample without reservation. Returns `None` if the interval
/// has just begun.
fn to_sample(result: Result<Option<Interval>, String>) -> Option<wire::VmSample> {
    let (interval_ms, accessed) = match result {
        Ok(None) => return None,
        Ok(Some(Interval { length_ms, accessed })) => (
            length_ms,
            accessed.ok_or_else(|| {
                "the VMM cannot sample this memory: it has moved the memory to local memory, or maps it privately or in pages of 1 GiB"
                    .to_owned()
            }),
        ),
        Err(problem) => (0, Err(truncated(problem, QOS_PROBLEM_BYTES_MAX))),
    };
    let counter_problem = "this agent does not measure processor counters".to_owned();
    let sample = wire::VmSample { interval_ms, counter_problem, ..wire::VmSample::default() };
    Some(match accessed {
        Ok(accessed) => wire::VmSample { accessed: Some(accessed), ..sample },
        Err(access_problem) => wire::VmSample { access_problem, ..sample },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(bytes: u64, accessed_pages: u32) -> wire::NodeAccess {
        wire::NodeAccess { node: 1, page_bytes: 4096, sampled_pages: 200, accessed_pages, bytes }
    }

    fn shares(nodes: &[wire::NodeAccess]) -> Option<(u32, u32)> {
        combine(nodes).map(|pages| (pages.accessed_pages, pages.sampled_pages))
    }

    #[test]
    fn nodes_are_weighted_by_size() {
        assert_eq!(shares(&[node(1 << 30, 50)]), Some((50, 200)));
        assert_eq!(shares(&[node(3 << 30, 200), node(1 << 30, 0)]), Some((300, 400)));
        assert_eq!(shares(&[node(1 << 30, 200), node(1 << 30, 200)]), Some((400, 400)));
    }

    #[test]
    fn invalid_numbers_of_a_vmm_are_no_result() {
        let nothing_sampled = wire::NodeAccess { sampled_pages: 0, ..node(1, 0) };
        for nodes in [
            vec![],
            vec![node(1, 201)],
            vec![nothing_sampled],
            vec![node(0, 1)],
            vec![node(u64::MAX, 1), node(1, 1)],
            vec![wire::NodeAccess { sampled_pages: u32::MAX, ..node(1, 1) }, node(1, 1)],
        ] {
            assert_eq!(shares(&nodes), None, "{nodes:?}");
        }
    }

    #[test]
    fn sample_without_accesses_names_the_problem() {
        assert_eq!(to_sample(Ok(None)), None, "the interval has just begun");
        let failed = to_sample(Err("no socket".into())).unwrap();
        assert_eq!((failed.accessed, failed.access_problem.as_str()), (None, "no socket"));
        let unsampled = to_sample(Ok(Some(Interval { length_ms: 30, accessed: None }))).unwrap();
        assert_eq!((unsampled.interval_ms, unsampled.accessed), (30, None));
        assert!(!unsampled.access_problem.is_empty());
    }
}
