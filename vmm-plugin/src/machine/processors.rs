//! The threads of a guest's processors: started, made to stand still for a while, and ended.

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
    bell::Bell,
    confine::threads::{Filters, Work},
    vcpu::{self, Ending, Gate, Surroundings, Vcpu},
};

/// How often processors that are to stop are told again: a signal that arrives just before KVM_RUN is lost.
const TOLD_AGAIN_EVERY: Duration = Duration::from_millis(1);

/// All processors of a guest, each on a thread.
pub(super) struct Processors {
    threads: Vec<JoinHandle<()>>,
    gate: Arc<Gate>,
}

impl Processors {
    /// They run from now on. How the guest ended, and the bell, tell of the first that does not any more.
    pub(super) fn start(
        vcpus: Vec<Vcpu>,
        (around, filters): (&Surroundings, &Filters),
        ended: &mpsc::Sender<Ending>,
        bell: &Arc<Bell>,
    ) -> Result<Self, MachineError> {
        register_signal_handler(vcpu::kick_signal(), nothing)
            .map_err(|error| system_error("handle a signal")(error.into()))?;
        let threads = vcpus.into_iter().enumerate().map(|(number, mut vcpu)| {
            let (around, ended, bell) = (around.clone(), ended.clone(), Arc::clone(bell));
            filters.spawn(Work::Processor, format!("vcpu{number}"), move || {
                if let Some(ending) = vcpu.run(&around) {
                    let _ = ended.send(ending); // somebody else was faster, if nobody listens
                    bell.ring();
                }
            })
        });
        let threads = threads.collect::<io::Result<_>>().map_err(system_error("start a thread"))?;
        around.gate.set_open(true); // all of them or none
        Ok(Self { threads, gate: Arc::clone(&around.gate) })
    }

    /// Whether all stand still when this returns; if one does not, none does for long. Each is told that it stood, so that the
    /// guest's watchdogs know. Devices may finish what they have begun, and clocks go on: standing is like being
    /// scheduled late.
    pub(super) fn pause(&self) -> bool {
        self.gate.set_open(false);
        let stand = self.kick_until(|| self.gate.waiting() as usize + self.over() >= self.threads.len());
        if !stand {
            self.resume();
        }
        stand
    }

    /// All go on.
    pub(super) fn resume(&self) {
        self.gate.set_open(true);
    }

    /// No processor runs any more when this returns, unless one hangs in the kernel.
    pub(super) fn end(self) {
        self.gate.end();
        self.kick_until(|| self.over() == self.threads.len());
    }

    /// Interrupts the first processor, which reports errors that were found in memory. A kick may be lost.
    pub(super) fn kick_first(&self) {
        if let Some(thread) = self.threads.first() {
            let _ = thread.kill(vcpu::kick_signal()); // one that has ended reports nothing
        }
    }

    fn over(&self) -> usize {
        self.threads.iter().filter(|thread| thread.is_finished()).count()
    }

    /// Calls processors out of KVM until something is so. Whether it came to be.
    fn kick_until(&self, so: impl Fn() -> bool) -> bool {
        let give_up = Instant::now() + VCPUS_STOP_TIMEOUT.as_duration();
        while !so() {
            if Instant::now() >= give_up {
                return false;
            }
            self.threads.iter().for_each(|thread| {
                let _ = thread.kill(vcpu::kick_signal()); // one that is over needs no telling
            });
            std::thread::sleep(TOLD_AGAIN_EVERY);
        }
        true
    }
}

extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
