//! The threads that serve a guest: each makes no system calls but those its work needs. Each installs its filter before it
//! looks at anything that the guest has written.

use std::{cell::Cell, collections::BTreeMap, io, thread::JoinHandle};

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
use vmm_sys_util::signal::block_signal;

use super::{Seccomp, calls, forbidden};
use crate::exit;

/// What a thread is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Decides about the guest's life; the process's first.
    Main,
    /// Runs a processor.
    Processor,
    /// Serves a disk.
    Disk,
    /// Serves a network card.
    Card,
    /// Serves random numbers.
    Random,
    /// Answers callers at the control socket.
    Control,
}

impl Work {
    /// All there are.
    pub const ALL: [Self; 6] =
        [Self::Main, Self::Processor, Self::Disk, Self::Card, Self::Random, Self::Control];

    /// Whether a guest is none any more without it.
    pub fn is_needed(self) -> bool {
        self != Self::Control
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "the main thread",
            Self::Processor => "a processor's thread",
            Self::Disk => "a disk's thread",
            Self::Card => "a network card's thread",
            Self::Random => "the thread of random numbers",
            Self::Control => "the control socket's thread",
        }
    }
}

thread_local! {
    static WORK: Cell<Option<Work>> = const { Cell::new(None) };
}

/// What this thread is there for, once it is confined. Safe in a signal handler.
pub fn work() -> Option<Work> {
    WORK.get()
}

/// The filters of all threads; empty if there are to be none.
#[derive(Debug, Default)]
pub struct Filters(BTreeMap<Work, BpfProgram>);

impl Filters {
    /// Makes them, and whoever says which call was not let through.
    ///
    /// # Errors
    /// The kernel takes no handler.
    pub fn new(seccomp: Seccomp) -> io::Result<Self> {
        let otherwise = match seccomp {
            Seccomp::False => return Ok(Self::default()),
            Seccomp::Log => SeccompAction::Log,
            Seccomp::True => SeccompAction::Trap,
        };
        forbidden::watch()?;
        Ok(Self(Work::ALL.map(|work| (work, filter(work, otherwise.clone()))).into()))
    }

    /// This thread makes no other calls from now on.
    ///
    /// # Errors
    /// The kernel takes no filter.
    pub fn confine(&self, work: Work) -> io::Result<()> {
        WORK.set(Some(work));
        self.0.get(&work).map_or(Ok(()), |filter| apply_filter(filter).map_err(io::Error::other))
    }

    /// Starts a thread that makes no other calls. Signals that ask for an end are left to the main thread.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn spawn(
        &self,
        work: Work,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<JoinHandle<()>> {
        let filters = Self(self.0.get(&work).map(|filter| (work, filter.clone())).into_iter().collect());
        std::thread::Builder::new().name(name).spawn(move || {
            for signal in [libc::SIGTERM, libc::SIGINT] {
                let _ = block_signal(signal); // blocked already, if at all
            }
            if let Err(error) = filters.confine(work) {
                exit::say(&format!("error: seccomp: cannot confine {}: {error}", work.name()));
                exit::at_once(exit::FAILED);
            }
            drop(filters);
            run();
        })
    }
}

fn filter(work: Work, otherwise: SeccompAction) -> BpfProgram {
    const HERE: TargetArch = TargetArch::x86_64;
    let filter = SeccompFilter::new(calls::of(work), otherwise, SeccompAction::Allow, HERE);
    filter.and_then(BpfProgram::try_from).expect("the tables are well-formed")
}

#[cfg(test)]
mod tests;
