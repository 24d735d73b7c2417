//! The vCPU threads of a guest: start, pause, resume and stop.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use units::limits::VCPUS_STOP_TIMEOUT;
use vmm_sys_util::signal::{Killable, register_signal_handler};

use super::{MachineError, system_error};
use crate::{
    confine::threads::SeccompFilters,
    thread_role::ThreadRole,
    vcpu::{self, ExitReason, Gate, Vcpu, VcpuContext},
    wakeup::Wakeup,
};

/// Interval between kicks of a vCPU that is to stop. A signal that arrives just before KVM_RUN is
/// lost.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// All vCPUs of a guest, one thread each.
pub(super) struct VcpuThreads {
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
}

impl VcpuThreads {
    /// Starts the vCPUs. The first vCPU that exits sends the reason to `exits` and notifies
    /// `wakeup`.
    pub(super) fn start(
        vcpus: Vec<Vcpu>,
        (context, filters): (&VcpuContext, &SeccompFilters),
        exits: &mpsc::Sender<ExitReason>,
        wakeup: &Arc<Wakeup>,
    ) -> Result<Self, MachineError> {
        register_signal_handler(vcpu::kick_signal(), ignore_signal)
            .map_err(|error| system_error("install a handler for the kick signal")(error.into()))?;
        let threads = vcpus.into_iter().enumerate().map(|(index, mut vcpu)| {
            let (context, exits, wakeup) = (context.clone(), exits.clone(), Arc::clone(wakeup));
            filters.spawn(ThreadRole::Vcpu, format!("vcpu{index}"), move || {
                if let Some(exit) = vcpu.run(&context) {
                    let _ = exits.send(exit); // fails only after another vCPU has ended the guest
                    wakeup.notify();
                }
            })
        });
        let threads = threads.collect::<io::Result<_>>().map_err(system_error("start a thread"))?;
        context.gate.set_open(true); // vCPUs run only once all threads exist
        Ok(Self { threads, gate: Arc::clone(&context.gate) })
    }

    /// Pauses all vCPUs and returns whether that succeeded; if one vCPU does not pause, all are
    /// resumed. KVM marks the guest's clock as paused, so that soft-lockup watchdogs do not fire.
    /// Devices finish requests in flight and clocks continue: to the guest, a pause looks like a
    /// scheduling delay.
    pub(super) fn pause(&self) -> bool {
        self.gate.set_open(false);
        let paused = self.kick_until(|| self.gate.waiting() as usize + self.finished() >= self.threads.len());
        if !paused {
            self.resume();
        }
        paused
    }

    /// Resumes all vCPUs.
    pub(super) fn resume(&self) {
        self.gate.set_open(true);
    }

    /// Stops all vCPUs. Returns when no vCPU runs any more, unless one hangs in the kernel.
    pub(super) fn stop(self) {
        self.gate.stop();
        self.kick_until(|| self.finished() == self.threads.len());
    }

    /// Kicks the first vCPU, which reports memory errors to the guest. The kick may be lost.
    pub(super) fn kick_first(&self) {
        if let Some(thread) = self.threads.first() {
            let _ = thread.kill(vcpu::kick_signal()); // fails only if the thread has ended
        }
    }

    fn finished(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_finished()).count()
    }

    /// Kicks vCPUs out of KVM_RUN until `condition` holds. Returns `false` on timeout.
    fn kick_until(&self, condition: impl Fn() -> bool) -> bool {
        let deadline = Instant::now() + VCPUS_STOP_TIMEOUT.as_duration();
        while !condition() {
            if Instant::now() >= deadline {
                return false;
            }
            self.threads.iter().for_each(|thread| {
                let _ = thread.kill(vcpu::kick_signal()); // fails only if the thread has ended
            });
            std::thread::sleep(KICK_INTERVAL);
        }
        true
    }
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
