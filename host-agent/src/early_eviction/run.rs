//! Thread that evicts memory early. The thread is separate because calls to the kernel may block for as
//! long as the swap device is slow. Errors are reported, and do not affect the other functions of the agent.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use units::Ns;

use super::{EarlyEviction, Inputs};
use crate::{
    component_thread::ComponentThread,
    eviction_report::{Report, ReportLimiter},
    metrics::Metrics,
    report_slot::ReportSlot,
};

/// Inputs of the thread.
#[derive(Clone, Debug)]
pub struct CycleRunner {
    /// Inputs of early eviction.
    pub inputs: Inputs,
    /// Metrics that are updated in each cycle.
    pub metrics: Arc<Metrics>,
    /// Reports for the session with the manager.
    pub reports: Arc<ReportSlot<Report>>,
}

impl CycleRunner {
    /// Starts the thread. The kernel evicts memory at the limits when it stops.
    pub fn start(self) -> ComponentThread {
        ComponentThread::start("early eviction", move |stopped| self.run_cycles(stopped))
    }

    /// Runs cycles until the sender of `stopped` is dropped. A failed initialization is retried.
    fn run_cycles(&self, stopped: &mpsc::Receiver<()>) {
        let started = Instant::now();
        let cycle = self.inputs.config.settings.cycle.as_duration();
        let (mut opened, mut last_reason) = (None, None);
        let mut reports = ReportLimiter::new(Arc::clone(&self.reports));
        loop {
            let cycle_start = Instant::now();
            let now = Ns::from(cycle_start.duration_since(started));
            let report = match opened.take().map_or_else(|| EarlyEviction::open(self.inputs.clone()), Ok) {
                Ok(mut eviction) => {
                    let report = eviction.begin_cycle(now);
                    opened = Some(eviction);
                    report
                }
                Err(error) => Report::blocked(units::chain(&super::CycleError::from(error))),
            };
            log_change(&report, &mut last_reason);
            self.metrics.observe_eviction(&report);
            reports.store(now, report);
            if !evict_until(cycle_start + cycle, started, opened.as_mut(), stopped) {
                break;
            }
        }
        if let Some(mut eviction) = opened {
            eviction.restore_io_priorities();
        }
    }
}

/// Logs whether early eviction works, if this has changed.
fn log_change(report: &Report, last_reason: &mut Option<String>) {
    if last_reason.as_ref() == Some(&report.reason) {
        return;
    }
    match &*report.reason {
        "" => tracing::info!(tenants = report.tenants.len(), "early eviction of the memory of tenants"),
        reason => tracing::warn!(reason, "no early eviction"),
    }
    *last_reason = Some(report.reason.clone());
}

/// Evicts memory until the cycle ends. Returns false if early eviction must stop.
fn evict_until(
    end: Instant,
    started: Instant,
    mut eviction: Option<&mut EarlyEviction>,
    stopped: &mpsc::Receiver<()>,
) -> bool {
    loop {
        let evict = |eviction: &mut &mut EarlyEviction| eviction.evict(Ns::from(started.elapsed()));
        let next = eviction.as_mut().map_or(Duration::MAX, evict);
        let rest = end.saturating_duration_since(Instant::now());
        if stopped.recv_timeout(next.min(rest)) != Err(mpsc::RecvTimeoutError::Timeout) {
            return false;
        }
        if next >= rest {
            return true;
        }
    }
}
