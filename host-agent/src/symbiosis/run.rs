//! Symbiosis beside everything else: on a thread of its own, since the kernel takes its time.

use std::{
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use super::Symbiosis;
use crate::metrics::Metrics;

/// Epochs go on until this is dropped; limits stay.
#[derive(Debug)]
pub struct Running {
    _ends: mpsc::Sender<()>,
}

/// Starts epochs, each so long.
pub fn start(mut symbiosis: Symbiosis, epoch: Duration, metrics: Arc<Metrics>) -> Running {
    let (ends, end) = mpsc::channel();
    tokio::task::spawn_blocking(move || {
        loop {
            let begun = Instant::now();
            symbiosis.begin();
            if end.recv_timeout(epoch) != Err(mpsc::RecvTimeoutError::Timeout) {
                return symbiosis.leave();
            }
            metrics.observe_shares(&symbiosis.end(begun.elapsed().as_secs_f64()));
        }
    });
    Running { _ends: ends }
}
