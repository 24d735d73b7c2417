//! Thread of a component of the agent, such as Symbiosis. It is separate because calls to the kernel may
//! block for long.

use std::sync::mpsc;

/// Handle of the thread. Dropping it requests the thread to stop.
#[derive(Debug)]
pub struct ComponentThread {
    _stop: mpsc::Sender<()>,
}

impl ComponentThread {
    /// Starts the thread. `run` returns when the sender of its argument is dropped. If it panics, this is
    /// logged, and the agent continues without the component.
    pub fn start(component: &'static str, run: impl FnOnce(&mpsc::Receiver<()>) + Send + 'static) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = tokio::task::spawn_blocking(move || run(&stopped));
        tokio::spawn(async move {
            if let Err(error) = thread.await {
                tracing::error!(%error, "{component} ended unexpectedly; restart the agent");
            }
        });
        Self { _stop: stop }
    }
}
