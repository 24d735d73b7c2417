//! Latest report of a component of the agent, which the session sends to the manager.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Latest report, and whether it was sent. A newer report replaces one that was not sent.
#[derive(Debug)]
pub struct ReportSlot<R> {
    inner: Mutex<Inner<R>>,
    changed: Notify,
}

#[derive(Debug)]
struct Inner<R> {
    report: Option<R>,
    is_sent: bool,
}

impl<R> Default for ReportSlot<R> {
    fn default() -> Self {
        Self { inner: Mutex::new(Inner { report: None, is_sent: false }), changed: Notify::new() }
    }
}

impl<R: Clone> ReportSlot<R> {
    /// Locks the report. A poisoned state is consistent, because no call can panic while it is locked.
    fn inner(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a report.
    pub fn store(&self, report: R) {
        let mut inner = self.inner();
        inner.report = Some(report);
        inner.is_sent = false;
        self.changed.notify_one();
    }

    /// Waits for a report that was not sent yet, and marks it as sent. This is cancel-safe.
    pub async fn next(&self) -> R {
        loop {
            {
                let mut inner = self.inner();
                if !inner.is_sent
                    && let Some(report) = inner.report.clone()
                {
                    inner.is_sent = true;
                    return report;
                }
            }
            self.changed.notified().await;
        }
    }

    /// Marks the last report as not sent, because a new session begins.
    pub fn resend(&self) {
        self.inner().is_sent = false;
        self.changed.notify_one();
    }

    /// Returns the last report.
    pub fn last(&self) -> Option<R> {
        self.inner().report.clone()
    }
}
