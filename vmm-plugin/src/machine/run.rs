//! The life of a guest that was put together, and the one loop that decides about it: it listens to the terminal, to signals, to
//! the control socket, and to how the guest ends.

use std::{
    fs::File,
    io::{self, Read as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    termios::{OptionalActions, tcgetattr, tcsetattr},
};
use units::limits::{GUEST_SHUTDOWN_TIMEOUT, LOST_SLICE_CHECK_INTERVAL};

use super::{Assembled, Held, Machine, MachineError, processors::Processors, system_error};
use crate::{
    bell::Bell,
    config::Console,
    confine::threads::{Filters, Work},
    control::{Order, Orders, Refused, State, Wanted},
    devices::{Wish, serial::Output},
    exit,
    memory::{lost, poison},
    vcpu::Ending,
};

/// How much of what is typed is taken at a time.
const TYPED_BYTES: usize = 64;
/// How soon a guest that had no room for what was typed is tried again.
const TYPED_AGAIN_EVERY: Duration = Duration::from_millis(20);

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
    let Machine { confinement, guest } = machine;
    let seccomp = confinement.seccomp;
    confinement.enter()?;
    let signals = signals().map_err(system_error("listen to signals"))?;
    let typing = *console == Console::Terminal;
    if typing {
        prepare_terminal();
    }
    let filters = Filters::new(seccomp).map_err(system_error("handle a signal"))?;
    let mut guest = Guest::start(guest, &filters)?;
    filters.confine(Work::Main).map_err(system_error("confine the main thread"))?;
    let ending = guest.listen(&signals, typing);
    let code = told(&ending);
    guest.processors.end();
    Ok(code)
}

/// Says how a guest ended.
fn told(ending: &Ended) -> u8 {
    match ending {
        Ended::Itself(Ending::Wish(Wish::PowerOff)) => exit::POWERED_OFF,
        Ended::Itself(Ending::Wish(Wish::Reset)) => {
            exit::say("the guest asked to be started anew");
            exit::RESET
        }
        Ended::Itself(Ending::Crashed(why)) => {
            exit::say(&format!("error: the guest crashed: {why}"));
            exit::CRASHED
        }
        Ended::Itself(Ending::Failed(why)) => {
            exit::say(&format!("error: {why}"));
            exit::FAILED
        }
        Ended::Stopped => {
            exit::say(&format!(
                "the guest did not switch itself off within {GUEST_SHUTDOWN_TIMEOUT}, and was stopped"
            ));
            exit::STOPPED
        }
        Ended::Cut => {
            exit::say("the guest was stopped at once, as was asked");
            exit::STOPPED
        }
    }
}

enum Ended {
    Itself(Ending),
    /// It was asked to, and took too long or was asked again.
    Stopped,
    /// It was not asked.
    Cut,
}

/// A guest that runs, and the one who decides about its life.
struct Guest {
    held: Held,
    processors: Processors,
    endings: mpsc::Receiver<Ending>,
    orders: mpsc::Receiver<Order>,
    /// Rung for each ending and each order.
    bell: Arc<Bell>,
    paused: bool,
    /// When it is stopped if it has not switched itself off.
    stop_at: Option<Instant>,
    /// When its memory was last seen to be there.
    looked_at: Instant,
    /// What was typed and it had no room for yet.
    typed: Vec<u8>,
}

impl Guest {
    fn start(assembled: Assembled, filters: &Filters) -> Result<Self, MachineError> {
        let bell = Arc::new(Bell::new().map_err(system_error("make an event descriptor"))?);
        let (ended, endings) = mpsc::channel();
        let (orders_given, orders) = Orders::new(Arc::clone(&bell));
        let Assembled { held, vcpus, workers, control } = assembled;
        control.start(orders_given, filters).map_err(system_error("start a thread"))?;
        for worker in workers {
            worker.start(filters).map_err(system_error("start a thread"))?;
        }
        let processors = Processors::start(vcpus, (&held.around, filters), &ended, &bell)?;
        let looked_at = Instant::now();
        Ok(Self {
            held,
            processors,
            endings,
            orders,
            bell,
            paused: false,
            stop_at: None,
            looked_at,
            typed: Vec::new(),
        })
    }

    fn listen(&mut self, signals: &UnixStream, mut typing: bool) -> Ended {
        loop {
            let stdin = rustix::stdio::stdin();
            let mut watched = vec![
                PollFd::new(&*self.bell, PollFlags::IN),
                PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            ];
            if typing && self.typed.is_empty() {
                watched.push(PollFd::from_borrowed_fd(stdin, PollFlags::IN));
            }
            let wait = Timespec::try_from(self.may_wait()).expect("seconds");
            match poll(&mut watched, Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Ended::Itself(Ending::Failed(format!("poll: {errno}"))),
            }
            let ready: Vec<bool> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            self.bell.still(); // before looking: what comes later rings again
            if self.stop_at.is_some_and(|at| at <= Instant::now()) {
                return Ended::Stopped;
            }
            self.look_at_memory();
            if poison::is_found() {
                self.processors.kick_first();
            }
            if let Some(ended) = self.decide(if ready[1] { signalled(signals) } else { 0 }) {
                return ended;
            }
            if ready.get(2) == Some(&true) {
                typing = self.hear();
            }
            self.hand_on();
        }
    }

