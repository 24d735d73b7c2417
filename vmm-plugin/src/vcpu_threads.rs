//! Starts, pauses, resumes and stops the vCPU threads of a guest.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use units::limits::VCPUS_STOP_TIMEOUT;
use vmm_sys_util::signal::{Killable, register_signal_handler};

use crate::{
    confine::threads::SeccompFilters,
    thread_role::ThreadRole,
    vcpu::{self, ExitReason, Gate, PauseReason, Vcpu, VcpuContext},
    wakeup::Wakeup,
};

/// Interval at which the kick signal is repeated until a vCPU stops. A signal that arrives just
/// before KVM_RUN has no effect.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// Error returned when the vCPU threads cannot be started.
#[derive(Debug)]
pub(crate) struct StartError {
    /// Failed operation, completing "cannot …".
    pub(crate) operation: &'static str,
    /// Error returned by the operating system.
    pub(crate) errno: io::Error,
}

/// Threads of all vCPUs of a guest, one thread per vCPU.
#[derive(Debug)]
pub(crate) struct VcpuThreads {
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
}

impl VcpuThreads {
    /// Starts the vCPUs. A vCPU that exits sends the reason to `exits` and notifies `wakeup`.
    pub(crate) fn start(
        vcpus: Vec<Vcpu>,
        (context, filters): (&VcpuContext, &SeccompFilters),
        exits: &mpsc::Sender<ExitReason>,
        wakeup: &Arc<Wakeup>,
    ) -> Result<Self, StartError> {
        register_signal_handler(vcpu::kick_signal(), ignore_signal).map_err(|error| StartError {
            operation: "install a handler for the kick signal",
            errno: error.into(),
        })?;
        let threads = vcpus.into_iter().enumerate().map(|(index, mut vcpu)| {
            let (context, exits, wakeup) = (context.clone(), exits.clone(), Arc::clone(wakeup));
            filters.spawn(ThreadRole::Vcpu, format!("vcpu{index}"), move || {
                if let Some(exit) = vcpu.run(&context) {
                    let _ = exits.send(exit); // fails only if the event loop has ended
                    wakeup.notify();
                }
            })
        });
        let threads = threads
            .collect::<io::Result<_>>()
            .map_err(|errno| StartError { operation: "start a thread", errno })?;
        context.gate.open(PauseReason::NotStarted); // vCPUs run only once all threads exist
        Ok(Self { threads, gate: Arc::clone(&context.gate) })
    }

    /// Pauses all vCPUs and returns whether all vCPUs paused. If a vCPU does not pause within
    /// [`VCPUS_STOP_TIMEOUT`], all vCPUs are resumed unless there is another reason. KVM marks the
    /// guest's clock as paused, so that soft-lockup watchdogs do not fire. Devices finish requests in
    /// flight, and clocks continue: the guest observes a scheduling delay.
    pub(crate) fn pause(&self, reason: PauseReason) -> bool {
        self.gate.close(reason);
        let paused = self.kick_until(|| self.are_waiting());
        if !paused {
            self.resume(reason);
        }
        paused
    }

    /// Pauses vCPUs without waiting for them. A vCPU that does not pause needs another call, because
    /// the signal may have arrived just before KVM_RUN.
    pub(crate) fn request_pause(&self, reason: PauseReason) {
        self.gate.close(reason);
        if !self.are_waiting() {
            self.kick();
        }
    }

    /// Returns whether no vCPU runs.
    pub(crate) fn are_waiting(&self) -> bool {
        self.gate.waiting_vcpu_count() as usize + self.finished_vcpu_count() >= self.threads.len()
    }

    /// Resumes all vCPUs unless there is another reason to pause them.
    pub(crate) fn resume(&self, reason: PauseReason) {
        self.gate.open(reason);
    }

    /// Stops all vCPUs. Returns when all vCPU threads have ended, or after [`VCPUS_STOP_TIMEOUT`]
    /// if a thread hangs in the kernel.
    pub(crate) fn stop(&self) {
        self.gate.stop();
        self.kick_until(|| self.finished_vcpu_count() == self.threads.len());
    }

    /// Sends the kick signal to the first vCPU, which then reports memory errors to the guest. The
    /// signal has no effect if it arrives just before KVM_RUN.
    pub(crate) fn kick_first_vcpu(&self) {
        if let Some(thread) = self.threads.first() {
            let _ = thread.kill(vcpu::kick_signal()); // fails only if the thread has ended
        }
    }

    fn finished_vcpu_count(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_finished()).count()
    }

    /// Sends the kick signal to all vCPUs until `condition` holds. Returns `false` if `condition`
    /// does not hold within [`VCPUS_STOP_TIMEOUT`].
    fn kick_until(&self, condition: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + VCPUS_STOP_TIMEOUT.as_duration();
        while !condition() {
            if Instant::now() >= deadline {
                return false;
            }
            self.kick();
            std::thread::sleep(KICK_INTERVAL);
        }
        true
    }

    /// Sends the kick signal to all vCPUs.
    fn kick(&self) {
        self.threads.iter().for_each(|thread| {
            let _ = thread.kill(vcpu::kick_signal()); // fails only if the thread has ended
        });
    }
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
