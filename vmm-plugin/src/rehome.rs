//! Moves the pool memory of a running guest to local memory. A client of the control socket starts
//! the move, and a thread performs it: `migration` copies the pages while the guest runs (pre-copy),
//! and then replaces the mappings in a short pause.

mod dirty_pages;
mod migration;
mod throttle;

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use kvm_ioctls::VmFd;
use units::limits::{REHOME_PAUSE_MAX, REHOME_ROUNDS_MAX, REHOME_THROTTLE_PERCENT_MAX};

use self::migration::Migration;
use crate::{
    devices::MmioBus,
    memory::{Memory, MemoryOwner, pool_region::NotMovable},
    vcpu_threads::VcpuThreads,
};

/// State of a move to local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RehomeState {
    /// No move was requested.
    #[default]
    None,
    /// Pages are being copied. The guest runs.
    Copying,
    /// The guest uses local memory only.
    Done,
    /// The move failed or was cancelled. The guest uses its pool memory as before.
    Failed,
}

/// Progress of the latest move to local memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RehomeStatus {
    /// State of the move.
    pub state: RehomeState,
    /// Why the move failed, or an empty string.
    pub reason: String,
    /// Size of the pool memory, in bytes.
    pub total_bytes: u64,
    /// Number of bytes copied so far. A page that was copied several times counts several times.
    pub copied_bytes: u64,
    /// Number of complete rounds.
    pub rounds: u32,
    /// Time for which the guest was paused at the end of the move. Zero before.
    pub pause: Duration,
    /// Duration of the whole move. Zero while it is in progress.
    pub duration: Duration,
    /// Slices that the process no longer uses: number and name of the EMC.
    pub freed_slices: Vec<(u32, String)>,
}

/// Limits of a move.
#[derive(Clone, Copy, Debug)]
pub struct RehomeLimits {
    /// Upper bound (exclusive) of the estimated time to copy the remaining pages in the pause.
    pub pause_max: Duration,
    /// Maximum number of rounds.
    pub rounds_max: u32,
    /// Maximum fraction of time for which vCPUs are stopped so that the move converges, in percent.
    pub throttle_percent_max: u32,
}

impl Default for RehomeLimits {
    fn default() -> Self {
        Self {
            pause_max: REHOME_PAUSE_MAX.as_duration(),
            rounds_max: REHOME_ROUNDS_MAX,
            throttle_percent_max: REHOME_THROTTLE_PERCENT_MAX,
        }
    }
}

/// State that the clients of a move and its thread share.
#[derive(Debug, Default)]
struct Shared {
    status: Mutex<RehomeStatus>,
    requested: Condvar,
    is_cancelled: AtomicBool,
    /// Time at which the latest cancellation was sent.
    cancelled_at: AtomicU64,
}

impl Shared {
    fn status(&self) -> MutexGuard<'_, RehomeStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Control of the move of one guest.
#[derive(Clone, Debug)]
pub struct RehomeControl {
    shared: Arc<Shared>,
    not_movable: Option<NotMovable>,
}

impl RehomeControl {
    /// Creates the control of a guest with this memory.
    pub fn new(memory: &Memory) -> Self {
        Self { shared: Arc::default(), not_movable: memory.movable_regions().err() }
    }

    /// Requests the move. `sent_at` is the time at which the request was sent, in nanoseconds, or 0 if
    /// unknown. No effect while a move is in progress, if the move is done, or if the request is older
    /// than a cancellation.
    ///
    /// # Errors
    /// [`NotMovable`] if the guest's pool memory cannot be moved.
    pub fn start(&self, sent_at: u64) -> Result<RehomeStatus, NotMovable> {
        if let Some(reason) = self.not_movable {
            return Err(reason);
        }
        let mut status = self.shared.status();
        let is_outdated = sent_at != 0 && sent_at < self.shared.cancelled_at.load(Ordering::SeqCst);
        if matches!(status.state, RehomeState::None | RehomeState::Failed) && !is_outdated {
            self.shared.is_cancelled.store(false, Ordering::SeqCst);
            *status = RehomeStatus { state: RehomeState::Copying, ..RehomeStatus::default() };
            self.shared.requested.notify_all();
        }
        Ok(status.clone())
    }

    /// Cancels the move in progress. Its state becomes [`RehomeState::Failed`] soon afterwards,
    /// unless the move is completed first. Requests that were sent before `sent_at` have no effect.
    pub fn cancel(&self, sent_at: u64) -> RehomeStatus {
        let status = self.shared.status();
        self.shared.cancelled_at.fetch_max(sent_at, Ordering::SeqCst);
        self.shared.is_cancelled.store(true, Ordering::SeqCst);
        status.clone()
    }

    /// Returns the status of the latest move.
    pub fn status(&self) -> RehomeStatus {
        self.shared.status().clone()
    }

    /// Returns whether the guest's memory can be moved, so that the thread is needed.
    pub fn is_possible(&self) -> bool {
        self.not_movable.is_none()
    }
}

/// Performs the moves that a [`RehomeControl`] requests.
#[derive(Debug)]
pub(crate) struct Rehomer {
    shared: Arc<Shared>,
    limits: RehomeLimits,
    vcpus: Arc<VcpuThreads>,
    devices: Arc<MmioBus>,
    /// The VM, which is dropped before its memory.
    vm: Arc<VmFd>,
    memory: Arc<Memory>,
}

impl Rehomer {
    /// Creates the performer of the moves of a running guest.
    pub(crate) fn new(
        control: &RehomeControl,
        limits: RehomeLimits,
        (vm, memory): (&Arc<VmFd>, &Arc<Memory>),
        vcpus: &Arc<VcpuThreads>,
        devices: &Arc<MmioBus>,
    ) -> Self {
        Self {
            shared: Arc::clone(&control.shared),
            limits,
            vcpus: Arc::clone(vcpus),
            devices: Arc::clone(devices),
            vm: Arc::clone(vm),
            memory: Arc::clone(memory),
        }
    }

    /// Performs requested moves until the process ends.
    pub(crate) fn run(&self) {
        loop {
            self.wait_for_request();
            self.perform();
        }
    }

    fn wait_for_request(&self) {
        let status = self.shared.status();
        let is_idle = |status: &mut RehomeStatus| status.state != RehomeState::Copying;
        drop(self.shared.requested.wait_while(status, is_idle).unwrap_or_else(PoisonError::into_inner));
    }

    /// Performs the requested move and stores its result.
    fn perform(&self) {
        let start = Instant::now();
        let result = match self.memory.movable_regions() {
            Ok((regions, spare)) => {
                let freed = regions.iter().filter_map(|region| slice_of(&region.owner)).collect();
                Migration::new(self, &regions, &spare).run().map(|pause| (pause, freed))
            }
            Err(reason) => Err(reason.into()),
        };
        let mut status = self.shared.status();
        status.duration = start.elapsed();
        match result {
            Ok((pause, freed_slices)) => {
                status.state = RehomeState::Done;
                (status.pause, status.freed_slices) = (pause, freed_slices);
            }
            Err(error) => {
                status.state = RehomeState::Failed;
                status.reason = units::chain(&error);
            }
        }
    }
}

fn slice_of(owner: &MemoryOwner) -> Option<(u32, String)> {
    match owner {
        MemoryOwner::Slice { slice, emc } => Some((*slice, emc.clone())),
        MemoryOwner::Local => None,
    }
}

#[cfg(test)]
mod tests;
