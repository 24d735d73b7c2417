//! Thread that runs the epochs of Symbiosis. The thread is separate because calls to the kernel may
//! block for long. Errors are reported, and do not affect the other functions of the agent.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    time::Instant,
};

use super::{Config, KernelPaths, Symbiosis, SymbiosisError};
use crate::{
    component_thread::ComponentThread,
    metrics::Metrics,
    shares::{Report, SharesState},
    tenant_profiles::TenantProfiles,
};

/// Inputs of the epochs of Symbiosis.
#[derive(Clone, Debug)]
pub struct EpochRunner {
    /// Settings of Symbiosis.
    pub config: Config,
    /// Runtime directory of the agent, in which shares are stored.
    pub runtime_dir: PathBuf,
    /// Files of the kernel that are read.
    pub kernel: KernelPaths,
    /// State shared with the session: the last report, and weights.
    pub state: Arc<SharesState>,
    /// Profiles that fair tiering measures; `None` if Symbiosis uses DAMON itself.
    pub profiles: Option<Arc<TenantProfiles>>,
    /// Metrics that are updated after each epoch.
    pub metrics: Arc<Metrics>,
}

impl EpochRunner {
    /// Starts the thread. Limits of tenants remain set when it stops.
    pub fn start(self) -> ComponentThread {
        ComponentThread::start("Symbiosis", move |stopped| self.run_epochs(stopped))
    }

    /// Runs epochs until the sender of `stopped` is dropped. A failed initialization is retried in
    /// every epoch.
    fn run_epochs(&self, stopped: &mpsc::Receiver<()>) {
        let (started, mut opened) = (Instant::now(), None);
        for number in 1.. {
            let symbiosis = match opened.take().map_or_else(|| self.open(), Ok) {
                Ok(symbiosis) => Some(symbiosis),
                Err(error) => {
                    self.report_error(number, &error);
                    None
                }
            };
            opened = symbiosis;
            if let Some(symbiosis) = &mut opened {
                symbiosis.begin_epoch();
            }
            if stopped.recv_timeout(self.config.epoch.as_duration()) != Err(mpsc::RecvTimeoutError::Timeout) {
                break;
            }
            if let Some(symbiosis) = &mut opened {
                self.metrics.observe_shares(&symbiosis.end_epoch(started.elapsed()));
            }
        }
        if let Some(mut symbiosis) = opened {
            symbiosis.stop();
        }
    }

    fn open(&self) -> Result<Symbiosis, SymbiosisError> {
        let Self { config, runtime_dir, kernel, state, profiles, .. } = self.clone();
        Symbiosis::open(config, &runtime_dir, kernel, state, profiles)
    }

    fn report_error(&self, epoch: u64, error: &SymbiosisError) {
        let error_text = units::chain(error);
        tracing::error!(error = error_text, "cannot decide shares");
        let report = Report::undecided_report(epoch, self.config.supply, error_text);
        self.metrics.observe_shares(&report);
        self.state.reports.store(report);
    }
}
