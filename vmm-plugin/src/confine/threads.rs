//! The threads that serve a guest: each makes no system calls but those its work needs. Each installs its filter before it
//! looks at anything that the guest has written.

use std::{cell::Cell, collections::BTreeMap, io, thread::JoinHandle};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use vmm_sys_util::signal::block_signal;

use super::{Seccomp, sigsys, syscall_rules};
use crate::exit;

/// What a thread is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ThreadRole {
    /// Decides about the guest's life; the process's first.
    Main,
    /// Runs a processor.
    Vcpu,
    /// Serves a disk.
    Block,
    /// Serves a network card.
    Net,
    /// Serves random numbers.
    Rng,
    /// Answers callers at the control socket.
    Control,
}

impl ThreadRole {
    /// All there are.
    pub const ALL: [Self; 6] = [Self::Main, Self::Vcpu, Self::Block, Self::Net, Self::Rng, Self::Control];

    /// Whether a guest is none any more without it.
    pub fn is_essential(self) -> bool {
        self != Self::Control
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "the main thread",
            Self::Vcpu => "a processor's thread",
            Self::Block => "a disk's thread",
            Self::Net => "a network card's thread",
            Self::Rng => "the thread of random numbers",
            Self::Control => "the control socket's thread",
        }
    }
}

thread_local! {
    static ROLE: Cell<Option<ThreadRole>> = const { Cell::new(None) };
}

/// What this thread is there for, once it is confined. Safe in a signal handler.
pub fn role() -> Option<ThreadRole> {
    ROLE.get()
}

/// The filters of all threads; empty if there are to be none.
#[derive(Debug, Default)]
pub struct SeccompFilters(BTreeMap<ThreadRole, BpfProgram>);

impl SeccompFilters {
    /// Makes them, and whoever says which call was not let through.
    ///
    /// # Errors
    /// The kernel takes no handler.
    pub fn new(seccomp: Seccomp) -> io::Result<Self> {
        let violation_action = match seccomp {
            Seccomp::False => return Ok(Self::default()),
            Seccomp::Log => SeccompAction::Log,
            Seccomp::True => SeccompAction::Trap,
        };
        sigsys::install_handler()?;
        Ok(Self(ThreadRole::ALL.map(|role| (role, filter(role, violation_action.clone()))).into()))
    }

    /// This thread makes no other calls from now on.
    ///
    /// # Errors
    /// The kernel takes no filter.
    pub fn confine(&self, role: ThreadRole) -> io::Result<()> {
        ROLE.set(Some(role));
        self.0.get(&role).map_or(Ok(()), |filter| apply_filter(filter).map_err(io::Error::other))
    }

    /// Starts a thread that makes no other calls. Signals that ask for an end are left to the main thread.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn spawn(
        &self,
        role: ThreadRole,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let filters = Self(self.0.get(&role).map(|filter| (role, filter.clone())).into_iter().collect());
        std::thread::Builder::new().name(name).spawn(move || {
            for signal in [libc::SIGTERM, libc::SIGINT] {
                let _ = block_signal(signal); // blocked already, if at all
            }
            if let Err(error) = filters.confine(role) {
                exit::print(&format!("error: seccomp: cannot confine {}: {error}", role.name()));
                exit::exit_now(exit::FAILED);
            }
            drop(filters);
            run();
        })
    }
}

fn filter(role: ThreadRole, violation_action: SeccompAction) -> BpfProgram {
    const TARGET_ARCH: TargetArch = TargetArch::x86_64;
    let filter = SeccompFilter::new(
        syscall_rules::for_role(role),
        violation_action,
        SeccompAction::Allow,
        TARGET_ARCH,
    );
    filter.and_then(BpfProgram::try_from).expect("the tables are well-formed")
}

#[cfg(test)]
mod tests;
