//! Starts the threads that serve a guest, each with the seccomp filter of its role. A thread
//! installs the filter before it reads data from the guest.

use std::{collections::BTreeMap, io, thread::JoinHandle};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use vmm_sys_util::signal::block_signal;

use super::{SeccompMode, sigsys, syscall_rules};
use crate::{
    exit,
    thread_role::{self, ThreadRole},
};

/// Compiled seccomp filters by role. The map is empty if filtering is disabled.
#[derive(Debug, Default)]
pub struct SeccompFilters(BTreeMap<ThreadRole, BpfProgram>);

impl SeccompFilters {
    /// Compiles the filters and installs the SIGSYS handler.
    ///
    /// # Errors
    /// The error returned by sigaction(2).
    pub fn new(seccomp: SeccompMode) -> io::Result<Self> {
        let violation_action = match seccomp {
            SeccompMode::False => return Ok(Self::default()),
            SeccompMode::Log => SeccompAction::Log,
            SeccompMode::True => SeccompAction::Trap,
        };
        sigsys::install_handler()?;
        Ok(Self(ThreadRole::ALL.map(|role| (role, compile_filter(role, violation_action.clone()))).into()))
    }

    /// Installs the filter of a role on this thread.
    ///
    /// # Errors
    /// The error returned by seccomp(2).
    pub fn confine(&self, role: ThreadRole) -> io::Result<()> {
        thread_role::set(role);
        self.0.get(&role).map_or(Ok(()), |filter| apply_filter(filter).map_err(io::Error::other))
    }

    /// Starts a thread with the filter of its role. The thread blocks SIGTERM and SIGINT, which the
    /// main thread handles.
    ///
    /// # Errors
    /// The error returned by the operating system if it cannot create the thread.
    pub fn spawn(
        &self,
        role: ThreadRole,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let filters = Self(self.0.get(&role).map(|filter| (role, filter.clone())).into_iter().collect());
        std::thread::Builder::new().name(name).spawn(move || {
            for signal in [libc::SIGTERM, libc::SIGINT] {
                let _ = block_signal(signal); // fails only if the signal is already blocked
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

fn compile_filter(role: ThreadRole, violation_action: SeccompAction) -> BpfProgram {
    const TARGET_ARCH: TargetArch = TargetArch::x86_64;
    let filter = SeccompFilter::new(
        syscall_rules::rules_for_role(role),
        violation_action,
        SeccompAction::Allow,
        TARGET_ARCH,
    );
    filter.and_then(BpfProgram::try_from).expect("the rule tables are valid")
}

#[cfg(test)]
mod tests;
