//! Roles of the VMM's threads. [`crate::confine::threads`] selects the seccomp filter by role.

use std::cell::Cell;

/// Role of a thread of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadRole {
    /// First thread of the process, which runs the event loop.
    Main,
    /// Thread that runs a vCPU.
    Vcpu,
    /// Thread that serves a block device.
    Block,
    /// Thread that serves a network device.
    Net,
    /// Thread that serves the entropy device.
    Rng,
    /// Thread that serves the control socket.
    Control,
    /// Thread that moves pool memory to local memory.
    Rehome,
}

impl ThreadRole {
    /// All roles, in the order of their declaration.
    pub const ALL: [Self; 7] =
        [Self::Main, Self::Vcpu, Self::Block, Self::Net, Self::Rng, Self::Control, Self::Rehome];

    /// Returns whether the guest cannot continue without a thread of this role.
    pub fn is_essential(self) -> bool {
        self != Self::Control
    }

    /// Returns the name of the role for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "the main thread",
            Self::Vcpu => "a vCPU thread",
            Self::Block => "a disk thread",
            Self::Net => "a network thread",
            Self::Rng => "the RNG thread",
            Self::Control => "the control socket thread",
            Self::Rehome => "the rehome thread",
        }
    }
}

thread_local! {
    static ROLE: Cell<Option<ThreadRole>> = const { Cell::new(None) };
}

/// Returns the role of the current thread, or `None` before [`set`]. Safe in a signal handler.
pub fn current_role() -> Option<ThreadRole> {
    ROLE.get()
}

/// Sets the role of the current thread.
pub fn set(role: ThreadRole) {
    ROLE.set(Some(role));
}
