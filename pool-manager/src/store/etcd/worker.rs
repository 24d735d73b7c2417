//! Thread with a Tokio runtime for the calls to etcd, so that renewals of the lease do not wait for other tasks of
//! the manager, and so that threads with and without a runtime can wait for a call.

use std::{io, sync::mpsc};

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

/// Runtime with one thread.
#[derive(Debug)]
pub(super) struct Worker {
    /// Always set, except while it is dropped.
    runtime: Option<Runtime>,
}

impl Worker {
    pub(super) fn start() -> io::Result<Self> {
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("etcd").enable_all().build()?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// Calls a function that needs a runtime, but does not wait.
    pub(super) fn enter<T>(&self, function: impl FnOnce() -> T) -> T {
        let _entered = self.runtime().enter();
        function()
    }

    /// Runs a future on the worker's thread.
    pub(super) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        self.runtime().spawn(future)
    }

    /// Runs a future on the worker's thread, and waits for its result. Must not be called on the worker's thread.
    pub(super) fn block_on<F>(&self, future: F) -> F::Output
    where
        F: Future + Send + 'static,
        F::Output: Send,
    {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.runtime().spawn(async move {
            let _ = sender.send(future.await); // the receiver waits below
        });
        receiver.recv().expect("a call to etcd does not panic")
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("the runtime exists until the worker is dropped")
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background(); // may be dropped in a task, which must not wait
        }
    }
}
