//! The threads of a guest's processors: started, made to stand still for a while, and ended.

use std::{
    io,
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use units::limits::VCPUS_STOP_WITHIN;
use vmm_sys_util::signal::{Killable, register_signal_handler};

use super::{MachineError, system_error};
use crate::{
    confine::threads::{SeccompFilters, ThreadRole},
    vcpu::{self, ExitReason, Gate, Vcpu, VcpuContext},
    wakeup::Wakeup,
};

/// How often processors that are to stop are told again: a signal that arrives just before KVM_RUN is lost.
const KICK_INTERVAL: Duration = Duration::from_millis(1);

/// All processors of a guest, each on a thread.
pub(super) struct VcpuThreads {
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
}

impl VcpuThreads {
    /// They run from now on. How the guest ended, and the bell, tell of the first that does not any more.
    pub(super) fn start(
        vcpus: Vec<Vcpu>,
        (context, filters): (&VcpuContext, &SeccompFilters),
        exits: &mpsc::Sender<ExitReason>,
        wakeup: &Arc<Wakeup>,
    ) -> Result<Self, MachineError> {
        register_signal_handler(vcpu::kick_signal(), ignore_signal)
            .map_err(|error| system_error("handle a signal")(error.into()))?;
        let threads = vcpus.into_iter().enumerate().map(|(index, mut vcpu)| {
            let (context, exits, wakeup) = (context.clone(), exits.clone(), Arc::clone(wakeup));
            filters.spawn(ThreadRole::Vcpu, format!("vcpu{index}"), move || {
                if let Some(exit) = vcpu.run(&context) {
                    let _ = exits.send(exit); // somebody else was faster, if nobody listens
                    wakeup.notify();
                }
            })
        });
        let threads = threads.collect::<io::Result<_>>().map_err(system_error("start a thread"))?;
        context.gate.set_open(true); // all of them or none
        Ok(Self { threads, gate: Arc::clone(&context.gate) })
    }

    /// Whether all stand still when this returns; if one does not, none does for long. Each is told that it stood, so that the
    /// guest's watchdogs know. Devices may finish what they have begun, and clocks go on: standing is like being
    /// scheduled late.
    pub(super) fn pause(&self) -> bool {
        self.gate.set_open(false);
        let paused = self.kick_until(|| self.gate.waiting() as usize + self.finished() >= self.threads.len());
        if !paused {
            self.resume();
        }
        paused
    }

    /// All go on.
    pub(super) fn resume(&self) {
        self.gate.set_open(true);
    }

    /// No processor runs any more when this returns, unless one hangs in the kernel.
    pub(super) fn stop(self) {
        self.gate.stop();
        self.kick_until(|| self.finished() == self.threads.len());
    }

    /// Interrupts the first processor, which reports errors that were found in memory. A kick may be lost.
    pub(super) fn kick_first(&self) {
        if let Some(thread) = self.threads.first() {
            let _ = thread.kill(vcpu::kick_signal()); // one that has exits reports ignore_signal
        }
    }

    fn finished(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_finished()).count()
    }

    /// Calls processors out of KVM until something is so. Whether it came to be.
    fn kick_until(&self, condition: impl Fn() -> bool) -> bool {
        let give_up = Instant::now() + VCPUS_STOP_WITHIN.as_duration();
        while !condition() {
            if Instant::now() >= give_up {
                return false;
            }
            self.threads.iter().for_each(|thread| {
                let _ = thread.kill(vcpu::kick_signal()); // one that is finished needs no telling
            });
            std::thread::sleep(KICK_INTERVAL);
        }
        true
    }
}

extern "C" fn ignore_signal(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
