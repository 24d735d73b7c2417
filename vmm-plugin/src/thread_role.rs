//! Roles of the VMM's threads. Their seccomp filters are in [`crate::confine::threads`].

use std::cell::Cell;

/// Role of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadRole {
    /// The process's first thread: the event loop.
    Main,
    /// Runs a vCPU.
    Vcpu,
    /// Serves a block device.
    Block,
    /// Serves a network device.
    Net,
    /// Serves the entropy device.
    Rng,
    /// Serves the control socket.
    Control,
}

impl ThreadRole {
    /// All roles.
    pub const ALL: [Self; 6] = [Self::Main, Self::Vcpu, Self::Block, Self::Net, Self::Rng, Self::Control];

    /// Returns whether the guest cannot continue without this thread.
    pub fn is_essential(self) -> bool {
        self != Self::Control
    }

    /// Returns the name for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "the main thread",
            Self::Vcpu => "a vCPU thread",
            Self::Block => "a disk thread",
            Self::Net => "a network thread",
            Self::Rng => "the RNG thread",
            Self::Control => "the control socket thread",
        }
    }
}

thread_local! {
    static ROLE: Cell<Option<ThreadRole>> = const { Cell::new(None) };
}

/// Returns the role of this thread once it is confined. Safe in a signal handler.
pub fn role() -> Option<ThreadRole> {
    ROLE.get()
}

/// Sets the role of this thread.
pub fn set(role: ThreadRole) {
    ROLE.set(Some(role));
}
