//! The life of a guest that was put together: its processors each on a thread, and one loop that listens to the terminal, to
//! signals, and to how it ends.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use units::limits::{GUEST_STOPS_WITHIN, VCPUS_STOP_WITHIN};
use vmm_sys_util::signal::{Killable, register_signal_handler};

use super::{Machine, MachineError, system_error};
use crate::{
    config::Console,
    devices::{Wish, serial::Output},
    exit,
    vcpu::{self, Ending, Vcpu},
};

/// How often processors that are to stop are told again: a signal that arrives just before KVM_RUN is lost.
const TOLD_AGAIN_EVERY: Duration = Duration::from_millis(1);
/// How much of what is typed is taken at a time.
const TYPED_BYTES: usize = 64;

/// Where a console's output goes.
pub(super) fn output(console: &Console) -> Result<Output, MachineError> {
    match console {
        Console::Terminal => Ok(Box::new(io::stdout())),
        Console::Null => Ok(Box::new(io::sink())),
        Console::File(path) => {
            let failed = |errno| MachineError::Console { doing: format!("write {}", path.display()), errno };
            Ok(Box::new(File::create(path).map_err(failed)?))
        }
    }
}

/// Runs a guest to its end and says how that was: an exit code, see [`exit`].
///
/// # Errors
/// Nothing was started.
pub fn run(machine: Machine, console: &Console) -> Result<u8, MachineError> {
    let signals = signals().map_err(system_error("listen to signals"))?;
    let typing = if *console == Console::Terminal { prepare_terminal() } else { false };
    let guest = Guest::start(machine)?;
    let ending = guest.listen(&signals, typing);
    let code = told(&ending);
    guest.end();
    exit::tidy();
    Ok(code)
}

/// Says how a guest ended.
fn told(ending: &Ended) -> u8 {
    match ending {
        Ended::Itself(Ending::Wish(Wish::PowerOff)) => exit::POWERED_OFF,
        Ended::Itself(Ending::Wish(Wish::Reset)) => {
            eprintln!("the guest asked to be started anew");
            exit::RESET
        }
        Ended::Itself(Ending::Crashed(why)) => {
            eprintln!("error: the guest crashed: {why}");
            exit::CRASHED
        }
        Ended::Itself(Ending::Failed(why)) => {
            eprintln!("error: {why}");
            exit::FAILED
        }
        Ended::Stopped => {
            eprintln!("the guest did not switch itself off within {GUEST_STOPS_WITHIN}, and was stopped");
            exit::STOPPED
        }
    }
}

enum Ended {
    Itself(Ending),
    Stopped,
}

struct Guest {
    machine: Machine,
    vcpus: Vec<JoinHandle<()>>,
    endings: mpsc::Receiver<Ending>,
    /// Wakes the loop when there is an ending.
    ended: OwnedFd,
}

impl Guest {
    fn start(mut machine: Machine) -> Result<Self, MachineError> {
        register_signal_handler(vcpu::kick_signal(), nothing)
            .map_err(|error| system_error("handle a signal")(error.into()))?;
        let (sender, endings) = mpsc::channel();
        let (ended, wake) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|errno| system_error("make a pipe")(errno.into()))?;
        let wake = Arc::new(wake);
        let threads = std::mem::take(&mut machine.vcpus).into_iter().enumerate().map(
            |(number, mut vcpu): (_, Vcpu)| {
                let (around, sender, wake) = (machine.around.clone(), sender.clone(), Arc::clone(&wake));
                std::thread::Builder::new().name(format!("vcpu{number}")).spawn(move || {
                    if let Some(ending) = vcpu.run(&around) {
                        let _ = sender.send(ending); // somebody else was faster, if nobody listens
                        let _ = rustix::io::write(&*wake, &[0]);
                    }
                })
            },
        );
        let vcpus = threads.collect::<io::Result<_>>().map_err(system_error("start a thread"))?;
        Ok(Self { machine, vcpus, endings, ended })
    }

    fn listen(&self, signals: &UnixStream, mut typing: bool) -> Ended {
        let mut stop_at: Option<Instant> = None;
        loop {
            let stdin = rustix::stdio::stdin();
            let mut watched = vec![
                PollFd::new(&self.ended, PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            if typing {
                watched.push(PollFd::from_borrowed_fd(stdin, PollFlags::IN));
            }
            let left = stop_at.map(|at| at.saturating_duration_since(Instant::now()));
            let left = left.map(|left| Timespec::try_from(left).expect("seconds"));
            match poll(&mut watched, left.as_ref()) {
                Ok(0) => return Ended::Stopped,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Ended::Itself(Ending::Failed(format!("poll: {errno}"))),
            }
            let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            if let Ok(ending) = self.endings.try_recv() {
                return Ended::Itself(ending);
            }
            if ready[1] && signalled(signals) {
                let _ = self.machine.power_button.write(1);
                if stop_at.is_some() {
                    return Ended::Stopped; // asked twice
                }
                stop_at = Some(Instant::now() + GUEST_STOPS_WITHIN.as_duration());
            }
            if ready.get(2) == Some(&true) {
                typing = self.typed();
            }
        }
    }

    /// What is typed goes to the guest as far as it has room; `false` at the end of input.
    fn typed(&self) -> bool {
        let mut bytes = [0; TYPED_BYTES];
        match rustix::io::read(rustix::stdio::stdin(), &mut bytes) {
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.machine.around.ports.serial().typed(&bytes[..count]);
                true
            }
        }
    }

    /// No processor runs any more when this returns, unless one hangs in the kernel.
    fn end(self) {
        self.machine.around.gate.end();
        let give_up = Instant::now() + VCPUS_STOP_WITHIN.as_duration();
        while self.vcpus.iter().any(|vcpu| !vcpu.is_finished()) && Instant::now() < give_up {
            self.vcpus.iter().for_each(|vcpu| {
                let _ = vcpu.kill(vcpu::kick_signal()); // one that is over needs no telling
            });
            std::thread::sleep(TOLD_AGAIN_EVERY);
        }
    }
}

extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Signals that ask for an end, as bytes of a stream.
fn signals() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

fn signalled(mut signals: &UnixStream) -> bool {
    signals.read(&mut [0; 16]).is_ok_and(|count| count > 0)
}

/// Every key goes to the guest, also those that end programs. Whether there is anything to listen to.
fn prepare_terminal() -> bool {
    let stdin = rustix::stdio::stdin();
    if let Ok(before) = tcgetattr(stdin) {
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes = before.output_modes;
        if tcsetattr(stdin, OptionalActions::Now, &raw).is_ok() {
            exit::tidy_at_end(exit::Tidy { terminal: Some(before), ..Default::default() });
        }
    }
    true
}
