//! Thread that performs the steps of fair tiering. The thread is separate because calls to the kernel
//! may block for long. Errors are reported, and do not affect the other functions of the agent.

use std::{
    sync::{Arc, mpsc},
    time::Instant,
};

use units::Ns;

use super::{FairTiering, Inputs};
use crate::{component_thread::ComponentThread, metrics::Metrics, tiering_report::Report};

/// Inputs of the thread.
#[derive(Clone, Debug)]
pub struct StepRunner {
    /// Inputs of fair tiering.
    pub inputs: Inputs,
    /// Metrics that are updated after each step.
    pub metrics: Arc<Metrics>,
}

impl StepRunner {
    /// Starts the thread. Pages remain where they are when it stops.
    pub fn start(self) -> ComponentThread {
        ComponentThread::start("fair tiering", move |stopped| self.run_steps(stopped))
    }

    /// Performs steps until the sender of `stopped` is dropped. A failed initialization is retried.
    fn run_steps(&self, stopped: &mpsc::Receiver<()>) {
        let started = Instant::now();
        let (mut opened, mut last_reason) = (None, String::new());
        loop {
            let step_started = Instant::now();
            let report = match opened.take().map_or_else(|| FairTiering::open(self.inputs.clone()), Ok) {
                Ok(mut tiering) => {
                    let now = u64::try_from(started.elapsed().as_nanos()).map_or(Ns::NEVER, Ns);
                    let report = tiering.step(now);
                    opened = Some(tiering);
                    report
                }
                Err(error) => Report::blocked(units::chain(&error)),
            };
            if report.reason != last_reason {
                match &*report.reason {
                    "" => {
                        tracing::info!(tenants = report.tenants.len(), "fair tiering moves pages of tenants")
                    }
                    reason => tracing::warn!(reason, "fair tiering moves no pages"),
                }
                last_reason.clone_from(&report.reason);
            }
            self.metrics.observe_tiering(&report);
            let rest = self.inputs.config.step.as_duration().saturating_sub(step_started.elapsed());
            if stopped.recv_timeout(rest) != Err(mpsc::RecvTimeoutError::Timeout) {
                break;
            }
        }
        if let Some(mut tiering) = opened {
            tiering.stop();
        }
    }
}
