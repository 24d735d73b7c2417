//! Thread of Symbiosis, separate because the kernel is slow. Errors are reported and affect nothing
//! else.

use std::{
    path::PathBuf,
    sync::{Arc, mpsc},
    time::Instant,
};

use super::{Book, Config, Kernel, Report, Symbiosis, SymbiosisError};
use crate::metrics::Metrics;

/// Inputs of epochs.
#[derive(Clone, Debug)]
pub struct Start {
    /// Settings.
    pub config: Config,
    /// Where shares are kept.
    pub runtime_dir: PathBuf,
    /// Where the kernel speaks.
    pub kernel: Kernel,
    /// Where reports go, and weights come from.
    pub book: Arc<Book>,
    /// Where they are counted.
    pub metrics: Arc<Metrics>,
}

/// Epochs go on until this is dropped; limits stay.
#[derive(Debug)]
pub struct Running {
    _ends: mpsc::Sender<()>,
}

impl Start {
    /// Starts epochs.
    pub fn run(self) -> Running {
        let (ends, end) = mpsc::channel();
        let epochs = tokio::task::spawn_blocking(move || self.epochs(&end));
        tokio::spawn(async move {
            if let Err(error) = epochs.await {
                tracing::error!(%error, "no more shares are decided: restart the agent");
            }
        });
        Running { _ends: ends }
    }

    /// Runs epochs until the sender is dropped. Objects that cannot be opened are tried again.
    fn epochs(&self, end: &mpsc::Receiver<()>) {
        let (begun, mut opened) = (Instant::now(), None);
        for number in 1.. {
            let symbiosis = match opened.take().map_or_else(|| self.open(), Ok) {
                Ok(symbiosis) => Some(symbiosis),
                Err(error) => {
                    self.tell_of(number, &error);
                    None
                }
            };
            opened = symbiosis;
            if let Some(symbiosis) = &mut opened {
                symbiosis.begin();
            }
            if end.recv_timeout(self.config.epoch.as_duration()) != Err(mpsc::RecvTimeoutError::Timeout) {
                break;
            }
            if let Some(symbiosis) = &mut opened {
                self.metrics.observe_shares(&symbiosis.end(begun.elapsed()));
            }
        }
        if let Some(mut symbiosis) = opened {
            symbiosis.leave();
        }
    }

    fn open(&self) -> Result<Symbiosis, SymbiosisError> {
        let Self { config, runtime_dir, kernel, book, .. } = self.clone();
        Symbiosis::open(config, &runtime_dir, kernel, book)
    }

    fn tell_of(&self, epoch: u64, error: &SymbiosisError) {
        let why = units::chain(error);
        tracing::error!(why, "no shares are decided");
        let report = Report::nothing(epoch, self.config.supply, why);
        self.metrics.observe_shares(&report);
        self.book.put(report);
    }
}
