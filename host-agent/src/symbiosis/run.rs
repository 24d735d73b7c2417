//! Thread of Symbiosis, separate because the kernel is slow. Errors are reported and affect nothing
//! else.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    time::Instant,
};

use super::{Config, KernelPaths, Symbiosis, SymbiosisError};
use crate::{
    metrics::Metrics,
    shares::{Report, SharesState},
};

/// Inputs of epochs.
#[derive(Clone, Debug)]
pub struct EpochRunner {
    /// Settings.
    pub config: Config,
    /// Directory of the stored shares.
    pub runtime_dir: PathBuf,
    /// Paths of the kernel.
    pub kernel: KernelPaths,
    /// Last report, and weights.
    pub state: Arc<SharesState>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
}

/// Handle of the thread; dropping it stops the epochs. Limits stay.
#[derive(Debug)]
pub struct SymbiosisThread {
    _stop: mpsc::Sender<()>,
}

impl EpochRunner {
    /// Starts epochs.
    pub fn start(self) -> SymbiosisThread {
        let (stop, stopped) = mpsc::channel();
        let epochs = tokio::task::spawn_blocking(move || self.epochs(&stopped));
        tokio::spawn(async move {
            if let Err(error) = epochs.await {
                tracing::error!(%error, "Symbiosis ended: restart the agent");
            }
        });
        SymbiosisThread { _stop: stop }
    }

    /// Runs epochs until the sender is dropped. Failed initialization is retried every epoch.
    fn epochs(&self, stopped: &mpsc::Receiver<()>) {
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
        let Self { config, runtime_dir, kernel, state, .. } = self.clone();
        Symbiosis::open(config, &runtime_dir, kernel, state)
    }

    fn report_error(&self, epoch: u64, error: &SymbiosisError) {
        let error_text = units::chain(error);
        tracing::error!(error = error_text, "no shares are decided");
        let report = Report::undecided(epoch, self.config.supply, error_text);
        self.metrics.observe_shares(&report);
        self.state.store_report(report);
    }
}