    /// Until the next look at its memory, its end, or another attempt to hand on what was typed.
    fn may_wait(&self) -> Duration {
        let left = self.stop_at.map(|at| at.saturating_duration_since(Instant::now()));
        let look = LOST_SLICE_CHECK_INTERVAL.as_duration().saturating_sub(self.looked_at.elapsed());
        let typed = (!self.typed.is_empty()).then_some(TYPED_AGAIN_EVERY);
        [left, typed].into_iter().flatten().fold(look, Duration::min)
    }

    /// However often it is woken, neither always nor never.
    fn look_at_memory(&mut self) {
        if self.looked_at.elapsed() >= LOST_SLICE_CHECK_INTERVAL.as_duration() {
            lost::end_if_gone();
            self.looked_at = Instant::now();
        }
    }

    /// What becomes of endings, signals and orders.
    fn decide(&mut self, signalled: usize) -> Option<Ended> {
        if let Ok(ending) = self.endings.try_recv() {
            return Some(Ended::Itself(ending));
        }
        if signalled > 1 || signalled > 0 && self.stop_at.is_some() {
            return Some(Ended::Stopped); // asked twice, maybe before this loop saw it once
        }
        if signalled > 0 {
            self.press_power_button();
        }
        while let Ok(Order { wanted, reply }) = self.orders.try_recv() {
            let _ = reply.send(self.follow(wanted)); // whoever asked may have gone
            if wanted == Wanted::End {
                return Some(Ended::Cut);
            }
        }
        None
    }

    fn follow(&mut self, wanted: Wanted) -> Result<State, Refused> {
        match wanted {
            Wanted::State | Wanted::End => {}
            Wanted::Pause => self.pause()?,
            Wanted::Resume => self.resume(),
            Wanted::PowerButton => self.press_power_button(),
        }
        Ok(self.state())
    }

    fn state(&self) -> State {
        match (self.stop_at, self.paused) {
            (Some(_), _) => State::Ending,
            (None, true) => State::Paused,
            (None, false) => State::Running,
        }
    }

    fn pause(&mut self) -> Result<(), Refused> {
        if self.stop_at.is_some() {
            return Err(Refused::Ending);
        }
        self.paused = self.processors.pause();
        if self.paused { Ok(()) } else { Err(Refused::Busy) }
    }

    fn resume(&mut self) {
        self.processors.resume();
        self.paused = false;
    }

    /// A guest that stands still would not see it.
    fn press_power_button(&mut self) {
        self.resume();
        let _ = self.held.power_button.write(1);
        self.stop_at.get_or_insert_with(|| Instant::now() + GUEST_SHUTDOWN_TIMEOUT.as_duration());
    }

    /// Takes what is typed; `false` at the end of input.
    fn hear(&mut self) -> bool {
        let mut bytes = [0; TYPED_BYTES];
        match rustix::io::read(rustix::stdio::stdin(), &mut bytes) {
            Err(Errno::INTR | Errno::AGAIN) => true,
            Ok(0) | Err(_) => false,
            Ok(count) => {
                self.typed.extend_from_slice(&bytes[..count]);
                true
            }
        }
    }

    /// What was typed goes to the guest as far as it has room. The line is not waited for: a processor may hold it for as long
    /// as nobody takes its output.
    fn hand_on(&mut self) {
        if !self.typed.is_empty()
            && let Some(mut serial) = self.held.around.ports.serial_if_free()
        {
            let taken = serial.typed(&self.typed);
            self.typed.drain(..taken);
        }
    }
}

/// Signals that ask for an end, as bytes of a stream.
fn signals() -> io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    read.set_nonblocking(true)?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

/// How many there were since the last look.
fn signalled(mut signals: &UnixStream) -> usize {
    signals.read(&mut [0; 16]).unwrap_or(0)
}

/// Every key goes to the guest, also those that end programs.
fn prepare_terminal() {
    let stdin = rustix::stdio::stdin();
    if let Ok(before) = tcgetattr(stdin) {
        let mut raw = before.clone();
        raw.make_raw();
        raw.output_modes = before.output_modes;
        if tcsetattr(stdin, OptionalActions::Now, &raw).is_ok() {
            exit::restore_terminal_at_end(before);
        }
    }
}
